-- The chat template that the files of a tokenizer have, and the special tokens that they name.
local core = require "moonshard.core"
local sorted_pairs = require "moonshard.base.sorted_pairs"

local folder = {}

-- A file of JSON as a table; an empty one if there is no file. nil, message, code: it is damaged.
local function read_json(path)
  if core.exists(path) ~= "file" then return {} end
  local text, message, code = core.file_read(path)
  if not text then return nil, message, code end
  local value
  value, message = core.json_decode(text)
  if type(value) ~= "table" then
    return core.refuse(("'%s': %s"):format(path, message or "it has no object"), "corrupt")
  end
  return value
end

-- The text of a token, which the files have as a string or as an object with its content.
local function content(value)
  if type(value) == "table" then value = value.content end
  return type(value) == "string" and value or nil
end

-- Special tokens: by the names that templates know, and as a list of all. added: of tokenizer.json.
local function tokens_of(config, added)
  local names, list, seen = {}, {}, {}
  local function add(value)
    local text = content(value)
    if text and text ~= "" and not seen[text] then
      seen[text], list[#list + 1] = true, text
    end
    return text
  end
  for name, value in sorted_pairs(config) do
    if type(name) == "string" and name:find "_token$" then names[name] = add(value) end
  end
  local more = config.additional_special_tokens or config.extra_special_tokens
  for _, value in sorted_pairs(type(more) == "table" and more or {}) do add(value) end
  for _, tokens in ipairs { config.added_tokens_decoder or {}, added or {} } do
    for _, value in sorted_pairs(type(tokens) == "table" and tokens or {}) do
      if type(value) == "table" and value.special == true then add(value) end
    end
  end
  return names, list
end

-- The template with a name of a list { { name, template } }; "default" unless named.
local function chosen(list, name, path)
  local known = {}
  for _, one in ipairs(list) do
    if type(one) == "table" and type(one.name) == "string" and type(one.template) == "string" then
      if one.name == (name or "default") then return one.template end
      known[#known + 1] = one.name
    end
  end
  return core.refuse(("'%s' has no chat template '%s': it has %s"):format(path, name or "default",
    #known > 0 and table.concat(known, ", ") or "none"), "not_found")
end

--- The text of a folder's template, its special tokens by name, and all of them. nil, message, code
--- if there is none.
---@param path string
---@param name? string
---@return string?
---@return any
---@return any
function folder.read(path, name)
  if core.exists(path) ~= "folder" then path = path:match "^(.*)/[^/]*$" or "." end
  local config, message, code = read_json(path .. "/tokenizer_config.json")
  if not config then return nil, message, code end
  local map, whole
  map, message, code = read_json(path .. "/special_tokens_map.json")
  if not map then return nil, message, code end
  for key, value in pairs(map) do if config[key] == nil then config[key] = value end end
  whole, message, code = read_json(path .. "/tokenizer.json")
  if not whole then return nil, message, code end
  local names, list = tokens_of(config, whole.added_tokens)
  local file, text = path .. "/chat_template.jinja", config.chat_template
  -- The file wins, as in transformers.
  if core.exists(file) == "file" and (not name or name == "default") then
    text, message, code = core.file_read(file)
  elseif type(text) == "table" then
    text, message, code = chosen(text, name, path)
  elseif type(text) ~= "string" or name and name ~= "default" then
    text, message, code = core.refuse(("'%s' has no chat template%s: neither chat_template.jinja \z
      nor chat_template in tokenizer_config.json"):format(path,
      name and (" '%s'"):format(name) or ""), "not_found")
  end
  if not text then return nil, message, code end
  return text, names, list
end

return folder
