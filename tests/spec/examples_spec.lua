-- The examples of the reference: each runs as it stands, and the lines with "-->" have the values
-- that stand there.
local ms = require "moonshard"
local core = require "moonshard.core"
local read = require "moonshard.reference.read"

-- The parts of which every function has an example.
local COMPLETE <const> = { making = true, tensor = true }

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

-- Runs an example. Its locals are seen by the lines below them.
local function run(example)
  local lines, checked = {}, 0
  for line in (example .. "\n"):gmatch "([^\n]*)\n" do
    local code, expected = line:match "^(.-)%s*%-%->%s*(.*)$"
    if code then
      checked = checked + 1
      line = ("check(%q, %s)"):format(expected, code)
    end
    lines[#lines + 1] = line
  end
  local function check(expected, value) assert.equal(expected, shown(value)) end
  local chunk = assert(load(table.concat(lines, "\n"), "=example", "t",
    setmetatable({ ms = ms, check = check }, { __index = _G })))
  chunk()
  return checked
end

describe("the examples of the reference", function()
  for _, block in ipairs(read.all().blocks) do
    for _, field in ipairs(block.fields) do
      local name = read.full_name(field)
      if field.example then
        it("of " .. name .. " runs", function() assert.is_true(run(field.example) > 0) end)
      elseif field.parameters and COMPLETE[field.part] then
        it("of " .. name .. " exists", function() error "there is none" end)
      end
    end
  end

  it("are found to be wrong where they are", function()
    assert.error(function() run "ms.ones { 2 } --> { 1.0, 2.0 }" end)
    assert.error(function() run "ms.no_such_function()" end)
  end)
end)
