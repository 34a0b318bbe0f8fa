-- Run by every rank of two_parts_spec.lua: wrapped models whose backward runs in two parts have the
-- weights, to the bit, of those whose backward runs in one. how=ddp, fsdp.
local ms = require "moonshard"
local core = require "moonshard.core"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local cfg = ms.config { how = "ddp" }
local nn, optim, hooks = ms.nn, ms.optim, ms.hooks
local models, fails = expect.models, expect.fails
local rank = ms.rank()
local STEPS <const>, ROWS <const>, WIDTH <const> = 4, 16, 16

-- A stage: blocks in a row, and a branch that some passes leave out.
local Stage = nn.class "Stage"
function Stage:init(branches)
  self.first, self.second = nn.MLP(WIDTH, 32), nn.MLP(WIDTH, 32)
  self.norm, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
  self.branches = branches
  self.extra = branches and nn.Linear(WIDTH, WIDTH) or nil
end
function Stage:forward(x, extra)
  x = x + self.first(x)
  x = self.norm(x + self.second(x))
  if extra and self.extra then x = x + self.extra(x) end
  return self.last(x)
end

-- What it adds does not depend on its input: all of that is in the rest.
local Beside = nn.class "Beside"
function Beside:init()
  self.start, self.first = nn.Parameter(ms.randn { ROWS, WIDTH }), nn.MLP(WIDTH, 32)
  self.last = nn.Linear(WIDTH, WIDTH)
end
function Beside:forward(x) return self.last(x + self.first(self.start)) end

local function new_stage(kind)
  ms.seed(7)
  if kind == "beside" then return Beside() end
  return Stage(kind)
end

local function input(step, i)
  return models.input(ROWS, WIDTH, 1000 * rank + 10 * step + i):requires_grad_()
end

local function weights(model)
  local list = {}
  for i, p in ipairs(model:parameters()) do list[i] = p end
  return expect.bits(list)
end

-- The loss of one pass; its backward in one or two parts, whose inputs' gradients are added to
-- `seen`.
local function go_back(loss, x, in_parts, seen, between)
  if in_parts then
    loss:backward { inputs = { x } }
    if between then between() end
    loss:backward { rest = true }
  else loss:backward() end
  seen[#seen + 1] = x:grad()
end

-- Trains with wrap(stage), which returns a model and an optimizer; pass(net, step, in_parts, seen)
-- runs the forwards and backwards of a step. Weights and gradients of inputs.
local function train(wrap, pass, in_parts, branches)
  local stage, seen = new_stage(branches), {}
  local net, optimizer = wrap(stage)
  for step in ms.steps(STEPS) do
    local kept = {}
    pass(net, step, in_parts, kept)
    if optimizer then optimizer:step() end
    seen[#seen + 1] = expect.bits(kept)
  end
  local function whole() return weights(stage) end
  return cfg.how == "fsdp" and net:summon({}, whole) or whole(), table.concat(seen, "\n")
end

local function agrees(what, wrap, pass, branches)
  local one, seen_by_one = train(wrap, pass, false, branches)
  local two, seen_by_two = train(wrap, pass, true, branches)
  assert(seen_by_one == seen_by_two, what .. ": gradients of inputs differ")
  assert(one == two, what .. ": weights differ")
end

local function plain(net, step, in_parts, seen)
  local x = input(step, 1)
  go_back(net(x):square():mean(), x, in_parts, seen)
end

-- The loss leaves out the branch on some ranks and in some steps.
local function with_branch(net, step, in_parts, seen)
  local x = input(step, 1)
  go_back(net(x, (step + rank) % 3 == 0):square():mean(), x, in_parts, seen)
end

-- As a pipeline does: the first parts of all passes come before their rests. Only the last pass
-- reduces, and its forward comes after the rests of the others.
local function accumulated(net, step, in_parts, seen)
  local function forward(i)
    local x = input(step, i)
    return x, net(x):square():mean() / 3
  end
  net:no_sync(function()
    local x1, loss1 = forward(1)
    if in_parts then loss1:backward { inputs = { x1 } } end
    local x2, loss2 = forward(2)
    if in_parts then loss2:backward { inputs = { x2 } } end
    for _, loss in ipairs { loss1, loss2 } do
      loss:backward(in_parts and { rest = true } or nil)
    end
    seen[1], seen[2] = x1:grad(), x2:grad()
  end)
  local x, loss = forward(3)
  go_back(loss, x, in_parts, seen)
end

local function scaled(optimizer)
  local scaler = optim.scaler { init_scale = 256 }
  return function(net, step, in_parts, seen)
    local x = input(step, 1)
    go_back(scaler:scale(net(x):square():mean()), x, in_parts, seen,
      function() optimizer[1]:zero_grad() end)
    scaler:unscale(optimizer[1])
  end
end

-- The same in the order of a schedule without bubbles: all first parts, and then all rests.
local function all_first(net, step, in_parts, seen)
  local xs, losses = {}, {}
  local function forward(i)
    xs[i] = input(step, i)
    losses[i] = net(xs[i]):square():mean() / 3
    if in_parts then losses[i]:backward { inputs = { xs[i] } } end
  end
  net:no_sync(function() for i = 1, 2 do forward(i) end end)
  forward(3)
  for i, loss in ipairs(losses) do
    local function rest() loss:backward(in_parts and { rest = true } or nil) end
    if i < 3 then net:no_sync(rest) else rest() end
  end
  for i, x in ipairs(xs) do seen[i] = x:grad() end
end

-- Two uses of the model before one backward.
local function used_twice(net, step, in_parts, seen)
  local x = input(step, 1)
  go_back(net(net(x)):square():mean(), x, in_parts, seen)
end

local function autocast(net, step, in_parts, seen)
  local x, y = input(step, 1), nil
  ms.autocast("bf16", function() y = net(x) end)
  go_back(y:to "f32":square():mean(), x, in_parts, seen)
end

local function in_fp8(net, step, in_parts, seen)
  local x, y = input(step, 1), nil
  ms.autocast("fp8", function() y = net(x) end, { emulate = true })
  go_back(y:to "f32":square():mean(), x, in_parts, seen)
end

-- What an adamw of a wrapped model is stepped by.
local function stepped(wrap, policy)
  return function(stage)
    local net = wrap(stage)
    local optimizer = optim.adamw(stage, { lr = 1e-2 })
    if policy then optimizer:overlap(net, policy) end
    return net, optimizer
  end
end

-- Errors that all ranks have alike, and after which training goes on.
local function refuses(wrap)
  local stage = new_stage()
  local net = wrap(stage)
  local optimizer = optim.sgd(stage, { lr = 1e-2 })
  local x = input(1, 1)
  local loss = net(x):square():mean()
  loss:backward { inputs = { x } }
  fails(function() optimizer:step() end, "optimizer:step: rest is missing", "two_parts.lua")
  fails(function() optim.clip_grad_norm(stage, 1) end, "clip_grad_norm: rest is missing")
  loss:backward { rest = true }
  optimizer:step()
  return net, stage, optimizer
end

if cfg.how == "ddp" then
  local function ddp(options)
    return function(stage)
      return ms.ddp(stage, models.merged({ bucket_bytes = 512 }, options))
    end
  end
  agrees("ddp", stepped(ddp()), plain)
  agrees("beside the way", stepped(ddp()), plain, "beside")
  agrees("used twice", stepped(ddp()), used_twice)
  agrees("autocast", stepped(ddp()), autocast)
  agrees("fp8", stepped(ddp()), in_fp8)
  agrees("precision", stepped(ddp { precision = { param = "bf16" } }), plain)
  agrees("find_unused", stepped(ddp { find_unused = true }), with_branch, true)
  agrees("static_graph", stepped(ddp { static_graph = true }), plain)
  agrees("accumulated", stepped(ddp()), accumulated)
  agrees("accumulated, find_unused", stepped(ddp { find_unused = true }), accumulated)
  agrees("all first parts first", stepped(ddp()), all_first)
  agrees("a hook", stepped(ddp { comm_hook = hooks.bf16_compress() }), plain)
  for _, policy in ipairs { "classic", "in_backward", "deferred" } do
    agrees(policy, stepped(ddp(), policy), plain)
  end
  agrees("in_backward of parameters", function(stage)
    optim.in_backward(optim.adamw, stage:parameters(), { lr = 1e-2 })
    return ddp()(stage)
  end, plain)
  local optimizer = {}
  agrees("a scaler", function(stage)
    local net, made = stepped(ddp())(stage)
    optimizer[1] = made
    return net, made
  end, scaled(optimizer))

  local net, stage = refuses(ddp())
  local x = input(2, 1)
  local loss = net(x):square():mean()
  fails(function() loss:backward { inputs = { stage.last.weight } } end,
    "a parameter of a wrapped model")
  loss:backward { inputs = { x } }
  -- The next forward would begin another pass.
  fails(function() net(input(2, 2)) end, "ddp: a forward of another pass: rest is missing")
  fails(function() net:no_sync(function() net(input(2, 2)) end) end, "rest is missing")
  loss:backward { rest = true }
  -- A graph that is dropped waits for nothing.
  do
    local dropped = input(3, 1)
    local y = net(dropped):square():mean()
    y:backward { inputs = { dropped } }
  end
  plain(net, 3, true, {})
end

if cfg.how == "fsdp" then
  local function fsdp(options, classes)
    return function(stage)
      return models.fsdp(stage, { wrap = { class = classes or { "MLP", "Linear" } } }, options)
    end
  end
  for _, strategy in ipairs { "full_shard", "shard_grad_op", "no_shard", "hybrid_shard" } do
    if strategy ~= "hybrid_shard" or ms.world_size() == 4 then
      agrees(strategy, stepped(fsdp { strategy = strategy }), plain)
      agrees(strategy .. ", accumulated", stepped(fsdp { strategy = strategy }), accumulated)
    end
  end
  agrees("few units", stepped(fsdp({}, "LayerNorm")), plain)
  agrees("used twice", stepped(fsdp()), used_twice)
  agrees("autocast", stepped(fsdp()), autocast)
  agrees("precision", stepped(fsdp { precision = { param = "bf16", reduce = "f32" } }), plain)
  agrees("rows", stepped(fsdp { layout = "rows" }), plain)
  for _, prefetch in ipairs { "none", "backward_post", "forward", "both", "by_budget" } do
    agrees("prefetch " .. prefetch, stepped(fsdp { prefetch = prefetch }), plain)
  end
  agrees("a cast", stepped(fsdp { comm_hook = hooks.bf16_compress() }), plain)
  local clip = hooks.clip { scope = "global", max_norm = 0.1 }
  agrees("a norm", stepped(fsdp { comm_hook = clip }), plain)
  agrees("offload", stepped(fsdp { offload = "cpu" }), plain)
  agrees("fp8", stepped(fsdp { dtype = "fp8" }), in_fp8)
  for _, how in ipairs { "local", "shard" } do
    agrees("accumulate " .. how, stepped(fsdp { accumulate = how }), function(net, step, parts, all)
      net:accumulate(2, function(i)
        local x = input(step, i)
        go_back(net(x):square():mean(), x, parts, all)
      end)
    end)
  end
  if ms.world_size() == 4 then
    agrees("secondary shards", stepped(fsdp { reshard_after_forward = 2 }), plain)
  end
  agrees("beside the way", stepped(fsdp()), plain, "beside")
  agrees("a branch", stepped(fsdp()), function(net, step, in_parts, seen)
    local x = input(step, 1)
    go_back(net(x, step % 2 == 0):square():mean(), x, in_parts, seen)
  end, true)
  for _, policy in ipairs { "classic", "in_backward", "deferred" } do
    agrees(policy, stepped(fsdp(), policy), plain)
  end
  local optimizer = {}
  agrees("a scaler", function(stage)
    local net, made = stepped(fsdp())(stage)
    optimizer[1] = made
    return net, made
  end, scaled(optimizer))
  -- A penalty on the weights is used outside of units, and not on the way to the inputs.
  agrees("a penalty", stepped(fsdp()), function(net, step, in_parts, seen)
    local x, sum = input(step, 1), nil
    local loss = net(x):square():mean()
    for _, p in ipairs(net:parameters()) do
      local one = p:square():sum()
      sum = sum and sum + one or one
    end
    go_back(loss + 0.1 * sum, x, in_parts, seen)
  end)

  -- Passes that overlap: a forward of the second comes before the rest of the first.
  agrees("interleaved", stepped(fsdp()), function(net, step, in_parts, seen)
    local x, y = input(step, 1), input(step, 2)
    local function forward(t) return net(t):square():mean() / 2 end
    local first, second
    if in_parts then
      first = forward(x)
      first:backward { inputs = { x } }
      second = forward(y)
      second:backward { inputs = { y } }
      first:backward { rest = true }
      second:backward { rest = true }
    else
      first, second = forward(x), forward(y)
      first:backward()
      second:backward()
    end
    seen[1], seen[2] = x:grad(), y:grad()
  end)
  -- The rest reads no weights, so nothing is gathered for it: five units are gathered twice, the
  -- root once.
  local function gathers(in_parts)
    local net = fsdp()(new_stage())
    local count = 0
    for step = 1, 2 do
      if step == 2 then core.trace_start() end
      plain(net, step, in_parts, {})
    end
    for _, record in ipairs(core.trace_stop()) do
      if record.name == "all_gather" then count = count + 1 end
    end
    return count
  end
  if ms.world_size() > 1 then
    assert(gathers(false) == 11 and gathers(true) == 11)
  end

  local net, stage = refuses(fsdp())
  local x = input(2, 1)
  local loss = net(x):square():mean()
  fails(function() loss:backward { inputs = { stage.last.weight } } end,
    "a parameter of a wrapped model")
  go_back(loss, x, true, {})
end

if cfg.how == "find_unused" then
  local net = ms.fsdp(new_stage(), { wrap = { class = "Linear" }, find_unused = true })
  local x = input(1, 1)
  net(x):square():mean():backward { inputs = { x } }
end

print(("rank %d is done"):format(rank))
