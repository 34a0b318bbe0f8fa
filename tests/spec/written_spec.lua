-- Assignments that would have no effect are errors, which name the right call.
local ms = require "moonshard"
local nn, optim = ms.nn, ms.optim

local function refused(f, ...)
  local ok, message = pcall(f)
  assert.is_false(ok)
  for _, text in ipairs { ... } do assert.truthy(message:find(text, 1, true), message) end
end

describe("a write that changes nothing", function()
  it("is refused by optimizers and their groups", function()
    for _, kind in ipairs { "sgd", "adamw", "rprop" } do
      local o = optim[kind](nn.Linear(2, 2), { lr = 0.1 })
      refused(function() o.lr = 0.5 end, "'lr'", "optimizer:groups()[1].lr")
      refused(function() o.weight_decay = 0.5 end, "groups()[1].weight_decay")
      refused(function() o.learning_rate = 1 end, "'learning_rate'")
      refused(function() o:groups()[1].learning_rate = 1 end, kind, "'learning_rate'")
      refused(function() o:groups()[1].weight_deacy = 1 end, "did you mean 'weight_decay'")
      assert.equal("function", type(o.lr))
      o:groups()[1].lr, o:groups()[1].weight_decay = 0.25, 0.5
      assert.equal(0.25, o:lr())
      o:groups()[1].schedule = function() return 2 end
      assert.equal(0.5, o:lr())
    end
    local own = optim.define { name = "own", defaults = { speed = 1 }, step_param = print } {
      ms.zeros { 1 }:requires_grad_() }
    own:groups()[1].speed = 3
    refused(function() own:groups()[1].sped = 3 end, "did you mean 'speed'")
  end)

  it("is refused by scalers", function()
    local scaler = optim.scaler { init_scale = 8 }
    refused(function() scaler.factor = 2 end, "'factor'", "load_state")
    refused(function() scaler.growth_interval = 2 end, "optim.scaler")
    assert.equal(8.0, scaler:state().factor:item())
  end)

  it("is refused by modules: training, and options of wrapping", function()
    local dropout = nn.Dropout(0.5)
    refused(function() dropout.training = false end, "Dropout.training", "eval()")
    assert.is_true(dropout:is_training())
    for name, wrap in pairs { ddp = ms.ddp, fsdp = ms.fsdp } do
      local model = wrap(nn.Linear(2, 2))
      refused(function() model.find_unused = true end, "find_unused", "ms." .. name)
      refused(function() model.comm_hook = "noop" end, "comm_hook", "ms." .. name)
      refused(function() model.training = true end, "training")
      model.note = "fine"
      assert.equal("fine", model.module.note)
    end
    -- A field of the model's own has its name.
    local Net = nn.class "Net"
    function Net:init() self.group = 1 end
    local net = ms.ddp(nn.Sequential(nn.Linear(1, 1)))
    assert.is_nil(rawget(getmetatable(net).fields, "group"))
    local own = Net()
    own.layer = nn.Linear(1, 1)
    own = ms.ddp(own)
    own.group = 2
    assert.equal(2, own.module.group)
  end)
end)

describe("an optimizer of other parameters", function()
  local command = require "command"
  local function train(optimizer)
    local folder = command.folder()
    command.write(folder .. "/r.lua", ([[
      local ms = require "moonshard"
      local m = ms.nn.Sequential(ms.nn.Linear(4, 2), ms.nn.Linear(2, 1))
      ms.train { model = m, optimizer = %s, steps = 2, run = "run",
        data = function() return ms.ones { 2, 4 }, ms.ones { 2, 1 } end,
        loss = function(net, x, y) return ((net(x) - y) ^ 2):mean() end }]]):format(optimizer))
    local code, out, err = command.run(folder, "run r.lua")
    command.remove(folder)
    return code, out, err
  end

  it("is an error in ms.train, and of some of them a line", function()
    local code, _, err = train "ms.optim.sgd(ms.nn.Linear(1, 1))"
    assert.equal(1, code)
    assert.truthy(err:find("train: the optimizer has none of the model's parameters", 1, true), err)
    local out
    code, out, err = train "ms.optim.sgd(m[1])"
    assert.equal(0, code, err)
    assert.truthy(out:find("it leaves out 2 trained parameters ('1.weight' first)", 1, true), out)
    code, out, err = train "ms.optim.sgd(m)"
    assert.equal(0, code, err)
    assert.falsy(out:find("leaves out", 1, true))
  end)

  it("steps nothing, and says so once", function()
    local folder = command.folder()
    command.write(folder .. "/r.lua", [[
      local ms = require "moonshard"
      local m = ms.nn.Linear(2, 1)
      local o = ms.optim.sgd(m)
      for _ = 1, 3 do o:step() end
      m(ms.ones { 1, 2 }):sum():backward()
      o:step()]])
    local _, err = command.succeed(folder, "run r.lua")
    assert.equal(1, select(2, (err or ""):gsub("a step without any gradient", "")), err)
    command.remove(folder)
  end)
end)

describe("a table of modules", function()
  local Net = nn.class "Net"
  function Net:forward(x)
    for _, layer in ipairs(self.layers) do x = layer(x) end
    return x
  end

  it("is a part of the model where it is a list", function()
    local net = Net()
    net.layers = { nn.Linear(4, 4), nn.Linear(4, 2) }
    assert.equal(4, #net:parameters())
    assert.equal("layers.1.bias", net:named_parameters()[4].name)
    assert.same({ 3, 2 }, net(ms.ones { 3, 4 }):shape())
    assert.equal(2, #net.layers)
  end)

  it("is refused where it is another, or was filled later", function()
    local named, filled, deep, weights, later = Net(), Net(), Net(), Net(), Net()
    refused(function() named.layers = { first = nn.Linear(1, 1) } end, "Net.layers", "nn.List")
    refused(function() deep.layers = { { nn.Linear(1, 1) } } end, "Net.layers", "nn.List")
    refused(function() weights.layers = { nn.Parameter(ms.ones { 1 }) } end, "Net.layers")
    filled.layers = {}
    table.insert(filled.layers, nn.Linear(4, 4))
    refused(function() return filled(ms.ones { 1, 4 }) end, "Net.layers", "nn.List")
    refused(function() return filled:parameters() end, "Net.layers")
    later.head = nn.Linear(4, 4)
    later.layers = {}
    later(ms.ones { 1, 4 })
    later.layers[1] = nn.Linear(4, 4)
    for _, call in ipairs {
      function() return later:state() end, function() return optim.sgd(later) end,
      function() return ms.ddp(later) end, function() return later:save "nowhere" end,
    } do refused(call, "Net.layers") end
    -- Tables of other values are the user's own.
    local fine = Net()
    fine.sizes, fine.layers, fine.buffers_of = { 1, 2 }, nn.List {}, { a = ms.ones { 1 } }
    assert.same({ 1, 4 }, fine(ms.ones { 1, 4 }):shape())
  end)
end)
