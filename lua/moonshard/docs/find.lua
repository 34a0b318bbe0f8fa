-- Finds entries of the reference by what a reader calls them.
local core = require "moonshard.core"
local read = require "moonshard.docs.read"

local find = {}

-- The forms under which an entry is found, in lower case, from the longest to its bare name.
local function forms(field)
  local full = read.full_name(field):lower()
  local list = { full, (full:gsub(":", ".")), field.name:lower() }
  list[#list + 1] = list[2]:match "^ms%.(.*)$"
  if field.class:match "^ms%.%u" then list[#list + 1] = "ms." .. list[2] end
  return list
end

--- What matches a name: fields and classes; where none does, the nearest names.
---@param name string
---@param all table of read.all
---@return ms.ReferenceField[] fields
---@return ms.ReferenceBlock[] blocks of classes of this name
---@return string? nearest
function find.named(name, all)
  local wanted = name:lower():gsub("%(.*$", "")
  local exact, bare, blocks, names = {}, {}, {}, {}
  for _, block in ipairs(all.blocks) do
    local class = block.class:lower()
    if class == wanted or class == "ms." .. wanted then blocks[#blocks + 1] = block end
    for _, field in ipairs(block.fields) do
      local matched = {}
      for _, form in ipairs(forms(field)) do matched[form] = true end
      if matched[wanted] then
        local list = field.name:lower() == wanted and bare or exact
        list[#list + 1] = field
      end
      if field.parameters then names[#names + 1] = field.name end
    end
  end
  -- Functions come before options of the same name, and those of the module first.
  local fields = #exact > 0 and exact or bare
  local functions = {}
  for _, field in ipairs(fields) do
    if field.parameters then
      table.insert(functions, field.class == "ms" and 1 or #functions + 1, field)
    end
  end
  fields = #functions > 0 and functions or fields
  if #fields + #blocks > 0 then return fields, blocks end
  return fields, blocks, core.nearest(name:match "[^.:]*$", names)
end

--- Whether values of the block's class are objects: it has methods.
---@param block ms.ReferenceBlock
---@return boolean
function find.is_object(block)
  for _, field in ipairs(block.fields) do
    local first = field.parameters and field.parameters[1]
    if first and first.name == "self" then return true end
  end
  return false
end

--- Whether the block's fields are values in a table: options and the like.
---@param block ms.ReferenceBlock
---@return boolean
function find.is_table(block)
  return block.class:match "^ms%.%u" ~= nil and not find.is_object(block)
end

--- The tables of options that a function takes: blocks of their classes.
---@param field ms.ReferenceField
---@param all table of read.all
---@return ms.ReferenceBlock[]
function find.options(field, all)
  local classes, list = {}, {}
  for _, one in ipairs(field.parameters or {}) do
    for class in one.type:gmatch "ms%.%u[%w_]*" do classes[class] = true end
  end
  for _, block in ipairs(all.blocks) do
    if classes[block.class] and #block.fields > 0 and find.is_table(block) then
      list[#list + 1] = block
    end
  end
  return list
end

return find
