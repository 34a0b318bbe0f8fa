-- `where(x:gt(y), x, y)` loses a NaN: every comparison with it is false, so the other value is
-- taken. x:maximum(y) and x:minimum(y) keep it. No Lua file of the project chooses like that.
--
--     lua comparing.lua, in the root of the project

-- The larger or the smaller of two names or fields.
local function choice(line)
  for _, order in ipairs { "%1, *%2", "%2, *%1" } do
    local pattern = "where%(([%w_.]+):[gl][te]%(([%w_.]+)%), *" .. order .. "%)"
    local at, stop = line:find(pattern)
    if at then return line:sub(at, stop) end
  end
end

assert(choice "core.where(sum:gt(total), sum, total)" == "where(sum:gt(total), sum, total)")
assert(choice "ms.where(s.a:le(b), b, s.a)" == "where(s.a:le(b), b, s.a)")
assert(not choice "core.where(first:lt(none), first, -1)")

local found, files = 0, 0
local list <close> =
  assert(io.popen "find lua recipes tests README.md -name '*.lua' -o -name '*.md'")
for path in list:lines() do
  files = files + 1
  local number = 0
  for line in io.lines(path) do
    number = number + 1
    local text = path ~= "tests/lint/comparing.lua" and choice(line)
    if text then
      found = found + 1
      print(("%s:%d: %s loses a NaN: maximum or minimum keeps it"):format(path, number, text))
    end
  end
end
assert(files > 100, "the project's Lua files were not found: run this in its root")
os.exit(found == 0)
