-- Entries of the reference as text for a terminal of so many columns.
local find = require "moonshard.docs.find"
local glossary = require "moonshard.docs.glossary"
local read = require "moonshard.docs.read"

local terminal = {}

-- What is said of all functions of a class is shown with each of them up to so many bytes.
local SHORT <const> = 240

-- Lines of a terminal's screen. A list of members leaves its errors out where it would be longer.
local SCREEN <const> = 24

local function add(list, more) table.move(more, 1, #more, #list + 1, list) end

-- A paragraph in lines of so many columns, each after an indent; the lines after the first one
-- after `later`.
local function wrapped(text, indent, width, later)
  local lines, line, own = {}, indent, indent
  for word in text:gmatch "%S+" do
    if #line + 1 + #word > width and line ~= own then
      lines[#lines + 1] = line
      own = later or indent
      line = own
    end
    line = line == own and own .. word or line .. " " .. word
  end
  if line ~= own then lines[#lines + 1] = line end
  return lines
end

-- The first sentence of a text.
local function sentence(text)
  for stop in text:gmatch "()[.;] " do
    local before = text:sub(1, stop - 1)
    -- A stop within brackets, or after an abbreviation, ends nothing.
    local _, opened = before:gsub("%(", "")
    local _, closed = before:gsub("%)", "")
    if opened == closed and not before:find "%f[%w]%w%.?$" then return before end
  end
  return (text:gsub("%.$", ""))
end

local function example_lines(field, indent)
  local lines = {}
  for line in (field.example or ""):gmatch "[^\n]+" do lines[#lines + 1] = indent .. line end
  return lines
end

local function field_lines(field, short, indent, width)
  local lines = wrapped(read.signature(field, short), indent, width, indent .. "  ")
  add(lines, wrapped(field.text, indent .. "  ", width))
  add(lines, example_lines(field, indent .. "    "))
  return lines
end

-- What is said of a block in two parts: sentences of one function ("encode, decode: ..."), and
-- those of all.
local function notes_of(block, name)
  local own, general, members = {}, {}, {}
  for _, field in ipairs(block.fields) do members[field.name] = true end
  for part in (block.notes:gsub("^Errors:%s*", "") .. " "):gmatch "(.-%.) +" do
    local names, rest = part:match "^([%w_, ]-): (.*)$"
    local is_list, has_name = names ~= nil, false
    for one in (names or ""):gmatch "[^, ]+" do
      is_list = is_list and members[one] == true
      has_name = has_name or one == name
    end
    if not is_list then general[#general + 1] = part
    elseif has_name then own[#own + 1] = rest end
  end
  return table.concat(own, " "), table.concat(general, " ")
end

local function block_of(field, all)
  for _, block in ipairs(all.blocks) do
    for _, one in ipairs(block.fields) do if one == field then return block end end
  end
  return nil
end

-- What is said of the errors of a function: its own, and those of all functions of its block, once
-- in an answer.
local function error_lines(field, all, width, told)
  local block = block_of(field, all)
  local lines = {}
  if not block or block.notes == "" or not field.parameters then return lines end
  local own, general = notes_of(block, field.name)
  local is_errors = block.notes:find "^Errors:"
  local text = own
  if not told[block] and #general <= SHORT then
    text, told[block] = (own .. " " .. general):match "^%s*(.-)$", true
  end
  if text ~= "" then
    lines[1] = ""
    add(lines, wrapped((is_errors and "Errors: " or "") .. text, "  ", width))
  end
  if #general > SHORT and not told[block] and block.class:match "^ms%.%u" then
    told[block] = true
    if text == "" then lines[1] = "" end
    add(lines, wrapped(("Errors of the class: `moonshard help %s errors`.")
      :format(block.class:sub(4)), "  ", width))
  end
  return lines
end

-- A function with the options that it takes, and its errors.
local function function_lines(field, all, width, told)
  local lines = {}
  add(lines, wrapped(read.signature(field), "", width, "    "))
  add(lines, wrapped(field.text, "  ", width))
  add(lines, example_lines(field, "      "))
  for _, block in ipairs(find.options(field, all)) do
    lines[#lines + 1] = ""
    lines[#lines + 1] = "  " .. block.class .. (block.base and ", with all of " .. block.base or "")
    add(lines, wrapped(block.text, "    ", width))
    for _, option in ipairs(block.fields) do
      add(lines, field_lines(option, true, "    ", width))
    end
    add(lines, wrapped(block.notes, "    ", width))
  end
  add(lines, error_lines(field, all, width, told))
  return lines
end

-- The members of a class by kind, in the order in which kinds begin: { kind, names }. Kinds of
-- a class that is told in several files are the parts of the reference.
local function kinds_of(blocks)
  local list, by_name, titles, seen = {}, {}, {}, {}
  for _, part in ipairs(read.parts) do titles[part[1]] = part[2] end
  for _, block in ipairs(blocks) do
    for _, field in ipairs(block.fields) do
      local kind = field.kind or #blocks > 1 and titles[block.part] or "other"
      if not by_name[kind] then
        by_name[kind] = { kind, {} }
        list[#list + 1] = by_name[kind]
      end
      -- A part that is also a function, as ms.fsdp, is there twice.
      if not seen[field.name] then table.insert(by_name[kind][2], field.name) end
      seen[field.name] = true
    end
  end
  return list
end

local function has_kinds(blocks)
  for _, block in ipairs(blocks) do
    for _, field in ipairs(block.fields) do if field.kind then return true end end
  end
  return #blocks > 1 and not find.is_table(blocks[1])
end

-- The names of the members in a table: kinds at the left.
local function kind_lines(blocks, width)
  local lines, kinds, room = {}, kinds_of(blocks), 0
  for _, kind in ipairs(kinds) do room = math.max(room, #kind[1]) end
  room = math.min(room, 18)
  local later = (" "):rep(room + 4)
  for _, kind in ipairs(kinds) do
    local head = "  " .. kind[1] .. (" "):rep(room - #kind[1]) .. "  "
    if #kind[1] > room then
      lines[#lines + 1] = "  " .. kind[1]
      head = later
    end
    add(lines, wrapped(table.concat(kind[2], " "), head, width, later))
  end
  return lines
end

-- How one asks for a member of a class.
local function member_name(class)
  return class:match "^ms%.%u" and class:sub(4) .. ":NAME" or class .. ".NAME"
end

-- The members of an object or a part of the module, with a sentence of each.
local function member_lines(blocks, width)
  local lines = {}
  for _, block in ipairs(blocks) do
    for _, field in ipairs(block.fields) do
      add(lines, wrapped(read.signature(field, not field.parameters), "  ", width, "      "))
      add(lines, wrapped(sentence(field.text), "    ", width))
    end
  end
  return lines
end

--- What is said of all members of a class: its errors.
---@param entry ms.ReferenceEntry of a class
---@param width integer columns
---@return string
function terminal.errors(entry, width)
  local lines = {}
  for _, block in ipairs(entry.blocks) do add(lines, wrapped(block.notes, "", width)) end
  return table.concat(lines, "\n")
end

-- A class whose members are functions. A list of many has their names by kind, and what is said
-- of all of them where the screen has room for it.
local function object_lines(blocks, notes, lines, width)
  local class, is_brief = blocks[1].class, has_kinds(blocks)
  add(lines, is_brief and kind_lines(blocks, width) or member_lines(blocks, width))
  if blocks[1].base then lines[#lines + 1] = "  and all of " .. blocks[1].base end
  if not is_brief then return add(lines, notes) end
  local how, has_room = ("`moonshard help %s` shows one."):format(member_name(class)), true
  if #notes > 0 and #lines + #notes > SCREEN - 2 then
    has_room = false
    how = ("%s, `help %s errors` their errors."):format(how:sub(1, -2), class:match "^ms%.(.*)$")
  end
  add(lines, wrapped(how, "  ", width))
  if has_room then add(lines, notes) end
end

local function class_lines(entry, width)
  local blocks = entry.blocks
  local first, notes = blocks[1], {}
  local lines = { first.class .. (first.base and ": " .. first.base or "") }
  for _, block in ipairs(blocks) do
    add(lines, wrapped(block.text, "  ", width))
    -- What is said of the module's functions is shown with them.
    if first.class ~= "ms" then add(notes, wrapped(block.notes, "  ", width)) end
  end
  if not find.is_table(first) then
    object_lines(blocks, notes, lines, width)
    return lines
  end
  for _, block in ipairs(blocks) do
    for _, field in ipairs(block.fields) do add(lines, field_lines(field, true, "  ", width)) end
  end
  add(lines, notes)
  return lines
end

local function rule_lines(number, all, width)
  return wrapped(all.rules.list[number], ("%2d. "):format(number), width, "    ")
end

--- The rules that hold everywhere.
---@param all table of read.all
---@param width integer columns
---@return string
function terminal.rules(all, width)
  local lines = wrapped(all.rules.before, "", width)
  for number in ipairs(all.rules.list) do add(lines, rule_lines(number, all, width)) end
  lines[#lines + 1] = ""
  add(lines, wrapped(all.rules.after, "", width))
  return table.concat(lines, "\n")
end

local function word_lines(word, width)
  return wrapped(("%s: %s."):format(word[1], word[2]), "", width, "    ")
end

--- The words of the glossary.
---@param width integer columns
---@return string
function terminal.glossary(width)
  local lines = {}
  for _, word in ipairs(glossary) do add(lines, word_lines(word, width)) end
  return table.concat(lines, "\n")
end

--- One entry as text.
---@param entry ms.ReferenceEntry
---@param all table of read.all
---@param width integer columns
---@param told? table<ms.ReferenceBlock, boolean> whose errors this answer has told
---@return string
function terminal.entry(entry, all, width, told)
  local lines
  if entry.field then lines = function_lines(entry.field, all, width, told or {})
  elseif entry.blocks then lines = class_lines(entry, width)
  elseif entry.alias then
    lines = wrapped(("%s = %s"):format(entry.name, entry.alias.type), "", width, "    ")
    add(lines, wrapped(entry.alias.text, "  ", width))
  elseif entry.word then lines = word_lines(entry.word, width)
  else lines = rule_lines(entry.rule, all, width) end
  return table.concat(lines, "\n")
end

-- An entry in a line or two.
local function brief(entry, all, width)
  local text = entry.field and entry.field.text or entry.alias and entry.alias.text
    or entry.blocks and entry.blocks[1].text or entry.rule and all.rules.list[entry.rule] or ""
  local told = sentence(text)
  return wrapped(entry.name .. (told ~= "" and " - " .. told or ""), "  ", width, "    ")
end

local function synonym_lines(name, row, width)
  local said = row.none and ("There is nothing called '%s' here. The nearest: %s."):format(name,
    table.concat(row.names, ", "))
    or ("'%s' is here: %s."):format(name, table.concat(row.names, ", "):gsub(":(%d)", " %1"))
  return wrapped((said .. " " .. row.text):gsub("rule:(%d)", "rule %1"), "", width)
end

-- The names of other entries, not more than fit a line or two.
local function also_lines(also, width)
  local names, seen = {}, {}
  for _, entry in ipairs(also) do
    if not seen[entry.name] then names[#names + 1] = entry.name end
    seen[entry.name] = true
  end
  if #names == 0 then return {} end
  local shown = table.concat(names, ", ", 1, math.min(#names, 10))
  if #names > 10 then shown = ("%s and %d more"):format(shown, #names - 10) end
  return wrapped("See also: " .. shown, "", width, "  ")
end

--- The names of entries that have a name which is that of a command, too; nil where none has.
---@param name string
---@param width integer columns
---@return string?
function terminal.others(name, width)
  local answer = find.answer(name, read.all())
  if not answer.named then return nil end
  local list = {}
  for _, entries in ipairs { answer.entries, answer.also } do
    for _, entry in ipairs(entries) do
      if not (entry.field and not entry.field.parameters) then list[#list + 1] = entry end
    end
  end
  return #list > 0 and table.concat(also_lines(list, width), "\n") or nil
end

--- What the reference answers to a name; nil where nothing has it, and what is nearest.
---@param name string
---@param width integer columns
---@return string?
---@return ms.ReferenceAnswer
function terminal.answer(name, width)
  local all = read.all()
  local answer = find.answer(name, all)
  if #answer.entries == 0 and not answer.synonym then return nil, answer end
  local texts, told = {}, {}
  local is_foreign = answer.synonym and not answer.named
  if is_foreign then
    texts[1] = table.concat(synonym_lines(name, answer.synonym, width), "\n")
    if answer.entries[1] then
      texts[2] = terminal.entry(answer.entries[1], all, width, told)
    end
    local others = {}
    for i = 2, #answer.entries do add(others, brief(answer.entries[i], all, width)) end
    if #others > 0 then texts[#texts + 1] = table.concat(others, "\n") end
    if answer.word then
      texts[#texts + 1] = table.concat(word_lines(answer.word, width), "\n")
    end
    local also = also_lines(answer.also, width)
    if #also > 0 then texts[#texts + 1] = table.concat(also, "\n") end
  else
    for i, entry in ipairs(answer.entries) do
      texts[i] = terminal.entry(entry, all, width, told)
    end
    local also = also_lines(answer.also, width)
    if answer.synonym then add(also, synonym_lines(name, answer.synonym, width)) end
    -- A class fills a screen.
    local last = answer.entries[#texts]
    if #also > 0 and last.blocks then
      texts[#texts] = texts[#texts] .. "\n" .. table.concat(also, "\n")
    elseif #also > 0 then texts[#texts + 1] = table.concat(also, "\n") end
  end
  return table.concat(texts, "\n\n"), answer
end

return terminal
