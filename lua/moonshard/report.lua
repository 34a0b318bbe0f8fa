-- ms.report: the step line and metrics.jsonl.
local core = require "moonshard.core"
local launch = require "moonshard.launch"
local metric = require "moonshard.metric"
local steps = require "moonshard.steps"
local check = require "moonshard.options".check

local report = {}

---@class ms.Report
local Report = {}
Report.__index = Report
Report.__name = "ms.Report"

-- Sent by this rank since the start.
local function wire_bytes()
  local sum = 0
  for _, group in ipairs(core.comm_groups()) do sum = sum + select(3, group:_traffic()) end
  return sum
end

local function duration(seconds)
  seconds = math.floor(seconds + 0.5)
  if seconds >= 3600 then return ("%d:%02d:%02d"):format(seconds // 3600, seconds // 60 % 60, seconds % 60) end
  return ("%d:%02d"):format(seconds // 60, seconds % 60)
end

local function amount(value)
  if value >= 1e6 then return ("%.2fM"):format(value / 1e6) end
  if value >= 1e3 then return ("%.1fk"):format(value / 1e3) end
  return ("%.0f"):format(value)
end

local function number(value)
  if type(value) == "userdata" then return value:value() end
  return value
end

local function line_of(self, entry)
  local parts = { ("step %5d%s"):format(entry.step, self.total and "/" .. self.total or "") }
  if entry.loss then parts[#parts + 1] = ("loss %.4f"):format(entry.loss) end
  if entry.grad_norm then parts[#parts + 1] = ("norm %.3f"):format(entry.grad_norm) end
  if entry.lr then parts[#parts + 1] = ("lr %.2e"):format(entry.lr) end
  if self.reported > 3 then                -- before, the host has only run ahead of the device
    parts[#parts + 1] = ("%.1f ms"):format(entry.mean_ms)
    if entry.tok_s then parts[#parts + 1] = amount(entry.tok_s) .. " tok/s" end
    if entry.mfu then parts[#parts + 1] = ("mfu %.0f%%"):format(100 * entry.mfu) end
  end
  parts[#parts + 1] = ("mem %.0f MiB"):format(entry.peak_bytes / 2 ^ 20)
  if self.total and self.reported > 3 then
    parts[#parts + 1] = "eta " .. duration((self.total - entry.step - 1) * entry.mean_ms / 1e3)
  end
  return table.concat(parts, "  ")
end

-- The values as numbers: waits for them.
local function resolve(self, entry)
  for key, value in pairs(entry.values) do entry[key] = number(value) end
  entry.values = {}
  entry.peak_bytes = core.memory().peak            -- with what came behind the step: validation, text, a checkpoint
  self.last = entry
end

local function show(self, entry)
  if not self.file or launch.checking or entry.shown or (entry.step % self.every ~= 0 and entry.step + 1 ~= self.total) then return end
  entry.shown = true
  local text = line_of(self, entry)
  if self.terminal then io.stdout:write("\r\27[K", text)
  else io.stdout:write(text, "\n") end
  self.open = self.terminal
  io.stdout:flush()
end

local unsaid = { mean_ms = true, values = true, shown = true, flushed = true }

-- Writes what is known of the step before.
local function write(self)
  local entry = self.pending
  if not entry then return end
  self.pending = nil
  resolve(self, entry)
  for name, value in pairs(metric.values(entry.step)) do if entry[name] == nil then entry[name] = value end end
  local object = {}
  for key, value in pairs(entry) do if not unsaid[key] then object[key] = value end end
  if not self.file then return end
  local ok, message = self.file:write(core.json_encode(object) .. "\n")
  if not ok and not self.told then
    require "moonshard.log".warn("metrics are not written: %s", message)
    self.told = true                               -- once is enough: training goes on without them
  end
  show(self, entry)
end

--- For loops written by hand; ms.train makes its own. options: run: folder; tokens: of a step, over all ranks; every: lines are written each
--- so many steps (1); total: steps of the run, for the ETA; dtype: of the products, for MFU.
---@param options { run: string, tokens?: integer, every?: integer, total?: integer, dtype?: string }
---@return ms.Report
function report.report(options)
  options = check("report", options, { "run", "tokens", "every", "total", "dtype" })
  if type(options.run) ~= "string" then core.raise "report: give run, the folder for metrics.jsonl" end
  local first = core.rank() == 0                   -- it writes; the others only come to the same values
  if first then assert(core.make_directory(options.run)) end
  local process = package.loaded["moonshard.process"]
  local self = setmetatable({
    run = options.run, tokens = options.tokens, every = options.every or 1, total = options.total,
    file = first and assert(core.file_append(options.run .. "/metrics.jsonl")) or nil,
    terminal = first and process and process.is_terminal() or false, wire = wire_bytes(), flops = core.flops(), before = core.clock_ms(), times = {}, reported = 0,
  }, Report)
  local measured
  -- A measurement begins and ends with a collection; the other ranks' memory is to be as rank 0's.
  if first then self.peak, measured = require "moonshard.peak".flops(options.dtype or "f32")
  else core.collect() end
  if self.peak then
    local when = measured and "measured now, kept for next time" or "measured before"
    require "moonshard.log".log("peak       %.0f GFLOP/s in %s products (%s)", self.peak / 1e9, options.dtype or "f32", when)
  end
  steps.on_end(function(step)
    if not (self.pending and self.pending.flushed) then return end
    metric.close(step)
    write(self)
  end)
  launch.run = options.run
  core.comm_folder(options.run)
  return self
end

--- Ends the line that is written in place, so that other text can follow.
function Report:break_line()
  if self.open then
    io.stdout:write "\n"
    self.open = false
  end
end

--- The step line. Tensors are shown one step late, so nothing waits for the device.
---@param values table<string, ms.Number> loss, grad_norm, lr and what else is to be in metrics.jsonl
function Report:step(values)
  write(self)
  local now, flops = core.clock_ms(), core.flops()
  local ms, work = now - self.before, flops - self.flops
  self.before, self.flops = now, flops
  -- The host runs ahead of the device by up to two steps, so a single step's time says little: rates are over the last ones.
  self.reported = self.reported + 1
  if self.reported == 4 then self.times = {} end
  self.times[#self.times + 1] = ms
  if #self.times > 20 then table.remove(self.times, 1) end
  local sum = 0
  for _, one in ipairs(self.times) do sum = sum + one end
  local mean = sum / #self.times
  local held, wire = {}, wire_bytes()
  for key, value in pairs(values) do
    if core.is_tensor(value) then value = core.probe(value)
    elseif type(value) ~= "number" then core.raise(("report: %s is a %s; numbers and one-element tensors are shown"):format(tostring(key), type(value))) end
    held[key] = value
  end
  self.pending = {
    step = (core.step()), values = held, ms_step = ms, mean_ms = mean, tok_s = self.tokens and self.tokens / mean * 1e3, mfu = self.peak and work / (mean / 1e3) / self.peak,
    wire_bytes = wire - self.wire, exposed_comm_ms = 0,
  }
  self.wire = wire
end

--- Puts more values into the line of the step that was reported last.
---@param values table<string, number>
function Report:add(values)
  for key, value in pairs(values) do if self.pending then self.pending.values[key] = value end end
end

--- Shows the line of the step that was reported last, now: waits for its values. What goes to metrics.jsonl is written at that step's end, when
--- its metrics are known.
function Report:flush()
  if self.pending then
    resolve(self, self.pending)
    show(self, self.pending)
    self.pending.flushed = true
  end
  self:break_line()
end

--- Time that belongs to no step (validation, saving) is left out of the next one.
function Report:skip_time() self.before, self.flops = core.clock_ms(), core.flops() end

--- Writes the last step's line.
function Report:close()
  write(self)
  self:break_line()
end

return report
