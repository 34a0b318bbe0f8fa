-- The switches that commands share, read by argparse; everything of the form key=value is the recipe's.
local switches = {}

--- A parser with the engine's switches.
---@param name string
---@param description string
---@return table
function switches.parser(name, description)
  local argparse = require "argparse"
  local parser = argparse("moonshard " .. name, description):add_help(false)
  parser:option("--device", "cpu, or sim: no data, the same decisions"):choices { "cpu", "sim" }
  parser:option("--threads", "threads of intra-op work (default: the cores)"):convert(math.tointeger)
  parser:option("--seed", "seed of the random numbers"):convert(math.tointeger)
  parser:option("--memory", "limit of tensor memory in bytes"):convert(math.tointeger)
  parser:flag("--strict", "a missing wait between streams is an error")
  parser:flag("--pin", "pin threads to cores")
  parser:flag("-h --help", "print this")
  return parser
end

--- Parses, or ends with exit code 2 and the parser's message.
---@param parser table
---@param arguments string[]
---@return table
function switches.parse(parser, arguments)
  local launch = require "moonshard.launch"
  local ok, result = parser:pparse(arguments)
  if not ok then launch.exit(2, tostring(result) .. "\n" .. parser:get_usage()) end
  return result
end

--- Hands the engine's switches to the engine. What they do not say comes from the environment: MOONSHARD_CPU, MOONSHARD_STRICT, MOONSHARD_LOG.
---@param parsed table
function switches.apply(parsed)
  require "moonshard.core".configure {
    device = parsed.device, threads = parsed.threads, seed = parsed.seed, memory_bytes = parsed.memory, pin = parsed.pin, strict = parsed.strict,
  }
end

return switches
