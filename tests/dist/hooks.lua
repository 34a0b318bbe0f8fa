-- What every rank of hooks_spec.lua's links runs: native links against their twins, bit for bit and
-- alone, and what arithmetic says of both.
local ms = require "moonshard"
local core = require "moonshard.core"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local hooks, world, rank, size = ms.hooks, ms.world(), ms.rank(), ms.world_size()

-- A sum over parameters that are multiplied by what they are given, so that these are their
-- gradients.
local Weighted = ms.nn.class "Weighted"
function Weighted:init(shapes)
  for i, shape in ipairs(shapes) do self[i] = ms.nn.Parameter(ms.zeros(shape)) end
end
function Weighted:forward(constants)
  local total = ms.zeros {}
  for i, constant in ipairs(constants) do total = total + (self[i] * constant):sum() end
  return total
end

local COUNT <const> = expect.full and 4 or 3        -- iterations, if a case does not say
local SHAPES = { { 16, 24 }, { 24 }, { 24, 12 }, { 40, 3 }, {}, { 4, 4 }, { 3, 8, 5 } }

-- Gradients of rank r in iteration t.
local function draws(t, r, shapes)
  local list = {}
  for i, shape in ipairs(shapes) do
    list[i] = ms.randn { seed = 1000 * t + 10 * i + r, table.unpack(shape) }
  end
  return list
end

-- Gradients after the hook in each iteration; buckets are rebuilt for the second one.
local function reduced(hook, options)
  options = options or {}
  local shapes, make = options.shapes or SHAPES, options.draws or draws
  local model = ms.ddp(Weighted(shapes),
    { bucket_bytes = options.bucket_bytes or { 500, 1500 }, comm_hook = hook })
  local result = {}
  for t in ms.steps(options.count or COUNT) do
    model(make(t, rank, shapes)):backward()
    for i, p in ipairs(model:parameters()) do
      result[#result + 1] = p:grad():clone():keep()
      p:set_grad(nil)
    end
  end
  model:unwrap()
  return result
end

local function differ(a, b)
  local most = 0
  assert(#a == #b and #a > 0)
  for i = 1, #a do most = math.max(most, (a[i] - b[i]):abs():max():item()) end
  return most
end
local function close(what, a, b, tolerance)
  local by = differ(a, b)
  if not (by <= tolerance) then
    error(("rank %d of %d: %s: differs by %g"):format(rank, size, what, by), 2)
  end
end

-- The mean over all ranks of their gradients in each iteration.
local function means(options)
  options = options or {}
  local shapes, result = options.shapes or SHAPES, {}
  for t = 0, (options.count or COUNT) - 1 do
    local sums
    for r = 0, size - 1 do
      local own = (options.draws or draws)(t, r, shapes)
      for i, g in ipairs(own) do own[i] = sums and sums[i] + g / size or g / size end
      sums = own
    end
    for _, sum in ipairs(sums) do result[#result + 1] = sum end
  end
  return result
end

------------------------------------------------------------------------------------ links and twins

-- name, options; wraps: another link reduces the rest.
local cases = {
  { "all_reduce" },
  { "noop" },
  { "fp16_compress" },
  { "bf16_compress" },
  { "cast", { dtype = "bf16" }, wraps = true },
  { "error_feedback", {}, wraps = true }, { "error_feedback", { decay = 0.5 }, wraps = true },
  { "powersgd", { start_step = 1, rank = 2 } },
  { "powersgd", { start_step = 0, warm_start = false, seed = 5 } },
  { "powersgd", { start_step = 2, error_feedback = false, eps = 1e-3 } },
  { "int8" },
  { "int8", { per = "channel", block = 64 } },
  { "int8", { per = "block", block = 32 } },
  { "int8", { form = "all_to_all" } },
  { "int8", { per = "channel", form = "all_to_all", block = 100 } },
  { "int8", { per = "block", form = "all_to_all", block = 16 } },
  { "error_feedback", {}, wraps = true, inner = "int8" },
  { "error_feedback", {}, wraps = true, inner = "all_reduce" },
  { "top_k", { fraction = 0.1 } },
  { "top_k", { fraction = 0.01, momentum = 0.5 } },
  { "sign_vote" },
  { "adasum" },
  { "post_local_sgd", { start_step = 2 } },
  { "post_local_sgd", { start_step = 1, reduce_after = false } },
  { "post_local_sgd", { start_step = 1, subgroup = world:levels(size % 2 == 0 and 2 or 1) } },
  { "powersgd", { start_step = 1, rank = 3, min_rate = 0.5 } },
  { "powersgd", { start_step = 1, rank = 2, batched = true } },
  { "powersgd" },
  { "powersgd", { start_step = 0, batched = true, warm_start = false, error_feedback = false } },
}
local number = 0

-- The link, native or in Lua, inside the chain that surrounds it.
local function build(case, twin, around)
  local options = expect.models.merged(case[2])
  number = number + 1
  if twin then options.name = ("twin %d"):format(number) end
  local function make(name, given)
    return twin and require("moonshard.hooks." .. name)(given) or hooks[name](given)
  end
  local links = { make(case[1], options) }
  if around then table.insert(links, 1, make("cast", { dtype = around })) end
  if case.wraps then links[#links + 1] = make(case.inner or "bf16_compress") end
  return hooks.chain(links)
end

-- Results of cases without a cast around the link, and with one.
local native = {}
for i, case in ipairs(cases) do
  native[i] = {}
  for a, around in ipairs { "none", "bf16", "f16" } do
    if around == "none" and expect.takes(i, 2) or expect.takes(i + 2 * a, 8) then
      local ok, result = pcall(reduced, build(case, false, around ~= "none" and around))
      if not ok then error(("%s, %s around: %s"):format(case[1], around, result), 0) end
      native[i][around] = result
    end
  end
end
-- The versions in Lua use only functions that scripts have.
local native_link = core.native_link
core.native_link = function() error("a twin used a native link", 2) end
for i, case in ipairs(cases) do
  for around, result in ms.sorted_pairs(native[i]) do
    close(("%d: %s in Lua, %s around"):format(i, case[1], around),
      reduced(build(case, true, around ~= "none" and around)), result, case.tolerance or 0)
  end
end
core.native_link = native_link
-- Native links give the same results in a chain that Lua runs as in one that the engine runs.
local function passes_on(bucket, next) return next(bucket) end
for i, case in ipairs(cases) do
  if expect.takes(i, 4) then
    close(case[1] .. " after a link in Lua",
      reduced(hooks.chain { passes_on, build(case, false) }), native[i].none, 0)
  end
end

------------------------------------------------------------------------------------------- powersgd

-- All ranks have 40000: f16 holds the mean, not the sum.
local large = {
  shapes = { { 3 } },
  count = 1,
  draws = function() return { ms.full(40000, { 3 }) } end,
}
for _, link in ipairs {
  "fp16_compress", hooks.chain { hooks.cast { dtype = "f16" }, hooks.powersgd() },
  require "moonshard.hooks.fp16_compress" {},
} do
  close("a mean that f16 holds", reduced(link, large), { ms.full(40000, { 3 }) },
    size == 3 and 16 or 0)
end

-- Matrices of rank 1 pass through it unchanged, with every combination of options
-- (test_powerSGD_ddp_comm_hook_nccl).
local low = { shapes = { { 12, 10 }, { 10, 16 } }, draws = function(t, r, shapes)
  local list = {}
  for i, shape in ipairs(shapes) do
    list[i] = (ms.randn { shape[1], 1, seed = i } * (r + t + 1))
      :matmul(ms.randn { 1, shape[2], seed = 50 + i })
  end
  return list
end }
local expected = means(low)
for _, error_feedback in ipairs { true, false } do
  for _, warm_start in ipairs { true, false } do
    close("matrices of rank 1", reduced(
      hooks.powersgd { start_step = 1, error_feedback = error_feedback, warm_start = warm_start },
      low), expected, 1e-4)
  end
end
-- A bucket that as a square has rank 1; gradients of zeros stay zeros; full rank is exact.
local one = {
  shapes = { { 6, 6 } },
  draws = function(t, r)
    return { (ms.randn { 6, 1, seed = 3 } * (r + t)):matmul(ms.randn { 1, 6, seed = 4 }) }
  end,
  count = 3,
}
close("a square of rank 1", reduced(hooks.powersgd { start_step = 0, batched = true }, one),
  means(one), 1e-4)
local zeros = { shapes = { { 8, 8 } }, draws = function() return { ms.zeros { 8, 8 } } end }
for _, batched in ipairs { true, false } do
  close("zeros", reduced(hooks.powersgd { start_step = 0, batched = batched }, zeros), means(zeros),
    0)
end
close("full rank", reduced(hooks.powersgd { start_step = 0, rank = 100, min_rate = 0.01 }), means(),
  2e-5)

-- The bytes that a link passes to collectives, for one bucket.
local function payload(hook, shape)
  local before = select(2, world:_traffic())
  local model = ms.ddp(Weighted { shape }, { comm_hook = hook, init_sync = false })
  model(draws(0, rank, { shape })):backward()
  model:unwrap()
  return select(2, world:_traffic()) - before
end
local function check_bytes(what, hook, shape, due)
  local bytes = payload(hook, shape)
  if bytes ~= due then error(("%s: %d bytes, expected %d"):format(what, bytes, due), 0) end
end
-- Which matrices are compressed, judged by the sent bytes; P and Q are [n, r] and [m, r].
for _, case in ipairs {
  { { 64, 64 }, 1, 128 }, { { 64, 1 }, 1, 64 }, { { 4, 4 }, 1, 16 }, { { 64, 64 }, 4, 512 },
} do
  check_bytes("compressed matrices", hooks.powersgd { start_step = 0, rank = case[2] }, case[1],
    4 * case[3])
end
check_bytes("half as many bytes in bf16",
  hooks.chain { hooks.cast { dtype = "bf16" }, hooks.powersgd { start_step = 0 } }, { 64, 64 }, 256)

----------------------------------------------------------------------------------------------- int8

-- From -1 to 3 a step is 4 / 255, and 0 stays 0.
local vector = {
  shapes = { { 5 } },
  count = 1,
  draws = function() return { ms.tensor { -1, 0, 3, 1.004, 0.5 } } end,
}
local step = 4 / 255
for _, form in ipairs { "all_gather", "all_to_all" } do
  local got = reduced(hooks.int8 { form = form }, vector)[1]:to_table()
  if form == "all_gather" or size == 1 then
    for i, whole in ipairs { -64, 0, 191, 64, 32 } do
      if math.abs(got[i] - whole * step) > 1e-6 then
        error(("int8: number %d is %.9g"):format(i, got[i]), 0)
      end
    end
  end
  if got[2] ~= 0 then error("int8: 0 does not stay 0", 0) end
end
for _, per in ipairs { "tensor", "channel", "block" } do
  for _, form in ipairs { "all_gather", "all_to_all" } do
    local link = hooks.int8 { per = per, form = form, block = 64 }
    close(("int8 per %s, %s"):format(per, form), reduced(link), means(),
      form == "all_gather" and 0.02 or 0.04)
  end
end
-- bytes: codes, and two numbers for each row, or one for each block
local n, parts = 6400, (6400 + size - 1) // size
check_bytes("int8", hooks.int8(), { n }, n + 8)
check_bytes("int8 per channel", hooks.int8 { per = "channel", block = 64 }, { n }, n + 8 * n // 64)
check_bytes("int8 per block", hooks.int8 { per = "block", block = 64 }, { n }, n + 4 * n // 64)
check_bytes("int8 all_to_all", hooks.int8 { form = "all_to_all" }, { n },
  size * parts + 8 * size + parts + 8)

----------------------------------------------------------------------------------- top_k, sign_vote

close("top_k of all", reduced(hooks.top_k { fraction = 1 }), means(), 1e-6)
-- Numbers that were not sent are sent later.
local later = { count = 8, shapes = { { 30 }, { 5, 5 } }, draws = function(t, r, list)
  if t < 4 then return draws(t, r, list) end
  return { ms.zeros { 30 }, ms.zeros { 5, 5 } }
end }
local sent, wanted = reduced(hooks.top_k { fraction = 0.34 }, later), means(later)
for i = 1, 2 do
  local a, b = sent[i], wanted[i]
  for t = 1, 7 do a, b = a + sent[2 * t + i], b + wanted[2 * t + i] end
  close("top_k in the end", { a }, { b }, 1e-5)
end
check_bytes("top_k", hooks.top_k { fraction = 0.01 }, { 1000 }, 10 * 8)
-- A decimal fraction means what was written, although 0.07 * 100 is more than 7 in floating point;
-- others are rounded up.
for i, case in ipairs {
  { 0.07, 100, 7 }, { 0.0700001, 100, 8 }, { 0.28, 25, 7 }, { 1 / 3, 100, 34 }, { 1e-9, 100, 1 },
} do
  local fraction, count, due = table.unpack(case)
  local what = ("top_k, %g of %d"):format(fraction, count)
  check_bytes(what, hooks.top_k { fraction = fraction }, { count }, due * 8)
  check_bytes(what .. " in Lua",
    require "moonshard.hooks.top_k" { fraction = fraction, name = "decimal " .. i }, { count },
    due * 8)
  for _, recipe in ipairs { { "dgc", 8 }, { "random_k", 4 } } do  -- in one order on all ranks
    local method = dofile(os.getenv "MOONSHARD_SOURCE" .. "/recipes/hooks/" .. recipe[1] .. ".lua")
    check_bytes(("%s, %g of %d"):format(recipe[1], fraction, count), method { fraction = fraction },
      { count }, due * recipe[2])
  end
end
local votes, most = reduced("sign_vote", { count = 2 }), {}
for t = 0, 1 do
  local sums
  for r = 0, size - 1 do
    local own = draws(t, r, SHAPES)
    for i, g in ipairs(own) do own[i] = sums and sums[i] + g:sign() or g:sign() end
    sums = own
  end
  for _, sum in ipairs(sums) do most[#most + 1] = sum:sign() end
end
close("sign_vote", votes, most, 0)
check_bytes("sign_vote", hooks.sign_vote(), { 1000 }, 125)

--------------------------------------------------------------------------------------------- adasum

-- For each parameter: parallel gradients average, orthogonal ones add, zeros change nothing.
local function unit(i)
  local list = {}
  for k = 1, 8 do list[k] = k == i and i * 1.0 or 0.0 end
  return ms.tensor(list)
end
local kinds = { shapes = { { 8 }, { 8 }, { 8 }, { 8 } }, count = 1, draws = function(_, r)
  return { unit(3), unit(r + 1), r == 0 and unit(2) or ms.zeros { 8 }, ms.zeros { 8 } }
end }
local sum = unit(1)
for r = 1, size - 1 do sum = sum + unit(r + 1) end
close("adasum", reduced("adasum", kinds), { unit(3), sum, unit(2), ms.zeros { 8 } }, 1e-6)
local one_step = { shapes = { { 50 } }, count = 1 }
local all, power = {}, 1
for r = 0, size - 1 do all[r] = draws(0, r, one_step.shapes)[1]:to_table() end
while power * 2 <= size do power = power * 2 end
local by_definition = dofile((debug.getinfo(1, "S").source:match "^@(.*)hooks%.lua$")
  .. "adasum_reference.lua")
close("adasum", reduced("adasum", one_step), { ms.tensor(by_definition(all, size)) }, 1e-6)
-- Halves in both directions, and in round k three products for each parameter to each of k ranks.
-- Ranks beyond a power of two send all their numbers.
local rounds, halves = math.log(power, 2) // 1 | 0, 2 * 6400 * 4 * (power - 1) // power
local beside = rank >= size - power and rank < power and 0 or 6400 * 4
check_bytes("adasum", hooks.adasum(), { 6400 },
  rank < power and halves + 3 * 4 * rounds * (rounds + 1) // 2 + beside or beside)

---------------------------------------------------------------------- what is lost, and what is not

-- Numbers in the residual of top_k or powersgd are not lost, so error_feedback changes nothing.
for _, twin in ipairs { false, true } do
  local inners = { top_k = { fraction = 0.1 }, powersgd = { start_step = 1 } }
  for inner, options in ms.sorted_pairs(inners) do
    local function make(name, given)
      if not twin then return hooks[name](given) end
      number = number + 1
      local named = { name = ("before %d"):format(number) }
      return require("moonshard.hooks." .. name)(expect.models.merged(named, given))
    end
    local both = hooks.chain { make("error_feedback", {}), make(inner, options) }
    close("error_feedback before " .. inner, reduced(both), reduced(make(inner, options)), 0)
  end
end
-- A link that changes numbers reports what it sends, and error_feedback uses the report.
local function doubled(bucket, next)
  local own = bucket:buffer()
  if bucket:wants_sent() then bucket:set_sent(own) end
  bucket:set_buffer(own * 2)
  return next(bucket):and_then(function(result) return result / 2 end)
end
for _, make in ipairs {
  hooks.int8, function() return hooks.int8 { per = "block", block = 32 } end,
  function() return hooks.top_k { fraction = 1 } end, hooks.reduce,
} do
  local got = reduced(hooks.chain { "error_feedback", doubled, make() })
  close("what another link has told, before " .. tostring(make()), got,
    reduced(hooks.chain { doubled, make() }), 0)
end

-- inf and NaN of one rank spoil the step in which they occur, but not the links' states for later
-- steps.
for i, case in ipairs {
  { "error_feedback", {}, wraps = true, inner = "int8" },
  { "error_feedback", {}, wraps = true },
  { "top_k", { fraction = 0.1 } },
  { "top_k", { fraction = 0.1, momentum = 0.5 } },
  { "powersgd", { start_step = 0, rank = 2 } },
  { "powersgd", { start_step = 0, batched = true } },
  { "powersgd", { start_step = 0, warm_start = false } },
} do
  for _, bad in ipairs(expect.full and { 0 / 0, 1 / 0 } or { (i + size) % 2 / 0 }) do
    local function last(twin)
      local whole = reduced(build(case, twin), { draws = function(t, r, shapes)
        local list = draws(t, r, shapes)
        if t == 1 and r == 0 then
          for _, g in ipairs(list) do g:view(-1):narrow(1, 1, 1):fill_(bad) end
        end
        return list
      end })
      return { table.unpack(whole, 2 * #SHAPES + 1) }
    end
    local got = last(false)
    for _, g in ipairs(got) do assert(g:is_finite():all():item(), case[1] .. " is spoilt") end
    close(case[1] .. " in Lua after a bad step", last(true), got, 0)
  end
end

-- Parameters without numbers, also alone in their buckets.
local some_empty = { shapes = { { 0 }, { 6, 6 }, { 0, 3 }, { 3, 0 } }, bucket_bytes = 1, count = 3 }
local function filled(list)
  local kept = {}
  for _, t in ipairs(list) do if t:numel() > 0 then kept[#kept + 1] = t end end
  return kept
end
for i, case in ipairs(cases) do
  if expect.takes(i + 1, 3) then
    local got = filled(reduced(build(case, false), some_empty))
    close(("%d: %s in Lua, empty parameters"):format(i, case[1]),
      filled(reduced(build(case, true), some_empty)), got, case.tolerance or 0)
  end
end

----------------------------------------------------------------------------------------------- clip

local function norm_of(list, first, last)
  local sum_of_squares = 0
  for i = first, last do sum_of_squares = sum_of_squares + list[i]:square():sum():item() end
  return math.sqrt(sum_of_squares)
end
local plain, count = means(), #SHAPES
for _, wrap in ipairs {
  function(...) return hooks.chain { ... } end,
  function(...) return hooks.chain { ..., function(bucket, next) return next(bucket) end } end,
} do
  for scope, expected_of in pairs {
    global = function(t) return norm_of(plain, t * count + 1, (t + 1) * count) end,
    lagged = function(t) return t > 0 and norm_of(plain, (t - 1) * count + 1, t * count) or 0 end,
  } do
    local clipped, expected_list = reduced(wrap(hooks.clip { max_norm = 2, scope = scope })), {}
    for i, g in ipairs(plain) do
      expected_list[i] = g * math.min(1, 2 / (expected_of((i - 1) // count) + 1e-6))
    end
    close("clip " .. scope, clipped, expected_list, 1e-5)
  end
end
local by_bucket = reduced(hooks.clip { max_norm = 0.5, scope = "bucket" }, { bucket_bytes = 1 })
for i = count + 1, #by_bucket do  -- from the second iteration on each parameter has its bucket
  close("clip bucket", { by_bucket[i] },
    { plain[i] * math.min(1, 0.5 / (plain[i]:norm():item() + 1e-6)) }, 1e-6)
end
-- The norm of a step with gradients that are not finite is not used to clip the next step.
local odd = {
  count = 5,
  shapes = { { 4 } },
  draws = function(t) return { ms.full(t == 1 and 0 / 0 or t == 3 and 1 / 0 or 8, { 4 }) } end,
}
local lagged = reduced(hooks.clip { max_norm = 4, scope = "lagged" }, odd)
for i, due in pairs { [1] = 8, [3] = 2, [5] = 2 } do
  close("clip lagged", { lagged[i] }, { ms.full(due, { 4 }) }, 1e-5)
end
close("clip after a cast",
  reduced(hooks.chain { hooks.clip { max_norm = 2, scope = "global" }, "bf16_compress" }),
  reduced(hooks.clip { max_norm = 2, scope = "global" }), 1e-2)

------------------------------------------------------------------------------------------ nan_check

-- In step 2 one rank has a NaN, in step 4 another rank has an infinity. No rank takes these steps,
-- and moments and counts do not change, whichever links follow the check.
for _, inner in ipairs { "reduce", "sign_vote" } do
  local name = "nan_check before " .. inner
  local link, good = require "moonshard.hooks.nan_check" { name = name }
  local models, optimizers = {}, {}
  for i, hook in ipairs {
    hooks.chain { "nan_check", inner }, hooks.chain { link, inner }, hooks.chain { inner },
  } do
    models[i] = ms.ddp(Weighted { { 4, 5 }, { 7 } }, { bucket_bytes = 8, comm_hook = hook })
    optimizers[i] = ms.optim.adamw(models[i], { lr = 0.1 })
  end
  for t in ms.steps(6) do
    local bad = t == 2 or t == 4
    for i, model in ipairs(models) do
      local list = draws(t, rank, { { 4, 5 }, { 7 } })
      if bad and rank == (t == 2 and 0 or size - 1) and i < 3 then
        list[t // 2]:view(-1):narrow(1, 3, 1):fill_(t == 2 and 0 / 0 or 1 / 0)
      end
      if i < 3 or not bad then
        model(list):backward()
        optimizers[i]:step(i == 2 and { only_if = good() } or nil)
      end
    end
  end
  for i = 1, 2 do
    for k, p in ipairs(models[i]:parameters()) do
      close(name, { p:detach() }, { models[3]:parameters()[k]:detach() }, 0)
    end
  end
  for _, model in ipairs(models) do model:unwrap() end
end

---------------------------------------------------------------------------------------------- stats

-- Bytes are charged to the link that passed them to a collective, in chains that the engine runs
-- and in chains that Lua runs. Times are parts of the reductions' time.
local function watch(bucket, next) return next(bucket):and_then(function(t) return t * 1 end) end
local gathering = hooks.stage {
  name = "gathering",
  observe = function(buffer) world:all_gather(buffer:narrow(1, 1, 1)) end,
  decode = function(t) return t + 0 end,
}
for _, case in ipairs {
  {
    { hooks.cast { dtype = "bf16" }, "error_feedback", "int8" },
    { "cast bf16", "error_feedback", "int8" },
    { 0, 0, 105 + 2 * 8 },
  },
  {
    { watch, gathering, hooks.cast { dtype = "f16" } },
    { false, "stage 'gathering'", "cast f16", "reduce" },
    { 0, 2 * 4, 0, 105 * 2 },
  },
  { { watch, require "moonshard.hooks.sign_vote" () }, { false, false }, { 0, 10 + 4 } },
} do
  local model = ms.ddp(Weighted { { 5, 15 }, { 30 } },
    { bucket_bytes = 1, comm_hook = hooks.chain(case[1]) })
  for t in ms.steps(4) do
    model(draws(t, rank, { { 5, 15 }, { 30 } })):backward()
    expect.clear(model)
  end
  core.synchronize()
  local stats, ms_sum, exposed = model:stats(), 0, 0
  assert(#stats.links == #case[2], "links: " .. #stats.links)
  for i, link in ipairs(stats.links) do
    assert(not case[2][i] or link.name == case[2][i], link.name)
    if link.calls ~= 2 or link.payload_bytes ~= case[3][i] or link.group ~= "world" then
      error(("link %s: %d calls, %d bytes, expected 2 and %d")
        :format(link.name, link.calls, link.payload_bytes, case[3][i]), 0)
    end
    ms_sum, exposed = ms_sum + link.ms, exposed + link.exposed_ms
  end
  assert(ms_sum > 0 and ms_sum <= stats.reduce_ms + 1e-6 and exposed <= stats.exposed_ms + 1e-6
    and exposed <= ms_sum, "times")
  model:unwrap()
end

-- The bits of what the native links gave.
local text = {}
for _, case in ipairs(native) do
  for _, t in ipairs(case.none or {}) do text[#text + 1] = expect.bits { t } end
end
io.stdout:write(("rank %d is done, gradients %x\n"):format(rank,
  core.hash(table.concat(text, " "))))
