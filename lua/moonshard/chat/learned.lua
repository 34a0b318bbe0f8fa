-- Which bytes of a rendered conversation a model learns to write.
local text = require "moonshard.chat.text"

local learned = {}

-- The end of the first special token in bytes from + 1 to `to` of a text, or nil. Of two that begin
-- at one place the longer one counts.
local function first_special(bytes, from, to, special)
  local part, first, last = bytes:sub(from + 1, to), nil, nil
  for _, token in ipairs(special) do
    local at = token ~= "" and part:find(token, 1, true)
    local stop = at and at + #token - 1
    if at and (not first or at < first or at == first and stop > last) then
      first, last = at, stop
    end
  end
  return last and from + last
end

-- Ranges in order that neither touch nor are empty.
local function merged(ranges)
  local list = {}
  for _, range in ipairs(ranges) do
    local last = list[#list]
    if range[1] < range[2] then
      if last and range[1] <= last[2] then last[2] = math.max(last[2], range[2])
      else list[#list + 1] = { range[1], range[2] } end
    end
  end
  return list
end

--- The ranges that blocks of the template marked.
---@param ranges { [1]: integer, [2]: integer }[]
---@return { [1]: integer, [2]: integer }[]
function learned.marked(ranges) return merged(ranges) end

-- The place after the last time that a text is in bytes from + 1 to `to` of another, or nil.
local function behind_last(bytes, from, to, part)
  local between, found = bytes:sub(from + 1, to), nil
  local at = between:find(part, 1, true)
  while at do
    found = from + at + #part - 1
    at = between:find(part, at + 1, true)
  end
  return found
end

--- The ranges of a text whose pieces know their messages: from the first to the last piece of a
--- message that is learned. They begin earlier, after the generation prompt, if that is between
--- the last piece of another message and this first one. They end later, after the first special
--- token, if that is before the next piece of another message.
---@param value string|ms.ChatText
---@param is_learned table<integer, boolean> by message
---@param special string[]
---@param prompt? string
---@return { [1]: integer, [2]: integer }[] from the byte, from 0, to the one after the last
function learned.ranges(value, is_learned, special, prompt)
  local marks, bytes, ranges = text.marks(value), text.plain(value), {}
  local i = 1
  while i <= #marks do
    local last = i
    while marks[last + 1] and marks[last + 1][3] == marks[i][3] do last = last + 1 end
    if is_learned[marks[i][3]] then
      local to, following = marks[last][2], marks[last + 1]
      local stop = first_special(bytes, to, following and following[1] - 1 or #bytes, special)
      local from, before = marks[i][1] - 1, i > 1 and marks[i - 1][2] or 0
      local start = prompt and behind_last(bytes, before, from, prompt)
      ranges[#ranges + 1] = { start or from, stop or to }
    end
    i = last + 1
  end
  return merged(ranges)
end

return learned
