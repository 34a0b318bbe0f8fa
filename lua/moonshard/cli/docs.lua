-- moonshard docs --html FOLDER: the reference as a page.
local core = require "moonshard.core"
local launch = require "moonshard.launch"
local switches = require "moonshard.cli.switches"

local docs = {}

--- moonshard docs --html FOLDER [--force]
---@param arguments string[]
---@return integer
function docs.main(arguments)
  local parser = switches.plain("docs", "Writes the reference: every function with its arguments, \z
    results and errors, a search box, a glossary. `moonshard help NAME` shows one entry.")
  parser:option("--html", "write index.html into this folder, which is made if need be")
    :argname "FOLDER"
  parser:flag("--force", "replace an index.html that is there")
  local parsed = switches.parse(parser, arguments)
  if not parsed.html then
    launch.exit(2, "docs: --html FOLDER must be given\n" .. parser:get_usage())
  end
  local path = parsed.html:gsub("(.)/+$", "%1") .. "/index.html"
  if core.exists(path) and not parsed.force then
    launch.exit(2, ("'%s' exists: name another folder, or --force"):format(path))
  end
  local ok, message = core.make_directory(parsed.html)
  if ok then ok, message = core.file_write(path, require "moonshard.reference.page"()) end
  if not ok then launch.exit(3, message) end
  print(("the reference is in %s"):format(path))
  return 0
end

return docs
