-- moonshard tokenize --chat: conversations in lines of JSON to shards of tokens, with a mask of
-- those that are learned. One process: a template is a program that Lua interprets.
local chat = require "moonshard.chat"
local core = require "moonshard.core"
local folder = require "moonshard.chat.folder"
local launch = require "moonshard.base.launch"
local tokenizer_files = require "moonshard.tokenizer.files"
local tokens_of = require "moonshard.chat.tokens"

local tokenize_chat = {}

-- The number of the line that begins at a byte of a file, for messages.
local function line_number(path, at)
  local number, left = 1, at
  local file <close> = assert(io.open(path, "rb"))
  while left > 0 do
    local text = file:read(math.min(left, 1 << 20))
    if not text then break end
    number, left = number + select(2, text:gsub("\n", "")), left - #text
  end
  return number
end

local function fail_at(path, at, message)
  launch.exit(3, ("'%s', line %d: %s"):format(path, line_number(path, at), message))
end

-- f(line, at) for each line that begins in a part of a file, without blank ones, until f gives
-- true; at: the line's first byte in the file.
local function each_line(part, f)
  local file, message = io.open(part.path, "rb")
  if not file then launch.exit(3, message) end
  local closing <close> = file -- luacheck: ignore closing
  local at = part.from
  if at > 0 then
    -- A line that began in the part before belongs to it.
    file:seek("set", at - 1)
    at = at - 1 + #(file:read "L" or "")
  end
  while at < part.to do
    local line = file:read "L"
    if not line then break end
    local text = at == 0 and line:gsub("^\xef\xbb\xbf", "") or line
    if text:find "%S" and f(text, at) then return end
    at = at + #line
  end
end

--- What makes conversations of lines, and text of conversations.
---@class ms.ChatWork
---@field tokenizer ms.Tokenizer
---@field template ms.ChatTemplate
---@field date? string
---@field end_id? integer
---@field token_bytes integer

-- The ids of a line's conversation, and which are learned, without the end of the document.
local function conversation_of(work, path, line, at)
  local function demand(value, message)
    if value == nil then fail_at(path, at, message) end
    return value
  end
  local record = demand(chat.decode(line))
  if type(record) ~= "table" then fail_at(path, at, "it is no object") end
  local given = demand(chat.conversation(record))
  local rendered = demand(work.template:render(given, { date = work.date }))
  if rendered.dated and not work.date then
    launch.exit(2, "tokenize: the chat template writes the date: --date YYYY-MM-DD says which")
  end
  local ids, learned = tokens_of(work.tokenizer, rendered)
  if not ids then fail_at(path, at, learned) end
  return ids, learned
end

-- Whether an id comes before the end of a conversation.
local function is_inside(ids, id)
  for i = 1, #ids - 1 do if ids[i] == id then return true end end
  return false
end

-- Adds the id that ends documents. A loader that packs documents cuts them there, so that it must
-- not end a turn, too.
local function add_end(work, path, at, ids, learned)
  if not work.end_id then return end
  if is_inside(ids, work.end_id) then
    fail_at(path, at, ("the template writes '%s' inside of a conversation, and packed documents \z
      would be cut there: give --end-of-text another token, or none"):format(
      (work.tokenizer:token(work.end_id))))
  end
  if ids[#ids] ~= work.end_id then
    ids[#ids + 1], learned[#learned + 1] = work.end_id, false
  end
end

-- 8 flags as a byte, from the lowest bit on.
local function bits_of(flags)
  local bytes = {}
  for first = 1, #flags, 8 do
    local byte = 0
    for i = 0, 7 do if flags[first + i] then byte = byte | 1 << i end end
    bytes[#bytes + 1] = string.char(byte)
  end
  return table.concat(bytes)
end

-- Writes the mask first: a shard that is there is complete.
local function write(shard, work, parts, flags)
  local narrow = work.token_bytes == 2
  local head = ("<I4I4I4"):pack(narrow and 20240520 or 20240801, narrow and 1 or 7, #flags)
  for _, file in ipairs {
    { (shard.out:gsub("%.bin$", ".mask")), bits_of(flags) },
    { shard.out, head .. ("\0"):rep(1024 - #head) .. table.concat(parts) },
  } do
    local done, message = core.file_write(file[1], file[2])
    if not done then launch.exit(3, message) end
  end
end

--- Makes shards. done(bytes): called now and then with the bytes of lines so far. Returns how many
--- tokens there are, and how many of them are learned.
---@param shards { out: string, files: table[] }[]
---@param work ms.ChatWork
---@param done fun(bytes: integer)
---@return integer tokens
---@return integer learned
function tokenize_chat.run(shards, work, done)
  local format, all, targets, bytes = work.token_bytes == 2 and "<I2" or "<I4", 0, 0, 0
  for _, shard in ipairs(shards) do
    local parts, flags = {}, {}
    for _, part in ipairs(shard.files) do
      each_line(part, function(line, at)
        local ids, learned = conversation_of(work, part.path, line, at)
        add_end(work, part.path, at, ids, learned)
        for i, id in ipairs(ids) do
          ids[i] = format:pack(id)
          flags[#flags + 1] = learned[i]
          if learned[i] then targets = targets + 1 end
        end
        parts[#parts + 1] = table.concat(ids)
        bytes = bytes + #line
        done(bytes)
      end)
    end
    write(shard, work, parts, flags)
    all = all + #flags
  end
  return all, targets
end

-- Names of tokens that end documents and no turns, in tokenizers that have both.
local ENDS <const> = { "<|endoftext|>", "<|end_of_text|>" }

--- The id that ends documents: the first of the usual ones, of the tokenizer's padding and of its
--- end of a text that the first conversation does not have inside; nil: all of these end turns.
---@param work ms.ChatWork
---@param files { path: string, bytes: integer }[]
---@return integer?
function tokenize_chat.end_of_text(work, files)
  local ids
  for _, file in ipairs(files) do
    if ids then break end
    each_line({ path = file.path, from = 0, to = file.bytes }, function(line, at)
      ids = conversation_of(work, file.path, line, at)
      return true
    end)
  end
  local _, names = folder.read(tokenizer_files.name(work.tokenizer))
  local candidates = { ENDS[1], ENDS[2], type(names) == "table" and names.pad_token or nil }
  for i, name in ipairs(candidates) do candidates[i] = work.tokenizer:id(name) or -1 end
  candidates[#candidates + 1] = work.tokenizer:eos()
  for _, id in ipairs(candidates) do
    if id >= 0 and not is_inside(ids or {}, id) then return id end
  end
end

--- The template of a tokenizer, and a hash of its text. Ends the program with code 3 if there is
--- none.
---@param tokenizer ms.Tokenizer
---@return ms.ChatTemplate template
---@return string hash
function tokenize_chat.template(tokenizer)
  local template, message = chat.of(tokenizer)
  if not template then launch.exit(3, message) end
  local source = folder.read(tokenizer_files.name(tokenizer))
  return template, ("%016x"):format(core.hash(source))
end

return tokenize_chat
