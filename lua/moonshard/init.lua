-- The module `moonshard`, which users call `ms`. Each part is loaded at its first use, so that a
-- script loads only what it needs.
local core = require "moonshard.core"
local options = require "moonshard.base.options"
local ownership = require "moonshard.base.ownership"
local sorted_pairs = require "moonshard.base.sorted_pairs"

-- Chunks of this folder belong to the library. An error message names the first line on the call
-- stack that is outside of it.
local source = debug.getinfo(1, "S").source
core.set_library((source:gsub("init%.lua$", "")))

---@class ms
local ms = { version = core.version, sorted_pairs = sorted_pairs }

for _, name in ipairs {
  "tensor", "empty", "zeros", "ones", "full", "arange", "rand", "randn", "randint", "cat", "stack",
  "where", "pack",
  "codec", "no_grad", "autocast", "attention", "memory", "reset_peak", "synchronize", "info",
  "seed",
} do
  ms[name] = core[name]
end

---@param settings ms.InitOptions
function ms.init(settings)
  if type(settings) == "table" and settings.group == "mpi" then
    return require "moonshard.parallel.mpi".init(settings)
  end
  return core.configure(settings)
end

---@param parameters ms.Parameter[]
---@return ms.Tensor
function ms.flat(parameters)
  options.items("flat", "parameters", parameters, "tensor")
  if #parameters == 0 then core.raise "flat: a list of one or more tensors is expected" end
  local first = ownership.sharded[parameters[1]]
  for _, p in ipairs(parameters) do
    local entry = ownership.sharded[p]
    if (entry and entry.model) ~= (first and first.model) then
      local one, other = entry and p or parameters[1], entry and parameters[1] or p
      core.raise(("flat: '%s' belongs to an fsdp model, which has laid out its memory, and '%s' \z
        does not: pass the parameters of one unit (unit.parameters)"):format(one:name(),
        other:name()))
    end
  end
  return first and first.model.sharded:flat(parameters) or core.flat(parameters)
end

---@param f function
---@param ... any
---@return any ...
function ms.recompute(f, ...)
  options.argument("recompute", "f", f, "function")
  return core.recompute(f, ...)
end

---@param f function
---@param ... any
---@return any ...
function ms.recompute_rest(f, ...)
  options.argument("recompute_rest", "f", f, "function")
  return core.recompute_rest(f, ...)
end

---@param functions ms.CustomOptions
---@return fun(...: any): ms.Tensor, ...
function ms.custom(functions)
  options.check("custom", functions, { forward = "function", backward = "function" })
  for _, name in ipairs { "forward", "backward" } do
    if not functions or not functions[name] then
      core.raise(("custom: a table with forward and backward is expected, and %s is missing")
        :format(name))
    end
  end
  local forward, backward = functions.forward, functions.backward
  return function(...) return core.custom(forward, backward, ...) end
end

---@return integer rank of this process among all
function ms.rank() return core.world():rank() end

---@return integer how many ranks there are
function ms.world_size() return core.world():size() end

---@param name? string
---@param f? function
function ms.device(name, f)
  if f ~= nil then options.argument("device", "f", f, "function") end
  if f and name ~= nil then return core.on_device(name, f) end
  local own = core.device()
  if name ~= nil and name ~= own and name ~= "cpu" then
    core.raise(("device '%s': this engine runs on '%s'"):format(tostring(name), own))
  end
  if f then return f() end
  return own
end

-- The module of each lazily loaded name of `ms`.
local parts = {
  nn = "moonshard.nn", optim = "moonshard.optim", hooks = "moonshard.hooks",
  data = "moonshard.data", checkpoint = "moonshard.checkpoint",
  safetensors = "moonshard.safetensors", trace = "moonshard.trace",
  scripts = "moonshard.scripts", tokenizer = "moonshard.tokenizer", chat = "moonshard.chat",
}
local names = {
  config = "moonshard.base.config", steps = "moonshard.train.steps", step = "moonshard.train.steps",
  metric = "moonshard.train.metric",
  report = "moonshard.train.report", train = "moonshard.train",
  loss_weight = "moonshard.train.weights", log = "moonshard.base.log",
  warn = "moonshard.base.log", einsum = "moonshard.composed",
  stream = "moonshard.parallel.future", all = "moonshard.parallel.future",
  world = "moonshard.parallel.group", ddp = "moonshard.parallel.ddp",
  fsdp = "moonshard.parallel.fsdp", pipeline = "moonshard.parallel.pipeline",
  schedule = "moonshard.parallel.pipeline",
  overlap = "moonshard.parallel.overlap",
  buckets = "moonshard.parallel.ddp.buckets", prefetch = "moonshard.parallel.fsdp.prefetch",
}

return setmetatable(ms, {
  __index = function(self, name)
    local value
    if parts[name] then value = require(parts[name])
    elseif names[name] then value = require(names[name])[name] end
    if value == nil then return options.no_field("ms", name, self, parts, names) end
    rawset(self, name, value)
    return value
  end,
})
