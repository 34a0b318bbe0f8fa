-- Options of ms.fsdp: what they may be, and the groups of ranks that they represent.
local core = require "moonshard.core"
local compare = require "moonshard.parallel.fsdp.compare"
local listed = require "moonshard.nn.listed"
local options_of = require "moonshard.base.options"
local check, check_group = options_of.check, options_of.check_group
require "moonshard.parallel.group"

local options = {}

-- Whether parameters are sharded, whether over all ranks or within levels of the world, and whether
-- units are resharded after forward.
options.strategies = {
  full_shard = { reshard = true },
  shard_grad_op = { reshard = false },
  no_shard = { whole = true, reshard = false },
  hybrid_shard = { levels = true, reshard = true },
  hybrid_shard_zero2 = { levels = true, reshard = false },
}
local other_names = { zero3 = "full_shard", zero2 = "shard_grad_op" }
options.names_of_strategies = {
  "full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2", "zero3", "zero2",
}

local known = {
  group = "any", strategy = "string", shard_group = "any", replica_group = "any",
  reshard_after_forward = "boolean|integer", wrap = "any", comm_hook = "any", prefetch = "any",
  budget_bytes = "integer", budgets = "table",
  group_of = "function", before_gather = "function", after_gather = "function",
  max_in_flight = "integer", max_in_flight_bytes = "integer",
  max_reductions = "integer", accumulate = "string", layout = "string", find_unused = "boolean",
  divide_factor = "number", ignored = "table", init_sync = "boolean", broadcast_buffers = "boolean",
  precision = "any", keep_low_precision_grads = "boolean", full_precision_eval = "boolean",
  offload = "string", pin = "boolean", dtype = "string",
}
options.known = known

--- The value, which must be one of these.
---@param name string
---@param value string
---@param allowed string[]
---@return string
function options.choice(name, value, allowed)
  for _, one in ipairs(allowed) do if value == one then return value end end
  core.raise(("fsdp: %s = '%s': did you mean '%s'? It is one of %s"):format(name, value,
    core.nearest(value, allowed) or allowed[1], table.concat(allowed, ", ")))
end

--- The strategy by its main name.
---@param o ms.FSDPOptions
---@return string
function options.strategy_of(o)
  local name = o.strategy or "full_shard"
  if name == "zero1" then
    core.raise "fsdp: strategy 'zero1' shards optimizer states only: that is the option \z
      shard = group of an optimizer, on a model of ms.ddp"
  end
  name = other_names[name] or name
  return options.choice("strategy", name, options.names_of_strategies)
end

-- { group, size of a block, the two groups of Group:levels }. Handles of one group are different
-- keys of a table, so this is a list.
local levels = {}

--- As Group:levels, with the same groups each time: a job has room for few, and models that are
--- sharded one after another need no more. All ranks call it in the same order.
---@param group ms.Group
---@param size? integer
---@return ms.Group within, ms.Group across
function options.levels(group, size)
  for _, one in ipairs(levels) do
    if one.group == group and one.size == size then return one.within, one.across end
  end
  local within, across = group:levels(size)
  levels[#levels + 1] = { group = group, size = size, within = within, across = across }
  return within, across
end

-- How many ranks of the group each host has. Shards are over the ranks of a host, so that copies on
-- all hosts have the same shards.
local function ranks_of_a_host(group)
  local counts, differ = {}, false
  for i, ranks in ipairs(group:_hosts()) do
    counts[i] = #ranks
    differ = differ or counts[i] ~= counts[1]
  end
  if differ then
    core.raise(("fsdp: a hybrid strategy shards over the ranks of each host, and the hosts have \z
      different numbers of them (%s): give shard_group and replica_group, such as \z
      group:levels(size)"):format(table.concat(counts, ", ")))
  end
  return counts[1]
end

--- The groups whose ranks share one copy of the parameters, and that hold the same shard.
---@param o ms.FSDPOptions
---@param strategy string
---@param group ms.Group
---@return ms.Group shards
---@return ms.Group? replicas
function options.groups_of(o, strategy, group)
  local how = options.strategies[strategy]
  if not how.levels then
    if o.shard_group or o.replica_group then
      core.raise(("fsdp: shard_group and replica_group belong to hybrid_shard, not to %s")
        :format(strategy))
    end
    if how.whole then return core.alone(), group end
    return group, nil
  end
  if (o.shard_group == nil) ~= (o.replica_group == nil) then
    core.raise "fsdp: shard_group and replica_group are given together, or neither"
  end
  if not o.shard_group then return options.levels(group) end
  if o.shard_group:size() * o.replica_group:size() ~= group:size() then
    core.raise(("fsdp: shard_group (%d ranks) times replica_group (%d) must be the group's %d")
      :format(o.shard_group:size(), o.replica_group:size(), group:size()))
  end
  compare.levels(group, o.shard_group, o.replica_group)
  return o.shard_group, o.replica_group
end

--- How many ranks share one copy.
---@param o ms.FSDPOptions
---@param strategy string
---@param group ms.Group
---@return integer
function options.count_shards(o, strategy, group)
  local how = options.strategies[strategy]
  if how.whole then return 1 end
  if not how.levels then return group:size() end
  return o.shard_group and o.shard_group:size() or ranks_of_a_host(group)
end

--- count: of the ranks that keep parts of a unit between forward and backward, of `size`.
---@param count any
---@param size integer
function options.check_near(count, size)
  local possible = {}
  if math.type(count) ~= "integer" then return end
  for n = 2, size - 1 do if size % n == 0 then possible[#possible + 1] = n end end
  if count > 1 and count < size and size % count == 0 then return end
  core.raise(("fsdp: reshard_after_forward = %d: %d ranks share one copy, and the number must \z
    divide them and be neither 1 nor %d: %s"):format(count, size, size,
    #possible > 0 and table.concat(possible, ", ") or "there is none, use true or false"))
end

-- Raises for a dtype of gathers that there is none of, or that does not fit the other options.
local function check_dtype(o)
  if not o.dtype then return end
  if o.dtype ~= "fp8" then
    core.raise(("fsdp: dtype = '%s': it is 'fp8', in which weights of linear layers then travel. \z
      Without it gathers send the dtype of computing, which precision = { param = ... } sets")
      :format(o.dtype))
  end
  for _, name in ipairs { "before_gather", "after_gather" } do
    if o[name] then
      core.raise(("fsdp: dtype = 'fp8' and %s both say what gathers send: leave one of them out")
        :format(name))
    end
  end
  if options.strategies[options.strategy_of(o)].whole then
    core.raise "fsdp: dtype = 'fp8' is for what is gathered, and under the strategy no_shard \z
      every rank has whole parameters at all times: leave dtype out"
  end
end

---@param given any
---@return ms.FSDPOptions
function options.check(given)
  local o = check("fsdp", given, known)
  for _, name in ipairs { "group", "shard_group", "replica_group" } do
    check_group("fsdp", name, o[name])
  end
  listed.check("fsdp", "ignored", o.ignored)
  if o.offload then options.choice("offload", o.offload, { "cpu" }) end
  if o.pin ~= nil and not o.offload then
    core.raise "fsdp: pin is about offloaded memory: say offload = \"cpu\""
  end
  if o.pin == false and core.device() == "cuda" then
    core.raise "fsdp: pin = false: the GPU's tasks use offloaded memory, which has to be pinned: \z
      leave pin out"
  end
  check_dtype(o)
  if o.accumulate then options.choice("accumulate", o.accumulate, { "local", "shard", "all" }) end
  if o.layout then options.choice("layout", o.layout, { "flat", "rows" }) end
  for _, name in ipairs { "max_in_flight", "max_in_flight_bytes", "max_reductions" } do
    if o[name] and o[name] < 1 then
      core.raise(("fsdp: %s must be 1 or more, not %d"):format(name, o[name]))
    end
  end
  if o.budget_bytes and o.budget_bytes < 1 then
    core.raise(("fsdp: budget_bytes must be 1 or more, not %d"):format(o.budget_bytes))
  end
  local factor = o.divide_factor
  if factor then
    if not (factor > 0 and factor < math.huge) then
      core.raise(("fsdp: divide_factor must be a finite number above 0, not %s"):format(factor))
    end
  end
  return o
end

return options
