-- fsdp:join: ranks with different numbers of inputs. The parameters of a rank without inputs left
-- are needed by the others, and its shards must be stepped as theirs are. So it takes part in their
-- gathers and reductions (engine/fsdp/lockstep.c), and repeats what they do to shards between
-- passes: clipping, steps, zero_grad. These are calls; a rank with inputs describes each to the
-- others.
local core = require "moonshard.core"
local uneven = require "moonshard.parallel.uneven"
local ownership = require "moonshard.base.ownership"

local join = {}

--- A join that runs, of a sharded model.
---@class ms.ShardedJoining
---@field stop? boolean all ranks raise when the first has no inputs left
---@field following? boolean this rank has no inputs left

-- Numbers of calls: before a forward, if ranks stop when the first has no inputs left; all others.
local BEGIN <const>, DESCRIBED <const> = 0, 1

-- Name of a call -> function(s, words): what a rank without inputs left does.
local known = {}
-- How many joins run: most steps are outside of any.
local running = 0

--- Says what ranks without inputs left do in a call of this name.
---@param name string
---@param follow fun(s: ms.FSDPState, words: table)
function join.define(name, follow) known[name] = follow end

--- The sharded model of these parameters whose join runs, if this rank has inputs left.
---@param what string for messages
---@param params ms.Parameter[]
---@return ms.FSDPState?
function join.of(what, params)
  if running == 0 then return nil end
  local sharded, found = ownership.sharded, nil
  for _, p in ipairs(params) do
    local s = sharded[p] and sharded[p].model
    if s and s.joining and s ~= found then
      if found then
        core.raise(what .. ": parameters of two sharded models whose joins run: use one join")
      end
      found = s
    end
  end
  if found and found.joining.following then return nil end
  return found
end

--- For optimizers: each has a number in a model, which is the same on all ranks, because all ranks
--- make their optimizers in the same order.
---@param s ms.FSDPState
---@param optimizer ms.Optimizer
function join.add_optimizer(s, optimizer)
  if s.numbers[optimizer] then return end
  s.optimizer_count = s.optimizer_count + 1
  s.optimizers[s.optimizer_count], s.numbers[optimizer] = optimizer, s.optimizer_count
end

--- The optimizer steps no parameter of the model any more.
---@param s ms.FSDPState
---@param optimizer ms.Optimizer
function join.remove_optimizer(s, optimizer)
  local number = s.numbers[optimizer]
  if not number then return end
  s.optimizers[number], s.numbers[optimizer] = nil, nil
end

function join.number_of(s, optimizer) return s.numbers[optimizer] end

--- Names of those of the parameters that are the model's; nil represents all.
---@param s ms.FSDPState
---@param params ms.Parameter[]
---@return string[]?
function join.names_of(s, params)
  local wanted, names, all = {}, {}, true
  for _, p in ipairs(params) do wanted[p] = true end
  for _, unit in ipairs(s.units) do
    for i, p in ipairs(unit.parameters) do
      if wanted[p] then names[#names + 1] = unit.names[i] else all = false end
    end
  end
  return not all and names or nil
end

---@param s ms.FSDPState
---@param names string[]?
---@return ms.Parameter[]
function join.parameters_of(s, names)
  local wanted, list = {}, {}
  for _, name in ipairs(names or {}) do wanted[name] = true end
  for _, unit in ipairs(s.units) do
    for i, p in ipairs(unit.parameters) do
      if not names or wanted[unit.names[i]] then list[#list + 1] = p end
    end
  end
  return list
end

-- All ranks take part: those with inputs compare the description with their own.
local function describe(s, words, first)
  local text = core.json_encode(uneven.coded(words))
  local all = s.group:_share("all_gather", "i64", { core.hash(text) & math.maxinteger }, "join")
  if s.group:rank() ~= first then text = "" end
  s.group:_share_text(text, first, "join")
  local mine = all[s.group:rank() + 1]
  if mine ~= all[first + 1] then
    core.raise(("join: ranks %d and %d do different things: clipping, steps and zero_grad are the \z
      same on all ranks that have inputs, also in their numbers"):format(s.group:rank(), first))
  end
end

-- The description, for a rank without inputs left.
local function described(s, first)
  s.group:_share("all_gather", "i64", { 0 }, "join")
  return uneven.decoded(core.json_decode(s.group:_share_text("", first, "join")))
end

--- Before this rank does to its shards what ranks without inputs left must do too. Returns the rank
--- that sends them tensors, if the call has some.
---@param s ms.FSDPState
---@param words table with the name of the call
---@return integer first
---@return boolean absent whether there are such ranks
function join.announce(s, words)
  local live, first = s.sharded:call(DESCRIBED)
  local absent = live < s.group:size()
  if absent then describe(s, words, first) end
  return first, absent
end

local function raise_stopped(s, rank)
  s.joining.stopped = true
  core.raise(("join: rank %d has no inputs left (stop = true)"):format(rank))
end

--- Before the forward of a pass, on a rank with inputs. Returns the lowest of these ranks, where
--- buffers are synchronized.
---@param s ms.FSDPState
---@return integer?
function join.before_forward(s)
  if s.joining.stop then
    local live, _, absent = s.sharded:call(BEGIN)
    if live < s.group:size() then raise_stopped(s, absent) end
  end
  if s.options.broadcast_buffers and core.is_recording() then
    return (join.announce(s, { call = "buffers" }))
  end
end

-- Takes part until no rank has inputs left.
local function follow(s)
  s.joining.following = true
  while true do
    local number, first, absent = s.sharded:follow()
    if not number then return end
    if number == BEGIN then raise_stopped(s, absent) end
    local words = described(s, first)
    words.first = first
    known[words.call](s, words)
  end
end

local function compare(s, o)
  local own = (o.divisor == "live" and 1 or 0) + (o.stop and 2 or 0)
  for rank, other in ipairs(s.group:_share("all_gather", "i32", { own }, "join")) do
    if other ~= own then
      core.raise(("join: ranks %d and %d were given different options")
        :format(s.group:rank(), rank - 1))
    end
  end
end

local function leave(s, failure)
  if s.sharded then s.sharded:joining(false, false) end
  running = running - 1
  local j = s.joining
  s.joining = nil
  -- If this rank left silently, the other ranks would wait for it.
  if failure ~= nil and not j.stopped and s.group:size() > 1 then
    core.comm_leave("join: " .. tostring(failure))
  end
end

--- Runs f, with this rank's inputs; then takes part with zeros until all ranks have run out of
--- inputs.
---@param s ms.FSDPState
---@param options { divisor?: "all"|"live", stop?: boolean }
---@param f function
---@return any ... what f returned
function join.run(s, options, f)
  local o = uneven.check(options, f)
  if s.joining then core.raise "join: one is running already" end
  if o.divisor == "live" and s.options.divide_factor then
    core.raise "join: divisor = \"live\" and the model's divide_factor both say what gradients \z
      are divided by: leave out one"
  end
  compare(s, o)
  s.joining = { stop = o.stop }
  running = running + 1
  s.sharded:joining(true, o.divisor == "live")
  local scope <close> = setmetatable({}, { -- luacheck: ignore scope
    __close = function(_, failure) leave(s, failure) end,
  })
  local results = table.pack(f())
  follow(s)
  uneven.align_steps(s.group)
  return table.unpack(results, 1, results.n)
end

return join
