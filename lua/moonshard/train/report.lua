-- ms.report: the step line and metrics.jsonl.
local core = require "moonshard.core"
local lock = require "moonshard.checkpoint.lock"
local launch = require "moonshard.base.launch"
local about = require "moonshard.train.report.about"
local line = require "moonshard.train.report.line"
local live = require "moonshard.base.status_line"
local metric = require "moonshard.train.metric"
local metrics_file = require "moonshard.train.report.metrics_file"
local steps = require "moonshard.train.steps"
local options_of = require "moonshard.base.options"
local tensorboard = require "moonshard.train.report.tensorboard"
local peak_flops = require "moonshard.train.peak_flops"
local log = require "moonshard.base.log"
local histograms = require "moonshard.train.report.histograms"
local check = options_of.check

local report = {}

---@class ms.Report
local Report = {}
Report.__index = Report
Report.__name = "ms.Report"

-- The locks that reports of this process hold, by folder. A lock lasts as long as one of them.
local locks = setmetatable({}, { __mode = "v" })

-- All reports, with their serial numbers. The keys are weak: the work at the end of each step must
-- not keep a report alive that a script has dropped.
local all, made = setmetatable({}, { __mode = "k" }), 0

local function in_order()
  local list = {}
  for self in pairs(all) do list[#list + 1] = self end
  table.sort(list, function(a, b) return all[a] < all[b] end)
  return list
end

-- Wire bytes that this rank has sent since the start, over all groups.
local function wire_bytes()
  local _, bytes = core.comm_calls()
  return bytes
end

-- The time of a step is the time from the end of the step before to its own end on the device. The
-- host runs ahead of the device, so it knows this time only after a wait. Times of single steps
-- vary, so rates are means over the last 20.
local function measure(self, entry)
  local now = core.clock_ms()
  local times, sum = self.times, 0
  times[#times + 1] = now - self.before
  if #times > 20 then table.remove(times, 1) end
  for _, ms in ipairs(times) do sum = sum + ms end
  local mean = sum / #times
  local values = entry.values
  entry.mean_ms = mean
  values.ms_step, self.before = now - self.before, now
  values.tok_s = self.tokens and self.tokens / mean * 1e3
  values.mfu = self.peak and entry.work / (mean / 1e3) / self.peak
  -- The first steps also allocate memory and build kernels.
  if entry.position == 3 then self.times = {} end
end

-- Converts the values to numbers and takes the time. Waits until the device has finished the step.
local function resolve(self, entry)
  local values = entry.values
  for key, value in pairs(values) do
    if type(value) == "userdata" then values[key] = value:value() end
  end
  if entry.mark then
    core.point_sync(entry.mark[1], entry.mark[2])
    entry.mark = nil
    measure(self, entry)
  end
  -- The peak includes work after the step: validation, samples, a checkpoint.
  values.peak_bytes = core.memory().peak
  self.last = entry
end

local function show(self, entry, always)
  if not self.first or launch.checking or launch.quiet or entry.shown then return end
  if not (always or line.is_due(self, entry)) then return end
  entry.shown = true
  self.last_line = { step = entry.step, at = core.clock_ms() }
  local parts = line.parts(self, entry)
  if self.terminal then
    live.show(parts)
    return
  end
  log.put(table.concat(parts, "  "))
end

-- Completes the step that was reported last and writes its line to metrics.jsonl.
local function write(self)
  local entry = self.pending
  if not entry then return end
  self.pending = nil
  resolve(self, entry)
  if not self.file then
    if self.first then show(self, entry) end
    return
  end
  local object = { step = entry.step }
  for name, value in pairs(metric.values(entry.step)) do object[name] = value end
  for name, value in pairs(entry.values) do object[name] = value end
  self.file:append(object)
  if self.events then self.events:scalars(entry.step, object) end
  show(self, entry)
end

local numbers = { "tokens", "every", "total" }

-- Files of the run's folder that rank 0 writes. has_lock: the caller has locked the folder;
-- otherwise the report does, so that two runs do not write the same files.
local function own(self, has_lock)
  local run = self.run
  assert(core.make_directory(run))
  if not has_lock then
    locks[run] = locks[run] or { file = nil }
    self.lock = locks[run]
    if not self.lock.file then
      local file, message = lock.take(run)
      if not file then core.raise("report: " .. message) end
      self.lock.file = file
    end
  end
  self.file = metrics_file.new(run)
  if self.tensorboard then
    self.events = tensorboard.new(run)
  end
  about.begin(run, self.total)
end

-- The machine's peak rate, for MFU. Only rank 0 measures it. A measurement begins and ends with a
-- garbage collection; the other ranks collect too, so that their memory stays equal to rank 0's.
local function find_peak(self, dtype)
  if core.rank() ~= 0 then
    core.collect()
    return
  end
  local measured
  self.peak, measured = peak_flops.flops(dtype)
  if self.peak and measured then
    log.log("peak   %.0f GFLOP/s in %s products, measured now and kept for next time",
      self.peak / 1e9, dtype)
  end
end

---@param options ms.ReportOptions
---@param has_lock? any the folder is locked, by ms.train
---@return ms.Report
function report.report(options, has_lock)
  options = check("report", options,
    {
      run = "any", tokens = "any", every = "any", total = "any", dtype = "string",
      tensorboard = "boolean",
    })
  -- ms.train { run = false } writes nothing.
  local has_folder = options.run ~= false
  if type(options.run) ~= "string" and has_folder then
    core.raise "report: give run, the folder for metrics.jsonl"
  end
  for _, name in ipairs(numbers) do
    local value = options[name]
    if value ~= nil and not (math.type(value) == "integer" and value >= 1) then
      core.raise(("report: %s must be an integer of 1 or more, not %s")
        :format(name, tostring(value)))
    end
  end
  local first = core.rank() == 0  -- only rank 0 writes; the others compute the same values
  local self = setmetatable({
    run = options.run, tokens = options.tokens, every = launch.log_every or options.every,
    total = options.total,
    tensorboard = (options.tensorboard or launch.tensorboard) and not launch.checking,
    first = first, terminal = first and live.is_terminal(),
    wire = wire_bytes(), flops = core.flops(), before = core.clock_ms(), times = {}, reported = 0,
  }, Report)
  if first and has_folder then own(self, has_lock) end
  if has_folder then find_peak(self, options.dtype or "f32") end
  made = made + 1
  all[self] = made
  if has_folder then
    launch.run = options.run
    core.comm_folder(options.run)
  end
  return self
end

---@param values table<string, ms.Number>
function Report:step(values)
  options_of.argument("report:step", "values", values, "table")
  write(self)
  local flops, wire, held = core.flops(), wire_bytes(), { exposed_comm_ms = 0 }
  for key, value in pairs(values) do
    if core.is_tensor(value) then value = core.probe(value)
    elseif type(value) ~= "number" then
      core.raise(("report: %s is a %s; numbers and one-element tensors are shown")
        :format(tostring(key), type(value)))
    end
    held[key] = value
  end
  held.wire_bytes = wire - self.wire
  self.reported = self.reported + 1
  self.pending = {
    step = (core.step()), values = held, position = self.reported, work = flops - self.flops,
    mark = { core.stream():_point() },
  }
  self.flops, self.wire = flops, wire
end

---@param values table<string, ms.Number>
function Report:add(values)
  options_of.argument("report:add", "values", values, "table")
  for key, value in pairs(values) do
    if core.is_tensor(value) then value = core.probe(value)
    elseif type(value) ~= "number" and type(value) ~= "table" then
      core.raise(("report:add: values.%s must be a number or a one-element tensor, not a %s")
        :format(tostring(key), type(value)))
    end
    if self.pending then self.pending.values[key] = value end
  end
end

---@param name string
---@param text string
function Report:text(name, text)
  options_of.argument("report:text", "name", name, "string")
  options_of.argument("report:text", "text", text, "string")
  if self.events then self.events:text((core.step()), name, text) end
end

---@param parameters ms.Parameter[]
function Report:histograms(parameters)
  options_of.argument("report:histograms", "parameters", parameters, "table")
  if not self.tensorboard then return end
  local list = {}
  for name, one in pairs(histograms(parameters)) do
    list["gradients/" .. name] = one
  end
  if self.events then self.events:histograms((core.step()), list) end
end

function Report:flush()
  local entry = self.pending
  if not entry then return end
  resolve(self, entry)
  show(self, entry)
  entry.flushed = true
end

--- The mean time of the last steps, at most 20, on the device; not of the first three. For
--- ms.train.
---@return number ms
function Report:_mean_ms() return self.last.mean_ms end

--- The number of steps of the run, where it is known later than the report is made.
---@param total integer
function Report:_set_total(total) self.total = total end

---@param f fun(): any
---@return any
function Report:outside(f)
  options_of.argument("report:outside", "f", f, "function")
  core.synchronize()
  self:flush()
  local results = table.pack(f())
  self.before, self.flops = core.clock_ms(), core.flops()
  return table.unpack(results, 1, results.n)
end

function Report:close()
  write(self)
  if self.last then show(self, self.last, true) end
  live.finish()
  if self.file then self.file:close() end
  if self.events then self.events:close() end
  -- Without the program nothing knows how the process will end.
  if self.file and not launch.process then about.finish(self.run, 0) end
end

options_of.methods(Report, "a report")

steps.on_end(function(step)
  for _, self in ipairs(in_order()) do
    if self.pending and self.pending.flushed then
      metric.close(step)
      write(self)
    end
  end
end)

--- Writes the last step of all reports. After an error it writes nothing if there are other ranks:
--- this rank could wait for them without end.
---@param failed boolean
function report.write_all(failed)
  if failed and core.world():size() > 1 then return end
  for _, self in ipairs(in_order()) do write(self) end
end

steps.on_leave(report.write_all)

return report
