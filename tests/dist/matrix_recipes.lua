-- Run by every rank of matrix_recipes_spec.lua: the optimizers of recipes/ that step whole
-- matrices. what=same: a model that each rank has, one whose work is divided, and a sharded one
-- have the same weights. what=dion: its momentum, its bytes. what=save, what=resume: Dion, of which
-- each rank has its own momentum.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local cfg = ms.config { source = ".", folder = "", what = "same" }
local nn, rank, world = ms.nn, ms.rank(), ms.world()
local function file(name) return dofile(("%s/recipes/%s.lua"):format(cfg.source, name)) end

local function make_model()
  ms.seed(3)
  return nn.gpt2 { vocab = 24, context = 6, layers = 1, width = 12, heads = 2 }
end
local function batch_of(step)
  return ms.randint { 4, 7, low = 0, high = 24, seed = 1000 * step + rank, per_rank = false }
end
local function backward(net, step)
  local ids = batch_of(step)
  local loss = net(ids:narrow(2, 1, 6)):cross_entropy(ids:narrow(2, 2, 6))
  loss:backward()
  return loss
end
local function recipe_of(net)
  return ms.optim.adamw({
    { params = net:parameters(function(p) return p:dim() >= 2 end) },
    { params = net:parameters(function(p) return p:dim() < 2 end), weight_decay = 0 },
  }, { lr = 2e-3, weight_decay = 0.1, schedule = ms.optim.linear { steps = 20, floor = 0.1 } })
end

local what = {}

function what.same()
  for _, name in ipairs { "muon", "shampoo" } do
    local make, kept = file("optim/" .. name), nil
    for _, way in ipairs { "replicated", "owned", "sharded", "rows" } do
      local net
      if way == "replicated" or way == "owned" then net = ms.ddp(make_model())
      else
        net = ms.fsdp(make_model(), {
          layout = way == "rows" and "rows" or nil, wrap = { class = "GPT2Block" },
        })
      end
      local optimizer = make { model = net, recipe = recipe_of(net), every = 2,
        shard = way == "owned" and world or nil }
      local before = expect.whole(net)
      for step in ms.steps(4) do
        backward(net, step)
        optimizer:step()
      end
      local values = expect.whole(net)
      for key, t in pairs(values) do assert((t - before[key]):abs():max():item() > 1e-4, key) end
      if kept then expect.same(values, kept, name .. " " .. way) end
      kept = kept or values
      net:unwrap()
    end
  end
end

-- Orthonormal: the update of a matrix has singular values of about 1, so W W^T of a wide one is
-- near the identity. A closed form for Shampoo: of a diagonal gradient the roots are known.
function what.forms()
  local wide = nn.Linear(8, 3, { bias = false })
  local before = wide.weight:detach():clone()
  wide.weight:set_grad(ms.randn { 3, 8, seed = 5 })
  file "optim/muon" { model = wide, lr = 1 }:step()
  local change = before - wide.weight:detach()
  local values = change:matmul(change:t())
  for i = 1, 3 do
    local on = values:select(1, i):select(1, i):item()
    assert(on > 0.4 and on < 1.5, on)                        -- 0.7 to 1.2, squared
  end

  local square = nn.Linear(2, 2, { bias = false })
  before = square.weight:detach():clone()
  square.weight:set_grad(ms.tensor { { 4.0, 0.0 }, { 0.0, 9.0 } })
  -- L = R = diag(16, 81), whose inverse fourth roots are 1/2 and 1/3.
  file "optim/shampoo" { model = square, lr = 1, momentum = 0, damping = 0,
    graft = false }:step()
  expect.equal(before - square.weight:detach(), ms.tensor { { 1.0, 0.0 }, { 0.0, 1.0 } }, "roots",
    1e-5)
  -- A side that is too long is left: L^-1/2 G of diag(4, 9) is the identity as well.
  before = square.weight:detach():clone()
  square.weight:set_grad(ms.tensor { { 4.0, 0.0 }, { 0.0, 9.0 } })
  file "optim/shampoo" { model = square, lr = 1, momentum = 0, largest = 1,
    graft = false }:step()
  expect.equal(before - square.weight:detach(), ms.tensor { { 4.0, 0.0 }, { 0.0, 9.0 } }, "none",
    1e-6)
end

local function dion_of(rank_of)
  local dion = file "hooks/dion" { rank = rank_of, momentum = 0.9 }
  local net = ms.ddp(make_model(), { comm_hook = dion.link })
  return net, dion.optimizer(net, recipe_of(net))
end
local function momenta(optimizer)
  local found = {}
  for name, state in pairs(optimizer:state().parameters) do
    found[name] = state["owned/momentum"]
  end
  return found
end

function what.dion()
  -- At full rank nothing is left out: the mean over ranks of what stays is 0.9 of what there was.
  local net, optimizer = dion_of(99)
  local function mean(t) return world:all_reduce(t:clone(), "avg"):value() end
  for step in ms.steps(3) do
    -- This rank's own gradients, from a copy of the model.
    local twin, gradients = make_model(), {}
    twin:load_state(net.module:state())
    backward(twin, step)
    for _, item in ipairs(twin:named_parameters()) do
      gradients[item.name] = item.parameter:grad()
    end
    backward(net, step)
    local before = momenta(optimizer)
    -- The norm that a loop sees is alike on all ranks.
    local norms = world:all_gather(net:clip_grad_norm(1e9):view(1)):value():to_table()
    for _, norm in ipairs(norms) do assert(norm == norms[1]) end
    optimizer:step()
    local count = 0
    for name, after in ms.sorted_pairs(momenta(optimizer)) do
      local whole = before[name] and before[name] + gradients[name] or gradients[name]
      expect.equal(mean(after), mean(whole) * 0.9, "momentum of " .. name, 1e-5)
      count = count + 1
    end
    assert(count == 4, count)
  end
  -- Bytes of a step: rank (rows + columns) of each matrix, and all else.
  net, optimizer = dion_of(2)
  for step in ms.steps(3) do                                 -- buckets are cut anew in the second
    backward(net, step)
    optimizer:step()
  end
  local function sent() return (select(2, world:_traffic())) end
  local begun, expected = sent(), 0
  backward(net, 3)
  optimizer:step()
  for _, item in ipairs(net.module:named_parameters()) do
    local shape = item.parameter:shape()
    local is_matrix = #shape == 2 and not item.name:find "^w[tp]e"
    expected = expected + 4 * (is_matrix and 2 * (shape[1] + shape[2]) or item.parameter:numel())
  end
  assert(sent() - begun == expected, ("%d, not %d"):format(sent() - begun, expected))
end

local function train(net, optimizer, from, to)
  for step in ms.steps(to, from) do
    backward(net, step)
    optimizer:step()
  end
end
function what.save()
  local net, optimizer = dion_of(2)
  train(net, optimizer, 0, 3)
  assert(ms.checkpoint.save(cfg.folder .. "/kept", { net = net, optimizer = optimizer, step = 3 }))
  train(net, optimizer, 3, 6)
  local all = net.module:state()
  for name, t in pairs(momenta(optimizer)) do all["momentum " .. name] = t end
  assert(ms.safetensors.save(("%s/end-%d"):format(cfg.folder, rank), all))
end
function what.resume()
  local net, optimizer = dion_of(2)
  assert(ms.checkpoint.load(cfg.folder .. "/kept/step-00000003",
    { net = net, optimizer = optimizer }))
  train(net, optimizer, 3, 6)
  local all = net.module:state()
  for name, t in pairs(momenta(optimizer)) do all["momentum " .. name] = t end
  expect.same(all, assert(ms.safetensors.load(("%s/end-%d"):format(cfg.folder, rank))), "resumed")
end

what[cfg.what]()
print(("rank %d is done"):format(rank))
