-- The command line: finds the command, runs it, and turns an error into an exit code and a message.
local cli = {}

-- Names and what they do.
local commands = {
  { "run", "run a recipe: moonshard run FILE [-n RANKS | --hosts LIST] [key=value ...]" },
  { "check", "run a recipe without data: peak memory and collectives of each rank" },
  { "bench", "measure: step, gemm, optim, collectives, hooks, fsdp, tokenize, generate and more" },
  { "trace", "show how the steps of a recorded run used their time: table, JSON, page" },
  { "runs", "list the runs of a folder: state, loss, settings that differ" },
  { "plot", "curves of runs, in the terminal or as a page" },
  { "test", "compare with golden data: moonshard test --golden DIR" },
  { "tokenize", "write files of text as shards of tokens" },
  { "eval", "score a model on multiple-choice questions: moonshard eval MODEL FILE.jsonl" },
  { "generate", "continue a text with a model: moonshard generate MODEL --prompt TEXT" },
  { "info", "describe this machine and this build" },
  { "repl", "an interactive session" },
  { "docs", "write the reference as a page: moonshard docs --html FOLDER" },
  { "help", "what the reference says of a function, a class or a command: moonshard help NAME" },
}

-- What users need. tests/README.md lists those of tests and comparisons.
local variables = {
  {
    "MOONSHARD_TRANSPORT",
    "how the tensors of ranks travel: local or nccl (default: what fits the device)",
  },
  { "MOONSHARD_NCCL", "path of NCCL's library (default: libnccl.so.2, where the system finds it)" },
  {
    "MOONSHARD_CUDA_LIBS",
    "folders, with colons between them, where cuBLASLt, cuDNN and NVRTC are sought first",
  },
  {
    "MOONSHARD_TUNED",
    "file of the algorithms that --tune chose (default: moonshard/products.json in the cache)",
  },
  { "CUDA_VISIBLE_DEVICES", "the GPUs that may be used, of which ranks take one each, in order" },
  { "CUDA_LAUNCH_BLOCKING", "1: wait for each task of a GPU, so that an error names its task" },
  {
    "MOONSHARD_MPI",
    "openmpi or mpich: for --hosts, and the module for MPI (default: that of the launcher's MPI)",
  },
  { "MOONSHARD_MASTER", "HOST:PORT, where ranks of several hosts meet without MPI: rank 0's host" },
  { "MOONSHARD_TOKEN", "their secret of 8 to 32 bytes, the same on all hosts; it is not sent" },
  { "MOONSHARD_LOG", "debug: messages of the engine, and whole tracebacks of errors" },
}

cli.commands, cli.variables = commands, variables

local function usage(to)
  to:write "usage: moonshard COMMAND ...\n\n"
  for _, command in ipairs(commands) do to:write(("  %-8s %s\n"):format(command[1], command[2])) end
  to:write "\nmoonshard COMMAND --help tells more; moonshard --version prints the version.\n"
  to:write "\nin the environment:\n"
  for _, variable in ipairs(variables) do
    to:write(("  %-21s %s\n"):format(variable[1], variable[2]))
  end
end

-- LUA_PATH and LUA_CPATH may be those of another Lua, and may lack what this program needs.
local function add_default_paths()
  local path, cpath = require "moonshard.core".default_paths()
  for name, default in pairs { path = path, cpath = cpath } do
    if not (package[name] .. ";"):find(default .. ";", 1, true) then
      package[name] = package[name] .. ";" .. default
    end
  end
end

-- Restricts load, loadfile and dofile to text in Lua states that the program makes: binary chunks
-- can crash the interpreter.
local function own_state()
  add_default_paths()
  local launch = require "moonshard.base.launch"
  launch.owns_state = true
  launch.seed_random(0, 0)
  local load_any, loadfile_any = load, loadfile
  local function check(mode)
    if mode ~= nil and mode ~= "t" and mode ~= "bt" then
      error("binary chunks are not loaded: mode must be \"t\"", 3)
    end
  end
  -- luacheck: push globals load loadfile dofile
  function load(chunk, name, mode, ...)
    check(mode)
    return load_any(chunk, name, "t", ...)
  end
  function loadfile(name, mode, ...)
    check(mode)
    return loadfile_any(name, "t", ...)
  end
  function dofile(name)
    local chunk, message = loadfile_any(name, "t")
    if not chunk then error(message, 2) end
    return chunk()
  end
  -- luacheck: pop
  package.searchers[2] = function(name)
    local path, message = package.searchpath(name, package.path)
    if not path then return message end
    local chunk, why = loadfile_any(path, "t")
    if not chunk then
      error(("error loading module '%s' from file '%s':\n\t%s"):format(name, path, why), 0)
    end
    return chunk, path
  end
end

-- Exit codes for errors that end a job of several ranks.
local CODES = { mismatch = 5, left = 5, timeout = 6, died = 7 }

-- The exit code and message for an error value.
local function judge(failure)
  local launch = require "moonshard.base.launch"
  if launch.is_exit(failure) then return failure.code, failure.message end
  local core = require "moonshard.core"
  local message = tostring(failure)
  local code = CODES[core.comm_cause()] or core.exit_code(message) or 1
  return code, message
end

-- Exit code and message of a process that is about to end with this code and message. Every process
-- first waits for the checkpoint that is being written. If that fails, success becomes code 3;
-- another code stays.
local function settled(code, message)
  local store = package.loaded["moonshard.checkpoint.store"]
  local lost = store and store.settle()
  if not lost then return code, message end
  local text = "the last checkpoint was not saved: " .. lost
  if code == 0 then return 3, text end
  if not message or message == "" then return code, text end
  return code, message:find(lost, 1, true) and message or message .. "\n" .. text
end

-- Runs f and returns its exit code, and the message of an error, which the caller writes to stderr
-- at once.
local function protected(f, ...)
  local ok, result = xpcall(f, require "moonshard.cli.failure".handler, ...)
  if ok then return settled(math.type(result) == "integer" and result or 0) end
  return settled(judge(result))
end

-- Notes in the folder of the run how it has ended, if there was one. Where there are several ranks,
-- their supervisor does it.
local function note_end(code, message)
  local launch = require "moonshard.base.launch"
  if launch.run and not (launch.process and launch.process.rank) then
    require "moonshard.train.report.about".finish(launch.run, code, message)
  end
end

-- Replaces os.exit, which would end the process without closing the Lua state: the new one first
-- waits for the checkpoint that is being written.
local function settle_at_exit()
  local exit = os.exit
  os.exit = function(code, close) -- luacheck: ignore 122
    local report = package.loaded["moonshard.train.report"]
    if report then pcall(report.write_all, true) end
    require "moonshard.base.status_line".finish()
    local number, message = settled(math.tointeger(code) or (code == false and 1 or 0))
    if message then io.stderr:write("moonshard: ", message, "\n") end
    note_end(number, message)
    exit(number, close)
  end
end

-- Replaces os.exit in a rank: it first tells the other ranks that this rank has left, and whether
-- that was an error. A thread cannot end the process, and a rank of several hosts ends with its
-- agent and MPI: there the recipe ends by an error that carries the code.
local function leave_at_exit(process)
  local exit = os.exit
  -- luacheck: push ignore 122
  os.exit = function(code, close)
    if not process.rank then exit(code, close) end
    local number = math.tointeger(code) or (code == false and 1 or 0)
    local message = ("the recipe called os.exit(%d)"):format(number)
    if process.is_thread or process.hosts then
      require "moonshard.base.launch".exit(number, number ~= 0 and message or nil)
    end
    require "moonshard.core".comm_leave(number ~= 0 and message or nil)
    exit(code, close)
  end
  -- luacheck: pop
end

-- Replaces print: Lua's print writes a line in parts, so lines of several threads could mix, and it
-- does not end a line that is shown in place.
local function print_whole_lines()
  local live = require "moonshard.base.status_line"
  -- luacheck: push globals print
  function print(...)
    local texts = table.pack(...)
    for i = 1, texts.n do texts[i] = tostring(texts[i]) end
    live.finish()
    io.stdout:write(table.concat(texts, "\t") .. "\n")
  end
  -- luacheck: pop
end

-- Bytes of the job's error message, which the supervisor prints.
local ROOM = 800

-- The part of a failing rank's message that the rank prints: what is not in the job's message,
-- which the supervisor prints.
local function untold(message, told)
  told = told:gsub("^because rank %d+: ", "")
  if told == message then return nil end
  local first, rest = message:match "^([^\n]*)\n?(.*)$"
  if told == "" or not first:find(told, 1, true) then return ": " .. message end
  return rest ~= "" and " was at:\n" .. rest or nil
end

-- The end of a rank: tells the other ranks. Returns the exit code, and the message that this rank
-- prints; nil if another rank or the supervisor reports the error. Under an MPI launcher the ranks
-- return the code of the job, since no supervisor of ours does.
local function leave(process, code, message)
  local core, launch = require "moonshard.core", require "moonshard.base.launch"
  if code == 0 or launch.cut and (code == 75 or code == 128 + launch.cut) then
    core.comm_leave()
    return code, process.rank == 0 and message or nil
  end
  message = message and message ~= "" and message or "it failed"
  core.comm_leave(#message <= ROOM and message or message:match "[^\n]*")
  local reason, whose, told = core.comm_cause()
  if process.hosts then
    code = require "moonshard.cli.ranks".code_of_cause(reason, launch.cut) or code
  end
  if whose ~= process.rank or reason ~= "raised" and reason ~= "timeout" then return code end
  local own = untold(message, told)
  return code, own and ("rank %d%s"):format(whose, own)
end

-- What the recipe has returned, as JSON; nil: nothing.
local function result_of(launch)
  if launch.result == nil then return nil end
  local ok, text = pcall(require "moonshard.core".json_encode, launch.result)
  if ok then return text end
  launch.exit(1, "what the recipe returns is no JSON: " .. tostring(text))
end

--- Runs a recipe in this Lua state, for an application.
---@param file string
---@param arguments string[] key=value
---@param wants_result boolean whether what it returns is wanted, as JSON
---@param on_line? fun(text: string, is_warning: boolean) gets lines of the log
---@return integer code
---@return string? text a message, or with code 0 the result
function cli.recipe(file, arguments, wants_result, on_line)
  own_state()
  local launch, result = require "moonshard.base.launch", nil
  launch.on_line = on_line
  -- The process belongs to the application: os.exit in a recipe ends the recipe only.
  os.exit = function(code) -- luacheck: ignore 122
    require "moonshard.base.launch".exit(math.tointeger(code) or (code == false and 1 or 0),
      "the recipe called os.exit")
  end
  local code, message = protected(function()
    local ended = require "moonshard.cli.run".recipe(file, { arguments = arguments })
    if wants_result and ended == 0 then result = result_of(launch) end
    return ended
  end)
  note_end(code, message)
  if code == 0 then return code, result end
  return code, message
end

-- Of a recipe whose memory has ended: what would fit.
local function advise(command, message)
  local launch = require "moonshard.base.launch"
  if (command ~= "run" and command ~= "check") or not launch.recipe or launch.asked then return end
  local room = require "moonshard.cli.room"
  local advice = room.advice(message, room.own_question)
  if advice then io.stderr:write(advice, "\n") end
end

--- The program: arguments are those of the command line; returns the exit code.
---@param arguments string[]
---@return integer
function cli.main(arguments)
  own_state()
  require "moonshard.base.launch".command = "moonshard " .. table.concat(arguments, " ")
  require "moonshard.base.launch".arguments_given = table.move(arguments, 1, #arguments, 1, {})
  local name = table.remove(arguments, 1)
  if not name or name == "--help" or name == "-h" or name == "help" and #arguments == 0 then
    usage(name and io.stdout or io.stderr)
    return name and 0 or 2
  end
  -- `moonshard help run` is `moonshard run --help`.
  local asked
  for _, command in ipairs(commands) do
    if name == "help" and command[1] == arguments[1] and #arguments == 1 then
      asked, name, arguments = arguments[1], arguments[1], { "--help" }
      break
    end
  end
  if name == "--version" then
    print("moonshard " .. require "moonshard".version)
    return 0
  end
  for _, command in ipairs(commands) do
    if command[1] == name then
      local process = require "moonshard.base.launch".process
      settle_at_exit()
      -- A process of mpirun becomes a rank in the command.
      if process and (process.rank or process.joined) then leave_at_exit(process) end
      if process and (process.is_thread or process.is_terminal()) then print_whole_lines() end
      local code, message = protected(require("moonshard.cli." .. name).main, arguments)
      require "moonshard.base.status_line".finish()
      if asked and code == 0 then require "moonshard.cli.help".show_others(asked) end
      note_end(code, message)
      if process and process.rank then code, message = leave(process, code, message)
      elseif process and code == 2 then require "moonshard.cli.hosts".refuse(message) end
      if message and message ~= "" then
        io.stderr:write("moonshard: ", message, "\n")
        if not process or not process.rank then advise(name, message) end
      end
      return code
    end
  end
  local names = {}
  for i, command in ipairs(commands) do names[i] = command[1] end
  local nearest = require "moonshard.core".nearest(name, names)
  io.stderr:write(("moonshard: unknown command '%s'%s\n")
    :format(name, nearest and (": did you mean '%s'?"):format(nearest) or ""))
  usage(io.stderr)
  return 2
end

return cli
