-- moonshard help NAME: an entry of the reference in the terminal.
local find = require "moonshard.docs.find"
local launch = require "moonshard.base.launch"
local read = require "moonshard.docs.read"
local terminal = require "moonshard.docs.terminal"

local help = {}

local USAGE <const> = [[
Usage: moonshard help [NAME ...]

Shows what the reference says of a name:

  moonshard help Tensor          a class: its methods by kind
  moonshard help Tensor:matmul   a method; also "matmul"
  moonshard help ms.train        a function, with its options
  moonshard help on_nan          an option
  moonshard help state_dict      what a word of PyTorch, Keras or Hugging Face is called here
  moonshard help rules           the twelve rules that hold everywhere; "rule 8" is one of them
  moonshard help glossary        words of this library; "glossary bucket" is one of them
  moonshard help run             the switches of a command

Without a name it lists the commands. `moonshard docs --html FOLDER` writes the whole reference.]]

-- Columns of the text: the terminal's, within bounds.
local function columns()
  local process = launch.process
  return math.min(process and process.is_terminal() and process.columns() or 80, 100)
end

--- The text of what has this name; nil, and what to say, where nothing has.
---@param name string
---@param width integer columns
---@return string?
---@return string? message
function help.text(name, width)
  if name == "rules" then return terminal.rules(read.all(), width) end
  if name == "glossary" then return terminal.glossary(width) end
  local word = name:match "^glossary%s+(.+)$"
  if word then
    local found = find.word(word)
    if found then return terminal.entry({ name = found[1], word = found }, {}, width) end
    return nil, ("the glossary has no '%s': `moonshard help glossary` shows all words"):format(word)
  end
  local class = name:match "^(%S+)%s+errors$"
  local entry = class and find.answer(class, read.all()).entries[1]
  if entry and entry.blocks then return terminal.errors(entry, width) end
  local text, answer = terminal.answer(name, width)
  if text then return text end
  local said = ("nothing is called '%s'"):format(name)
  if answer.nearest then said = ("%s: did you mean %s?"):format(said, answer.nearest) end
  if #answer.mentions > 0 then
    said = ("%s These tell of it: %s."):format(answer.nearest and said or said .. ".",
      table.concat(answer.mentions, ", "))
  elseif not answer.nearest then
    said = said .. ": `moonshard help` lists the commands, and `moonshard docs --html FOLDER` \z
      writes the whole reference"
  end
  return nil, said
end

--- Under the help of a command: entries of the reference that have its name.
---@param name string
function help.show_others(name)
  local text = terminal.others(name, columns())
  if text then print("\n" .. text) end
end

-- Several words may be one name, as "early stopping", or several names.
local function names_of(arguments)
  local whole = table.concat(arguments, " ")
  if #arguments < 2 or not help.text(whole, 80) and not whole:find "^glossary " then
    return arguments
  end
  return { whole }
end

--- moonshard help NAME
---@param arguments string[]
---@return integer
function help.main(arguments)
  if arguments[1] == "--help" or arguments[1] == "-h" then
    print(USAGE)
    return 0
  end
  local width = columns()
  for i, name in ipairs(names_of(arguments)) do
    local text, message = help.text(name, width)
    if not text then launch.exit(2, message) end
    print((i > 1 and "\n" or "") .. text)
  end
  return 0
end

return help
