-- Run by every rank of kinds_spec.lua: a small GPT that is cut by any kinds of parallelism, against
-- plain_kinds.lua, which each rank computes by itself for the whole batch. Sizes, groups and ways
-- are drawn by a seed; a failure names it.
--     moonshard run tests/dist/kinds.lua -n 4 --thread-ranks cases=tensor+context seed=3
local ms = require "moonshard"
local core = require "moonshard.core"
local folder = debug.getinfo(1, "S").source:match "^@(.*/)"
local expect, plain = dofile(folder .. "expect.lua"), dofile(folder .. "plain_kinds.lua")
local cfg = ms.config {
  cases = { "tensor+context", help = "kinds with + between them; cases with commas" },
  seed  = { 1, help = "the first one" },
  seeds = { 1, help = "so many for each case" },
  what  = { "train", choices = { "train", "refused", "recompute" }, help = "see kinds_spec.lua" },
  folder = { "", help = "also resumes from a checkpoint there" },
  off   = { false, help = "changes a gradient by a hundred-thousandth, which must be found" },
}
local nn, world = ms.nn, ms.world()
local STEPS <const>, LR <const> = 5, 0.1
-- Of the loss, relative; and of gradients and parameters, by the norm of each whole tensor.
local OF_LOSS <const>, OF_NORM <const> = 1e-6, 2e-6

-- Numbers that depend on the seed and the case only.
local function dice(seed, case)
  local state = seed * 7919
  for i = 1, #case do state = state * 31 + case:byte(i) end
  local function draw(from, to)
    state = (state * 6364136223846793005 + 1442695040888963407) & math.maxinteger
    return from + (state >> 20) % (to - from + 1)
  end
  return draw, function(list) return list[draw(1, #list)] end
end

-------------------------------------------------------------------------------- what a case draws

-- How many ranks each kind has: 2, and one of them, by chance, the rest.
local function ranks_of(kinds, one_of)
  local found = { tensor = 1, pipeline = 1, experts = 1, context = 1, data = 1 }
  local rest = ms.world_size()
  local most = one_of(kinds)
  for _, kind in ipairs(kinds) do
    local group = (kind == "ddp" or kind == "fsdp") and "data" or kind
    assert(found[group], "there is no kind " .. kind)
    if kind ~= most then found[group], rest = 2, rest // 2 end
  end
  found[(most == "ddp" or most == "fsdp") and "data" or most] = rest
  local product = 1
  for _, size in pairs(found) do product = product * size end
  assert(product == ms.world_size(), "the kinds do not divide the ranks")
  return found
end

local function sizes_of(case, seed)
  local draw, one_of = dice(seed, case)
  local kinds, is = {}, {}
  for kind in case:gmatch "[^+]+" do kinds[#kinds + 1], is[kind] = kind, true end
  local r = ranks_of(kinds, one_of)
  local s = { ranks = r, is = is, seed = seed, wrap = is.ddp and "ddp" or is.fsdp and "fsdp" }
  s.heads = r.tensor * draw(2, 3)
  s.width = s.heads * 2 * draw(3, 4)
  s.hidden = r.tensor * draw(9, 16)
  s.vocab = draw(9, 14)
  s.length = r.context * draw(3, 5)
  s.rows = draw(1, 2)                               -- of a microbatch on one rank
  s.microbatches = is.pipeline and r.pipeline * draw(1, 2) or draw(1, 3)
  s.schedule, s.each = one_of { "gpipe", "1f1b", "interleaved", "zb_h1", "zbv" }, 1
  if not is.pipeline then s.schedule = "none" end
  if s.schedule == "interleaved" or s.schedule == "zbv" then s.each = 2 end
  s.blocks = math.max(2, r.pipeline * s.each) + (s.each == 1 and draw(0, 1) or 0)
  s.experts = is.experts and r.experts * draw(1, 2) or 0
  s.top = s.experts > 0 and draw(1, 2) or 0
  s.attention = is.context and one_of { "gather", "ring", "zigzag", "ulysses" } or "own"
  -- Of Ulysses the context ranks share the heads, and of zigzag each has two pieces of the times.
  if s.attention == "ulysses" then
    s.heads = r.tensor * r.context
    s.width = s.heads * 6
  elseif s.attention == "zigzag" then s.length = 2 * s.length end
  s.tensor_first = draw(0, 1) == 1
  -- Gradients of what context and experts ranks have alike are summed by hand or by nn.shared. With
  -- ddp and fsdp these sum them, or nn.shared does if there is one such group.
  s.sums = one_of(s.wrap and { "wrapper", "wrapper", "shared" } or { "hand", "shared" })
  local tokens = (is.context and 1 or 0) + (is.experts and 1 or 0)
  if s.wrap and tokens ~= 1 or is.fsdp and is.experts then s.sums = "wrapper" end
  s.strategy = one_of { "full_shard", "shard_grad_op", "no_shard" }
  s.layout = one_of { "flat", "rows" }
  s.units = one_of { "PartBlock", "PartMlp", "none" }
  s.accumulate = one_of { "local", "shard" }
  s.bucket_bytes = one_of { 64, 1 << 20 }
  s.recompute = not s.schedule:find "^zb" and draw(0, 2) == 0
  -- Outside of cut layers activations are cut over times, too. What tensor ranks have alike there
  -- is summed by nn.shared, so nothing else can be.
  s.sequence = is.tensor and not is.experts and draw(0, 1) == 1
  if s.sequence then
    s.length = s.length * r.tensor
    if s.sums == "shared" then s.sums = s.wrap and "wrapper" or "hand" end
  end
  return s
end

local function text_of(s)
  local list = {}
  for key, value in ms.sorted_pairs(s) do
    if type(value) ~= "table" then list[#list + 1] = key .. " " .. tostring(value) end
  end
  for key, value in ms.sorted_pairs(s.ranks) do list[#list + 1] = key .. " ranks " .. value end
  return table.concat(list, ", ")
end

-- replicas: ranks with the same stage and the same part of layers, whatever their tokens are. Of
-- these, each block of `experts` has all experts together, and `holders` have the same ones.
local function groups_of(s)
  local r, g = s.ranks, {}
  local rest
  if s.tensor_first then
    g.tensor, rest = world:levels(r.tensor)
    g.stages, g.replicas = rest:levels(r.pipeline)
  else
    g.stages, rest = world:levels(r.pipeline)
    g.tensor, g.replicas = rest:levels(r.tensor)
  end
  g.experts, g.holders = g.replicas:levels(r.experts)
  g.context, g.data = g.holders:levels(r.context)
  return g
end

----------------------------------------------------------------------------------- the cut model

-- The first of a rank's times, counted from 0: of each of its pieces.
local function pieces_of_times(s, context)
  local size, rank = context:size(), context:rank()
  if s.attention ~= "zigzag" then return { rank * s.length // size } end
  local piece = s.length // (2 * size)
  return { rank * piece, (2 * size - 1 - rank) * piece }
end

-- The classes of one case, its loss, and cut_of(name): how a parameter is cut over tensor ranks.
local function classes_of(s, g)
  local HEAD <const> = s.width // s.heads
  local SHARE <const> = -(-s.vocab // s.ranks.tensor)
  local FIRST_ROW <const> = g.tensor:rank() * SHARE
  -- Of a rank's times: how many there are, and the first; where activations are cut, too, and where
  -- zigzag has two pieces.
  local TIMES <const> = s.length // s.ranks.context
  local FIRST_TIME <const> = g.context:rank() * TIMES
  local PIECES <const> = pieces_of_times(s, g.context)
  local EACH <const> = s.experts // s.ranks.experts
  local FIRST_EXPERT <const> = g.experts:rank() * EACH
  local three <const> = { s.width, s.width, s.width }
  local pad <const> = SHARE * s.ranks.tensor - s.vocab
  local cuts = {
    { "qkv%.weight$", { dim = 1, blocks = three } }, { "qkv%.bias$", { dim = 1, blocks = three } },
    { "joined%.weight$", { dim = 2 } },
    { "up%.weight$", { dim = 1 } }, { "up%.bias$", { dim = 1 } }, { "down%.weight$", { dim = 2 } },
    { "^table%.weight$", { dim = 1, pad = pad } }, { "^head%.weight$", { dim = 1, pad = pad } },
  }
  local function cut_of(name)
    for _, one in ipairs(cuts) do if name:find(one[1]) then return one[2] end end
  end

  local enter = ms.custom {
    forward = function(x) return x end,
    backward = function(d) return g.tensor:all_reduce(d):value() end,
  }
  local sum_of = ms.custom {
    forward = function(x) return g.tensor:all_reduce(x):value() end,
    backward = function(d) return d end,
  }
  local leave = sum_of
  if s.sequence then
    enter = function(x)
      return g.tensor:all_gather(x:transpose(1, 2):contiguous()):value():transpose(1, 2)
    end
    leave = function(x)
      return g.tensor:reduce_scatter(x:transpose(1, 2):contiguous()):value():transpose(1, 2)
    end
  end

  local Mlp = nn.class "PartMlp"
  function Mlp:init()
    self.up, self.down = nn.Linear(s.width, s.hidden), nn.Linear(s.hidden, s.width)
  end
  function Mlp:forward(x)
    local h = enter(x):linear(self.up.weight, self.up.bias):gelu()
    return leave(h:linear(self.down.weight)) + self.down.bias
  end

  -- All ranks' keys or values, [rows, heads, times, width] of this rank's times.
  local function gathered(t)
    local all = g.context:all_gather(t:permute(3, 1, 2, 4):contiguous()):value()
    return all:permute(2, 3, 1, 4)
  end
  local function by_gather(q, k, v)
    return (q:attention(gathered(k), gathered(v), { offset = FIRST_TIME }))
  end
  -- What this rank has goes to the next one.
  local function shift(t)
    local send, receive = {}, {}
    local size, rank = g.context:size(), g.context:rank()
    for of = 0, size - 1 do
      send[of + 1] = of == (rank + 1) % size and t:size(1) or 0
      receive[of + 1] = of == (rank - 1) % size and t:size(1) or 0
    end
    return g.context:all_to_all(t, send, receive):value()
  end
  local function by_ring(q, k, v)
    local size, rank = g.context:size(), g.context:rank()
    local outs, sums, kv = {}, {}, ms.stack { k, v }
    for hop = 0, size - 1 do
      local from = (rank - hop) % size * TIMES
      outs[hop + 1], sums[hop + 1] = q:attention(kv:select(1, 1), kv:select(1, 2),
        { lse = true, offset = FIRST_TIME - from })
      if hop < size - 1 then kv = shift(kv:contiguous()) end
    end
    local all = ms.stack(sums)
    local shares = (all - all:detach():max(1, true)):exp()
    shares = shares / shares:sum(1, true)
    local sum = 0
    for i, out in ipairs(outs) do sum = sum + out * shares:select(1, i):unsqueeze(4) end
    return sum
  end
  -- Keys and values in the order of times. Each piece of queries sees what is before it.
  local function by_zigzag(q, k, v)
    local size, length = s.ranks.context, TIMES // 2
    local outs = {}
    local function ordered(t)
      local all = gathered(t):split(length, 3)
      local list = {}
      for rank = 0, size - 1 do
        list[rank + 1], list[2 * size - rank] = all[2 * rank + 1], all[2 * rank + 2]
      end
      return ms.cat(list, 3)
    end
    k, v = ordered(k), ordered(v)
    for i, first in ipairs(PIECES) do
      outs[i] = q:narrow(3, (i - 1) * length + 1, length):attention(k, v, { offset = first })
    end
    return ms.cat(outs, 3)
  end
  -- Heads are cut instead of times, and back.
  local function by_ulysses(q, k, v)
    local size = s.ranks.context
    local function exchange(t) -- the first dimension is cut, and the results are stacked
      local shape = t:shape()
      local sizes = {}
      for i = 1, size do sizes[i] = shape[1] // size end
      return g.context:all_to_all(t:contiguous(), sizes, sizes):value()
        :view(size, shape[1] // size, shape[2], shape[3], shape[4])
    end
    -- [rows, heads, times, width] of own times; [rows, own heads, all times, width] and back.
    local function to_heads(t)
      local all = exchange(t:permute(2, 1, 3, 4))      -- [size, own heads, rows, times, width]
      return all:permute(3, 2, 1, 4, 5):reshape(t:size(1), t:size(2) // size, s.length, t:size(4))
    end
    local function to_times(t)
      local all = exchange(t:permute(3, 1, 2, 4))      -- [size, times, rows, own heads, width]
      return all:permute(3, 1, 4, 2, 5):reshape(t:size(1), t:size(2) * size, TIMES, t:size(4))
    end
    return to_times((to_heads(q):attention(to_heads(k), to_heads(v))))
  end
  local attend = ({
    own = function(q, k, v) return (q:attention(k, v)) end, gather = by_gather, ring = by_ring,
    zigzag = by_zigzag, ulysses = by_ulysses,
  })[s.attention]

  local Block = nn.class "PartBlock"
  function Block:init()
    self.norm_1, self.norm_2 = nn.LayerNorm(s.width), nn.LayerNorm(s.width)
    self.qkv, self.joined = nn.Linear(s.width, 3 * s.width), nn.Linear(s.width, s.width)
    if s.experts == 0 then
      self.mlp = Mlp()
      return
    end
    self.router, self.experts = nn.Linear(s.width, s.experts, { bias = false }), nn.List {}
    for i = 1, s.experts do
      local one = Mlp()                             -- all are made: each has its values
      if i > FIRST_EXPERT and i <= FIRST_EXPERT + EACH then self.experts[i] = one end
    end
    if s.wrap ~= "fsdp" then nn.owned(self.experts, g.experts) end -- group_of says it to fsdp
  end

  function Block:attention(x)
    local rows = x:size(1)
    local qkv = enter(x):linear(self.qkv.weight, self.qkv.bias):chunk(3, 3)
    for i = 1, 3 do qkv[i] = qkv[i]:reshape(rows, TIMES, -1, HEAD):transpose(2, 3) end
    local out = attend(qkv[1], qkv[2], qkv[3]):transpose(2, 3):reshape(rows, TIMES, -1)
    return leave(out:linear(self.joined.weight)) + self.joined.bias
  end

  -- Tokens go to the ranks of their experts, and back. send: how many go to each expert; receive:
  -- how many come from each rank for each expert of this one.
  function Block:through(rows, send, receive)
    local out, back = {}, {}
    for r = 1, g.experts:size() do
      out[r], back[r] = 0, 0
      for i = (r - 1) * EACH + 1, r * EACH do
        out[r], back[r] = out[r] + send[i], back[r] + receive[i]
      end
    end
    local pieces = g.experts:all_to_all(rows, out, back):value():split(receive, 1)
    for i = 1, EACH do
      local own, sizes = {}, {}
      for r = 1, g.experts:size() do
        own[r], sizes[r] = pieces[(r - 1) * EACH + i], receive[(r - 1) * EACH + i]
      end
      own = self.experts[FIRST_EXPERT + i](ms.cat(own, 1)):split(sizes, 1)
      for r = 1, g.experts:size() do pieces[(r - 1) * EACH + i] = own[r] end
    end
    return g.experts:all_to_all(ms.cat(pieces, 1), back, out):value()
  end
  function Block:mixture(x)
    local shape = x:shape()
    x = x:reshape(-1, s.width)
    local count = x:size(1)
    local gates, chosen = self.router(x):softmax():topk(s.top)
    if s.top > 1 then gates = gates / gates:sum(2, true) end
    chosen, gates = chosen:t():reshape(-1), gates:t():reshape(-1)
    local counts, _, order = chosen:one_hot(s.experts):sum(1), chosen:sort()
    local send, receive = counts:to_table(), g.experts:all_to_all(counts):value():to_table()
    local token = ms.arange(0, count - 1):unsqueeze(1):expand(s.top, count):reshape(-1)
      :index_select(1, order)
    local y = self:through(x:index_select(1, token), send, receive)
    y = y * gates:index_select(1, order):unsqueeze(2)
    local index = token:unsqueeze(2):expand(y:size(1), s.width):contiguous()
    return ms.zeros({ count, s.width }):scatter_add(1, index, y):view(table.unpack(shape))
  end

  function Block:forward(x)
    x = x + self:attention(self.norm_1(x))
    local y = self.norm_2(x)
    return x + (s.experts > 0 and self:mixture(y) or self.mlp(y))
  end

  local Whole = nn.class "PartNet"
  function Whole:init()
    self.table, self.places = nn.Embedding(s.vocab, s.width), nn.Embedding(s.length, s.width)
    self.blocks = nn.List {}
    for i = 1, s.blocks do self.blocks[i] = Block() end
    self.norm, self.head = nn.LayerNorm(s.width), nn.Linear(s.width, s.vocab, { bias = false })
  end

  -- Each rank has the rows of some tokens, in the table as in the head.
  local function own_row(ids)
    local row = ids - FIRST_ROW
    local inside = row:clamp(0, SHARE - 1)
    return inside, inside:eq(row)
  end
  -- The rows of this rank's times, or where activations are cut of its part of them.
  local function places(weight)
    local list = {}
    for i, first in ipairs(PIECES) do list[i] = weight:narrow(1, first + 1, TIMES // #PIECES) end
    weight = ms.cat(list, 1)
    if not s.sequence then return weight end
    local part = TIMES // s.ranks.tensor
    return weight:narrow(1, g.tensor:rank() * part + 1, part)
  end
  local Chunk = nn.class "PartChunk"
  function Chunk:init(whole, number)
    local all = s.ranks.pipeline * s.each
    self.first, self.last = number * s.blocks // all + 1, (number + 1) * s.blocks // all
    if number == 0 then self.table, self.places = whole.table, whole.places end
    self.blocks = nn.List {}
    for i = self.first, self.last do self.blocks[i] = whole.blocks[i] end
    if number == all - 1 then self.norm, self.head = whole.norm, whole.head end
  end
  function Chunk:forward(x)
    if self.table then
      local row, is_own = own_row(x)
      x = leave(ms.where(is_own:unsqueeze(3), row:embedding(self.table.weight), 0))
      x = x + places(self.places.weight)
    end
    for i = self.first, self.last do
      if s.recompute then x = ms.recompute(self.blocks[i], x) else x = self.blocks[i](x) end
    end
    return self.head and enter(self.norm(x)):linear(self.head.weight) or x
  end

  -- The mean over this rank's targets; logits are those of this rank's rows of the head.
  local function loss_of(logits, targets)
    local real = math.max(0, math.min(SHARE, s.vocab - FIRST_ROW))
    if real < SHARE then
      logits = logits:masked_fill(ms.arange(0, SHARE - 1):ge(real), -math.huge)
    end
    local top = ms.no_grad(function()
      return g.tensor:all_reduce(logits:max(3, true), "max"):value()
    end)
    logits = logits - top
    local sum = sum_of(logits:exp():sum(3))
    local column, is_own = own_row(targets)
    local own = logits:gather(3, column:unsqueeze(3)):squeeze(3)
    return (sum:log() - sum_of(ms.where(is_own, own, 0))):mean()
  end
  return { Whole = Whole, Chunk = Chunk, loss_of = loss_of, cut_of = cut_of }
end

-- This rank's part of a whole tensor that is cut over the tensor group.
local function part_of(t, how, group)
  if how.pad and how.pad > 0 then t = ms.cat({ t, ms.zeros { how.pad, t:size(2) } }, 1) end
  local list, from = {}, 0
  for i, size in ipairs(how.blocks or { t:size(how.dim) }) do
    local own = size // group:size()
    list[i] = t:narrow(how.dim, from + group:rank() * own + 1, own)
    from = from + size
  end
  return ms.cat(list, how.dim)
end

---------------------------------------------------------------------------------------- one case

local function is_expert(name) return name:find "%.experts%." ~= nil end

-- What this rank has of the model: its chunks, a module with the parts of all, and functions.
local function cut_model(s, g)
  local c = classes_of(s, g)
  ms.seed(s.seed)
  local whole = ms.device("meta", function() return c.Whole() end)
  local chunks = {}
  for round = 1, s.each do
    local number = (round - 1) * s.ranks.pipeline + g.stages:rank()
    if s.schedule == "zbv" and round == 2 then        -- a V: the last rank has the middle
      number = 2 * s.ranks.pipeline - 1 - g.stages:rank()
    end
    chunks[round] = c.Chunk(whole, number)
  end
  local Own = nn.class "PartOwn"
  local own = Own()
  own.blocks = nn.List {}
  for _, chunk in ipairs(chunks) do
    for _, name in ipairs { "table", "places", "norm", "head" } do
      own[name] = chunk[name] or own[name]
    end
    for i = chunk.first, chunk.last do own.blocks[i] = chunk.blocks[i] end
  end
  for _, item in ipairs(own:named_parameters()) do
    local cut = c.cut_of(item.name)
    if cut and g.tensor:size() > 1 then
      nn.split(item.parameter, g.tensor, {
        dim = cut.dim, blocks = cut.blocks, pad = cut.pad, whole = true,
      })
    end
  end
  -- The group over which nn.shared sums what ranks with other tokens have alike.
  local shared = s.sums == "shared" and (s.wrap and (s.is.context and g.context or g.experts)
    or g.replicas) or nil
  if shared and shared:size() > 1 then
    for _, item in ipairs(own:named_parameters()) do
      if not is_expert(item.name) then nn.shared(item.parameter, shared)
      elseif not s.wrap and g.holders:size() > 1 then nn.shared(item.parameter, g.holders) end
    end
  end
  if s.sequence and g.tensor:size() > 1 then
    for _, item in ipairs(own:named_parameters()) do
      if not c.cut_of(item.name) then nn.shared(item.parameter, g.tensor) end
    end
  end
  if g.stages:size() > 1 then nn.owned(own, g.stages, { values = "kept" }) end

  local over = s.sums == "wrapper" and g.replicas or g.data
  for i, chunk in ipairs(chunks) do
    if s.wrap == "ddp" then
      chunks[i] = ms.ddp(chunk, {
        group = over, bucket_bytes = s.bucket_bytes,
        ignored = s.experts > 0 and s.sums == "wrapper" and { ".*%.experts%..*" } or nil,
      })
    elseif s.wrap == "fsdp" then
      chunks[i] = ms.fsdp(chunk, {
        group = over, strategy = s.strategy, layout = s.layout, accumulate = s.accumulate,
        wrap = s.units ~= "none" and { class = s.units } or nil,
        group_of = s.experts > 0 and function(name)
          return is_expert(name) and g.holders or nil
        end or nil,
      })
    else chunk:materialize() end
  end
  local m = { chunks = chunks, own = own, cut_of = c.cut_of }

  -- After backward: means over ranks with other tokens that no wrapper makes.
  function m.reduce()
    local sent, factor = {}, { premul_sum = 1 / g.replicas:size() }
    for _, item in ipairs(own:named_parameters()) do
      local grad, experts = item.parameter:grad(), is_expert(item.name)
      if s.sums == "hand" or s.wrap == "ddp" and s.sums == "wrapper" and experts then
        sent[#sent + 1] = (experts and g.holders or g.replicas):all_reduce(grad, factor)
      end
    end
    if #sent > 0 then ms.all(sent):value() end
  end
  -- Where gradients are summed, each rank's loss is a part of the mean.
  m.scale = shared and 1 / shared:size() or 1
  function m.loss_of(logits, y) return c.loss_of(logits, y) * m.scale end
  return m
end

-- Calls f(name, value, gradient) for each parameter of this rank.
local function each_parameter(s, m, f)
  for _, chunk in ipairs(m.chunks) do
    local function visit(object)
      for _, item in ipairs(object:named_parameters()) do
        f(item.name, item.parameter:detach(), item.parameter:grad())
      end
    end
    if s.wrap == "fsdp" then
      chunk:summon({ grads = true, writeback = false }, function() visit(chunk.module) end)
    else visit(chunk.module or chunk) end
  end
end

-- Compares this rank's tensors with those of the whole model; all ranks do so together, and each
-- raises what any of them has found. pick: what of a parameter is compared.
local function compare(s, g, m, whole, what, pick)
  local items, offs, seen = whole:named_parameters(), {}, {}
  local place = {}
  for i, item in ipairs(items) do place[item.name], offs[i], seen[i] = i, 0, 0 end
  each_parameter(s, m, function(name, value, gradient)
    local i = assert(place[name], name)
    local own = pick(value, gradient)
    local other = pick(items[i].parameter:detach(), items[i].parameter:grad())
    assert(own, ("rank %d: %s of %s: there is none"):format(ms.rank(), what, name))
    local cut, share = m.cut_of(name), g.tensor:size()
    if cut then other, share = part_of(other, cut, g.tensor), 1 end
    offs[i], seen[i] = (own - other):square():sum():item() / share, 1
    assert(offs[i] == offs[i], ("rank %d: %s of %s has a nan"):format(ms.rank(), what, name))
  end)
  local all = g.tensor:all_reduce(ms.tensor(offs)):value()
  all = world:all_reduce(ms.stack { all, ms.tensor(seen):to "f32" }, "max"):value():to_table()
  for i, item in ipairs(items) do
    local norm = pick(item.parameter:detach(), item.parameter:grad()):norm():item()
    local off = math.sqrt(all[1][i])
    assert(all[2][i] == 1, ("%s of %s: no rank has it"):format(what, item.name))
    assert(off <= OF_NORM * norm, ("%s of %s is off by %.3g of its norm, %.3g"):format(what,
      item.name, off / norm, norm))
  end
end

-- What has the state of the whole model: the sharded model, if there is one, and it is all of it.
local function saved_of(s, m)
  return s.wrap == "fsdp" and s.each == 1 and m.chunks[1] or m.own
end

-- Rank 0 gets the whole model, of what all ranks have.
local function check_state(s, m, whole)
  local state = saved_of(s, m):state()
  for _, item in ipairs(ms.rank() == 0 and whole:named_parameters() or {}) do
    local value, other = state[item.name], item.parameter:detach()
    assert(value, item.name .. " is not in the state")
    local off, norm = (value - other):norm():item(), other:norm():item()
    assert(off <= OF_NORM * norm, ("%s is off by %.3g of its norm in the state"):format(item.name,
      off / norm))
  end
  world:barrier()
end

local saves = 0
local function train(s)
  local g = groups_of(s)
  ms.seed(s.seed)
  local whole = plain(s)
  local m = cut_model(s, g)
  compare(s, g, m, whole, "the first value", function(value) return value end)
  local optimizers = { ms.optim.sgd(whole, { lr = LR }), ms.optim.sgd(m.own, { lr = LR }) }

  -- Rows are cut over experts and data ranks, times over context ranks.
  local share = s.rows * s.microbatches
  local rows = share * s.ranks.experts * s.ranks.data
  local at = g.experts:rank() * s.ranks.data + g.data:rank()
  local firsts = pieces_of_times(s, g.context)
  local times = s.length // s.ranks.context // #firsts
  local function own(t)
    local list = {}
    for i, first in ipairs(firsts) do
      list[i] = t:narrow(1, at * share + 1, share):narrow(2, first + 1, times)
    end
    return ms.cat(list, 2)
  end
  local function micro(t, i, count)
    local size = t:size(1) // count
    return t:narrow(1, (i - 1) * size + 1, size)
  end
  local function batch(step)
    local function ids(number)
      return ms.randint { rows, s.length, high = s.vocab, seed = 1000 * s.seed + 2 * step + number }
    end
    return ids(0), ids(1)
  end
  -- The gradients of the plain model for one batch, and its loss.
  local function plain_loss(x, y)
    local expected, count = 0, s.microbatches
    for i = 1, count do
      local loss = whole(micro(x, i, count), micro(y, i, count)) / count
      loss:backward()
      expected = expected + loss:item()
    end
    return expected
  end
  -- The same of a cut model.
  local function cut_loss(m, x, y) -- luacheck: ignore 431
    x, y = own(x), own(y)
    m.pipe = m.pipe or s.is.pipeline and ms.pipeline {
      chunks = m.chunks, group = g.stages, schedule = s.schedule, microbatches = s.microbatches,
      loss = m.loss_of, data = g.replicas,
    }
    if m.pipe then return m.pipe:step(x, y):item() / m.scale end
    local total, count = ms.zeros {}, s.microbatches
    local model = m.chunks[1]
    model:accumulate(count, function(i)
      local loss = m.loss_of(model(micro(x, i, count)), micro(y, i, count)) / count
      loss:backward()
      total = total + loss:detach()
    end)
    return world:all_reduce(total / m.scale, "avg"):value():item()
  end
  for step in ms.steps(STEPS) do
    local x, y = batch(step)
    local loss, expected = cut_loss(m, x, y), plain_loss(x, y)
    assert(math.abs(loss / expected - 1) <= OF_LOSS, ("step %d: the loss is %.9g, not %.9g"):format(
      step, loss, expected))
    m.reduce()
    if cfg.off then m.own:parameters()[1]:grad():mul_(1 + 1e-5) end
    -- Clipping sums what is shared, and sees the whole model.
    local norm, other = m.own:clip_grad_norm(1e9):item(), whole:clip_grad_norm(1e9):item()
    compare(s, g, m, whole, ("step %d: the gradient"):format(step), function(_, grad)
      return grad
    end)
    assert(math.abs(norm / other - 1) <= OF_NORM, ("step %d: the norm is %.9g, not %.9g"):format(
      step, norm, other))
    for _, optimizer in ipairs(optimizers) do
      optimizer:step()
      optimizer:zero_grad()
    end
  end
  compare(s, g, m, whole, "the last value", function(value) return value end)
  check_state(s, m, whole)
  if cfg.folder == "" then return end

  -- A checkpoint of the model and of an optimizer with states: the steps after it have the same
  -- bits with another model, whose own values are lost. Its file is that of the plain model.
  local function adamw(of) return ms.optim.adamw(of.own, { lr = LR / 10, weight_decay = 0.1 }) end
  local function go(of, optimizer, first, last) -- luacheck: ignore 431
    local list = {}
    for step = first, last do
      list[#list + 1] = cut_loss(of, batch(step))
      of.reduce()
      list[#list + 1] = of.own:clip_grad_norm(0.5):item()
      optimizer:step()
      optimizer:zero_grad()
    end
    return list
  end
  local function pieces_of(of)
    local list = {}
    for name, one in pairs(saved_of(s, of):state { kind = "sharded" }) do
      list[name] = core.is_tensor(one) and one or one.tensor
    end
    return list
  end
  local optimizer = adamw(m)
  go(m, optimizer, STEPS, STEPS + 1)
  saves = saves + 1
  local run = cfg.folder .. "/" .. saves
  local path = assert(ms.checkpoint.save(run, { model = saved_of(s, m), optimizer = optimizer }))
  ms.checkpoint.wait()
  assert(saved_of(s, m):save(run .. "/model.safetensors"))
  local state = saved_of(s, m):state()
  if world:rank() == 0 then
    assert(whole:load(run .. "/model.safetensors"))
    expect.same(state, whole:state())
  end
  local numbers, later = go(m, optimizer, STEPS + 2, STEPS + 3), pieces_of(m)
  local again = cut_model(s, g)
  optimizer = adamw(again)
  for _, p in ipairs(again.own:parameters()) do ms.no_grad(function() p:fill_(0.125) end) end
  assert(ms.checkpoint.load(path, { model = saved_of(s, again), optimizer = optimizer }))
  for i, number in ipairs(go(again, optimizer, STEPS + 2, STEPS + 3)) do
    assert(number == numbers[i], ("number %d after the checkpoint is %.9g, not %.9g"):format(i,
      number, numbers[i]))
  end
  if next(later) then expect.same(pieces_of(again), later) end
end

local what = {}
function what.train()
  for case in cfg.cases:gmatch "[^,]+" do
    for seed = cfg.seed, cfg.seed + cfg.seeds - 1 do
      local drawn = ""
      local ok, message = xpcall(function()
        local s = sizes_of(case, seed)
        drawn = text_of(s)
        train(s)
      end, debug.traceback)
      if not ok then
        error(("%s fails with seed %d on %d ranks: %s\n%s\nagain: moonshard run \z
          tests/dist/kinds.lua -n %d --thread-ranks cases=%s seed=%d"):format(case, seed,
          ms.world_size(), message, drawn, ms.world_size(), case, seed), 0)
      end
      if ms.rank() == 0 then print(("%s, seed %d: %s"):format(case, seed, drawn)) end
    end
  end
end

-- One reduction of gradients is enough; and what else does not go together.
function what.refused()
  local function net() return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) end
  expect.fails(function() ms.fsdp(ms.ddp(net())) end,
    "fsdp: this model is wrapped in ddp; unwrap() it first")
  expect.fails(function() ms.ddp(ms.fsdp(net())) end,
    "ddp: this model is sharded by fsdp, which reduces its gradients: use it as it is")
  local model = net() -- also where a part has been wrapped
  ms.fsdp(model[2])
  expect.fails(function() ms.ddp(model) end,
    "ddp: this model is sharded by fsdp, which reduces its gradients: use it as it is")
  model = net()
  local part = ms.ddp(model[2])
  expect.fails(function() ms.fsdp(model) end,
    "fsdp: the gradient of '1.weight' is reduced by ddp already: unwrap() that model first")
  model[2] = part
  expect.fails(function() ms.fsdp(model) end, "1.weight' is reduced by ddp already")
  model[2] = part:unwrap()
  ms.fsdp(model)
  -- group_of tells fsdp what nn.owned tells others.
  local list = nn.List {}
  list[ms.rank() + 1] = nn.Linear(4, 4)
  nn.owned(list, world)
  expect.fails(function() ms.fsdp(list, { group_of = function() return nil end }) end,
    "is owned over ranks that are among these", "ignored")
end

-- Ends with an error: zb_h1 runs the backward of a chunk in two parts, and ms.recompute serves one.
function what.recompute()
  local Again = nn.class "Again"
  function Again:init() self.inner = nn.Linear(4, 4) end
  function Again:forward(x) return ms.recompute(self.inner, x) end
  local pipe = ms.pipeline { chunks = Again(), microbatches = 4, schedule = "zb_h1" }
  pipe:step(ms.ones { 4, 4 }, ms.tensor { 0, 1, 2, 3 })
end

what[cfg.what]()
print(("rank %d is done"):format(ms.rank()))
