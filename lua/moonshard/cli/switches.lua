-- The switches that commands share, parsed by argparse. Arguments of the form key=value are the
-- recipe's options.
local gpu_rates = require "moonshard.cli.gpu_rates"
local launch = require "moonshard.base.launch"
local shipped = require "moonshard.base.shipped"

local switches = {
  GPU = "h200",          -- which GPU a check with --device cuda takes the times of
  root = nil,            -- the parser of which new parsers are commands; see the command docs
}

--- For argparse: an integer.
---@param text string
---@return integer?, string?
function switches.integer(text)
  local number = math.tointeger(text)
  if number then return number end
  return nil, ("an integer is expected, not '%s'"):format(text)
end

--- For argparse: an integer of 1 or more.
---@param text string
---@return integer?, string?
function switches.count(text)
  local number, message = switches.integer(text)
  if number and number < 1 then return nil, ("1 or more is expected, not '%s'"):format(text) end
  return number, message
end

--- A parser without any switch but --help.
---@param name string
---@param description string
---@return table
function switches.plain(name, description)
  local parser = switches.root and switches.root:command(name:match "%S+$", description)
    or require "argparse"("moonshard " .. name, description)
  parser:add_help(false):help_max_width(100)
  parser:flag("-h --help", "print this")
  return parser
end

-- The engine's switches, each in one row: `setting` is its name in core.configure, unless that is
-- the switch's own; all ranks of a job must agree on those with `agree`.
local engine = {
  {
    "--device", "cpu; cuda: a GPU of NVIDIA; or sim: no data, the same decisions (default: %s)",
    choices = { "cpu", "cuda", "sim" }, agree = true,
  },
  {
    "--threads", "threads of intra-op work (default: the cores)",
    argname = "COUNT", convert = switches.count, agree = true,
  },
  {
    "--seed", "seed of the random numbers, also of math.random (default: 0)",
    argname = "N", convert = switches.integer, agree = true,
  },
  {
    "--memory", "limit of tensor memory of each rank (default: the machine's memory; on a GPU 90% \z
      of what is free there)",
    argname = "BYTES", convert = switches.count, setting = "memory_bytes", agree = true,
  },
  {
    "--rates", "speeds of the simulated machine, from which sim estimates times: h100, h200, or a \z
      file (.lua or .json; default: measured on one machine)",
    argname = "FILE", setting = false,
  },
  { "--strict", "a missing wait between streams is an error", is_flag = true, agree = true },
  { "--pin", "pin threads to cores", is_flag = true },
  {
    "--tf32", "on a GPU: products of f32 tensors take numbers rounded to TF32, which have three \z
      digits: that is faster",
    is_flag = true, agree = true,
  },
}

-- The name under which argparse gives the value of a row.
local function target_of(row) return (row[1]:gsub("^%-%-", ""):gsub("%-", "_")) end

local function add(parser, row, default)
  local help = row[1] == "--device" and row[2]:format(default or "cpu") or row[2]
  if row.is_flag then return parser:flag(row[1], help) end
  local option = parser:option(row[1], help)
  if row.choices then option:choices(row.choices) end
  if row.argname then option:argname(row.argname) end
  if row.convert then option:convert(row.convert) end
end

--- Names of the engine's switches on which all ranks of a job must agree.
---@return string[]
function switches.agreed()
  local names = {}
  for _, row in ipairs(engine) do if row.agree then names[#names + 1] = target_of(row) end end
  return names
end

--- Adds the switch for the number of threads.
---@param parser table
function switches.add_threads(parser)
  for _, row in ipairs(engine) do if row[1] == "--threads" then add(parser, row) end end
end

--- A parser with the engine's switches.
---@param name string
---@param description string
---@param device? string the default
---@return table
function switches.parser(name, description, device)
  local parser = switches.plain(name, description)
  for _, row in ipairs(engine) do add(parser, row, device) end
  -- The same.
  parser:option("--memory-limit --limit"):target "memory":convert(switches.count):hidden(true)
  return parser
end

--- Adds the switch for the number of ranks.
---@param parser table
function switches.add_ranks(parser)
  parser:option("-n --ranks", "ranks, all on this machine"):argname "N":convert(switches.count)
    :default "1"
end

--- A parser of a command that runs a recipe.
---@param name string
---@param description string
---@param device? string the default
---@return table
function switches.recipe_parser(name, description, device)
  local parser = switches.parser(name, description, device)
  parser:argument("recipe", "a Lua file, or the name of a recipe that is installed: gpt_bytes")
    :args "?"
  parser:argument("options",
    ("key=value: options of the recipe (`moonshard %s RECIPE --help` lists them)"):format(name))
    :args "*"
  switches.add_ranks(parser)
  parser:option("--config", "file with options of the recipe (.lua or .json)"):argname "FILE"
  return parser
end

-- The options that a recipe seems to declare: keys of the table after `ms.config` in its text. Used
-- for hints only, because the recipe has not run.
local function declared_in(recipe)
  local file = recipe and io.open(recipe)
  local text = file and file:read "a" or ""
  if file then file:close() end
  local names = text:match "scripts%.options"
    and { "hook", "overlap", "buckets", "shard", "gather", "prefetch", "local", "optimizer" } or {}
  text = text:gsub("%-%-[^\n]*", ""):gsub('"[^"\n]*"', '""')
  local body = text:match "ms%.config[%s%(%w_.]*(%b{})" or "{}"
  for name in body:sub(2, -2):gsub("%b{}", "{}"):gmatch "([%a_][%w_]*)%s*=" do
    names[#names + 1] = name
  end
  return names
end

-- Adds to the message about an unknown switch a hint at the nearest switch or option of the recipe.
local function advice(parser, message, arguments)
  for _, argument in ipairs(arguments) do
    local gpu = argument:match "^cuda:(%d+)$" or argument:match "^%-%-device=cuda:(%d+)$"
    if gpu and message:find("'--device'", 1, true) then
      return ("--device cuda:%s: a process computes on the first GPU that it is shown: set \z
        CUDA_VISIBLE_DEVICES=%s in its environment, and give --device cuda"):format(gpu, gpu)
    end
  end
  local given, bare = message:match "^unknown option '(%-%-?([^'=]+))"
  if not given then return message end
  local names, meant, recipe = {}, {}, nil
  for _, argument in ipairs(arguments) do recipe = recipe or argument:match "^[^-].*%.lua$" end
  local function known(name, text) names[#names + 1], meant[name] = name, text end
  for _, name in ipairs(declared_in(recipe and shipped.find(recipe))) do
    known(name, name .. "=VALUE, an option of the recipe")
  end
  for _, option in ipairs(parser._options) do
    for _, alias in ipairs(option._public_aliases) do known(alias:match "^%-*(.*)", alias) end
  end
  local nearest = require "moonshard.core".nearest(bare, names)
  return ("unknown switch '%s'%s")
    :format(given, nearest and (": did you mean %s?"):format(meant[nearest]) or "")
end

--- Parses arguments. A mistake ends the program with exit code 2 and the parser's message; --help
--- prints the help and ends it. With a recipe, --help is for the recipe.
---@param parser table
---@param arguments string[]
---@return table
function switches.parse(parser, arguments)
  -- Of a value that is given twice, one would be lost without a word.
  for _, option in ipairs(parser._options) do
    if option._maxcount == 1 and option._maxargs > 0 then option:overwrite(false) end
  end
  local ok, result = parser:pparse(arguments)
  if not ok then
    launch.exit(2, advice(parser, tostring(result), arguments) .. "\n" .. parser:get_usage())
  end
  if result.help and not result.recipe then
    print(parser:get_help())
    launch.exit(0)
  end
  return result
end

--- The same for a command that runs a recipe, which must be given.
---@param parser table
---@param arguments string[]
---@return table
function switches.parse_recipe(parser, arguments)
  local parsed = switches.parse(parser, arguments)
  if not parsed.recipe then
    local _, known = shipped.recipes()
    launch.exit(2, ("which recipe?\n%s\n%s"):format(known, parser:get_usage()))
  end
  local path, message = shipped.recipe(parsed.recipe)
  if not path then launch.exit(2, message) end
  launch.recipe_given, parsed.recipe = parsed.recipe, path
  return parsed
end

-- The speeds of the simulated machine, if some are asked for: those of a GPU by its name, or of a
-- file.
local function apply_rates(parsed)
  if not parsed.rates then return end
  if parsed.device ~= "sim" then
    launch.exit(2, "--rates: only the sim device estimates times: use `moonshard check`, or \z
      --device sim")
  end
  local values, message = gpu_rates[parsed.rates], nil
  if not values then
    values, message = require "moonshard.base.table_file".read(parsed.rates)
    if not values and not parsed.rates:find "[./]" then
      message = message .. " (GPUs whose speeds are known: h100, h200)"
    end
  end
  local ok = values ~= nil
  if ok then ok, message = pcall(require "moonshard.core".configure, { rates = values }) end
  if not ok then launch.exit(3, ("rates file %s: %s"):format(parsed.rates, tostring(message))) end
end

--- Passes the engine's switches to the engine. Settings without a switch come from the environment:
--- MOONSHARD_CPU, MOONSHARD_STRICT, MOONSHARD_TRANSPORT, MOONSHARD_LOG.
---@param parsed table
function switches.apply(parsed)
  launch.seed_random(parsed.seed or 0, 0)
  local settings = { share_gpu = parsed.share_gpu, near_gpu = parsed.device == "cuda" }
  for _, row in ipairs(engine) do
    local name = target_of(row)
    if row.setting ~= false then settings[row.setting or name] = parsed[name] end
  end
  require "moonshard.core".configure(settings)
  apply_rates(parsed)
end

return switches
