-- Training in fp8 on a GPU, over the stand-in for NVIDIA's driver. There some kernels give the
-- greatest size of what they write (ops/fp8.h): no loss and no gradient depends on it.
local command = require "command"

-- Trains a small model, and prints the bits of losses and gradients of each step. `how`: what is
-- done with what parts of a block get and give.
local SCRIPT = [[
local ms = require "moonshard"
local name, kind, how = os.getenv "HOW":match "(%S+) (%S+) (%S+)"
local model = ms.nn[name] {
  vocab = 64, context = 16, layers = 2, width = 32, heads = 2, hidden = 64,
  recompute = kind == "recompute",
}
local pre_forward = {
  copied = function(_, inputs)
    inputs[1] = inputs[1]:clone()
    return inputs
  end,
  twice = function(_, inputs) inputs[1]:mul_(2) end,
  twice_a_copy = function(_, inputs)
    inputs[1] = inputs[1]:clone():mul(2)
    return inputs
  end,
}
-- A product with 1 gives another tensor with the same numbers, also to the gradient.
local forward = { copied = function(_, _, outputs) return { outputs[1]:mul(1) } end }
for path, part in model:modules() do
  if path:match "mlp$" or path:match "attn$" then
    if pre_forward[how] then part:hook("pre_forward", pre_forward[how]) end
    if forward[how] then part:hook("forward", forward[how]) end
  end
end
local optimizer = ms.optim.adamw(model, { lr = 1e-2 })
if kind == "trained" or kind == "graph" then
  local x = ms.randint { 2, 16, low = 0, high = 64, seed = 1 }:keep()
  ms.train {
    model = model, optimizer = optimizer, steps = 12, dtype = "fp8", graph = kind == "graph",
    quiet = true, run = false, data = function() return x, x end,
    loss = function(net, ids, targets) return net(ids):cross_entropy(targets) end,
  }
  for _, p in ipairs(model:parameters()) do print(("%a"):format(p:norm():item())) end
  assert(kind == "trained" or ms.info().graph.graphs > 0)
  return
end
for step in ms.steps(3) do
  local x = ms.randint { 2, 16, low = 0, high = 64, seed = step }
  local loss = ms.autocast("fp8", function() return model(x):cross_entropy(x) end)
  loss:backward()
  io.write(("%a"):format(loss:item()))
  for _, p in ipairs(model:parameters()) do io.write((" %a"):format(p:grad():norm():item())) end
  io.write "\n"
  optimizer:step()
  optimizer:zero_grad()
end
]]

describe("training in fp8 on a GPU", function()
  local folder
  before_each(function()
    folder = command.folder()
    command.write(folder .. "/script.lua", SCRIPT)
  end)
  after_each(function() command.remove(folder) end)

  local function bits(how, options, settings)
    return command.succeed(folder, "run script.lua --device cuda --seed 5 " .. (options or ""),
      ("HOW='%s' MOONSHARD_CUDA_DRIVER='%s' %s"):format(how, os.getenv "MOONSHARD_STAND_IN",
        settings or ""))
  end

  for _, name in ipairs { "gpt2", "llama" } do
    it("has the bits of " .. name .. " whose kernels give no greatest sizes", function()
      local expected = bits(name .. " plain copied")
      assert.are.equal(expected, bits(name .. " plain as_it_is"))
      assert.are.equal(expected, bits(name .. " recompute as_it_is"))
      assert.are.equal(expected, bits(name .. " plain as_it_is", "--strict"))
      assert.are.equal(expected, bits(name .. " plain as_it_is", nil,
        "MOONSHARD_STAND_IN_WATCH=stop"))
    end)

    it("has the bits of " .. name .. " where its tasks come again as graphs", function()
      local expected = bits(name .. " trained copied")
      assert.are.equal(expected, bits(name .. " trained as_it_is"))
      assert.are.equal(expected, bits(name .. " graph as_it_is"))
    end)

    it("sees what a hook changes of " .. name, function()
      local expected = bits(name .. " plain twice_a_copy")
      assert.are.equal(expected, bits(name .. " plain twice"))
      assert.are.equal(expected, bits(name .. " recompute twice"))
      assert.are_not.equal(expected, bits(name .. " plain as_it_is"))
    end)
  end
end)
