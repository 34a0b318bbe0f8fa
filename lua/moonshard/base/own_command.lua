-- Commands that messages tell the user to type: words as a shell reads them, and the command that
-- goes on with a run.
local launch = require "moonshard.base.launch"

local own_command = {}

--- A word of a command as a shell reads it.
---@param word string
---@return string
function own_command.quoted(word)
  if word:match "^[%w_./:=,@%%+-]+$" then return word end
  return "'" .. word:gsub("'", "'\\''") .. "'"
end

--- The program's name as the user has typed it, which the launcher of a checkout says.
---@return string
function own_command.program() return os.getenv "MOONSHARD_CALLED" or "moonshard" end

-- The folder in which resume=auto looks without more options.
local function usual_folder(recipe, options)
  for _, option in ipairs(options) do
    local run = option:match "^run=(.+)$"
    if run then return run end
  end
  return "runs/" .. (recipe:match "([^/]+)%.lua$" or "run")
end

--- The command that goes on with the run of this folder: the user's own, with other options where
--- they would begin again, or go on with another run (a folder that exists gets a number).
---@param recipe string
---@param options string[] key=value, as they were given
---@param folder string of the run
---@param by_hand boolean the user's own mpirun has started the job: what it was given is not known
---@return string
function own_command.resume(recipe, options, folder, by_hand)
  local added = { "resume=auto" }
  if usual_folder(recipe, options):gsub("/+$", "") ~= folder then
    table.insert(added, 1, "run=" .. own_command.quoted(folder))
  end
  if by_hand then return "the same command with " .. table.concat(added, " ") end
  local words = { own_command.program() }
  for _, word in ipairs(launch.arguments_given or {}) do
    if not word:match "^resume=" and not (#added > 1 and word:match "^run=") then
      words[#words + 1] = own_command.quoted(word)
    end
  end
  return table.concat(table.move(added, 1, #added, #words + 1, words), " ")
end

return own_command
