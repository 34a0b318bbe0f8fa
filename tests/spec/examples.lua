-- For specs: the examples of the reference.
local read = require "moonshard.docs.read"

local examples = {}

--- All of them, in the order of the reference; alone: it says what a process can do once, before
--- anything else.
---@return { name: string, code: string, alone: boolean }[]
function examples.all()
  local list = {}
  for _, block in ipairs(read.all().blocks) do
    for _, field in ipairs(block.fields) do
      local code = field.example
      list[#list + 1] = code and {
        name = read.full_name(field), code = code,
        alone = code:find("ms.init", 1, true) ~= nil or code:find("ms.config", 1, true) ~= nil,
      }
    end
  end
  return list
end

--- The example as a program in which a line "VALUE --> TEXT" is check("TEXT", VALUE). Locals of an
--- example are seen by the lines below them.
---@param code string
---@return string
function examples.checked(code)
  local lines = {}
  for line in (code .. "\n"):gmatch "([^\n]*)\n" do
    local value, expected = line:match "^(.-)%s*%-%->%s*(.*)$"
    lines[#lines + 1] = value and ("check(%q, %s)"):format(expected, value) or line
  end
  return table.concat(lines, "\n")
end

return examples
