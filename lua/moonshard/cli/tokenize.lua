-- moonshard tokenize: files of text to shards of tokens, on all cores. Shards that are complete are
-- not made again.
local core = require "moonshard.core"
local launch = require "moonshard.base.launch"
local live = require "moonshard.base.status_line"
local switches = require "moonshard.cli.switches"
local tokenize_chat = require "moonshard.cli.tokenize_chat"
local tokenizer_files = require "moonshard.tokenizer.files"
local sorted_pairs = require "moonshard.base.sorted_pairs"

local tokenize = {}

-- A shard is made of at least this part of all bytes, within these limits: many enough for all
-- cores, few enough for a folder.
local PARTS <const>, LEAST <const>, MOST <const> = 64, 4 << 20, 256 << 20

local function demand(value, message)
  if value == nil or value == false then launch.exit(3, message) end
  return value
end

-- The files below the paths, in order: a folder represents all in it, but those that begin with a
-- dot.
local function files_of(paths)
  local files = {}
  local function add(path)
    local kind, bytes, modified = core.exists(path)
    demand(kind, ("'%s' does not exist"):format(path))
    if kind == "file" then
      files[#files + 1] = { path = path, bytes = bytes, modified = modified }
      return
    end
    for _, name in ipairs(demand(core.list(path))) do
      if name:sub(1, 1) ~= "." then add((path:gsub("/+$", "")) .. "/" .. name) end
    end
  end
  for _, path in ipairs(paths) do add(path) end
  if #files == 0 then launch.exit(2, "tokenize: there is no file in these folders") end
  return files
end

-- The shards of this name that exist, and what a run that was killed has left of others: masks are
-- written before their shards.
local function shards_of(name)
  local folder, base = name:match "^(.*)/([^/]*)$"
  folder, base = folder == "" and "/" or folder or ".", base or name
  local found, left = {}, {}
  for _, file in ipairs(demand(core.list(folder))) do
    local tail = file:sub(1, #base) == base and file:match("^_%d%d%d%d%d%.bin(.*)$", #base + 1)
    if tail == "" then found[#found + 1] = folder .. "/" .. file
    elseif tail and tail:match "^%.tmp%-" then left[#left + 1] = folder .. "/" .. file end
    local stem = file:sub(1, #base) == base and file:match("^_%d%d%d%d%d%.mask", #base + 1)
    if stem and not core.exists(folder .. "/" .. file:gsub("%.mask.*$", ".bin")) then
      left[#left + 1] = folder .. "/" .. file
    end
  end
  return found, left
end

-- The parts of a file: a text is one; lines of JSON are cut into ones of so many bytes. A line
-- belongs to the part in which it begins.
local function parts_of(file, lines, size)
  if not lines then return { { path = file.path, bytes = file.bytes } } end
  local parts = {}
  for from = 0, math.max(file.bytes - 1, 0), size do
    local to = math.min(from + size, file.bytes)
    parts[#parts + 1] = { path = file.path, from = from, to = to, bytes = to - from }
  end
  return parts
end

-- Shards: consecutive parts of files, by their bytes alone, so that a plan does not depend on the
-- machine.
local function plan_of(files, name, lines)
  local total = 0
  for _, file in ipairs(files) do total = total + file.bytes end
  local size = math.min(math.max(total // PARTS, LEAST), MOST)
  local shards, bytes = {}, size
  for _, file in ipairs(files) do
    for _, part in ipairs(parts_of(file, lines, size)) do
      if bytes >= size then
        shards[#shards + 1] = { out = ("%s_%05d.bin"):format(name, #shards), files = {} }
        bytes = 0
      end
      table.insert(shards[#shards].files, part)
      bytes = bytes + part.bytes
    end
  end
  return shards, total
end

-- What the shards are made of, as text: a run with another one does not continue them. hash: of the
-- tokenizer's files, which older versions did not have.
local function made_of(parsed, files, tokenizer, end_id, hash)
  local lines = { parsed.tokenizer, parsed.pattern or "", tokenizer:vocab_size(),
    tostring(end_id), parsed.special }
  lines[#lines + 1] = hash
  if parsed.field then lines[#lines + 1] = "field " .. parsed.field end
  if parsed.chat then
    lines[#lines + 1] = ("chat %s %s"):format(parsed.template_hash, parsed.date or "")
  end
  for _, file in ipairs(files) do
    lines[#lines + 1] = ("%s %d %d"):format(file.path, file.bytes, file.modified)
  end
  return ("%016x"):format(core.hash(table.concat(lines, "\n")))
end

-- The token that ends documents, by the switch or the tokenizer's files; nil: none.
local function end_of_text(parsed, tokenizer, files)
  if parsed.end_of_text == "none" then return nil end
  if parsed.end_of_text == "auto" and parsed.chat then
    return tokenize_chat.end_of_text({ tokenizer = tokenizer, template = parsed.template,
      date = parsed.date }, files)
  end
  if parsed.end_of_text == "auto" then
    return tokenizer:eos() or tokenizer:id "<|endoftext|>"
  end
  local id = tokenizer:id(parsed.end_of_text)
  if id then return id end
  local names = {}
  for token = 0, tokenizer:vocab_size() - 1 do
    local name, special = tokenizer:token(token)
    if special then names[#names + 1] = name end
  end
  local near = core.nearest(parsed.end_of_text, names)
  launch.exit(2, ("--end-of-text %s: the tokenizer has no such token%s"):format(
    parsed.end_of_text, near and (": did you mean '%s'?"):format(near) or ""))
end

-- The names of the members of a file's first object, for messages; nil: it has none.
local function members_of(path)
  local file = io.open(path, "rb")
  local line = file and file:read(1 << 20) or ""
  if file then file:close() end
  local object = core.json_decode(line:match "^[\xef\xbb\xbf%s]*([^\n]*)")
  if type(object) ~= "table" then return nil end
  local names = {}
  for name in sorted_pairs(object) do
    if type(name) ~= "string" then return nil end
    names[#names + 1] = "'" .. name .. "'"
  end
  return #names > 0 and table.concat(names, ", ") or nil
end

-- Lines of JSON need the name of a member, or --chat; text has neither.
local function check_field(files, field, has_chats)
  for _, file in ipairs(files) do
    if has_chats and not file.path:match "%.jsonl$" then
      launch.exit(2, ("--chat: '%s' is not named *.jsonl, and its lines would not be read as \z
        JSON"):format(file.path))
    end
  end
  for _, file in ipairs(has_chats and {} or files) do
    local lines = file.path:match "%.jsonl$"
    if lines and not field then
      local members = members_of(file.path)
      launch.exit(2, ("'%s' is a file of JSON lines: --field NAME says which member of each line \z
        is the text%s, or --chat that each is a conversation"):format(file.path,
        members and " (the first line has " .. members .. ")" or ""))
    elseif field and not lines then
      launch.exit(2, ("--field %s: '%s' is not named *.jsonl, and its lines would not be read as \z
        JSON"):format(field, file.path))
    end
  end
end

-- What --chat does not go with, and what is of --chat only.
local function check_chat(parsed)
  local other = parsed.field and "--field" or parsed.special ~= "text" and "--special"
    or parsed.threads and "--threads"
  if parsed.chat and other then
    launch.exit(2, ("tokenize: --chat beside %s: leave one of the two out"):format(other))
  elseif parsed.date and not parsed.chat then
    launch.exit(2, "tokenize: --date is what a chat template writes: give --chat, too")
  elseif parsed.date and not parsed.date:match "^%d%d%d%d%-%d%d%-%d%d$" then
    launch.exit(2, ("tokenize: --date %s: it is YYYY-MM-DD"):format(parsed.date))
  end
end

-- The description of an earlier run with this name, which must be of the same work. nil: there is
-- none, and no shard of this name. With `force` both are removed: a loader would take shards that
-- this run does not replace, and a later run would take them for complete. before: made_of as older
-- versions had it.
local function earlier_of(path, name, description, force, before)
  local text = core.file_read(path)
  local shards, left = shards_of(name)
  if text or force then
    for _, file in ipairs(left) do demand(core.remove(file)) end
  end
  if force then
    for _, shard in ipairs(shards) do
      demand(core.remove(shard))
      local mask = shard:gsub("%.bin$", ".mask")
      if core.exists(mask) then demand(core.remove(mask)) end
    end
    return nil
  end
  if not text then
    if #shards == 0 then return nil end
    launch.exit(3, ("'%s' exists, but not '%s', which would say what it is: choose another \z
      name, or --force"):format(shards[1], path))
  end
  local earlier = core.json_decode(text)
  if type(earlier) ~= "table" or not earlier.made_of then
    launch.exit(3, ("'%s' is not of `moonshard tokenize`: choose another name, or --force")
      :format(path))
  end
  if earlier.tokenizer ~= description.tokenizer then
    launch.exit(3, ("'%s' is of the tokenizer '%s', not '%s': choose another name, or --force")
      :format(path, earlier.tokenizer, description.tokenizer))
  end
  if (earlier.chat or false) ~= (description.chat or false) then
    launch.exit(3, ("'%s' is of %s: choose another name, or --force"):format(path,
      earlier.chat and "conversations" or "no conversations"))
  end
  if earlier.field ~= description.field then
    launch.exit(3, ("'%s' is of %s, not %s: choose another name, or --force"):format(path,
      earlier.field and ("the field '%s'"):format(earlier.field) or "text",
      description.field and ("the field '%s'"):format(description.field) or "text"))
  end
  if earlier.tokenizer_hash and earlier.tokenizer_hash ~= description.tokenizer_hash then
    launch.exit(3, ("'%s' is of the tokenizer '%s' as it was: its files have changed since; \z
      choose another name, or --force"):format(path, description.tokenizer))
  end
  if not earlier.tokenizer_hash and earlier.made_of == before then
    print(("'%s' has no hash of its tokenizer: the shards that are there are kept"):format(path))
  elseif earlier.made_of ~= description.made_of then
    launch.exit(3, ("'%s' is of other files or switches: choose another name, or --force")
      :format(path))
  end
  return earlier
end

local function write_description(path, description)
  local text = core.json_encode(description) .. "\n"
  local done, message = core.file_write(path, text)
  demand(done, message)
end

-- Bytes of files that a shard is made of.
local function bytes_of(shard)
  local bytes = 0
  for _, part in ipairs(shard.files) do bytes = bytes + part.bytes end
  return bytes
end

local function duration(seconds)
  if seconds < 60 then return ("%d s"):format(seconds) end
  return ("%d:%02d min"):format(seconds // 60, seconds % 60)
end

-- One line that is rewritten: a bar, the speed, the time that is left.
local function progress(total, began)
  local shown = 0
  return function(bytes, last)
    local now = core.clock_ms()
    if not live.is_terminal() or (now - shown < 200 and not last) then return end
    shown = now
    local seconds = (now - began) / 1000
    local share = total > 0 and bytes / total or 1
    local filled = math.floor(20 * share)
    local speed = bytes / math.max(seconds, 1e-3)
    live.show {
      ("%3d%% [%s%s]"):format(100 * share // 1, ("#"):rep(filled), ("."):rep(20 - filled)),
      ("%.1f MB/s"):format(speed / 1e6),
      bytes > 0 and "ETA " .. duration((total - bytes) / speed // 1) or nil,
    }
  end
end

local function counted(count, what)
  return ("%d %s%s"):format(count, what, count == 1 and "" or "s")
end

-- Makes the shards of conversations; returns bytes of lines, and seconds.
local function run_chats(tokenizer, shards, how, total)
  local began = core.clock_ms()
  local show = progress(total, began)
  local all, learned = tokenize_chat.run(shards, {
    tokenizer = tokenizer, template = how.template, date = how.date, end_id = how.end_of_text,
    token_bytes = how.token_bytes,
  }, show)
  show(total, true)
  live.finish()
  if #shards > 0 then
    print(("%s of %d are learned, %.0f%%"):format(counted(learned, "token"), all,
      100 * learned / math.max(all, 1)))
  end
  return total, (core.clock_ms() - began) / 1000
end

-- Runs the shards; returns bytes of text.
local function run(tokenizer, shards, how, total)
  local began = core.clock_ms()
  local show = progress(total, began)
  local job, message = core.sharding(tokenizer, shards, how.token_bytes, how.end_of_text,
    how.threads, how.parse, how.field)
  demand(job, message)
  local sharding <close> = job
  local running, bytes
  repeat
    running, bytes = sharding:wait(200)
    show(bytes, not running)
  until not running
  live.finish()
  local done, why = sharding:finish()
  demand(done, why)
  return bytes, (core.clock_ms() - began) / 1000
end

--- The parser of its command line.
---@return table
function tokenize.parser()
  local parser = switches.plain("tokenize", "Writes files of text as shards of tokens, \z
    NAME_00000.bin and so on, in llm.c's format, and NAME.json, which describes them. Each file \z
    is one document, and so is each line of a .jsonl, with --field. A run that was stopped \z
    continues when it is started again.")
  parser:argument("files", "files of text, or folders of them; or .jsonl, with --field"):args "*"
  parser:option("--tokenizer", "a tokenizer's file or folder; must be given"):argname "PATH"
  parser:option("--out", "where the shards go, may begin with a folder; must be given")
    :argname "NAME"
  parser:option("--pattern", "where ranks of tiktoken cut text: gpt2, cl100k, o200k, llama3")
  parser:option("--end-of-text", "the token after each document, or none (default: the one that \z
    the tokenizer names; with --chat one that ends no turn, such as <|endoftext|>)")
    :argname "TOKEN":default "auto":show_default(false)
  parser:option("--field", "files are named *.jsonl and have a JSON object in each line; its \z
    member NAME is a document (default: files are text)"):argname "NAME"
  parser:flag("--chat", "each line of the .jsonl is a conversation: messages, or prompt and \z
    completion; the tokenizer's chat template writes it, and NAME_00000.mask and so on say which \z
    tokens are an assistant's, to be learned")
  parser:option("--date", "with --chat: the date that the template writes, YYYY-MM-DD (default: \z
    none)")
    :argname "DATE"
  parser:option("--special", "what names of special tokens in the files become: text, or the \z
    tokens (parse), as where a file has many documents (default: text)"):choices { "text", "parse" }
    :default "text":show_default(false)
  switches.add_threads(parser)
  parser:flag("--force", "make all shards, and remove those that other files or tokenizers made")
  return parser
end

-- Makes the shards that are not there; returns what NAME.json says of all.
local function make_shards(parsed, tokenizer, description, files, before)
  local shards, total = plan_of(files, parsed.out, parsed.field or parsed.chat)
  local path, left, bytes = parsed.out .. ".json", {}, 0
  local earlier = earlier_of(path, parsed.out, description, parsed.force, before)
  for _, shard in ipairs(shards) do
    if not (earlier and core.exists(shard.out)) then
      left[#left + 1] = shard
      bytes = bytes + bytes_of(shard)
    end
  end
  write_description(path, description)
  local done, seconds = (parsed.chat and run_chats or run)(tokenizer, left, {
    token_bytes = description.token_bytes, end_of_text = description.end_of_text,
    threads = parsed.threads or core.info().cores, parse = parsed.special == "parse",
    field = parsed.field, template = parsed.template, date = parsed.date,
  }, bytes)
  description.shards, description.tokens, description.bytes = core.json_list {}, 0, total
  for i, shard in ipairs(shards) do
    local _, size = core.exists(shard.out)
    local tokens = (size - 1024) // description.token_bytes
    description.shards[i] = { file = shard.out:match "[^/]*$", tokens = tokens }
    description.tokens = description.tokens + tokens
  end
  description.complete = true
  write_description(path, description)
  print(("%s of %s in %s, %d of them new; %.1f MB/s"):format(counted(description.tokens, "token"),
    counted(#files, "file"), counted(#shards, "shard"), #left,
    done / 1e6 / math.max(seconds, 1e-3)))
end

-- A path that means the same from every folder; nil if that of the current folder is not known.
local function from_root(path)
  if path:sub(1, 1) == "/" then return path end
  local here = os.getenv "PWD"
  local same = here and here:sub(1, 1) == "/" and core.exists(here .. "/" .. path)
  return same and here .. "/" .. path or nil
end

function tokenize.main(arguments)
  local parser = tokenize.parser()
  local parsed = switches.parse(parser, arguments)
  local missing = not parsed.tokenizer and "--tokenizer PATH" or not parsed.out and "--out NAME"
    or #parsed.files == 0 and "files of text"
  if missing then
    launch.exit(2, ("tokenize: %s must be given\n%s"):format(missing, parser:get_usage()))
  end
  local ms = require "moonshard"
  local tokenizer, message = ms.tokenizer.load(parsed.tokenizer, { pattern = parsed.pattern })
  demand(tokenizer, message)
  local files = files_of(parsed.files)
  check_chat(parsed)
  check_field(files, parsed.field, parsed.chat)
  if parsed.chat then
    parsed.template, parsed.template_hash = tokenize_chat.template(tokenizer)
  end
  local end_id = end_of_text(parsed, tokenizer, files)
  if not end_id and parsed.end_of_text ~= "none" then
    print "no end of text: documents are not separated; --end-of-text TOKEN"
  end
  local folder = parsed.out:match "^(.*)/[^/]*$"
  if folder and folder ~= "" then
    local made, why = core.make_directory(folder)
    demand(made, why)
  end
  local hash = demand(tokenizer_files.hash(tokenizer))
  make_shards(parsed, tokenizer, {
    tokenizer = parsed.tokenizer, tokenizer_path = from_root(parsed.tokenizer),
    tokenizer_hash = hash, pattern = parsed.pattern, vocab_size = tokenizer:vocab_size(),
    token_bytes = tokenizer:vocab_size() <= 65536 and 2 or 4, end_of_text = end_id,
    field = parsed.field, chat = parsed.chat, date = parsed.date,
    made_of = made_of(parsed, files, tokenizer, end_id, hash), complete = false,
  }, files, made_of(parsed, files, tokenizer, end_id))
  return 0
end

return tokenize
