-- moonshard bench: measurements, not tests. tests/bench/README.md says how to compare the figures.
local switches = require "moonshard.cli.switches"

local bench = {}

local function median(list)
  table.sort(list)
  local n = #list
  return n % 2 == 1 and list[n // 2 + 1] or (list[n // 2] + list[n // 2 + 1]) / 2
end

local function emit(parsed, result, order)
  local core = require "moonshard.core"
  if parsed.json then
    print(core.json_encode(result))
    return
  end
  for _, key in ipairs(order) do
    local value = result[key]
    if value ~= nil then
      print(("%-16s %s")
        :format(key, math.type(value) == "float" and ("%.3f"):format(value) or tostring(value)))
    end
  end
end

-- Runs f for about a second, at least `least` times, with prepare (if given) before each run.
-- Returns the milliseconds of each run.
local function repeated(f, least, budget_ms, prepare)
  local core = require "moonshard.core"
  local times, start = {}, core.clock_ms()
  repeat
    if prepare then prepare() end
    local before = core.clock_ms()
    f()
    times[#times + 1] = core.clock_ms() - before
  until #times >= least and core.clock_ms() - start > (budget_ms or 1000)
  return times
end

-- Times of `count` steps of run(), on the device: from the end of one to the end of the next.
-- The first `warm` steps fill pools and plans.
local function step_times(warm, count, run)
  local core, ms = require "moonshard.core", require "moonshard"
  local times, before = {}, nil
  for step in ms.steps(warm + count) do
    run()
    if step >= warm - 1 then
      core.synchronize()
      local now = core.clock_ms()
      if before then times[#times + 1] = now - before end
      before = now
    end
  end
  return times
end

local configs = {
  micro = { layers = 2, width = 32, heads = 2, vocab = 64, context = 16, batch = 2 },
  tiny = { layers = 4, width = 256, heads = 4, vocab = 256, context = 256, batch = 8 },
  gpt2 = { layers = 12, width = 768, heads = 12, vocab = 50304, context = 64, batch = 4 },
  ["gpt2-124m"] = {
    layers = 12, width = 768, heads = 12, vocab = 50304, context = 1024, batch = 64,
  },
  ["gpt2-350m"] = {
    layers = 24, width = 1024, heads = 16, vocab = 50304, context = 1024, batch = 32,
  },
  ["gpt2-1558m"] = {
    layers = 48, width = 1600, heads = 25, vocab = 50304, context = 1024, batch = 32,
  },
}

-- Products of the linear layers of both configurations: tokens x inputs -> outputs.
local shapes = {
  { 2048, 256, 768 }, { 2048, 256, 256 }, { 2048, 256, 1024 }, { 2048, 1024, 256 },
  { 256, 768, 2304 }, { 256, 768, 768 }, { 256, 768, 3072 }, { 256, 3072, 768 },
  { 256, 768, 50304 },
}

-- "2048x256x768" -> { 2048, 256, 768 }
local function product(text)
  local m, k, n = text:match "^([1-9]%d*)x([1-9]%d*)x([1-9]%d*)$"
  if not m or #m > 9 or #k > 9 or #n > 9 then
    return nil, ("%q: a product is ROWSxINPUTSxOUTPUTS, such as 2048x256x768"):format(text)
  end
  return { math.tointeger(m), math.tointeger(k), math.tointeger(n) }
end

local function bench_gemm(parser)
  parser:option("--dtype", "of the operands"):choices { "f32", "bf16" }:default "f32"
  parser:option("--product", "what to measure, once or more often \z
      (default: those of two sizes of GPT-2)")
    :argname "ROWSxINPUTSxOUTPUTS":convert(product):count "*"
  return function(parsed)
    local core, peak = require "moonshard.core", require "moonshard.train.peak_flops"
    local flops, rows = peak.flops(parsed.dtype), {}
    core.no_grad(function()
      for i, shape in ipairs(#parsed.product > 0 and parsed.product or shapes) do
        local m, k, n = table.unpack(shape)
        local x, w = core.randn { m, k, seed = 1 }:to(parsed.dtype),
          core.randn { n, k, seed = 2 }:to(parsed.dtype)
        local times = repeated(function()
          x:linear(w)
          core.synchronize()
        end, 10, 300, core.collect)  -- each product reuses the memory of the last, as in training
        local work = 2 * m * k * n * 1e3
        rows[i] = { m = m, k = k, n = n, gflops = work / median(times) / 1e9 }
        flops = peak.raise(parsed.dtype, work / times[1])
      end
    end)
    for _, row in ipairs(rows) do row.share_of_peak = row.gflops * 1e9 / flops end
    if parsed.json then
      print(core.json_encode { dtype = parsed.dtype, peak_gflops = flops / 1e9, products = rows })
      return 0
    end
    print(("%s, peak %.0f GFLOP/s"):format(parsed.dtype, flops / 1e9))
    for _, row in ipairs(rows) do
      print(("%5d x %5d -> %5d  %7.0f GFLOP/s  %3.0f%%")
        :format(row.m, row.k, row.n, row.gflops, 100 * row.share_of_peak))
    end
    return 0
  end
end

local function bench_optim(parser)
  parser:option("--parameters", "elements"):convert(switches.count):default "124500000"
  parser:option("--kind", "optimizer")
    :choices { "sgd", "adam", "adamw", "adagrad", "adadelta", "rmsprop", "rprop", "adamax" }
    :default "adamw"
  return function(parsed)
    local core, ms = require "moonshard.core", require "moonshard"
    local n = parsed.parameters
    local p, g = core.zeros { n }:keep(), core.ones { n }:keep()
    local optimizer = ms.optim[parsed.kind]({ p }, {})
    optimizer:step_param(p, g)
    core.synchronize()
    local times = repeated(function()
      optimizer:step_param(p, g)
      core.synchronize()
    end, 7)
    local states = 0
    for _, t in pairs(optimizer.slots[p].state) do
      if t:numel() == n then states = states + 1 end
    end
    local bytes = n * 4 * (3 + 2 * states)
    local med = median(times)
    -- The lower bound: a copy of the same number of bytes (one read and one write of each).
    local copy = repeated(function()
      p:copy_(g)
      core.synchronize()
    end, 7)
    local copy_rate = 8 * n / median(copy) / 1e6
    local rate = bytes / med / 1e6
    emit(parsed, {
      kind = parsed.kind, parameters = n, ms_med = med, ms_min = times[1], gb_s = rate,
      copy_gb_s = copy_rate, share_of_copy = rate / copy_rate,
    }, { "kind", "parameters", "ms_med", "ms_min", "gb_s", "copy_gb_s", "share_of_copy" })
    return 0
  end
end

local function bench_enqueue()
  return function(parsed)
    local core = require "moonshard.core"
    -- A task that does nothing is a function for the CPU.
    local c = core.device() == "cpu" and core.bench_enqueue(200000) or nil
    local a = core.zeros { 16 }
    local function operators(count)
      core.no_grad(function() for _ = 1, count do a:add_(1) end end)
    end
    operators(1000)
    core.synchronize()
    local host = repeated(function() operators(500) end, 50, nil, core.synchronize)
    core.synchronize()
    local lua = repeated(function()
      operators(500)
      core.synchronize()
    end, 50)
    emit(parsed, {
      device = core.device(), ns_enqueue = c, ns_lua_enqueue = median(host) / 500 * 1e6,
      ns_lua_operator = median(lua) / 500 * 1e6,
    }, { "device", "ns_enqueue", "ns_lua_enqueue", "ns_lua_operator" })
    return 0
  end
end

-- Microseconds of one collective of `count` that run one after another. The host enqueues all of
-- them while a long first one still runs.
local function collective_us(world, t, gate, count)
  local core = require "moonshard.core"
  world:barrier()
  core.trace_start()
  world:all_reduce(gate, "avg")
  for _ = 1, count do world:all_reduce(t, "avg") end
  core.synchronize()
  local first, last, seen = nil, nil, 0
  for _, record in ipairs(core.trace_stop()) do
    if record.name == "all_reduce" then
      seen = seen + 1
      if seen == 2 then first = record.start_ns end
      last = record.end_ns
    end
  end
  return (last - first) / count / 1e3
end

-- All-reduces of tensors in the shared heap, and of ordinary tensors (staged).
local function bench_collectives(parser)
  require "moonshard.cli.bench.hosts".add_switches(parser)
  return function(parsed)
    local core, ms = require "moonshard.core", require "moonshard"
    local world = ms.world()
    local gate = core.zeros { 16 << 20, group = world }
    local rows = {}
    for _, dtype in ipairs { "f32", "bf16", "f16" } do
      for _, elements in ipairs { 1 << 10, 16 << 10, 256 << 10, 4 << 20, 64 << 20 } do
        for _, place in ipairs { "heap", "staged" } do
          local t = place == "heap" and core.zeros { elements, dtype = dtype, group = world }
            or core.zeros { elements, dtype = dtype }
          local count, times = math.max(3, math.min(500, (64 << 20) // elements)), {}
          for i = 1, 7 do times[i] = collective_us(world, t, gate, count) end
          rows[#rows + 1] = {
            dtype = dtype, elements = elements, place = place, us_med = median(times),
            us_min = times[1],
          }
          core.collect()
        end
      end
    end
    if world:rank() ~= 0 then return 0 end
    if parsed.json then
      print(core.json_encode { ranks = world:size(), all_reduce = rows })
      return 0
    end
    print(("all_reduce, %d ranks: microseconds a call, median (minimum)"):format(world:size()))
    for _, row in ipairs(rows) do
      print(("%-5s %9d elements  %-6s  %10.2f (%.2f)")
        :format(row.dtype, row.elements, row.place, row.us_med, row.us_min))
    end
    return 0
  end
end

-- Milliseconds that the host spends in a backward of a model of many small parameters, each in a
-- bucket of its own.
local function backward_ms(parameters, hook)
  local core, ms = require "moonshard.core", require "moonshard"
  local layers = {}
  for i = 1, parameters do layers[i] = ms.nn.Linear(8, 8, { bias = false }) end
  local model = ms.ddp(ms.nn.Sequential(table.unpack(layers)),
    { comm_hook = hook, bucket_bytes = 1 })
  local x, times = ms.ones { 1, 8 }, {}
  for step in ms.steps(40) do
    local loss = model(x):sum()
    core.synchronize()
    local start = core.clock_ms()
    loss:backward()
    if step >= 10 then times[#times + 1] = core.clock_ms() - start end
    core.synchronize()
    for _, p in ipairs(model:parameters()) do p:set_grad(nil) end
  end
  return median(times)
end

-- The host's time for a link in Lua that does nothing (three lines), for each bucket.
local function bench_hook()
  return function(parsed)
    local ms = require "moonshard"
    local buckets = 100
    local function nothing(bucket, next) return next(bucket) end
    local native = { backward_ms(buckets, nil), 0 }
    local lua = backward_ms(buckets, ms.hooks.chain { nothing })
    native[2] = backward_ms(buckets, nil)
    local plain = math.min(native[1], native[2])
    if ms.rank() > 0 then return 0 end
    local function us(time) return time / buckets * 1e3 end
    emit(parsed, {
      ranks = ms.world_size(), buckets = buckets, us_bucket_native = us(plain),
      us_bucket_lua = us(lua), us_link = us(lua - plain),
    }, { "ranks", "buckets", "us_bucket_native", "us_bucket_lua", "us_link" })
    return 0
  end
end

local kinds = {
  step = function(parser)
    local tools = { median = median, emit = emit, configs = configs }
    return require "moonshard.cli.bench.step".register(parser, tools)
  end,
  gemm = bench_gemm,
  optim = bench_optim,
  enqueue = bench_enqueue,
  collectives = bench_collectives,
  hook = bench_hook,
  hooks = function(parser) return require "moonshard.cli.bench.hooks".register(parser, median) end,
  fsdp = function(parser)
    local tools = { median = median, configs = configs, step_times = step_times }
    return require "moonshard.cli.bench.fsdp".register(parser, tools)
  end,
  kernels = function(parser)
    return require "moonshard.cli.bench.kernels".register(parser, median)
  end,
  tokenize = function(parser)
    return require "moonshard.cli.bench.tokenize".register(parser, median)
  end,
  generate = function(parser)
    return require "moonshard.cli.bench.generate".register(parser, median)
  end,
}
local USAGE = [[
usage: moonshard bench step|gemm|kernels|optim|enqueue|collectives|hook|hooks|fsdp|tokenize| \
         generate [switches]

  step         a training step of a GPT-2: forward, backward, optimizer, tokens a second
  gemm         the matrix products of its linear layers, as shares of the peak
  kernels      each kernel alone, as a share of what copies and products reach
  optim        a step of an optimizer, against a copy of as many bytes
  enqueue      what enqueuing an operator costs the host
  collectives  all_reduce by dtype and size, in the shared heap and outside; or between two hosts
  hook         what a communication hook in Lua costs the host, a bucket
  hooks        native hooks beside the plain mean, over several links
  fsdp         steps and memory of sharded models beside ddp's and PyTorch's; the cost of an edge
  tokenize     text to ids and back, beside the library of the tokenizer's file
  generate     tokens a second of a GPT-2 that writes text, beside whole windows and PyTorch

moonshard bench KIND --help lists the switches of each.]]

-- The parser of a kind, and what runs it; whether it starts jobs of its own, and whether it has
-- ranks.
local function parser_of(kind)
  local parser = switches.parser("bench " .. kind,
    "Measures; figures are for comparing, on an otherwise idle machine.")
  parser:flag("--json", "one line of JSON")
  local own_jobs = kind == "hooks" or kind == "fsdp"        -- start jobs, unless --here is given
  local many = kind == "step" or kind == "collectives" or kind == "hook" or own_jobs
  if many then
    switches.add_ranks(parser)
    require "moonshard.cli.ranks".add_switches(parser)
  end
  local run = kinds[kind](parser)
  return parser, run, own_jobs, many
end

--- The parsers of all kinds: commands of one parser; see switches.root.
---@return table
function bench.parser()
  local above = switches.root
  local parser = switches.plain("bench", "Measures; figures are for comparing, on an otherwise \z
    idle machine.")
  switches.root = parser
  local names = {}
  for kind in pairs(kinds) do names[#names + 1] = kind end
  table.sort(names)
  for _, kind in ipairs(names) do parser_of(kind) end
  switches.root = above
  return parser
end

--- moonshard bench step|gemm|kernels|optim|... [-n N] [switches]
---@param arguments string[]
---@return integer
function bench.main(arguments)
  local launch = require "moonshard.base.launch"
  local given = table.move(arguments, 1, #arguments, 1, {})
  local kind = table.remove(arguments, 1)
  if not kinds[kind or ""] then
    if kind ~= "--help" and kind ~= "-h" then launch.exit(2, USAGE) end
    print(USAGE)
    return 0
  end
  local parser, run, own_jobs, many = parser_of(kind)
  local parsed = switches.parse(parser, arguments)
  if parsed.device == "sim" then
    launch.exit(2, "--device sim: nothing is computed there, and nothing can be measured")
  end
  if parsed.check then
    if parsed.ranks > 1 or parsed.hook_pairs then
      launch.exit(2, ("--check is of a step of one rank: leave out %s")
        :format(parsed.ranks > 1 and "-n" or "--hook-pairs"))
    end
    -- What is checked is a run on this device; see `moonshard check`.
    parsed.check, parsed.device = parsed.device or "cpu", "sim"
    require "moonshard.core".configure { for_gpu = parsed.check == "cuda" }
    launch.for_gpu = parsed.check == "cuda"
    if launch.for_gpu then parsed.rates = parsed.rates or switches.GPU end
  end
  if parsed.hosts then return require "moonshard.cli.bench.hosts".run(parsed, median, given) end
  if many and parsed.ranks > 1 and (not own_jobs or parsed.here)
      and not launch.process.rank then
    return require "moonshard.cli.ranks".launch(parsed)
  end
  if parsed.way == "edges" then
    parsed.device = "sim"
    require "moonshard.core".configure { group = "fake", rank = 0, world_size = 2 }
  end
  switches.apply(parsed)
  -- Then nothing but the JSON goes to stdout.
  if parsed.json then launch.quiet = true end
  return run(parsed)
end

return bench
