-- Process groups: collectives on tensors of any shape, as futures.
local core = require "moonshard.core"
local future = require "moonshard.parallel.future"
local options_of = require "moonshard.base.options"

local group = {}

---@class ms.Group
local Group = core.group_methods

-- Enqueues a collective and returns the future of its result. source: the tensor on which the
-- result depends, if gradients are recorded.
local function run(self, kind, t, out, value, more, source)
  local stream = self:_enqueue(kind, t, out, more.op, more.root, more.counts, more.receive,
    more.label, source)
  return future.new(value, stream)
end

local function check(t, what)
  if not core.is_tensor(t) then
    core.raise(("%s: a tensor is expected, not %s"):format(what, type(t)))
  end
end

-- The number of elements of one row, that is, of one position along dimension 1.
local function row_of(t, what)
  if t:dim() == 0 then
    core.raise(what .. ": a number has no dimension 1 to cut or join along: use view(1)")
  end
  local elements = 1
  local shape = t:shape()
  for i = 2, #shape do elements = elements * shape[i] end
  return elements, shape
end

-- Checks counts of rows; returns them as counts of elements, and their sum in rows.
local function elements_of(self, counts, row, what)
  if type(counts) ~= "table" or #counts ~= self:size() then
    core.raise(("%s: counts must be a list of %d numbers of rows, one for each rank")
      :format(what, self:size()))
  end
  local elements, sum = {}, 0
  for i, count in ipairs(counts) do
    if math.type(count) ~= "integer" or count < 0 then
      core.raise(("%s: counts[%d] must be a whole number of 0 or more, not %s")
        :format(what, i, tostring(count)))
    end
    elements[i], sum = count * row, sum + count
  end
  return elements, sum
end

-- The number of rows of each rank's part if `rows` rows are cut into equal parts.
local function equal_part(self, rows, what)
  local size = self:size()
  if rows % size ~= 0 then
    core.raise(
      ("%s: %d rows do not divide by %d ranks: use pad_to(%d) on a flat tensor, or give counts")
        :format(what, rows, size, size))
  end
  return rows // size
end

-- A new tensor like t with another number of rows, made on the collective's stream.
local function rows_like(self, t, shape, rows)
  local wanted = { rows, dtype = t:dtype() }
  for i = 2, #shape do wanted[i] = shape[i] end
  local out
  self:_stream():run(function() out = core.empty(wanted) end)
  return out
end

local function unrecorded(t) return core.no_grad(function() return t:contiguous() end) end

-- Runs an operation that writes t. If t is not contiguous, it runs on a contiguous copy, which is
-- copied back. If the operation is recorded for backward, t is not written: the value is then a new
-- tensor.
local function in_place(self, kind, t, more)
  check(t, kind)
  if core.is_recording() and t:requires_grad() then
    local copy = core.no_grad(function() return t:detach():clone() end)
    return run(self, kind, copy, nil, copy, more, t)
  end
  return core.no_grad(function()
    if t:is_contiguous() then return run(self, kind, t, nil, t, more) end
    local stream = self:_stream()
    local whole = t:contiguous()
    self:_enqueue(kind, whole, nil, more.op, more.root)
    stream:run(function() t:copy_(whole) end)
    return future.new(t, stream)
  end)
end

-- What is received does not depend on what t was computed from, and nothing flows back to where it
-- came from, nor to where it was sent from.
local function refuse_recorded(what, t)
  if core.is_recording() and t:requires_grad() then
    core.raise(("%s has no gradient, and the tensor requires one: call it inside ms.no_grad, or \z
      with a tensor of its own (t:detach(), ms.empty)"):format(what))
  end
end

local function check_rank(what, name, rank)
  if rank == nil and name == "root" then core.raise(what .. ": which rank is the root?") end
  options_of.argument(what, name, rank, "integer")
end

---@param t ms.Tensor
---@param op? ms.Op
---@return ms.Future
function Group:all_reduce(t, op) return in_place(self, "all_reduce", t, { op = op }) end

---@param t ms.Tensor
---@param root integer
---@param op? ms.Op
---@return ms.Future
function Group:reduce(t, root, op)
  check_rank("reduce", "root", root)
  if self:rank() == root then return in_place(self, "reduce", t, { root = root, op = op }) end
  check(t, "reduce")
  return core.no_grad(function()
    return run(self, "reduce", t:contiguous(), nil, t, { root = root, op = op })
  end)
end

---@param t ms.Tensor
---@param root integer
---@return ms.Future
function Group:broadcast(t, root)
  check_rank("broadcast", "root", root)
  return in_place(self, "broadcast", t, { root = root })
end

---@param t ms.Tensor
---@param op? ms.Op
---@param counts? integer[]
---@return ms.Future
function Group:reduce_scatter(t, op, counts)
  check(t, "reduce_scatter")
  local row, shape = row_of(t, "reduce_scatter")
  local elements, rows
  if counts then
    local sum
    elements, sum = elements_of(self, counts, row, "reduce_scatter")
    if sum ~= shape[1] then
      core.raise(("reduce_scatter: counts add up to %d rows, the tensor has %d")
        :format(sum, shape[1]))
    end
    rows = counts[self:rank() + 1]
  else rows = equal_part(self, shape[1], "reduce_scatter") end
  local out = rows_like(self, t, shape, rows)
  return run(self, "reduce_scatter", unrecorded(t), out, out, { op = op, counts = elements }, t)
end

-- all_gather, and gather on its root.
local function gathered(self, kind, t, counts, root)
  local row, shape = row_of(t, kind)
  local elements, rows
  if counts then
    elements, rows = elements_of(self, counts, row, kind)
    if counts[self:rank() + 1] ~= shape[1] then
      core.raise(("%s: counts say %d rows for rank %d, its tensor has %d")
        :format(kind, counts[self:rank() + 1], self:rank(), shape[1]))
    end
  else rows = shape[1] * self:size() end
  local out = (root == nil or root == self:rank()) and rows_like(self, t, shape, rows) or nil
  return run(self, kind, unrecorded(t), out, out or t, { counts = elements, root = root }, t)
end

---@param t ms.Tensor
---@param counts? integer[]
---@return ms.Future
function Group:all_gather(t, counts)
  check(t, "all_gather")
  return gathered(self, "all_gather", t, counts)
end

---@param t ms.Tensor
---@param root integer
---@param counts? integer[]
---@return ms.Future
function Group:gather(t, root, counts)
  check(t, "gather")
  check_rank("gather", "root", root)
  return gathered(self, "gather", t, counts, root)
end

---@param t ms.Tensor
---@param send? integer[]
---@param receive? integer[]
---@return ms.Future
function Group:all_to_all(t, send, receive)
  check(t, "all_to_all")
  if (send == nil) ~= (receive == nil) then
    core.raise "all_to_all: give the counts of rows for both, send and receive, or for neither"
  end
  local row, shape = row_of(t, "all_to_all")
  local out_elements, in_elements, rows = nil, nil, shape[1]
  if send then
    local sum
    out_elements, sum = elements_of(self, send, row, "all_to_all")
    if sum ~= shape[1] then
      core.raise(("all_to_all: send adds up to %d rows, the tensor has %d"):format(sum, shape[1]))
    end
    in_elements, rows = elements_of(self, receive, row, "all_to_all")
  else equal_part(self, shape[1], "all_to_all") end
  local out = rows_like(self, t, shape, rows)
  return run(self, "all_to_all", unrecorded(t), out, out,
    { counts = out_elements, receive = in_elements }, t)
end

---@param t ms.Tensor
---@param root integer
---@param counts? integer[]
---@return ms.Future
function Group:scatter(t, root, counts)
  check(t, "scatter")
  check_rank("scatter", "root", root)
  refuse_recorded("scatter", t)
  return core.no_grad(function()
    local row, shape = row_of(t, "scatter")
    local elements, sum
    if counts then elements, sum = elements_of(self, counts, row, "scatter") end
    if self:rank() == root then
      if sum and sum ~= shape[1] then
        core.raise(("scatter: counts add up to %d rows, the tensor has %d"):format(sum, shape[1]))
      end
      local out = rows_like(self, t, shape,
        counts and counts[root + 1] or equal_part(self, shape[1], "scatter"))
      return run(self, "scatter", t:contiguous(), out, out, { root = root, counts = elements })
    end
    if counts and counts[self:rank() + 1] ~= shape[1] then
      core.raise(("scatter: counts say %d rows for rank %d, its tensor has %d")
        :format(counts[self:rank() + 1], self:rank(), shape[1]))
    end
    if t:is_contiguous() then
      return run(self, "scatter", nil, t, t, { root = root, counts = elements })
    end
    local whole, stream = t:contiguous(), self:_stream()
    self:_enqueue("scatter", nil, whole, nil, root, elements)
    stream:run(function() t:copy_(whole) end)
    return future.new(t, stream)
  end)
end

-- Reports have room for so many bytes.
local LABEL <const> = 31

-- What send and recv have in common: the options of the call.
local function pair_of(what, t, name, rank, options)
  check(t, what)
  check_rank(what, name, rank)
  refuse_recorded(what, t)
  options = options_of.check(what, options, { label = "string" })
  if options.label and #options.label > LABEL then
    core.raise(("%s: label '%s' has %d bytes, and %d are the most")
      :format(what, options.label, #options.label, LABEL))
  end
  return { root = rank, label = options.label }
end

---@param t ms.Tensor
---@param to integer
---@param options? { label?: string }
---@return ms.Future
function Group:send(t, to, options)
  local call = pair_of("send", t, "to", to, options)
  return core.no_grad(function() return run(self, "send", t:contiguous(), nil, t, call) end)
end

---@param t ms.Tensor
---@param from integer
---@param options? { label?: string }
---@return ms.Future
function Group:recv(t, from, options)
  local call = pair_of("recv", t, "from", from, options)
  return core.no_grad(function()
    if t:is_contiguous() then return run(self, "recv", t, nil, t, call) end
    local whole = t:contiguous()
    local stream = self:_enqueue("recv", whole, nil, nil, from, nil, nil, call.label)
    stream:run(function() t:copy_(whole) end)
    return future.new(t, stream)
  end)
end

--- The ranks of each host, in the order of the hosts' first ranks. One list on one host.
---@return integer[][]
function Group:_hosts()
  local list, by_host = {}, {}
  for rank = 0, self:size() - 1 do
    local host = self:_host(rank)
    if not by_host[host] then
      by_host[host] = {}
      list[#list + 1] = by_host[host]
    end
    table.insert(by_host[host], rank)
  end
  return list
end

-- Consecutive ranks, `size` in each list.
local function blocks_of(all, size)
  local blocks = {}
  if math.type(size) ~= "integer" or size < 1 or all % size ~= 0 then
    core.raise(("levels: %d ranks do not divide into blocks of %s"):format(all, tostring(size)))
  end
  for rank = 0, all - 1 do
    local block = rank // size + 1
    blocks[block] = blocks[block] or {}
    table.insert(blocks[block], rank)
  end
  return blocks
end

---@param size? integer
---@return ms.Group within, ms.Group across
function Group:levels(size)
  local blocks = size == nil and self:_hosts() or blocks_of(self:size(), size)
  local positions = {}
  for _, block in ipairs(blocks) do
    for position, rank in ipairs(block) do
      positions[position] = positions[position] or {}
      table.insert(positions[position], rank)
    end
  end
  return self:split(blocks), self:split(positions)
end

--- The world's numbers of its ranks, in order.
---@return integer[]
function Group:_members()
  local list = {}
  for rank = 0, self:size() - 1 do list[rank + 1] = self:_world_rank(rank) end
  return list
end

--- Exchanges a few numbers of all ranks out of band, over a channel that waits for no computation.
--- Blocks until the other ranks have made the same call. In a group without other
--- ranks the result is that of ranks that all bring these numbers.
---@param form "sum"|"all_gather"
---@param dtype "i32"|"i64"|"f32"
---@param numbers number[] as many on each rank
---@param label string for messages
---@return number[] the sums, or all ranks' numbers rank by rank
function Group:_share(form, dtype, numbers, label)
  local ticket = self:_share_begin(form, dtype, numbers, label)
  return self:_share_end(form, dtype, #numbers, ticket)
end

--- The sum of numbers over all ranks, in f32. Blocks.
---@param numbers number[] as many on each rank
---@param label string for messages
---@return number[]
function Group:_sum(numbers, label)
  return self:size() == 1 and numbers or self:_share("sum", "f32", numbers, label)
end

-- Texts are padded to multiples of this length. In a fake world no rank knows the lengths of the
-- others; with padding, ranks with slightly different texts still make equal calls.
local TEXT_GRAIN <const> = 4096

local function filled(text, length)
  local bytes = (length + TEXT_GRAIN - 1) // TEXT_GRAIN * TEXT_GRAIN
  return text .. ("\0"):rep(bytes - #text), bytes
end

--- One rank's text, on all ranks of the group. Blocks.
---@param text string that rank's text; on other ranks, the text that they would have without it
---@param from integer
---@param label string for messages
---@return string
function Group:_share_text(text, from, label)
  if self:size() == 1 then return text end
  local length = self:_share("all_gather", "i64", { #text }, label)[from + 1]
  local own = self:rank() == from and text or text:sub(1, length)
  return self:_share_bytes("broadcast", filled(own, length), label, from):sub(1, length)
end

--- Each rank's text, rank by rank. Blocks.
---@param text string
---@param label string for messages
---@return string[]
function Group:_share_texts(text, label)
  local lengths, longest, texts = self:_share("all_gather", "i64", { #text }, label), 0, {}
  for _, length in ipairs(lengths) do longest = math.max(longest, length) end
  local own, bytes = filled(text, longest)
  local all = self:_share_bytes("all_gather", own, label)
  for i, length in ipairs(lengths) do
    texts[i] = all:sub((i - 1) * bytes + 1, (i - 1) * bytes + length)
  end
  return texts
end

options_of.methods(Group, "a group", core.is_group, { "levels" })

---@return ms.Group
function group.world() return core.world() end

return group
