-- A backward that leaves a bucket of a ddp model waiting is noticed where its gradients are read,
-- and where a step or a run ends: each rank would go on with gradients of its own.
local command = require "command"

local HEAD = [[
local ms = require "moonshard"
local Net = ms.nn.class "Net"
function Net:init()
  self.a, self.b = ms.nn.Linear(1, 1, { bias = false }), ms.nn.Linear(1, 1, { bias = false })
end
function Net:forward(x, part)
  return part == "a" and self.a(x) or part == "b" and self.b(x) or self.a(x) + self.b(x)
end
local x = ms.full(ms.rank() + 1, { 1, 1 })
local function make(options)
  local net = Net()
  ms.no_grad(function() net.a.weight:fill_(1) net.b.weight:fill_(1) end)
  return ms.ddp(net, options)
end
local model = make()
local optimizer = ms.optim.sgd(model, { lr = 0.25 })
local function incomplete() model(x, "a"):sum():backward() end
]]

-- What reads gradients or states, after a backward that has left out b.
local readers = {
  step = "incomplete() optimizer:step()",
  step_param = "incomplete() optimizer:step_param(model:parameters()[1])",
  clip_grad_norm = "incomplete() model:clip_grad_norm(1)",
  clip_of_parameters = "incomplete() ms.optim.clip_grad_norm(model:parameters(), 1, math.huge)",
  clip_grad_value = "incomplete() model:clip_grad_value(1)",
  scaler = [[
    local scaler = ms.optim.scaler()
    scaler:scale(model(x, "a"):sum()):backward()
    scaler:step(optimizer)]],
  unscale = [[
    local scaler = ms.optim.scaler()
    scaler:scale(model(x, "a"):sum()):backward()
    scaler:unscale(optimizer)]],
  state = "incomplete() optimizer:state()",
  checkpoint = "incomplete() ms.checkpoint.save('kept', { model = model, step = 1 })",
  save = "incomplete() model:save 'one.safetensors'",
  check_replicas = "incomplete() model:check_replicas()",
  accumulate = [[
    model:accumulate(2, function(i) model(x, i == 1 and "a" or "b"):sum():backward() end)
    optimizer:step()]],
  bucket_of_both = [[
    model:no_sync(function() model(x):sum():backward() end)
    incomplete()
    optimizer:step()]],
  -- The script reads no gradient: the end of the step, or of the job, finds it.
  steps = "for _ in ms.steps(3) do incomplete() end",
  job = "incomplete()",
  in_backward = [[
    local other = make()
    ms.optim.in_backward(ms.optim.sgd, other:parameters(), { lr = 0.25 })
    other(x):sum():backward()
    other(x, "a"):sum():backward()]],
  static_graph = [[
    local other = make { static_graph = true }
    for i = 1, 2 do other(x, i == 2 and "a" or nil):sum():backward() end
    ms.optim.sgd(other, { lr = 0.25 }):step()]],
  train = [[
    ms.train { model = model, optimizer = optimizer, steps = 3, run = "run", save = { every = 3 },
      data = function() return x, x end,
      loss = function(m, input) return m(input, ms.step() == 2 and "a" or nil):sum() end }]],
}

describe("a bucket that waits for gradients", function()
  for name, body in pairs(readers) do
    it("is noticed: " .. name, function()
      local folder = command.folder()
      command.write(folder .. "/r.lua", HEAD .. body .. "\nio.write ''")
      local code, _, err = command.run(folder, "run r.lua -n 2")
      assert.not_equal(0, code, err)
      local missing = (name == "accumulate") and "a" or "b"
      assert.truthy(err:find(("for '%s.weight'"):format(missing), 1, true), err)
      assert.falsy(io.open(folder .. "/kept/step-00000001/manifest.json"))
      assert.falsy(io.open(folder .. "/run/step-00000003/manifest.json"))
      assert.falsy(io.open(folder .. "/one.safetensors"))
      command.remove(folder)
    end)
  end

  it("may wait between two backwards of one pass, and while another model steps", function()
    local folder = command.folder()
    command.write(folder .. "/r.lua", HEAD .. [[
      local other = make()
      local others = ms.optim.sgd(other, { lr = 0.25 })
      for _ in ms.steps(2) do
        local first = model(x, "both")
        other(x):sum():backward()
        others:step()
        first:sum():backward()
        model:clip_grad_norm(10)
        optimizer:step()
      end
      -- Two losses of one forward, each of which reaches one parameter.
      local Two = ms.nn.class "Two"
      function Two:init()
        self.a, self.b = ms.nn.Linear(1, 1, { bias = false }), ms.nn.Linear(1, 1, { bias = false })
      end
      function Two:forward(input) return self.a(input), self.b(input) end
      local two = ms.ddp(Two())
      local steps = ms.optim.sgd(two, { lr = 0.25 })
      local a, b = two(x)
      a:sum():backward()
      other(x):sum():backward()
      others:step()
      b:sum():backward()
      steps:step()
      two:check_replicas(steps)
      -- An evaluation that records, after the backward.
      model(x):sum():backward()
      model(x)
      optimizer:step()
      print "right"]])
    local code, out, err = command.run(folder, "run r.lua -n 2")
    assert.equal(0, code, err)
    assert.truthy(out:find "right")
    command.remove(folder)
  end)
end)
