-- Run by every rank of parts_state_spec.lua: files and checkpoints of models of which ranks have
-- parts. what=save trains, saves in the middle and keeps the end; what=resume goes on from there on
-- the same grid, and must come to the same end, bit for bit; what=other loads on another grid, and
-- compares whole tensors.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local cfg = ms.config { folder = "", what = "save", tensor = 2, stages = 1, wrap = "none" }
local nn, world, rank = ms.nn, ms.world(), ms.rank()
local tensor, rest = world:levels(cfg.tensor)
local stage, data = rest:levels(cfg.stages)
local STEPS <const>, MIDDLE <const>, BLOCKS <const> = 5, 3, 2
local WIDTH <const>, HIDDEN <const>, VOCAB <const> = 8, 16, 13

local Block = nn.class "Block"
function Block:init()
  self.norm = nn.LayerNorm(WIDTH)
  self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
  self.few = nn.Linear(WIDTH, WIDTH, { bias = false })
  self.down = nn.Linear(HIDDEN, WIDTH)
end
function Block:cut()
  for _, p in ipairs { self.norm.weight, self.norm.bias, self.down.bias } do
    nn.shared(p, tensor)
  end
  self.fixed = nn.Parameter(ms.ones { WIDTH })
  self.fixed:requires_grad_(false)
  for _, name in ipairs { "weight", "bias" } do
    nn.split(self.qkv[name], tensor, { blocks = { WIDTH, WIDTH, WIDTH }, whole = true })
  end
  nn.split(self.few.weight, tensor, { repeats = cfg.tensor > 1 and 2 or 1, whole = true })
  nn.split(self.down.weight, tensor, { dim = 2, whole = true })
  self:add_buffer("seen", ms.zeros {})
end
function Block:forward(x)
  local y = self.norm(x)
  return x * self.fixed + self.qkv(y):sum() + self.few(y):square():sum() + self.down(
    ms.ones { 2, HIDDEN // cfg.tensor } * y:mean()):square():mean()
end

local Model = nn.class "Model"
function Model:init()
  self.table = nn.Embedding(VOCAB, WIDTH)
  self.blocks = nn.List {}
  local first = stage:rank() * BLOCKS
  for i = 1, BLOCKS * cfg.stages do
    local block = Block()
    if i > first and i <= first + BLOCKS then self.blocks[i] = block end
  end
  for i = first + 1, first + BLOCKS do self.blocks[i]:cut() end
  nn.owned(self.blocks, stage)
  nn.shared(nn.split(self.table.weight, tensor, { whole = true, pad = -VOCAB % cfg.tensor }), stage)
end
function Model:forward(x)
  local y = self.table(x)
  for i = stage:rank() * BLOCKS + 1, (stage:rank() + 1) * BLOCKS do y = self.blocks[i](y) end
  return y:square():mean()
end

local function make()
  ms.seed(4)
  local model = Model()
  local wrapped = model
  if cfg.wrap == "ddp" then wrapped = ms.ddp(model, { group = data })
  elseif cfg.wrap == "fsdp" then
    wrapped = ms.fsdp(model, { group = data, wrap = { class = "Block" } })
  end
  local optimizer = ms.optim.adamw(wrapped, { lr = 0.01 })
  return { model = wrapped, optimizer = optimizer }
end

local function train(things, from, to)
  -- Rows of the table that are no padding.
  local size = (VOCAB + -VOCAB % cfg.tensor) // cfg.tensor
  local rows = math.min(size, VOCAB - tensor:rank() * size)
  for step in ms.steps(to, from) do
    things.model(ms.randint { 2, high = rows, seed = 10 + step }):backward()
    things.model:clip_grad_norm(1)
    things.optimizer:step()
  end
end

local function whole_of(things)
  local found = {}
  for name, t in pairs(things.model:state()) do found["model/" .. name] = t end
  local state = things.optimizer:state()
  for name, own in pairs(state.parameters or {}) do
    for key, value in pairs(own) do
      local at = ("optimizer/%s/%s"):format(name, key)
      if type(value) == "number" then found[at] = ms.tensor { value }
      else found[at] = value end
    end
  end
  return found
end

local function compare(things, file, what)
  local own = whole_of(things)
  if rank ~= 0 then return assert(next(own) == nil) end
  local saved = assert(ms.safetensors.load(cfg.folder .. "/" .. file))
  expect.same(own, saved, what)
  expect.same(saved, own, what)
end

local function keep(things, file)
  local own = whole_of(things)
  if rank == 0 then assert(ms.safetensors.save(cfg.folder .. "/" .. file, own)) end
end

local what = {}

function what.save()
  local things = make()
  train(things, 0, MIDDLE)
  assert(ms.checkpoint.save(cfg.folder .. "/kept", { model = things.model,
    optimizer = things.optimizer, step = MIDDLE }))
  assert(things.model:save(cfg.folder .. "/middle.safetensors"))
  keep(things, "middle")
  train(things, MIDDLE, STEPS)
  keep(things, "end")
end

local function load(things)
  assert(ms.checkpoint.load(cfg.folder .. "/kept/step-00000003", things))
end

function what.resume()
  local things = make()
  load(things)
  compare(things, "middle", "resumed")
  train(things, MIDDLE, STEPS)
  compare(things, "end", "gone on")
end

function what.other()
  local things = make()
  load(things)
  compare(things, "middle", "checkpoint")
  local fresh = make()
  assert(fresh.model:load(cfg.folder .. "/middle.safetensors"))
  local state, file = fresh.model:state(), ms.safetensors.load(cfg.folder .. "/middle.safetensors")
  if rank == 0 then
    expect.same(state, file, "file")
    expect.same(file, state, "file")
  end
  -- From rank 0 alone, and each rank from its own pieces.
  local other = make()
  other.model:load_state(things.model:state())
  other.optimizer:load_state(things.optimizer:state())
  compare(other, "middle", "state")
  local third = make()
  third.model:load_state(things.model:state { kind = "sharded" })
  third.optimizer:load_state(things.optimizer:state { kind = "sharded" })
  compare(third, "middle", "pieces")
  -- On "meta" each rank reads its part only.
  if cfg.wrap == "none" then
    ms.seed(4)
    local later = ms.device("meta", function() return Model() end)
    assert(later:load(cfg.folder .. "/middle.safetensors"))
    later:materialize()
    local again = later:state()
    if rank == 0 then expect.same(again, file, "meta") end
  end
  expect.fails(function() things.model:load_state { nonsense = ms.ones { 1 } } end,
    "load_state: missing: ", "unknown: nonsense")
  -- What is not declared is equal, or it is not one model.
  if world:size() > 1 and cfg.wrap == "none" then
    ms.no_grad(function() things.model.blocks[stage:rank() * BLOCKS + 1].norm.bias:add_(rank) end)
    local same = cfg.tensor == 1
    if not same then
      expect.fails(function() things.model:save(cfg.folder .. "/broken") end, "save: 'blocks.",
        "norm.bias' of rank", "differs from that of rank")
    end
  end
end

what[cfg.what]()
print(("rank %d is done"):format(rank))
