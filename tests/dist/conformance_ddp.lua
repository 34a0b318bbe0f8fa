-- Run by every rank of conformance_ddp_spec.lua: cases from PyTorch's own tests of data
-- parallelism, with the requirements that these tests have for the reducer. A case is named after
-- the file and the test that it represents. It has the values of that test if there are some;
-- otherwise it compares with gradients that are averaged by hand.
local ms = require "moonshard"
local core = require "moonshard.core"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local case, equal, raises, clear = expect.case, expect.equal, expect.fails, expect.clear
local hooks, nn = ms.hooks, ms.nn
local world, rank, size = ms.world(), ms.rank(), ms.world_size()

io.stdout:setvbuf "line"                                    -- lines of several ranks stay whole

-------------------------------------------------------------------------------------------- helpers

local function input(step)
  return expect.models.input(4, 2, 90 + 10 * (step or 0) + rank)
end
local function copy_of(list)
  for i, t in ipairs(list) do list[i] = t:detach():clone() end
  return list
end

-- Three layers as in their tests.
local Net = nn.class "Net"
function Net:init()
  ms.seed(3)
  self.fc1 = nn.Linear(2, 10, { bias = false })
  self.fc2 = nn.Linear(10, 50, { bias = false })
  self.fc3 = nn.Linear(50, 4, { bias = false })
end
function Net:forward(x) return self.fc3(self.fc2(self.fc1(x):relu()):relu()):softmax() end

-- Averages over the ranks of the gradients that f leaves in a model without ddp; false if no rank
-- has a gradient.
local function averages(model, f)
  clear(model)
  f(model)
  local list = {}
  for i, p in ipairs(model:parameters()) do
    local have = world:all_reduce(ms.tensor { p:grad() and 1. or 0. }):value():item()
    local mine = p:grad() and p:grad():clone() or ms.zeros(p:shape())
    list[i] = have > 0 and world:all_reduce(mine, { premul_sum = 1 / size }):value()
  end
  clear(model)
  return list
end

local function check_gradients(model, expected, tolerance)
  for i, item in ipairs(model:named_parameters()) do
    local grad = item.parameter:grad()
    assert((grad ~= nil) == (expected[i] ~= false),
      item.name .. (grad and " has a gradient" or " has no gradient"))
    if grad then equal(grad, expected[i], item.name, tolerance) end
  end
end

-- Checks, several times, that f gives the same gradients on a plain model and on a ddp model.
local function parity(make, options, f, passes)
  local plain, model = make(), ms.ddp(make(), options)
  for step = 1, passes or 3 do
    clear(model)
    f(model, step)
    check_gradients(model, averages(plain, function(m) f(m, step) end), 1e-6)
  end
  return model:unwrap()
end

local function backward(model, step) model(input(step)):square():sum():backward() end

-------------------------------------------------------------------------------- test_c10d_common.py

local function assigned(bytes, dtypes, limits)
  local text = {}
  for i, list in ipairs(core.ddp_assign(bytes, dtypes, limits)) do
    for j, at in ipairs(list) do list[j] = at - 1 end
    text[i] = table.concat(list, " ")
  end
  return table.concat(text, " | ")
end
case("test_c10d_common.py: test_single_limit_single_dtype", function()
  assert(assigned({ 400, 800, 400, 200 }, { 1, 1, 1, 1 }, { 400 }) == "0 | 1 | 2 | 3")
end)
case("test_c10d_common.py: test_single_limit_multi_dtype", function()
  assert(assigned({ 200, 200, 200, 200, 200, 200 }, { 1, 2, 1, 2, 1, 2 }, { 400 })
    == "0 2 | 1 3 | 4 | 5")
end)
case("test_c10d_common.py: test_multi_limit_single_dtype", function()
  assert(assigned({ 40, 40, 40, 40 }, { 1, 1, 1, 1 }, { 40, 80 }) == "0 | 1 2 | 3")
end)
case("test_c10d_common.py: test_multi_limit_multi_dtype", function()
  assert(assigned({ 200, 200, 200, 200, 200, 200 }, { 1, 2, 1, 2, 1, 2 }, { 200, 400 })
    == "0 | 1 | 2 4 | 3 5")
end)
case("test_c10d_gloo.py: test_single_dtype_single_bucket", function()
  local model = ms.ddp(Net())
  assert(#model:stats().buckets == 1 and model:stats().buckets[1].parameters == 3)
end)
case("test_c10d_gloo.py: test_multi_dtype_single_bucket", function()
  local net = Net()
  net.fc2:to "bf16"
  assert(#ms.ddp(net):stats().buckets == 2)
end)
case("test_c10d_gloo.py: test_multi_dtype_multi_bucket", function()
  local Mixed = nn.class "Mixed"
  function Mixed:init()
    self.a, self.b, self.c, self.d = nn.Linear(2, 2, { bias = false }),
      nn.Linear(2, 2, { bias = false }), nn.Linear(2, 2, { bias = false }),
      nn.Linear(2, 2, { bias = false })
    self.b:to "bf16"
    self.d:to "bf16"
  end
  function Mixed:forward(x)
    x = self.b(self.a(x):to "bf16"):to "f32"
    return self.d(self.c(x):to "bf16"):to "f32"
  end
  local model = ms.ddp(Mixed(), { bucket_bytes = 1 })
  for step = 1, 2 do backward(model, step) end
  assert(#model:stats().buckets == 4)
end)
case("test_c10d_gloo.py: test_forward_backward", function() parity(Net, nil, backward) end)
case("test_c10d_gloo.py: test_forward_backward_unused_parameters", function()
  local Drop = nn.class("Drop", Net)
  function Drop:forward(x) return self.fc2(self.fc1(x)) end
  parity(Drop, { find_unused = true }, backward)
end)
case("test_c10d_gloo.py: test_forward_backward_optimizer", function()
  local model = ms.ddp(Net())
  local optimizer = ms.optim.adam(model)
  for step in ms.steps(3) do
    optimizer:zero_grad()
    backward(model, step)
    optimizer:step()
  end
end)

-- Both compare a model that gets the samples of all ranks with one that gets its rank's samples.
for _, name in ipairs {
  "test_c10d_gloo.py: test_gloo_backend_cpu_module",
  "test_c10d_ucc.py: test_ucc_backend_cpu_module",
} do
  case(name, function()
    local whole, model = Net(), ms.ddp(Net())
    for step = 1, 5 do
      local samples = ms.randn { 2 * size, 2, seed = step, per_rank = false }
      clear(whole)
      clear(model)
      whole(samples):square():mean():backward()
      model(samples:narrow(1, 2 * rank + 1, 2)):square():mean():backward()
      for i, p in ipairs(whole:parameters()) do
        local own = model:parameters()[i]
        equal(own:grad(), p:grad(), "gradients", 1e-5)
        ms.no_grad(function()
          p:sub_(p:grad())
          own:sub_(own:grad())
        end)
      end
    end
  end)
end

-- Steps in which all passes but the last of each group are without synchronization.
local function accumulate(options)
  local plain, model = Net(), ms.ddp(Net(), options)
  local a, b = ms.optim.sgd(plain, { lr = 0.05 }), ms.optim.sgd(model, { lr = 0.05 })
  for step in ms.steps(6) do
    local expected = averages(plain,
      function(m) backward(m, 2 * step) backward(m, 2 * step + 1) end)
    model:no_sync(function() backward(model, 2 * step) end)
    backward(model, 2 * step + 1)
    check_gradients(model, expected, 1e-5)
    for i, p in ipairs(plain:parameters()) do p:set_grad(expected[i]) end
    a:step()
    b:step()
  end
  for i, p in ipairs(model:parameters()) do
    equal(p:detach(), plain:parameters()[i]:detach(), "weights", 1e-5)
  end
end
case("test_c10d_common.py: test_accumulate_gradients_no_sync", function() accumulate() end)
case("test_c10d_common.py: test_accumulate_gradients_no_sync_allreduce_hook", function()
  accumulate {
    comm_hook = function(bucket) return bucket:group():all_reduce(bucket:buffer():div_(size)) end,
  }
end)
case("test_c10d_common.py: test_accumulate_gradients_no_sync_allreduce_with_then_hook", function()
  accumulate { comm_hook = function(bucket)
    return bucket:group():all_reduce(bucket:buffer()):and_then(function(t) return t * 2 end)
      :and_then(function(t) return t / (2 * size) end)
  end }
end)
case("test_c10d_common.py: test_accumulate_gradients_no_sync_grad_is_view", function()
  local model = ms.ddp(Net())
  backward(model, 1)
  local before = model.fc1.weight:grad()
  model:no_sync(function() backward(model, 2) end)
  assert(model.fc1.weight:grad() == before, "gradients stay where they are")
end)
case("test_c10d_gloo.py: test_accumulate_gradients_module", function()
  parity(Net, nil, function(model, step)
    backward(model, step)
    backward(model, step + 5)
  end, 2)
end)

-- Recomputation: once, twice, with shared weights, with parameters that are not used, by static
-- graphs and without.
local Recomputed = nn.class "Recomputed"
function Recomputed:init(times, options)
  ms.seed(6)
  self.l1, self.l2, self.l3 = nn.Linear(2, 8), nn.Linear(8, 8), nn.Linear(8, 8)
  self.times, self.unused, self.shared = times, options and options.unused,
    options and options.shared
  if self.shared then self.l3.weight = self.l2.weight end
end
function Recomputed:forward(x)
  x = self.l1(x)
  for _ = 1, self.times do x = ms.recompute(function(t) return self.l2(t):tanh() end, x) end
  return self.unused and x or self.l3(x)
end
for _, static in ipairs { false, true } do
  local how = static and "_static_graph" or ""
  case("test_c10d_common.py: test_ddp_checkpointing_once" .. how, function()
    parity(function() return Recomputed(1) end, { static_graph = static }, backward)
  end)
  case("test_c10d_common.py: test_ddp_checkpointing_twice" .. how, function()
    parity(function() return Recomputed(2) end, { static_graph = static }, backward)
  end)
  case("test_c10d_common.py: test_ddp_checkpointing_weight_sharing" .. how, function()
    parity(function() return Recomputed(1, { shared = true }) end, { static_graph = static },
      backward)
  end)
  case("test_c10d_common.py: test_ddp_checkpointing_unused_params" .. how, function()
    parity(function() return Recomputed(1, { unused = true }) end,
      { static_graph = static, find_unused = not static }, backward)
  end)
end
case("test_c10d_common.py: test_ddp_checkpointing_dynamic_module", function()
  parity(function() return Recomputed(1) end, { find_unused = true }, function(model, step)
    if core.is_recording() then getmetatable(model) end
    local inner = getmetatable(model).ddp and model.module or model
    inner.unused = step % 2 == 1
    backward(model, step)
  end, 4)
end)

case("test_c10d_gloo.py: test_ddp_comm_hook_future_passing_cpu", function()
  local Two = nn.class "Two"
  function Two:init() self.weight = nn.Parameter(ms.zeros { 2, 2 }) end
  function Two:forward() return (self.weight * (rank + 1)):sum() end
  local model = ms.ddp(Two(),
    { comm_hook = function() return ms.all {}:and_then(function() return ms.ones { 4 } end) end })
  model():backward()
  equal(model.weight:grad(), ms.ones { 2, 2 }, "what the hook's future gave")
  model = ms.ddp(Two(),
    { comm_hook = function(bucket) return bucket:group():all_reduce(bucket:buffer()) end })
  model():backward()
  equal(model.weight:grad(), ms.full(size * (size + 1) / 2, { 2, 2 }),
    "the engine does not divide after a hook")
end)
case("test_c10d_gloo.py: test_ddp_comm_hook_register_just_once", function()
  raises(function() ms.ddp(ms.ddp(Net(), { comm_hook = "noop" }), { comm_hook = "noop" }) end,
    "wrapped already")
  raises(function() ms.ddp(Net(), { comm_hook = hooks.chain { "all_reduce", "noop" } }) end,
    "reduces")
end)
case("test_c10d_gloo.py: test_ddp_invalid_comm_hook_init", function()
  raises(function() ms.ddp(Net(), { comm_hook = 1 }) end, "not a number")
  raises(function() ms.ddp(Net(), { comm_hook = "no_such_hook" }) end, "unknown link")
end)

-- One parameter that all ranks use, one that only rank 0 uses, one that no rank uses.
local Unused = nn.class "Unused"
function Unused:init()
  ms.seed(8)
  self.t0, self.t1, self.t2 = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
end
function Unused:forward(x) return rank == 0 and self.t1(self.t0(x)) or self.t0(x) end
case("test_c10d_gloo.py: test_global_local_unused_params_grad", function()
  local net = parity(Unused, { find_unused = true }, backward)
  assert(not net.t2.weight:grad() and net.t1.weight:grad())
end)
case("test_c10d_gloo.py: test_global_local_unused_params_grad_with_static_graph", function()
  parity(Unused, { static_graph = true }, backward)
end)
case("test_c10d_gloo.py: test_find_unused_parameters_when_unused_parameters_empty", function()
  local Some = nn.class("Some", Net)
  function Some:forward(x)
    return rank == 0 and self.fc3(self.fc2(self.fc1(x))) or self.fc2(self.fc1(x))
  end
  parity(Some, { find_unused = true }, backward)
end)
local Outputs = nn.class("Outputs", Net)
function Outputs:forward(x)
  local hidden = self.fc2(self.fc1(x):relu()):relu()
  return { hidden, { out = self.fc3(hidden), self } }
end
case("test_c10d_gloo.py: test_arbitrary_forward_return_value", function()
  for _, find in ipairs { false, true } do
    parity(Outputs, { find_unused = find }, function(model, step)
      model(input(step))[2].out:square():sum():backward()
    end)
  end
end)
case("test_c10d_gloo.py: test_ignored_output", function()
  parity(Net, nil, function(model, step)
    for i = 1, 3 do model(input(i)) end                      -- forward passes that nothing follows
    backward(model, step)
  end)
end)
case("test_c10d_gloo.py: test_ignored_output_with_unused_parameters", function()
  parity(Outputs, { find_unused = true }, function(model, step)
    model(input(step))
    model(input(step))[1]:square():sum():backward()          -- an output that the loss does not use
  end)
end)
case("test_c10d_gloo.py: test_save_load_checkpoint", function()
  local model = ms.ddp(Net())
  local number = world:broadcast(ms.tensor { os.time() * 100 + math.random(99) }, 0):value():item()
  local path = ("%s/conformance-%d.safetensors")
    :format(os.getenv "TMPDIR" or "/tmp", math.tointeger(number))
  assert(model:save(path))
  world:barrier()
  local other = ms.ddp(Net())
  ms.no_grad(function() for _, p in ipairs(other:parameters()) do p:zero_() end end)
  assert(other:load(path))
  for i, p in ipairs(model:parameters()) do
    equal(other:parameters()[i]:detach(), p:detach(), "loaded")
  end
  world:barrier()
  if rank == 0 then os.remove(path) end
end)

-------------------------------------------------------------------------------- distributed_test.py

local function train_uneven(options, join_options, counts, make)
  local model = ms.ddp((make or Net)(), options)
  local optimizer = ms.optim.sgd(model, { lr = 0.1 })
  model:join(join_options, function()
    for step = 1, counts[rank % #counts + 1] do
      backward(model, step)
      optimizer:step()
    end
  end)
  return model
end
local function check_together(model)
  for _, p in ipairs(model:parameters()) do
    local all = world:all_gather(p:detach():reshape(1, -1)):value()
    for r = 1, size do equal(all[r], all[1], "weights of ranks") end
  end
end
case("distributed_test.py: test_ddp_uneven_inputs", function()
  for i, options in ipairs {
    {}, { find_unused = true }, { comm_hook = "bf16_compress" }, { bucket_bytes = 64 },
    { static_graph = true },
  } do
    for k, counts in ipairs { { 1, 4 }, { 3, 0, 2 }, { 2, 5, 5, 1 } } do
      for number, divisor in ipairs { "all", "live" } do
        if expect.takes(i + k + number, 2) then
          check_together(train_uneven(options, { divisor = divisor }, counts))
        end
      end
    end
  end
end)
case("distributed_test.py: test_ddp_uneven_input_join_disable", function()
  local plain, joined = ms.ddp(Net()), train_uneven(nil, {}, { 3 })
  local optimizer = ms.optim.sgd(plain, { lr = 0.1 })
  for step = 1, 3 do
    backward(plain, step)
    optimizer:step()
  end
  for i, p in ipairs(plain:parameters()) do
    equal(p:detach(), joined:parameters()[i]:detach(), "with join and without")
  end
end)
case("distributed_test.py: test_ddp_join_model_equivalence", function()
  -- Each rank r has gradients of its own in step s; one process with all gradients must take the
  -- same steps.
  local model, alone = train_uneven(nil, { divisor = "live" }, { 1, 2, 3, 4 }), Net()
  local optimizer = ms.optim.sgd(alone, { lr = 0.1 })
  for step = 1, size do
    local sums = {}
    for r = step - 1, size - 1 do
      clear(alone)
      alone(ms.randn { 4, 2, seed = 90 + 10 * step + r, per_rank = false })
        :square():sum():backward()
      for i, p in ipairs(alone:parameters()) do
        sums[i] = sums[i] and sums[i] + p:grad() or p:grad():clone()
      end
    end
    for i, p in ipairs(alone:parameters()) do p:set_grad(sums[i] / (size - step + 1)) end
    optimizer:step()
  end
  for i, p in ipairs(alone:parameters()) do
    equal(model:parameters()[i]:detach(), p:detach(), "weights", 1e-5)
  end
end)
case("distributed_test.py: test_ddp_grad_div_uneven_inputs", function()
  local One = nn.class "One"
  function One:init() self.weight = nn.Parameter(ms.ones { 10, 10 }) end
  function One:forward(x) return (x:matmul(self.weight)):sum() end
  for _, divisor in ipairs { "all", "live" } do
    local model = ms.ddp(One())
    model:join({ divisor = divisor }, function()
      for step = 1, 1 + rank do
        clear(model)
        model(ms.ones { 1, 10 }):backward()
        local live = size - step + 1
        equal(model.weight:grad(), ms.full(divisor == "live" and 1 or live / size, { 10, 10 }),
          divisor, 1e-6)
      end
    end)
  end
end)
case("distributed_test.py: test_ddp_hook_parity_allreduce", function()
  local function run(hook)
    local model = ms.ddp(Net(), { comm_hook = hook, bucket_bytes = { 100, 400 } })
    local optimizer = ms.optim.sgd(model, { lr = 0.1, momentum = 0.9 })
    for step in ms.steps(4) do
      backward(model, step)
      optimizer:step()
    end
    return copy_of(model:parameters())
  end
  local none = run(nil)
  for _, hook in ipairs {
    "reduce",
    "all_reduce",
    function(bucket)
      return bucket:group():all_reduce(bucket:buffer(), { premul_sum = 1 / size })
    end,
  } do
    for i, weight in ipairs(run(hook)) do equal(weight, none[i], "hook parity") end
  end
end)
case("distributed_test.py: test_ddp_control_flow_same_across_ranks", function()
  local Flow = nn.class("Flow", Net)
  function Flow:forward(x, both) return both and self.fc2(self.fc1(x)) or self.fc1(x) end
  for _, options in ipairs { { find_unused = true } } do
    parity(Flow, options,
      function(model, step) model(input(step), step % 2 == 0):square():sum():backward() end, 5)
  end
end)
case("distributed_test.py: test_ddp_control_flow_different_across_ranks", function()
  local Flow = nn.class("Flow", Net)
  function Flow:forward(x, both) return both and self.fc2(self.fc1(x)) or self.fc1(x) end
  parity(Flow, { find_unused = true },
    function(model, step) model(input(step), (step + rank) % 2 == 0):square():sum():backward() end,
    5)
end)
case("distributed_test.py: test_ddp_shared_grad_acc_unused_params", function()
  local Shared = nn.class "Shared"
  function Shared:init()
    ms.seed(9)
    self.a, self.b, self.unused = nn.Linear(2, 2, { bias = false }),
      nn.Linear(2, 2, { bias = false }), nn.Linear(2, 2)
    self.b.weight = self.a.weight
  end
  function Shared:forward(x) return self.b(self.a(x)) end
  parity(Shared, { find_unused = true }, backward)
  parity(Shared, { static_graph = true }, backward)
end)
case("distributed_test.py: test_ddp_static_graph_nested_types", function()
  parity(Outputs, { static_graph = true }, function(model, step)
    model(input(step))[2].out:square():sum():backward()
  end)
end)
case("distributed_test.py: test_ddp_static_graph_multi_forward", function()
  parity(Net, { static_graph = true }, function(model, step)
    local y = model(input(step))
    for i = 1, 2 do y = y * model(input(step + i)) end
    y:square():sum():backward()
  end)
end)
case("ours: several forwards, one backward, unused parameters", function()
  -- The two forwards use different parameters; a parameter that neither uses is unused.
  local Which = nn.class("Which", Recomputed)
  function Which:forward(x, first) return first and self.l1(x) or self.l2(self.l1(x)) end
  parity(function() return Which(1) end, { find_unused = true }, function(model, step)
    local y = model(input(step), rank == 0)
    y = y + model(input(step + 1), true)
    y:square():sum():backward()
  end)
end)
case("distributed_test.py: test_ddp_new_tensor_in_fwd", function()
  local New = nn.class("New", Net)
  function New:forward(x)
    local extra = ms.ones { 4, 2, requires_grad = true }
    return { self.fc3(self.fc2(self.fc1(x))), { extra * 2, ms.zeros { 3 } } }
  end
  for _, options in ipairs { { find_unused = true }, { static_graph = true } } do
    parity(New, options, function(model, step) model(input(step))[1]:square():sum():backward() end)
  end
end)
case("distributed_test.py: test_ddp_returns_tensor_with_no_grad", function()
  local NoGrad = nn.class("NoGrad", Net)
  function NoGrad:forward(x) return { self.fc3(self.fc2(self.fc1(x))), ms.ones { 4 } } end
  parity(NoGrad, { find_unused = true }, function(model, step)
    model(input(step))[1]:square():sum():backward()
  end)
end)
case("distributed_test.py: test_ddp_zero_output_features", function()
  local Zero = nn.class "Zero"
  function Zero:init() self.fc, self.none = nn.Linear(2, 2), nn.Parameter(ms.zeros { 0 }) end
  function Zero:forward(x) return self.fc(x):sum() + self.none:sum() end
  local model = ms.ddp(Zero())
  for step = 1, 2 do model(input(step)):backward() end
  assert(model.none:grad():numel() == 0)
end)
case("distributed_test.py: test_ddp_get_bucket_sizes", function()
  local model = ms.ddp(Net(), { bucket_bytes = { 100, 900 } })
  for step = 1, 2 do backward(model, step) end
  local buckets, total = model:stats().buckets, 0
  for i, bucket in ipairs(buckets) do
    assert(bucket.index == i - 1)
    total = total + bucket.bytes
  end
  assert(total == 4 * (2 * 10 + 10 * 50 + 50 * 4) and buckets[1].bytes == 800 and #buckets == 3,
    #buckets)
end)
case("distributed_test.py: test_ddp_logging_data_cpu", function()
  local model = ms.ddp(Net(),
    { comm_hook = "bf16_compress", find_unused = true, bucket_bytes = 1 << 20 })
  for step in ms.steps(3) do backward(model, step) end
  ms.synchronize()
  local stats = model:stats()
  assert(stats.world_size == size and stats.iteration == 3 and stats.step == 2 and stats.rebuilt
    and stats.hook:find("cast bf16", 1, true))
  assert(stats.options.find_unused and stats.options.broadcast_buffers
    and not stats.options.static_graph and stats.options.bucket_bytes[1] == 1 << 20)
  assert(#stats.buckets == 1 and stats.forward_ms > 0 and stats.backward_ms > 0
    and stats.reduce_ms > 0)
end)
local Buffered = nn.class("Buffered", Net)
function Buffered:init()
  Net.init(self)
  self:add_buffer("seen", ms.full(rank, { 3 }))
end
case("distributed_test.py: test_ddp_broadcast_buffer", function()
  local model = ms.ddp(Buffered())
  backward(model, 1)
  model.seen:fill_(rank + 1)
  backward(model, 2)
  equal(model.seen, ms.ones { 3 }, "rank 0's buffer")
  model = ms.ddp(Buffered(), { broadcast_buffers = false })
  model.seen:fill_(rank + 1)
  for step = 1, 2 do backward(model, step) end
  equal(model.seen, ms.full(rank + 1, { 3 }), "one's own buffer")
end)
case("distributed_test.py: test_ddp_broadcast_buffer_via_hook", function()
  local model = ms.ddp(Buffered(),
    { buffer_hook = function(buffers) return world:broadcast(buffers.seen, size - 1) end })
  model.seen:fill_(rank + 1)
  for step = 1, 2 do backward(model, step) end
  equal(model.seen, ms.full(size, { 3 }), "the last rank's buffer")
end)
case("distributed_test.py: test_ddp_buffer_hook_allreduce", function()
  local model = ms.ddp(Buffered(),
    { buffer_hook = function(buffers) return world:all_reduce(buffers.seen, "avg") end })
  model.seen:fill_(rank + 1)
  backward(model, 1)
  equal(model.seen, ms.full((size + 1) / 2, { 3 }), "the mean", 1e-6)
end)
case("distributed_test.py: test_ddp_remove_autograd_hooks", function()
  local model = ms.ddp(Net())
  backward(model, 1)
  local inner = model:unwrap()
  clear(inner)
  backward(inner, 1)
  local own = inner.fc1.weight:grad():clone()
  clear(inner)
  local again = ms.ddp(inner)
  backward(again, 1)
  if size > 1 then assert(not again.fc1.weight:grad():eq(own):all():item(), "reduced again") end
end)
case("distributed_test.py: test_ddp_ignore_params_arg", function()
  local Part = nn.class("Part", Buffered)
  local net = Part()
  ms.no_grad(function() net.fc2.weight:fill_(rank) end)
  local model = ms.ddp(net, { ignored = { "fc2.weight", "seen" } })
  equal(model.fc2.weight:detach(), ms.full(rank, { 50, 10 }), "an ignored parameter is not copied")
  backward(model, 1)
  backward(model, 2)
  equal(model.seen, ms.full(rank, { 3 }), "an ignored buffer is not copied")
  for _, bucket in ipairs(model:stats().buckets) do
    assert(bucket.bytes == 4 * (2 * 10 + 50 * 4))
  end
end)
case("distributed_test.py: test_ddp_apply_optim_in_backward_ignored_params", function()
  local net = Net()
  local before = copy_of(net:parameters())
  ms.optim.in_backward(ms.optim.sgd, net:parameters(), { lr = 0.1 })
  local model = ms.ddp(net, { ignored = { "fc2.weight" } })
  for step in ms.steps(2) do backward(model, step) end
  for i, item in ipairs(model:named_parameters()) do
    assert(item.parameter:detach():eq(before[i]):all():item() == (item.name == "fc2.weight"),
      item.name)
  end
end)
case("distributed_test.py: test_ddp_inference", function()
  local model = ms.ddp(Net())
  model:eval()
  ms.no_grad(function()
    for _ = 1, 1 + rank do model(input(1)) end               -- any number of passes on each rank
  end)
  assert(not model:stats().collectives.all_reduce)
  backward(model:train(), 1)
end)
case("distributed_test.py: test_ddp_sync_module_states", function()
  local net = Buffered()
  ms.no_grad(function() for _, p in ipairs(net:parameters()) do p:fill_(rank) end end)
  local model = ms.ddp(net)
  for _, p in ipairs(model:parameters()) do
    equal(p:detach(), ms.zeros(p:shape()), "rank 0's values")
  end
  ms.no_grad(function() net.fc1.weight:fill_(rank) end)
  model:unwrap()
  model = ms.ddp(net, { init_sync = false })
  equal(model.fc1.weight:detach(), ms.full(rank, { 10, 2 }), "nothing is copied")
end)
case("distributed_test.py: test_ddp_native_mixed_precision", function()
  local function run(options)
    local model = ms.ddp(Net(), options)
    for step = 1, 2 do
      clear(model)
      backward(model, step)
    end
    local list = {}
    for i, p in ipairs(model:parameters()) do
      assert(p:dtype() == "f32" and p:grad():dtype() == "f32")
      list[i] = p:grad():clone()
    end
    return list
  end
  local full = run()
  for _, precision in ipairs {
    { param = "f16" },
    { param = "bf16" },
    { param = "f16", reduce = "f32" },
    { reduce = "f16" },
    { param = "bf16", output = "f32", cast_inputs = true },
  } do
    for i, grad in ipairs(run { precision = precision }) do
      equal(grad, full[i], "low precision", 0.05)
    end
    run { precision = precision, find_unused = true, comm_hook = "all_reduce" }
  end
end)
case("distributed_test.py: test_ddp_forward_backward_hook", function()
  local seen = {}
  local net = Net()
  net.fc2:hook("forward", function() seen[#seen + 1] = "forward" end)
  net.fc2:hook("backward", function() seen[#seen + 1] = "backward" end)
  backward(ms.ddp(net), 1)
  assert(table.concat(seen, " ") == "forward backward")
end)

---------------------------------------------------------------------------- algorithms/test_join.py

case("algorithms/test_join.py: test_single_joinable", function()
  check_together(train_uneven(nil, {}, { 1, 2, 3, 4 }))
end)
case("algorithms/test_join.py: test_single_joinable_main_hooks", function()
  local calls = 0
  local model = train_uneven(
    { comm_hook = function(bucket, next) calls = calls + 1 return next(bucket) end }, {},
    { 1, 2, 3, 4 })
  assert(calls == size, "who is done runs the hook as often as who is not")
  model:unwrap()
end)
case("algorithms/test_join.py: test_single_joinable_post_hooks", function()
  local model = ms.ddp(Buffered())
  model:join({}, function()
    for step = 1, 1 + rank do
      backward(model, step)
      clear(model)
      model.seen:fill_(100 * step + rank)
      ms.no_grad(function() model.fc1.weight:fill_(rank) end)
    end
  end)
  equal(model.fc1.weight:detach(), ms.full(size - 1, { 10, 2 }), "values of the last to join")
  equal(model.seen, ms.full(100 * size + size - 1, { 3 }), "buffers of the last to join")
end)
case("algorithms/test_join.py: test_single_joinable_throw", function()
  local model = ms.ddp(Net())
  local steps = 0
  local function run()
    model:join({ stop = true }, function()
      for step = 1, 2 + rank do
        backward(model, step)
        clear(model)
        steps = step
      end
    end)
  end
  if size > 1 then raises(run, "join: rank 0 has no inputs left") else run() end
  assert(steps == 2)
end)
case("algorithms/test_join.py: test_join_kwargs", function()
  raises(function() ms.ddp(Net()):join({ divisors = "all" }, print) end, "'divisor'")
  raises(function() ms.ddp(Net()):join({ divisor = "some" }, print) end, "'all' or 'live'")
end)

-------------------------------------------------------------- replicate, collectives with gradients

case("_composable/test_replicate.py: test_replicate_single_module", function()
  local model = ms.ddp(Net())
  assert(model.module.fc1 == model.fc1 and #model:parameters() == 3
    and model:parameters()[1]:name() == "fc1.weight")
  parity(Net, nil, backward)
end)
case("_composable/test_replicate.py: test_replicate_ignore_module", function()
  local net = Net()
  local model = ms.ddp(net, { ignored = { "fc1%..*" } })
  backward(model, 1)
  local own = net.fc1.weight:grad()
  if size > 1 then
    local mean = world:all_reduce(own:clone(), "avg"):value()
    assert(not own:eq(mean):all():item(), "an ignored module's gradient stays local")
  end
end)
case("test_c10d_spawn.py: test_allreduce", function()
  local x = ms.full(rank + 1, { 3, requires_grad = true })
  local y = world:all_reduce(x):value()
  equal(y:detach(), ms.full(size * (size + 1) / 2, { 3 }));
  (y * (rank + 1)):sum():backward()
  equal(x:grad(), ms.full(size * (size + 1) / 2, { 3 }))
end)
case("test_c10d_spawn.py: test_broadcast", function()
  local x = ms.full(rank + 1, { 3, requires_grad = true })
  local y = world:broadcast(x, size - 1):value()
  equal(y:detach(), ms.full(size, { 3 }));
  (y * (rank + 1)):sum():backward()
  equal(x:grad() or ms.zeros { 3 }, ms.full(rank == size - 1 and size * (size + 1) / 2 or 0, { 3 }))
end)
case("test_c10d_spawn.py: test_all_gather", function()
  local x = ms.full(rank + 1, { 2, requires_grad = true })
  local y = world:all_gather(x):value();
  (y * y):sum():backward()
  equal(x:grad(), ms.full(2 * size * (rank + 1), { 2 }))
end)
case("test_c10d_spawn.py: test_all_to_all", function()
  local x = ms.full(rank + 1, { size, requires_grad = true })
  local y = world:all_to_all(x):value();
  (y * y):sum():backward()
  equal(x:grad(), ms.full(2 * (rank + 1), { size }))
end)

core.synchronize()
