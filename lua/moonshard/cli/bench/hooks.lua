-- `moonshard bench hooks`: the time of a step with each link, policy and method of recipes/hooks,
-- over network links of several speeds, and which of them are faster than the plain mean.
local own_script = require "moonshard.cli.own_script"
local ownership = require "moonshard.base.ownership"
local shipped = require "moonshard.base.shipped"
local switches = require "moonshard.cli.switches"

local bench_hooks = {}

local LINKS = { "none", "10Gbit,50us", "1Gbit,100us", "100Mbit,1ms" }
local MODEL = { layers = 2, heads = 4, vocab = 256, context = 64 }
local SCRIPTS = { "hook", "overlap", "buckets", "local" }
local WARM = 5  -- warm-up: buckets are rebuilt, plans are made, links reach their start_step

-- Options with which files of recipes/hooks/ are measured; others have their defaults.
local OPTIONS = { powersgd = { start_step = 2 }, onebit_adam = { warmup = 2 } }

-- Steps of a local method from one meeting to the next, unless the user says otherwise.
local PERIOD <const> = 10

-- The entry of a method with which each rank trains weights of its own: its time is the mean over
-- whole periods.
local function local_way(short, cfg)
  cfg.local_options.period = cfg.local_options.period or PERIOD
  return { ("local %s, every %s"):format(short, cfg.local_options.period), cfg = cfg,
    period = math.tointeger(cfg.local_options.period) or PERIOD }
end

-- The scripts of the command line: each alone, then all of them together.
local function own_ways(parsed)
  local list, all, names = {}, {}, {}
  for _, name in ipairs(SCRIPTS) do
    if parsed[name] then
      local short, cfg = own_script.parse(name, parsed[name])
      if name == "local" then
        list[#list + 1] = local_way(short, cfg)
        goto continue
      end
      list[#list + 1] = { ("%s %s"):format(name, short), cfg = cfg }
      names[#names + 1] = short
      for key, value in pairs(cfg) do all[key] = value end
    end
    ::continue::
  end
  if #names > 1 then list[#list + 1] = { table.concat(names, " + "), cfg = all } end
  return list
end

-- The methods of recipes/hooks/: by name, path and kind. A file that takes the model is of local=;
-- one that says what travels in gathers is for sharded models, and is not measured here.
local function shipped_methods()
  local core = require "moonshard.core"
  local folder = core.exists "recipes/hooks" == "folder" and "recipes/hooks"
    or (shipped.folder "recipes" or "recipes") .. "/hooks"
  local names, list = core.list(folder) or {}, {}
  table.sort(names)
  for _, file in ipairs(names) do
    local name, path = file:match "^(.*)%.lua$", ("%s/%s"):format(folder, file)
    local text = name and core.file_read(path)
    if text then
      list[#list + 1] = {
        name = name, path = path, is_sharded = text:find "before_gather" ~= nil,
        is_local = text:find "options%.model" ~= nil or text:find '%["local"%]' ~= nil,
      }
    end
  end
  return list
end

-- Name, and the link or the plan. All are compared with the plain mean; noop gives the time of a
-- step without communication.
local function ways()
  local hooks = require "moonshard.hooks"
  local list = {
    { "all_reduce" },
    { "noop", link = hooks.noop },
    { "bf16_compress", link = hooks.bf16_compress },
    { "fp16_compress", link = hooks.fp16_compress },
    { "int8, per tensor", link = function() return hooks.int8 { per = "tensor" } end },
    { "int8, all to all", link = function() return hooks.int8 { form = "all_to_all" } end },
    { "powersgd, rank 1", link = function() return hooks.powersgd { start_step = 2 } end },
    {
      "powersgd, rank 4",
      link = function() return hooks.powersgd { rank = 4, start_step = 2 } end,
    },
    {
      "powersgd, batched",
      link = function() return hooks.powersgd { rank = 4, start_step = 2, batched = true } end,
    },
    { "top_k, 1%", link = function() return hooks.top_k { fraction = 0.01 } end },
    { "sign_vote", link = hooks.sign_vote },
    { "adasum", link = hooks.adasum },
    { "plan in_backward", plan = "in_backward" },
    { "plan deferred", plan = "deferred" },
    { "plan early_where_hidden", plan = "early_where_hidden" },
    { "bf16, in_backward", link = hooks.bf16_compress, plan = "in_backward" },
  }
  for _, method in ipairs(shipped_methods()) do
    local options = {}
    for key, value in pairs(OPTIONS[method.name] or {}) do options[key] = value end
    if method.is_local then
      list[#list + 1] = local_way(method.name, { ["local"] = method.path, local_options = options })
    elseif not method.is_sharded then
      list[#list + 1] = {
        method.name .. ".lua", cfg = { hook = method.path, hook_options = options },
      }
    end
  end
  return list
end

local function make_model(parsed)
  local ms = require "moonshard"
  ms.seed(1)
  return ms.nn.gpt2 {
    vocab = MODEL.vocab, context = MODEL.context, layers = MODEL.layers, width = parsed.width,
    heads = MODEL.heads,
  }
end

local function make_batch(parsed)
  local ms = require "moonshard"
  return ms.randint { parsed.batch, MODEL.context, low = 0, high = MODEL.vocab, seed = 1 }
end

local function make_optimizer(net) return require "moonshard".optim.adamw(net, { lr = 1e-4 }) end

-- Measures a method that lets ranks meet in some steps only: over whole periods, so its mean is the
-- time of a step. What of it is communication is not known.
local function measure_local(way, parsed, median)
  local core, ms = require "moonshard.core", require "moonshard"
  local model, x, period = make_model(parsed), make_batch(parsed), way.period
  local _, optimizer = ms.scripts.apply(way.cfg, model, make_optimizer)
  local method = ownership.methods[model]
  local warm = -(-WARM // period) * period
  local steps = -(-parsed.steps // period) * period
  local times, whole, payload, before = {}, 0, 0, nil
  for step in ms.steps(warm + steps) do
    if step == warm then core.comm_record(true) end
    model(x):cross_entropy(x):backward()
    optimizer:step()
    method.after_step(step, optimizer)
    if step >= warm - 1 then
      ms.synchronize()
      local now = core.clock_ms()
      if before then
        times[#times + 1] = now - before
        whole = whole + times[#times]
      end
      before = core.clock_ms()
    end
  end
  core.comm_record(false)
  for _, record in ipairs((core.comm_records())) do payload = payload + record.payload_bytes end
  table.sort(times)
  return {
    hook = way[1], ms_step_mean = whole / steps, ms_step_med = median(times),
    ms_step_min = times[1], payload_bytes = payload // steps,
  }
end

-- Measures one entry: median and least time of a step, exposed communication, bytes of a step.
local function measure(way, parsed, median)
  if way.period then return measure_local(way, parsed, median) end
  local core, ms = require "moonshard.core", require "moonshard"
  local model, x = make_model(parsed), make_batch(parsed)
  local cfg = way.cfg or {}
  local bytes = not cfg.buckets and { 64 << 10, 512 << 10 } or nil
  local net, optimizer = ms.scripts.apply(cfg, model, make_optimizer, {
    ddp = { bucket_bytes = bytes },
    links = { way.link and way.link() or not cfg.hook and "all_reduce" or nil },
  })
  if way.plan then optimizer:overlap(net, way.plan) end
  local times, exposed, before = {}, {}, nil
  for step in ms.steps(WARM + parsed.steps) do
    net(x):cross_entropy(x):backward()
    optimizer:step()
    if step >= WARM - 1 then
      ms.synchronize()
      local now = core.clock_ms()
      if before then
        times[#times + 1] = now - before
        exposed[#exposed + 1] = net:stats().exposed_ms
      end
      before = core.clock_ms()
    end
  end
  local payload = 0
  for _, link in ipairs(net:stats().links) do payload = payload + link.payload_bytes end
  net:unwrap()
  table.sort(times)
  return {
    hook = way[1], ms_step_med = median(times), ms_step_min = times[1],
    exposed_comm_ms = median(exposed), payload_bytes = payload,
  }
end

-- Measures all entries on the ranks of this job, over its network link.
local function measure_all(parsed, median)
  local core, ms = require "moonshard.core", require "moonshard"
  local list = ways()
  for _, way in ipairs(own_ways(parsed)) do list[#list + 1] = way end
  for _, way in ipairs(list) do
    local row = measure(way, parsed, median)
    ms.world():barrier()
    if ms.rank() == 0 then
      io.stdout:write(core.json_encode(row), "\n")
      io.stdout:flush()
    end
  end
  return 0
end

-- Measures all entries in a separate job for each network link. The parent process of the shell is
-- this program.
local function each_link(parsed)
  local core = require "moonshard.core"
  local table_of, failed = {}, nil
  for i, link in ipairs(parsed.links) do
    local own = ""
    for _, name in ipairs(SCRIPTS) do own = own .. own_script.switch(name, parsed[name]) end
    local over = link ~= "none" and "--link " .. link or ""
    local command =
      ('exec "$(readlink /proc/$PPID/exe)" bench hooks --here --steps %d --width %d --batch %d \z
        -n %d %s%s%s'):format(parsed.steps, parsed.width, parsed.batch, parsed.ranks, over,
        parsed.thread_ranks and " --thread-ranks" or "", own)
    local pipe <close> = assert(io.popen(command))
    table_of[i] = {}
    for line in pipe:lines() do
      local row = core.json_decode(line)
      row.link = link
      table.insert(table_of[i], row)
      if parsed.json then
        print(core.json_encode(row))
        io.stdout:flush()
      end
    end
    local _, _, code = pipe:close()
    if code and code ~= 0 then failed = code end
  end
  return table_of, failed
end

-- The time of a step, by which ways are compared.
local function time_of(row) return row.ms_step_mean or row.ms_step_med end

local function print_table(parsed, rows)
  io.stdout:write(
    ("%d ranks; milliseconds a step, median (of which communication that nothing hid); of local \z
      methods the mean over whole periods\n%-34s"):format(parsed.ranks, ""))
  for _, link in ipairs(parsed.links) do io.stdout:write(("%18s"):format(link)) end
  io.stdout:write(("%14s\n"):format "bytes a step")
  for at = 1, #rows[1] do
    io.stdout:write(("%-34s"):format(rows[1][at].hook))
    for i = 1, #parsed.links do
      local row = rows[i][at]
      local exposed = row and (row.exposed_comm_ms and ("%6.1f"):format(row.exposed_comm_ms) or "-")
      io.stdout:write(row and ("%9.1f (%6s)"):format(time_of(row), exposed)
        or ("%18s"):format "-")
    end
    io.stdout:write(("%14d\n"):format(rows[1][at].payload_bytes))
  end
  for i, link in ipairs(parsed.links) do
    local plain, paying = rows[i][1] and rows[i][1].ms_step_med, {}
    for _, row in ipairs(rows[i]) do
      -- A difference of up to 2 % is noise.
      if row.hook ~= "noop" and time_of(row) < 0.98 * plain then paying[#paying + 1] = row end
    end
    table.sort(paying, function(a, b) return time_of(a) < time_of(b) end)
    for k = 1, #paying do
      paying[k] = ("%s (%.2fx)"):format(paying[k].hook, plain / time_of(paying[k]))
    end
    print(("%s %s"):format(link == "none" and "without a link" or "over " .. link, #paying > 0
      and "faster than the plain mean: " .. table.concat(paying, ", ")
      or "nothing is faster than the plain mean"))
  end
end

--- Adds the switches; returns what runs it.
---@param parser table
---@param median fun(list: number[]): number
---@return fun(parsed: table): integer
function bench_hooks.register(parser, median)
  parser:option("--steps", "steps to measure, for each way and link"):convert(switches.count)
    :default "15"
  parser:option("--width", "of the model, which has 4 heads"):convert(switches.count):default "128"
  parser:option("--batch", "rows of a step"):convert(switches.count):default "8"
  parser:option("--links", "links to compare, separated by spaces; none: memory")
    :default(table.concat(LINKS, " "))
  parser:option("--hook", "your own link beside the others, with its options: 'FILE key=value ...'")
  parser:option("--overlap", "an overlap policy of your own, likewise")
  parser:option("--buckets", "a bucket plan of your own, likewise")
  parser:option("--local", ("a method of your own with which ranks train their own weights, \z
    likewise; period=N steps from one meeting to the next (%d unless given)"):format(PERIOD))
  parser:flag("--here", "measure over this job's own link (--link) only; lines of JSON")
  return function(parsed)
    -- Checked here, so that a mistake is reported once, before anything is measured.
    for _, name in ipairs(SCRIPTS) do
      local _, cfg = own_script.parse(name, parsed[name] or "")
      if cfg[name] then require "moonshard.scripts"._check(name, cfg[name]) end
    end
    if parsed.here then return measure_all(parsed, median) end
    local links = {}
    for link in parsed.links:gmatch "%S+" do links[#links + 1] = link end
    parsed.links = links
    parsed.ranks = math.max(parsed.ranks, 2)
    for _, method in ipairs(shipped_methods()) do
      if method.is_sharded and not parsed.json then
        print(("%s is not measured: it is for sharded models (shard=...)"):format(method.name))
      end
    end
    local rows, failed = each_link(parsed)
    if failed or #rows == 0 or #rows[1] == 0 then return failed or 1 end
    if not parsed.json then print_table(parsed, rows) end
    return 0
  end
end

return bench_hooks
