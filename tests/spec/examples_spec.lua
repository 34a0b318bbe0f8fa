-- The examples of the reference: each runs as it is, in an empty folder, and the lines with
-- "-->" have the values that are there. Inside of ms.autocast values are others, and each runs to
-- its end.
local command = require "command"
local core = require "moonshard.core"
local examples = require "examples"
local read = require "moonshard.docs.read"

-- A script that runs the examples of a file, each `{ name, code }`, and prints one line of JSON for
-- each: its name, and what is wrong or nil. dtype: they run inside of ms.autocast, and no values
-- are compared.
local RUNNER <const> = [==[
local list = dofile "examples.lua"
local ms = not list.bare and require "moonshard"
local core = require "moonshard.core"

-- A value as examples write it. Numbers of floating point have four digits at the most.
local function shown(value)
  if core.is_tensor(value) then
    return shown(value:dim() == 0 and value:item() or value:to_table())
  end
  if type(value) == "string" then return ("%q"):format(value) end
  if math.type(value) == "float" then
    local text = ("%.4g"):format(value)
    return text:find "^%-?%d+$" and text .. ".0" or text
  end
  if type(value) ~= "table" then return tostring(value) end
  local parts = {}
  for i, one in ipairs(value) do parts[i] = shown(one) end
  return #parts == 0 and "{}" or "{ " .. table.concat(parts, ", ") .. " }"
end

local function check(expected, value)
  local own = shown(value)
  if not list.dtype and own ~= expected then error(("%s, not %s"):format(own, expected), 2) end
end

local results = assert(io.open("results.jsonl", "a"))
for _, one in ipairs(list) do
  local chunk, message = load(one.code, "=example", "t",
    setmetatable({ ms = ms or nil, check = check }, { __index = _G }))
  if chunk and list.dtype then message = select(2, pcall(ms.autocast, list.dtype, chunk))
  elseif chunk then message = select(2, pcall(chunk)) end
  results:write(core.json_encode { name = one.name, wrong = message and tostring(message) }, "\n")
  results:flush()
end
]==]

local LUA <const> = arg and arg[-1] or "lua5.4"

-- Runs examples in a process of their own; returns what is wrong, by name.
local function run(folder, list)
  local lines = { ("return { bare = %s, dtype = %q,"):format(list.bare or false, list.dtype) }
  for _, one in ipairs(list) do
    lines[#lines + 1] = ("{ name = %q, code = %q },"):format(one.name, examples.checked(one.code))
  end
  command.write(folder .. "/examples.lua", table.concat(lines, "\n") .. "\n}")
  command.write(folder .. "/runner.lua", RUNNER)
  os.remove(folder .. "/results.jsonl")
  os.execute(("cd '%s' && %s runner.lua >output 2>&1"):format(folder, LUA))
  local wrong = setmetatable({}, { __index = function()
    return "it did not come to an end: " .. command.read(folder .. "/output")
  end })
  for line in (command.read(folder .. "/results.jsonl") or ""):gmatch "[^\n]+" do
    local one = core.json_decode(line)
    wrong[one.name] = one.wrong or false
  end
  return wrong
end

describe("the examples of the reference", function()
  local folder, wrong = nil, {}
  local together, alone = {}, {}
  for _, one in ipairs(examples.all()) do table.insert(one.alone and alone or together, one) end

  setup(function()
    folder = command.folder()
    wrong = run(folder, together)
    for _, one in ipairs(alone) do
      wrong[one.name] = run(folder, { one, bare = one.name == "ms.init" })[one.name]
    end
  end)
  teardown(function() command.remove(folder) end)

  for _, block in ipairs(read.all().blocks) do
    for _, field in ipairs(block.fields) do
      local name = read.full_name(field)
      if field.example then
        it("of " .. name .. " runs", function() assert.equal(false, wrong[name]) end)
      -- The functions that users give, such as TrainOptions.loss, are in the examples of what takes
      -- them.
      elseif field.parameters and not name:find "^%u%w*%." then
        it("of " .. name .. " exists", function() error "there is none" end)
      end
    end
  end

  it("run in bf16", function()
    together.dtype = "bf16"
    local found, failed = run(folder, together), {}
    for _, one in ipairs(together) do
      if found[one.name] then failed[one.name] = found[one.name] end
    end
    assert.same({}, failed)
  end)

  it("are found to be wrong where they are", function()
    local found = run(folder, {
      { name = "value", code = "ms.ones { 2 } --> { 1.0, 2.0 }" },
      { name = "call", code = "ms.no_such_function()" },
      { name = "right", code = "ms.ones { 2 } --> { 1.0, 1.0 }" },
    })
    assert.matches("{ 1.0, 1.0 }, not { 1.0, 2.0 }", found.value, 1, true)
    assert.matches("no_such_function", found.call)
    assert.equal(false, found.right)
    local none = run(folder, { { name = "end", code = "os.exit()" } })["end"]
    assert.matches("did not come to an end", none)
  end)
end)
