-- What every rank of fsdp_layout_spec.lua runs: units of several modules, against the same model
-- without shards, and the errors of `wrap`.
local ms = require "moonshard"
local core = require "moonshard.core"
local rank, size = ms.rank(), ms.world_size()

local VOCAB, WIDTH, ROWS, LENGTH, STEPS = 10, 6, 12, 5, 3

local function fails(f, ...)
  local ok, message = pcall(f)
  assert(not ok, "no error")
  for _, part in ipairs { ... } do
    assert(tostring(message):find(part, 1, true), ("'%s' is not in: %s"):format(part, message))
  end
end

-- A language model whose head is a module that has the embedding's weight.
local Tied = ms.nn.class "Tied"
function Tied:init()
  self.wte = ms.nn.Embedding(VOCAB, WIDTH)
  self.mid = ms.nn.Sequential(ms.nn.Linear(WIDTH, WIDTH), ms.nn.Linear(WIDTH, WIDTH))
  self.norm = ms.nn.LayerNorm(WIDTH)
  self.head = ms.nn.Linear(WIDTH, VOCAB)
  self.head.weight = self.wte.weight
end
function Tied:forward(x, early)
  x = self.wte(x)
  if not early then x = self.mid(x):tanh() + x end
  return self.head(self.norm(x))
end

local function batch(step)
  local all = ms.randint {
    ROWS, LENGTH + 1, low = 0, high = VOCAB, seed = 7 + step, per_rank = false,
  }
  return all
end

local function loss_of(model, tokens)
  return model(tokens:narrow(2, 1, LENGTH)):cross_entropy(tokens:narrow(2, 2, LENGTH))
end

local function new_tied()
  ms.seed(4)
  return Tied()
end

-- Trains on all rows (whole), or on this rank's.
local function train(model, whole)
  local optimizer = ms.optim.sgd(model, { lr = 0.5, momentum = 0.9 })
  for step in ms.steps(STEPS) do
    local tokens = batch(step)
    if not whole then tokens = tokens:narrow(1, rank * ROWS // size + 1, ROWS // size) end
    loss_of(model, tokens):backward()
    optimizer:step()
    optimizer:zero_grad()
  end
  return model:state()
end

-- Sums over ranks are added in another order: rounding of f32.
local function assert_close(own, expected, what)
  for name, t in ms.sorted_pairs(expected) do
    t = t:detach()
    local d = (own[name]:detach() - t):abs():max():item() / t:abs():max():item()
    assert(d <= 2e-6, ("%s: %s differs by %g"):format(what, name, d))
  end
end

local groups = { names = { "mid%.%d" }, groups = { { "wte", "head" } } }

-- A tied weight whose rows (10) do not divide by 3 or 4 ranks.
do
  local expected = train(new_tied(), true)
  for _, strategy in ipairs { "full_shard", "shard_grad_op", "no_shard", "hybrid_shard" } do
    local model = ms.fsdp(new_tied(), { wrap = groups, strategy = strategy })
    local units = model:units()
    assert(#units == 4 and units[2].name == "wte+head" and #units[2].parameters == 2)
    assert(#units[1].parameters == 2, "the root has the norm")
    assert_close(train(model), expected, strategy)
  end
end

-- How often a unit's parameters travel in f.
local function gathers(name, f)
  core.comm_record(true)
  f()
  core.comm_record(false)
  local count = 0
  for _, record in ipairs((core.comm_records())) do
    if record.op == "all_gather" and record.label == name then count = count + 1 end
  end
  return count
end

-- The unit stays gathered between its modules, and no longer than that.
if size > 1 then
  local model = ms.fsdp(new_tied(), { wrap = groups })
  local tokens = batch(0):narrow(1, 1, 1)
  local loss
  local function forget() ms.no_grad(function() model.wte.weight:mul_(1) end) end
  assert(gathers("wte+head", function() loss = loss_of(model, tokens) end) == 1)
  assert(not model:units()[2].gathered)
  assert(gathers("wte+head", function() loss:backward() end) == 1)
  assert(not model:units()[2].gathered)
  -- Where only some of its modules run, the root's end is the end.
  forget()
  ms.no_grad(function() model.wte(tokens) end)
  assert(model:units()[2].gathered)
  ms.no_grad(function() loss_of(model, tokens) end)
  assert(not model:units()[2].gathered)
  model.head:hook("pre_forward", function() assert(model:units()[2].gathered) end)
  ms.no_grad(function() loss_of(model, tokens) end)
end

-- Bad input.
fails(function()
  ms.fsdp(new_tied(), { wrap = { groups = { { "wte", "head" }, { "mid", "hea." } } } })
end, "module 'head' is in groups 1 and 2")
fails(function() ms.fsdp(new_tied(), { wrap = { groups = { { "wte", "heat" } } } }) end,
  "wrap.groups[1]", "'heat'", "did you mean 'head'")
fails(function() ms.fsdp(new_tied(), { wrap = { groups = { "wte" } } }) end, "wrap.groups[1]",
  "list of names")
fails(function() ms.fsdp(new_tied(), { wrap = { names = { "wte" } } }) end,
  "'wte.weight' (unit \"wte\") and 'head.weight' (unit \"root\") are one parameter", "groups")
print(("rank %d is done"):format(rank))
