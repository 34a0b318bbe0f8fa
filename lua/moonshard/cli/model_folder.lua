-- The model and the vocabulary that a command names: the folder of a model, of adapters or of a
-- run, and a tokenizer.
local adapter_files = require "moonshard.nn.adapter_files"
local core = require "moonshard.core"
local launch = require "moonshard.base.launch"
local tokenizer_files = require "moonshard.tokenizer.files"
local vocabulary = require "moonshard.tokenizer.vocabulary"

local model_folder = {}

-- The folder of the model's files, or of its adapters, below a path that may be a run's; and what
-- is to be read.
local function folder_of(path)
  local kind = core.exists(path)
  if not kind then launch.exit(3, ("there is no file or folder '%s'"):format(path)) end
  if kind == "file" then return path:match "^(.*)/[^/]*$" or ".", path end
  path = path:gsub("(.)/+$", "%1")
  for _, folder in ipairs { path, path .. "/model" } do
    if core.exists(folder .. "/config.json") then return folder, folder end
  end
  for _, folder in ipairs { path, path .. "/adapter" } do
    if core.exists(folder .. "/adapter_config.json") then return folder, nil end
  end
  local is_run = core.exists(path .. "/metrics.jsonl")
  launch.exit(3, ("'%s' has no model: there is no config.json in it, nor in %s/model%s")
    :format(path, path, is_run and "; a run's model is saved when its recipe ends" or ""))
end

-- The model of which a folder has adapters, with these; and its folder. Adapters that were trained
-- on codes get codes, which are read in parts.
local function adapted(folder)
  local ms = require "moonshard"
  local where = folder .. "/adapter_config.json"
  local text, message = core.file_read(where)
  local config = text and core.json_decode(text)
  local base = type(config) == "table" and config.base_model_name_or_path
  if type(base) ~= "string" or not core.exists(base) then
    launch.exit(3, ("'%s': these are adapters of the model %s, which is not here%s"):format(where,
      type(base) == "string" and "'" .. base .. "'" or "of no known folder",
      message and ": " .. message or ": start in the folder in which they were trained"))
  end
  local is_coded, model = adapter_files.base_of(folder) ~= nil, nil
  local function read()
    local why
    model, why = ms.nn.pretrained(base)
    if not model then launch.exit(3, why) end
    local ok
    ok, why = model:load_adapters(folder)
    if not ok then launch.exit(3, why) end
  end
  if is_coded then
    ms.device("meta", read)
    model:materialize()
  else read() end
  return model, base
end

local function vocabulary_of(parsed, folder, model)
  local path = parsed.tokenizer
  if not path and not tokenizer_files.are_in(folder) then
    if model.options.vocab == 256 then return vocabulary.bytes() end
    launch.exit(3, ("'%s' has no tokenizer: name one with --tokenizer PATH"):format(folder))
  end
  local tokenizer, message = require "moonshard".tokenizer.load(path or folder,
    { pattern = parsed.pattern })
  if not tokenizer then launch.exit(3, message) end
  local words = vocabulary.of(tokenizer)
  local misfit = vocabulary.misfit(words, model)
  if misfit then launch.exit(3, misfit) end
  return words
end

--- Reads them, or ends the program with code 3.
---@param parsed { model: string, tokenizer?: string, pattern?: string }
---@return ms.LanguageModel model
---@return ms.Vocabulary words
function model_folder.read(parsed)
  local folder, path = folder_of(parsed.model)
  if not path then
    local model, base = adapted(folder)
    return model, vocabulary_of(parsed, base, model)
  end
  local model, message = require "moonshard".nn.pretrained(path)
  if not model then launch.exit(3, message) end
  return model, vocabulary_of(parsed, folder, model)
end

return model_folder
