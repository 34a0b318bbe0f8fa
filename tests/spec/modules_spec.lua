-- The modules that recipes and pages require, and those of which a part of the API is, keep their
-- names.
local command = require "command"

local function read(path)
  local file <close> = assert(io.open(path, "rb"))
  return file:read "a"
end

-- The files of the repository that users read.
local function pages()
  local handle = assert(io.popen(("cd '%s' && find README.md recipes lua/moonshard/meta.lua \z
    lua/moonshard/meta -name '*.lua' -o -name '*.md'"):format(command.source)))
  local list = {}
  for path in handle:lines() do list[#list + 1] = path end
  handle:close()
  return list
end

describe("modules", function()
  it("that recipes and pages require are there", function()
    local names, count = {}, 0
    for _, path in ipairs(pages()) do
      local text = read(command.source .. "/" .. path)
      for name in text:gmatch "require%s*%(?%s*[\"'](moonshard[%w_.]*)" do
        names[name] = names[name] or path
      end
    end
    for name, path in pairs(names) do
      count = count + 1
      assert.is_true(pcall(require, name), ("%s, which %s requires"):format(name, path))
    end
    assert.is_true(count >= 3, count)
  end)

  it("are those of the API's parts", function()
    local ms = require "moonshard"
    for _, part in ipairs { "data", "hooks", "nn", "optim" } do
      assert.equal(ms[part], require("moonshard." .. part), part)
    end
    for _, part in ipairs { "checkpoint", "safetensors", "scripts", "trace", "train" } do
      assert.is_true(pcall(require, "moonshard." .. part), part)
    end
  end)
end)
