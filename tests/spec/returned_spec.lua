-- Functions that the library calls return tensors. One that is gone is an error with the text that
-- every use of it raises, never a result that is ignored. Those of gathers: fsdp_gathers_spec.lua.
local ms = require "moonshard"
local support = require "support"
local fails = support.fails

-- A tensor whose step has ended.
local function gone()
  local t
  for _ in ms.steps(1) do t = ms.ones { 2 } end
  return t
end

local WHY <const> = "was released when its step ended"

local function line(t) return (select(2, pcall(t.sum, t)):match "made at (%S+:%d+)") end

-- A linear layer of one row, and a pass with its backward.
local function pass(model)
  model(ms.ones { 1, 2, requires_grad = true }):sum():backward()
end

local kinds = {
  on_grad = function(t)
    local x = ms.ones { 2, requires_grad = true }
    local y = x * 2
    y:on_grad(function() return t end)
    y:sum():backward()
  end,
  ["on_grad of a leaf"] = function(t)
    local x = ms.ones { 2, requires_grad = true }
    x:on_grad(function() return t end)
    x:sum():backward()
  end,
  recompute = function(t)
    ms.recompute(function() return t end, ms.ones { 2, requires_grad = true })
  end,
  and_then = function(t)
    ms.world():all_reduce(ms.ones { 2 }):and_then(function() return t end)
  end,
  ["the and_then of a link"] = function(t)
    pass(ms.ddp(ms.nn.Linear(2, 1), { comm_hook = function(bucket, next)
      return next(bucket):and_then(function() return t end)
    end }))
  end,
  ["a link"] = function(t)
    pass(ms.ddp(ms.nn.Linear(2, 1), { comm_hook = function(bucket, next)
      next(bucket)
      return t
    end }))
  end,
  ["a link after another"] = function(t)
    pass(ms.ddp(ms.nn.Linear(2, 1), { comm_hook = ms.hooks.chain {
      function(bucket, next) return next(bucket) end,
      function(bucket, next)
        next(bucket)
        return t
      end,
    } }))
  end,
  ["encode of a stage"] = function(t)
    pass(ms.ddp(ms.nn.Linear(2, 1), { comm_hook = ms.hooks.stage {
      name = "s", encode = function() return t end,
    } }))
  end,
  ["decode of a stage"] = function(t)
    pass(ms.ddp(ms.nn.Linear(2, 1), { comm_hook = ms.hooks.stage {
      name = "s", decode = function() return t end,
    } }))
  end,
  buffer_hook = function(t)
    local model = ms.nn.Linear(2, 1)
    model:add_buffer("count", ms.ones { 1 })
    pass(ms.ddp(model, { buffer_hook = function() return ms.all { t } end }))
  end,
}
for _, moment in ipairs { "pre_forward", "forward", "pre_backward", "backward" } do
  kinds["a hook at " .. moment] = function(t)
    local model = ms.nn.Linear(2, 1)
    model:hook(moment, function() return t end)
    pass(model)
  end
  kinds["a list of a hook at " .. moment] = function(t)
    local model = ms.nn.Linear(2, 1)
    model:hook(moment, function() return { t } end)
    pass(model)
  end
end

describe("a tensor that is gone is refused as the result of", function()
  for name, f in pairs(kinds) do
    it(name, function()
      local t = gone()
      fails(function() f(t) end, "the tensor made at " .. line(t), WHY)
    end)
  end
end)

describe("a gradient hook", function()
  it("may return the gradient of another hook only while that is valid", function()
    local x = ms.ones { 2, requires_grad = true }
    local a, got = x * 2, nil
    local b = a * 3
    b:on_grad(function(d) got = d end)
    a:on_grad(function() return got end)
    fails(function() b:mul(ms.tensor { 5.0, 7.0 }):sum():backward() end,
      "on_grad: the hook returned a tensor that is gone", "only valid inside its gradient hook")
    assert.is_nil(x:grad())
  end)

  it("may return what it got, as it is, changed in place, or closed never", function()
    local function gradient(f)
      local x = ms.ones { 2, requires_grad = true }
      local y = x * 2
      y:on_grad(f)
      y:mul(ms.tensor { 5.0, 7.0 }):sum():backward()
      return x:grad():to_table()
    end
    assert.same({ 10, 14 }, gradient(function(d) return d end))
    assert.same({ 30, 42 }, gradient(function(d) return d:mul_(3) end))
    assert.same({ 30, 42 }, gradient(function(d) d:mul_(3) end))
    fails(function()
      gradient(function(d)
        local own <close> = d -- luacheck: ignore own
        return d
      end)
    end, "the hook returned a tensor that is gone", "was closed")
  end)

  it("writes its gradient in place only if that is no other tensor's", function()
    for _, first in ipairs { true, false } do
      local a, b = ms.ones { 2, requires_grad = true }, ms.ones { 2, requires_grad = true }
      local a2, b2 = a * 1, b * 1
      local hooked = first and b2 or a2
      local remove = hooked:on_grad(function(d) d:mul_(2) end)
      local function backward() (a2 + b2):mul(ms.tensor { 3.0, 5.0 }):sum():backward() end
      if first then
        fails(backward, "on_grad: the hook wrote its gradient in place", "clone it first")
        assert.is_nil(a:grad())
      else backward() end
      remove()
      a2, b2 = a * 1, b * 1
      hooked = first and b2 or a2
      hooked:on_grad(function(d) return d:clone():mul_(2) end)
      a:set_grad(nil)
      b:set_grad(nil)
      backward()
      assert.same(first and { 3, 5 } or { 6, 10 }, a:grad():to_table())
      assert.same(first and { 6, 10 } or { 3, 5 }, b:grad():to_table())
    end
  end)

  it("of a module returns a gradient, if it returns a list", function()
    for _, moment in ipairs { "pre_backward", "backward" } do
      local model = ms.nn.Linear(2, 1)
      model:hook(moment, function() return {} end)
      fails(function() pass(model) end, moment .. " hook returned a list without a gradient")
    end
  end)
end)
