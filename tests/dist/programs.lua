-- Random training programs: what one process computes from the inputs of all ranks, under ddp and
-- under every strategy of fsdp, with clipping, decay, momentum, schedules, unused and frozen
-- parameters, steps that are skipped, nan and inf, uneven inputs, accumulation, and optimizers that
-- step in backward. Weights and norms are those of one process.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local cfg = ms.config { programs = 10, seed = 1, only = 0 }

local WIDTH <const>, BLOCKS <const>, STEPS <const>, ROWS <const> = 5, 3, 3, 2
local size, rank = ms.world_size(), ms.rank()

------------------------------------------------------------------------------------------- drawing

-- All ranks draw the same.
local state = cfg.seed * 7919 + size
local function draw(n)
  state = (state * 1103515245 + 12345) % 2147483648
  return state // 65536 % n + 1
end
local function chance(percent) return draw(100) <= percent end
local function pick(list) return list[draw(#list)] end

-- What one forward uses: of each block nothing, one of its branches, or both.
local function draw_uses()
  local uses = {}
  for i = 1, BLOCKS do uses[i] = pick { "ab", "ab", "a", "b", "" } end
  return uses
end

local strategies = { "full_shard", "shard_grad_op", "no_shard" }
if size == 4 then strategies[4] = "hybrid_shard" end

local function draw_program()
  local p = {
    kind = pick { "sgd", "adamw", "rmsprop" }, decay = chance(60), schedule = chance(40),
    clip = chance(50) and pick { 0.05, 0.5, 5 } or nil, norm = pick { 2, 2, 1, math.huge },
    passes = pick { 1, 1, 2, 3 }, frozen = chance(30) and draw(BLOCKS) or nil,
    uneven_units = chance(40), bad = chance(40), join = chance(25),
    layout = pick { "flat", "rows" }, strategy = pick(strategies), accumulate = pick { "local",
      "shard", "all" }, wrap = pick { "Block", "Branch" }, bucket = pick { 64, 4096 },
    policy = pick { "classic", "classic", "in_backward", "deferred" },
    prefetch = pick { "backward_pre", "none", "backward_post" }, uses = {}, bads = {},
  }
  p.ignored = p.bad and chance(50)      -- the bad step is taken, and all that it reaches is nan
  -- What the pages say does not go together.
  if p.join then p.passes, p.bad, p.policy, p.uneven_units = 1, false, "classic", false end
  if p.policy == "in_backward" then
    p.clip = nil
    if not p.ignored then p.bad = false end
  end
  if p.ignored and (p.kind == "rmsprop" or not p.bad) then p.bad, p.ignored = false, false end
  for step = 0, STEPS + size do
    p.uses[step] = {}
    for pass = 1, p.passes do
      local common = draw_uses()
      p.uses[step][pass] = {}
      for r = 0, size - 1 do
        -- Without find_unused all ranks use the same units; they may use other parts of them.
        local own = p.uneven_units and draw_uses() or common
        p.uses[step][pass][r] = own
      end
    end
    p.bads[step] = p.bad and chance(40) and { rank = draw(size) - 1, pass = draw(p.passes),
      value = p.ignored and 0 / 0 or pick { 0 / 0, 1 / 0, -1 / 0 } } or nil
  end
  return p
end

-------------------------------------------------------------------------------------------- models

local Branch = ms.nn.class "Branch"
function Branch:init()
  self.up, self.down = ms.nn.Linear(WIDTH, WIDTH + 2), ms.nn.Linear(WIDTH + 2, WIDTH)
end
function Branch:forward(x) return self.down(self.up(x):tanh()) end

local Block = ms.nn.class "Block"
function Block:init()
  self.a, self.b = Branch(), Branch()
  self.scale = ms.nn.Parameter(ms.ones { 1 })
end
function Block:forward(x, uses)
  if uses:find "a" then x = x + self.a(x) * self.scale end
  if uses:find "b" then x = x + self.b(x) end
  return x * 1
end

local Net = ms.nn.class "Net"
function Net:init()
  local blocks = {}
  for i = 1, BLOCKS do blocks[i] = Block() end
  self.blocks, self.last = ms.nn.List(blocks), ms.nn.Linear(WIDTH, 2)
end
function Net:forward(x, uses)
  for i = 1, BLOCKS do if uses[i] ~= "" then x = self.blocks[i](x, uses[i]) end end
  return self.last(x)
end

local function new_net(p)
  ms.seed(17)
  local net = Net()
  if p.frozen then
    for _, one in ipairs(net.blocks[p.frozen].a:parameters()) do one:requires_grad_(false) end
  end
  return net
end

-- eps damps what AdamW makes of gradients near 0, whose last bits depend on the order of sums.
local function optimizer_of(p, model)
  local options = {
    lr = 0.05, weight_decay = p.decay and 0.2 or nil,
    schedule = p.schedule and function(n) return 1 / (n + 1) end or nil,
  }
  if p.kind == "sgd" then options.momentum = 0.9 else options.eps = 1e-2 end
  return ms.optim[p.kind](model:parameters(function(one) return one:requires_grad() end), options)
end

local function loss_of(p, model, step, pass, r)
  local x = expect.models.input(ROWS, WIDTH, 1000 * step + 100 * pass + r)
  local bad = p.bads[step]
  if bad and bad.rank == r and bad.pass == pass then x = x * bad.value end
  return model(x, p.uses[step][pass][r]):square():mean() / p.passes
end

------------------------------------------------------------------------------------------- running

-- Steps of rank r: in a join it has r + 1 inputs, otherwise all have STEPS.
local function inputs_of(p, r) return p.join and r % 3 + 1 or STEPS end

-- After backward: the norm before clipping, and the step.
local function step_it(p, model, optimizer, seen)
  local norm = model:clip_grad_norm(p.clip or math.huge, p.norm)
  seen[#seen + 1] = norm:item()
  local flag = p.bad and not p.ignored and norm:is_finite() or nil
  optimizer:step(flag and { only_if = flag } or nil)
  optimizer:zero_grad()
end

local function by_one(p)
  local net, seen = new_net(p), {}
  local optimizer, most = optimizer_of(p, net), 0
  for r = 0, size - 1 do most = math.max(most, inputs_of(p, r)) end
  for step = 0, most - 1 do
    for pass = 1, p.passes do
      for r = 0, size - 1 do
        if step < inputs_of(p, r) then (loss_of(p, net, step, pass, r) / size):backward() end
      end
    end
    if p.policy == "in_backward" then
      optimizer:step()
      optimizer:zero_grad()
    else step_it(p, net, optimizer, seen) end
  end
  return net:state(), seen
end

local function by_all(p, model)
  local seen = {}
  local optimizer = optimizer_of(p, model)
  if p.policy ~= "classic" then optimizer:overlap(model, p.policy) end
  local function one(step)
    model:accumulate(p.passes, function(pass)
      loss_of(p, model, step, pass, rank):backward()
    end)
    if p.policy == "in_backward" then
      optimizer:step()
      optimizer:zero_grad()
    else step_it(p, model, optimizer, seen) end
  end
  if p.join then
    model:join({ divisor = "all" }, function()
      for step = 0, inputs_of(p, rank) - 1 do one(step) end
    end)
  else
    for step in ms.steps(STEPS) do one(step) end
  end
  return expect.whole(model), seen
end

local function wraps(p)
  return {
    ddp = function(net)
      return ms.ddp(net, { find_unused = true, bucket_bytes = p.bucket })
    end,
    fsdp = function(net)
      return expect.models.fsdp(net, {
        strategy = p.strategy, layout = p.layout, accumulate = p.accumulate,
        find_unused = p.uneven_units, wrap = { class = p.wrap }, prefetch = p.prefetch,
      })
    end,
  }
end

local function is_number(x) return x == x and x ~= math.huge and x ~= -math.huge end

-- The largest difference of finite numbers, relative to the largest of a tensor. Others must be at
-- the same places.
local function compare(what, own, expected)
  local most = 0
  for name, t in ms.sorted_pairs(expected) do
    local a, b = own[name]:detach():reshape(-1):to_table(), t:detach():reshape(-1):to_table()
    local largest, difference = 1e-3, 0
    for i, x in ipairs(b) do
      assert(is_number(x) == is_number(a[i]), ("%s: '%s' is %g and not %g"):format(what, name,
        a[i], x))
      if is_number(x) then
        largest = math.max(largest, math.abs(x))
        difference = math.max(difference, math.abs(x - a[i]))
      end
    end
    most = math.max(most, difference / largest)
  end
  return most
end

local function describe(p)
  local texts = {}
  for name, value in ms.sorted_pairs(p) do
    if type(value) ~= "table" then texts[#texts + 1] = ("%s=%s"):format(name, tostring(value)) end
  end
  return table.concat(texts, " ")
end

local counts = {}
local function count(name, yes) counts[name] = (counts[name] or 0) + (yes and 1 or 0) end

for number = 1, cfg.programs do
  local p = draw_program()
  count("clip", p.clip)
  count("decay", p.decay)
  count("frozen", p.frozen)
  count("skips", next(p.bads) and not p.ignored)
  count("takes nan", next(p.bads) and p.ignored)
  count("join", p.join)
  count("accumulates", p.passes > 1)
  count("own units", p.uneven_units)
  count("early", p.policy == "in_backward")
  for _, strategy in ipairs(strategies) do count(strategy, p.strategy == strategy) end
  if cfg.only == 0 or cfg.only == number then
    local expected, norms = by_one(p)
    for name, wrap in ms.sorted_pairs(wraps(p)) do
      local what = ("program %d of seed %d, %s (%s)"):format(number, cfg.seed, name, describe(p))
      local ok, own, seen = xpcall(function() return by_all(p, wrap(new_net(p))) end, function(m)
        return tostring(m)
      end)
      assert(ok, what .. ": " .. tostring(own))
      -- Sums of f32 in another order, over three steps.
      local most = compare(what, own, expected)
      assert(most <= 2e-4, ("%s: weights differ by %g"):format(what, most))
      for i, norm in ipairs(seen) do
        local same = is_number(norm) and math.abs(norm / norms[i] - 1) < 1e-4
          or not is_number(norm) and not is_number(norms[i]) or norm == norms[i]
        assert(same, ("%s: norm %d is %g, not %g"):format(what, i, norm, norms[i]))
      end
    end
  end
end

for name, of in pairs(counts) do
  assert(cfg.programs < 100 or of >= 0.015 * cfg.programs, name .. " is rare: " .. of)
end
print(("rank %d is done"):format(rank))
