-- The files that data sets and loaders were read from: what is trained on is no validation.
local data_files = {}

-- A data set or loader -> the paths of its files: one list for all parts of a data set.
local files = setmetatable({}, { __mode = "k" })

-- One spelling of a path: a path that is a part of another one is the folder of its file.
local function plain(path)
  local text = path:gsub("/+", "/")
  local count
  repeat text, count = text:gsub("/%./", "/") until count == 0
  return (text:gsub("^%./", "") .. "/"):gsub("/+$", "/")
end

--- Notes the files, or folders, of a new data set.
---@param set ms.Dataset
---@param paths string[]
function data_files.note(set, paths) files[set] = paths end

--- Notes that a part of a data set, or a loader of it, has its files.
---@param part ms.Dataset|ms.Loader
---@param whole ms.Dataset
function data_files.inherit(part, whole) files[part] = files[whole] end

--- A file that both were read from; nil: none, or both are parts of one data set, or it is not
--- known where they come from.
---@param a any
---@param b any
---@return string?
function data_files.shared(a, b)
  local first, second = files[a], files[b]
  if not first or not second or first == second then return nil end
  for _, path in ipairs(first) do
    local one = plain(path)
    for _, other in ipairs(second) do
      local two = plain(other)
      if one:sub(1, #two) == two then return path end
      if two:sub(1, #one) == one then return other end
    end
  end
end

return data_files
