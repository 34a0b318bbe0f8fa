-- For specs that represent tests of PyTorch: runs a file of case("name", ...) on all ranks, which
-- prints "ok: name on rank R".
local command = require "command"

--- Returns the names of all cases that ran, in order; for each, whether it passed on every rank in
--- every way; the number of cases in the file; and the failures.
---@param path string within the repository
---@param ways { [1]: integer, [2]: string }[] numbers of ranks, and more arguments
return function(path, ways)
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
