-- `moonshard bench fsdp --links LINKS --prefetch FILE`: a step of a sharded model under each
-- prefetch strategy, over network links of several speeds, beside the least time that the link
-- allows. A machine's speed changes in time, so all are measured in turn, and compared in a round.
local core = require "moonshard.core"
local own_script = require "moonshard.cli.own_script"
local prefetch = require "moonshard.parallel.fsdp.prefetch"

local bench_prefetch = {}

bench_prefetch.LINKS = "1Gbit,1ms 200Mbit,5ms"
bench_prefetch.ROUNDS = 5
-- Steps before anything is measured. Plans are made in the third pass and later; "tuned" tries
-- some of them first.
local WARM <const>, PLANNING <const> = 2, 28

-- units: the classes of modules that are units, separated by commas; nil: blocks.
local function new_model(c, options, units)
  local ms = require "moonshard"
  ms.seed(1)
  if units then
    options.wrap = { class = {} }
    for name in units:gmatch "[^,]+" do table.insert(options.wrap.class, name) end
  end
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
  for i, name in ipairs(prefetch.ready_made) do list[i] = { name, name } end
  if parsed.prefetch then
    local short, cfg = own_script.parse("prefetch", parsed.prefetch)
    list[#list + 1] = { short, require "moonshard.scripts".resolve(cfg, "prefetch") }
  end
  return list
end

-- A model under a strategy, whose times are taken with those of the others in turn.
local function entrant(strategy, c, units)
  local ms = require "moonshard"
  local model, x = new_model(c, { prefetch = strategy[2] }, units), new_batch(c)
  local optimizer = ms.optim.adamw(model, { lr = 1e-4 })
  return {
    name = strategy[1], model = model,
    warm = prefetch.planner_of(strategy[2]).native and WARM or PLANNING,
    step = function()
      model(x):cross_entropy(x):backward()
      optimizer:step()
    end,
  }
end

-- As many of the parameters as make up a rank's part of all.
local function part_of(parameters, ranks)
  local all, some, elements = 0, {}, 0
  for _, p in ipairs(parameters) do all = all + p:numel() end
  for _, p in ipairs(parameters) do
    if elements * ranks >= all then break end
    some[#some + 1], elements = p, elements + p:numel()
  end
  return some
end

-- Computing alone: each rank is a group of its own, so nothing is sent, and its optimizer updates
-- as many elements as a shard has. Returns a function that runs `count` steps, and gives the
-- medians of forward and of the rest.
local function computing(c, tools, units)
  local ms = require "moonshard"
  local parts = {}
  for rank = 0, ms.world_size() - 1 do parts[rank + 1] = { rank } end
  local model, x = new_model(c, { group = ms.world():split(parts) }, units), new_batch(c)
  local optimizer = ms.optim.adamw(part_of(model:parameters(), ms.world_size()), { lr = 1e-4 })
  return function(count)
    local forwards, rests = {}, {}
    for _ in ms.steps(count) do
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
    return { forward_ms = tools.median(forwards), backward_ms = tools.median(rests) }
  end
end

-- What a step sends over a link, in milliseconds: a rank sends its shard to each other rank in a
-- gather, and as much in a reduction. The root is gathered once, first of all, and reduced last;
-- other units are gathered twice.
local function sent(parsed, tools)
  local model = new_model(tools.configs[parsed.config], {}, parsed.units)
  local link, others = parsed.link or {}, require "moonshard".world_size() - 1
  local result = { forward_ms = 0, backward_ms = 0 }
  for _, unit in ipairs(model:units()) do
    local bytes = others * unit.shard_bytes
    local one = (link.latency_ns or 0) / 1e6
      + (link.bytes_per_second and bytes / link.bytes_per_second * 1e3 or 0)
    if unit.index == 0 then result.first_ms, result.last_ms = one, one
    else
      result.forward_ms = result.forward_ms + one
      result.backward_ms = result.backward_ms + 2 * one
    end
  end
  model:unwrap()
  return result
end

-- The time of a step that hides all that it can: over forward and backward, the longer of computing
-- and sending; then the first gather and the last reduction, which nothing hides.
local function least(compute, sending)
  return math.max(compute.forward_ms, sending.forward_ms)
    + math.max(compute.backward_ms, sending.backward_ms) + sending.first_ms + sending.last_ms
end

-- The rounds of all ready-made strategies but "tuned", by their medians: the best one's.
local function best_of(entrants, tools)
  local best, least_ms
  for i, one in ipairs(entrants) do
    local ms = tools.median(table.move(one.medians, 1, #one.medians, 1, {}))
    if i <= #prefetch.ready_made and one.name ~= "tuned" and (not best or ms < least_ms) then
      best, least_ms = one, ms
    end
  end
  return best
end

local function rows_of(entrants, tools)
  local best, rows = best_of(entrants, tools), {}
  for i, one in ipairs(entrants) do
    local of_best = {}
    for round, ms in ipairs(one.medians) do of_best[round] = ms / best.medians[round] end
    rows[i] = {
      strategy = one.name, units = #one.model:units(),
      ms_step_med = tools.median(one.times), ms_step_min = one.times[1],
      of_least = tools.median(one.of_least), of_best = tools.median(of_best),
    }
    local tuned = (one.model:stats().prefetch or {}).tuned
    if tuned then
      rows[i].plan, rows[i].predicted_ms = tuned.plan, tuned.predicted_ms
      rows[i].measured_ms, rows[i].default_ms = tuned.measured_ms, tuned.default_ms
    end
  end
  return rows
end

--- Measures all strategies on the ranks of this job, over its link, in rounds: computing alone, and
--- then each strategy. Lines of JSON from rank 0.
---@param parsed table
---@param tools table
---@return integer
function bench_prefetch.measure(parsed, tools)
  local ms = require "moonshard"
  local c, sending = tools.configs[parsed.config], sent(parsed, tools)
  local compute, entrants = computing(c, tools, parsed.units), {}
  for i, strategy in ipairs(strategies_of(parsed)) do
    entrants[i] = entrant(strategy, c, parsed.units)
  end
  compute(WARM)
  for _, one in ipairs(entrants) do
    tools.step_times(one.warm, 0, one.step)
    one.times, one.of_least, one.medians = {}, {}, {}
  end
  local leasts = {}
  for round = 1, parsed.rounds do
    leasts[round] = least(compute(parsed.steps), sending)
    for _, one in ipairs(entrants) do
      local times = tools.step_times(1, parsed.steps, one.step)
      one.medians[round] = tools.median(times)
      one.of_least[round] = one.medians[round] / leasts[round]
      table.move(times, 1, #times, #one.times + 1, one.times)
    end
  end
  ms.world():barrier()
  if ms.rank() > 0 then return 0 end
  for _, row in ipairs(rows_of(entrants, tools)) do
    row.ms_least = tools.median(leasts)
    io.stdout:write(core.json_encode(row), "\n")
  end
  return 0
end

------------------------------------------------------------------------------------------ all jobs

local function show_tuned(rows, links)
  for i, list in ipairs(rows) do
    for _, row in ipairs(list) do
      if row.predicted_ms then
        print(("tuned over %s: chose \"%s\", forecast %.1f ms, measured %.1f ms; %.1f ms by \z
          default"):format(links[i], row.plan, row.predicted_ms, row.measured_ms or 0,
          row.default_ms))
      end
    end
  end
end

local function show(rows, links)
  io.stdout:write(("%-28s"):format "ms a step, of least, of best")
  for _, link in ipairs(links) do io.stdout:write(("%26s"):format(link)) end
  io.stdout:write "\n"
  for i, first in ipairs(rows[1]) do
    io.stdout:write(("%-28s"):format(first.strategy))
    for _, list in ipairs(rows) do
      local row = list[i]
      io.stdout:write(("%10.1f %7.3f %7.3f"):format(row.ms_step_med, row.of_least, row.of_best))
    end
    io.stdout:write "\n"
  end
  show_tuned(rows, links)
end

--- Measures each link in a job of its own.
---@param parsed table
---@param lines_of fun(switches: string): table[]? the lines of JSON that a job of this bench prints
---@return integer
function bench_prefetch.run(parsed, lines_of)
  local common = ("--way strategies --config %s --steps %d --rounds %d -n %d%s%s%s"):format(
    parsed.config, parsed.steps, parsed.rounds, parsed.ranks,
    parsed.thread_ranks and " --thread-ranks" or "",
    parsed.units and " --units " .. parsed.units or "",
    own_script.switch("prefetch", parsed.prefetch))
  local rows, links = {}, {}
  for link in parsed.links:gmatch "%S+" do
    local lines = lines_of(("%s --link %s"):format(common, link))
    if not lines then return 1 end
    for _, row in ipairs(lines) do
      row.link = link
      if parsed.json then print(core.json_encode(row)) end
    end
    rows[#rows + 1], links[#links + 1] = lines, link
  end
  if not parsed.json then show(rows, links) end
  return 0
end

return bench_prefetch
