-- cases.lua: runs a lint on small trees of files, each beside the report that is expected. Tests of
-- lints load it.

local function run(command)
  local handle = assert(io.popen(command .. " 2>&1"))
  local output = handle:read("a")
  return output, handle:close()
end

--- Runs each case, prints what is wrong, and ends the process.
---@param lint string the lint's path; its argument is the tree's root
---@param cases table[] { name, files, expected }: texts by path; and what the only line of the
---  report must contain, or false: no report
---@param more string? further arguments, ROOT for the tree's root
return function(lint, cases, more)
  local folder = run("mktemp -d"):gsub("\n", "")
  local failures = 0
  for number, case in ipairs(cases) do
    local name, files, expected = table.unpack(case)
    local root = ("%s/%d"):format(folder, number)
    for path, text in pairs(files) do
      run(("mkdir -p '%s/%s'"):format(root, path:match("^(.*)/") or ""))
      local file = assert(io.open(root .. "/" .. path, "w"))
      file:write(text)
      file:close()
    end

    local output, passed = run(("'%s' '%s' '%s' %s"):format(arg[-1], lint, root,
      more and more:gsub("ROOT", root) or ""))
    local right = passed and output == "0 problems\n"
    if expected then
      right = not passed and output:find(expected, 1, true)
        and output:find("\n1 problem\n", 1, true)
    end
    if not right then
      failures = failures + 1
      print(("%s: expected %s, got:\n%s"):format(name, expected or "no report", output))
    end
  end
  run(("rm -r '%s'"):format(folder))
  print(("%d cases, %d failures"):format(#cases, failures))
  os.exit(failures == 0)
end
