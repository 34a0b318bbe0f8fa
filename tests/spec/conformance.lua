-- For specs that represent tests of PyTorch: runs a file of case("name", ...) on all ranks, which
-- prints "ok: name on rank R".
local busted = require "busted" -- a file that specs require has not its functions as globals
local assert = require "luassert"
local command = require "command"
local conformance = {}

--- One spec for each case that is written in a file, which passes on every rank in every way. A
--- case whose name ends with a variable `how` comes with "_static_graph", too.
---@param path string within the repository
---@param ways { [1]: integer, [2]: string }[] numbers of ranks, and more arguments
---@param least integer as many cases are found, or more
function conformance.each(path, ways, least)
  local names, said = {}, {}
  for line in io.lines(command.source .. "/" .. path) do
    local name, rest = line:match '^ *case%("([^"]+)"(.-),'
    if name and rest == " .. how" then names[#names + 1] = name .. "_static_graph" end
    names[#names + 1] = name
  end
  -- The output of the job on so many ranks, which is run once.
  local function output(ranks, more)
    if not said[ranks] then
      local folder = command.folder()
      local _, out = command.run(folder,
        ("run '%s/%s' -n %d%s"):format(command.source, path, ranks, more))
      command.remove(folder)
      said[ranks] = out
    end
    return said[ranks]
  end
  busted.it("tests are found", function() assert.is_true(#names > least, #names) end)
  for _, name in ipairs(names) do
    busted.it(name, function()
      for _, way in ipairs(ways) do
        local out = output(way[1], way[2])
        for rank = 0, way[1] - 1 do
          assert.truthy(out:find(("ok: %s on rank %d\n"):format(name, rank), 1, true),
            out:match "FAILED[^\n]*" or "it did not run")
        end
      end
    end)
  end
end

--- Returns the names of all cases that ran, in order; for each, whether it passed on every rank in
--- every way; the number of cases in the file; and the failures.
---@param path string within the repository
---@param ways { [1]: integer, [2]: string }[] numbers of ranks, and more arguments
function conformance.all(path, ways)
  local names, right, written, wrong = {}, {}, 0, ""
  for line in io.lines(command.source .. "/" .. path) do
    if line:match "^ *case%(" then written = written + 1 end
  end
  local folder = command.folder()
  for i, way in ipairs(ways) do
    local _, out, err = command.run(folder,
      ("run '%s/%s' -n %d%s"):format(command.source, path, way[1], way[2]))
    local seen = {}
    for name in out:gmatch "ok: ([^\n]-) on rank %d+\n" do
      seen[name] = (seen[name] or 0) + 1
      if right[name] == nil then names[#names + 1], right[name] = name, i == 1 end
    end
    for _, name in ipairs(names) do right[name] = right[name] and seen[name] == way[1] end
    wrong = wrong .. (out:match "FAILED[^\n]*" or "") .. (out:find "FAILED" and err or "")
  end
  command.remove(folder)
  return names, right, written, wrong
end

return conformance
