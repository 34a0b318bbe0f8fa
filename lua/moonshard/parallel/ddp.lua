-- ms.ddp: a module whose gradients are averaged over ranks while backward still runs.
local alone = require "moonshard.nn.alone"
local buckets = require "moonshard.parallel.ddp.buckets"
local core = require "moonshard.core"
local named = require "moonshard.base.named"
local future = require "moonshard.parallel.future"
local hooks = require "moonshard.hooks"
local layouts = require "moonshard.parallel.ddp.layouts"
local join = require "moonshard.parallel.ddp.join"
local precision = require "moonshard.parallel.ddp.precision"
local delayed = require "moonshard.nn.delayed"
local listed = require "moonshard.nn.listed"
local lora = require "moonshard.nn.lora"
local module = require "moonshard.nn.module"
local nested = require "moonshard.base.tensor_tree"
local overlap = require "moonshard.parallel.overlap"
local replicas = require "moonshard.parallel.replicas"
local statistics = require "moonshard.parallel.statistics"
local structure = require "moonshard.nn.structure"
local watch = require "moonshard.train.watch"
local options_of = require "moonshard.base.options"
local ownership = require "moonshard.base.ownership"
local parts = require "moonshard.nn.parts"
local check, check_group = options_of.check, options_of.check_group
require "moonshard.parallel.group"  -- a link's bucket:group() has its collectives

local ddp = {}

---@class ms.DDP: ms.Module
local DDP = {}

--- The state of a ddp model, kept in its metatable as with modules.
---@class ms.DDPState: ms.GradientSource
---@field wrapped ms.Module
---@field options ms.DDPOptions as they were given
---@field options_bytes? integer[] size limits of buckets, as they were given
---@field names string[] of the trained parameters
---@field delayed integer number of delayed parameters, the last of the trained ones
---@field made integer number of the model among all ddp models, for parallel/ddp/layouts.lua
---@field no_sync boolean inside no_sync
---@field buffers_due boolean the next synchronized forward makes buffers equal
---@field rebuild? boolean rebuild_buckets was called since the last synchronized forward
---@field plan? ms.BucketPlan option buckets
---@field precision? ms.Precision
---@field skipped? table<ms.Parameter, boolean> parameters that keep their dtype
---@field cast_buffers? ms.CastBuffers
---@field structure? integer of names.structure, when the parameters were looked at
---@field own_buffers? table<string, boolean> buffers that a forward of this rank has written

---@param self any
---@return ms.DDPState
local function state_of(self)
  local meta = getmetatable(self)
  if type(meta) ~= "table" or not meta.ddp then
    core.raise("a ddp model is expected, not " .. type(self))
  end
  return meta.ddp
end

local known = {
  "group", "comm_hook", "bucket_bytes", "init_sync", "broadcast_buffers", "buffer_hook", "ignored",
  "buckets", "find_unused", "static_graph", "precision", "delayed",
}
local is_known = {}
for _, name in ipairs(known) do is_known[name] = true end

local function check_options(given)
  local o = check("ddp", given, known)
  if o.buckets ~= nil and o.bucket_bytes ~= nil then
    core.raise "ddp: buckets (a plan) and bucket_bytes both say how large buckets are: give one \z
      of them"
  end
  for _, name in ipairs { "init_sync", "broadcast_buffers", "find_unused", "static_graph" } do
    if o[name] ~= nil and type(o[name]) ~= "boolean" then
      core.raise(("ddp: option %s must be a boolean, not %s"):format(name, type(o[name])))
    end
  end
  for _, name in ipairs { "ignored", "delayed" } do listed.check("ddp", name, o[name]) end
  check_group("ddp", "group", o.group)
  if o.buffer_hook ~= nil and type(o.buffer_hook) ~= "function" then
    core.raise("ddp: buffer_hook must be a function, not " .. type(o.buffer_hook))
  end
  local bytes = o.bucket_bytes
  if type(bytes) == "number" then bytes = { bytes } end
  if bytes ~= nil and (type(bytes) ~= "table" or #bytes == 0) then
    core.raise "ddp: bucket_bytes is a number of bytes, or a list of them"
  end
  local whole = bytes and {}
  for i, count in ipairs(bytes or {}) do
    whole[i] = math.tointeger(count)                         -- 25e6 is a number of bytes, too
    if not whole[i] or whole[i] < 1 then
      core.raise(("ddp: bucket_bytes[%d] must be a whole number of 1 or more, not %s")
        :format(i, tostring(count)))
    end
  end
  return o, whole
end

-- Three results: names and tensors of all synchronized parameters, then buffers; those of the
-- trained parameters, delayed ones last; and the buffers, as a list and by name.
local function collect(model, o)
  local all = { tensors = {}, names = {} }
  local trained = { tensors = {}, names = {}, delayed = 0, left_out = {} }
  local buffers = { tensors = {}, by_name = named.table {} }
  local late = {}
  local function put(list, name, t)
    list.tensors[#list.tensors + 1], list.names[#list.names + 1] = t, name
  end
  for _, item in ipairs(model:named_parameters()) do
    if not listed.has(o.ignored, item.name) then
      put(all, item.name, item.parameter)
      if listed.has(o.delayed, item.name) then late[#late + 1] = item
      elseif item.parameter:requires_grad() then put(trained, item.name, item.parameter) end
    elseif item.parameter:requires_grad() then
      trained.left_out[#trained.left_out + 1] = item.parameter
    end
  end
  for _, item in ipairs(late) do
    if item.parameter:requires_grad() then
      put(trained, item.name, item.parameter)
      trained.delayed = trained.delayed + 1
    end
  end
  local found, names = model:buffers(), {}
  for name in pairs(found) do
    if not listed.has(o.ignored, name) then names[#names + 1] = name end
  end
  table.sort(names)
  for _, name in ipairs(names) do
    put(all, name, found[name])
    buffers.tensors[#buffers.tensors + 1], buffers.by_name[name] = found[name], found[name]
  end
  return all, trained, buffers
end

-- Whether there are buffers that a synchronized forward must make equal on all ranks.
local function has_buffers(s)
  if s.options.broadcast_buffers == false and not s.options.buffer_hook then return false end
  for name in pairs(s.wrapped:buffers()) do
    if not listed.has(s.options.ignored, name) then return true end
  end
  return false
end

-- Copies root's buffers to all ranks, or calls the user's function. Buffers are looked up each
-- time, as modules may assign them again.
local function synchronize_buffers(s, root)
  local _, _, buffers = collect(s.wrapped, s.options)
  if s.options.buffer_hook then
    local result = s.options.buffer_hook(buffers.by_name)
    if not future.is_future(result) then
      core.raise("ddp: buffer_hook returned a " .. type(result) .. "; a future is expected")
    end
    result:value()
  else core.ddp_broadcast(s.group, buffers.tensors, root) end
end

local function run(s, ...)
  if not s.precision then return s.wrapped(...) end
  return precision.run(s.wrapped, s.precision,
    function(parameter) return s.skipped[parameter] == true end, ...)
end

-- After the wrapped module's forward; returns what it returned. marks: see replicas.lua.
local function end_forward(s, marks, ...)
  s.reducer:forward_end()
  replicas.after_forward(s, marks)
  if s.options.find_unused or s.no_sync then s.reducer:outputs(nested.tensors { ... }) end
  return ...
end

local function forward(self, ...)
  local s = state_of(self)
  if not s.reducer then
    core.raise "ddp: this model was unwrapped; use the module inside, or wrap it again"
  end
  if not core.is_recording() then return run(s, ...) end
  structure.check_ddp(s)
  -- As in PyTorch, a pass without synchronization does not synchronize buffers, and neither does
  -- the pass after it.
  local due = s.buffers_due and not s.no_sync and has_buffers(s)
  s.buffers_due = not s.no_sync
  local root = s.joining and join.before_forward(s, due) or 0
  if not s.no_sync then
    if s.plan then buckets.begin(s) end
    overlap.await(s)
    s.rebuild = nil
  end
  s.reducer:forward(not s.no_sync)
  overlap.begin(s, not s.no_sync)
  if due then synchronize_buffers(s, root) end
  return end_forward(s, due and replicas.before_forward(s) or nil, run(s, ...))
end

---@param f function
function DDP:no_sync(f)
  local s = state_of(self)
  if not s.reducer then core.raise "no_sync: this model was unwrapped" end
  if type(f) ~= "function" then core.raise("no_sync: a function is expected, not " .. type(f)) end
  local before = s.no_sync
  s.no_sync = true
  s.reducer:no_sync(true)
  local scope <close> = setmetatable({}, { __close = function() -- luacheck: ignore scope
    s.no_sync = before
    if s.reducer then s.reducer:no_sync(before) end
  end })
  return f()
end

function DDP:reduce()
  local s = state_of(self)
  if not s.reducer then core.raise "reduce: this model was unwrapped" end
  if s.no_sync then core.raise "reduce: inside no_sync gradients are not reduced" end
  if s.joining then
    core.raise "reduce: inside join ranks without inputs left would not take part: let the last \z
      backward reduce"
  end
  structure.check_ddp(s)
  if s.plan then buckets.begin(s) end
  overlap.await(s)
  overlap.begin(s, true)
  s.rebuild = nil
  s.reducer:reduce()
end

---@param count integer
---@param f fun(i: integer)
function DDP:accumulate(count, f)
  local s = state_of(self)
  if type(f) ~= "function" then
    core.raise("accumulate: a function is expected, not " .. type(f))
  end
  s.wrapped:accumulate(count, function(i)
    if i == count then return f(i) end
    return self:no_sync(function() return f(i) end)
  end)
end

-- Copies parameters and buffers of one rank to all.
local function copy_values(s, root)
  local all, _, buffers = collect(s.wrapped, s.options)
  core.ddp_broadcast(s.group, { table.unpack(all.tensors, 1, #all.tensors - #buffers.tensors) },
    root)
  if #buffers.tensors > 0 then core.ddp_broadcast(s.group, buffers.tensors, root) end
end

---@param options { divisor?: "all"|"live", stop?: boolean }
---@param f function
---@return any ... what f returned
function DDP:join(options, f)
  local s = state_of(self)
  if not s.reducer then core.raise "join: this model was unwrapped" end
  return join.run(s, options, f, synchronize_buffers, copy_values)
end

function DDP:rebuild_buckets()
  local s = state_of(self)
  if not s.reducer then core.raise "rebuild_buckets: this model was unwrapped" end
  s.rebuild = true
  if s.plan then buckets.again(s) else s.reducer:rebuild() end
end

---@param optimizer? ms.Optimizer
function DDP:check_replicas(optimizer)
  local s = state_of(self)
  if not s.reducer then core.raise "check_replicas: this model was unwrapped" end
  replicas.check_model(self, s.group, optimizer)
end

---@return ms.Module
function DDP:unwrap()
  local s = state_of(self)
  if s.reducer then
    overlap.unwrap(s)
    hooks._release(s.how.chain or {})
    s.reducer:free()
    s.reducer = nil
    hooks._unwatch(s.how.chain or {})
    if s.plan then watch.drop(s.plan.planner) end
    if s.cast_buffers then s.cast_buffers:set_full(true) end
    statistics.drop(s)
  end
  return s.wrapped
end

---@param folder string
---@return true?, string?, string?
function DDP:load_adapters(folder)
  local s = state_of(self)
  lora.check_wrapped("load_adapters", s.wrapped)
  return s.wrapped:load_adapters(folder)
end

---@return ms.Module
function DDP:merge_adapters()
  lora.check_wrapped("merge_adapters", state_of(self).wrapped)
  return lora.merge(self:unwrap())
end

---------------------------------------------------------------------------------------------- stats

---@return ms.Stats
function DDP:stats()
  local s = state_of(self)
  if not s.reducer then core.raise "stats: this model was unwrapped" end
  return statistics.of(s)
end

------------------------------------------------------------------------------------------- wrapping

-- Fields and methods of the wrapped module. Methods of every module (names, state, modes) run on
-- the module itself. The module's own methods (generate) run on the ddp model, so that their calls
-- go through its forward.
local function index(self, key)
  if DDP[key] ~= nil then return DDP[key] end
  local s = state_of(self)
  if key == "module" then return s.wrapped end
  return module.field_of_inner(self, s.wrapped, key)
end

local function make_object(s)
  return module.wrapper(s.wrapped, { ddp = s, __index = index, __call = forward }, "ddp", is_known)
end

-- Compiles the chain that the reducer runs: a cast to precision.reduce, if parameters have another
-- dtype, then the user's links.
local function compile_hook(o, low, trained)
  local hook, due = o.comm_hook, false
  for _, p in ipairs(trained) do
    due = due or low ~= nil and low.reduce ~= nil and p:dtype() ~= low.reduce
  end
  return (hook ~= nil or due) and hooks._compile(hook, "ddp: comm_hook", due and low.reduce or nil)
    or {}
end

-- The options in force for a model, as stats shows them.
local function options_in_force(o, bytes, low, planner)
  return {
    bucket_bytes = bytes or not planner and { 1 << 20, 25 << 20 } or nil,
    buckets = planner and planner.name,
    find_unused = o.find_unused == true, static_graph = o.static_graph == true,
    init_sync = o.init_sync ~= false,
    broadcast_buffers = o.broadcast_buffers ~= false,
    buffer_hook = o.buffer_hook ~= nil, precision = low, ignored = o.ignored, delayed = o.delayed,
  }
end

options_of.methods(DDP, "a ddp model", function(value)
  local meta = type(value) == "table" and getmetatable(value)
  return type(meta) == "table" and meta.ddp ~= nil
end)

---@param model ms.Module
---@param options? ms.DDPOptions
---@return ms.DDP
function ddp.ddp(model, options)
  if not module.is_module(model) then
    core.raise("ddp: a module is expected, not " .. type(model))
  end
  if getmetatable(model).ddp then core.raise "ddp: this model is wrapped already" end
  for _, p in ipairs(model:parameters()) do
    if ownership.sharded[p] then
      core.raise "ddp: this model is sharded by fsdp, which reduces its gradients: use it as it is"
    end
  end
  if core.in_hook() then
    core.raise "ddp cannot be used inside a hook: wrap models before training"
  end
  local o, bytes = check_options(options)
  local group = o.group or core.world()
  local all, trained = collect(model, o)
  if #trained.tensors == 0 then
    core.raise("ddp: no parameter of the model requires a gradient: there is nothing to reduce"
      .. (#trained.left_out > 0 and " but what is ignored" or ""))
  end
  for _, pattern in ipairs(o.delayed or {}) do
    local found = false
    for i = #trained.names - trained.delayed + 1, #trained.names do
      found = found or listed.has({ pattern }, trained.names[i])
    end
    if not found then
      core.raise(("ddp: delayed: no parameter that is trained is called '%s'"):format(pattern))
    end
  end
  listed.check_matches("ddp", "ignored", o.ignored, model)
  local low = o.precision ~= nil and precision.check(o.precision) or nil
  local how = compile_hook(o, low, trained.tensors)
  if hooks._equal_over(how.chain or {}, group) then
    alone.refuse("ddp", trained.tensors, trained.names)
    parts.refuse("ddp", trained.tensors, trained.names, group)
  end
  ---@type ms.DDPState
  local s = {
    wrapped = model, group = group, options = o, no_sync = false, buffers_due = true,
    hook_name = how.name or "reduce", how = how,
    uses_all = not (o.find_unused or o.static_graph), whole = how.whole, guards = how.guards,
  }
  if low then
    s.precision, s.skipped = low, {}
    for _, item in ipairs(model:named_parameters()) do
      s.skipped[item.parameter] = listed.has(o.ignored, item.name)
    end
  end
  delayed.materialize("ddp", model)
  if o.init_sync ~= false then
    core.ddp_compare(group, all.tensors, all.names)
    copy_values(s, 0)
  end
  hooks._claim(how.chain or {}, s)
  if o.buckets ~= nil then s.plan = buckets.new(buckets.planner_of(o.buckets)) end
  s.reducer = core.reducer(trained.tensors, trained.names, {
    group = group, bucket_bytes = bytes, find_unused = o.find_unused, static_graph = o.static_graph,
    planned = s.plan ~= nil,
    delayed = trained.delayed, delayed_dtype = low and low.reduce,
    links = how.links, hook = how.hook, name = how.name,
    hook_links = how.hook and #how.accounts + 1,
  })
  for _, p in ipairs(trained.tensors) do ownership.reduced[p] = s end
  s.trained, s.left_out, s.names, s.delayed, s.options_bytes = trained.tensors, trained.left_out,
    trained.names, trained.delayed, bytes
  overlap.wrap(s, how.chain or {})
  if low and low.buffer then
    s.cast_buffers = precision.cast_buffers(model, function() return low.buffer end, function(name)
      return listed.has(o.ignored, name)
    end)
  end
  s.in_force = options_in_force(o, bytes, low, s.plan and s.plan.planner)
  statistics.watch(s)
  layouts.add(s)
  hooks._watch(how.chain or {})
  if s.plan then watch.use(s.plan.planner) end
  return make_object(s)
end

return ddp
