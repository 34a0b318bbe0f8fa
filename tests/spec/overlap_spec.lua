-- When optimizers run: every plan and every way to step early gives the bits of the plain loop;
-- recorded times show that early is early; mistakes are named. tests/dist/overlap.lua has what
-- needs several ranks.
local ms = require "moonshard"
local core = require "moonshard.core"
local support = require "support"
local fails, recorded, eventually = support.fails, support.recorded, support.eventually
local hooks, nn, optim = ms.hooks, ms.nn, ms.optim

local function make_model(width)
  ms.seed(1)
  width = width or 16
  return nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, width), nn.GELU(),
    nn.Linear(width, 4))
end

local function values(model)
  local list = {}
  for _, p in ipairs(model:parameters()) do
    for _, x in ipairs(support.flat(p)) do list[#list + 1] = ("%a"):format(x) end
  end
  return table.concat(list, " ")
end

local function pass(model, seed)
  model(ms.randn { 4, 8, seed = seed }):square():mean():backward()
end

local wrap = { bucket_bytes = 256 }

-- An optimizer written in Lua, with state and a step count.
local heavy = optim.define {
  name = "heavy_ball",
  base = "sgd",
  defaults = { momentum = 0.9 },
  step_param = function(p, grad, state, group, step)
    state.velocity = state.velocity or p:zeros_like()
    state.velocity:mul_(group.momentum):add_(grad)
    p:add_(state.velocity, -group.lr / (step + 1))
  end,
}

local makers = { heavy = heavy }
for _, kind in ipairs {
  "sgd", "adam", "adamw", "adagrad", "adadelta", "rmsprop", "rprop", "adamax",
} do
  makers[kind] = optim[kind]
end

-- The loop that a user writes; prepare gets the model and the options, and returns the trained
-- model and its optimizers.
local function train(make, prepare, passes)
  local model = make_model()
  local net, opt = prepare(model, make, { lr = 0.05, schedule = optim.linear { steps = 20 } })
  for step in ms.steps(6) do
    net:accumulate(passes or 1, function(i) pass(net, 10 * step + i) end)
    if opt then opt:step() end
  end
  return values(model)
end

local function plain(model, make, options) return model, make(model, options) end

local function with_policy(policy)
  return function(model, make, options)
    local opt, net = make(model, options), ms.ddp(model, wrap)
    opt:overlap(net, policy)
    return net, opt
  end
end

local function as_link(stepping)
  return function(model, make, options)
    local opt = make(model, options)
    local net = ms.ddp(model,
      { bucket_bytes = 256, comm_hook = hooks.chain { hooks.then_optimizer { optimizer = opt } } })
    return net, stepping and opt or nil
  end
end

local function by_parameter(wrapped)
  return function(model, make, options)
    optim.in_backward(make, model:parameters(), options)
    return wrapped and ms.ddp(model, wrap) or model
  end
end

local ways = {
  ["the policy classic"] = with_policy "classic",
  ["the policy in_backward"] = with_policy "in_backward",
  ["the policy deferred"] = with_policy "deferred",
  ["the policy early_where_hidden"] = with_policy "early_where_hidden",
  ["a plan that mixes"] = with_policy(ms.overlap { name = "mixed", every = 2, plan = function(view)
    local plan, moments = {}, { "on_reduced", "before_next_use", "after_backward" }
    for i, b in ipairs(view.buckets) do
      plan[i] = { bucket = b.index, step = moments[(b.index + view.step) % 3 + 1] }
    end
    return plan
  end }),
  ["in_backward after wrapping"] = function(model, make, options)
    local net = ms.ddp(model, wrap)
    optim.in_backward(make, model:parameters(), options)
    return net
  end,
  ["then_optimizer"] = as_link(true), ["then_optimizer without step()"] = as_link(false),
  ["in_backward"] = by_parameter(false), ["in_backward of a ddp model"] = by_parameter(true),
}

describe("every moment to step gives the same weights:", function()
  for name, way in pairs(ways) do
    it(name, function()
      for kind, make in pairs(makers) do
        assert.equal(train(make, plain), train(make, way), kind)
      end
    end)

    it(name .. ", accumulating over three passes", function()
      assert.equal(train(optim.adamw, plain, 3), train(optim.adamw, way, 3))
      assert.equal(train(heavy, plain, 3), train(heavy, way, 3))
    end)
  end

  it("several optimizers on one model, each by its own policy", function()
    local function run(first, second)
      local model = make_model()
      local net = ms.ddp(model, wrap)
      local parameters = model:parameters()
      local a = optim.sgd({ parameters[1], parameters[2] }, { lr = 0.1 })
      local b = optim.adam({ table.unpack(parameters, 3) }, { lr = 0.1 })
      if first then a:overlap(net, first) end
      if second then b:overlap(net, second) end
      for step in ms.steps(5) do
        pass(net, step)
        a:step()
        b:step()
      end
      return values(model)
    end
    assert.equal(run(), run("in_backward", "deferred"))
    assert.equal(run(), run("deferred", "in_backward"))
    assert.equal(run(), run(nil, "in_backward"))
  end)

  it("an optimizer of two models, in both by a policy", function()
    local function run(first, second)
      local one, two = make_model(), make_model()
      local params = { table.unpack(one:parameters()) }
      for _, p in ipairs(two:parameters()) do params[#params + 1] = p end
      local nets, opt = { ms.ddp(one, wrap), ms.ddp(two, wrap) },
        optim.adam(params, { lr = 0.1, schedule = optim.linear { steps = 10 } })
      if first then opt:overlap(nets[1], first) end
      if second then opt:overlap(nets[2], second) end
      for step in ms.steps(5) do
        for i, net in ipairs(nets) do pass(net, 10 * step + i) end
        opt:step()
      end
      return values(one) .. values(two)
    end
    assert.equal(run(), run("in_backward", "in_backward"))
    assert.equal(run(), run("in_backward", "deferred"))
  end)

  it("then_optimizer for some parameters, step() for the others", function()
    local function run(linked)
      local model = make_model()
      local opt = optim.adam(model, { lr = 0.1 })
      local some = { model:parameters()[1], model:parameters()[4] }
      local net = ms.ddp(model, {
        bucket_bytes = 256,
        comm_hook = linked
          and hooks.chain { hooks.then_optimizer { optimizer = opt, params = some } } or nil,
      })
      for step in ms.steps(4) do
        pass(net, step)
        opt:step()
      end
      return values(model)
    end
    assert.equal(run(false), run(true))
  end)

  it("of 16 bits, rounded stochastically", function()
    local function run(prepare, resume)
      local model = make_model():to "bf16"
      local net, opt = prepare(model, optim.sgd, { lr = 1e-2, master = "none" })
      for step in ms.steps(4) do
        net(ms.randn({ 4, 8, seed = step }):to "bf16"):square():mean():backward()
        if opt then opt:step() end
        if resume and step == 1 then
          local saved = opt:state()
          ms.rand { 3 }  -- other draws make no difference
          opt = optim.sgd(model, { lr = 1e-2, master = "none" })
          opt:load_state(saved)
        end
      end
      return values(model)
    end
    local want = run(plain)
    for name, way in pairs(ways) do assert.equal(want, run(way), name) end
    assert.equal(want, run(plain, true), "after loading")
  end)

  it("and gradients stay until step() where they are asked for", function()
    local model = make_model()
    local net, opt = with_policy "in_backward"(model, optim.sgd, { lr = 0.1 })
    for step in ms.steps(3) do
      pass(net, step)
      for _, p in ipairs(model:parameters()) do assert.truthy(p:grad()) end
      opt:step { keep_grads = step == 2 }
      for _, p in ipairs(model:parameters()) do assert.equal(step == 2, p:grad() ~= nil) end
    end
    local alone = make_model()
    optim.in_backward(optim.sgd, alone:parameters(), { keep_grads = true })
    pass(alone, 1)
    for _, p in ipairs(alone:parameters()) do assert.truthy(p:grad()) end
  end)
end)

describe("then_optimizer", function()
  it("saves a step that has not ended yet as taken", function()
    local function start(from)
      local model = make_model()
      local opt = optim.adamw(model, { lr = 0.05, schedule = optim.linear { steps = 20 } })
      local net = ms.ddp(model,
        { bucket_bytes = 256, comm_hook = hooks.then_optimizer { optimizer = opt } })
      if from then
        model:load_state(from.model:state())
        opt:load_state(from.opt:state())
      end
      return { model = model, opt = opt, net = net }
    end
    local whole, first = start(), start()
    for i = 1, 6 do pass(whole.net, i) end
    for i = 1, 3 do pass(first.net, i) end
    assert.equal(3, first.opt:state().steps)
    local second = start(first)
    for i = 4, 6 do pass(second.net, i) end
    assert.equal(values(whole.model), values(second.model))
  end)

  it("steps on what the links after it returned, not on the bucket", function()
    local function run(link)
      local model = make_model()
      local opt = optim.sgd(model, { lr = 0.1 })
      local chain = link and { hooks.then_optimizer { optimizer = opt }, function(bucket, next)
        return next(bucket):and_then(function(reduced) return reduced * 2 end)
      end } or {
          function(bucket, next)
            return next(bucket):and_then(function(reduced) return reduced * 2 end)
          end,
        }
      local net = ms.ddp(model, { bucket_bytes = 256, comm_hook = hooks.chain(chain) })
      for step in ms.steps(3) do
        pass(net, step)
        opt:step()
      end
      return values(model)
    end
    assert.equal(run(false), run(true))
  end)

  it("takes gradients in 16 bits", function()
    local model = make_model()
    local opt = optim.sgd(model, { lr = 0.1 })
    local net = ms.ddp(model, {
      bucket_bytes = 256,
      comm_hook = hooks.chain {
        hooks.cast { dtype = "bf16" }, hooks.then_optimizer { optimizer = opt },
      },
    })
    local before = values(model)
    for step in ms.steps(2) do pass(net, step) end
    assert.are_not.equal(before, values(model))
  end)
end)

describe("recorded times show that", function()
  -- The work of one more step, by stream, once plans are in force.
  local function one_step(policy, factor)
    local model = make_model(512 * factor)
    local net, opt = with_policy(policy)(model, optim.adamw, { lr = 0.01 })
    local next_forward
    local list = recorded(function()
      for step in ms.steps(4) do
        if step == 3 then next_forward = debug.getinfo(1, "l").currentline + 1 end
        local loss = step == 3 and net(ms.randn { 4, 8, seed = step })
          or net(ms.randn { 4, 8, seed = step }):square():mean()
        if step < 3 then
          loss:backward()
          opt:step()
        end
      end
      ms.synchronize()
    end)
    return list, next_forward
  end

  it("in_backward steps before the last task of backward", function()
    eventually(function(factor)
      local list, first, last = one_step("in_backward", factor), nil, nil
      for _, record in ipairs(list) do
        if record.stream == "optimizer" then first = record.start_ns end  -- of the last step
        if record.stream == "compute" and record.script:match "overlap_spec.lua:%d+"
            and record.name:match "backward" then
          last = record.start_ns
        end
      end
      assert.truthy(first and last)
      for _, record in ipairs(list) do
        if record.stream == "optimizer" and record.start_ns < last then return true end
      end
    end)
  end)

  it("deferred steps after the next forward has begun", function()
    eventually(function(factor)
      local list, line = one_step("deferred", factor)
      local begun
      for _, record in ipairs(list) do
        if record.stream == "compute" and record.script:match ":(%d+)$" == tostring(line)
            and record.name ~= "random" then
          begun = math.min(begun or record.start_ns, record.start_ns)
        end
      end
      assert.truthy(begun)
      for _, record in ipairs(list) do
        if record.stream == "optimizer" and record.start_ns > begun then return true end
      end
    end)
  end)

  it("classic has no steps beside the model's stream", function()
    for _, record in ipairs((one_step("classic", 1))) do
      assert.are_not.equal("optimizer", record.stream)
    end
  end)
end)

describe("a plan", function()
  -- Two passes with a planner; the second is planned.
  local function planned(plan, options)
    local net, opt = with_policy(ms.overlap { name = "tried", plan = plan })(make_model(),
      optim.sgd, { lr = 0.1 })
    for step in ms.steps(options and options.steps or 5) do
      pass(net, step)
      if options and options.clip then net:clip_grad_norm(1) end
      opt:step { only_if = options and options.only_if }
    end
  end
  local function all(view, step)
    local plan = {}
    for i, b in ipairs(view.buckets) do plan[i] = { bucket = b.index, step = step } end
    return plan
  end

  it("sees buckets in the order in which they are ready, with times", function()
    local seen
    planned(function(view)
      seen = view
      return all(view, "after_backward")
    end)
    assert.is_true(#seen.buckets > 2 and seen.step > 0 and seen.world_size == 1
      and seen.needs_global_norm == false)
    assert.is_true(seen.forward_ms > 0 and seen.backward_ms > 0)
    for i, b in ipairs(seen.buckets) do
      assert.is_true(b.bytes > 0 and b.reduce_ms >= 0 and b.step_ms >= 0 and b.first_use_ms >= 0)
      if i > 1 then assert.is_true(b.ready_ms >= seen.buckets[i - 1].ready_ms) end
    end
  end)

  it("is called every so many passes", function()
    local calls = 0
    local net, opt = with_policy(ms.overlap { name = "seldom", every = 4, plan = function(view)
      calls = calls + 1
      return all(view, "on_reduced")
    end })(make_model(), optim.sgd, { lr = 0.1 })
    for step in ms.steps(11) do
      pass(net, step)
      opt:step()
    end
    assert.is_true(calls == 2 or calls == 3, calls)
  end)

  it("is refused with its line when it is not about these buckets", function()
    local here = "overlap_spec.lua"
    fails(function() planned(function() end) end, "tried", here, "it returned nothing")
    fails(function() planned(function(view)
      local plan = all(view, "on_reduced")
      plan[1].bucket = 99
      return plan
    end) end, here, "entry 1: there is no bucket 99")
    fails(function() planned(function(view)
      local plan = all(view, "on_reduced")
      plan[2].bucket = plan[1].bucket
      return plan
    end) end, here, "is there twice")
    fails(function() planned(function(view)
      local plan = all(view, "on_reduced")
      plan[#plan] = nil
      return plan
    end) end, here, "is missing")
    fails(function() planned(function(view) return all(view, "on_reducd") end) end, here,
      "did you mean 'on_reduced'")
    fails(function() planned(function() error "no idea" end) end, here, "no idea")
    fails(function() planned(function(view)
      ms.ones { 1 }:item()
      return all(view, "on_reduced")
    end) end, here, "numbers only")
    fails(function() planned(function(view)
      view.world_size = ms.world():size()
      ms.world():barrier()
      return all(view, "on_reduced")
    end) end, "tried", here, "barrier")
    fails(function() planned(function(view)
      pcall(ms.zeros, { 2 })
      coroutine.yield()
      return all(view, "on_reduced")
    end) end, "tried", here, "yield")
    fails(function() planned(function(view)
      local plan = all(view, "on_reduced")
      plan[2].steps = "on_reduced"
      return plan
    end) end, "tried", here, "entry 2: unknown field 'steps': did you mean 'step'?")
    fails(function() planned(function(view)
      local plan = all(view, "on_reduced")
      plan.every = 4
      return plan
    end) end, "tried", here, "unknown field 'every'")
    fails(function() planned(function(view)
      local plan = all(view, "on_reduced")
      plan[1] = 0
      return plan
    end) end, "tried", here, "entry 1 is a number")
  end)

  it("with early steps is refused where clipping or a flag needs all gradients first", function()
    local early = function(view) return all(view, "on_reduced") end
    fails(function() planned(early, { clip = true }) end, "clip_grad_norm, which needs all",
      "lagged", "policy tried (", "overlap_spec.lua:", "after then_optimizer")
    -- Where the loop clips after a step was taken in backward, as in the first such pass.
    fails(function()
      local plan = ms.overlap { name = "tried", plan = early }
      local net, opt = with_policy(plan)(make_model(), optim.sgd, { lr = 0.1 })
      for step in ms.steps(5) do
        pass(net, step)
        if step == 4 then net:clip_grad_norm(1) end
        opt:step()
      end
    end, "stepped in backward already, by policy tried (", "overlap_spec.lua:", "lagged")
    fails(function() planned(early, { only_if = ms.tensor { true } }) end, "only_if", "classic")
    planned(function(view)
      assert.is_true(view.needs_global_norm)
      return all(view, "before_next_use")
    end, { clip = true })
  end)

  it("is a policy's name, a file, or what ms.overlap gives", function()
    local folder = os.tmpname()
    os.remove(folder)
    assert(core.make_directory(folder))
    assert(core.file_write(folder .. "/late.lua", [[
      local ms = require "moonshard"
      return ms.overlap { name = "late", plan = function(view)
        local plan = {}
        for i, b in ipairs(view.buckets) do
          plan[i] = { bucket = b.index, step = "before_next_use" }
        end
        return plan
      end }]]))
    assert(core.file_write(folder .. "/wrong.lua", "return 1"))
    assert.equal(train(optim.adam, plain), train(optim.adam, with_policy(folder .. "/late.lua")))
    fails(function() train(optim.adam, with_policy(folder .. "/wrong.lua")) end, "wrong.lua",
      "ms.overlap")
    fails(function() train(optim.adam, with_policy(folder .. "/none.lua")) end, "none.lua")
    fails(function() train(optim.adam, with_policy "in_backwrd") end, "did you mean 'in_backward'")
    fails(function() train(optim.adam, with_policy(7)) end, "not a number")
    fails(function() ms.overlap() end, "name must be a string, not nil")
    fails(function() ms.overlap { name = "x" } end, "plan must be a function")
    fails(function() ms.overlap { name = "x", plan = print, every = 0 } end, "every")
    os.execute("rm -r " .. folder)
  end)
end)

describe("mistakes are named:", function()
  it("two ways to step one parameter early", function()
    local model = make_model()
    local opt, other, net = optim.sgd(model), optim.adam(model), ms.ddp(model)
    opt:overlap(net, "classic")
    fails(function() opt:overlap(net, "deferred") end, "registered with this model already")
    fails(function() other:overlap(net, "classic") end, "another overlapped optimizer")
    fails(function() optim.in_backward(optim.sgd, model:parameters()) end,
      "overlapped optimizer already")
    local linked = make_model()
    local first = optim.sgd(linked)
    local wrapped = ms.ddp(linked, { comm_hook = hooks.then_optimizer { optimizer = first } })
    fails(function() first:overlap(wrapped, "in_backward") end, "two ways to say the same")
  end)

  it("a policy that the model's chain does not go with", function()
    for _, first in ipairs { hooks.clip { max_norm = 1, scope = "global" }, hooks.nan_check() } do
      local model = make_model()
      local net, opt = ms.ddp(model, { comm_hook = hooks.chain { first } }), optim.sgd(model)
      local early = "would be stepped before"
      fails(function() opt:overlap(net, "in_backward") end, "policy in_backward steps each bucket")
      fails(function() optim.in_backward(optim.sgd, model:parameters()) end, early)
      opt:overlap(net, "deferred")
      net:unwrap()
      local own = make_model()
      optim.in_backward(optim.sgd, own:parameters())
      fails(function() ms.ddp(own, { comm_hook = hooks.chain { first } }) end, early)
      local linked = make_model()
      local stepping = hooks.then_optimizer { optimizer = optim.sgd(linked) }
      fails(function()
        ms.ddp(linked, { comm_hook = hooks.chain { first, stepping } })
      end, "then_optimizer")
    end
  end)

  it("then_optimizer after what changes its gradients", function()
    local stepping = hooks.then_optimizer { optimizer = optim.sgd(make_model()) }
    local function halved(t) return t * 0.5 end
    local function half(bucket, next) return next(bucket):and_then(halved) end
    local decodes = hooks.stage { name = "decodes", decode = halved }
    local looks = hooks.stage { name = "looks", observe = print }
    local lagged = hooks.clip { max_norm = 1, scope = "lagged" }
    local right = "hooks.chain { hooks.then_optimizer { optimizer = o }, hooks.clip {"
    for _, clip in ipairs { lagged, hooks.clip { max_norm = 1, scope = "bucket" } } do
      fails(function() hooks.chain { clip, stepping } end, "link 1 (clip)",
        "link 2 (then_optimizer)", "clipped", right)
    end
    fails(function() hooks.chain { decodes, stepping } end, "link 1 (stage 'decodes')", "decoded")
    fails(function() hooks.chain { "error_feedback", half, stepping } end, "link 2 (link '")
    hooks.chain { "error_feedback", hooks.cast { dtype = "bf16" }, looks, stepping }
    hooks.chain { stepping, lagged, decodes, half }
  end)

  it("what cannot be overlapped", function()
    local model = make_model()
    fails(function() optim.sgd(model):overlap(model, "classic") end, "ms.ddp")
    fails(function() optim.sgd(nn.Linear(2, 2)):overlap(ms.ddp(model), "classic") end,
      "none of the optimizer's parameters")
    fails(function() hooks.then_optimizer {} end, "must be an optimizer")
    fails(function()
      hooks.then_optimizer { optimizer = optim.sgd(model), params = nn.Linear(2, 2):parameters() }
    end, "in no group")
    fails(function() optim.in_backward(optim.sgd, {}) end, "a list of parameters")
    fails(function() optim.in_backward("sgd", model:parameters()) end, "optim.adamw")
    fails(function() optim.in_backward(optim.sgd, model:parameters(), { shard = ms.world() }) end,
      "cannot be sharded: use optimizer:overlap")
  end)

  it("clipping what was stepped already", function()
    local model = make_model()
    optim.in_backward(optim.sgd, model:parameters())
    pass(model, 1)
    fails(function() model:clip_grad_norm(1) end, "stepped in backward already")
    local linked = make_model()
    local net = ms.ddp(linked,
      { comm_hook = hooks.then_optimizer { optimizer = optim.sgd(linked) } })
    pass(net, 1)
    fails(function() net:clip_grad_norm(1) end, "stepped in backward already")
  end)

  it("clipping what was added to an optimizer after its policy", function()
    local model = make_model()
    local p = model:parameters()
    local opt, net = optim.sgd({ p[1], p[2] }, { lr = 0.1 }), ms.ddp(model, wrap)
    opt:overlap(net, "in_backward")
    opt:add_group { params = { p[3], p[4] } }
    for step = 1, 2 do
      pass(net, step)
      if step == 2 then
        fails(function() optim.clip_grad_norm({ p[3] }, 1) end, "stepped in backward already")
      end
      opt:step()
    end
  end)

  it("saving in the middle of a step", function()
    local mixed = ms.overlap { name = "mixed", plan = function(view)
      local plan = {}
      for i, b in ipairs(view.buckets) do
        plan[i] = { bucket = b.index, step = b.index == 0 and "on_reduced" or "after_backward" }
      end
      return plan
    end }
    local net, opt = with_policy(mixed)(make_model(), optim.sgd, { lr = 0.1 })
    for step = 1, 5 do
      pass(net, step)
      if step == 5 then
        fails(function() opt:state() end, "waits for step()", "save after step()")
      end
      opt:step()
      assert.equal(step, opt:state().steps)
    end
  end)

  it("a second reducing pass in one step", function()
    local net, opt = with_policy "in_backward"(make_model(), optim.sgd, { lr = 0.1 })
    for step = 1, 2 do
      pass(net, step)
      opt:step()
    end
    pass(net, 3)
    fails(function() pass(net, 4) end, "call its step() before", "accumulate")
  end)

  it("a second backward through the first forward of a static graph, after a step", function()
    -- Whose backward needs no weights; what others have saved was written, which is an error by
    -- itself.
    local Shift = nn.class "Shift"
    function Shift:init() self.by = nn.Parameter(ms.ones { 4 }) end
    function Shift:forward(x) return x + self.by end
    local function twice(prepare, shard)
      local model = Shift()
      local net = prepare(model, { lr = 0.1, shard = shard })
      local loss = net(ms.ones { 4 }):sum()
      loss:backward { retain_graph = true }
      loss:backward()
    end
    fails(function()
      twice(function(model, options)
        optim.in_backward(optim.sgd, model:parameters(), options)
        return ms.ddp(model, { static_graph = true })
      end)
    end, "in_backward: parameter '",
      "got another gradient after the forward whose step it has taken", "step()")
    for _, shard in ipairs { false, ms.world() } do
      fails(function()
        twice(function(model, options)
          return ms.ddp(model, {
            static_graph = true,
            comm_hook = hooks.then_optimizer { optimizer = optim.sgd(model, options) },
          })
        end, shard or nil)
      end, "is stepped twice in one step")
    end
  end)

  it("an optimizer in the chains of two models", function()
    local one, two = make_model(), make_model()
    local opt = optim.sgd({ one:parameters()[1], two:parameters()[1] })
    local first = ms.ddp(one, { comm_hook = hooks.then_optimizer { optimizer = opt } })
    fails(function() ms.ddp(two, { comm_hook = hooks.then_optimizer { optimizer = opt } }) end,
      "steps in the chain of another model already")
    local second = ms.ddp(two)
    fails(function() opt:overlap(second, "deferred") end,
      "steps in the chain of another model already")
    first:unwrap()
    second:unwrap()
    ms.ddp(two, { comm_hook = hooks.then_optimizer { optimizer = opt } })
  end)

  it("unwrapping ends a policy, and the model can be wrapped again", function()
    local model = make_model()
    local net, opt = with_policy "deferred"(model, optim.adam, { lr = 0.1 })
    for step = 1, 3 do
      pass(net, step)
      opt:step()
    end
    net:unwrap()
    pass(model, 4)
    opt:step()
    local again = ms.ddp(model, wrap)
    opt:overlap(again, "in_backward")
    for step = 5, 7 do
      pass(again, step)
      opt:step()
    end
    local want = make_model()
    local same = optim.adam(want, { lr = 0.1 })
    for step = 1, 7 do
      pass(want, step)
      same:step()
    end
    assert.equal(values(want), values(model))
  end)
end)

describe("unwrapping after steps in backward", function()
  -- Steps of the schedule must be counted as in the plain loop. moment: when the ddp model is
  -- unwrapped, before or after the third step().
  local mixed = ms.overlap { name = "every second", plan = function(view)
    local plan = {}
    for i, b in ipairs(view.buckets) do
      plan[i] = { bucket = b.index, step = b.index % 2 == 0 and "on_reduced" or "after_backward" }
    end
    return plan
  end }
  local function run(prepare, moment, stepless)
    local model = make_model()
    local opt = optim.adamw(model, { lr = 0.05, schedule = optim.linear { steps = 20 } })
    local net = prepare(model, opt)
    for step = 1, 6 do
      pass(net, step)
      if step == 5 and moment == "before" then net = net:unwrap() end
      if not stepless or step > 5 then opt:step() end
      if step == 5 and moment == "after" then net = net:unwrap() end
      if step == 5 then assert.equal(5, opt:state().steps) end
    end
    return values(model) .. opt:state().steps
  end
  local function linked(some)
    return function(model, opt)
      local stepping = hooks.then_optimizer {
        optimizer = opt, params = some and { model:parameters()[2], model:parameters()[5] } or nil,
      }
      return ms.ddp(model, { bucket_bytes = 256, comm_hook = hooks.chain { stepping } })
    end
  end
  local function by(policy)
    return function(model, opt)
      local net = ms.ddp(model, wrap)
      opt:overlap(net, policy)
      return net
    end
  end

  for what, prepare in pairs {
    in_backward = by "in_backward", deferred = by "deferred", ["a plan of both"] = by(mixed),
    then_optimizer = linked(false), ["then_optimizer for some"] = linked(true),
  } do
    it("counts one step, of " .. what, function()
      local want = run(function(model) return ms.ddp(model, wrap) end)
      for _, moment in ipairs { "before", "after" } do
        assert.equal(want, run(prepare, moment), moment)
      end
    end)
  end

  it("counts one step if the loop does not call step()", function()
    assert.equal(run(function(model) return ms.ddp(model, wrap) end),
      run(linked(false), "before", true))
  end)
end)

describe("the registry of overlapped optimizers", function()
  local calls = {}
  local base = optim.define {
    name = "registry_base",
    step_param = function(p, grad, _, group) p:add_(grad, -group.lr) end,
  }
  local derived = optim.define {
    name = "registry_derived",
    base = "registry_base",
    step_param = function(p, grad, _, group) p:add_(grad, -group.lr) end,
  }
  local lost =
    optim.define { name = "registry_lost", base = "registry_nowhere", step_param = function() end }
  optim.register_overlapped("registry_base", function(optimizer, model, policy)
    calls[#calls + 1] = optimizer
    optim.overlap_standard(optimizer, model, policy)
  end)

  it("is asked by kind, then by what the kind is based on", function()
    local one, two, three = make_model(), make_model(), make_model()
    local a, b, c = base(one, { lr = 0.1 }), derived(two, { lr = 0.1 }),
      optim.sgd(three, { lr = 0.1 })
    a:overlap(ms.ddp(one), "classic")
    b:overlap(ms.ddp(two), "in_backward")
    c:overlap(ms.ddp(three), "classic")
    assert.equal(2, #calls)
    assert.equal(a, calls[1])
    assert.equal(b, calls[2])
  end)

  it("refuses a second registration, an unknown kind and an unknown base", function()
    fails(function() optim.register_overlapped("registry_base", print) end, "registered already")
    fails(function() optim.register_overlapped("registry_bse", print) end,
      "no kind of optimizer 'registry_bse'", "registry_base")
    fails(function() optim.register_overlapped("registry_derived", 1) end, "a function is expected")
    local model = make_model()
    fails(function() lost(model):overlap(ms.ddp(model), "classic") end, "registry_nowhere")
  end)
end)

describe("in_backward", function()
  it("gives each parameter its own optimizers, which step in order", function()
    local function run(by_hand)
      local model = make_model()
      local parameters = model:parameters()
      local first, rest = { parameters[1] }, { table.unpack(parameters, 2) }
      local opts
      if by_hand then opts = { optim.sgd(parameters, { lr = 0.1 }), optim.sgd(first, { lr = 0.5 }) }
      else
        assert.equal(#parameters, #optim.in_backward(optim.sgd, parameters, { lr = 0.1 }))
        optim.in_backward(optim.sgd, first, { lr = 0.5 })
        local listed = optim.in_backward_of(model)
        assert.equal(#parameters, #listed)
        assert.equal(2, #listed[1].optimizers)
        assert.equal(1, #listed[2].optimizers)
        assert.equal(#rest, #listed - 1)
      end
      for step in ms.steps(6) do
        pass(model, step)
        if by_hand then
          opts[1]:step { keep_grads = true }
          opts[2]:step { keep_grads = true }
          opts[1]:zero_grad()
        end
      end
      return values(model)
    end
    assert.equal(run(true), run(false))
  end)

  it("steps a tied parameter once, with its whole gradient", function()
    local function run(early)
      ms.seed(2)
      local model = nn.gpt2 { vocab = 16, context = 8, layers = 1, width = 8, heads = 2 }
      local opt
      if early then
        optim.in_backward(optim.adam, model:parameters(), { lr = 0.01 })
      else
        opt = optim.adam(model, { lr = 0.01 })
      end
      for _ in ms.steps(3) do
        local tokens = ms.tensor { { 1, 2, 3, 4 } }
        model(tokens):view(4, 16):cross_entropy(tokens:view(4)):backward()
        if opt then opt:step() end
      end
      return values(model)
    end
    assert.equal(run(false), run(true))
  end)
end)
