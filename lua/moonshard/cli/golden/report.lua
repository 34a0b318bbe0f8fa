-- The report of a golden test: comparisons of tensors and numbers, the largest error, failures as
-- lines.
local report = {}

---@class ms.GoldenReport
local Report = {}
Report.__index = Report

local CHUNK = 1 << 18                      -- values that are copied into Lua at a time

--- A report on one kind of cases.
---@param kind string
---@return ms.GoldenReport
function report.new(kind)
  -- share: the largest error, divided by its tolerance; error: that error itself
  return setmetatable(
    { kind = kind, failures = {}, share = 0, error = 0, place = "nothing was compared" }, Report)
end

local function shape_text(t) return "[" .. table.concat(t:shape(), ", ") .. "]" end

local function same_shape(a, b) return shape_text(a) == shape_text(b) end

--- Names the case of the next comparisons.
---@param name string
function Report:begin(name) self.case = name end

---@param what string tensor or number
---@param text string
function Report:fail(what, text)
  self.failures[#self.failures + 1] = ("FAILED %s, case %s, %s: %s")
    :format(self.kind, self.case, what, text)
end

local function note(self, what, err, tolerance, measure)
  -- A nan must count as a failure.
  local share = err == err and err / tolerance or math.huge
  if share > self.share or self.place == "nothing was compared" then
    self.share, self.error, self.place = share, err, ("case %s, %s"):format(self.case, what)
  end
  if not (share <= 1) then
    self:fail(what, ("error %.3g %s, tolerance %.3g"):format(err, measure, tolerance))
  end
end

-- The largest difference and the largest golden value, in double precision.
local function extremes(ours, golden)
  local difference, largest = 0, 0
  local a, b = ours:reshape(-1), golden:reshape(-1)
  local count = a:numel()
  for start = 1, count, CHUNK do
    local length = math.min(CHUNK, count - start + 1)
    local x, y = a:narrow(1, start, length):to_table(), b:narrow(1, start, length):to_table()
    for i = 1, length do
      local d = math.abs(x[i] - y[i])
      if d > difference or d ~= d then difference = d end
      if difference ~= difference then return difference, largest end
      largest = math.max(largest, math.abs(y[i]))
    end
  end
  return difference, largest
end

-- Whether the two tensors exist and have one shape. A tensor that is missing in the file is a
-- failure.
local function comparable(self, what, ours, golden)
  if not golden then
    self:fail(what, "the file has no such tensor")
  elseif not ours then
    self:fail(what, "we have no such tensor")
  elseif not same_shape(ours, golden) then
    self:fail(what, ("our shape is %s, the file's %s"):format(shape_text(ours), shape_text(golden)))
  else
    return true
  end
end

--- Checks that max|ours - golden| / max|golden| is at most tolerance. If golden is all zeros, ours
--- must be all zeros.
---@param what string
---@param ours ms.Tensor?
---@param golden ms.Tensor?
---@param tolerance number
function Report:relative(what, ours, golden, tolerance)
  if not comparable(self, what, ours, golden) then return end
  local difference, largest = extremes(ours, golden)
  note(self, what, difference == 0 and 0 or difference / largest, tolerance, "relative")
end

--- Checks that max|ours - golden| is at most tolerance.
---@param what string
---@param ours ms.Tensor?
---@param golden ms.Tensor?
---@param tolerance number
function Report:absolute(what, ours, golden, tolerance)
  if not comparable(self, what, ours, golden) then return end
  note(self, what, extremes(ours, golden), tolerance, "absolute")
end

--- The same for a number; relative: the error is divided by the golden number.
---@param what string
---@param ours number
---@param golden number?
---@param tolerance number
---@param relative? boolean
function Report:number(what, ours, golden, tolerance, relative)
  if type(golden) ~= "number" then return self:fail(what, "the manifest has no such number") end
  local err = math.abs(ours - golden)
  if relative and err ~= 0 then err = err / math.abs(golden) end
  note(self, what, err, tolerance, relative and "relative" or "absolute")
end

--- Raises for keys of a table of the manifest that are not among the known ones.
---@param where string
---@param given table
---@param known table<string, any>
function report.known_keys(where, given, known)
  for key in pairs(given) do
    if known[key] == nil then error(("unknown %s '%s'"):format(where, tostring(key)), 0) end
  end
end

return report
