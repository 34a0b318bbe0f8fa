-- Run by every rank of norms_spec.lua: BatchNorm over several ranks is BatchNorm of the whole batch
-- on one, with its gradients and running statistics; also under ddp. Parts have unequal sizes.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local rank, size, nn = ms.rank(), ms.world_size(), ms.nn

-- Rows of this rank: 2 more than the rank before has.
local function rows_of(r) return 3 + 2 * r end
local first, all = 1, 0
for r = 0, size - 1 do
  if r < rank then first = first + rows_of(r) end
  all = all + rows_of(r)
end
local x = ms.randn({ all, 4, 3, seed = 1 }) * 3 + 1
local g = ms.randn { all, 4, 3, seed = 2 }
local function own(t) return t:narrow(1, first, rows_of(rank)):clone() end

local function model_of(options)
  local model = nn.BatchNorm(4, options)
  ms.no_grad(function()
    model.weight:copy_(ms.tensor { 1., 2, -1, 0.5 })
    model.bias:copy_(ms.tensor { 0., 1, 2, 3 })
  end)
  return model
end

-- The whole batch on this rank alone.
local alone, whole = model_of { group = false }, x:clone():requires_grad_()
local y = alone(whole)
y:backward { gradient = g }

local function check(what, model, forward, gradient, divided)
  local part = own(x):requires_grad_()
  local z = forward(part)
  expect.equal(z, own(y:detach()), what .. ": values", 1e-5)
  z:backward { gradient = own(g) }
  expect.equal(part:grad(), own(whole:grad()), what .. ": gradient of the input", 1e-5)
  for _, name in ipairs { "weight", "bias" } do
    local sum = gradient(model[name]:grad())
    expect.equal(sum, alone[name]:grad() / divided, what .. ": gradient of " .. name, 1e-5)
  end
  for _, name in ipairs { "running_mean", "running_var" } do
    expect.equal(model[name], alone[name], what .. ": " .. name, 1e-5)
  end
  assert(model.num_batches_tracked:item() == 1)
end

local plain = model_of()
check("over ranks", plain, plain, function(t) return ms.world():all_reduce(t):sync() end, 1)
local inner = model_of()
check("under ddp", inner, ms.ddp(inner), function(t) return t end, size)
-- Evaluation talks to no rank.
plain:eval()
if rank == 0 then plain(own(x)) end
-- A group of this rank alone.
local parts = {}
for r = 0, size - 1 do parts[r + 1] = { r } end
local single, other = model_of { group = ms.world():split(parts) }, model_of { group = false }
expect.equal(single(own(x)), other(own(x)), "a group of one rank", 0)
print(("rank %d is done"):format(rank))
