-- nn.pretrained: a model with weights that other tools (or model:save) wrote: config.json says what it is.
local core = require "moonshard.core"

-- Settings of config.json that would change what the model computes, with the only values that are built here.
local required = {
  gpt2 = { activation_function = "gelu_new", scale_attn_weights = true, scale_attn_by_inverse_layer_idx = false },
  llama = { hidden_act = "silu", attention_bias = false, mlp_bias = false },
}

local function unsupported(path, what) return core.refuse(("'%s': %s"):format(path, what), "unsupported") end

-- Whether the model here computes what the file means; else nil, message, code.
local function check(path, config)
  for name, value in pairs(required[config.model_type]) do
    if config[name] ~= nil and config[name] ~= value then
      return unsupported(path, ("%s is %s; models here have %s"):format(name, tostring(config[name]), tostring(value)))
    end
  end
  if config.rope_scaling ~= nil then return unsupported(path, "it scales its rotary positions (rope_scaling), which is not supported") end
  local head, heads, width = math.tointeger(config.head_dim), math.tointeger(config.num_attention_heads), math.tointeger(config.hidden_size)
  if config.head_dim ~= nil and not (head and heads and head * heads == width) then
    local text = "head_dim %s times %s heads is not hidden_size %s"
    return unsupported(path, text:format(tostring(config.head_dim), tostring(config.num_attention_heads), tostring(config.hidden_size)))
  end
  return true
end

--- A GPT-2 or Llama with the weights of a folder with config.json and .safetensors files, or of one file beside its config.json.
--- options: dropout and recompute, which config.json does not decide.
---@param path string
---@param options? { dropout?: number, recompute?: boolean }
---@return ms.LanguageModel?
---@return string? message
---@return string? code
return function(path, options)
  for name in pairs(options or {}) do
    if name ~= "dropout" and name ~= "recompute" then core.raise(("nn.pretrained: unknown option '%s'; it has dropout, recompute"):format(tostring(name))) end
  end
  local folder = core.exists(path) == "folder" and path:gsub("/+$", "") or path:match "^(.*)/[^/]*$" or "."
  local where = folder .. "/config.json"
  local text, message, code = core.file_read(where)
  if not text then return nil, message, code end
  local config
  config, message, code = core.json_decode(text)
  if not config then return core.refuse(("'%s': %s"):format(where, message or "null"), code or "corrupt") end
  if type(config) ~= "table" or not required[config.model_type] then
    return unsupported(where, ("model_type is %s; gpt2 and llama can be loaded"):format(tostring(type(config) == "table" and config.model_type or nil)))
  end
  local ok
  ok, message, code = check(where, config)
  if not ok then return nil, message, code end
  local class = require("moonshard.nn." .. config.model_type)
  local settings = class.from_config(config)
  for name, value in pairs(options or {}) do settings[name] = value end
  -- A file from elsewhere may say anything: what it lacks is its fault, not the caller's.
  local made, model = pcall(class, settings)
  if not made then return core.refuse(("'%s': %s"):format(where, tostring(model)), "corrupt") end
  ok, message, code = model:load(path)
  if not ok then return nil, message, code end
  return model
end
