-- moonshard generate --chat: a conversation with a model, by the chat template of its tokenizer.
local chat = require "moonshard.chat"
local core = require "moonshard.core"
local launch = require "moonshard.base.launch"
local live = require "moonshard.base.status_line"

local talk = {}

-- The answer of a conversation in which the end of a turn is looked for.
local ANSWER <const> = "The answer is 7."

-- Tokens of an answer at most, unless given: room for keys and values of so many is taken at once.
local COUNT <const> = 1024
talk.COUNT = COUNT

---@class ms.Talk
---@field parsed table
---@field model ms.LanguageModel
---@field words ms.Vocabulary
---@field template ms.ChatTemplate
---@field date string                  that templates are told
---@field messages table[]
---@field answers integer              so far
---@field stops table<integer, boolean> ids that end an answer

-- The text of messages, by the template.
local function rendered(self, messages, prompted)
  local made, message = self.template:render(messages,
    { add_generation_prompt = prompted, date = self.date })
  if not made then launch.exit(3, message) end
  return made
end

-- Ids of rendered text: the template writes all special tokens. Names of some that a message has
-- become these tokens, too, as in transformers.
local function encoded(self, text)
  return self.words.encode(text, { special = "parse", bos = false, eos = false })
end

-- The first special token that the template writes after an answer; nil: it writes none. Tells of
-- the date, if the template asks for it.
local function end_of_turn(self)
  local messages = table.move(self.messages, 1, #self.messages, 1, {})
  messages[#messages + 1] = { role = "user", content = "A question." }
  messages[#messages + 1] = { role = "assistant", content = ANSWER }
  local made = rendered(self, messages, false)
  if made.dated and not self.parsed.date then
    io.stderr:write(("the chat template asks for the date, and is told %s (--date for another)\n")
      :format(self.date:sub(1, 10)))
  end
  local stop = select(2, made.text:find(ANSWER, 1, true))
  for _, id in ipairs(stop and encoded(self, made.text:sub(stop + 1)) or {}) do
    if select(2, self.words.tokenizer:token(id)) then return id end
  end
end

-- The ids that end an answer, as a set.
local function stops_of(self)
  local set, known, mark = {}, self.model.stop, end_of_turn(self)
  if self.parsed.stop == "none" then return set end
  for _, id in ipairs(type(known) == "table" and known or { known }) do set[id] = true end
  if mark then set[mark] = true end
  if self.words.stop then set[self.words.stop] = true end
  if not next(set) then
    io.stderr:write "nothing ends an answer: neither the chat template nor the tokenizer has a \z
      token for that (--count N limits it)\n"
  end
  return set
end

-- Shows text at once; false where nobody reads it any more.
local function show(text) return text == "" or io.stdout:write(text) and io.stdout:flush() end

local function full(self, length)
  launch.exit(3, ("the conversation has %d tokens, and the model's context %d: nothing of it is \z
    left out, so it ends here"):format(length, self.model.options.context))
end

-- Writes the model's answer to the messages; returns it.
local function answer(self)
  local parsed, process = self.parsed, launch.process
  local ids = encoded(self, rendered(self, self.messages, true).text)
  local room = self.model.options.context - #ids
  if room < 1 then full(self, #ids) end
  local list = {}
  for id in pairs(self.stops) do list[#list + 1] = id end
  table.sort(list)
  local stream, parts, reads, made, ended = self.words.stream(ids), {}, true, 0, false
  local function add(text)
    parts[#parts + 1] = text
    reads = reads and show(text)
  end
  self.model:generate(core.tensor(ids, "i64"), {
    count = math.min(parsed.count or COUNT, room), stop = #list > 0 and list,
    temperature = parsed.greedy and 0 or parsed.temperature, top_k = parsed.top_k,
    top_p = parsed.top_p, seed = parsed.seed + self.answers,
    on_token = function(id)
      made, ended = made + 1, self.stops[id] or false
      if not ended then add(stream.add(id)) end
      return reads and not (process and process.stop_requested()) and true or false
    end,
  })
  add(stream.finish())
  show "\n"
  local signal = process and process.stop_requested()
  if signal then launch.exit(128 + signal) end
  if not reads then launch.exit(0) end
  if not ended and made == room then full(self, #ids + made) end
  if not ended and not parsed.count then
    io.stderr:write(("the answer is cut after %d tokens (--count N for more)\n"):format(COUNT))
  end
  return table.concat(parts)
end

-- Templates take UTF-8: other bytes, which a model may write, become a sign for them.
local function repaired(text)
  local parts, at = {}, 1
  repeat
    local _, bad = utf8.len(text, at)
    parts[#parts + 1] = text:sub(at, bad and bad - 1) .. (bad and "\u{FFFD}" or "")
    at = bad and bad + 1
  until not at
  return table.concat(parts)
end

-- One message of the user, and its answer.
local function turn(self, text)
  table.insert(self.messages, { role = "user", content = text })
  table.insert(self.messages, { role = "assistant", content = repaired(answer(self)) })
  self.answers = self.answers + 1
end

-- The user's next line that is not blank; nil: there is no more.
local function next_line()
  repeat
    if live.is_terminal() then show "> " end
    local line = io.stdin:read "l"
    line = line and line:gsub("\r$", "")
    if not line or line:find "%S" then return line end
  until false
end

--- Talks until the user's lines end; with --prompt, gives one answer.
---@param parsed table
---@param model ms.LanguageModel
---@param words ms.Vocabulary
function talk.run(parsed, model, words)
  if not words.tokenizer then
    launch.exit(3, "--chat: the model works on bytes, and has no tokenizer with a chat template")
  end
  local template, message = chat.of(words.tokenizer)
  if not template then launch.exit(3, "--chat: " .. message) end
  local self = {
    parsed = parsed, model = model, words = words, template = template,
    date = parsed.date or os.date "%Y-%m-%dT%H:%M:%S", messages = {},
    answers = 0,
  }
  if parsed.system then self.messages[1] = { role = "system", content = parsed.system } end
  self.stops = stops_of(self)
  if parsed.prompt then
    if launch.process then launch.process.watch_signals() end
    turn(self, parsed.prompt == "-" and io.stdin:read "a" or parsed.prompt)
    return
  end
  for line in next_line do turn(self, line) end
  if live.is_terminal() then show "\n" end
end

return talk
