-- Adapters in files, in the format of peft: adapter_config.json, and adapter_model.safetensors with
-- the names base_model.model.NAME.lora_A.weight, where NAME is that of the layer in transformers.
local coded = require "moonshard.nn.coded"
local core = require "moonshard.core"
local files = require "moonshard.nn.files"
local lora = require "moonshard.nn.lora"
local module = require "moonshard.nn.module"
local options_of = require "moonshard.base.options"
local sorted_pairs = require "moonshard.base.sorted_pairs"
local Module = module.base

local adapter_files = {}

local CONFIG <const>, WEIGHTS <const> = "adapter_config.json", "adapter_model.safetensors"

-- Beside them, where the adapters were trained on codes: { "base": "int4" }. peft does not read it.
local BASE <const> = "base.json"
local PREFIX <const> = "base_model.model."

-- The keys of adapter_config.json that are read, or that change nothing of what the saved adapters
-- compute. Every other key must be off: null, false or empty.
local KNOWN <const> = {}
for key in ([[auto_mapping base_model_name_or_path eva_config exclude_modules fan_in_fan_out
    inference_mode init_lora_weights layers_pattern layers_to_transform lora_alpha lora_dropout
    megatron_core peft_type peft_version qalora_group_size r revision target_modules task_type
    use_rslora]]):gmatch "%S+" do
  KNOWN[key] = true
end
-- Starts of adapters that leave the weights of the model as they are. With others, as "pissa" and
-- "olora", peft subtracts the start from the weights whenever it loads the adapters.
local STARTS <const> = { [true] = true, [false] = true, gaussian = true, eva = true,
  orthogonal = true }

local function without_slash(folder) return (folder:gsub("(.)/+$", "%1")) end

-- The name that a layer has in transformers.
local function peer_name(model, name)
  return model.peer_name and model:peer_name(name) or name
end

--------------------------------------------------------------------------------------------- saving

-- Names for target_modules that mean these layers and no others, as peft reads them: the end of a
-- name after a dot. Last parts where all layers of that last part are meant, else whole names.
local function targets_of(model, list)
  local adapted, partly, targets, seen = {}, {}, {}, {}
  for _, one in ipairs(list) do adapted[one.name] = true end
  for name in model:modules() do
    if not adapted[name] then partly[name:match "[^.]*$"] = true end
  end
  for _, one in ipairs(list) do
    local last = one.name:match "[^.]*$"
    local target = partly[last] and peer_name(model, one.name) or last
    if not seen[target] then targets[#targets + 1] = target end
    seen[target] = true
  end
  table.sort(targets)
  return core.json_list(targets)
end

local function config_text(model, list)
  local adapter, null = list[1].adapter, core.json_null
  local origin = getmetatable(model).origin
  return core.json_encode({
    peft_type = "LORA", task_type = model.last_logits and "CAUSAL_LM" or null,
    base_model_name_or_path = origin and origin.folder or null,
    r = adapter.rank, lora_alpha = adapter.alpha, lora_dropout = adapter.dropout,
    use_rslora = adapter.by_root, target_modules = targets_of(model, list),
    fan_in_fan_out = rawget(getmetatable(list[1].layer).class, "lora_layout") == "columns",
    bias = "none", inference_mode = true, init_lora_weights = true, modules_to_save = null,
    rank_pattern = {}, alpha_pattern = {},
  }, true) .. "\n"
end

--- Whether a name is that of an adapter's weight.
---@param name string
---@return boolean
function adapter_files.is_adapter(name) return name:match "%.lora_[AB]%.weight$" ~= nil end

--- Begins to write the adapters of a model: as files.begin. items: name (here), dtype and shape of
--- each of its adapters' weights.
---@param model ms.Module
---@param folder string
---@param items table[]
---@return table?
---@return string? message
---@return string? code
function adapter_files.begin(model, folder, items)
  folder = without_slash(folder)
  local ok, message, code = core.make_directory(folder)
  if not ok then return nil, message, code end
  local names, dtypes, shapes = {}, {}, {}
  for i, item in ipairs(items) do
    local layer, rest = item.name:match "^(.*)%.(lora_[AB]%.weight)$"
    names[i] = ("%s%s.%s"):format(PREFIX, peer_name(model, layer), rest)
    dtypes[i], shapes[i] = item.dtype, { table.unpack(item.shape) }
  end
  local made
  made, message, code = core.safetensors_create(folder .. "/" .. WEIGHTS, names, dtypes, shapes,
    { "format", "pt" })
  if not made then return nil, message, code end
  local texts = { [CONFIG] = config_text(model, lora.adapted(model)) }
  if coded.layers(model)[1] then texts[BASE] = '{ "base": "int4" }\n'
  elseif core.exists(folder .. "/" .. BASE) then
    ok, message, code = core.remove(folder .. "/" .. BASE)
    if not ok then return nil, message, code end
  end
  return files.writer { file = made, list = items, folder = folder, texts = texts }
end

--- Raises for what save_adapters cannot take.
---@param model ms.Module
---@param folder any
function adapter_files.check_save(model, folder)
  options_of.argument("save_adapters", "folder", folder, "string")
  if not lora.adapted(model)[1] then core.raise "save_adapters: the model has no adapters" end
end

---@param folder string
---@return true?, string?, string?
function Module:save_adapters(folder)
  adapter_files.check_save(self, folder)
  local items, tensors = {}, {}
  for _, saved in ipairs(module.saved(self)) do
    if adapter_files.is_adapter(saved.name) then
      items[#items + 1] = {
        name = saved.name, dtype = saved.tensor:dtype(), shape = saved.tensor:shape(),
        tensor = saved.tensor,
      }
      tensors[saved.name] = saved.tensor
    end
  end
  local instead = files.one_of_all("save_adapters", tensors)
  for _, item in ipairs(items) do item.tensor = instead[item.name] or item.tensor end
  return files.on_rank_0("save_adapters", function()
    return files.write_all(items, adapter_files.begin(self, folder, items))
  end)
end

-------------------------------------------------------------------------------------------- loading

local function is_off(key, value)
  return value == false or value == "" or key == "bias" and value == "none"
    or type(value) == "table" and next(value) == nil
end

-- What the configuration asks for and is not here: the first such key and its value, or nil.
local function unsupported(config)
  for key, value in sorted_pairs(config) do
    local known = KNOWN[key]
    if key == "init_lora_weights" then known = type(value) ~= "table" and STARTS[value] end
    if not known and not is_off(key, value) then
      return ("%s is %s; this is not supported"):format(key,
        type(value) == "table" and core.json_encode(value) or tostring(value))
    end
  end
end

-- adapter_config.json as an adapter; nil, message, code.
local function read_config(where)
  local text, message, code = core.file_read(where)
  if not text then return nil, message, code end
  local config
  config, message = core.json_decode(text)
  local function refuse(what, kind)
    return core.refuse(("'%s': %s"):format(where, what), kind or "unsupported")
  end
  if type(config) ~= "table" then return refuse(message or "an object is expected", "corrupt") end
  if config.peft_type ~= "LORA" then
    return refuse(("peft_type is %s; LORA is supported"):format(tostring(config.peft_type)))
  end
  local what = unsupported(config)
  if what then return refuse(what) end
  local rank, alpha, dropout = config.r, config.lora_alpha, config.lora_dropout or 0
  if math.type(rank) ~= "integer" or rank < 1 then
    return refuse(("r is %s; an integer of 1 or more is expected"):format(tostring(rank)),
      "corrupt")
  end
  if type(alpha) ~= "number" or type(dropout) ~= "number" or not (dropout >= 0 and dropout < 1) then
    return refuse("lora_alpha or lora_dropout is not a number that adapters can have", "corrupt")
  end
  local by_root = config.use_rslora == true
  return {
    rank = rank, alpha = alpha, scale = alpha / (by_root and math.sqrt(rank) or rank),
    dropout = dropout, by_root = by_root,
  }
end

--- What represents a model where files are read: it has the adapters' names alone.
---@param model ms.Module
---@return table
function adapter_files.reader(model)
  return {
    own_name = function(_, name)
      local inner = name:match "^base_model%.model%.(.*)$" or name
      return model.own_name and model:own_name(inner) or inner
    end,
    state = function()
      local own = {}
      for name, t in pairs(model:state { live = true }) do
        if adapter_files.is_adapter(name) then own[name] = t end
      end
      return own
    end,
    load_state = function(_, values) model:load_state(values, { partial = true }) end,
  }
end

-- The layers that a file has adapters of, by name, and where the names of the file do not fit the
-- model, a message.
local function layers_in(model, found, path)
  local linear, by_name, count = {}, {}, 0
  for name, object in model:modules() do
    if rawget(getmetatable(object).class, "lora_layout") then linear[name] = object end
  end
  for own in pairs(found.state) do
    local layer = own:match "^(.*)%.lora_[AB]%.weight$"
    local told = found.origin[own].name
    if not layer then
      return nil, ("'%s': '%s' is no weight of an adapter"):format(path, told), "unsupported"
    elseif not linear[layer] then
      return nil, ("'%s': '%s' belongs to no linear layer of this model"):format(path, told),
        "mismatch"
    end
    if not by_name[layer] then by_name[layer], count = linear[layer], count + 1 end
  end
  if count == 0 then return nil, ("'%s' has no adapters"):format(path), "corrupt" end
  for name in pairs(by_name) do
    for _, part in ipairs { "lora_A", "lora_B" } do
      local own = ("%s.%s.weight"):format(name, part)
      if not found.state[own] then
        return nil, ("'%s': the adapter of '%s' has no %s"):format(path, name, part), "corrupt"
      end
    end
  end
  return by_name
end

-- What is wrong with the shapes of a file's adapters, beside a rank and the layers' sizes.
local function wrong_shape(found, by_name, rank)
  for name, layer in pairs(by_name) do
    local outputs, inputs = table.unpack(coded.shape_of(layer))
    if rawget(getmetatable(layer).class, "lora_layout") == "columns" then
      outputs, inputs = inputs, outputs
    end
    for part, shape in pairs { lora_A = { rank, inputs }, lora_B = { outputs, rank } } do
      local given = found.state[("%s.%s.weight"):format(name, part)]:shape()
      if #given ~= 2 or given[1] ~= shape[1] or given[2] ~= shape[2] then
        return ("%s of '%s' is [%s], and with r = %d this model needs [%d, %d]"):format(part, name,
          table.concat(given, ", "), rank, shape[1], shape[2])
      end
    end
  end
end

-- A model's own adapters and those of a file must be of the same layers, and compute alike.
local function misfit(list, by_name, adapter)
  for _, one in ipairs(list) do
    if not by_name[one.name] then return ("it has no adapter of '%s'"):format(one.name) end
    if one.adapter.rank ~= adapter.rank or one.adapter.scale ~= adapter.scale then
      return ("its rank is %d and its scale %g, and those of the model are %d and %g")
        :format(adapter.rank, adapter.scale, one.adapter.rank, one.adapter.scale)
    end
  end
  local count = 0
  for _ in pairs(by_name) do count = count + 1 end
  if count > #list then
    return ("it has adapters of %d layers, and the model of %d"):format(count, #list)
  end
end

--- Checks a folder of adapters against a model: the path of the weights, what the adapters are,
--- and their layers by name. Nothing has changed. nil, message, code if they do not fit.
---@param model ms.Module
---@param folder string
---@return string? path
---@return ms.Adapter|string adapter or message
---@return table<string, ms.Module>|string layers or code
function adapter_files.examine(model, folder)
  folder = without_slash(folder)
  local adapter, message, code = read_config(folder .. "/" .. CONFIG)
  if not adapter then return nil, message, code end
  local path = folder .. "/" .. WEIGHTS
  local found
  found, message, code = files.find(adapter_files.reader(model), path)
  if not found then return nil, message, code end
  local by_name
  by_name, message, code = layers_in(model, found, path)
  local wrong = by_name and wrong_shape(found, by_name, adapter.rank)
  files.close(found)
  if not by_name then return core.refuse(message, code) end
  local own = lora.adapted(model)
  wrong = wrong or own[1] and misfit(own, by_name, adapter)
  if wrong then return core.refuse(("'%s': %s"):format(path, wrong), "mismatch") end
  return path, adapter, by_name
end

--- The base that a folder's adapters were trained on; nil: weights as they are.
---@param folder string
---@return "int4"?
function adapter_files.base_of(folder)
  local text = core.file_read(("%s/%s"):format(without_slash(folder), BASE))
  local told = text and core.json_decode(text)
  return type(told) == "table" and told.base == "int4" and "int4" or nil
end

---@param folder string
---@param options? { base?: "int4"|false }
---@return true?, string?, string?
function Module:load_adapters(folder, options)
  options_of.argument("load_adapters", "folder", folder, "string")
  local base = options_of.check("load_adapters", options, { "base" }).base
  if base ~= false then lora.check_base("load_adapters", base) end
  local is_new = not lora.adapted(self)[1]
  if base == nil and is_new then base = adapter_files.base_of(folder) end
  if is_new then lora.check_model("load_adapters", self)
  elseif base ~= nil then
    core.raise "load_adapters: base is for a model that has no adapters yet"
  end
  local path, adapter, by_name = adapter_files.examine(self, folder)
  if not path then return nil, adapter, by_name end
  if is_new then
    lora.freeze(self)
    for name, layer in sorted_pairs(by_name) do -- luacheck: ignore name
      lora.add(layer, adapter)
    end
  end
  local read, message, code = files.read(adapter_files.reader(self), path)
  -- After a failure a model has its weights as they were, so they are encoded last.
  if read and is_new then
    local layers = {}
    for _, layer in sorted_pairs(by_name) do layers[#layers + 1] = layer end
    lora.encode_base("load_adapters", self, base or nil, layers)
  end
  if read then return true end
  if is_new then lora.undo(self) end
  return nil, message, code
end

---@return ms.Module
function Module:merge_adapters() return lora.merge(self) end

options_of.methods(Module, "a module", module.is_module,
  { "save_adapters", "load_adapters", "merge_adapters" })

return adapter_files
