-- moonshard help NAME: an entry of the reference in the terminal.
local find = require "moonshard.docs.find"
local launch = require "moonshard.base.launch"
local read = require "moonshard.docs.read"

local help = {}

-- A paragraph in lines of so many columns, each after an indent.
local function wrapped(text, indent, width)
  local lines, line = {}, indent
  for word in text:gmatch "%S+" do
    if #line + 1 + #word > width and line ~= indent then
      lines[#lines + 1] = line
      line = indent
    end
    line = line == indent and indent .. word or line .. " " .. word
  end
  if line ~= indent then lines[#lines + 1] = line end
  return lines
end

local function field_lines(field, short, indent, width)
  local lines = wrapped(read.signature(field, short), indent, width)
  -- What does not fit continues under the name.
  for i = 2, #lines do lines[i] = "  " .. lines[i] end
  local told = wrapped(field.text, indent .. "  ", width)
  table.move(told, 1, #told, #lines + 1, lines)
  for line in (field.example or ""):gmatch "[^\n]+" do
    lines[#lines + 1] = indent .. "    " .. line
  end
  return lines
end

local function add(list, more) table.move(more, 1, #more, #list + 1, list) end

-- A function with the options that it takes, and what is said of its block.
local function entry(field, all, width)
  local lines = {}
  add(lines, wrapped(read.signature(field), "", width))
  for i = 2, #lines do lines[i] = "    " .. lines[i] end
  add(lines, wrapped(field.text, "  ", width))
  for line in (field.example or ""):gmatch "[^\n]+" do lines[#lines + 1] = "      " .. line end
  for _, block in ipairs(find.options(field, all)) do
    lines[#lines + 1] = ""
    lines[#lines + 1] = "  " .. block.class .. (block.base and ", with all of " .. block.base or "")
    add(lines, wrapped(block.text, "    ", width))
    for _, option in ipairs(block.fields) do
      add(lines, field_lines(option, true, "    ", width))
    end
    add(lines, wrapped(block.notes, "    ", width))
  end
  for _, block in ipairs(all.blocks) do
    for _, one in ipairs(block.fields) do
      if one == field and block.notes ~= "" then
        lines[#lines + 1] = ""
        add(lines, wrapped(block.notes, "  ", width))
      end
    end
  end
  return lines
end

local function class_lines(block, width)
  local lines = { block.class .. (block.base and ": " .. block.base or "") }
  add(lines, wrapped(block.text, "  ", width))
  for _, field in ipairs(block.fields) do
    add(lines, field_lines(field, not field.parameters or find.is_table(block), "  ", width))
  end
  add(lines, wrapped(block.notes, "  ", width))
  return lines
end

--- The text of what has this name; nil, and the nearest name, where nothing has.
---@param name string
---@param width integer columns
---@return string?
---@return string? nearest
function help.text(name, width)
  local all = read.all()
  local fields, blocks, nearest = find.named(name, all)
  local texts = {}
  for _, field in ipairs(fields) do
    texts[#texts + 1] = table.concat(entry(field, all, width), "\n")
  end
  -- A class alone is shown whole, not in addition to a function of its name.
  for _, block in ipairs(#fields == 0 and blocks or {}) do
    texts[#texts + 1] = table.concat(class_lines(block, width), "\n")
  end
  if #texts == 0 then return nil, nearest end
  return table.concat(texts, "\n\n")
end

--- moonshard help NAME
---@param arguments string[]
---@return integer
function help.main(arguments)
  local process = launch.process
  local width = math.min(process and process.is_terminal() and process.columns() or 80, 100)
  for i, name in ipairs(arguments) do
    local text, nearest = help.text(name, width)
    if not text then
      launch.exit(2, ("nothing is called '%s'%s: `moonshard help` lists the commands, and \z
        `moonshard docs --html FOLDER` writes the whole reference"):format(name,
        nearest and (": did you mean %s?"):format(nearest) or ""))
    end
    print((i > 1 and "\n" or "") .. text)
  end
  return 0
end

return help
