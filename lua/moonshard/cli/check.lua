-- moonshard check: runs a recipe on the sim executor, which makes every decision of the host and has no data: what it would take.
local launch = require "moonshard.launch"
local switches = require "moonshard.cli.switches"

local check = {}

local function yes() return true end

-- The functions of the core that write say yes and do nothing; what reading a tensor for them does to memory is kept.
local function without_output(core)
  local sink = { write = function(self) return self end, close = yes }
  core.file_append = function() return sink end
  core.file_lock = function() return sink end
  for _, name in ipairs { "file_write", "make_directory", "remove", "checkpoint_start", "checkpoint_remove", "checkpoint_sweep" } do core[name] = yes end
  core.snapshot = function(_, tensors)
    local hashes = {}
    for i, t in ipairs(tensors) do
      core.read_nowhere(t)
      hashes[i] = 0
    end
    return sink, hashes
  end
  core.safetensors_save = function(_, _, tensors)
    for _, t in ipairs(tensors) do core.read_nowhere(t) end
    return true
  end
end

-- stdout is for the answer; what the recipe prints by itself goes to stderr.
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

-- What one rank needs. One rank alone issues no collectives: their account is empty.
local function result_of(core)
  return {
    ranks = 1, peak_bytes = core.json_list { core.memory().peak }, payload_bytes = 0, wire_bytes = 0,
    groups = core.json_list {}, collectives = core.json_list {}, order_hash = ("%016x"):format(core.hash ""),
  }
end

local function show(result)
  local lines = {}
  for i, bytes in ipairs(result.peak_bytes) do lines[i] = ("rank %-4d peak memory %.1f MiB (%d bytes)"):format(i - 1, bytes / 2 ^ 20, bytes) end
  lines[#lines + 1] = ("collectives of the last step: %d, %d bytes handed over, %d on the wire"):format(#result.collectives, result.payload_bytes, result.wire_bytes)
  return table.concat(lines, "\n")
end

--- moonshard check FILE [-n N] [--json] [switches] [key=value ...]
---@param arguments string[]
---@return integer
function check.main(arguments)
  local parser = switches.recipe_parser("check", "Runs a recipe without data: peak memory and collectives of each rank. Files are read, none are written.")
  parser:flag("--json", "one line of JSON")
  local parsed = switches.parse_recipe(parser, arguments)
  if parsed.device == "cpu" then launch.exit(2, "--device cpu: a check has no data and runs on sim; `moonshard run` runs on cpu") end
  parsed.device = "sim"
  switches.apply(parsed)
  local core = require "moonshard.core"
  local answer = io.stdout
  if not parsed.help then
    launch.checking = true
    without_output(core)
    set_print()
  end
  local code = require "moonshard.cli.run".recipe(parsed.recipe, { arguments = parsed.options, help = parsed.help, config_file = parsed.config })
  if code ~= 0 or parsed.help then return code end
  local result = result_of(core)
  answer:write(parsed.json and core.json_encode(result) or show(result), "\n")
  return 0
end

return check
