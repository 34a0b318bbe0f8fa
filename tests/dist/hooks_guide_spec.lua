-- The pages on hooks, policies, prefetch and optim among the recipes (README.md of each), as a new
-- user would try them: their files are written down, and their commands run. The pages share the
-- training script of the first.
local command = require "command"

-- A shipped recipe, small enough for a test; its data are the text of a page.
local SMALL =
  " data='%s/recipes/README.md' steps=3 length=16 batch=2 model.layers=1 model.width=32 "
    .. "model.heads=2 every.sample=0 every.save=0 run=out"

local function read(page)
  local file <close> = assert(io.open(("%s/recipes/%s/README.md"):format(command.source, page)))
  return file:read "a"
end

local function write_files(folder, text)
  local count = 0
  for block in text:gmatch "```lua\n(.-)```" do
    local name = block:match "^%-%- file: (%S+)"
    if name then
      command.write(folder .. "/" .. name, block)
      count = count + 1
    end
  end
  return count
end

-- No file is edited during this run, and a slow link changes no result.
local function try(folder, line)
  local shipped = line:match "recipes/[%w_]+%.lua"
  local small = shipped and SMALL:format(command.source) or ""
  local arguments = line:gsub("%-%-watch ", ""):gsub("recipes/", command.source .. "/recipes/")
  local out = command.succeed(folder, arguments .. small)
  local expected = shipped and "validation loss [%d.]+" or "step 15: loss [%d.]+, %d+ bytes sent"
  assert.matches(line:match "^check" and "peak memory" or expected, out)
end

for page, least in pairs { hooks = { 5, 10 }, policies = { 2, 5 }, prefetch = { 1, 4 },
  optim = { 1, 4 } } do
  describe("the guide to " .. page, function()
    local folder = command.folder()
    teardown(function() command.remove(folder) end)
    local text, commands = read(page), {}
    write_files(folder, read "hooks")
    local files = write_files(folder, text)
    local joined = text:gsub(" \\\n%s*", " ") -- a command may go on in the next line
    for line in joined:gmatch "\n    %./moonshard ([^\n#]+)" do
      if line:match "^run" or line:match "^check" then commands[#commands + 1] = line end
    end

    it("has files and commands", function()
      assert.is_true(files >= least[1] and #commands >= least[2], #commands)
    end)

    for _, line in ipairs(commands) do
      it("./moonshard " .. line, function() try(folder, line) end)
    end

    it("names every file beside it", function()
      local listing <close> = io.popen(("ls '%s/recipes/%s'"):format(command.source, page))
      for name in listing:lines() do
        assert.truthy(name == "README.md" or text:find(("(%s)"):format(name), 1, true), name)
      end
    end)
  end)
end
