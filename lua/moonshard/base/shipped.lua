-- The recipes and the text that come with an installation: PREFIX/share/moonshard, beside the Lua
-- files in PREFIX/share/lua/5.4. A rock has them among its Lua files, since luarocks installs
-- nothing elsewhere. In a build tree they are links to the checkout's.
local core = require "moonshard.core"

local shipped = {}

local LIBRARY <const> =
  debug.getinfo(1, "S").source:match "^@(.*)/moonshard/base/shipped%.lua$" or "."

-- The first of these that is a folder.
local function first_folder(paths)
  for _, path in ipairs(paths) do
    if core.exists(path) == "folder" then return path end
  end
end

--- The folder of recipes, or of texts; nil: none came with this installation.
---@param name "recipes"|"text"
---@return string?
function shipped.folder(name)
  -- Not "LIBRARY/../..": the last part may be a link.
  local share = LIBRARY:match "^(.*)/[^/]+/[^/]+$"
  return first_folder { share and ("%s/moonshard/%s"):format(share, name) or "",
    ("%s/moonshard/share/%s"):format(LIBRARY, name) }
end

--- The path of a file as documents name it, "recipes/hooks/dgc.lua", from the folder in which the
--- user is, else from the installation; the same text where there is no such file.
---@param path string
---@return string
function shipped.find(path)
  local rest = path:match "^recipes/(.+)$"
  local folder = rest and not core.exists(path) and shipped.folder "recipes"
  local found = folder and ("%s/%s"):format(folder, rest)
  return found and core.exists(found) == "file" and found or path
end

-- Names of the Lua files in a folder, without ending.
local function names_in(folder)
  local names = {}
  for _, file in ipairs(folder and core.list(folder) or {}) do
    names[#names + 1] = file:match "^(.+)%.lua$"
  end
  return names
end

--- The recipes that have a name here, in the user's folder recipes/ or the installation, as a list
--- in text.
---@return string[] names sorted
---@return string text
function shipped.recipes()
  local known, seen = {}, {}
  for _, folder in ipairs { "recipes", shipped.folder "recipes" } do
    for _, one in ipairs(names_in(folder)) do
      if not seen[one] then known[#known + 1], seen[one] = one, true end
    end
  end
  table.sort(known)
  return known, "recipes: " .. (#known > 0 and table.concat(known, ", ")
    or "none is installed; give the path of a Lua file")
end

--- The file of a recipe that a user names: a path, or the bare name of one in recipes/ of the
--- user's folder or of the installation. nil and a message: no recipe has this bare name.
---@param name string
---@return string? path
---@return string? message
function shipped.recipe(name)
  if core.exists(name) == "file" or not name:find "^[%w_]+$" then return shipped.find(name) end
  local path = shipped.find(("recipes/%s.lua"):format(name))
  if core.exists(path) == "file" then return path end
  local known, text = shipped.recipes()
  local nearest = core.nearest(name, known)
  return nil, ("there is no recipe '%s'%s\n%s"):format(name,
    nearest and (": did you mean '%s'?"):format(nearest) or "", text)
end

return shipped
