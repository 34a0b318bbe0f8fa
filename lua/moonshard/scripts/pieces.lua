-- The pieces of a method: what a file of hook=, gather=, optimizer= or local= may give together, in
-- one table. Each option's own kind of file gives one piece.
local core = require "moonshard.core"

local pieces = {}

--- The names of the fields of ms.Pieces, in the order in which messages name them.
pieces.names = { "link", "local", "optimizer", "gather", "shard" }

local types = {
  link = "function|table", ["local"] = "function", optimizer = "function", gather = "table",
  shard = "table",
}
local gather_names = { before_gather = true, after_gather = true }

--- What is expected beside the thing that a kind of file gives by itself.
pieces.expected = "or a table of pieces (link, local, optimizer, gather, shard)"

--- Raises for a table of gathers that has anything but the two functions, or none of them.
---@param path string
---@param value table
---@return { before_gather?: function, after_gather?: function }
function pieces.check_gather(path, value)
  for key, f in pairs(value) do
    if not gather_names[key] or type(f) ~= "function" then
      core.raise(("'%s': %s = %s: the functions before_gather and after_gather are expected")
        :format(path, tostring(key), tostring(f)))
    end
  end
  if next(value) == nil then
    core.raise(("'%s': a table with before_gather, after_gather or both is expected"):format(path))
  end
  return value
end

--- Whether a value is a table of pieces: it has no metatable, and one of the names.
---@param value any
---@return boolean
function pieces.is(value)
  if type(value) ~= "table" or getmetatable(value) ~= nil then return false end
  for _, name in ipairs(pieces.names) do if value[name] ~= nil then return true end end
  return false
end

--- The value if it is a table of pieces, else nil. Raises for one that has something else, too.
---@param path string of the file that gave it
---@param value any
---@return ms.Pieces?
function pieces.of(path, value)
  if not pieces.is(value) then return nil end
  for key, one in pairs(value) do
    local wanted = types[key]
    if not wanted then
      local near = core.nearest(tostring(key), pieces.names)
      core.raise(("'%s': a table of pieces has no '%s'%s; it has %s"):format(path, tostring(key),
        near and (": did you mean '%s'?"):format(near) or "", table.concat(pieces.names, ", ")))
    end
    local callable = key == "link" and getmetatable(one)
    if not ("|" .. wanted .. "|"):find("|" .. type(one) .. "|", 1, true)
        or key == "link" and type(one) == "table" and not (callable and callable.__call) then
      core.raise(("'%s': %s is a %s, and a %s is expected"):format(path, key, type(one),
        key == "link" and "link" or wanted))
    end
  end
  if value.gather then pieces.check_gather(path, value.gather) end
  return value
end

return pieces
