-- `moonshard bench fsdp`: a step of a sharded model beside one of ddp's and beside PyTorch's
-- fully_shard, the memory of a rank under each, and what an edge of the runtime costs the host.
-- With --links or --prefetch: prefetch strategies over links instead (prefetch.lua).
local bench_prefetch = require "moonshard.cli.bench.prefetch"
local launch = require "moonshard.base.launch"
local own_script = require "moonshard.cli.own_script"
local switches = require "moonshard.cli.switches"

local bench_fsdp = {}

-- Name, and options of ms.fsdp; nil: ms.ddp.
local WAYS = {
  { "ddp" }, { "full_shard", { strategy = "full_shard" } },
  { "shard_grad_op", { strategy = "shard_grad_op" } },
  -- Both compute in bf16: of the first, f32 travels; of the second, bf16.
  { "full_shard, autocast bf16", { strategy = "full_shard" }, dtype = "bf16" },
  { "full_shard, bf16", { precision = { param = "bf16" } } },
}
-- The peer with the pages of freed memory kept, which is faster, and with malloc's defaults.
local PEERS = {
  { "ddp", arguments = "ddp kept" },
  { "fully_shard", arguments = "fully_shard kept" },
  { "fully_shard, malloc as shipped", arguments = "fully_shard returned" },
}
local WARM = 3                     -- steps that fill pools and plans
local STEPS = { micro = 20, tiny = 20, gpt2 = 8 }
local ROUNDS <const>, LINK_STEPS <const> = 3, 4
local EDGES <const> = 4            -- of a unit in a step: before and after its forward and backward

-- Proportional resident memory of this process: pages that ranks share count in parts. Pools keep
-- what they have taken, so after the steps it is the most that there was.
local function pss_mib()
  local file = io.open "/proc/self/smaps_rollup"
  if not file then return 0 end
  local text = file:read "a"
  file:close()
  return tonumber(text:match "\nPss:%s+(%d+)") / 1024
end

----------------------------------------------------------------------------------------- one job

-- Measures one way on the ranks of this job: a line of JSON from rank 0.
local function measure(parsed, tools)
  local core, ms = require "moonshard.core", require "moonshard"
  local way = WAYS[tonumber(parsed.way)]
  local c, options = tools.configs[parsed.config], way[2]
  local model = ms.nn.gpt2 {
    vocab = c.vocab, context = c.context, layers = c.layers, width = c.width, heads = c.heads,
  }
  if options then model = ms.fsdp(model, options) else model = ms.ddp(model) end
  local optimizer = ms.optim.adamw(model, { lr = 1e-4, weight_decay = 0.1 })
  local x = ms.randint { c.batch, c.context, low = 0, high = c.vocab, seed = 1 }
  local y = ms.randint { c.batch, c.context, low = 0, high = c.vocab, seed = 2 }
  local copies, overlaps = {}, {}
  local function loss_of() return model(x):cross_entropy(y) end
  local times = tools.step_times(WARM, parsed.steps or STEPS[parsed.config], function()
    local loss = way.dtype and ms.autocast(way.dtype, loss_of) or loss_of()
    loss:backward()
    optimizer:step()
    local stats = model:stats()
    table.insert(copies, stats.copy_ms or 0)
    table.insert(overlaps, stats.copy_overlap_ms or 0)
  end)
  local most = ms.world():all_reduce(ms.full(pss_mib(), {}), "max"):value():item()
  if ms.rank() > 0 then return 0 end
  local med = tools.median(times)
  print(core.json_encode {
    ms_step_med = med, ms_step_min = times[1], pss_mib = most,
    peak_mib = ms.memory().peak / 2 ^ 20,
    copy_ms = tools.median(copies), copy_overlap_ms = tools.median(overlaps),
  })
  return 0
end

-- Microseconds of the host in a step of a model of many small units, of which each has a weight.
local function host_us(units, sharded)
  local core, ms = require "moonshard.core", require "moonshard"
  local list = {}
  for i = 1, units do list[i] = ms.nn.Linear(8, 8, { bias = false }) end
  local model = ms.nn.Sequential(table.unpack(list))
  if sharded then model = ms.fsdp(model, { wrap = { class = "Linear" } }) end
  local x, times = ms.ones { 1, 8 }, {}
  for step in ms.steps(60) do
    local start = core.clock_ms()
    model(x):sum():backward()
    if step >= 20 then times[#times + 1] = core.clock_ms() - start end
    core.synchronize()
    for _, p in ipairs(model:parameters()) do p:set_grad(nil) end
  end
  table.sort(times)
  return times[#times // 2] * 1e3
end

-- On the sim device, in a world without the other rank, so that no thread takes the host's time.
local function measure_edges()
  local core = require "moonshard.core"
  local units, best = 100, math.huge
  for _ = 1, 5 do
    local plain, sharded = host_us(units, false), host_us(units, true)
    best = math.min(best, (sharded - plain) / units / EDGES)
  end
  print(core.json_encode { us_edge = best })
  return 0
end

------------------------------------------------------------------------------------------ all jobs

-- Runs this program, or another one, and returns the lines of JSON that it prints; nil if it fails.
local function lines_of(command)
  local core = require "moonshard.core"
  local pipe <close> = assert(io.popen(command))
  local found = {}
  for line in pipe:lines() do
    if line:sub(1, 1) == "{" then found[#found + 1] = core.json_decode(line) end
  end
  local ok = pipe:close()
  return ok and #found > 0 and found or nil
end

local function answer_of(command)
  local lines = lines_of(command)
  return lines and lines[#lines]
end

local SELF = 'exec "$(readlink /proc/$PPID/exe)" bench fsdp --here '

-- The version of the interpreter's PyTorch; nil if it has none, or the script is not there.
local function peer_of(parsed)
  if require "moonshard.core".exists(parsed.peer) ~= "file" then return nil end
  local pipe <close> = assert(io.popen(
    ("'%s' -c 'import torch; print(torch.__version__)' 2>/dev/null"):format(parsed.python)))
  local version = pipe:read "l"
  return version and version:match "^%d" and version or nil
end

local function ways_of(parsed, config, tools)
  local ways = {}
  local steps = parsed.steps or STEPS[config]
  for i, way in ipairs(WAYS) do
    ways[i] = {
      way[1],
      command = SELF .. ("--config %s --way %d --steps %d -n %d%s"):format(config, i, steps,
        parsed.ranks, parsed.thread_ranks and " --thread-ranks" or ""),
    }
  end
  local version = peer_of(parsed)
  local c = tools.configs[config]
  for _, way in ipairs(version and PEERS or {}) do
    ways[#ways + 1] = {
      ("PyTorch %s %s"):format(version, way[1]),
      command = ("exec '%s' '%s' %s %d %d %d %d %d %d %d %d %d"):format(parsed.python,
        parsed.peer, way.arguments, parsed.ranks, c.layers, c.width, c.heads, c.vocab, c.context,
        c.batch, WARM, steps),
    }
  end
  return ways
end

-- The ways one after the other, several times: of each the least median and the least memory.
local function measure_config(parsed, config, tools)
  local ways, rows = ways_of(parsed, config, tools), {}
  for _ = 1, parsed.rounds or ROUNDS do
    for i, way in ipairs(ways) do
      local one = answer_of(way.command)
      if not one then launch.exit(1, ("bench fsdp: %s, %s failed"):format(config, way[1])) end
      local row = rows[i] or { config = config, way = way[1] }
      for name, value in pairs(one) do row[name] = math.min(row[name] or math.huge, value) end
      rows[i] = row
    end
  end
  for _, row in ipairs(rows) do row.of_ddp = row.ms_step_med / rows[1].ms_step_med end
  return rows
end

local function show(rows, us_edge, ranks)
  print(("%d ranks; medians of a step, the least of all rounds; memory of the larger rank")
    :format(ranks))
  print(("%-6s %-44s %12s %12s %8s %10s"):format("", "", "ms a step", "least", "of ddp", "Pss MiB"))
  for _, row in ipairs(rows) do
    print(("%-6s %-44s %12.1f %12.1f %8.2f %10.0f"):format(row.config, row.way, row.ms_step_med,
      row.ms_step_min, row.of_ddp, row.pss_mib))
  end
  for _, row in ipairs(rows) do
    if (row.copy_ms or 0) > 0 then
      print(("%s, %s: copies before gathers take %.2f ms of a step, %.2f ms of it while another \z
        gather runs"):format(row.config, row.way, row.copy_ms, row.copy_overlap_ms))
    end
  end
  print(("an edge of the runtime costs the host %.2f us"):format(us_edge))
end

-- What one job measures, by --way; other ways are numbers of WAYS.
local parts = {
  edges = measure_edges, strategies = bench_prefetch.measure,
}

-- Prefetch strategies over links. A mistake is reported once, before anything is measured.
local function strategies(parsed)
  local _, cfg = own_script.parse("prefetch", parsed.prefetch or "")
  if cfg.prefetch then require "moonshard.scripts"._check("prefetch", cfg.prefetch) end
  if parsed.units and not parsed.units:match "^[%w_,]+$" then
    launch.exit(2, ("bench fsdp: --units %s: names of classes are expected, separated by commas")
      :format(parsed.units))
  end
  parsed.links = parsed.links or bench_prefetch.LINKS
  parsed.config = parsed.config == "both" and "tiny" or parsed.config
  parsed.steps = parsed.steps or LINK_STEPS
  parsed.rounds = parsed.rounds or bench_prefetch.ROUNDS
  local code = bench_prefetch.run(parsed, function(given) return lines_of(SELF .. given) end)
  if code ~= 0 then launch.exit(code, "bench fsdp: the strategies could not be measured") end
  return 0
end

--- Adds the switches; returns what runs it.
---@param parser table
---@param tools { median: fun(list: number[]): number; configs: table }
---@return fun(parsed: table): integer
function bench_fsdp.register(parser, tools)
  parser:option("--config", "of models; both: tiny and gpt2; micro: to try the bench")
    :choices { "micro", "tiny", "gpt2", "both" }:default "both"
  parser:option("--steps", ("steps to measure (default: 20; of gpt2 8; with --links %d a round)")
    :format(LINK_STEPS))
    :convert(switches.count)
  parser:option("--rounds", ("how often each is measured (default: %d; with --links %d)")
    :format(ROUNDS, bench_prefetch.ROUNDS)):convert(switches.count)
  parser:option("--python", "an interpreter; if it has PyTorch, that is measured, too")
    :default "python3"
  parser:option("--peer", "what the interpreter runs"):default "tests/bench/fully_shard.py"
  parser:flag("--here", "measure one way on the ranks of this job; a line of JSON"):hidden(true)
  parser:option("--way"):hidden(true)
  parser:option("--links", "compare prefetch strategies over these links, separated by spaces "
    .. ("(default: none; '%s' with --prefetch)"):format(bench_prefetch.LINKS))
  parser:option("--units", "with --links or --prefetch: classes of modules that are units, "
    .. "separated by commas (default: GPT2Block)")
  parser:option("--prefetch",
    "a strategy of your own beside the others, with its options: 'FILE key=value ...'")
  return function(parsed)
    local core = require "moonshard.core"
    local part = parts[parsed.way] or measure
    if parsed.here then return part(parsed, tools) end
    parsed.ranks = math.max(parsed.ranks, 2)
    if parsed.links or parsed.prefetch then return strategies(parsed) end
    if parsed.units then
      launch.exit(2, "bench fsdp: --units is for strategies over links: give --links or --prefetch")
    end
    local rows = {}
    for _, config in ipairs(parsed.config == "both" and { "tiny", "gpt2" } or { parsed.config }) do
      for _, row in ipairs(measure_config(parsed, config, tools)) do rows[#rows + 1] = row end
    end
    local edges = answer_of(SELF .. "--way edges")
    if not edges then launch.exit(1, "bench fsdp: the edges could not be measured") end
    if parsed.json then
      print(core.json_encode { ranks = parsed.ranks, rows = rows, us_edge = edges.us_edge })
    else
      show(rows, edges.us_edge, parsed.ranks)
    end
    return 0
  end
end

return bench_fsdp
