-- moonshard bench step: a training step of a GPT-2, as a whole and in parts; and what a hook in Lua
-- that does nothing adds to it.
local switches = require "moonshard.cli.switches"

local bench_step = {}

local WARM, PARTS = 3, 5            -- steps before the measured ones, and in parts after them
local GRAPH_WARM <const> = 3        -- more of them until graphs are launched
local PAIRS, PAIR_STEPS = 10, 5     -- with and without a hook in Lua, in turns

-- The command's configurations: name, parameters, where they are measured.
local configs = {
  { "tiny", "3.3M parameters, 2048 tokens a step", steps = 40 },
  { "gpt2", "124M, 256 tokens", steps = 12 },
  { "gpt2-124m", "124M, 65536 tokens, for a GPU", steps = 20, gpu = true },
  { "gpt2-350m", "350M, 32768 tokens", steps = 12, gpu = true },
  { "gpt2-1558m", "1558M, 32768 tokens", steps = 8, gpu = true },
  { "micro", "to try the command: its figures mean nothing", steps = 4 },
}

local function resident_mib()
  local file = io.open "/proc/self/status"
  if not file then return 0 end
  local text = file:read "a"
  file:close()
  return tonumber(text:match "VmRSS:%s+(%d+)") / 1024
end

-- The memory of the GPU that this process has, with the driver's and the libraries' part, as
-- nvidia-smi tells it. nil: it is not there, or does not say. Inside a container it may know the
-- process by another number; where there is one process only, that is this one.
local function process_mib()
  if require "moonshard.core".device() ~= "cuda" then return nil end
  local stat = io.open "/proc/self/stat"
  local own = stat and stat:read "n"
  if stat then stat:close() end
  local pipe <close> = assert(io.popen("nvidia-smi --query-compute-apps=pid,used_memory \z
    --format=csv,noheader,nounits 2>/dev/null"))
  local seen, found, only = 0, nil, nil
  for line in pipe:lines() do
    local pid, mib = line:match "^%s*(%d+),%s*(%d+)"
    if pid then
      seen, only = seen + 1, tonumber(mib)
      if tonumber(pid) == own then found = tonumber(mib) end
    end
  end
  return found or seen == 1 and only or nil
end

-- One training step in parts that can be timed apart.
local function trainer(c, parsed)
  local ms = require "moonshard"
  local dtype = parsed.dtype
  local model = ms.nn.gpt2 {
    vocab = c.vocab, context = c.context, layers = c.layers, width = c.width, heads = c.heads,
    recompute = parsed.recompute or nil,
  }
  if parsed.parameters == "bf16" then model:to "bf16" end
  local wrapped = model
  -- comm_hook: nil is the plain mean. On one rank the model needs no wrapper unless told.
  local function wrap(comm_hook)
    if wrapped ~= model then wrapped:unwrap() end
    wrapped = ms.ddp(model, { comm_hook = comm_hook })
  end
  if ms.world_size() > 1 then wrap(parsed.hook ~= "none" and parsed.hook or nil) end
  local optimizer = ms.optim.adamw(model, { lr = 1e-4, weight_decay = 0.1 })
  local x = ms.randint { c.batch, c.context, low = 0, high = c.vocab, seed = 1 }:keep()
  local y = ms.randint { c.batch, c.context, low = 0, high = c.vocab, seed = 2 }:keep()
  local function loss_of() return wrapped:loss(x, y) end
  local part = { tokens = c.batch * c.context, wrap = wrap, graph = parsed.graph or false }
  -- Where parameters are bf16, everything is, and nothing has to be cast but to fp8.
  local casts = dtype == "fp8" or dtype ~= "f32" and parsed.parameters == "f32"
  local function run() return casts and ms.autocast(dtype, loss_of) or loss_of() end
  function part.forward() return ms.attention(parsed.attention, run) end
  function part.optimizer() optimizer:step() end
  function part.step()
    part.forward():backward()
    optimizer:step()
  end
  function part.exposed_ms()
    return ms.world_size() > 1 and wrapped:stats().exposed_ms or 0.0
  end
  return part
end

-- Notes when steps end on the device. On a GPU the host is a step ahead, as in training: launches
-- of a step would otherwise be measured with it. Returns the function to call at the end of each
-- step, which answers the milliseconds of a step, or nil at first.
local function watch()
  local core = require "moonshard.core"
  local ahead, before, last = core.device() == "cuda", nil, nil
  return function()
    local point = last
    if ahead then last = { core.stream():_point() } else core.synchronize() end
    if ahead and not point then return nil end
    if ahead then core.point_sync(point[1], point[2]) end
    local now = core.clock_ms()
    local ms = before and now - before
    before = now
    return ms
  end
end

-- Milliseconds of `count` whole steps, after some that fill pools and plans.
local function measure(part, count, warm, exposed)
  local times, passed = {}, watch()
  if part.graph then warm = warm + GRAPH_WARM end
  for step in require "moonshard".steps(warm + count + 2, 0, { graph = part.graph }) do
    part.step()
    local ms = passed()
    if step > warm and ms and #times < count then times[#times + 1] = ms end
    if exposed and step >= warm then exposed[#exposed + 1] = part.exposed_ms() end
  end
  require "moonshard.core".synchronize()
  return times
end

-- Milliseconds of the parts of some steps, with a wait after each part.
local function measure_parts(part)
  local core = require "moonshard.core"
  local phases = { forward = {}, backward = {}, optimizer = {} }
  for _ in require "moonshard".steps(PARTS) do
    local start = core.clock_ms()
    local function mark(name)
      core.synchronize()
      local now = core.clock_ms()
      table.insert(phases[name], now - start)
      start = now
    end
    local loss = part.forward()
    mark "forward"
    loss:backward()
    mark "backward"
    part.optimizer()
    mark "optimizer"
  end
  return phases
end

local function whole_steps(parsed, part, tools)
  local ms, core = require "moonshard", require "moonshard.core"
  local exposed = {}
  local times = measure(part, parsed.steps, WARM, exposed)
  local phases = measure_parts(part)
  if ms.rank() > 0 then return 0 end
  local med, mib = tools.median(times), process_mib()
  local info, c = core.info(), part.config
  tools.emit(parsed, {
    config = parsed.config, device = core.device(), batch = c.batch, length = c.context,
    ranks = ms.world_size(), threads = info.threads, dtype = parsed.dtype,
    parameters = parsed.parameters, hook = parsed.hook,
    attention = parsed.attention, tuned = parsed.tune or nil,
    graphs = parsed.graph and info.graph.graphs or nil,
    ms_step_med = med, ms_step_min = times[1],
    tok_s = ms.world_size() * part.tokens / med * 1e3,
    ms_forward = tools.median(phases.forward), ms_backward = tools.median(phases.backward),
    ms_optimizer = tools.median(phases.optimizer), exposed_comm_ms = tools.median(exposed),
    peak_mib = core.memory().peak / 2 ^ 20, process_mib = mib, rss_mib = resident_mib(),
    steps = parsed.steps,
  }, {
    "config", "device", "batch", "length", "ranks", "threads", "dtype", "parameters", "hook",
    "attention", "tuned", "graphs", "ms_step_med", "ms_step_min", "tok_s", "ms_forward",
    "ms_backward", "ms_optimizer", "exposed_comm_ms", "peak_mib", "process_mib", "rss_mib", "steps",
  })
  return 0
end

-- On the sim device, which makes all decisions and has no data: the peak of a run of whole_steps,
-- and the time of a step by the rates of a GPU. The first steps and those in parts have the peak;
-- the others repeat it.
local function predict(parsed, part, tools)
  local core, c, ends = require "moonshard.core", part.config, {}
  part.graph = false  -- it needs a GPU, and no other tensor memory
  measure(part, 1, WARM)
  measure_parts(part)
  for _ in require "moonshard".steps(2) do
    part.step()
    ends[#ends + 1] = core.simulated_ns()
  end
  local ms = parsed.rates and (ends[2] - ends[1]) / 1e6
  tools.emit(parsed, {
    config = parsed.config, device = parsed.check, batch = c.batch, length = c.context,
    dtype = parsed.dtype, parameters = parsed.parameters, attention = parsed.attention,
    peak_mib = core.memory().peak / 2 ^ 20, reserved_mib = core.memory().reserved / 2 ^ 20,
    rates = parsed.rates, estimated_ms = ms, estimated_tok_s = ms and part.tokens / ms * 1e3,
  }, {
    "config", "device", "batch", "length", "dtype", "parameters", "attention", "peak_mib",
    "reserved_mib", "rates", "estimated_ms", "estimated_tok_s",
  })
  return 0
end

local function nothing(bucket, next) return next(bucket) end

-- Medians of steps without and with a link in Lua, in turns. The order changes from pair to pair,
-- so that a machine that becomes slower slows both.
local function hook_pairs(parsed, part, tools)
  local ms = require "moonshard"
  local shares, medians = {}, { {}, {} }
  for pair = 1, PAIRS do
    local pair_of = {}
    for turn = 1, 2 do
      local way = (pair + turn) % 2 + 1
      part.wrap(way == 2 and ms.hooks.chain { nothing } or nil)
      pair_of[way] = tools.median(measure(part, parsed.steps, pair == 1 and WARM or 2))
      table.insert(medians[way], pair_of[way])
    end
    shares[pair] = 100 * (pair_of[2] / pair_of[1] - 1)
  end
  if ms.rank() > 0 then return 0 end
  local without, with = tools.median(medians[1]), tools.median(medians[2])
  tools.emit(parsed, {
    config = parsed.config, device = require "moonshard.core".device(), ranks = ms.world_size(),
    dtype = parsed.dtype, parameters = parsed.parameters, pairs = PAIRS, steps = parsed.steps,
    ms_step_native = without, ms_step_lua = with, percent_med = tools.median(shares),
    percent_min = shares[1], percent_max = shares[PAIRS],
  }, {
    "config", "device", "ranks", "dtype", "parameters", "pairs", "steps", "ms_step_native",
    "ms_step_lua", "percent_med", "percent_min", "percent_max",
  })
  return 0
end

--- The parser's switches; returns what runs the bench.
---@param parser table
---@param tools { median: function, emit: function, configs: table }
---@return fun(parsed: table): integer
function bench_step.register(parser, tools)
  local names, facts, texts = {}, {}, {}
  for i, config in ipairs(configs) do
    names[i], facts[config[1]] = config[1], config
    texts[i] = config[1] .. ": " .. config[2]
  end
  parser:option("--config", table.concat(texts, "; ")):choices(names):default "tiny"
  parser:option("--dtype",
    "of matrix products (default: bf16 with the configurations for a GPU, else f32)")
    :choices { "f32", "bf16", "f16", "fp8" }
  parser:option("--parameters",
    "bf16: the model's are bf16, as all that it computes, and the optimizer keeps f32 copies")
    :choices { "f32", "bf16" }:default "f32"
  parser:option("--batch", "rows of a step (default: the configuration's)")
    :convert(switches.count)
  parser:option("--length", "tokens of a row (default: the configuration's)")
    :convert(switches.count)
  parser:option("--hook",
    "how several ranks communicate: none (the plain mean), or the name of a native hook")
    :default "none"
  parser:option("--steps",
    ("steps to measure (default: 40; with --config gpt2 or gpt2-350m 12, gpt2-124m 20, \z
      gpt2-1558m 8, micro 4; with --hook-pairs %d in each half)"):format(PAIR_STEPS))
    :convert(switches.count)
  parser:flag("--graph", "launch as graphs what each step repeats, on a GPU")
  parser:flag("--tune", "on a GPU: use the algorithms of products that are fastest here; they are \z
    timed after the third step, and kept as those of `moonshard run --tune`. Otherwise the \z
    library's first candidates are measured, whatever is kept")
  parser:option("--attention", "how its gradients are added up")
    :choices { "deterministic", "fast" }:default "deterministic"
  parser:flag("--recompute", "backward computes the activations of each block again")
  parser:flag("--check", "measure nothing: tell the peak of tensor memory that it would have, \z
    with --memory whether it fits, and with --device cuda an estimate of its time; on any machine")
  parser:flag("--hook-pairs", ("what a hook in Lua that does nothing adds to the median step: \z
    %d pairs of runs without and with it, in turns"):format(PAIRS))
  return function(parsed)
    local found = facts[parsed.config]
    if parsed.parameters == "bf16" then
      if parsed.dtype and parsed.dtype ~= "bf16" and parsed.dtype ~= "fp8" then
        require "moonshard.base.launch".exit(2, ("--parameters bf16: products are of bf16: \z
          leave out --dtype %s"):format(parsed.dtype))
      end
      parsed.dtype = parsed.dtype or "bf16"
    end
    parsed.dtype = parsed.dtype or (found.gpu and "bf16" or "f32")
    parsed.steps = parsed.steps or (parsed.hook_pairs and PAIR_STEPS or found.steps)
    if parsed.dtype == "f16" and (parsed.check or require "moonshard.core".device()) == "cpu" then
      require "moonshard.base.launch".exit(2,
        "--dtype f16: products of f16 exist on a GPU only: f32 or bf16 here")
    end
    if parsed.hook_pairs and parsed.hook ~= "none" then
      require "moonshard.base.launch".exit(2, ("--hook-pairs compares the plain mean with a hook \z
        of its own: leave out --hook %s"):format(parsed.hook))
    end
    if parsed.tune and parsed.check then
      require "moonshard.base.launch".exit(2, "--tune times products: leave out --check")
    end
    require "moonshard.base.launch".tune = parsed.tune and "yes" or "no"
    local c = {}
    for name, value in pairs(tools.configs[parsed.config]) do c[name] = value end
    c.batch, c.context = parsed.batch or c.batch, parsed.length or c.context
    local part = trainer(c, parsed)
    part.config = c
    if parsed.check then return predict(parsed, part, tools) end
    return (parsed.hook_pairs and hook_pairs or whole_steps)(parsed, part, tools)
  end
end

return bench_step
