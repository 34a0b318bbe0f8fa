-- recipes/hooks/README.md, tried as a new user would: its files are written down, and its commands run.
local command = require "command"

describe("the guide to hooks", function()
  local folder = command.folder()
  teardown(function() command.remove(folder) end)
  local file = assert(io.open(command.source .. "/recipes/hooks/README.md"))
  local text = file:read "a"
  file:close()

  local files, commands = 0, {}
  for block in text:gmatch "```lua\n(.-)```" do
    local name = block:match "^%-%- file: (%S+)"
    if name then
      command.write(folder .. "/" .. name, block)
      files = files + 1
    end
  end
  for line in text:gmatch "\n    %./moonshard ([^\n#]+)" do
    if line:match "^run" or line:match "^check" then commands[#commands + 1] = line end
  end

  it("has files and commands", function() assert.is_true(files >= 5 and #commands >= 8) end)

  for _, line in ipairs(commands) do
    it("./moonshard " .. line, function()
      -- Nobody edits while this runs, and a slow link is only slow.
      local out = command.succeed(folder, (line:gsub("%-%-watch ", "")))
      assert.matches(line:match "^check" and "peak memory" or "step 15: loss [%d.]+, %d+ bytes sent", out)
    end)
  end

  it("names every method beside it", function()
    local listing = io.popen(("ls '%s/recipes/hooks'"):format(command.source))
    for name in listing:lines() do assert.truthy(name == "README.md" or text:find(("(%s)"):format(name), 1, true), name) end
    listing:close()
  end)
end)
