-- A text for recipes that are started without one: sayings in English, which a Debian package or
-- the installation brings, else this repository's own prose and code.
local core = require "moonshard.core"
local data = require "moonshard.data"
local data_files = require "moonshard.data.files"
local launch = require "moonshard.base.launch"
local shipped = require "moonshard.base.shipped"

local SAYINGS <const> = "/usr/share/games/fortunes"
local ABOUT <const> = "%d files of sayings in English, of Debian's package fortunes (BSD licence)"

-- Files that are not prose, or that not everybody finds funny.
local LEFT_OUT <const> = { ["ascii-art"] = true, drugs = true, ethnic = true, ["men-women"] = true }

-- The texts of the package in a folder, each once: beside each are its index (NAME.dat) and a
-- second name (NAME.u8). nil: there are none.
local function sayings(folder)
  local files = {}
  for _, name in ipairs(folder and core.list(folder) or {}) do
    local path = ("%s/%s"):format(folder, name)
    if not name:find("%.") and not LEFT_OUT[name] and core.exists(path) == "file" then
      files[#files + 1] = path
    end
  end
  return files[1] and files
end

-- What this repository says of itself, beside a recipe of it; of an installation, its recipes.
local function own_texts(recipe)
  local root = recipe:match "^(.*)/?recipes/[^/]*$" or "."
  if root == "" then root = "." end
  local files = {}
  for _, name in ipairs { "README.md", "engine", "lua", "bindings", "recipes" } do
    local path = ("%s/%s"):format(root, name)
    if core.exists(path) then files[#files + 1] = path end
  end
  return files
end

---@return ms.Dataset
return function()
  local files = sayings(SAYINGS) or sayings(shipped.folder "text")
  local texts = files or own_texts(launch.recipe or "")
  if #texts == 0 then
    core.raise "scripts.default_text: no text is here, neither Debian's package fortunes nor one \z
      of the installation: give data=FILE"
  end
  local set = assert(data.bytes(texts))
  data_files.tell(set, files and ABOUT:format(#files) or "this repository's own files")
  return set
end
