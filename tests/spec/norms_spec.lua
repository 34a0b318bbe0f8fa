-- GroupNorm and BatchNorm against PyTorch (golden/composed/make_norms.py); 16 bits, errors, states.
-- (On several ranks: dist.norms.)
local ms = require "moonshard"
local support = require "support"
local near, fails = support.near, support.fails
local nn = ms.nn

local golden = assert(ms.safetensors.load(
  os.getenv "MOONSHARD_SOURCE" .. "/tests/golden/composed/norms.safetensors"))

-- The tensors whose names begin so, without that.
local function part(prefix)
  local found = {}
  for name, t in pairs(golden) do
    if name:sub(1, #prefix) == prefix then found[name:sub(#prefix + 1)] = t end
  end
  assert(next(found))
  return found
end

local function check_gradients(prefix, model, x)
  near(golden[prefix .. ".grad.x"]:to_table(), x:grad(), 1e-5)
  for _, item in ipairs(model:named_parameters()) do
    near(golden[prefix .. ".grad." .. item.name]:to_table(), item.parameter:grad(), 2e-5)
  end
end

describe("GroupNorm", function()
  it("computes what PyTorch's does", function()
    for case = 0, 3 do
      local prefix = "group" .. case
      local x = golden[prefix .. ".x"]:clone():requires_grad_()
      local model = nn.GroupNorm(golden[prefix .. ".groups"]:item(), x:size(2), { eps = 1e-4 })
      model:load_state(part(prefix .. ".before."))
      local y = model(x)
      near(golden[prefix .. ".y"]:to_table(), y, 1e-5)
      y:backward { gradient = golden[prefix .. ".gradient"] }
      check_gradients(prefix, model, x)
    end
  end)

  it("rounds 16 bits once", function()
    local model = nn.GroupNorm(2, 6)
    local x = ms.randn({ 2, 6, 9, seed = 1 }):to "bf16"
    local exact = model(x:to "f32"):to "bf16"
    assert.same(exact:to_table(), model(x):to_table())
    assert.same(exact:to_table(), model:to "bf16"(x):to_table())
  end)

  it("takes no weight, strided input and no elements", function()
    local plain, model = nn.GroupNorm(3, 6, { affine = false }), nn.GroupNorm(3, 6)
    assert.equal(0, #plain:parameters())
    local x = ms.randn { 5, 6, 4, seed = 2 }
    near(model(x):to_table(), plain(x), 1e-6)
    near(model(x):to_table(), model(x:transpose(1, 3):contiguous():transpose(1, 3)), 0)
    assert.same({ 0, 6, 4 }, model(ms.zeros { 0, 6, 4 }):shape())
  end)

  it("names what does not fit", function()
    fails(function() nn.GroupNorm(4, 6) end, "GroupNorm: 6 channels do not divide by 4 groups")
    fails(function() nn.GroupNorm(0, 6) end, "GroupNorm: the number of groups", "not 0")
    fails(function() nn.GroupNorm(1, 6, { ep = 1 }) end, "'ep'", "'eps'")
    fails(function() nn.GroupNorm(1, 6)(ms.ones { 2, 5 }) end, "GroupNorm: tensor [2, 5] f32",
      "[batch, 6, ...] is expected")
    fails(function() nn.GroupNorm(1, 6) "x" end, "GroupNorm: x must be a tensor")
  end)
end)

describe("BatchNorm", function()
  it("computes what PyTorch's does, in training and evaluation", function()
    for _, prefix in ipairs { "1d", "2d" } do
      local model = nn.BatchNorm(4, { momentum = prefix == "1d" and 0.3 or nil })
      model:load_state(part(prefix .. ".before."))
      local x, y
      for step = 0, 2 do
        x = golden[("%s.x.%d"):format(prefix, step)]:clone():requires_grad_()
        y = model(x)
        near(golden[("%s.y.%d"):format(prefix, step)]:to_table(), y, 1e-5)
      end
      y:backward { gradient = golden[prefix .. ".gradient"] }
      check_gradients(prefix, model, x)
      local state = model:state()
      for name, t in pairs(part(prefix .. ".after.")) do
        assert.equal(t:dtype(), state[name]:dtype())
        near(support.flat(t), support.flat(state[name]), 1e-5)
      end
      model:eval()
      x = golden[prefix .. ".eval.x"]:clone():requires_grad_()
      y = model(x)
      near(golden[prefix .. ".eval.y"]:to_table(), y, 1e-5)
      y:backward { gradient = golden[prefix .. ".gradient"] }
      near(golden[prefix .. ".eval.grad"]:to_table(), x:grad(), 1e-5)
      near(support.flat(golden[prefix .. ".after.running_mean"]),
        support.flat(model.running_mean), 1e-5)
    end
  end)

  it("lives in steps, and goes on from a checkpoint", function()
    local folder = os.tmpname()
    os.remove(folder)
    local function train(model, first, last)
      local optimizer = ms.optim.sgd(model, { lr = 0.1 })
      for step in ms.steps(last, first) do
        model(ms.randn { 6, 3, seed = step + 1 } * (step + 1)):square():sum():backward()
        optimizer:step()
      end
      return model
    end
    local whole = train(nn.BatchNorm(3), 0, 5)
    local half = train(nn.BatchNorm(3), 0, 2)
    local path = assert(ms.checkpoint.save(folder, { model = half, step = 2 }))
    local again = nn.BatchNorm(3)
    assert(ms.checkpoint.load(path, { model = again }))
    train(again, 2, 5)
    for name, t in pairs(whole:state()) do
      assert.same(support.flat(t), support.flat(again:state()[name]), name)
    end
    assert.equal(5, again.num_batches_tracked:item())
    os.execute(("rm -rf '%s'"):format(folder))
  end)

  it("computes 16 bits in f32, and keeps a large mean apart", function()
    local x = ms.randn { 64, 2, seed = 3 }
    near(nn.BatchNorm(2)(x):to_table(), nn.BatchNorm(2)(x + 1024), 1e-3)
    local half = x:to "bf16"
    assert.same(nn.BatchNorm(2)(half:to "f32"):to "bf16":to_table(),
      nn.BatchNorm(2)(half):to_table())
    assert.equal("bf16", nn.BatchNorm(2):to "bf16"(half):dtype())
    assert.equal(0, #nn.BatchNorm(2, { affine = false }):parameters())
  end)

  it("names what does not fit", function()
    local model = nn.BatchNorm(2)
    fails(function() model(ms.ones { 1, 2 }) end, "BatchNorm: tensor [1, 2, 1] f32: training takes",
      "call eval()")
    assert.same({ 1, 2 }, model:eval()(ms.ones { 1, 2 }):shape())
    fails(function() model(ms.ones { 2 }) end, "[batch, 2, ...] is expected")
    fails(function() nn.BatchNorm(2.5) end, "BatchNorm: the number of channels")
    fails(function() nn.BatchNorm(2, { momentum = 2 }) end, "BatchNorm: momentum is 2")
    fails(function() nn.BatchNorm(2, { group = 3 }) end, "BatchNorm: group must be a group")
  end)
end)
