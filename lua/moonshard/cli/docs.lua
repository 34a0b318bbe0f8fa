-- moonshard docs: the reference as a page, the man page, completions for shells.
local core = require "moonshard.core"
local launch = require "moonshard.base.launch"
local switches = require "moonshard.cli.switches"

local docs = {}

--- The parser of its command line.
---@return table
function docs.parser()
  local parser = switches.plain("docs", "Writes the reference: every function with its arguments, \z
    results and errors, a search box, a glossary. Prints the man page, or completions. `moonshard \z
    help NAME` shows one entry.")
  parser:option("--html", "write index.html into this folder, which is made if need be")
    :argname "FOLDER"
  parser:flag("--man", "print the man page, for man(1)")
  parser:option("--completions", "print what completes command lines"):argname "SHELL"
    :choices { "bash", "zsh" }
  parser:flag("--force", "replace an index.html that is there")
  return parser
end

--- moonshard docs --html FOLDER [--force] | --man | --completions SHELL
---@param arguments string[]
---@return integer
function docs.main(arguments)
  local parser = docs.parser()
  local parsed = switches.parse(parser, arguments)
  local cli, shells = require "moonshard.cli", require "moonshard.docs.shells"
  if parsed.man then
    io.write(shells.man(cli.commands, cli.variables))
    return 0
  end
  if parsed.completions then
    io.write(shells.completions(parsed.completions, cli.commands))
    return 0
  end
  if not parsed.html then
    launch.exit(2, "docs: --html FOLDER must be given\n" .. parser:get_usage())
  end
  local path = parsed.html:gsub("(.)/+$", "%1") .. "/index.html"
  if core.exists(path) and not parsed.force then
    launch.exit(2, ("'%s' exists: name another folder, or --force"):format(path))
  end
  local ok, message = core.make_directory(parsed.html)
  if ok then ok, message = core.file_write(path, require "moonshard.docs.page"()) end
  if not ok then launch.exit(3, message) end
  print(("the reference is in %s"):format(path))
  return 0
end

return docs
