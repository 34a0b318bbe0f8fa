-- moonshard bench kernels: each kernel alone, as a share of what copies and products reach on the
-- same machine in the same run.
local switches = require "moonshard.cli.switches"

local kernels = {}

-- The shares that are aimed at on a GPU, for kernels that move bytes and for products.
local TARGET = { bytes = 85, flops = 80 }
-- Before each measurement so many bytes are copied: they push other tensors out of the caches, and
-- the stream is busy while the host enqueues what is measured. Where that are many tasks, the copy
-- is repeated.
local COPY_MIB, SMALL_COPY_MIB, COPIES = 256, 1, 8

-- The rows of memory that copies use.
local function copying(mib)
  local core = require "moonshard.core"
  local n = (mib << 20) // 4
  local from, to = core.ones({ n }):keep(), core.zeros({ n }):keep()
  return 8 * n, function() core.no_grad(function() to:copy_(from) end) end
end

-- Seconds that the tasks of run() take on the device, and their names. gate: the copy before it,
-- one task.
local function once(case, gate)
  local core = require "moonshard.core"
  local prepared = case.prepare and case.prepare()
  local copies = case.is_long and core.device() == "cuda" and COPIES or 1
  core.trace_start()
  for _ = 1, copies do gate() end
  case.run(prepared)
  local ns, names = 0, {}
  for i, record in ipairs(core.trace_stop()) do
    if i > copies and record.kind ~= "wait" then
      ns = ns + record.end_ns - record.start_ns
      names[#names + 1] = record.name
    end
  end
  return ns / 1e9, names
end

-- The median of several measurements; the first two, which fill pools and plans, do not count.
local function measure(case, gate, s)
  local core = require "moonshard.core"
  local times, names, start = {}, nil, core.clock_ms()
  repeat
    local seconds
    for step in require "moonshard".steps(1) do -- luacheck: ignore step
      seconds, names = once(case, gate)
    end
    times[#times + 1] = seconds
  until #times >= s.least + 2 and (core.clock_ms() - start > s.budget_ms or #times > 100)
  times = table.move(times, 3, #times, 1, {})
  return s.median(times), names
end

-- The ceilings: bytes and FLOPs a second.
local function ceilings(s)
  local core = require "moonshard.core"
  local moved, copy = copying(s.copy_mib)
  local seconds = measure({ run = copy }, copy, s)
  local flops = 0
  for _, shape in ipairs(s.products) do
    local rows, inputs, outputs = table.unpack(shape)
    local x = core.randn { rows, inputs, seed = 1, dtype = s.dtype }
    local w = core.randn { outputs, inputs, seed = 2, dtype = s.dtype }
    local case = { run = function() core.no_grad(function() x:linear(w) end) end }
    flops = math.max(flops, 2 * rows * inputs * outputs / measure(case, copy, s))
    core.collect()
  end
  return { bytes = moved / seconds, flops = flops }, copy
end

local function row_of(entry, ceiling, gate, s)
  local case = entry.make()
  local seconds, names = measure(case, gate, s)
  local what = case.flops and "flops" or "bytes"
  local rate = case[what] / seconds
  return {
    family = entry.family, kernel = entry.name, us = seconds * 1e6, [what] = case[what],
    gb_s = what == "bytes" and rate / 1e9 or nil, tflop_s = what == "flops" and rate / 1e12 or nil,
    share = rate / ceiling[what], target = TARGET[what] / 100, tasks = names,
    -- In a trace, the name of an attention task ends with who computes it.
    way = names[1] and names[1]:match ", (.+)$",
  }
end

local function print_row(row)
  local work = row.bytes and ("%11.6g MB   "):format(row.bytes / 1e6)
    or ("%11.6g GFLOP"):format(row.flops / 1e9)
  local rate = row.gb_s and ("%9.1f GB/s   "):format(row.gb_s)
    or ("%9.3f TFLOP/s"):format(row.tflop_s)
  print(("%-12s %-38s %s %11.1f us  %s  %4.0f%%  (%d%%)%s"):format(row.family, row.kernel, work,
    row.us, rate, 100 * row.share, math.floor(100 * row.target + 0.5),
    row.way and "  " .. row.way or ""))
end

-- The sizes of a run: those of GPT-2 124M, or small ones for trying the command.
local function sizes(parsed)
  local core = require "moonshard.core"
  local s = parsed.small and {
    batch = 2, length = 16, width = 32, heads = 2, vocab = 64, parameters = 1,
    products = { { 64, 64, 64 } }, copy_mib = SMALL_COPY_MIB,
  } or {
    batch = 8, length = 1024, width = 768, heads = 12, vocab = 50304, parameters = 120000000,
    products = require "moonshard.train.peak_flops".shapes(), copy_mib = COPY_MIB,
  }
  s.batch, s.length = parsed.batch or s.batch, parsed.length or s.length
  s.dtype, s.least, s.budget_ms = parsed.dtype, parsed.small and 1 or 5, parsed.small and 0 or 100
  if s.dtype == "f16" and core.device() == "cpu" then
    require "moonshard.base.launch".exit(2, "--dtype f16: products of f16 exist on a GPU only: \z
      f32 or bf16 here")
  end
  return s
end

--- The parser's switches; returns what runs the bench.
---@param parser table
---@param median fun(list: number[]): number
---@return fun(parsed: table): integer
function kernels.register(parser, median)
  parser:option("--dtype", "of tensors and products")
    :choices { "f32", "bf16", "f16" }:default "bf16"
  parser:option("--batch", "rows of tokens (default: 8; with --small 2)"):convert(switches.count)
  parser:option("--length", "tokens of a row (default: 1024; with --small 16)")
    :convert(switches.count)
  parser:option("--only", "measure the kernels and families of this name (default: all)")
    :argname "TEXT"
  parser:flag("--small", "tiny sizes, to try the command: the figures mean nothing")
  return function(parsed)
    local core = require "moonshard.core"
    local s, rows = sizes(parsed), {}
    s.median = median
    local wanted = {}
    for _, entry in ipairs(require "moonshard.cli.bench.cases".all(s)) do
      local name = entry.family .. " " .. entry.name
      if not parsed.only or name:find(parsed.only, 1, true) then wanted[#wanted + 1] = entry end
    end
    if #wanted == 0 then
      require "moonshard.base.launch".exit(2, ("--only %s: no kernel and no family is called so")
        :format(parsed.only))
    end
    local ceiling, gate = ceilings(s)
    if not parsed.json then
      print(("%s, %s, batch %d, length %d: copies %.0f GB/s, products %.2f TFLOP/s")
        :format(core.device(), s.dtype, s.batch, s.length, ceiling.bytes / 1e9,
          ceiling.flops / 1e12))
      print(("%-12s %-38s %17s %14s  %17s  share  (aim on a GPU)")
        :format("family", "kernel", "bytes or FLOPs", "time", "rate"))
    end
    for _, entry in ipairs(wanted) do
      local row = row_of(entry, ceiling, gate, s)
      rows[#rows + 1] = row
      if not parsed.json then print_row(row) end
      collectgarbage()
      core.collect()
    end
    if parsed.json then
      print(core.json_encode {
        device = core.device(), dtype = s.dtype, batch = s.batch, length = s.length,
        copy_gb_s = ceiling.bytes / 1e9, product_tflop_s = ceiling.flops / 1e12, kernels = rows,
      })
    end
    return 0
  end
end

return kernels
