-- moonshard generate: text from a model's folder, shown as it comes.
local chat_functions = require "moonshard.chat.functions"
local core = require "moonshard.core"
local launch = require "moonshard.base.launch"
local live = require "moonshard.base.status_line"
local model_folder = require "moonshard.cli.model_folder"
local switches = require "moonshard.cli.switches"
local talk = require "moonshard.cli.talk"
local vocabulary = require "moonshard.tokenizer.vocabulary"

local generate = {}

local COUNT <const> = 200

local function number(text)
  local value = tonumber(text)
  if value and value >= 0 then return value end
  return nil, ("a number of 0 or more is expected, not '%s'"):format(text)
end

local function share(text)
  local value = tonumber(text)
  if value and value >= 0 and value <= 1 then return value end
  return nil, ("a number from 0 to 1 is expected, not '%s'"):format(text)
end

local function date(text)
  if chat_functions.date(text) then return text end
  return nil, ("a date like 2026-03-05 is expected, not '%s'"):format(text)
end

-- The switches of conversations.
local function add_chat(parser)
  parser:flag("--chat", "talk with the model: each line of standard input is a message, and the \z
    chat template of the tokenizer says how messages become text; with --prompt, one message")
  parser:option("--system", "with --chat: what the model is told before the conversation \z
    (default: nothing)")
    :argname "TEXT"
  parser:option("--date", "with --chat: the date that templates ask for (default: today's)")
    :argname "DATE":convert(date)
end

--- The parser of its command line.
---@return table
function generate.parser()
  local parser = switches.plain("generate", "Continues a text with a model: prints the prompt, \z
    and new text as it comes. The same seed gives the same text.")
  parser:argument("model", "a folder with config.json and .safetensors, or a run's folder"):args "?"
  parser:option("--prompt", "the text to continue; -: what comes on standard input (default: the \z
    token that begins texts)"):argname "TEXT"
  parser:option("--special", "what names of special tokens in the prompt become: text, or the \z
    tokens (parse) (default: text)"):choices { "text", "parse" }:default "text":show_default(false)
  parser:option("--count", ("tokens at most (default: %d, with --chat %d for an answer, or what \z
    fits into the model's context)"):format(COUNT, talk.COUNT)):argname "N":convert(switches.count)
  parser:option("--temperature", "divides the logits; 0: always the likeliest token")
    :argname "T":convert(number):default "0.8"
  parser:option("--top-k", "draw from the K likeliest tokens (default: from all)")
    :argname "K":convert(switches.count)
  parser:option("--top-p", "draw from the likeliest tokens of this probability (default: from all)")
    :argname "P":convert(share)
  parser:flag("--greedy", "as --temperature 0")
  parser:option("--seed", "another seed gives another text"):argname "N"
    :convert(switches.integer):default "0"
  parser:option("--tokenizer", "a tokenizer's file or folder (default: the model's folder)")
    :argname "PATH"
  parser:option("--pattern", "where ranks of tiktoken cut text: gpt2, cl100k, o200k, llama3")
  parser:option("--stop", "auto: the text ends where the model ends it; none: it goes on")
    :choices { "auto", "none" }:default "auto"
  add_chat(parser)
  switches.add_threads(parser)
  return parser
end

-- The prompt's text, and its ids.
local function prompt_of(parsed, words)
  local text = parsed.prompt
  if text == "-" then text = io.stdin:read "a" end
  local called, ids = pcall(vocabulary.prompt, words, text, { special = parsed.special })
  if not called then launch.exit(2, tostring(ids)) end
  if not ids then
    launch.exit(2, "--prompt TEXT must be given: the tokenizer names no token that begins a text")
  end
  return text or "", ids
end

-- Unless given: what fits, as each token past the context costs a forward of the whole window.
local function count_of(parsed, model, ids)
  local room = model.options.context - #ids
  return parsed.count or room > 0 and math.min(COUNT, room) or COUNT
end

local function stops_of(parsed, model, words)
  if parsed.stop == "none" then return false end
  return model.stop or words.stop
end

-- Shows text at once; false where nobody reads it any more.
local function show(text) return text == "" or io.stdout:write(text) and io.stdout:flush() end

-- Writes the text; returns how many tokens it has, and their seconds without those of the first,
-- before which the prompt is run.
local function write(parsed, model, words, text, ids)
  local process, stream, made, first = launch.process, words.stream(ids), 0, nil
  if process then process.watch_signals() end
  local reads = show(text)
  model:generate(core.tensor(ids, "i64"), {
    count = count_of(parsed, model, ids), stop = stops_of(parsed, model, words),
    temperature = parsed.greedy and 0 or parsed.temperature,
    top_k = parsed.top_k, top_p = parsed.top_p, seed = parsed.seed,
    on_token = function(id)
      made, first = made + 1, first or core.clock_ms()
      reads = reads and show(stream.add(id))
      return reads and not (process and process.stop_requested()) and true or false
    end,
  })
  show(stream.finish() .. "\n")
  return made, (core.clock_ms() - first) / 1000
end

function generate.main(arguments)
  local parser = generate.parser()
  local parsed = switches.parse(parser, arguments)
  if not parsed.model then launch.exit(2, "which model?\n" .. parser:get_usage()) end
  for _, name in ipairs { "system", "date" } do
    if parsed[name] and not parsed.chat then
      launch.exit(2, ("--%s is for conversations: give --chat, too"):format(name))
    end
  end
  switches.apply(parsed)
  local model, words = model_folder.read(parsed)
  if parsed.chat then
    talk.run(parsed, model, words)
    return 0
  end
  local made, seconds = write(parsed, model, words, prompt_of(parsed, words))
  if live.is_terminal() then
    io.stderr:write(("%d tokens, %.1f tokens/s\n"):format(made,
      (made - 1) / math.max(seconds, 1e-6)))
  end
  local signal = launch.process and launch.process.stop_requested()
  if signal then launch.exit(128 + signal) end
  return 0
end

return generate
