-- The model and the vocabulary that a command names: a model's folder, or a run's, and a tokenizer.
local core = require "moonshard.core"
local launch = require "moonshard.base.launch"
local tokenizer_files = require "moonshard.tokenizer.files"
local vocabulary = require "moonshard.tokenizer.vocabulary"

local model_folder = {}

-- The folder of the model's files, below a path that may be a run's.
local function folder_of(path)
  local kind = core.exists(path)
  if not kind then launch.exit(3, ("there is no file or folder '%s'"):format(path)) end
  if kind == "file" then return path:match "^(.*)/[^/]*$" or ".", path end
  path = path:gsub("(.)/+$", "%1")
  for _, folder in ipairs { path, path .. "/model" } do
    if core.exists(folder .. "/config.json") then return folder, folder end
  end
  local is_run = core.exists(path .. "/metrics.jsonl")
  launch.exit(3, ("'%s' has no model: there is no config.json in it, nor in %s/model%s")
    :format(path, path, is_run and "; a run's model is saved when its recipe ends" or ""))
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
  local model, message = require "moonshard".nn.pretrained(path)
  if not model then launch.exit(3, message) end
  return model, vocabulary_of(parsed, folder, model)
end

return model_folder
