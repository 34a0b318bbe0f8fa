-- `moonshard bench fsdp --links LINKS --prefetch FILE`: a step of a sharded model under each
-- prefetch strategy, over network links of several speeds, beside the least time that the link
-- allows.
local core = require "moonshard.core"
local own_script = require "moonshard.cli.own_script"

local bench_prefetch = {}

bench_prefetch.LINKS = "1Gbit,1ms 200Mbit,5ms"
local WARM <const> = 12 -- plans are made in the third pass and later; "tuned" tries some first

local function new_model(c, options)
  local ms = require "moonshard"
  ms.seed(1)
  return ms.fsdp(ms.nn.gpt2 {
    vocab = c.vocab, context = c.context, layers = c.layers, width = c.width, heads = c.heads,
  }, options)
end

local function new_batch(c)
  local ms = require "moonshard"
  return ms.randint { c.batch, c.context, low = 0, high = c.vocab, seed = 1 }
end

----------------------------------------------------------------------------------------- one job

-- Ready-made strategies and the user's: name, and the value of the option.
local function strategies_of(parsed)
  local list = {}
  local ready_made = require "moonshard.fsdp.prefetch".ready_made
  for i, name in ipairs(ready_made) do list[i] = { name, name } end
  if parsed.prefetch then
    local short, cfg = own_script.parse("prefetch", parsed.prefetch)
    list[#list + 1] = { short, require "moonshard.scripts".resolve(cfg, "prefetch") }
  end
  return list
end

local function measure(strategy, parsed, tools)
  local ms = require "moonshard"
  local c = tools.configs[parsed.config]
  local model = new_model(c, { prefetch = strategy[2] })
  local optimizer, x = ms.optim.adamw(model, { lr = 1e-4 }), new_batch(c)
  local times = tools.step_times(WARM, parsed.steps, function()
    model(x):cross_entropy(x):backward()
    optimizer:step()
  end)
  model:unwrap()
  local med = tools.median(times)
  return { strategy = strategy[1], ms_step_med = med, ms_step_min = times[1] }
end

-- What a step sends over a link, in milliseconds: a rank sends its shard to each other rank in a
-- gather, and as much in a reduction. The root is gathered once a step, other units twice.
local function sent(parsed, tools)
  local model = new_model(tools.configs[parsed.config])
  local link, others = parsed.link or {}, require "moonshard".world_size() - 1
  local result = { forward_ms = 0, backward_ms = 0 }
  for _, unit in ipairs(model:units()) do
    local bytes = others * unit.shard_bytes
    local one = (link.latency_ns or 0) / 1e6
      + (link.bytes_per_second and bytes / link.bytes_per_second * 1e3 or 0)
    result.forward_ms = result.forward_ms + one
    result.backward_ms = result.backward_ms + (unit.index == 0 and 1 or 2) * one
    if unit.index == 0 then result.first_ms, result.last_ms = one, one end
  end
  model:unwrap()
  return result
end

--- Measures all strategies on the ranks of this job, over its link: lines of JSON from rank 0.
---@param parsed table
---@param tools table
---@return integer
function bench_prefetch.measure(parsed, tools)
  local ms = require "moonshard"
  local function show(row)
    ms.world():barrier()
    if ms.rank() > 0 then return end
    io.stdout:write(core.json_encode(row), "\n")
    io.stdout:flush()
  end
  show { sent = sent(parsed, tools) }
  for _, strategy in ipairs(strategies_of(parsed)) do show(measure(strategy, parsed, tools)) end
  return 0
end

--- Measures computing alone, in a world without the other ranks.
---@param parsed table
---@param tools table
---@return integer
function bench_prefetch.compute(parsed, tools)
  local ms = require "moonshard"
  local c = tools.configs[parsed.config]
  local model, x = new_model(c), new_batch(c)
  local optimizer = ms.optim.adamw(model, { lr = 1e-4 })
  local forwards, rests = {}, {}
  for _ in ms.steps(WARM + parsed.steps) do
    core.synchronize()
    local start = core.clock_ms()
    local loss = model(x):cross_entropy(x)
    core.synchronize()
    local middle = core.clock_ms()
    loss:backward()
    optimizer:step()
    core.synchronize()
    forwards[#forwards + 1], rests[#rests + 1] = middle - start, core.clock_ms() - middle
  end
  print(core.json_encode {
    forward_ms = tools.median(forwards), backward_ms = tools.median(rests),
  })
  return 0
end

------------------------------------------------------------------------------------------ all jobs

-- The time of a step that hides all that it can: over forward and backward, the longer of computing
-- and sending; then the first gather and the last reduction, which nothing hides.
local function least(computing, sending)
  return math.max(computing.forward_ms, sending.forward_ms)
    + math.max(computing.backward_ms, sending.backward_ms) + sending.first_ms + sending.last_ms
end

local function show(rows, links)
  io.stdout:write(("%-32s"):format "milliseconds a step, median")
  for _, link in ipairs(links) do io.stdout:write(("%26s"):format(link)) end
  io.stdout:write "\n"
  for i, first in ipairs(rows[1]) do
    io.stdout:write(("%-32s"):format(first.strategy))
    for _, list in ipairs(rows) do
      io.stdout:write(("%12.1f (%.3f of least)"):format(list[i].ms_step_med, list[i].of_least))
    end
    io.stdout:write "\n"
  end
end

--- Measures each link in a job of its own.
---@param parsed table
---@param lines_of fun(switches: string): table[]? the lines of JSON that a job of this bench prints
---@return integer
function bench_prefetch.run(parsed, lines_of)
  local own = own_script.switch("prefetch", parsed.prefetch)
  local common = ("--config %s --steps %d"):format(parsed.config, parsed.steps)
  local computing = lines_of(("%s --way compute --threads %d"):format(common,
    math.max(1, parsed.threads or core.info().cores // parsed.ranks)))
  local rows, links = {}, {}
  for link in parsed.links:gmatch "%S+" do
    local lines = computing and lines_of(("%s --way strategies -n %d --link %s%s%s"):format(common,
      parsed.ranks, link, parsed.thread_ranks and " --thread-ranks" or "", own))
    if not lines or #lines < 2 then return 1 end
    local sending = table.remove(lines, 1).sent
    for _, row in ipairs(lines) do
      row.link, row.ms_least = link, least(computing[1], sending)
      row.of_least = row.ms_step_med / row.ms_least
      if parsed.json then print(core.json_encode(row)) end
    end
    rows[#rows + 1], links[#links + 1] = lines, link
  end
  if not parsed.json then show(rows, links) end
  return 0
end

return bench_prefetch
