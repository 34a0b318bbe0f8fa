-- Reads comments, identifiers and README.md files, and reports words that the code has given up:
-- old names of its parts, and words that readers of English as a second language stumble over.
--
--     lua5.4 tests/lint/words.lua [ROOT]
--
-- Strings are not read, since users know their messages.

local root = arg[1] or "."

-- Old names -> what is said now.
local NAMES = {
  keeper = "agent", errand = "host task", standstill = "deadlock", suspicion = "hang report",
  verdict = "mismatch", poster = "progress thread", parcel = "message", mirror = "replica",
  detour = "staging",
}
-- Old names in engine/comm.
local COMM_NAMES = { letter = "header message", lane = "channel" }
-- Other words, all as they are written -> what is plainer.
local PLAIN = {
  lie = "are", lies = "is", stand = "are", stands = "is", anew = "again", aside = "away",
}
-- Old identifiers of C whose words are in use. Names of the Lua interface are strings in C.
local IDENTIFIERS = {
  ms_host_files = true, host_of = true, by_hosts = true, between_hosts_bytes = true,
}

local ASIDE = "a run's folder has checkpoints that users see as aside-NAME"
local USERS = "what users read of this process: messages call it a keeper"

-- Exceptions: file -> word, without the s of its plural -> the reason.
local ALLOWED = {
  ["lua/moonshard/train/history.lua"] = { aside = ASIDE },
  ["lua/moonshard/train/folder.lua"] = { aside = ASIDE },
  ["lua/moonshard/meta/train.lua"] = { aside = ASIDE },
  ["recipes/README.md"] = { aside = ASIDE },
  ["recipes/launch/README.md"] = { keeper = USERS },
  ["engine/comm/job/node_list.c"] = { letter = "letters of the alphabet" },
  ["bindings/group.c"] = { between_hosts_bytes = "a comment with a table's fields in Lua" },
  ["bindings/reductions.c"] = { between_hosts_bytes = "a comment with a table's fields in Lua" },
}

-- A word without the s of its plural.
local function singular(word) return word:match("^(.*)s$") or word end

local problems, files, seen = {}, 0, {}
local function report(path, line, word, message, ...)
  local allowed = ALLOWED[path] or {}
  local problem = ("%s:%d: \"%s\" %s"):format(path, line, word, message:format(...))
  if allowed[word] or allowed[singular(word)] or seen[problem] then return end
  seen[problem], problems[#problems + 1] = true, problem
end

local function read(path)
  local handle = assert(io.open(root .. "/" .. path, "rb"))
  local text = handle:read("a")
  handle:close()
  return text
end

local function list(folders, expression)
  local handle = assert(io.popen(("cd '%s' && find %s -type f \\( %s \\) -print 2>/dev/null")
    :format(root, folders, expression)))
  local found = {}
  for line in handle:lines() do found[#found + 1] = (line:gsub("^%./", "")) end
  handle:close()
  table.sort(found)
  return found
end

local function blank(text) return (text:gsub("[^\n]", " ")) end

-- The end of a quoted string, from the position of its first quote.
local function end_of_string(text, start)
  local quote, at = text:sub(start, start), start + 1
  while at <= #text and text:sub(at, at) ~= quote do
    at = at + (text:sub(at, at) == "\\" and 2 or 1)
  end
  return math.min(at, #text)
end

-- What begins at a position of C text: its kind and its end. A quote after a digit separates
-- digits.
local function token_of_c(text, start)
  local two = text:sub(start, start + 1)
  if two == "/*" then
    return "comment", select(2, text:find("*/", start + 2, true)) or #text
  elseif two == "//" then
    local stop = start
    repeat                                   -- a backslash at the end continues the comment
      stop = text:find("\n", stop + 1, true) or #text + 1
    until text:sub(stop - 1, stop - 1) ~= "\\"
    return "comment", stop - 1
  elseif two:find("^/") or (two:find("^'") and text:sub(start - 1, start - 1):find("%d")) then
    return "code", start
  end
  return "string", end_of_string(text, start)
end

-- The same of Lua text.
local function token_of_lua(text, start)
  local dashes = text:find("^%-%-", start) and 2 or 0
  local level = text:match("^%[(=*)%[", start + dashes)
  if level then
    local _, stop = text:find("]" .. level .. "]", start, true)
    return dashes > 0 and "comment" or "string", stop or #text
  elseif dashes > 0 then
    return "comment", (text:find("\n", start, true) or #text + 1) - 1
  elseif text:find("^[\"']", start) then
    return "string", end_of_string(text, start)
  end
  return "code", start
end

-- The text without its strings, whose places are blank; line numbers do not change.
local function without_strings(text, token_of, beginnings)
  local out, at = {}, 1
  while true do
    local start = text:find(beginnings, at)
    if not start then break end
    out[#out + 1] = text:sub(at, start - 1)
    local kind, stop = token_of(text, start)
    local part = text:sub(start, stop)
    out[#out + 1] = kind == "string" and blank(part) or part
    at = stop + 1
  end
  out[#out + 1] = text:sub(at)
  return table.concat(out)
end

-- What is said instead of an old name in a file, or nil.
local function instead_of(path, word)
  local name = NAMES[word] or NAMES[singular(word)]
  if name or not path:find("^engine/comm/") then return name end
  -- Lanes of vectors.
  if path:find("^engine/comm/cpu/") and singular(word) == "lane" then return nil end
  return COMM_NAMES[word] or COMM_NAMES[singular(word)]
end

-- Words are letters alone, so the words of an identifier are seen, too.
local function check_words(path, text)
  local number = 0
  for line in (text:lower() .. "\n"):gmatch("([^\n]*)\n") do
    number = number + 1
    for word, stop in line:gmatch("(%a+)()") do
      local now, plainer = instead_of(path, word), PLAIN[word]
      local is_stand_in = word:find("^stands?$") and line:find("^[-_]ins?%f[%A]", stop)
      if now then
        report(path, number, word, "is an old name: write %s", now)
      elseif plainer and not is_stand_in then
        report(path, number, word, "has a plainer word: write %s, or what is meant", plainer)
      end
    end
  end
end

local function check_identifiers(path, text)
  local number = 0
  for line in (text .. "\n"):gmatch("([^\n]*)\n") do
    number = number + 1
    for name in line:gmatch("[%a_][%w_]*") do
      if IDENTIFIERS[name] then
        report(path, number, name, "is an old name: a machine of a job is a node in C")
      end
    end
  end
end

local FOLDERS = "engine bindings lua recipes"
for _, path in ipairs(list(FOLDERS, "-name '*.[ch]' -o -name '*.cu' -o -name '*.cpp'")) do
  local text = without_strings(read(path), token_of_c, "[/\"']")
  check_words(path, text)
  check_identifiers(path, text)
  files = files + 1
end
for _, path in ipairs(list(FOLDERS, "-name '*.lua'")) do
  check_words(path, without_strings(read(path), token_of_lua, "[-%[\"']"))
  files = files + 1
end
for _, path in ipairs(list(". -name build -prune -o", "-name README.md")) do
  check_words(path, read(path))
  files = files + 1
end

if files == 0 then problems[1] = root .. " has no files to read" end
for _, problem in ipairs(problems) do print(problem) end
print(("%d problem%s"):format(#problems, #problems == 1 and "" or "s"))
os.exit(#problems == 0)
