-- Chat templates: the part `ms.chat`. Conversations become text, with the ranges that a model
-- learns.
local core = require "moonshard.core"
local conversation = require "moonshard.chat.conversation"
local folder = require "moonshard.chat.folder"
local functions = require "moonshard.chat.functions"
local learned = require "moonshard.chat.learned"
local options_of = require "moonshard.base.options"
local parser = require "moonshard.chat.parser"
local run = require "moonshard.chat.run"
local sorted_pairs = require "moonshard.base.sorted_pairs"
local text = require "moonshard.chat.text"
local tokenizer_files = require "moonshard.tokenizer.files"
local values = require "moonshard.chat.values"
local work = require "moonshard.chat.work"
local check, argument = options_of.check, options_of.argument

---@class ms.chat
local chat = {}

local STEPS <const>, BYTES <const> = 20000000, 64 << 20

---@class ms.ChatTemplate
local ChatTemplate = {}
ChatTemplate.__name = "ms.ChatTemplate"

-- What a parsed template is: its nodes, and its special tokens by name and as a list.
local function parsed_template(source, names, special)
  local parsed, message, code = work.run({ steps = STEPS, bytes = BYTES }, parser.parse, source)
  if not parsed then return nil, message, code end
  return setmetatable({ parsed = parsed, names = names, special = special }, ChatTemplate)
end

---@param source string
---@param options? ms.ChatOptions
---@return ms.ChatTemplate?
---@return string? message
---@return string? code
function chat.template(source, options)
  argument("chat.template", "text", source, "string")
  local o = check("chat.template", options, { tokens = "table", special = "list" })
  options_of.items("chat.template", "special", o.special, "string?")
  local names, special = {}, {}
  for name, token in sorted_pairs(o.tokens or {}) do
    argument("chat.template", "tokens." .. tostring(name), token, "string")
    names[name] = token
    special[#special + 1] = token
  end
  return parsed_template(source, names, o.special or special)
end

---@param tokenizer string|ms.Tokenizer
---@param options? { name?: string }
---@return ms.ChatTemplate?
---@return string? message
---@return string? code
function chat.of(tokenizer, options)
  argument("chat.of", "tokenizer", tokenizer, "string|tokenizer")
  local o = check("chat.of", options, { name = "string" })
  local path = type(tokenizer) == "string" and tokenizer or tokenizer_files.name(tokenizer)
  local source, names, special = folder.read(path, o.name)
  if not source then return nil, names, special end
  if type(tokenizer) ~= "string" then
    for id = 0, tokenizer:vocab_size() - 1 do
      local token, is_special = tokenizer:token(id)
      if is_special then special[#special + 1] = token end
    end
  end
  return parsed_template(source, names, special)
end

---@param line string
---@return any
---@return string? message
---@return string? code
function chat.decode(line)
  argument("chat.decode", "text", line, "string")
  return conversation.decode(line)
end

---@param record table
---@return table?
---@return string? message
---@return string? code
function chat.conversation(record)
  argument("chat.conversation", "record", record, "table")
  return conversation.of_record(record)
end

-- The names that a template reads, and which messages are an assistant's.
local function names_of(self, given, o, names)
  names.tools, names.documents = values.none, values.none
  for name, token in pairs(self.names) do names[name] = token end
  local assistants
  for name, value in pairs(conversation.names(given)) do
    if name == "messages" then names.messages, assistants = conversation.messages(value)
    else names[name] = conversation.value(value) end
  end
  for name, value in pairs(o.names or {}) do names[name] = conversation.value(value) end
  return assistants
end

-- What the template writes with or without a generation prompt, and the run that wrote it.
local function written(self, names, prompted)
  names.add_generation_prompt = prompted
  local result = run(self.parsed.body, names)
  return text.concat(result.pieces), result
end

-- The generation prompt: how much longer the text is with it. nil: the texts differ in another way,
-- or the prompt is but white space.
local function prompt_of(without, with)
  without, with = text.plain(without), text.plain(with)
  local prompt = with:sub(#without + 1)
  return with:sub(1, #without) == without and prompt:find "%S" and prompt or nil
end

-- Renders a conversation under limits that have begun.
local function render(self, given, o, date)
  local dated = false
  local names = functions.all(date, function() dated = true end)
  local assistants = names_of(self, given, o, names)
  local prompted = o.add_generation_prompt or false
  local made, result = written(self, names, prompted)
  local asked, ranges = dated
  if self.parsed.generation then ranges = learned.marked(result.marked)
  else
    -- Some templates refuse one of the two.
    local other = work.attempt(written, self, names, not prompted)
    local prompt = other
      and prompt_of(prompted and other or made, prompted and made or other)
    ranges = learned.ranges(made, assistants, self.special, prompt)
  end
  return { text = text.plain(made), learned = ranges, dated = asked }
end

---@param given table
---@param options? ms.RenderOptions
---@return { text: string, learned: integer[][], dated: boolean }?
---@return string? message
---@return string? code
function ChatTemplate:render(given, options)
  argument("render", "conversation", given, "table")
  local o = check("render", options, { add_generation_prompt = "boolean",
    date = "string|number", names = "table", steps = "integer", bytes = "integer" })
  local date = functions.date(o.date)
  if not date then
    core.raise(("render: date is \"2026-03-05\", with a time behind it or not, or seconds since \z
      1970, not '%s'"):format(tostring(o.date)))
  end
  return work.run({ steps = o.steps or STEPS, bytes = o.bytes or BYTES }, render, self, given, o,
    date)
end

options_of.methods(ChatTemplate, "a chat template")
ChatTemplate.__index = function(self, name)
  local method = rawget(ChatTemplate, name)
  if method ~= nil then return method end
  return options_of.no_field("a chat template", name, ChatTemplate)
end

return options_of.closed(chat, "ms.chat")
