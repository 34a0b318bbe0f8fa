-- Reads the annotations of meta.lua and meta/ (LuaCATS) as data: the reference that `moonshard
-- help` and `moonshard docs` show.
--
-- A comment above a class or a field belongs to it, and so does what follows a field's type after
-- two spaces or more. Comments below the last field of a block tell of the whole block: errors of
-- its functions, mostly. Between "```lua" and "```" a comment has an example; what follows "-->" in
-- one of its lines is the value of that line (tests/spec/examples_spec.lua runs them). A line with
-- two hyphens between the fields of a class, "-- reductions: a note", names the kind of the fields
-- below it, up to the next such line.
local core = require "moonshard.core"

local read = {}

---@class ms.ReferenceField
---@field name string
---@field optional boolean
---@field type string
---@field text string the comment, a paragraph
---@field example? string lines of Lua
---@field parameters? table[] of a function: { name, optional, type }; the first may be self
---@field returns? string types of a function's results
---@field class string
---@field part string the file that has it
---@field kind? string what its class calls fields of this kind

---@class ms.ReferenceBlock                  a class, or a part of a class that is told in several
---@field class string
---@field base? string
---@field part string
---@field text string
---@field fields ms.ReferenceField[]
---@field notes string
---@field kinds table<string, string> what is said of the kinds of its fields

--- The parts in the order of the reference: file below meta/ and title.
read.parts = {
  { "", "The module" }, { "making", "Making tensors" }, { "tensor", "Tensors" },
  { "scopes", "Scopes, futures, streams, reports" }, { "nn", "Modules and models" },
  { "optim", "Optimizers" }, { "data", "Data" }, { "tokenizers", "Tokenizers" },
  { "chat", "Chat templates" },
  { "train", "Training" }, { "files", "Files, checkpoints, traces" },
  { "group", "Groups and collectives" }, { "ddp", "Data parallel models" },
  { "fsdp", "Sharded models" }, { "hooks", "Communication hooks" }, { "planners", "Planners" },
  { "pipeline", "Pipelines" },
}

--- Splits at a character that is outside of brackets and quotes.
---@param text string
---@param separator string
---@return string[]
function read.split(text, separator)
  local parts, depth, quoted, first = {}, 0, false, 1
  for i = 1, #text do
    local c = text:sub(i, i)
    if c == '"' then quoted = not quoted end
    if not quoted and c:find "[%(%[{<]" then depth = depth + 1 end
    if not quoted and c:find "[%)%]}>]" then depth = depth - 1 end
    if c == separator and depth == 0 and not quoted then
      parts[#parts + 1] = text:sub(first, i - 1)
      first = i + 1
    end
  end
  parts[#parts + 1] = text:sub(first)
  return parts
end

--- "name?: type" of an argument or a field.
---@param text string
---@return { name: string, optional: boolean, type: string }?
function read.declared(text)
  local name, optional, kind = text:match "^%s*([%w_.]+)(%??)%s*:%s*(.-)%s*$"
  return name and { name = name, optional = optional == "?", type = kind }
end

local function parameters_of(type)
  local list = {}
  local inner = type:match "^fun(%b())":sub(2, -2)
  if not inner:find "%S" then return list end
  for _, part in ipairs(read.split(inner, ",")) do
    list[#list + 1] = part:match "^%s*self%s*$" and { name = "self", type = "self" }
      or read.declared(part)
  end
  return list
end

--- The type at the beginning of a text, and the comment after it: two spaces or more are between.
---@param text string
---@return string type
---@return string comment
function read.type_of(text)
  local depth = 0
  for i = 1, #text do
    local c = text:sub(i, i)
    if c:find "[%(%[{<]" then depth = depth + 1 elseif c:find "[%)%]}>]" then depth = depth - 1 end
    if depth == 0 and text:sub(i, i + 1) == "  " then
      return text:sub(1, i - 1), text:sub(i):match "^%s*(.*)$"
    end
  end
  return text, ""
end

-- Two comments as one paragraph.
local function joined(first, second)
  if first == "" or second == "" then return first .. second end
  return first .. (first:find "[.:;]$" and " " or ". ") .. second
end

local function field_of(name, optional, rest, above, example, block)
  local type, beside = read.type_of(rest)
  local field = {
    name = name, optional = optional == "?", type = type, text = joined(beside, above),
    example = example, class = block.class, part = block.part, kind = block.kind,
  }
  if type:match "^fun%b()" then
    field.parameters = parameters_of(type)
    field.returns = type:match "^fun%b():%s*(.*)$"
  end
  return field
end

--- The blocks of a file, and its aliases: { name, type, text }.
---@param text string
---@param part string
---@return ms.ReferenceBlock[]
---@return table[]
function read.blocks(text, part)
  local blocks, aliases, block, above = {}, {}, nil, ""
  local example, open -- the lines of the last example, and whether it goes on
  local function finish()
    if block then block.notes = above end
    block, above = nil, ""
  end
  for line in text:gmatch "([^\n]*)\n" do
    local class, more = line:match "^%-%-%-@class%s+([%w_.]+)(.*)$"
    local field, optional, rest = line:match "^%-%-%-@field%s+([%w_]+)(%??)%s+(.*)$"
    local call = line:match "^%-%-%-@overload%s+(fun%(.+)$"
    local alias, meaning = line:match "^%-%-%-@alias%s+([%w_.]+)%s*(.*)$"
    local choice = line:match "^%-%-%-|%s*(.+)$"
    local comment = line:match "^%-%-%- (.*)$"
    local section = line:match "^%-%- (.+)$"
    if class then
      local own = above
      if block then block.notes = "" end
      local base, beside = more:match "^:%s*([%w_.]+)%s*(.*)$"
      block = {
        class = class, base = base, part = part, fields = {}, notes = "", kinds = {},
        text = joined(beside or more:match "^%s*(.*)$", own),
      }
      blocks[#blocks + 1], above = block, ""
    elseif field and block then
      local shown = example and table.concat(example, "\n")
      table.insert(block.fields, field_of(field, optional, rest, above, shown, block))
      above, example = "", nil
    elseif call and block then -- the table is a function, too: ms.fsdp(...), which has its text
      local owner, name = block.class:match "^(.*)%.([%w_]+)$"
      local own = { class = owner, part = part, fields = {}, notes = "", text = "", kinds = {} }
      local shown = example and table.concat(example, "\n")
      own.fields[1] = field_of(name, "", call, block.text, shown, own)
      table.insert(blocks, #blocks, own)
      block.text, above, example = "", "", nil
    elseif alias then
      local kind, beside = read.type_of(meaning)
      aliases[#aliases + 1] = {
        name = alias, type = kind, text = joined(beside, above), part = part,
      }
      above = ""
    elseif choice then -- of the alias above it
      local last = aliases[#aliases]
      last.type = last.type == "" and choice or last.type .. "|" .. choice
    elseif comment == "```lua" then example, open = {}, true
    elseif comment == "```" then open = false
    elseif open then example[#example + 1] = comment or ""
    elseif comment then above = above == "" and comment or above .. " " .. comment
    elseif section and block then
      local called, note = section:match "^(.-): (.*)$"
      block.kind = called or section
      block.kinds[block.kind] = note or block.kinds[block.kind] or ""
    elseif line == "" then finish() end
  end
  finish()
  return blocks, aliases
end

--- The rules at the head of meta.lua: what is said before them, each rule as a paragraph, and what
--- is said after them.
---@param text string
---@return { before: string, list: string[], after: string }
function read.rules(text)
  local rules = { before = "", list = {}, after = "" }
  for line in text:gmatch "\n%-%-([^-\n][^\n]*)" do
    local number, first = line:match "^ +(%d+)%. (.*)$"
    local more = line:match "^%s*(.*)$"
    if number then rules.list[#rules.list + 1] = first
    elseif #rules.list == 0 then
      -- What is above tells of the file.
      if more:find "rules hold" then rules.before = more end
    elseif line:find "^ +" and not line:find "^ %S" then
      rules.list[#rules.list] = rules.list[#rules.list] .. " " .. more
    else rules.after = rules.after == "" and more or rules.after .. " " .. more end
  end
  return rules
end

-- The folder of this library's files.
local function folder()
  return (package.searchpath("moonshard.docs.read", package.path)
    :gsub("/docs/read%.lua$", ""))
end

--- All of the reference: the blocks and aliases of all parts in order, and the rules.
---@return { blocks: ms.ReferenceBlock[], aliases: table[], rules: table }
function read.all()
  local result = { blocks = {}, aliases = {} }
  for _, part in ipairs(read.parts) do
    local path = folder() .. (part[1] == "" and "/meta.lua" or "/meta/" .. part[1] .. ".lua")
    local text = assert(core.file_read(path))
    local blocks, aliases = read.blocks(text, part[1])
    table.move(blocks, 1, #blocks, #result.blocks + 1, result.blocks)
    table.move(aliases, 1, #aliases, #result.aliases + 1, result.aliases)
    if part[1] == "" then result.rules = read.rules(text) end
  end
  return result
end

--- The name by which a reader calls a field: "ms.train", "ms.optim.adamw", "Tensor:matmul",
--- "DDPOptions.bucket_mb".
---@param field ms.ReferenceField
---@return string
function read.full_name(field)
  local first = field.parameters and field.parameters[1]
  local class = field.class
  if first and first.name == "self" then return class:match "[^.]*$" .. ":" .. field.name end
  -- Classes of objects and options begin with a capital letter; parts of the module do not.
  if class:match "^ms%.%u" then class = class:sub(4) end
  return class .. "." .. field.name
end

--- How a function is called, or a field with its type.
---@param field ms.ReferenceField
---@param short? boolean as one of its class's fields: without the class, a function by its type
---@return string
function read.signature(field, short)
  local name = short and field.name or read.full_name(field)
  if short or not field.parameters then
    return ("%s%s: %s"):format(name, field.optional and "?" or "", field.type)
  end
  local arguments = {}
  for _, one in ipairs(field.parameters) do
    if one.name ~= "self" then
      arguments[#arguments + 1] = ("%s%s: %s"):format(one.name, one.optional and "?" or "",
        one.type)
    end
  end
  local text = ("%s(%s)"):format(name, table.concat(arguments, ", "))
  return field.returns and text .. ": " .. field.returns or text
end

return read
