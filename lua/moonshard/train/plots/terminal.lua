-- A chart as text: curves in braille dots, two by four in a character, or in a letter for each
-- curve.
local read = require "moonshard.train.plots.read"

local terminal = {}

---@class ms.ChartStyle
---@field width integer columns of the whole chart
---@field height integer rows of the curves
---@field unicode boolean
---@field color boolean
---@field log boolean the values' axis is logarithmic

---@class ms.Curve
---@field name string
---@field steps integer[]
---@field values number[]

local MARKS <const> = { "*", "+", "o", "x", "#", "@", "%", "&" }
local COLORS <const> = { 36, 33, 35, 32, 34, 31, 96, 93 } -- numbers of ANSI's colors
local LABEL <const> = 9                                   -- columns of the values' axis

-- Dots of a braille character: bit by row and column (Unicode 15, "Braille Patterns").
local DOTS <const> = { { 0x01, 0x08 }, { 0x02, 0x10 }, { 0x04, 0x20 }, { 0x40, 0x80 } }

local function number(value)
  local size = math.abs(value)
  if size ~= 0 and (size < 1e-3 or size >= 1e6) then return ("%.2e"):format(value) end
  return ("%.4g"):format(value)
end

-- Whether a value is drawn. A logarithmic axis shows values above 0.
local function is_drawn(value, log)
  return math.abs(value) < math.huge and (value > 0 or not log)
end

-- The limits of both axes.
local function limits_of(curves, log)
  local box = { left = math.huge, right = -math.huge, low = math.huge, high = -math.huge }
  for _, curve in ipairs(curves) do
    for i, value in ipairs(curve.values) do
      if is_drawn(value, log) then
        box.left = math.min(box.left, curve.steps[i])
        box.right = math.max(box.right, curve.steps[i])
        box.low, box.high = math.min(box.low, value), math.max(box.high, value)
      end
    end
  end
  if box.left > box.right then return nil end
  if log then box.low, box.high = math.log(box.low), math.log(box.high) end
  -- Their difference and the sums of a column must stay finite.
  box.scale = math.max(math.abs(box.low), math.abs(box.high)) > 1e290 and 1e-20 or 1
  box.low, box.high = box.low * box.scale, box.high * box.scale
  -- Equal, or apart by rounding only.
  if box.high - box.low <= 1e-9 * math.max(math.abs(box.low), math.abs(box.high)) then
    box.low, box.high = box.low - 0.5, box.high + 0.5
  end
  return box
end

-- Calls dot(x, y) for the dots of a curve: its mean in each column of dots, and lines between
-- these. x from 0 on the left, y from 0 at the top.
local function trace(curve, box, wide, tall, log, dot)
  local sums, counts = {}, {}
  local span = math.max(box.right - box.left, 1)
  for i, value in ipairs(curve.values) do
    if is_drawn(value, log) then
      local x = math.floor((curve.steps[i] - box.left) / span * (wide - 1) + 0.5)
      sums[x] = (sums[x] or 0) + (log and math.log(value) or value) * box.scale
      counts[x] = (counts[x] or 0) + 1
    end
  end
  local before_x, before_y
  for x = 0, wide - 1 do
    if counts[x] then
      local part = (sums[x] / counts[x] - box.low) / (box.high - box.low)
      local y = math.floor((1 - part) * (tall - 1) + 0.5)
      local from = before_x or x
      for at = from, x do
        -- The part of the line that is in this column.
        local a = before_x and before_y + (y - before_y) * (at - from - 0.5) / (x - from) or y
        local b = before_x and before_y + (y - before_y) * (at - from + 0.5) / (x - from) or y
        if before_x and at == from then a = before_y end
        if at == x then b = y end
        local first, last = math.floor(math.min(a, b) + 0.5), math.floor(math.max(a, b) + 0.5)
        for row = first, last do dot(at, row) end
      end
      before_x, before_y = x, y
    end
  end
end

-- A picture of rows x columns characters: text and number of the curve of each.
local function braille(curves, box, style, columns)
  local bits, owners = {}, {}
  for index, curve in ipairs(curves) do
    trace(curve, box, 2 * columns, 4 * style.height, style.log, function(x, y)
      local cell = y // 4 * columns + x // 2
      bits[cell] = (bits[cell] or 0) | DOTS[y % 4 + 1][x % 2 + 1]
      owners[cell] = index
    end)
  end
  return function(cell)
    if bits[cell] then return utf8.char(0x2800 + bits[cell]), owners[cell] end
  end
end

local function letters(curves, box, style, columns)
  local owners = {}
  for index, curve in ipairs(curves) do
    trace(curve, box, columns, style.height, style.log, function(x, y)
      owners[y * columns + x] = index
    end)
  end
  return function(cell)
    local owner = owners[cell]
    if owner then return MARKS[(owner - 1) % #MARKS + 1], owner end
  end
end

local function colored(text, index, style)
  if not style.color or not index then return text end
  return ("\27[%dm%s\27[0m"):format(COLORS[(index - 1) % #COLORS + 1], text)
end

-- One row of the picture; characters of one color in a row are written together.
local function row_of(at, row, columns, style)
  local parts, run, owner = {}, "", nil
  local function finish()
    if run ~= "" then parts[#parts + 1] = colored(run, owner, style) end
    run = ""
  end
  for column = 0, columns - 1 do
    local text, whose = at(row * columns + column)
    if text and whose ~= owner then
      finish()
      owner = whose
    end
    run = run .. (text or " ")
  end
  finish()
  return (table.concat(parts):gsub("%s+$", ""))
end

-- The line below the picture, with the first and the last step.
local function steps_line(box, columns)
  local first, last = tostring(box.left), tostring(box.right)
  local gap = math.max(columns - #first - #last, 1)
  return (" "):rep(LABEL + 1) .. first .. (" "):rep(gap) .. last
end

-- What a curve is: its mark, its run, the last value, the least one.
local function legend(curve, index, several, dots, style)
  local mark = dots and "\u{2501}\u{2501}" or MARKS[(index - 1) % #MARKS + 1]
  local count, last, at = #curve.values, nil, nil
  local lost = 0
  for i = 1, count do
    if curve.values[i] == curve.values[i] then last, at = curve.values[i], curve.steps[i]
    else lost = lost + 1 end
  end
  local text = "no finite value"
  if last then
    local least, where = read.least(curve)
    text = ("last %s at step %d, least %s at step %d"):format(number(last), at, number(least),
      where)
  end
  if lost > 0 then text = ("%s; %d not finite"):format(text, lost) end
  local head = several and colored(mark, index, style) .. " " .. curve.name .. ": " or ""
  return (" "):rep(LABEL + 1) .. head .. text
end

--- The lines of a chart.
---@param title string
---@param curves ms.Curve[]
---@param style ms.ChartStyle
---@return string[]
function terminal.chart(title, curves, style)
  local lines = { (" "):rep(LABEL + 1) .. title .. (style.log and " (logarithmic)" or "") }
  local several = #curves > 1
  -- Without colors, dots of several curves could not be told apart.
  local dots = style.unicode and (style.color or not several)
  local columns = math.max(style.width - LABEL - 2, 10)
  local box = limits_of(curves, style.log)
  if box then
    local at = (dots and braille or letters)(curves, box, style, columns)
    local bar = style.unicode and "\u{2502}" or "|"
    for row = 0, style.height - 1 do
      local label = ""
      if row == 0 or row == style.height - 1 or row == (style.height - 1) // 2 then
        local value = box.high - (box.high - box.low) * row / math.max(style.height - 1, 1)
        value = value / box.scale
        label = number(style.log and math.exp(value) or value)
      end
      lines[#lines + 1] = ("%" .. LABEL .. "s%s%s"):format(label, bar,
        row_of(at, row, columns, style))
    end
    lines[#lines + 1] = steps_line(box, columns)
  end
  for index, curve in ipairs(curves) do
    lines[#lines + 1] = legend(curve, index, several, dots, style)
  end
  return lines
end

return terminal
