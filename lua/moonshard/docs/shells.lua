-- The man page, and completions for shells, from the parsers of the command line.
local core = require "moonshard.core"
local switches = require "moonshard.cli.switches"

local shells = {}

-- One parser with all commands.
local function whole(commands)
  local root = require "argparse"("moonshard", "Trains models on many devices."):add_help(false)
  root:flag("-h --help", "print this")
  root:flag("--version", "print the version")
  switches.root = root
  local scope <close> = setmetatable({}, { -- luacheck: ignore scope
    __close = function() switches.root = nil end,
  })
  local parsers = {}
  for i, command in ipairs(commands) do
    local module = require("moonshard.cli." .. command[1])
    parsers[i] = module.parser and module.parser() or switches.plain(command[1], command[2])
  end
  return root, parsers
end

--- A script that completes the command line.
---@param shell "bash"|"zsh"
---@param commands string[][]
---@return string
function shells.completions(shell, commands)
  local root = whole(commands)
  return shell == "bash" and root:get_bash_complete() or root:get_zsh_complete()
end

-- Text for troff: a dot or a quote at the begin of a line would be a request, and a backslash
-- begins an escape.
local function plain(text)
  text = text:gsub("\\", "\\e"):gsub("%-", "\\-")
  return (text:gsub("\n([.'])", "\n\\&%1"):gsub("^([.'])", "\\&%1"))
end

-- As recipes/README.md has them.
local CODES <const> = {
  { "0", "done" }, { "1", "error in the recipe" }, { "2", "wrong usage" },
  { "3", "bad checkpoint, data or configuration; the machine lacks something that the run \z
    needs (a driver, NCCL); or the last checkpoint could not be saved" },
  { "4", "loss or gradients not finite" }, { "5", "ranks disagree, or one ended early" },
  { "6", "a rank showed no progress for --timeout seconds while others waited for it, \z
    or for --stuck seconds" },
  { "7", "a rank died" }, { "8", "out of memory" },
  { "75", "stopped on request, with a checkpoint" },
  { "128+n", "stopped by signal n, without a checkpoint" },
}

--- The man page, for man(1).
---@param commands string[][] names and what they do
---@param variables string[][] the same of the environment
---@return string
function shells.man(commands, variables)
  local _, parsers = whole(commands)
  local lines = {
    ('.TH MOONSHARD 1 "" "Moonshard %s"'):format(core.version), ".SH NAME",
    "moonshard \\- train models on many devices", ".SH SYNOPSIS", ".B moonshard", "COMMAND ...",
    ".SH DESCRIPTION",
    "Runs training recipes in Lua on one device, on many of a machine, or on many machines.",
    plain "`moonshard help NAME` shows what the reference says of a function, a class or a \z
      command; `moonshard docs --html FOLDER` writes the whole reference.",
    ".SH COMMANDS",
  }
  local function add(...) for _, line in ipairs { ... } do lines[#lines + 1] = line end end
  for i, command in ipairs(commands) do
    add((".SS moonshard %s"):format(command[1]), plain(command[2]) .. ".")
    if #parsers[i]._commands == 0 then
      add(".PP", ".nf", plain(parsers[i]:get_help()), ".fi")
    else
      for _, inner in ipairs(parsers[i]._commands) do
        add(".PP", ".nf", plain(inner:get_help()), ".fi")
      end
    end
  end
  add ".SH ENVIRONMENT"
  for _, variable in ipairs(variables) do
    add(".TP", ".B " .. plain(variable[1]), plain(variable[2]))
  end
  add ".SH EXIT STATUS"
  for _, code in ipairs(CODES) do add(".TP", ".B " .. code[1], plain(code[2])) end
  return table.concat(lines, "\n") .. "\n"
end

return shells
