-- moonshard run: a recipe in this process, or in the ranks of a job.
local launch = require "moonshard.base.launch"
local switches = require "moonshard.cli.switches"

local run = {}

local LIBRARY <const> = debug.getinfo(1, "S").source:match "^@(.*)/moonshard/cli/run%.lua$"

-- Modules beside a recipe are found from any folder, before those of other places; the library's
-- own stay the first.
local function add_folder(recipe)
  local folder = recipe:match "^(.*)/" or "."
  if folder:find "[;?]" then return end              -- these have a meaning in a path
  local function entries(of) return ("%s/?.lua;%s/?/init.lua;"):format(of, of) end
  local first, rest = "", package.path
  if LIBRARY and rest:sub(1, #entries(LIBRARY)) == entries(LIBRARY) then
    first, rest = entries(LIBRARY), rest:sub(#entries(LIBRARY) + 1)
  end
  package.path = first .. entries(folder) .. rest
end

--- Loads and runs a recipe file. settings: arguments, help, config_file.
---@param file string
---@param settings table
---@return integer
function run.recipe(file, settings)
  for key, value in pairs(settings) do launch[key] = value end
  launch.recipe = file
  local chunk, message = loadfile(file, "t")
  if not chunk then launch.exit(message:match "^cannot open" and 2 or 1, message) end
  add_folder(file)
  launch.result = chunk()
  if not launch.declared and #launch.arguments > 0 then
    launch.exit(2, ("'%s' was given, but the recipe declares no options (ms.config)")
      :format(launch.arguments[1]))
  end
  if launch.help and not launch.declared then print("the recipe declares no options") end
  local ddp = package.loaded["moonshard.parallel.ddp.layouts"]
  if ddp then ddp.check(true) end
  local core = require "moonshard.core"
  core.synchronize()
  local report = package.loaded["moonshard.train.report"]
  if report then report.write_all(false) end               -- for loops other than ms.steps
  if launch.tune then require "moonshard.train.tune".close() end
  if not launch.cut then return 0 end
  return launch.saved and not require "moonshard.checkpoint.store".settle() and 75
    or 128 + launch.cut
end

--- The parser of its command line.
---@return table
function run.parser()
  local parser = switches.recipe_parser("run", "Runs a recipe.")
  parser:option("--trace",
    "write a Chrome / Perfetto trace of all ranks to this file (see `moonshard trace`)")
    :argname "FILE"
  parser:flag("--watch", "read files of hooks, plans and policies again when they change, on all \z
    ranks before the same step")
  parser:option("--log-every", "steps between two lines (default: 1 on a terminal; else the \z
    first 10, then one every 10 s or 1% of the steps)"):argname "STEPS":convert(switches.count)
  parser:flag("--tensorboard", "also write event files for TensorBoard, in the run's folder \z
    tensorboard/: the numbers of the step line, validations, samples")
  parser:mutex(
    parser:flag("--tune", "on a GPU: after the third step, time algorithms of the library of \z
      products that have no choice yet, and keep the choices in a file (MOONSHARD_TUNED, or \z
      moonshard/products.json in the user's cache), which later runs use; a resumed run uses \z
      those of its checkpoint"),
    parser:flag("--no-tune", "do not use that file"))
  require "moonshard.cli.ranks".add_switches(parser)
  require "moonshard.cli.ranks".add_stuck(parser)
  require "moonshard.cli.hosts".add_switches(parser)
  return parser
end

-- Other devices have no such choices. A recipe may name its device itself: tune.lua looks again.
local function check_tune(parsed)
  if parsed.tune and parsed.device and parsed.device ~= "cuda" then
    launch.exit(2, ("--tune: products are timed on a GPU, not on device %s: give --device cuda")
      :format(parsed.device))
  end
end

-- A GPU that is there and not used is worth a line; this does not start its driver.
local function show_gpu(parsed)
  if (parsed.device or "cpu") ~= "cpu" or not require "moonshard.core".has_gpu() then return end
  io.stderr:write("moonshard: this machine has a GPU: --device cuda computes there\n")
end

--- moonshard run FILE [switches] [key=value ...]
---@param arguments string[]
---@return integer
function run.main(arguments)
  local parser = run.parser()
  local parsed = switches.parse_recipe(parser, arguments)
  check_tune(parsed)
  local process = launch.process
  if process and process.kept_ranks then
    parsed.ranks = process.kept_ranks
    return require "moonshard.cli.ranks".launch(parsed)
  end
  if parsed.share_gpu and parsed.device ~= "cuda" then
    launch.exit(2, "--share-gpu is about ranks on GPUs: add --device cuda")
  end
  if not parsed.help and not (process and process.rank) then show_gpu(parsed) end
  local joined = not parsed.help and require "moonshard.cli.hosts".join("run", parsed)
  if parsed.hosts and not joined and not parsed.help then
    return require "moonshard.cli.start".run(parsed)
  end
  -- One rank is watched by a supervisor, too, where a limit is asked for.
  if (parsed.ranks > 1 or parsed.stuck) and not parsed.help and not process.rank then
    return require "moonshard.cli.ranks".launch(parsed)
  end
  switches.apply(parsed)
  launch.log_every = parsed.log_every
  launch.tensorboard = parsed.tensorboard or false
  launch.tune = parsed.tune and "yes" or parsed.no_tune and "no" or nil
  if parsed.watch then require "moonshard.train.watch".on = true end
  if process and not parsed.help then process.watch_signals(parsed.grace) end
  local trace = parsed.trace and require "moonshard.trace"
  if trace then assert(trace.start(parsed.trace)) end
  -- The trace is written however the recipe ends.
  local scope <close> = setmetatable({}, { __close = function() -- luacheck: ignore scope
    if not trace then return end
    local ok, message = trace.stop()
    if not ok then require "moonshard.base.log".warn("the trace was not written: %s", message) end
  end })
  return run.recipe(parsed.recipe,
    { arguments = parsed.options, help = parsed.help, config_file = parsed.config })
end

return run
