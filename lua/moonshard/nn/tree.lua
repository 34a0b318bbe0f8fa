-- What print(model) shows: the tree of a module's parts, with their parameters' shapes and counts.
local core = require "moonshard.core"
local log = require "moonshard.base.log"
local ownership = require "moonshard.base.ownership"

local BYTES = require "moonshard.base.dtype_bytes"

local function size_of(bytes)
  if bytes < 1 << 10 then return ("%d bytes"):format(bytes) end
  return bytes < 1 << 20 and ("%.1f KiB"):format(bytes / (1 << 10))
    or ("%.1f MiB"):format(bytes / (1 << 20))
end

-- The shape of a tensor, or of the numbers of which codes are.
local function shape_of(t)
  local numbers = ownership.coded[t]
  local shape = ("[%s]"):format(table.concat(numbers and numbers.shape or t:shape(), ", "))
  return numbers and ("%s in %s"):format(shape, tostring(numbers.codec)) or shape
end

local function count_of(t)
  local numbers, count = ownership.coded[t], 1
  for _, size in ipairs(numbers and numbers.shape or t:shape()) do count = count * size end
  return count
end

local function state_of(value)
  local meta = type(value) == "table" and getmetatable(value)
  return type(meta) == "table" and meta.module and meta or nil
end

-- Texts for the parameters and buffers that are direct fields of a module. A tied parameter is
-- counted at its first place.
local function own_of(state, tree)
  local texts, count = {}, 0
  for _, key in ipairs(state.order) do
    local value = rawget(state.fields, key)
    if core.is_tensor(value) then
      local text = ("%s %s"):format(key, shape_of(value))
      if not core.is_parameter(value) then text = text .. " buffer"
      elseif tree.seen[value] then text = text .. " tied"
      else
        tree.seen[value] = true
        count = count + count_of(value)
        tree.bytes = tree.bytes + value:numel() * BYTES[value:dtype()]
        tree.dtypes[value:dtype()] = true
        if not value:requires_grad() then text = text .. " frozen" end
      end
      texts[#texts + 1] = text
    end
  end
  return texts, count
end

-- A module as { label, count, own = texts, parts = list of such }.
local function node_of(object, label, tree)
  local state = state_of(object)
  if tree.modules[state.fields] then
    return {
      label = label,
      class = tostring(state.class.class_name) .. " (shared)",
      count = 0,
      own = {},
      parts = {},
    }
  end
  tree.modules[state.fields] = true
  local own, count = own_of(state, tree)
  local node = {
    label = label, class = state.class.class_name, count = count, own = own, parts = {},
  }
  for _, key in ipairs(state.order) do
    local value = rawget(state.fields, key)
    if state_of(value) then
      local part = node_of(value, math.type(key) == "integer" and key - 1 or key, tree)
      node.parts[#node.parts + 1], node.count = part, node.count + part.count
    end
  end
  return node
end

-- The text of a node after its label, and the lines below it.
local function text_of(node, depth)
  if node.head then return node.head, node.lines end
  local own = #node.own > 0 and ("  %s"):format(table.concat(node.own, ", ")) or ""
  local lines, i = {}, 1
  while i <= #node.parts do
    local part = node.parts[i]
    local head, below = text_of(part, depth + 1)
    -- Equal neighbours in a list are shown once.
    local last = i
    while math.type(part.label) == "integer" and node.parts[last + 1] do
      local next_head, next_below = text_of(node.parts[last + 1], depth + 1)
      if next_head ~= head or table.concat(next_below, "\n") ~= table.concat(below, "\n") then
        break
      end
      last = last + 1
    end
    local times = last > i
      and ("%s to %s: %d x "):format(part.label, node.parts[last].label, last - i + 1)
      or ("%s: "):format(part.label)
    lines[#lines + 1] = ("  "):rep(depth) .. times .. head
    table.move(below, 1, #below, #lines + 1, lines)
    i = last + 1
  end
  node.head, node.lines = ("%s, %s%s"):format(node.class, log.grouped(node.count), own), lines
  return node.head, lines
end

--- The tree of a module, with a line for each module: name, class, number of parameters in it and
--- below it, and its own tensors.
---@param object ms.Module
---@return string
return function(object)
  local tree = { seen = {}, modules = {}, dtypes = {}, bytes = 0 }
  local node = node_of(object, "", tree)
  local dtypes = {}
  for dtype in pairs(tree.dtypes) do dtypes[#dtypes + 1] = dtype end
  table.sort(dtypes)
  local head, lines = text_of(node, 1)
  local total = ("%s: %s parameters"):format(node.class, log.grouped(node.count))
  if #dtypes > 0 then
    total = ("%s (%s, %s)"):format(total, table.concat(dtypes, " and "), size_of(tree.bytes))
  end
  if #node.own > 0 then total = total .. head:match "  .*$" end
  return table.concat({ total, table.unpack(lines) }, "\n")
end
