-- ms.steps, the loop that defines steps; and ms.step.
local core = require "moonshard.core"
local launch = require "moonshard.base.launch"
local log = require "moonshard.base.log"
local tune = require "moonshard.train.tune"

-- ends: of steps, so far. before_reload: called with the number of the step before which watched
-- files are read again, on all ranks; nil: nothing is done there.
local steps = { ends = 0, before_reload = nil }
local at_end = {}    -- functions called with the step's number, before its tensors are released
local at_leave = {}  -- functions called when a loop of steps is over

---@return integer
function steps.step() return (core.step()) end

--- f(step) runs at the end of each step, while its tensors are still there.
---@param f fun(step: integer)
function steps.on_end(f) at_end[#at_end + 1] = f end

--- f(failed) runs when a loop of steps has been left in any way; its last step has ended by then.
--- failed: whether it was left by an error.
---@param f fun(failed: boolean)
function steps.on_leave(f) at_leave[#at_leave + 1] = f end

-- Ends the step, also if one of the functions raises.
local function finish()
  local step, running = core.step()
  if not running then return end
  steps.ends = steps.ends + 1
  local ok, failure = pcall(function()
    for _, f in ipairs(at_end) do f(step) end
    tune.at_end(steps.ends)
  end)
  core.step_end()
  if launch.checking then core.comm_record(false) end
  if not ok then error(failure, 0) end
end

-- The requests for the step that is about to begin. With several ranks these are the requests that
-- all ranks see before this step. Only the program catches signals.
local function meet_requests(step)
  local process = launch.process
  local own = process and process.stop_requested()
  if own and core.comm_request(own) then own = nil end
  local watch = package.loaded["moonshard.train.watch"]
  local alone = watch and watch.ask()
  local stop, save, reload = core.comm_step(step)
  if reload or alone then
    if steps.before_reload then steps.before_reload(step) end
    watch.reload(step)
  end
  launch.cut = launch.cut or stop or own
  launch.save = save ~= nil or process ~= nil and process.save_requested()
end

-- Steps of a loop after which graphs are told of: from FIRST on, as soon as most tasks are part of
-- some; after LAST steps, whatever became of it. With several streams it takes some steps until all
-- tensors of a step have the addresses that they had in the step before. EQUAL steps with as many
-- tasks each, none of which could be part of a graph, mean that no step will be better.
local FIRST <const>, EQUAL <const>, LAST <const> = 8, 8, 400

local NONE <const> = { replayed = 0, alone = 0, launches = 0 }
-- What was launched between two values of info().graph, which are some steps apart. Ranks that
-- share a GPU launch much of a step later, with what comes then.
local function difference(before, now, steps_apart)
  return {
    replayed = now.replayed - before.replayed,
    alone = now.alone - before.alone,
    launches = now.launches - before.launches,
    steps = steps_apart,
  }
end

-- Where addresses are the reason, they may settle.
local function is_refused(now, made)
  return made.replayed == 0 and made.alone > 0 and now.why and not now.differs
end

local function refuse(now)
  core.raise(("steps: graph = true, but nothing of a step can be part of a graph; the first \z
    reason: %s; take it out of the step, or leave out graph = true"):format(now.why))
end

-- Says what became of graph = true.
local function tell_of_graphs(now, made)
  local replayed, alone = made.replayed, made.alone
  if replayed + alone == 0 and core.tracing and core.info().device == "cuda" then
    log.log("graph: a trace is recorded, which shows each task, so each is launched by itself; \z
      graph = true changes nothing")
    return
  elseif replayed + alone == 0 then
    log.log("graph: device %s carries out each task as it comes%s; graph = true changes nothing",
      core.info().device, now.why and (" (%s)"):format(now.why) or "")
    return
  end
  local between = alone > 0 and now.why and "; the first thing between two tasks: " .. now.why or ""
  -- Tasks that are left alone in a step that repeats are runs of a few.
  local differs = alone > replayed and now.differs
    and ("; other addresses or shapes in each step has %s: a tensor that is kept (keep()) in each \z
      step moves those of the next"):format(now.differs) or ""
  if replayed == 0 then
    log.warn("graph: no run of tasks of a step came again with the same arguments%s%s", differs,
      between)
  else
    log.log("graph: of %d tasks of %s %d are launched as %d graph%s%s%s", replayed + alone,
      made.steps == 1 and "a step" or made.steps .. " steps", replayed, made.launches,
      made.launches > 1 and "s" or "", differs, between)
  end
end

-- Called after each step, looks at what became of graph = true until it is told.
local function graph_watch()
  local done, counted, counted_at, equal, alone = 0, nil, 0, 0, 0
  return function(is_over)
    done = done + 1
    if done < FIRST or done > LAST + 1 then return end
    local now = core.info().graph
    local made = counted and difference(counted, now, done - counted_at)
    local is_last = is_over or done > LAST
    -- Nothing was launched since, so the next steps count with this one; at the end all steps do.
    local is_late = made and made.replayed + made.alone == 0 and now.replayed + now.alone > 0
      and not core.tracing
    if is_late and is_last then made = difference(NONE, now, done - 1) end
    if made and (not is_late or is_last) then
      equal = is_refused(now, made) and made.alone == alone and equal + 1 or 1
      alone = made.alone
      if equal > EQUAL then refuse(now) end
      if is_last or made.replayed >= made.alone then
        tell_of_graphs(now, made)
        done = LAST + 1
      end
    end
    if not is_late then counted, counted_at = now, done end
  end
end

local function check_options(options)
  if type(options) ~= "table" then
    core.raise("steps: the third argument is a table of options, such as { graph = true }")
  end
  for name, value in pairs(options) do
    if name ~= "graph" then
      core.raise(("steps: unknown option '%s'; it has graph"):format(tostring(name)))
    end
    if type(value) ~= "boolean" then
      core.raise(("steps: option graph must be a boolean, not %s"):format(tostring(value)))
    end
  end
end

-- The coroutine in which a loop runs, weak; { main = true } in none.
local owner

local function note_owner()
  local routine, is_main = coroutine.running()
  owner = is_main and { main = true } or setmetatable({ routine }, { __mode = "v" })
end

-- Ends the last step of a loop whose coroutine was collected, or has ended with an error: Lua does
-- not close the variables of such a coroutine. Raises if the loop may go on.
local function end_abandoned()
  local status = owner and not owner.main and owner[1] and coroutine.status(owner[1])
  if not owner or owner.main or status == "running" or status == "normal" then
    core.raise("ms.steps: a step is running already; steps cannot be nested")
  end
  core.collect()
  if owner[1] and status ~= "dead" then
    core.raise("ms.steps: a step is running already, in a coroutine that has not ended: \z
      coroutine.close(it) ends its loop")
  end
  pcall(core.step_end)
  for _, g in ipairs(at_leave) do pcall(g, true) end
end

--- The loop of ms.steps, whose number of steps may become known while it runs.
---@param count fun(): integer? asked before each step; nil: not known yet, and there is a step
---@param first integer
---@param graph boolean
---@return fun(): integer?
function steps.loop(count, first, graph)
  local next_step = first
  if select(2, core.step()) then end_abandoned() end
  note_owner()
  tune.open()
  if graph then core.comm_use_graphs() end
  local look_at_graphs = graph and graph_watch()
  local function iterate()
    finish()
    local is_over = next_step >= (count() or math.huge)
    if look_at_graphs then look_at_graphs(is_over) end
    if is_over then return nil end
    meet_requests(next_step)
    if launch.cut then return nil end
    local step = next_step
    next_step = step + 1
    core.step_begin(step, graph)
    -- A check shows the collectives of the last step.
    if launch.checking then core.comm_record(true) end
    return step
  end
  return iterate, nil, nil, setmetatable({}, { __close = function(_, failure)
    if failure == nil then
      finish()
      for _, f in ipairs(at_leave) do f(false) end
      return
    end
    -- After an error the tensors of the step are also released, but a second error must not hide
    -- the first.
    pcall(core.step_end)
    for _, f in ipairs(at_leave) do pcall(f, true) end
  end })
end

---@param count integer
---@param first? integer
---@param options? { graph?: boolean }
---@return fun(): integer?
function steps.steps(count, first, options)
  if math.type(count) ~= "integer" or (first ~= nil and math.type(first) ~= "integer") then
    core.raise("steps: count and first must be integers")
  end
  if options ~= nil then check_options(options) end
  return steps.loop(function() return count end, first or 0, options and options.graph or false)
end

return steps
