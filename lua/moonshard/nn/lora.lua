-- Low-rank adapters (LoRA, Hu et al. 2021): the weights of a model stay as they are, and beside
-- some of its linear layers two small matrices are trained: y = W x + b + scale * B (A x). Weights
-- may be kept in 4 bits (coded.lua).
--
-- A layer with an adapter keeps its class and its parameters' names. It gets the modules lora_A
-- (weight [rank, inputs]) and lora_B (weight [outputs, rank]), and a forward of its own. What the
-- adapter is beside these weights is in the layer's metatable, under `lora` (ms.Adapter).
local coded = require "moonshard.nn.coded"
local core = require "moonshard.core"
local layers = require "moonshard.nn.layers"
local listed = require "moonshard.nn.listed"
local module = require "moonshard.nn.module"
local options_of = require "moonshard.base.options"
local ownership = require "moonshard.base.ownership"

local lora = {}

---@class ms.Adapter
---@field rank integer
---@field alpha number
---@field scale number the factor of what the adapter adds
---@field dropout number of the adapter's input
---@field by_root boolean scale is alpha / sqrt(rank), not alpha / rank

-- Layers that can have an adapter say so in their class: lora_layout = "rows" for a weight
-- [outputs, inputs], "columns" for [inputs, outputs]. A class made from one of these may compute
-- something else.
local function layout_of(object) return rawget(getmetatable(object).class, "lora_layout") end

local function adapter_of(object) return getmetatable(object).lora end

--- The layers of a model that have an adapter, in order.
---@param model ms.Module
---@return { name: string, layer: ms.Module, adapter: ms.Adapter }[]
function lora.adapted(model)
  local list = {}
  for name, object in model:modules() do
    local adapter = adapter_of(object)
    if adapter then list[#list + 1] = { name = name, layer = object, adapter = adapter } end
  end
  return list
end

-------------------------------------------------------------------------------------------- layers

-- The forward of a layer with an adapter. What the small product gives is scaled, as it is smaller
-- than what the large one gives.
local function forward(self, x, activation)
  local adapter, given = adapter_of(self), x
  if adapter.dropout > 0 and self:is_training() then given = x:dropout(adapter.dropout) end
  local y = coded.product(self, x)
    + self.lora_B(self.lora_A(given) * adapter.scale)
  return activation and y[activation](y) or y
end
module.tidy(forward)

--- Gives a layer an adapter. A is drawn as the weight of a linear layer (kaiming uniform with a =
--- sqrt(5)), B is zero: the layer computes what it did before.
---@param layer ms.Module
---@param adapter ms.Adapter
function lora.add(layer, adapter)
  local what = coded.of(layer)
  local shape, dtype = layer.weight:shape(), layer.weight:dtype()
  if what then shape, dtype = what.shape, what.dtype end
  local inputs, outputs = shape[2], shape[1]
  if layout_of(layer) == "columns" then inputs, outputs = outputs, inputs end
  local meta = getmetatable(layer)
  core.on_device(layer.weight:device() == "meta" and "meta" or "cpu", function()
    layer.lora_A = layers.Linear(inputs, adapter.rank, { bias = false })
    layer.lora_B = layers.Linear(adapter.rank, outputs, { bias = false })
    layer.lora_B.weight = module.Parameter(core.zeros { outputs, adapter.rank })
    if dtype ~= "f32" then
      layer.lora_A:to(dtype)
      layer.lora_B:to(dtype)
    end
  end)
  -- A rank is rarely a multiple of 16.
  layer.lora_A.fp8, layer.lora_B.fp8 = false, false
  layer.lora_A:train(layer:is_training())
  layer.lora_B:train(layer:is_training())
  meta.lora = adapter
  layer.forward = forward
end

--- Freezes all parameters that a model has; merging trains again what was trained before.
---@param model ms.Module
function lora.freeze(model)
  local frozen = {}
  for _, p in ipairs(model:parameters()) do
    if p:requires_grad() then
      frozen[#frozen + 1] = p
      p:requires_grad_(false)
    end
  end
  getmetatable(model).lora_frozen = frozen
end

--- Takes the adapters away; what was trained before nn.lora is trained again.
---@param model ms.Module
function lora.undo(model)
  for _, one in ipairs(lora.adapted(model)) do
    one.layer.forward, one.layer.lora_A, one.layer.lora_B = nil, nil, nil
    getmetatable(one.layer).lora = nil
  end
  local meta = getmetatable(model)
  for _, p in ipairs(meta.lora_frozen or {}) do p:requires_grad_(true) end
  meta.lora_frozen = nil
end

-------------------------------------------------------------------------------------------- options

-- What a parameter belongs to whose model is wrapped: "ddp", "fsdp" or nil.
local function wrapper_of(p)
  local reduced = ownership.reduced[p]
  return ownership.sharded[p] and "fsdp" or reduced and reduced.reducer and "ddp" or nil
end

--- Raises unless a model is one that can get adapters: neither wrapped, nor adapted already.
---@param what string
---@param model any
function lora.check_model(what, model)
  options_of.argument(what, "model", model, "module")
  local meta = getmetatable(model)
  if meta.ddp or meta.fsdp then
    core.raise(("%s: this model is wrapped in %s already: give the model its adapters first, \z
      then wrap it"):format(what, meta.ddp and "ddp" or "fsdp"))
  end
  for _, p in ipairs(model:parameters()) do
    local wrapper = wrapper_of(p)
    if wrapper then
      core.raise(("%s: '%s' belongs to a model that is wrapped in %s: give the model its \z
        adapters first, then wrap it"):format(what, p:name(), wrapper))
    end
    if ownership.optimizer_of(p) and p:requires_grad() then
      core.raise(("%s: parameter '%s' belongs to an optimizer already: give the model its \z
        adapters first, then make its optimizer"):format(what, p:name()))
    end
  end
  local first = lora.adapted(model)[1]
  if first then
    core.raise(("%s: '%s' has an adapter already: merge_adapters() folds it into the weights")
      :format(what, first.name))
  end
end

-- Whether an entry of the option names means a module: it is the name, its end after a dot, or a
-- pattern that matches all of it.
local function means(entry, name)
  return listed.has({ entry }, name) or name:sub(-#entry - 1) == "." .. entry
end

-- The last parts of the names of all layers that can have an adapter, each once.
local function last_parts(model)
  local list, seen = {}, {}
  for name, object in model:modules() do
    local last = name:match "[^.]*$"
    if layout_of(object) and not seen[last] then
      seen[last] = true
      list[#list + 1] = last
    end
  end
  return list
end

-- Raises for an entry that means no layer.
local function raise_unmatched(model, i, entry)
  for name, object in model:modules() do
    if name ~= "" and means(entry, name) then
      core.raise(("nn.lora: names[%d]: '%s' is a %s, and adapters are for Linear layers (and \z
        those of gpt2)"):format(i, name, getmetatable(object).class.class_name))
    end
  end
  local known = last_parts(model)
  if #known == 0 then core.raise "nn.lora: the model has no linear layer" end
  local near = core.nearest(entry, known)
  core.raise(("nn.lora: names[%d]: no layer is called '%s'%s; linear layers are called %s"):format(
    i, entry, near and (": did you mean '%s'?"):format(near) or "", table.concat(known, ", ")))
end

local function layers_of(model, entries)
  local list, chosen = {}, {}
  for i, entry in ipairs(entries) do
    local found = false
    for name, object in model:modules() do
      if layout_of(object) and means(entry, name) then found, chosen[object] = true, true end
    end
    if not found then raise_unmatched(model, i, entry) end
  end
  for _, object in model:modules() do if chosen[object] then list[#list + 1] = object end end
  return list
end

-- The checked options as an adapter.
local function adapter_from(given)
  local rank = given.rank or 8
  if math.type(rank) ~= "integer" or rank < 1 then
    core.raise(("nn.lora: rank must be an integer of 1 or more, not %s"):format(tostring(rank)))
  end
  local alpha, dropout = given.alpha or rank, given.dropout or 0
  if type(alpha) ~= "number" or not (alpha > 0 and alpha < math.huge) then
    core.raise(("nn.lora: alpha must be a number above 0, not %s"):format(tostring(alpha)))
  end
  if type(dropout) ~= "number" or not (dropout >= 0 and dropout < 1) then
    core.raise(("nn.lora: dropout must be a number of 0 or more and below 1, not %s")
      :format(tostring(dropout)))
  end
  return { rank = rank, alpha = alpha, scale = alpha / rank, dropout = dropout, by_root = false }
end

--- Raises unless the option is what `encode_base` takes.
---@param what string who asks, for messages
---@param base any
function lora.check_base(what, base)
  if base ~= nil and base ~= "int4" then
    core.raise(("%s: base is \"int4\", or left out for weights as they are, not %s")
      :format(what, tostring(base)))
  end
end

--- Encodes the weights of linear layers in a model's blocks, which have numbers in their names, and
--- of those that get an adapter. A weight that other modules use as well stays as it is.
---@param what string who asks, for messages
---@param model ms.Module
---@param base? "int4"
---@param chosen ms.Module[] layers that get an adapter
function lora.encode_base(what, model, base, chosen)
  if base == nil then return end
  local uses, wanted, trained, list = {}, {}, {}, {}
  for _, layer in ipairs(chosen) do wanted[layer] = true end
  for _, one in ipairs(lora.adapted(model)) do
    trained[one.layer.lora_A], trained[one.layer.lora_B] = true, true
  end
  for _, object in model:modules() do
    for _, t in pairs(getmetatable(object).fields) do
      if core.is_parameter(t) then uses[t] = (uses[t] or 0) + 1 end
    end
  end
  for name, object in model:modules() do
    local is_one = wanted[object] or name:find "%f[%w_]%d+%f[^%w_]"
    if layout_of(object) and is_one and not trained[object] then
      if uses[object.weight] == 1 then list[#list + 1] = { name = name, layer = object }
      elseif wanted[object] then
        core.raise(("%s: base: the weight of '%s' is used by another module, too, and cannot \z
          become codes: leave it out of names"):format(what, name))
      end
    end
  end
  local frozen, kept = {}, {}
  for _, p in ipairs(getmetatable(model).lora_frozen or {}) do frozen[p] = true end
  for _, one in ipairs(list) do
    local weight = one.layer.weight
    coded.encode(what, one.name, one.layer, frozen[weight] or weight:requires_grad())
    frozen[weight] = nil
  end
  -- The numbers of a weight must not be held by the list.
  for _, p in ipairs(getmetatable(model).lora_frozen or {}) do
    if frozen[p] then kept[#kept + 1] = p end
  end
  getmetatable(model).lora_frozen = kept
end

---@param model ms.Module
---@param options? ms.LoraOptions
---@return ms.Module
function lora.lora(model, options)
  lora.check_model("nn.lora", model)
  local o = options_of.check("nn.lora", options, { "rank", "alpha", "dropout", "names", "base" })
  listed.check("nn.lora", "names", o.names)
  lora.check_base("nn.lora", o.base)
  local names = o.names or model.lora_names
  if not names or #names == 0 then
    core.raise(("nn.lora: give names, those of the layers that get an adapter: linear layers are \z
      called %s"):format(table.concat(last_parts(model), ", ")))
  end
  local adapter, chosen = adapter_from(o), layers_of(model, names)
  for _, layer in ipairs(chosen) do
    local declared = ownership.declared[layer.weight]
    if declared and declared.split then
      core.raise(("nn.lora: '%s' is a part of a tensor (ms.nn.split): an adapter of the whole \z
        layer cannot be made of parts"):format(layer.weight:name()))
    end
  end
  lora.freeze(model)
  lora.encode_base("nn.lora", model, o.base, chosen)
  for _, layer in ipairs(chosen) do lora.add(layer, adapter) end
  return model
end

-------------------------------------------------------------------------------------------- merging

-- Adds scale * B A to the weight. The product and the sum are f32.
local function merge_one(layer)
  local adapter, weight = adapter_of(layer), layer.weight
  local a, b = layer.lora_A.weight:to "f32", layer.lora_B.weight:to "f32"
  local change = layout_of(layer) == "columns" and a:transpose(1, 2):matmul(b:transpose(1, 2))
    or b:matmul(a)
  weight:copy_((weight:to "f32" + change * adapter.scale):to(weight:dtype()))
end

---@param model ms.Module
---@return ms.Module
function lora.merge(model)
  local list = lora.adapted(model)
  if #list == 0 then core.raise "merge_adapters: the model has no adapters" end
  for _, one in ipairs(list) do
    for _, p in ipairs(one.layer:parameters()) do
      local wrapper = wrapper_of(p)
      if wrapper then
        core.raise(("merge_adapters: '%s' belongs to a model that is wrapped in %s: call \z
          merge_adapters() of that model (what ms.%s returned)"):format(p:name(), wrapper, wrapper))
      elseif p:device() == "meta" then
        core.raise(("merge_adapters: '%s' is on \"meta\" and has no values yet: \z
          materialize() the model"):format(p:name()))
      end
    end
  end
  for _, one in ipairs(coded.layers(model)) do coded.decode(one.layer) end
  core.no_grad(function()
    for _, one in ipairs(list) do merge_one(one.layer) end
  end)
  lora.undo(model)
  return model
end

--- Raises unless the model in a wrapper has adapters.
---@param what string
---@param model ms.Module
function lora.check_wrapped(what, model)
  if not lora.adapted(model)[1] then
    core.raise(("%s: the model has no adapters: nn.lora, or load_adapters, gives them to a model \z
      before it is wrapped"):format(what))
  end
end

--- Raises if a model has adapters: a file of its weights would lack them, or name what no other
--- tool knows.
---@param what string
---@param model ms.Module
function lora.refuse(what, model)
  if lora.adapted(model)[1] then
    core.raise(("%s: the model has adapters: save_adapters(folder) writes them by themselves; \z
      merge_adapters() folds them into the weights, which can then be saved"):format(what))
  end
end

return lora
