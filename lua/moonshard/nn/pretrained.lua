-- nn.pretrained: a model with weights that other tools (or model:save) wrote. config.json describes
-- the model.
local core = require "moonshard.core"
local Decoder = require "moonshard.nn.decoder"
local families = require "moonshard.nn.families"
local files = require "moonshard.nn.files"
local gpt2 = require "moonshard.nn.gpt2"
local LanguageModel = require "moonshard.nn.language_model"
local llama = require "moonshard.nn.llama"
local module = require "moonshard.nn.module"
local options_of = require "moonshard.base.options"
local sorted_pairs = require "moonshard.base.sorted_pairs"
local tokenizer_files = require "moonshard.tokenizer.files"

-- By model_type of config.json, where it is not nn.decoder's own.
local classes = { gpt2 = gpt2, llama = llama }

local function refuse(path, what, code)
  return core.refuse(("'%s': %s"):format(path, what), code or "unsupported")
end

local function is_among(value, list)
  for _, one in ipairs(list) do if value == one then return true end end
  return false
end

-- A message about the first key whose value is not supported; nil if there is none.
local function unbuilt(config)
  for name, values in sorted_pairs(families[config.model_type].built) do
    local value = config[name]
    -- Some tools write the width of an attention window that the model does not use.
    local unused = name == "sliding_window" and config.use_sliding_window == false
    if value ~= nil and not unused and not is_among(value, values) then
      local shown = {}
      for i, one in ipairs(values) do shown[i] = tostring(one) end
      local here = #shown > 0 and ("models here have %s"):format(table.concat(shown, " or "))
        or "this is not supported"
      return ("%s is %s; %s")
        :format(name, type(value) == "table" and core.json_encode(value) or tostring(value), here)
    end
  end
end

-- The options of this library's model that computes the same as the file's model; else nil,
-- message, code. exact: config.json with its nulls.
local function settings_of(path, config, exact)
  local fault = unbuilt(config)
  if fault then return refuse(path, fault) end
  -- The value of a key; the default of one that is missing; nil for null.
  local function given(key, default)
    if exact[key] == nil then return default end
    return config[key]
  end
  local settings, message, code = families[config.model_type].read(given, config)
  if not settings then return refuse(path, message, code) end
  if not classes[config.model_type] and config.model_type ~= "moonshard" then
    settings.family = config.model_type
  end
  return settings
end

-- Whether a file belongs to a model besides weights and config.json and does not change with
-- training: generation settings and the tokenizer.
local function is_companion(name)
  return name == "generation_config.json" or tokenizer_files.is_one(name)
end

-- The contents of these files, on the rank that saves; nil, message, code if one cannot be read.
local function companions_of(folder)
  local found = {}
  for _, name in ipairs(core.rank() == 0 and core.list(folder) or {}) do
    if is_companion(name) and core.exists(folder .. "/" .. name) == "file" then
      local text, message, code = core.file_read(folder .. "/" .. name)
      if not text then return nil, message, code end
      found[name] = text
    end
  end
  return found
end

-- What `save` writes as it was read: names and dtypes of weights, the text of config.json, the
-- files of is_companion.
local function remember(model, found, text, companions, folder)
  local names, dtypes = {}, {}
  for name, t in pairs(model:state { live = true }) do
    names[name], dtypes[name] = found.origin[name].name, found.state[name]:dtype()
    module.loaded_dtype[t] = dtypes[name]
  end
  if found.metadata.format == nil then found.metadata.format = "pt" end
  getmetatable(model).origin = {
    names = names, dtypes = dtypes, config = text, files = companions, metadata = found.metadata,
    folder = folder,
  }
end

-- Reads config.json: its text and its contents.
local function read_config(path)
  local text, message, code = core.file_read(path)
  if not text then return nil, message, code end
  local config
  config, message, code = core.json_decode(text)
  if not config then return refuse(path, message or "null", code or "corrupt") end
  local kind = type(config) == "table" and config.model_type or nil
  if not families[kind or ""] then
    local known = {}
    for name in sorted_pairs(families) do known[#known + 1] = name end
    return refuse(path, ("model_type is %s; %s can be loaded"):format(tostring(kind),
      table.concat(known, ", ")))
  end
  return text, config
end

-- The ids that end a text, by generation_config.json or else config.json; false: neither names one.
-- nil, message, code if what is there cannot be read.
local function stops_of(folder, config)
  local where, given = folder .. "/generation_config.json", nil
  if core.exists(where) == "file" then
    local text, message, code = core.file_read(where)
    if not text then return nil, message, code end
    local settings
    settings, message, code = core.json_decode(text)
    if type(settings) ~= "table" then
      return refuse(where, message or "an object is expected", code or "corrupt")
    end
    given = settings.eos_token_id
  end
  if given == nil then where, given = folder .. "/config.json", config.eos_token_id end
  if given == nil then return false end
  local list = type(given) == "table" and given or { given }
  for _, id in ipairs(list) do
    if math.type(id) ~= "integer" then
      return refuse(where, ("eos_token_id has %s; an id or a list of ids is expected")
        :format(tostring(id)), "corrupt")
    end
  end
  return list
end

---@param path string
---@param options? { dropout?: number, recompute?: ms.Recompute }
---@return ms.LanguageModel?
---@return string? message
---@return string? code
return function(path, options)
  options_of.argument("nn.pretrained", "path", path, "string")
  options = options_of.check("nn.pretrained", options,
    { dropout = "number", recompute = "boolean|string|function" })
  LanguageModel.check_recompute("nn.pretrained", options.recompute)
  local kind = core.exists(path)
  if not kind then return nil, ("there is no file or folder '%s'"):format(path), "not_found" end
  local folder = kind == "folder" and path:gsub("(.)/+$", "%1") or path:match "^(.*)/[^/]*$" or "."
  local where = folder .. "/config.json"
  if not core.exists(where) and core.exists(folder .. "/adapter_config.json") then
    return refuse(path, "these are adapters, and no model: read the model that they were made \z
      for, and call its load_adapters(folder)")
  end
  local text, config, code = read_config(where)
  if not text then return nil, config, code end
  local class = classes[config.model_type] or Decoder
  local settings, message
  settings, message, code = settings_of(where, config, core.json_decode(text, true))
  if not settings then return nil, message, code end
  local stops
  stops, message, code = stops_of(folder, config)
  if stops == nil then return nil, message, code end
  settings.recompute = options.recompute
  if config.model_type == "gpt2" then settings.dropout = options.dropout
  elseif (options.dropout or 0) ~= 0 then
    core.raise(("nn.pretrained: option dropout: the %s in %s has no dropout")
      :format(config.model_type, where))
  end
  -- The file may come from another tool, so a missing or wrong entry is a damaged file, not a
  -- mistake of the caller.
  local made, model = pcall(class, settings)
  if not made then return refuse(where, tostring(model), "corrupt") end
  local found
  found, message, code = files.read(model, path)
  if not found then return nil, message, code end
  local companions
  companions, message, code = companions_of(folder)
  if not companions then return nil, message, code end
  remember(model, found, text, companions, folder)
  model.stop = stops or nil
  return model
end
