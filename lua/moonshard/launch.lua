-- What the launcher tells the recipe: arguments and switches of the command line; and how a run
-- ends with an exit code.
local launch = {
  arguments = {},        -- key=value, as text
  help = false,          -- print the recipe's options and stop
  config_file = nil,     -- --config
  recipe = nil,          -- path of the recipe
  command = nil,         -- the command line, as it was given
  run = nil,             -- folder of the run, once there is one
  declared = false,      -- ms.config was called
  cut = nil,             -- the signal for which a loop of steps ended before its last one
  save = false,          -- somebody asked for a checkpoint behind the step that runs
  saved = false,         -- a checkpoint was started after a request to stop
  owns_state = false,    -- the program made this Lua state; a host's own state is left alone
  log_every = nil,       -- --log-every
  -- `moonshard check`: nothing is written, no line is printed, values are zeros that decide nothing
  checking = false,
}

--- Seeds math.random, whose state Lua cannot save, in a Lua state that the program made: the
--- numbers are then equal on all ranks and in every run from this step on.
---@param seed integer
---@param step integer that comes next
function launch.seed_random(seed, step)
  if launch.owns_state then math.randomseed(seed, step) end
end

-- An error that ends the run with a code of its own; tostring gives its message.
local Exit = { __name = "moonshard.exit" }
Exit.__tostring = function(self) return self.message end

--- Ends the run: 0 done, 3 bad checkpoint, data or config, or a lost last save, 4 stopped by a
--- policy, 75 stopped on request with a checkpoint.
---@param code integer
---@param message? string
function launch.exit(code, message)
  error(setmetatable({ code = code, message = message or "" }, Exit), 0)
end

---@param value any
---@return boolean
function launch.is_exit(value) return type(value) == "table" and getmetatable(value) == Exit end

return launch
