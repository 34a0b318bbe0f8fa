-- What every rank of fsdp_layout_spec.lua runs: units of several modules, and shards of rows,
-- against models without shards and with flat ones, and the errors of bad options.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local fails, models = expect.fails, expect.models
local rank, size = ms.rank(), ms.world_size()

local VOCAB, WIDTH, ROWS, LENGTH, STEPS = 10, 6, 12, 5, 3

-- A language model whose head is a module that has the embedding's weight.
local Tied = ms.nn.class "Tied"
function Tied:init()
  self.wte = ms.nn.Embedding(VOCAB, WIDTH)
  self.mid = ms.nn.Sequential(ms.nn.Linear(WIDTH, WIDTH), ms.nn.Linear(WIDTH, WIDTH))
  self.norm = ms.nn.LayerNorm(WIDTH)
  self.head = ms.nn.Linear(WIDTH, VOCAB)
  self.head.weight = self.wte.weight
end
function Tied:forward(x, early)
  x = self.wte(x)
  if not early then x = self.mid(x):tanh() + x end
  return self.head(self.norm(x))
end

local function batch(step)
  return ms.randint {
    ROWS, LENGTH + 1, low = 0, high = VOCAB, seed = 7 + step, per_rank = false,
  }
end

local function loss_of(model, tokens)
  return model(tokens:narrow(2, 1, LENGTH)):cross_entropy(tokens:narrow(2, 2, LENGTH))
end

local function new_tied()
  ms.seed(4)
  return Tied()
end

-- Trains on all rows (whole), or on this rank's.
local function train(model, whole)
  local optimizer = ms.optim.sgd(model, { lr = 0.5, momentum = 0.9 })
  for step in ms.steps(STEPS) do
    local tokens = batch(step)
    if not whole then tokens = tokens:narrow(1, rank * ROWS // size + 1, ROWS // size) end
    loss_of(model, tokens):backward()
    optimizer:step()
    optimizer:zero_grad()
  end
  return expect.whole(model)
end

local groups = { names = { "mid%.%d" }, groups = { { "wte", "head" } } }

-- A tied weight whose rows (10) do not divide by 3 or 4 ranks.
do
  local expected = train(new_tied(), true)
  for _, strategy in ipairs { "full_shard", "shard_grad_op", "no_shard", "hybrid_shard" } do
    local model = ms.fsdp(new_tied(), { wrap = groups, strategy = strategy })
    local units = model:units()
    assert(#units == 4 and units[2].name == "wte+head" and #units[2].parameters == 2)
    assert(#units[1].parameters == 2, "the root has the norm")
    -- Sums over ranks are added in another order: rounding of f32.
    expect.close(train(model), expected, 2e-6, strategy)
  end
end

-- How often a unit's parameters travel in f.
local function gathers(name, f)
  local count = 0
  for _, record in ipairs(expect.records(f)) do
    if record.op == "all_gather" and record.label == name then count = count + 1 end
  end
  return count
end

-- The unit stays gathered between its modules, and no longer than that.
if size > 1 then
  local model = ms.fsdp(new_tied(), { wrap = groups })
  local tokens = batch(0):narrow(1, 1, 1)
  local loss
  local function forget() ms.no_grad(function() model.wte.weight:mul_(1) end) end
  assert(gathers("wte+head", function() loss = loss_of(model, tokens) end) == 1)
  assert(not model:units()[2].gathered)
  assert(gathers("wte+head", function() loss:backward() end) == 1)
  assert(not model:units()[2].gathered)
  -- Where only some of its modules run, the root's end is the end.
  forget()
  ms.no_grad(function() model.wte(tokens) end)
  assert(model:units()[2].gathered)
  ms.no_grad(function() loss_of(model, tokens) end)
  assert(not model:units()[2].gathered)
  model.head:hook("pre_forward", function() assert(model:units()[2].gathered) end)
  ms.no_grad(function() loss_of(model, tokens) end)
end

------------------------------------------------------------------------------------------- rows

-- Each rank has the rows that the layout says, in the parameter's trailing shape.
do
  local model = ms.fsdp(new_tied(), { wrap = groups, layout = "rows" })
  local by_name = {}
  for _, item in ipairs(model:named_parameters()) do by_name[item.name] = item.parameter end
  for _, piece in ipairs(model:pieces()) do
    local p, row = by_name[piece.name], 1
    for d = 2, #piece.shape do row = row * piece.shape[d] end
    local each = -(-piece.shape[1] // size)
    local first = math.min(rank * each, piece.shape[1])
    local own = math.min(each, piece.shape[1] - first)
    assert(piece.count == own * row and piece.first == (own > 0 and first * row or 0))
    local shape = p:shape()
    assert(#shape == #piece.shape and shape[1] == own and shape[2] == piece.shape[2])
    assert(p:full_shape()[1] == piece.shape[1])
  end
  -- Whole values, and what is written inside summon.
  local expected = new_tied():state()
  expect.same(expect.whole(model), expected, "by rows")
  local written = ms.randn { VOCAB, WIDTH, seed = 3, per_rank = false }
  model:summon({}, function() by_name["wte.weight"]:copy_(written) end)
  local kept = expect.whole(model)
  assert((kept["wte.weight"] - written):abs():max():item() == 0)
  assert((kept["mid.1.weight"] - expected["mid.1.weight"]:detach()):abs():max():item() == 0)
  model:load_state(expected)
  expect.same(expect.whole(model), expected, "loaded")
end

-- Trains with shards. how: micro, clip, scale
local function train_sharded(options, how)
  local model = models.fsdp(new_tied(), options)
  local optimizer = ms.optim.adamw(model, { lr = 0.1 })
  local scaler = how.scale and ms.optim.scaler { init_scale = 8 }
  for step in ms.steps(STEPS) do
    model:accumulate(how.micro or 1, function(i)
      local tokens = batch(step * 10 + i)
      local loss = loss_of(model, tokens:narrow(1, rank * ROWS // size + 1, ROWS // size))
      if scaler then loss = scaler:scale(loss) end
      loss:backward()
    end)
    models.finish(model, optimizer, { scaler = scaler, clip = how.clip })
  end
  return expect.whole(model)
end

local function assert_same(own, expected, most, what)
  for name, t in ms.sorted_pairs(expected) do
    local d = (own[name] - t):abs():max():item()
    assert(d <= most, ("%s: %s differs by %g"):format(what, name, d))
  end
end

-- A reduction by hand, which gives this rank's shard of what all ranks have.
local function by_hand(bucket)
  local whole = bucket:buffer():clone()
  return bucket:group():all_reduce(whole, "sum"):and_then(function(sum)
    return bucket:shard(sum * (1 / bucket:divisor()))
  end)
end

-- The ranks add the same numbers in the same order under both layouts, so all bits are the same;
-- but for norms, whose squares are added in another order.
local hooks = ms.hooks
local function half() return hooks.cast { dtype = "bf16" } end
local cases = {
  { "plain", {}, {} }, { "micro", {}, { micro = 2 } }, { "clip", {}, { clip = 0.1 }, 1e-6 },
  { "scaler", {}, { scale = true } }, { "local", { accumulate = "local" }, { micro = 2 } },
  { "in memory", { strategy = "shard_grad_op" }, {} }, { "whole", { strategy = "no_shard" }, {} },
  { "no prefetch", { prefetch = "none" }, {} },
  { "cast", { comm_hook = half }, {} },
  { "powersgd", { comm_hook = function() return hooks.powersgd { start_step = 0 } end }, {} },
  { "int8", { comm_hook = function() return hooks.int8 {} end }, {} },
  { "by hand", { comm_hook = function() return by_hand end }, {} },
  { "clip link", { comm_hook = function()
    return hooks.chain { hooks.clip { max_norm = 0.1, scope = "bucket" }, hooks.reduce() }
  end }, {}, 1e-6 },
}
if size == 4 then
  -- The rank that has an element of the shard adds it to its own gradient in the last pass.
  cases[#cases + 1] = { "hybrid of pairs", { strategy = "hybrid_shard" }, { micro = 2 }, 1e-6 }
  cases[#cases + 1] = { "between", { strategy = "hybrid_shard", comm_hook = function()
    return hooks.reduce { between = hooks.chain { half(), hooks.reduce() } }
  end }, {} }
end
for number, case in ipairs(cases) do
  local name, given, how, most = table.unpack(case)
  local function run(layout)
    local options = models.merged({ wrap = groups, layout = layout }, given)
    if given.comm_hook then options.comm_hook = given.comm_hook() end
    return train_sharded(options, how)
  end
  -- Odd numbers of ranks take every second case and even ones the others. Hybrid shards are of 4.
  if expect.takes(number, 2) or given.strategy == "hybrid_shard" then
    assert_same(run "rows", run "flat", most or 0, name)
  end
end

-- Between the two reductions links see rows.
if size == 4 then
  local seen = {}
  local function watch(bucket, next)
    for i, p in ipairs(bucket:parameters()) do
      local shape, whole = bucket:gradients()[i]:shape(), p:full_shape()
      assert(#shape == #whole and shape[1] == -(-whole[1] // 2) and shape[2] == whole[2])
      seen[p:name()] = true
    end
    return next(bucket)
  end
  train_sharded({
    wrap = groups, layout = "rows", strategy = "hybrid_shard",
    comm_hook = hooks.reduce { between = hooks.chain { watch, hooks.reduce() } },
  }, {})
  assert(seen["wte.weight"] and seen["norm.bias"])
end

------------------------------------------------------------------------------- shards and states

for _, layout in ipairs { "flat", "rows" } do
  local inner = new_tied()
  inner.norm.bias:requires_grad_(false)
  local model = ms.fsdp(inner, { wrap = groups, layout = layout })
  local before, units = expect.whole(model), model:units()
  -- A unit's shard as one tensor: what is written there, the pieces have.
  local flat = ms.flat(units[2].parameters)
  assert(#flat:shape() == 1 and flat:numel() * 4 == units[2].shard_bytes)
  ms.no_grad(function() flat:mul_(2) end)
  for name, t in pairs(expect.whole(model)) do
    local factor = (name:find "wte" or name:find "head") and 2 or 1
    assert((t - before[name] * factor):abs():max():item() == 0, name)
  end
  fails(function() ms.flat { units[2].parameters[1], units[3].parameters[1] } end,
    "in unit \"wte+head\"", "in unit \"mid.0\"", "one unit")
  fails(function() ms.flat { units[2].parameters[1] } end, "0 times", "each once")
  fails(function() ms.flat(units[1].parameters) end, "lie apart in unit \"root\"", "trained")
  fails(function() ms.flat { units[2].parameters[1], ms.nn.Linear(2, 2).weight } end,
    "belongs to an fsdp model", "one unit")
  -- Ranks have pieces of different sizes, and allocate the same for optimizer states.
  for _, kind in ipairs { "adamw", "adagrad" } do
    local optimizer = ms.optim[kind](model, { initial_accumulator_value = kind == "adagrad" and 1
      or nil })
    loss_of(model, batch(0)):backward()
    local live = ms.memory().live
    optimizer:step()
    local taken = ms.full(ms.memory().live - live, {})
    local most = ms.world():all_reduce(taken:clone(), "max"):value():item()
    assert(most == taken:item() and most > 0, ("%g, %g"):format(most, taken:item()))
    optimizer:zero_grad()
  end
end

------------------------------------------------------------------------- reshard_after_forward

-- Pairs of ranks keep units between forward and backward: one gather of each among four ranks, one
-- in the pair. The values are those of full shards.
if size == 4 then
  local function records(f)
    local found = setmetatable({}, { __index = function() return 0 end })
    for _, record in ipairs(expect.records(f)) do
      if record.op == "all_gather" then
        local key = record.label .. " " .. record.wire_bytes
        found[key] = found[key] + 1
      end
    end
    return found
  end
  local function check_gathers(model, tokens)
    local loss
    local forward = records(function() loss = loss_of(model, tokens) end)
    local backward = records(function() loss:backward() end)
    for _, unit in ipairs(model:units()) do
      if unit.index > 0 then
        assert(forward[unit.name .. " " .. unit.bytes * 3 // 4] == 1, unit.name)
        assert(backward[unit.name .. " " .. unit.bytes // 2] == 1, unit.name)
      end
    end
  end
  for _, layout in ipairs { "flat", "rows" } do
    local options = { wrap = groups, layout = layout }
    local plain = train_sharded(options, { micro = 2 })
    options.reshard_after_forward = 2
    options.strategy = "shard_grad_op" -- which the number overrides
    assert_same(train_sharded(options, { micro = 2 }), plain, 0, "pairs")
    local model = ms.fsdp(new_tied(), options)
    local tokens = batch(0):narrow(1, 1, 1)
    check_gathers(model, tokens)
    -- The same where backward runs the unit's forward again.
    local blocks = ms.fsdp(ms.nn.gpt2 {
      vocab = VOCAB, context = LENGTH, layers = 2, width = 8, heads = 2, recompute = true,
    }, { layout = layout, reshard_after_forward = 2 })
    check_gathers(blocks, tokens)
    -- What is kept until backward is half of each unit, and nothing where no backward comes.
    local halves = 0
    for _, unit in ipairs(model:units()) do
      if unit.index > 0 then halves = halves + unit.bytes // 2 end
    end
    local function kept(reshard, run)
      local other = ms.fsdp(new_tied(), {
        wrap = groups, layout = layout, reshard_after_forward = reshard,
      })
      local before = ms.memory().live
      local result = run(function() return loss_of(other, tokens) end)
      local during = ms.memory().live
      if result then result:backward() end
      return during - before
    end
    local function recorded(f) return f() end
    local function silent(f) ms.no_grad(function() f() end) end
    assert(kept(2, recorded) - kept(true, recorded) == halves)
    assert(kept(2, silent) == kept(true, silent))
  end
end
local divisors = { "there is none", "there is none", "there is none", "4: 2" }
for _, count in ipairs { 1, 3, size, -2 } do
  fails(function() ms.fsdp(new_tied(), { reshard_after_forward = count }) end,
    "reshard_after_forward = " .. count, divisors[size])
end

-- Bad input.
fails(function() ms.fsdp(new_tied(), { layout = "row" }) end, "layout = 'row'",
  "did you mean 'rows'")
fails(function()
  ms.fsdp(new_tied(), { wrap = { groups = { { "wte", "head" }, { "mid", "hea." } } } })
end, "module 'head' is in groups 1 and 2")
fails(function() ms.fsdp(new_tied(), { wrap = { groups = { { "wte", "heat" } } } }) end,
  "wrap.groups[1]", "'heat'", "did you mean 'head'")
fails(function() ms.fsdp(new_tied(), { wrap = { groups = { "wte" } } }) end, "wrap.groups[1]",
  "list of names")
fails(function() ms.fsdp(new_tied(), { wrap = { names = { "wte" } } }) end,
  "'wte.weight' (unit \"wte\") and 'head.weight' (unit \"root\") are one parameter", "groups")
print(("rank %d is done"):format(rank))
