-- The guides are found, their links lead to files, and README.md soon comes to its first command.
local command = require "command"
local core = require "moonshard.core"
local guide = require "guide"

local GUIDES <const> = command.source .. "/recipes/guides/"

describe("the guides", function()
  local listing <close> = assert(io.popen(("ls '%s'"):format(GUIDES)))
  for name in listing:lines() do
    local text = command.read(GUIDES .. name)

    it("have links that lead to files: " .. name, function()
      local prose = text:gsub("\n```.-\n```", "\n")
      for link in prose:gmatch "%]%(([^)#]+)[^)]*%)" do
        assert.truthy(core.exists(GUIDES .. link), link)
      end
    end)

    if name ~= "README.md" then
      it("are named where users look: " .. name, function()
        for page, link in pairs {
          ["README.md"] = "recipes/guides/", ["recipes/README.md"] = "guides/",
          ["recipes/guides/README.md"] = "",
        } do
          local linked = ("(%s%s)"):format(link, name)
          assert.truthy(command.read(command.source .. "/" .. page):find(linked, 1, true), page)
        end
      end)

      it("have no block of another kind: " .. name, function()
        for _, block in ipairs(guide.blocks(text)) do
          assert.truthy(({ lua = true, sh = true, python = true })[block.kind], block.kind)
          local is_file = block.text:find "^%-%- file: %S+\n" ~= nil
          assert.equal(block.kind == "lua", is_file, block.text)
        end
        -- Each fence begins or ends one of them.
        local fences = select(2, text:gsub("\n```", ""))
        assert.equal(fences, 2 * #guide.blocks(text))
      end)
    end
  end
end)

it("README.md has two screens of 24 lines at most before the first command", function()
  local text = command.read(command.source .. "/README.md")
  local before, rows = text:sub(1, text:find("\n    ./moonshard", 1, true)), 0
  for line in before:gmatch "([^\n]*)\n" do rows = rows + math.max(1, (#line + 79) // 80) end
  assert.is_true(rows <= 48, rows)
end)
