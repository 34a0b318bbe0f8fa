-- What the launcher passes to the recipe: arguments and switches of the command line. And how a run
-- ends with an exit code.

--- Functions that only the program has, not an application with the library: main.c in
--- bindings/program fills this table before any other module is loaded.
---@class ms.Process
---@field program string path of the executable
---@field is_root boolean
---@field rank? integer this rank's number, in a job of several
---@field is_thread? boolean the rank is a thread of the supervisor's process
---@field stop_requested fun(): integer? number of the signal that asked to stop
---@field save_requested fun(): boolean whether SIGUSR1 came since the last call
--- from now on signals are requests; grace: seconds after a request to stop until the process ends
---@field watch_signals fun(grace?: number)
---@field is_terminal fun(): boolean stdout and stderr are a terminal
---@field columns fun(): integer width of the terminal
---@field pause fun(ms: integer) waits
---@field quit fun(code: integer) ends the process at once
---@field launch? fun(options: table): table?, string? starts and supervises a job's ranks
--- starts a launcher, waits for the job's end: its code, a message, its report
---@field start? fun(options: table): integer?, string?, string?
---@field kept_ranks? integer this process is the agent of a host, in a job of so many ranks
---@field joined fun() core.hosts_join has made this process a rank
---@field hosts? integer of the job that this process has joined

local launch = {
  ---@type ms.Process?
  process = package.loaded["moonshard.process"], -- nil: the program is the application's
  arguments = {},        -- key=value, as text
  help = false,          -- print the recipe's options and stop
  config_file = nil,     -- --config
  recipe = nil,          -- path of the recipe
  recipe_given = nil,    -- the same, or its bare name, as the user has typed it
  command = nil,         -- the command line, as it was given
  arguments_given = nil, -- the same as a list, without the program
  run = nil,             -- folder of the run, once there is one
  declared = false,      -- ms.config was called
  cut = nil,             -- the signal for which a loop of steps ended before its last one
  save = false,          -- a checkpoint was requested: it is taken after the step that runs
  tune = nil,            -- --tune: "yes"; --no-tune: "no"
  saved = false,         -- a checkpoint was started after a request to stop
  owns_state = false,    -- the program made this Lua state; one of an application is left alone
  log_every = nil,       -- --log-every
  tensorboard = false,   -- --tensorboard
  result = nil,          -- what the recipe has returned
  on_line = nil,         -- of an application: gets lines of the log, and whether one is a warning
  quiet = false,         -- ms.train { quiet = true } runs: only warnings are shown
  -- `moonshard check`: nothing is written or printed, and values are zeros that decide nothing
  checking = false,
  -- where `moonshard check` runs: the groups of sharded models, and of pipelines
  sharded = nil,
  parts = nil,           -- there, at the end of ms.train: bytes of parts of the peak, by names
  for_gpu = false,       -- `moonshard check --device cuda`
  asked = false,         -- another process asks this check, and reads its answer
  assumptions = {},      -- what a run on another machine, or a real one, may choose otherwise
}

--- Seeds math.random in a Lua state that the program made. Lua cannot save the generator's state; a
--- seed from the step gives equal numbers on all ranks, and in a resumed run.
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
