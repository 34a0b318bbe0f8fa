-- What the launcher tells the recipe: arguments and switches of the command line; and how a run ends with an exit code.
local launch = {
  arguments = {},        -- key=value, as text
  help = false,          -- print the recipe's options and stop
  config_file = nil,     -- --config
  recipe = nil,          -- path of the recipe
  run = nil,             -- folder of the run, once there is one
  declared = false,      -- ms.config was called
  cut = nil,             -- the signal for which a loop of steps ended before its last one
  save = false,          -- somebody asked for a checkpoint behind the step that runs
  saved = false,         -- a checkpoint was started after a request to stop
  checking = false,      -- `moonshard check`: nothing is written, no line is printed, values are zeros that decide nothing
}

-- An error that ends the run with a code of its own; tostring gives its message.
local Exit = { __name = "moonshard.exit" }
Exit.__tostring = function(self) return self.message end

--- Ends the run: 0 done, 3 bad checkpoint, data or config, 4 stopped by a policy, 75 stopped on request with a checkpoint.
---@param code integer
---@param message? string
function launch.exit(code, message) error(setmetatable({ code = code, message = message or "" }, Exit), 0) end

---@param value any
---@return boolean
function launch.is_exit(value) return type(value) == "table" and getmetatable(value) == Exit end

return launch
