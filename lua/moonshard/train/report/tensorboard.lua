-- Event files, as TensorBoard reads them: scalars, texts and histograms of each step. A file is a
-- row of records, each a message Event of Protocol Buffers (tensorflow/core/util/event.proto) with
-- its length and checksums (TFRecord).
local core = require "moonshard.core"
local log = require "moonshard.base.log"
local sorted_pairs = require "moonshard.base.sorted_pairs"

---@class ms.EventFile
local File = {}
File.__index = File

local tensorboard = {}

------------------------------------------------------------------------------------------- records

-- CRC-32C (polynomial 0x1edc6f41, bits reflected), which frames records; no library that is used
-- here has it.
local TABLE <const> = {}
for byte = 0, 255 do
  local rest = byte
  for _ = 1, 8 do rest = rest & 1 == 1 and rest >> 1 ~ 0x82f63b78 or rest >> 1 end
  TABLE[byte] = rest
end

local function masked_crc(text)
  local crc = 0xffffffff
  for i = 1, #text do crc = TABLE[(crc ~ text:byte(i)) & 0xff] ~ crc >> 8 end
  crc = ~crc & 0xffffffff
  return ((crc >> 15 | crc << 17) + 0xa282ead8) & 0xffffffff
end

local function record(text)
  local length = ("<I8"):pack(#text)
  return length .. ("<I4"):pack(masked_crc(length)) .. text .. ("<I4"):pack(masked_crc(text))
end

------------------------------------------------------------------------------------------ messages

-- The parts of a message: each field begins with its number and the kind of its value.
local VARINT <const>, FIXED64 <const>, BYTES <const>, FIXED32 <const> = 0, 1, 2, 5

local function varint(value)
  local bytes = {}
  repeat
    local low = value & 0x7f
    value = value >> 7
    bytes[#bytes + 1] = string.char(value ~= 0 and low | 0x80 or low)
  until value == 0
  return table.concat(bytes)
end

local function integer(number, value)
  return value ~= 0 and varint(number << 3 | VARINT) .. varint(value) or ""
end
local function double(number, value) return varint(number << 3 | FIXED64) .. ("<d"):pack(value) end
local function bytes(number, text) return varint(number << 3 | BYTES) .. varint(#text) .. text end
local function doubles(number, list)
  return bytes(number, ("<" .. ("d"):rep(#list)):pack(table.unpack(list)))
end

local function event(time, step, body)
  return record(double(1, time) .. integer(2, step) .. body)
end

-- A Summary's value with its tag.
local function scalar(tag, value)
  return bytes(1, bytes(1, tag) .. varint(2 << 3 | FIXED32) .. ("<f"):pack(value))
end

-- A tensor of one string, for the plugin "text".
local function words(tag, text)
  local shape = bytes(2, bytes(2, integer(1, 1)))
  local tensor = integer(1, 7) .. shape .. bytes(8, text)
  return bytes(1, bytes(1, tag) .. bytes(8, tensor) .. bytes(9, bytes(1, bytes(1, "text"))))
end

-- HistogramProto. limits: the upper end of each bucket, rising.
local function histogram(tag, h)
  local body = double(1, h.min) .. double(2, h.max) .. double(3, h.count) .. double(4, h.sum)
    .. double(5, h.sum_squares) .. doubles(6, h.limits) .. doubles(7, h.counts)
  return bytes(1, bytes(1, tag) .. bytes(5, body))
end

---------------------------------------------------------------------------------------------- file

--- The event file of a run that begins or goes on. It is made with the first step that is written;
--- steps from that one on, which an earlier part of the run has left, are then no longer shown.
---@param run string folder of the run; the files are in its folder "tensorboard"
---@param clock? fun(): number seconds since 1970; os.time unless given
---@return ms.EventFile
function tensorboard.new(run, clock)
  return setmetatable({ folder = run .. "/tensorboard", clock = clock or os.time }, File)
end

-- Opens the file: what it is, and from which step on it counts (SessionLog, status START).
local function open(self, step)
  local ok, message = core.make_directory(self.folder)
  if not ok then return nil, message end
  local name = ("%s/events.out.tfevents.%010d.moonshard"):format(self.folder, self.clock() // 1)
  local path, number = name, 1
  while core.exists(path) do
    number = number + 1
    path = name .. "." .. number
  end
  local file, why = core.file_append(path)
  if not file then return nil, why end
  local time = self.clock()
  return file:write(event(time, 0, bytes(3, "brain.Event:2"))
    .. event(time, step, bytes(7, integer(1, 1))))
end

-- A failure to write does not stop training; one warning is printed.
local function write(self, step, body)
  if self.failed then return end
  local message
  if not self.file then self.file, message = open(self, step) end
  local ok = self.file
  if ok then ok, message = self.file:write(event(self.clock(), step, bytes(5, body))) end
  if not ok then
    self.failed = true
    log.warn("events for TensorBoard are not written: %s", message)
  end
end

--- The numbers of a step. Values that are no numbers are left out.
---@param step integer
---@param values table<string, any>
function File:scalars(step, values)
  local parts = {}
  for tag, value in sorted_pairs(values) do
    if type(value) == "number" and tag ~= "step" then parts[#parts + 1] = scalar(tag, value) end
  end
  if #parts > 0 then write(self, step, table.concat(parts)) end
end

-- Where bytes are no UTF-8, the character that represents them.
local function valid(text)
  local parts, at = {}, 1
  while true do
    local length, bad = utf8.len(text, at)
    if length then break end
    parts[#parts + 1] = text:sub(at, bad - 1) .. "\u{fffd}"
    at = bad + 1
  end
  return table.concat(parts) .. text:sub(at)
end

---@param step integer
---@param tag string
---@param text string shown as it is
function File:text(step, tag, text)
  -- TensorBoard reads Markdown, where lines that are moved to the right are shown as they are.
  write(self, step, words(tag, "    " .. valid(text):gsub("\n", "\n    ")))
end

--- Histograms by name.
---@param step integer
---@param list table<string, ms.Histogram>
function File:histograms(step, list)
  local parts = {}
  for tag, one in sorted_pairs(list) do
    parts[#parts + 1] = histogram(tag, one)
  end
  if #parts > 0 then write(self, step, table.concat(parts)) end
end

--- Closes it. Another step opens a new one.
function File:close()
  if self.file then self.file:close() end
  self.file = nil
end

return tensorboard
