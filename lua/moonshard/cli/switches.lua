-- The switches that commands share, read by argparse; everything of the form key=value is the recipe's.
local launch = require "moonshard.launch"

local switches = {}

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

--- A parser with the engine's switches.
---@param name string
---@param description string
---@return table
function switches.parser(name, description)
  local argparse = require "argparse"
  local parser = argparse("moonshard " .. name, description):add_help(false)
  parser:option("--device", "cpu, or sim: no data, the same decisions"):choices { "cpu", "sim" }
  parser:option("--threads", "threads of intra-op work (default: the cores)"):convert(switches.count)
  parser:option("--seed", "seed of the random numbers"):convert(switches.integer)
  parser:option("--memory", "limit of tensor memory in bytes"):convert(switches.count)
  parser:flag("--strict", "a missing wait between streams is an error")
  parser:flag("--pin", "pin threads to cores")
  parser:flag("-h --help", "print this")
  return parser
end

--- How many ranks.
---@param parser table
function switches.add_ranks(parser) parser:option("-n --ranks", "ranks, all on this machine"):convert(switches.count):default "1" end

--- A parser of a command that runs a recipe.
---@param name string
---@param description string
---@return table
function switches.recipe_parser(name, description)
  local parser = switches.parser(name, description)
  parser:argument("recipe", "a Lua file"):args "?"
  parser:argument("options", "key=value: options of the recipe"):args "*"
  switches.add_ranks(parser)
  parser:option("--config", "file with options (.lua or .json)")
  return parser
end

--- Parses; ends with exit code 2 and the parser's message, or after printing the help that was asked for. Where there is a recipe, its own
--- help is meant.
---@param parser table
---@param arguments string[]
---@return table
function switches.parse(parser, arguments)
  local ok, result = parser:pparse(arguments)
  if not ok then launch.exit(2, tostring(result) .. "\n" .. parser:get_usage()) end
  if result.help and not result.recipe then
    print(parser:get_help())
    launch.exit(0)
  end
  return result
end

--- The same for a command that runs a recipe.
---@param parser table
---@param arguments string[]
---@return table
function switches.parse_recipe(parser, arguments)
  local parsed = switches.parse(parser, arguments)
  if not parsed.recipe then launch.exit(2, "which recipe?\n" .. parser:get_usage()) end
  return parsed
end

--- Hands the engine's switches to the engine. What they do not say comes from the environment: MOONSHARD_CPU, MOONSHARD_STRICT, MOONSHARD_LOG.
---@param parsed table
function switches.apply(parsed)
  require "moonshard.core".configure {
    device = parsed.device, threads = parsed.threads, seed = parsed.seed, memory_bytes = parsed.memory, pin = parsed.pin, strict = parsed.strict,
  }
end

return switches
