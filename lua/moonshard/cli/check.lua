-- moonshard check: runs a recipe on the sim device, which makes all decisions but has no data, and
-- reports the memory and the collectives that a real run would have.
local launch = require "moonshard.base.launch"
local room = require "moonshard.cli.room"
local switches = require "moonshard.cli.switches"
local sorted_pairs = require "moonshard.base.sorted_pairs"

local check = {}

local BUILT_IN <const> = "built in"
local AT_A_TIME <const> = 8            -- ranks that are run at the same time

local function yes() return true end

-- Functions of the core that write files are replaced by ones that succeed without writing. If they
-- read tensors, the replacement reads them too, so that memory is the same.
local function without_output(core)
  local sink = { write = function(self) return self end, close = yes }
  core.file_append = function() return sink end
  core.file_lock = function() return sink end
  for _, name in ipairs {
    "file_write", "make_directory", "remove", "checkpoint_start", "checkpoint_remove",
    "checkpoint_rename", "checkpoint_sweep", "checkpoint_begin", "checkpoint_commit",
    "checkpoint_discard",
  } do
    core[name] = yes
  end
  local function read_all(_, tensors)
    local hashes = {}
    for i, t in ipairs(tensors) do
      core.read_nowhere(t)
      hashes[i] = { 0 }
    end
    return hashes
  end
  core.snapshot = function(...) return sink, read_all(...) end
  core.checkpoint_part = read_all
  core.safetensors_create = function()
    return {
      commit = yes, close = yes,
      write = function(_, _, t)
        core.read_nowhere(t)
        return true
      end,
    }
  end
  core.safetensors_save = function(_, _, tensors)
    for _, t in ipairs(tensors) do core.read_nowhere(t) end
    return true
  end
end

-- The estimated time of a step: when the work of the last one ends after that of the one before.
local function time_steps(core)
  local own, ends = core.step_end, {}
  core.step_end = function()
    own()
    ends[1], ends[2] = ends[2], core.simulated_ns()
  end
  return function() return ends[1] and (ends[2] - ends[1]) / 1e6 end
end

-- stdout is for the result; text that the recipe prints goes to stderr.
local function set_print()
  -- luacheck: push globals print
  function print(...)
    local texts = table.pack(...)
    for i = 1, texts.n do texts[i] = tostring(texts[i]) end
    io.stderr:write(table.concat(texts, "\t"), "\n")
  end
  -- luacheck: pop
  io.output(io.stderr)
end

-- Which ranks have other shards than this one, in some sharded model, and which have the same in
-- all of them; nil if no model is sharded.
local function shards_of(core)
  local made, other, count = launch.sharded or {}, {}, {}
  for _, groups in ipairs(made) do
    for _, rank in ipairs(groups.shards:_members()) do other[rank] = true end
    for _, rank in ipairs(groups.replicas and groups.replicas:_members() or { core.rank() }) do
      count[rank] = (count[rank] or 0) + 1
    end
  end
  if #made == 0 then return nil end
  local result = { other = {}, same = {} }
  for rank in pairs(other) do table.insert(result.other, rank) end
  for rank, models in pairs(count) do
    if models == #made then table.insert(result.same, rank) end
  end
  return result
end

-- The result for this rank: its peak memory over the whole run, and the collectives of the last
-- step. Plans that depend on times are listed: the simulated times are estimates, so a real run may
-- plan differently, and its memory and collectives then differ.
local function result_of(core, rates, hosts, step_ms)
  local collectives, hash = core.comm_records()
  local groups, by_name, between = {}, {}, 0
  local result = {
    ranks = core.world():size(),
    peak_bytes = core.json_list { core.memory().peak },
    offload_peak_bytes = core.json_list { core.memory().offload_peak },
    reserved_bytes = core.json_list { core.memory().reserved },
    payload_bytes = 0,
    wire_bytes = 0,
    shards = shards_of(core),
    estimated_times = {
      rates = rates or BUILT_IN,
      step_ms = rates and step_ms,
      plans = core.json_list(require "moonshard.parallel.planner".from_times()),
    },
  }
  for _, record in ipairs(collectives) do
    local group = by_name[record.group]
    if not group then
      group = { name = record.group, payload_bytes = 0, wire_bytes = 0 }
      by_name[record.group], groups[#groups + 1] = group, group
    end
    for _, name in ipairs { "payload_bytes", "wire_bytes" } do
      group[name], result[name] = group[name] + record[name], result[name] + record[name]
      record[name] = nil
    end
    between = between + record.between_hosts_bytes
    record.between_hosts_bytes = nil
  end
  if hosts then result.between_hosts_bytes = core.json_list { between } end
  for _, item in ipairs(launch.settings or {}) do
    result.options = result.options or {}
    result.options[item.name] = item.value
  end
  result.parts_bytes = launch.parts
  result.assumptions = core.json_list(launch.assumptions)
  result.groups, result.collectives, result.order_hash = core.json_list(groups),
    core.json_list(collectives), ("%016x"):format(hash)
  return result
end

local function describe(record)
  local label = record.label ~= "" and (' "%s"'):format(record.label) or ""
  return ("%s of %s, %s x %d, channel %s%s")
    :format(record.op, record.group, record.dtype, record.count, record.channel, label)
end

-- Collectives that are shown. A step with an evaluation of a sharded model has thousands.
local LISTED <const> = 100

-- What the ranks of each host send to other hosts.
local function show_hosts(lines, result)
  local rank = 0
  for _, host in ipairs(result.hosts or {}) do
    local each = {}
    for _ = 1, host.ranks do
      rank = rank + 1
      each[#each + 1] = tostring(result.between_hosts_bytes[rank])
    end
    lines[#lines + 1] = ("  from %-13s %d bytes to other hosts; rank%s %s")
      :format(host.name, host.between_hosts_bytes, #each > 1
        and ("s %d-%d"):format(rank - host.ranks, rank - 1) or (" %d"):format(rank - 1),
        table.concat(each, " "))
  end
end

-- Ranks with equal results share a line. beside: what streams of a GPU take that no peak counts.
-- only: the rank that was run alone. differ: other ranks have other calls, as in pipelines.
local function show(result, beside, only, differ)
  local lines, first = {}, 0
  for rank = 1, result.ranks do
    if rank == result.ranks or result.peak_bytes[rank + 1] ~= result.peak_bytes[rank]
        or result.offload_peak_bytes[rank + 1] ~= result.offload_peak_bytes[rank] then
      local bytes, offloaded, which = result.peak_bytes[rank], result.offload_peak_bytes[rank],
        tostring(only or first == rank - 1 and first or ("%d-%d"):format(first, rank - 1))
      lines[#lines + 1] = ("rank %-8s peak memory %.1f MiB (%d bytes)")
        :format(which, bytes / 2 ^ 20, bytes)
      if offloaded > 0 then
        lines[#lines] = ("%s, offloaded %.1f MiB (%d bytes)"):format(lines[#lines],
          offloaded / 2 ^ 20, offloaded)
      end
      first = rank
    end
  end
  -- Not exact: the pool keeps blocks that were freed, and in a real run they are freed at other
  -- times. 40 to 90 MiB: runs of gpt_bytes.lua and llama.lua on 1 and 2 ranks.
  lines[#lines + 1] = ("a process needs more than that: its pool reserves about %.0f MiB for its \z
    tensors, and %sthe program with its libraries takes 40 to 90 MiB"):format(
    math.max(table.unpack(result.reserved_bytes)) / 2 ^ 20, beside and "on the host " or "")
  if beside then
    lines[#lines + 1] = ("beside it on the GPU, for each stream that has such tasks: %d MiB for \z
      products, or for attention by cuDNN up to %d MiB (%d where a head needs more)")
      :format(beside.products >> 20, beside.attention >> 20, beside.attention_most >> 20)
    lines[#lines + 1] = ("  and some for the driver's context, libraries%s: a run there tells how \z
      much in all (ms.info().memory_beside)"):format(result.ranks > 1 and ", NCCL's buffers" or "")
  end
  for _, text in ipairs(result.assumptions) do lines[#lines + 1] = text end
  local whose = only and ("by rank %d"):format(only)
    or differ and "by rank 0 (--rank R: by another rank)" or "by each rank"
  lines[#lines + 1] =
    ("collectives of the last step: %d, %d bytes handed over, %d on the wire, %s")
      :format(#result.collectives, result.payload_bytes, result.wire_bytes, whose)
  for _, group in ipairs(result.groups) do
    lines[#lines + 1] = ("  group %-12s %d bytes handed over, %d on the wire")
      :format(group.name, group.payload_bytes, group.wire_bytes)
  end
  show_hosts(lines, result)
  for i = 1, math.min(#result.collectives, LISTED) do
    lines[#lines + 1] = ("  %4d %s"):format(i, describe(result.collectives[i]))
  end
  if #result.collectives > LISTED then
    lines[#lines + 1] = ("  and %d more: --json has all of them"):format(
      #result.collectives - LISTED)
  end
  local times = result.estimated_times
  if times.step_ms then
    lines[#lines + 1] = ("a step takes some %.4g ms by the rates of %s, an estimate")
      :format(times.step_ms, times.rates)
  end
  for _, plan in ipairs(times.plans) do
    lines[#lines + 1] = ("made from estimated times (rates: %s), a real run may differ: %s")
      :format(times.rates, plan)
  end
  if #result.collectives > 0 then lines[#lines + 1] = "order hash " .. result.order_hash end
  return table.concat(lines, "\n")
end

----------------------------------------------------------------------------------------- many ranks

local function quoted(text) return "'" .. text:gsub("'", "'\\''") .. "'" end

-- Every rank is a fake world in a process of its own. Its result goes to a file, because the recipe
-- may write to stdout. The recipe's output is shown for rank 0, and for other ranks if they fail.
local function start(program, arguments, rank)
  local parts = { quoted(program), "check" }
  for _, argument in ipairs(arguments) do parts[#parts + 1] = quoted(argument) end
  local child = { rank = rank, answer = os.tmpname(), said = os.tmpname() }
  local command = ("%s --json --rank %d --answer %s 1>&2 %s"):format(table.concat(parts, " "), rank,
    quoted(child.answer), rank > 0 and "2>" .. quoted(child.said) or "")
  child.pipe = assert(io.popen(command))
  return child
end

local function finish(core, child, question)
  child.pipe:read "a"
  local ok, _, code = child.pipe:close()
  local said, text = core.file_read(child.said), core.file_read(child.answer)
  os.remove(child.said)
  os.remove(child.answer)
  if ok then return core.json_decode(text) end
  -- The first rank has shown its message already.
  if child.rank > 0 then
    io.stderr:write(("moonshard: rank %d: %s\n"):format(child.rank,
      (said:gsub("^moonshard: ", ""):gsub("%s+$", ""))))
  end
  local advice = room.advice(text, question)
  if advice then io.stderr:write(advice, "\n") end
  launch.exit(code)
end

-- Checks that two ranks make the same calls in the same order in the groups of which both are
-- members. Sends and receives, and groups of one rank, are not compared.
local function compare(first, second, rank)
  local plans = first.estimated_times.plans
  local hint = #plans > 0 and ("\nplans depend on estimated times, which each rank has of its own \z
    here, while ranks of a job share theirs: %s"):format(table.concat(plans, ", ")) or ""
  local known, own = {}, { {}, {} }
  for _, group in ipairs(second.groups) do known[group.name] = true end
  for which, result in ipairs { first, second } do
    local common = {}
    for _, group in ipairs(first.groups) do common[group.name] = known[group.name] end
    common.world = true
    for _, record in ipairs(result.collectives) do
      if common[record.group] and record.group ~= "self" and record.op ~= "send"
          and record.op ~= "recv" then
        table.insert(own[which], describe(record))
      end
    end
  end
  for i = 1, math.max(#own[1], #own[2]) do
    if own[1][i] ~= own[2][i] then
      launch.exit(5,
        ("ranks disagree in collective %d of the last step:\n  rank 0: %s\n  rank %d: %s%s")
          :format(i, own[1][i] or "none", rank, own[2][i] or "none", hint))
    end
  end
end

-- Whether two ranks have different calls in their last steps: they send and receive, or have other
-- bytes.
local function differs(first, second)
  if #first.collectives ~= #second.collectives then return true end
  for i, one in ipairs(first.collectives) do
    local other = second.collectives[i]
    if one.op ~= other.op or one.count ~= other.count then return true end
  end
  return first.payload_bytes ~= second.payload_bytes or first.wire_bytes ~= second.wire_bytes
end

-- Ranks whose shards differ from those of all ranks that were run.
local function missing(results, count)
  local wanted, covered, list = {}, {}, {}
  for rank, result in pairs(results) do
    covered[rank] = true
    for _, other in ipairs((result.shards or {}).other or {}) do wanted[other] = true end
    for _, same in ipairs((result.shards or {}).same or {}) do covered[same] = true end
  end
  for rank = 0, count - 1 do
    if wanted[rank] and not covered[rank] then list[#list + 1] = rank end
  end
  return list
end

-- The result of a rank that represents this one: it has the same shards, or there are none.
local function standing_for(results, rank)
  if results[rank] then return results[rank] end
  for _, result in sorted_pairs(results) do
    for _, same in ipairs((result.shards or {}).same or {}) do
      if same == rank then return result end
    end
  end
  return results[1]
end

-- The hosts of the result, with what their ranks send to others.
local function sum_hosts(core, result, hosts)
  local rank = 0
  if not hosts then return end
  for _, host in ipairs(hosts) do
    host.between_hosts_bytes = 0
    for _ = 1, host.ranks do
      rank = rank + 1
      host.between_hosts_bytes = host.between_hosts_bytes + result.between_hosts_bytes[rank]
    end
  end
  result.hosts = core.json_list(hosts)
  result.between_hosts_bytes = core.json_list(result.between_hosts_bytes)
end

-- In replicated training all ranks do the same, except the first, which writes, and perhaps the
-- last, whose part of the data may be smaller. So ranks 0, 1 and the last are run, and of sharded
-- models one rank for each shard; the ranks between are taken to be as those with the same shards,
-- or as rank 1, unless --all-ranks is given. Over hosts what a rank sends depends on its place, so
-- all are run.
local function many(core, parsed, arguments)
  local program, count, results, ranks = launch.process.program, parsed.ranks, {}, {}
  local question = {
    recipe = parsed.recipe, arguments = parsed.options, config = parsed.config, ranks = count,
    is_gpu = parsed.device == "cuda",
  }
  for rank = 0, count - 1 do
    local all = parsed.all_ranks or parsed.hosts
    if all or rank < 2 or rank == count - 1 then ranks[#ranks + 1] = rank end
  end
  while #ranks > 0 do
    for first = 1, #ranks, AT_A_TIME do
      local children = {}
      for _, rank in ipairs { table.unpack(ranks, first, first + AT_A_TIME - 1) } do
        children[#children + 1] = start(program, arguments, rank)
      end
      for _, child in ipairs(children) do
        results[child.rank] = finish(core, child, question)
      end
    end
    ranks = missing(results, count)
  end
  local result, differ = results[0], false
  for rank = 1, count - 1 do
    local other = results[rank]
    if other then
      compare(result, other, rank)
      differ = differ or differs(result, other)
    end
    local same = standing_for(results, rank)
    result.peak_bytes[rank + 1] = same.peak_bytes[1]
    result.offload_peak_bytes[rank + 1] = same.offload_peak_bytes[1]
    result.reserved_bytes[rank + 1] = same.reserved_bytes[1]
    if parsed.hosts then result.between_hosts_bytes[rank + 1] = same.between_hosts_bytes[1] end
  end
  result.shards = nil
  sum_hosts(core, result, parsed.hosts)
  result.offload_peak_bytes = core.json_list(result.offload_peak_bytes)
  result.reserved_bytes = core.json_list(result.reserved_bytes)
  result.peak_bytes, result.groups, result.collectives = core.json_list(result.peak_bytes),
    core.json_list(result.groups), core.json_list(result.collectives)
  result.estimated_times.plans = core.json_list(result.estimated_times.plans)
  result.assumptions = core.json_list(result.assumptions)
  return result, differ
end

-- The hosts of a list, which says how many ranks there are.
local function listed_hosts(core, parsed)
  local hosts, why = core.hosts_list(parsed.hosts)
  if not hosts then launch.exit(2, why) end
  local ranks = 0
  for _, host in ipairs(hosts) do ranks = ranks + host.ranks end
  if parsed.ranks > 1 and parsed.ranks ~= ranks then
    launch.exit(2, ("-n %d beside --hosts, whose hosts have %d ranks in all: leave -n out")
      :format(parsed.ranks, ranks))
  end
  parsed.ranks = ranks
  return hosts
end

-- The hosts that --hosts names: those of a list, or a number of hosts among which the ranks of -n
-- are spread, the first with one more where they do not divide.
local function hosts_of(core, parsed)
  local count, hosts = math.tointeger(tonumber(parsed.hosts)), {}
  if not count then return listed_hosts(core, parsed) end
  if count < 1 or count > parsed.ranks then
    launch.exit(2, ("--hosts %d: -n %d ranks are on 1 to %d hosts"):format(count, parsed.ranks,
      parsed.ranks))
  end
  for i = 1, count do
    hosts[i] = { name = "host " .. i, ranks = (parsed.ranks + count - i) // count }
  end
  return hosts
end

-- The ranks of each of these hosts.
local function counts_of(hosts)
  local counts = {}
  for i, host in ipairs(hosts or {}) do counts[i] = host.ranks end
  return hosts and counts
end

--- The parser of its command line.
---@return table
function check.parser()
  local parser = switches.recipe_parser("check", "Runs a recipe without data: peak memory and \z
    collectives of each rank. Files are read, none are written.", "sim")
  parser:flag("--json", "one line of JSON")
  parser:flag("--all-ranks",
    "run every rank, not only the first two, the last, and one for each shard of sharded models \z
      (the others are taken to be as these)")
  parser:option("--hosts",
    "the ranks are on so many hosts, or on those of a list (a:1,b:3): what goes between them \z
      (default: all are on one)")
    :argname "H"
  parser:option("--sum-order", "over several hosts: as in `moonshard run`")
    :choices { "hosts", "ranks" }:default "hosts"
  parser:option("--rank", "this rank only"):argname "R":convert(switches.integer)
  parser:option("--answer", "where to write the answer"):hidden(true)
  return parser
end

--- moonshard check FILE [-n N] [--hosts H] [--json] [switches] [key=value ...]
---@param arguments string[]
---@return integer
function check.main(arguments)
  local parser = check.parser()
  local parsed = switches.parse_recipe(parser, arguments)
  if parsed.device == "cpu" then
    launch.exit(2, "--device cpu: a check has no data and runs on sim; `moonshard run` runs on cpu")
  end
  local core = require "moonshard.core"
  parsed.hosts = parsed.hosts and hosts_of(core, parsed)
  if parsed.rank and (parsed.rank < 0 or parsed.rank >= parsed.ranks) then
    launch.exit(2, ("--rank %d: there are ranks 0 to %d"):format(parsed.rank, parsed.ranks - 1))
  end
  local for_gpu = parsed.device == "cuda"
  if for_gpu then parsed.rates = parsed.rates or switches.GPU end
  local beside = for_gpu and core.gpu_scratch() or nil
  local answer = parsed.answer and assert(io.open(parsed.answer, "w")) or io.stdout
  local function tell(result, differ)
    result.scratch_bytes_of_stream = beside
    answer:write(parsed.json and core.json_encode(result)
      or show(result, beside, parsed.ranks > 1 and parsed.rank, differ), "\n")
    answer:flush()
    return 0
  end
  if parsed.ranks > 1 and not parsed.rank and not parsed.help then
    return tell(many(core, parsed, arguments))
  end
  parsed.device = "sim"
  switches.apply(parsed)
  core.configure { for_gpu = beside ~= nil }
  launch.for_gpu = for_gpu
  if parsed.ranks > 1 then
    core.configure { group = "fake", rank = parsed.rank, world_size = parsed.ranks,
      hosts = counts_of(parsed.hosts), sum_by_ranks = parsed.sum_order == "ranks" }
  end
  local step_ms = function() end
  if not parsed.help then
    step_ms = time_steps(core)
    launch.checking, launch.sharded = true, {}
    without_output(core)
    set_print()
  end
  local function run_recipe()
    return require "moonshard.cli.run".recipe(parsed.recipe,
      { arguments = parsed.options, help = parsed.help, config_file = parsed.config })
  end
  -- Whoever asks for an answer gets the reason, too, and gives advice itself.
  launch.asked = parsed.answer ~= nil
  local ok, code = xpcall(run_recipe, require "moonshard.cli.failure".handler)
  if not ok and parsed.answer then answer:write(tostring(code)):flush() end
  if not ok then error(code, 0) end
  if code ~= 0 or parsed.help then return code end
  local result = result_of(core, parsed.rates, parsed.hosts, step_ms())
  if not parsed.answer then result.shards = nil end
  -- The result has a peak for each rank, also for ranks that were not run.
  for rank = 2, result.ranks do
    result.peak_bytes[rank] = result.peak_bytes[1]
    result.offload_peak_bytes[rank] = result.offload_peak_bytes[1]
    result.reserved_bytes[rank] = result.reserved_bytes[1]
  end
  return tell(result)
end

return check
