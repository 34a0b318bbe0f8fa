-- The lines of files by number, without the files in memory: where each line begins is, in eight
-- bytes.
local core = require "moonshard.core"

local lines = {}

local CHUNK <const> = 1 << 20           -- bytes that are read at once
local GRAIN <const> = 1024              -- offsets in a string
local WIDTH <const> = 8                 -- bytes of an offset
local MARK <const> = "\xef\xbb\xbf"     -- of the order of bytes, which some programs write

-- Bytes of white space.
local BLANK <const> = { [9] = true, [10] = true, [13] = true, [32] = true }

---@class ms.LinesFile
---@field path string
---@field bytes integer
---@field modified integer              when it was changed, in ns
---@field first integer                 lines of the files before it

---@class ms.Lines                      lines of files, one file after the other
---@field files ms.LinesFile[]
---@field blocks string[]               offsets of GRAIN lines each
---@field count integer                 lines that are not blank
local Lines = {}
Lines.__index = Lines

-- Calls add with the offset of each line that is not blank and begins in this part of a file.
-- inside: the part begins within such a line. Returns whether it ends within one.
local function scan(part, base, inside, add)
  local at = base == 0 and part:sub(1, #MARK) == MARK and #MARK + 1 or 1
  local find = string.find
  while true do
    if inside then
      at = find(part, "\n", at, true)
      if not at then return true end
      at = at + 1
    end
    at = find(part, "[^ \t\r\n]", at)
    if not at then return false end
    add(base + at - 1)
    inside = true
  end
end

-- What is known of a file before it is read.
local function look(path)
  local kind, bytes, modified = core.exists(path)
  if kind == "file" then return { path = path, bytes = bytes, modified = modified } end
  if not kind then return core.refuse(("there is no file '%s'"):format(path), "not_found") end
  return core.refuse(("'%s' is a folder: name the files in it"):format(path), "mismatch")
end

-- Whether a file is as it was: true, or nil, message, code.
local function check(file)
  local now, message, code = look(file.path)
  if not now then return nil, message, code end
  if now.bytes == file.bytes and now.modified == file.modified then return true end
  return core.refuse(("'%s' has changed since its lines were counted: open the data set again")
    :format(file.path), "mismatch")
end

-- Reads a file to its end; true, or nil, message, code.
local function index(file, add)
  local handle <close>, message = io.open(file.path, "rb")
  if not handle then return core.refuse(message, "io") end
  local base, inside = 0, false
  while true do
    local part, why = handle:read(CHUNK)
    if why then return core.refuse(("cannot read '%s': %s"):format(file.path, why), "io") end
    if not part then return check(file) end
    inside = scan(part, base, inside, add)
    base = base + #part
  end
end

--- Counts the lines of files in one pass. nil, message, code: one cannot be read.
---@param paths string[]
---@return ms.Lines?
---@return string? message
---@return string? code
function lines.open(paths)
  local self = setmetatable({ files = {}, blocks = {}, count = 0 }, Lines)
  local held, count = {}, 0
  local function flush()
    self.blocks[#self.blocks + 1] = ("<" .. ("i8"):rep(count)):pack(table.unpack(held, 1, count))
    self.count, count = self.count + count, 0
  end
  local function add(offset)
    count = count + 1
    held[count] = offset
    if count == GRAIN then flush() end
  end
  for i, path in ipairs(paths) do
    local file, message, code = look(path)
    if not file then return nil, message, code end
    file.first = self.count + count
    self.files[i] = file
    file, message, code = index(file, add)
    if not file then return nil, message, code end
  end
  if count > 0 then flush() end
  return self
end

-- Where a line begins, from 1 on; the count of lines and one more is the end of the last file.
local function offset_of(self, i)
  return ("<i8"):unpack(self.blocks[(i - 1) // GRAIN + 1], (i - 1) % GRAIN * WIDTH + 1)
end

-- The file of a line: the last one that begins before it.
local function file_of(self, i)
  local files = self.files
  local low, high = 1, #files
  while low < high do
    local middle = (low + high + 1) // 2
    if files[middle].first < i then low = middle else high = middle - 1 end
  end
  return files[low], files[low + 1]
end

--- The text of a line without white space around it. nil, message, code: its file cannot be read,
--- or has changed.
---@param i integer from 1 on
---@return string?
---@return string? message
---@return string? code
function Lines:read(i)
  local file, following = file_of(self, i)
  local same, message, code = check(file)
  if not same then return nil, message, code end
  local from = offset_of(self, i)
  local last = i == (following and following.first or self.count)
  local bytes = (last and file.bytes or offset_of(self, i + 1)) - from
  local handle <close>, why = io.open(file.path, "rb")
  if not handle then return core.refuse(why, "io") end
  handle:setvbuf "no"
  local text = handle:seek("set", from) and handle:read(bytes)
  if text and #text == bytes then
    local stop = #text
    while BLANK[text:byte(stop)] do stop = stop - 1 end
    return text:sub(1, stop)
  end
  return core.refuse(("cannot read '%s' at byte %d"):format(file.path, from), "io")
end

--- A line as messages name it: its file, and its number there, for which the file is read again.
---@param i integer
---@return string
function Lines:name(i)
  local file = file_of(self, i)
  local number, left = 1, offset_of(self, i)
  local handle <close> = io.open(file.path, "rb")
  while handle and left > 0 do
    local part = handle:read(math.min(CHUNK, left))
    if not part then break end
    left = left - #part
    number = number + select(2, part:gsub("\n", "\n"))
  end
  return ("'%s', line %d"):format(file.path, number)
end

--- A number that other files, or other lines in them, do not have: of where lines begin.
---@return string
function Lines:hash()
  if not self.hashed then
    local parts = {}
    for i, block in ipairs(self.blocks) do parts[i] = ("%016x"):format(core.hash(block)) end
    for _, file in ipairs(self.files) do
      parts[#parts + 1] = ("%d %d"):format(file.first, file.bytes)
    end
    self.hashed = ("%016x"):format(core.hash(table.concat(parts, "\n")))
  end
  return self.hashed
end

return lines
