-- A text for recipes that are started without one: sayings in English, which a Debian package
-- brings, else this repository's own prose and code.
local core = require "moonshard.core"
local data = require "moonshard.data"
local data_files = require "moonshard.data.files"
local launch = require "moonshard.base.launch"

local SAYINGS <const> = "/usr/share/games/fortunes"
local ABOUT <const> = "%d files of sayings in English, of Debian's package fortunes (BSD licence)"

-- Files that are not prose, or that not everybody finds funny.
local LEFT_OUT <const> = { ["ascii-art"] = true, drugs = true, ethnic = true, ["men-women"] = true }

-- The texts of the package, each once: beside each are its index (NAME.dat) and a second name
-- (NAME.u8). nil: it is not installed.
local function sayings()
  local files = {}
  for _, name in ipairs(core.list(SAYINGS) or {}) do
    local path = SAYINGS .. "/" .. name
    if not name:find("%.") and not LEFT_OUT[name] and core.exists(path) == "file" then
      files[#files + 1] = path
    end
  end
  return files[1] and files
end

-- What this repository says of itself, beside a recipe of it.
local function own_texts(recipe)
  local root = recipe:match "^(.*)/?recipes/[^/]*$" or "."
  if root == "" then root = "." end
  return {
    root .. "/README.md", root .. "/engine", root .. "/lua", root .. "/bindings",
    root .. "/recipes",
  }
end

---@return ms.Dataset
return function()
  local files = sayings()
  local set = assert(data.bytes(files or own_texts(launch.recipe or "")))
  data_files.tell(set, files and ABOUT:format(#files) or "this repository's own files")
  return set
end
