-- Run by every rank of fsdp_kill_spec.lua. Saves checkpoints of a sharded model one after the
-- other; one rank kills itself in the middle of a save: before or after its call number `call` of
-- those that write, tell or commit, or some milliseconds after the save has begun. do = count: says
-- how many such calls there are. do = load: the newest checkpoint is whole, and no older than the
-- last that was committed.
local ms = require "moonshard"
local core = require "moonshard.core"
local cfg = ms.config {
  folder = "", ["do"] = "save", victim = 0, save = 3, call = 0, after = false, delay_ms = 0.0,
  width = 8,
}
local rank = ms.rank()

local Net = ms.nn.class "Net"
function Net:init()
  self.a = ms.nn.Parameter(ms.zeros { cfg.width, 7 })
  self.b = ms.nn.Parameter(ms.zeros { 5 })
end
function Net:forward() return self.a:sum() + self.b:sum() end
local model = ms.fsdp(Net(), {})
local optimizer = ms.optim.sgd(model, { lr = 1, momentum = 0.5 })
local things = { model = model, optimizer = optimizer }

-- Every number of the model after so many steps; gradients are 1.
local function value_after(steps)
  local value, momentum = 0, 0
  for _ = 1, steps do
    momentum = 0.5 * momentum + 1
    value = value - momentum
  end
  return value, momentum
end

if cfg["do"] == "load" then
  local path = assert(ms.checkpoint.latest(cfg.folder .. "/run"))
  local loaded = assert(ms.checkpoint.load(path, things))
  local value, momentum = value_after(loaded.step)
  for _, piece in pairs(model:state { kind = "sharded" }) do
    local t = core.is_tensor(piece) and piece or piece.tensor
    assert(t:numel() == 0 or t:max():item() == value and t:min():item() == value)
  end
  for _, state in pairs(optimizer:state { kind = "sharded" }.parameters) do
    local t = state.momentum_buffer
    t = core.is_tensor(t) and t or t.tensor
    assert(t:numel() == 0 or t:max():item() == momentum and t:min():item() == momentum)
  end
  io.stdout:write(("rank %d has step %d\n"):format(rank, loaded.step))
  return
end

local pid = io.open "/proc/self/stat":read "a":match "^%d+"
local saves, calls, counting = 0, 0, false

local function die()
  os.execute(("kill -KILL %s"):format(pid))
  while true do end                                          -- the signal is on its way
end

-- Counts the calls of a save on the victim, and kills it at one of them.
local function watch(owner, name)
  local f = owner[name]
  owner[name] = function(...)
    if not counting then return f(...) end
    calls = calls + 1
    local now = calls == cfg.call
    if now and not cfg.after then die() end
    local results = table.pack(f(...))
    if now then die() end
    return table.unpack(results, 1, results.n)
  end
end
for _, name in ipairs { "checkpoint_begin", "checkpoint_part", "checkpoint_commit" } do
  watch(core, name)
end
watch(core.group_methods, "_share_texts")

for step = 1, 1000 do
  model():backward()
  optimizer:step()
  saves = saves + 1
  local mine = saves == cfg.save and rank == cfg.victim
  counting = mine and cfg.call > 0
  if mine and cfg.delay_ms > 0 then
    os.execute(("(sleep %.4f; kill -KILL %s) &"):format(cfg.delay_ms / 1000, pid))
  end
  things.step = step
  local path = assert(ms.checkpoint.save(cfg.folder .. "/run", things))
  if cfg["do"] == "count" and saves == cfg.save then
    if counting then io.stdout:write(("a save has %d calls on rank %d\n"):format(calls, rank)) end
    return
  end
  -- Committed on all ranks: from now on it is never lost. The two newest ones are kept.
  if rank == 0 then
    assert(path and core.file_write(cfg.folder .. "/committed", tostring(step)))
    if step > 2 then
      assert(core.checkpoint_remove(cfg.folder .. "/run", ("step-%08d"):format(step - 2)))
    end
  end
end
