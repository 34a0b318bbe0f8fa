-- What is known of data sets and loaders beside their samples: the files that they were read from,
-- since what is trained on is no validation, and how many ranks share a loader's batches.
local data_files = {
  ranks = setmetatable({}, { __mode = "k" }),               -- by loader
}

-- A data set or loader -> the paths of its files: one list for all parts of a data set.
local files = setmetatable({}, { __mode = "k" })

-- A data set or loader -> what it is, where a script knows more than its paths.
local abouts = setmetatable({}, { __mode = "k" })

local NAMED <const> = 3        -- paths in a line

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
function data_files.inherit(part, whole)
  files[part], abouts[part] = files[whole], abouts[whole]
end

--- Notes what a data set is, for the first lines of a run.
---@param set ms.Dataset
---@param text string
function data_files.tell(set, text) abouts[set] = text end

--- One line about what a loader reads; nil: that is not known.
---@param loader any
---@return string?
function data_files.describe(loader)
  local list = files[loader]
  if abouts[loader] or not list then return abouts[loader] end
  local more = #list - NAMED
  return table.concat(list, ", ", 1, math.min(#list, NAMED))
    .. (more > 0 and (" and %d more file%s"):format(more, more > 1 and "s" or "") or "")
end

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
