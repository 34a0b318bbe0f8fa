-- Run by every rank of fsdp_checkpoint_spec.lua. do = save: trains under each strategy, saves, and
-- goes on. do = load: under each strategy loads each of those checkpoints, which any number of
-- ranks has saved: it must have the same bits, and go on with the same bits. Inputs are the same on
-- all ranks and the loss is scaled by powers of 2, so means over 1, 2 or 4 ranks are exact. Those
-- over 3 are not: from there, or to there, training only goes on under the same strategy.
local ms = require "moonshard"
local core = require "moonshard.core"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
-- only: the one strategy that saves; "": all do.
local cfg = ms.config { folder = "", ["do"] = "save", from = "1", all = false, only = "" }
local rank, size, world = ms.rank(), ms.world_size(), ms.world()

local Net = ms.nn.class "Net"
function Net:init(seed)
  ms.seed(seed)
  self.embed = ms.nn.Parameter(ms.randn { 13, 6 })
  self.inside = ms.nn.Sequential(ms.nn.Linear(6, 7), ms.nn.Linear(7, 6))
  self.frozen = ms.nn.Linear(6, 6)
  self.frozen.weight:requires_grad_(false)
  self.scale = ms.nn.Parameter(ms.ones {})
  self.head = self.embed
  self:add_buffer("seen", ms.zeros { 3 })
end
function Net:forward(x)
  return (self.frozen(self.inside(x:embedding(self.embed)):tanh()) * self.scale):linear(self.head)
end

local configs = {
  { "ddp", function(net) return ms.ddp(net) end },
  { "full", function(net) return ms.fsdp(net, { wrap = { class = "Sequential" } }) end },
  { "rows", function(net)
    return ms.fsdp(net, { layout = "rows", strategy = "shard_grad_op" })
  end },
  { "whole", function(net) return ms.fsdp(net, { strategy = "no_shard" }) end },
}
if size == 1 then table.insert(configs, { "plain", function(net) return net end }) end
if size == 4 then
  for _, strategy in ipairs { "hybrid_shard", "hybrid_shard_zero2" } do
    table.insert(configs, { strategy, function(net)
      return expect.models.fsdp(net, { strategy = strategy })
    end })
  end
end

local function path_of(name, ranks) return ("%s/%s-%d"):format(cfg.folder, name, ranks) end

-- A model with what belongs to its training.
local function begin(make, seed)
  local self = { model = make(Net(seed)) }
  self.optimizer = ms.optim.adamw(self.model, {
    lr = 0.01, schedule = ms.optim.cosine { warmup = 2, steps = 8 },
  })
  self.scaler = ms.optim.scaler { init_scale = 4, growth_interval = 2 }
  return self
end

local function step(self, number)
  local x = ms.randint { 5, high = 13, seed = number, dtype = "i64" }
  local noise = ms.rand { 13 }                               -- the run's random numbers
  local loss = ((self.model(x) + noise):square():mean())
  self.scaler:scale(loss):backward()
  -- One step overflows on all ranks, and is left out.
  if number == 2 then
    for _, p in ipairs(self.model:parameters()) do
      if p:grad() then ms.no_grad(function() p:grad():mul_(math.huge) end) end
    end
  end
  self.scaler:step(self.optimizer)
  self.optimizer:zero_grad()
  self.model.seen:add_(1)
end

local function save_final(self, path)
  if getmetatable(self.model).fsdp then assert(self.model:save(path))
  elseif rank == 0 then assert(ms.safetensors.save(path, self.model:state())) end
  world:barrier()
end

-- All tensors of a training by name, on rank 0.
local function values_of(self)
  local values = self.model:state()
  local found = self.optimizer:state().parameters or {}
  for name, state in pairs(rank == 0 and found or {}) do
    for key, t in pairs(state) do
      if core.is_tensor(t) then values[("%s of %s"):format(key, name)] = t end
    end
  end
  return values
end

local function things(self)
  return { model = self.model, optimizer = self.optimizer, scaler = self.scaler }
end

if cfg["do"] == "save" then
  local saving = {}
  for _, config in ipairs(configs) do
    if cfg.only == "" or cfg.only == config[1] then saving[#saving + 1] = config end
  end
  for _, config in ipairs(saving) do
    local self, path = begin(config[2], 1), path_of(config[1], size)
    for number = 1, 3 do step(self, number) end
    local list = things(self)
    list.step, list.note = 3, { words = "kept", ranks = size }
    assert(assert(ms.checkpoint.save(path, list)) == path .. "/step-00000003")
    local values = values_of(self)
    if rank == 0 then assert(ms.safetensors.save(path .. "/saved.safetensors", values)) end
    for number = 4, 6 do step(self, number) end
    save_final(self, path .. "/final.safetensors")
    -- A second save is found first; the one before stays as it was.
    list.step = 6
    assert(ms.checkpoint.save(path, list))
    assert(ms.checkpoint.wait())
    world:barrier()
    assert(ms.checkpoint.latest(path):find "step%-00000006$")
    world:barrier()
    if rank == 0 then assert(core.checkpoint_remove(path, "step-00000006")) end
    world:barrier()
  end
end

-- All strategies by which these ranks saved have continued alike.
local function names_of(ranks)
  local names = { "ddp", "full", "rows", "whole" }
  if ranks == 1 then names[#names + 1] = "plain" end
  if ranks == 4 then table.move({ "hybrid_shard", "hybrid_shard_zero2" }, 1, 2, 5, names) end
  return names
end

if cfg["do"] == "load" then
  local count = 0
  for text in cfg.from:gmatch "%d" do
    local ranks = tonumber(text)
    for i, name in ipairs(names_of(ranks)) do
      local path = path_of(name, ranks)
      local final = assert(ms.safetensors.load(path .. "/final.safetensors"))
      local saved = assert(ms.safetensors.load(path .. "/saved.safetensors"))
      assert(next(saved))
      for k, config in ipairs(configs) do
        -- Over all runs each strategy goes to others.
        if cfg.all or (i + k + ranks + size + 4) % 7 == 0 then
          count = count + 1
          local what = ("%s on %d to %s on %d"):format(name, ranks, config[1], size)
          local self = begin(config[2], 2)
          step(self, 9)                                      -- what was there before is gone
          local loaded = assert(ms.checkpoint.load(ms.checkpoint.latest(path), things(self)))
          assert(loaded.step == 3 and loaded.note.ranks == ranks, what)
          local values = values_of(self)
          if rank == 0 then expect.same(values, saved, what .. ", loaded") end
          local out = ("%s/resumed-%d.safetensors"):format(cfg.folder, k)
          if size ~= 3 and ranks ~= 3 or size == ranks and name == config[1] then
            for number = 4, 6 do step(self, number) end
            save_final(self, out)
            expect.same(assert(ms.safetensors.load(out)), final, what)
          end
          world:barrier()
        end
      end
    end
  end
  if rank == 0 then print(("%d pairs on %d ranks"):format(count, size)) end
end

-- One rank cannot write: no rank commits, all ranks get the error, and the last checkpoint stays.
if cfg["do"] == "refused" then
  local self, path = begin(configs[2][2], 1), cfg.folder .. "/refused"
  local list = things(self)
  list.step = 1
  assert(ms.checkpoint.save(path, list))
  local refuse = { checkpoint_part = size - 1, checkpoint_begin = 0, checkpoint_commit = 0 }
  for name, of in ms.sorted_pairs(refuse) do
    local f = core[name]
    if rank == of then
      core[name] = function() return core.refuse("the disk is full", "no_space") end
    end
    list.step = 2
    local saved, message, code = ms.checkpoint.save(path, list)
    assert(saved == nil and code == "no_space" and message:find "the disk is full", name)
    assert(name ~= "checkpoint_part" or message:find(("rank %d: "):format(of)), message)
    core[name] = f
    world:barrier()
    assert(table.concat(core.list(path), " ") == "lock step-00000001", name)
    world:barrier()
  end
  list.step = 1
  assert(ms.checkpoint.save(path, list))                     -- it replaces the one before
  assert(ms.checkpoint.load(ms.checkpoint.latest(path), things(self)))
end

-- A damaged checkpoint: the error is the same on every rank, and nothing has changed.
-- from: the checkpoints' folders, between commas.
if cfg["do"] == "damaged" then
  local self = begin(configs[2][2], 2)
  local before = self.model:state()
  for path in cfg.from:gmatch "[^,]+" do
    local loaded, message, code = ms.checkpoint.load(path, things(self))
    assert(not loaded)
    local state = self.model:state()
    if rank == 0 then expect.same(state, before, path) end
    print(("rank %d, %s: %s: %s"):format(rank, path:match "[^/]*$", code, message))
  end
end
print(("rank %d is done"):format(rank))
