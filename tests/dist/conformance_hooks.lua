-- Run by every rank of conformance_hooks_spec.lua: cases from PyTorch's own tests of comm hooks, of
-- quantized collectives and of optimizers that overlap or are sharded. A case is named after the
-- file and the test that it represents.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local case, raises = expect.case, expect.fails
local hooks, nn, optim = ms.hooks, ms.nn, ms.optim
local world, rank, size = ms.world(), ms.rank(), ms.world_size()

io.stdout:setvbuf "line"                                    -- lines of several ranks stay whole

-- Their TestDdpCommHook: one layer, and a step with the rank as input.
local function gradient(hook, options)
  ms.seed(0)
  local model = ms.ddp(nn.Linear(50, 20, { bias = false }),
    { comm_hook = hook, bucket_bytes = options and options.bucket_bytes })
  local result
  for _ = 1, options and options.passes or 1 do
    model.weight:set_grad(nil)
    model(ms.full(rank + 0.37, { 3, 50 }))
      :mul_(ms.randn { 3, 20, seed = 7 + rank }):sum():backward()
    result = model.weight:grad():clone()
  end
  model:unwrap()
  return result
end

local function near(a, b, tolerance, what)
  expect.equal(a, b, what or "gradient", tolerance)
end

local plain = gradient()

----------------------------------------------------------------------------------------- comm hooks

local hook_tests = "algorithms/ddp_comm_hooks/test_ddp_hooks.py: "
case(hook_tests .. "test_ddp_comm_hook_allreduce_hook", function()
  near(gradient "all_reduce", plain, 1e-5)
end)
case(hook_tests .. "test_ddp_comm_hook_fp16compress_hook", function()
  near(gradient "fp16_compress", plain, 1e-3)
end)
-- Half a step of the scale: the range of a gradient over 255.
case(hook_tests .. "test_ddp_comm_hook_quantize_per_tensor_hook", function()
  near(gradient(hooks.int8 { per = "tensor" }), plain, 0.005)
end)
case(hook_tests .. "test_ddp_comm_hook_quantize_per_channel_hook", function()
  near(gradient(hooks.int8 { per = "channel" }), plain, 0.005)
end)
case(hook_tests .. "test_ddp_comm_hook_noop_hook", function()
  near(world:all_reduce(gradient "noop", "avg"):value(), plain, 1e-6)
end)
case(hook_tests .. "test_is_last_hook", function()
  local flags = {}
  local model = ms.ddp(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)),
    { bucket_bytes = 64, comm_hook = function(bucket, next)
      flags[#flags + 1] = bucket:is_last()
      return next(bucket)
    end })
  for pass = 1, 2 do
    flags = {}
    model(ms.ones { 2, 8 }):sum():backward()
    assert(#flags >= pass and flags[#flags])
    for i = 1, #flags - 1 do assert(not flags[i]) end
    expect.clear(model)
  end
end)

local nccl = "test_c10d_nccl.py: "
case(nccl .. "test_builtin_ddp_comm_hooks_nccl", function()
  for _, name in ipairs { "all_reduce", "fp16_compress" } do
    near(gradient(name), plain, 1e-3, name)
  end
end)
case(nccl .. "test_default_ddp_comm_hooks_nccl", function()
  for _, name in ipairs { "all_reduce", "fp16_compress", "bf16_compress" } do
    near(gradient(name), plain, 1e-2, name)
  end
end)
for _, dtype in ipairs { "f16", "bf16" } do
  case(nccl .. ("test_%s_compress_wrapper_nccl"):format(dtype), function()
    for name, link in ms.sorted_pairs {
      all_reduce = hooks.all_reduce(), powersgd = hooks.powersgd { rank = 1, start_step = 2 },
    } do
      near(gradient(hooks.chain { hooks.cast { dtype = dtype }, link }, { passes = 2 }), plain,
        dtype == "f16" and 1e-3 or 1e-2, name)
    end
  end)
end
-- The gradients here are the product of two vectors, so that rank 1 is exact. Buckets are views
-- always.
for _, how in ipairs { "", "_grad_is_view" } do
  case(nccl .. "test_powerSGD_ddp_comm_hook_nccl" .. how, function()
    local n = 0
    for _, feedback in ipairs { true, false } do
      for _, warm in ipairs { true, false } do
        for _, batched in ipairs { true, false } do
          n = n + 1
          local hook = hooks.powersgd {
            rank = 1, start_step = 2, error_feedback = feedback, warm_start = warm,
            batched = batched,
          }
          local model = ms.ddp(nn.Linear(32, 32, { bias = false }), { comm_hook = hook })
          for step in ms.steps(4) do
            model.weight:set_grad(nil)
            model(ms.full(1, { 1, 32 })):mul_(rank + 1):sum():backward()
            near(model.weight:grad(), ms.full((size + 1) / 2, { 32, 32 }), 1e-5,
              ("combination %d, step %d"):format(n, step))
          end
          model:unwrap()
        end
      end
    end
  end)
end

local distributed = "distributed_test.py: "
for _, kind in ipairs { "adam", "adamw", "sgd" } do
  case(distributed .. "test_ddp_hook_with_optimizer_parity_" .. kind, function()
    local function train(early, view)
      ms.seed(4)
      local model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
      local opt = optim[kind](model, { lr = 1e-2 })
      local net = ms.ddp(model, {
        bucket_bytes = view and 64 or nil,
        comm_hook = early and hooks.then_optimizer { optimizer = opt } or nil,
      })
      for step in ms.steps(6) do
        net(ms.randn { 3, 6, seed = 10 * step + rank }):square():sum():backward()
        if not early then opt:step() end
      end
      return (ms.pack(model:parameters()))
    end
    for _, view in ipairs { false, true } do
      near(train(true, view), train(false, view), 0, "weights")
    end
  end)
end
case(distributed .. "test_ddp_hook_with_optimizer_parity_sgd_optimize_subset", function()
  local model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
  local opt = optim.sgd(model, { lr = 0.1 })
  local chosen, other = model:parameters()[1], model:parameters()[3]
  local before, untouched = chosen:clone(), other:clone()
  local net = ms.ddp(model,
    { comm_hook = hooks.then_optimizer { optimizer = opt, params = { chosen } } })
  net(ms.ones { 1, 4 }):sum():backward()
  assert(not chosen:eq(before):all():item() and other:eq(untouched):all():item())
end)

------------------------------------------------------------------------------ quantized collectives

local quantization = "algorithms/quantization/test_quantization.py: "
for _, dtype in ipairs { "fp16", "bfp16" } do
  local low = dtype == "fp16" and "f16" or "bf16"
  case(quantization .. "test_all_gather_" .. dtype, function()
    local all = world:all_gather(ms.full(rank + 0.5, { 1, 40 }):to(low)):value():to "f32"
    for r = 0, size - 1 do near(all[r + 1], ms.full(r + 0.5, { 40 }), 0) end
  end)
  case(quantization .. "test_all_to_all_" .. dtype, function()
    local mine = ms.full(rank + 0.5, { size, 40 }):to(low)
    local all = world:all_to_all(mine):value():to "f32"
    for r = 0, size - 1 do near(all[r + 1], ms.full(r + 0.5, { 40 }), 0) end
  end)
end
case(quantization .. "test_all_gather_int8", function()
  local codec, mine = ms.codec "int8", ms.randn { 300, seed = rank }
  local all = codec:decode(world:all_gather((codec:encode(mine:view(1, -1)))):value(), 300)
  for r = 0, size - 1 do near(all[r + 1], ms.randn { 300, seed = r }, 0.02) end
end)

---------------------------------------------------------------------- optimizers inside of backward

local in_backward = "optim/test_apply_optimizer_in_backward.py: "
local function small(seed)
  ms.seed(seed or 5)
  return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
end
local function weights(model) return (ms.pack(model:parameters())) end
local function pass(model, step) model(ms.randn { 2, 4, seed = step }):square():sum():backward() end

case(in_backward .. "test_apply_optimizer_in_backward", function()
  local a, b = small(), small()
  local first, second = { table.unpack(b:parameters(), 1, 2) }, { table.unpack(b:parameters(), 3) }
  local opts = {
    optim.sgd({ table.unpack(a:parameters(), 1, 2) }, { lr = 1e-2 }),
    optim.sgd({ table.unpack(a:parameters(), 3) }, { lr = 2e-2 }),
  }
  optim.in_backward(optim.sgd, first, { lr = 1e-2 })
  optim.in_backward(optim.sgd, second, { lr = 2e-2 })
  for step = 1, 6 do
    pass(a, step)
    for _, opt in ipairs(opts) do opt:step() end
    pass(b, step)
    near(weights(b), weights(a), 0, "weights")
  end
end)
case(in_backward .. "test_apply_optimizer_in_backward_shared_params", function()
  local function tied()
    local model = small()
    model[2].weight = model[1].weight
    return model
  end
  local a, b = tied(), tied()
  local opt = optim.sgd(a, { lr = 1e-2 })
  optim.in_backward(optim.sgd, b:parameters(), { lr = 1e-2 })
  for step = 1, 6 do
    pass(a, step)
    opt:step()
    pass(b, step)
    near(weights(b), weights(a), 0, "weights")
  end
end)
case(in_backward .. "test_no_register_hook", function()
  local model = small()
  local before, opt = weights(model), optim.sgd(model, { lr = 1e-2 })
  pass(model, 1)  -- an optimizer that is not registered to step in backward does not
  near(weights(model), before, 0)
  opt:step()
  assert(not weights(model):eq(before):all():item())
end)
case(in_backward .. "test_multiple_optim_for_params", function()
  local a, b = small(), small()
  local opts = { optim.sgd(a, { lr = 1e-2 }), optim.sgd(a, { lr = 3e-2 }) }
  optim.in_backward(optim.sgd, b:parameters(), { lr = 1e-2 })
  optim.in_backward(optim.sgd, b:parameters(), { lr = 3e-2 })
  for step = 1, 3 do
    pass(a, step)
    opts[1]:step { keep_grads = true }
    opts[2]:step()
    pass(b, step)
    near(weights(b), weights(a), 0, "weights")
  end
end)
case(in_backward .. "test_get_optimizers_in_backward", function()
  local model = small()
  local made = optim.in_backward(optim.sgd, model[1]:parameters())
  local listed = optim.in_backward_of(model)
  assert(#listed == 2 and listed[1].optimizers[1] == made[1] and listed[2].optimizers[1] == made[2])
end)

-------------------------------------------------------------------------------------------- sharded

local zero = "optim/test_zero_redundancy_optimizer.py: "
local function parity(make, options, change)
  local function train(sharded)
    local model, shards = small(), { shard = sharded and world or nil }
    local opt = make(model, expect.models.merged(options, shards))
    local net = ms.ddp(model)
    for step in ms.steps(5) do
      net(ms.randn { 2, 4, seed = 10 * step + rank }):square():sum():backward()
      if change then change(opt, step) end
      opt:step()
    end
    return weights(model)
  end
  near(train(true), train(false), 0, "weights")
end
case(zero .. "test_constructor", function()
  optim.adam(small(), { shard = world })
  raises(function() optim.adam({}, { shard = world }) end, "at least one parameter")
  raises(function() optim.adam(small(), { shard = "all" }) end, "shard must be a group")
end)
case(zero .. "test_local_optimizer_parity", function()
  for _, kind in ipairs { "adam", "adamw", "sgd" } do parity(optim[kind], { lr = 1e-2 }) end
end)
case(zero .. "test_lr_scheduler", function()
  parity(optim.sgd, { lr = 1e-2, schedule = optim.linear { steps = 5 } })
end)
case(zero .. "test_multiple_param_groups", function()
  parity(optim.adamw, { lr = 1e-2 }, function(opt, step) opt:groups()[1].lr = 1e-2 / (step + 1) end)
end)
case(zero .. "test_add_param_group", function()
  local model = small()
  local opt = optim.sgd(model[1]:parameters(), { lr = 1e-2, shard = world })
  opt:add_group { params = model[2]:parameters(), lr = 1e-3 }
  local held = 0
  for _, p in ipairs(model:parameters()) do if opt.owner[p] == rank then held = held + 1 end end
  assert(world:all_reduce(ms.tensor { held }):value():item() == 4)
end)
case(zero .. "test_zero_grad", function()
  local model = small()
  local opt = optim.sgd(model, { shard = world })
  pass(model, 1)
  opt:zero_grad()
  for _, p in ipairs(model:parameters()) do assert(p:grad() == nil) end
end)
case(zero .. "test_collect_shards", function()
  local model = small()
  local opt = optim.adam(model, { lr = 1e-2, shard = world })
  pass(model, 1)
  opt:step()
  local count = 0
  for _ in pairs(opt:state().parameters) do count = count + 1 end
  assert(rank ~= 0 or count == 4)
end)
case(zero .. "test_nondefault_process_group", function()
  if size < 2 then return end
  local half = world:split { { 0, 1 } }
  if half then
    local model, other = small(), small()
    local opt, whole = optim.adam(model, { lr = 1e-2, shard = half }),
      optim.adam(other, { lr = 1e-2 })
    for step = 1, 3 do
      pass(model, step)
      opt:step()
      pass(other, step)
      whole:step()
    end
    near(weights(model), weights(other), 0, "weights")
  end
end)
case(zero .. "test_ddp_zero_overlap", function()
  for _, policy in ipairs { "in_backward", "deferred" } do
    local function train(sharded)
      local model = small()
      local opt, net = optim.adam(model, { lr = 1e-2, shard = sharded and world or nil }),
        ms.ddp(model, { bucket_bytes = 64 })
      if sharded then opt:overlap(net, policy) end
      for step in ms.steps(6) do                             -- every step counts, from the first on
        net(ms.randn { 2, 4, seed = 10 * step + rank }):square():sum():backward()
        opt:step()
      end
      return weights(model)
    end
    near(train(true), train(false), 0, policy)
  end
end)

-- If ranks have different numbers of inputs, one join covers the ddp model and its sharded
-- optimizer: ranks without inputs still step the parameters that they own.
local function join_both(counts, options, make)
  local function train(sharded)
    local model = small()
    local opt, net = (make or optim.adam)(model, { lr = 1e-2, shard = sharded and world or nil }),
      ms.ddp(model)
    local taken = 0
    local ok, message = pcall(net.join, net, options, function()
      for step = 1, counts[rank % #counts + 1] do
        net(ms.randn { 2, 4, seed = 10 * step + rank, per_rank = false }):square():sum():backward()
        opt:step()
        taken = step
      end
    end)
    net:unwrap()
    return { weights = weights(model), ok = ok, message = message, taken = taken }
  end
  local whole, sharded = train(false), train(true)
  near(sharded.weights, whole.weights, 0, "weights")
  local all = world:all_gather(sharded.weights:view(1, -1)):sync()
  for r = 1, size do near(all[r], all[1], 0, "weights of ranks") end
  assert(sharded.ok == whole.ok and sharded.taken == whole.taken)
  return sharded
end
case(zero .. "test_zero_join_cpu", function()
  for _, make in ipairs { optim.sgd, optim.adam } do
    for _, counts in ipairs { { 3, 1, 2 }, { 0, 4 }, { 2 } } do
      assert(join_both(counts, {}, make).ok)
    end
  end
end)
case("algorithms/test_join.py: test_multiple_joinables", function()
  for _, divisor in ipairs { "all", "live" } do
    assert(join_both({ 1, 3, 4 }, { divisor = divisor }).ok)
  end
end)
case("algorithms/test_join.py: test_multiple_joinables_throw", function()
  local ended = join_both({ 2, 3, 4 }, { stop = true })
  assert(ended.taken == 2 and ended.ok == (size == 1))
  if size > 1 then
    assert(tostring(ended.message):find("rank 0 has no inputs left", 1, true), ended.message)
  end
end)
case(zero .. "test_step", function()
  -- Their layer of one number: sgd with lr 0.1 on the mean of gradients, from the same weights on
  -- all ranks.
  local layer = nn.Linear(1, 1)
  ms.no_grad(function()
    layer.weight:fill_(2)
    layer.bias:fill_(2)
  end)
  local opt, net = optim.sgd(layer, { lr = 0.1, shard = world }), ms.ddp(layer)
  net(ms.full(rank + 1, { 1 })):abs():sum():backward()
  opt:step()
  near(layer.weight:detach():view(1), ms.full(2 - 0.1 * (size + 1) / 2, { 1 }), 1e-6, "weight")
  near(layer.bias:detach(), ms.full(1.9, { 1 }), 1e-6, "bias")
end)
case(zero .. "test_state_dict", function()
  local options = { lr = 0.1, momentum = 0.9, shard = world }
  local a, b = small(), small(6)
  local first, second = optim.sgd(a, options), optim.sgd(b, options)
  local function step(model, opt, at)
    pass(model, at)
    opt:step()
  end
  for at = 1, 2 do step(a, first, at) end
  second:load_state(first:state())
  b:load_state(a:state())
  for at = 3, 4 do
    step(a, first, at)
    step(b, second, at)
  end
  near(weights(b), weights(a), 0, "weights")
end)

------------------------------------------------------------------------------------- states by name

local named = "optim/test_named_optimizer.py: "
case(named .. "test_state_dict", function()
  local model = small()
  local opt = optim.adam(model)
  pass(model, 1)
  opt:step()
  local state = opt:state().parameters
  for _, item in ipairs(model:named_parameters()) do assert(state[item.name], item.name) end
end)
case(named .. "test_load_state_dict", function()
  local a, b = small(), small(6)
  local first, second = optim.adam(a, { lr = 0.1 }), optim.adam(b, { lr = 0.1 })
  pass(a, 1)
  first:step()
  second:load_state(first:state())
  b:load_state(a:state())
  pass(a, 2)
  first:step()
  pass(b, 2)
  second:step()
  near(weights(b), weights(a), 0, "weights")
end)
case(named .. "test_load_state_dict_error", function()
  local opt, other = optim.adam(small()), nn.Linear(4, 4)
  local wrong = optim.adam(nn.Sequential(other, nn.Linear(1, 1), nn.Linear(1, 1)))
  for _, p in ipairs { wrong.order[5], wrong.order[6] } do wrong:step_param(p, p:zeros_like()) end
  raises(function() opt:load_state(wrong:state()) end, "is unknown here")
end)
case(named .. "test_add_param_group", function()
  local model = small()
  local opt = optim.sgd(model[1]:parameters(), { lr = 0.1 })
  opt:add_group { params = model[2]:parameters(), lr = 0.2 }
  raises(function() opt:add_group { params = model[2]:parameters() } end, "in two groups")
  assert(#opt:groups() == 2)
end)
case(named .. "test_init_state", function()
  local opt = optim.adam(small())
  -- A state begins with the first step of its parameter.
  assert(next(opt:state().parameters) == nil)
end)
