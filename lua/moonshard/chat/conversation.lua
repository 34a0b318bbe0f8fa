-- Conversations as a user has them, and as values of a template.
local core = require "moonshard.core"
local text = require "moonshard.chat.text"
local values = require "moonshard.chat.values"
local work = require "moonshard.chat.work"

local conversation = {}

-- What marks a table as a list even when it is empty.
local LIST <const> = getmetatable(core.json_list {})

-- Object of JSON -> its keys in the order of the text.
local orders = setmetatable({}, { __mode = "k" })

---@param line string
---@return any
---@return string? message
---@return string? code
function conversation.decode(line) return core.json_decode(line, true, orders) end

-- The keys of an object: in the order of the text that it was read from, then sorted.
local function keys_of(object)
  local list, known, more = {}, {}, {}
  for _, key in ipairs(orders[object] or {}) do
    if object[key] ~= nil and not known[key] then list[#list + 1], known[key] = key, true end
  end
  for key in pairs(object) do
    if type(key) ~= "string" then
      work.fail("mismatch", "a table has the key %s: it is a list, or has names",
        tostring(key))
    end
    if not known[key] then more[#more + 1] = key end
  end
  table.sort(more)
  return table.move(more, 1, #more, #list + 1, list)
end

local function utf8_text(value, origin)
  if not utf8.len(value) then work.fail("mismatch", "a text of the conversation is not UTF-8") end
  return text.mark(value, origin)
end

local of

local function list_of(table_, origin)
  local made = { origin = origin }
  local count = 0
  for _ in pairs(table_) do count = count + 1 end
  if count ~= #table_ then work.fail("mismatch", "a list has gaps or names") end
  for i, item in ipairs(table_) do made[i] = of(item, origin) end
  return values.list(made)
end

-- A dict of a table. without: names whose values, at this level, have no origin.
local function dict_of(table_, origin, without)
  local made = values.dict()
  made.origin = origin
  for _, key in ipairs(keys_of(table_)) do
    local own = not (without and without[key]) and origin or nil
    values.set(made, utf8_text(key, own), of(table_[key], own))
  end
  return made
end

--- A value of a template, whose strings come from a message.
---@param value any
---@param origin? integer
---@return any
function of(value, origin)
  local kind = type(value)
  work.spend(1)
  if kind == "string" then return utf8_text(value, origin) end
  if kind == "number" or kind == "boolean" then return value end
  if value == core.json_null then return values.none end
  if kind ~= "table" then work.fail("mismatch", "a %s has no value in a template", kind) end
  work.enter()
  local made
  if #value > 0 or getmetatable(value) == LIST then made = list_of(value, origin)
  else made = dict_of(value, origin) end
  work.leave()
  return made
end
conversation.value = of

-- Of an assistant's message these belong to its header.
local HEADER <const> = { role = true, name = true }

--- The messages as a value, and which of them are an assistant's.
---@param messages any
---@return ms.ChatList
---@return table<integer, boolean>
function conversation.messages(messages)
  if type(messages) ~= "table" then
    work.fail("mismatch", "the conversation has no list of messages, but a %s", type(messages))
  end
  local list, assistants = {}, {}
  for i, message in ipairs(messages) do
    if type(message) ~= "table" or #message > 0 then
      work.fail("mismatch", "message %d of the conversation must be a table with names", i)
    end
    assistants[i] = message.role == "assistant"
    list[i] = dict_of(message, i, assistants[i] and HEADER or nil)
  end
  for key in pairs(messages) do
    if list[key] == nil then
      work.fail("mismatch", "the messages have the key %s beside a list", tostring(key))
    end
  end
  return values.list(list), assistants
end

--- The names of a conversation: those of a table with messages, or messages alone.
---@param given table
---@return table<string, any>
function conversation.names(given)
  if given.messages == nil then return { messages = given } end
  local names = {}
  for name, value in pairs(given) do names[name] = value end
  local more = names.chat_template_kwargs
  names.chat_template_kwargs = nil
  if type(more) == "table" then for name, value in pairs(more) do names[name] = value end end
  return names
end

-- Messages of a part of a record: a string is one message.
local function part(value, role)
  if type(value) == "string" then return { { role = role, content = value } } end
  return type(value) == "table" and value or nil
end

---@param record table
---@return table?
---@return string? message
---@return string? code
function conversation.of_record(record)
  if record.messages ~= nil then return record end
  local prompt, completion = part(record.prompt, "user"), part(record.completion, "assistant")
  if not prompt or not completion then
    return core.refuse("chat.conversation: a record has messages, or prompt and completion, each \z
      a string or a list of messages", "mismatch")
  end
  local made = {}
  for name, value in pairs(record) do
    if name ~= "prompt" and name ~= "completion" then made[name] = value end
  end
  made.messages = table.move(prompt, 1, #prompt, 1, {})
  table.move(completion, 1, #completion, #made.messages + 1, made.messages)
  return made
end

return conversation
