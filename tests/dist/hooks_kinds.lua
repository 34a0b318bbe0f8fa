-- Run by every rank of hooks_spec.lua for buckets of sharded kinds, on four ranks: links in Lua
-- compared with native links, bit for bit, and links in Lua between the reductions of a hybrid
-- bucket.
local ms = require "moonshard"
local core = require "moonshard.core"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local fails = expect.fails
local hooks, world, rank = ms.hooks, ms.world(), ms.rank()

local SHAPES, NAMES = { { 6, 5 }, { 13 }, { 4, 8 } }, { "a", "b", "c" }
local COUNT, PADDED = 75, 80
local pairs_of, places = world:split { { 0, 1 }, { 2, 3 } }, world:split { { 0, 2 }, { 1, 3 } }

local function draw(r, t)
  return ms.cat({ ms.randn { COUNT, seed = 100 * t + r }, ms.zeros { PADDED - COUNT } }, 1)
end

-- The shards of this rank in four iterations of a bucket of that kind.
local function reduced(kind, link)
  local compiled = hooks._compile(link, "hooks_kinds", nil, kind)
  local parameters, result = {}, {}
  for i, shape in ipairs(SHAPES) do parameters[i] = ms.zeros(shape):keep() end
  for t = 1, 4 do
    result[t] = core.reduce_bucket({
      kind = kind, group = world, shards = pairs_of, replicas = places, parameters = parameters,
      names = NAMES, flat = draw(rank, t),
    }, compiled):clone():keep()
  end
  return result
end

local function close(what, a, b, tolerance)
  for t = 1, #a do
    local by = (a[t] - b[t]):abs():max():item()
    if a[t]:numel() ~= b[t]:numel() or not (by <= tolerance) then
      error(("rank %d: %s: differs by %g in iteration %d"):format(rank, what, by, t), 2)
    end
  end
end

local cases = {
  { "reduce" },
  { "noop" },
  { "bf16_compress" },
  { "cast", { dtype = "f16" }, inner = "reduce" },
  { "error_feedback", {}, inner = "reduce" },
  { "error_feedback", { decay = 0.5 }, inner = "bf16_compress" },
  { "error_feedback", {}, inner = "int8" },
  { "powersgd", { start_step = 1, rank = 2, min_rate = 0.5 } },
  { "powersgd", { start_step = 0, batched = true } },
  { "int8" },
  { "int8", { per = "channel", form = "all_to_all", block = 10 } },
  { "int8", { per = "block", form = "all_to_all", block = 16 } },
  { "top_k", { fraction = 0.1, momentum = 0.5 } },
  { "sign_vote" },
  { "adasum" },
  { "nan_check", {}, inner = "reduce" },
}
local number = 0
local function build(case, twin)
  local options = expect.models.merged(case[2])
  number = number + 1
  if twin then options.name = ("twin of kinds %d"):format(number) end
  local function make(name, given)
    return twin and require("moonshard.hooks." .. name)(given) or hooks[name](given)
  end
  local links = { (make(case[1], options)) }
  if case.inner then links[2] = make(case.inner, not twin and {} or nil) end
  return hooks.chain(links)
end

for _, kind in ipairs { "all_reduce", "reduce_scatter", "hybrid" } do
  for i, case in ipairs(cases) do
    local native = reduced(kind, build(case, false))
    local shard = kind == "hybrid" and PADDED // 2 or PADDED // 4
    assert(native[1]:numel() == (kind == "all_reduce" and PADDED or shard))
    local what = ("%d: %s on %s"):format(i, case[1], kind)
    close(what .. ", in Lua", reduced(kind, build(case, true)), native, 0)
    close(what .. ", after a link in Lua", reduced(kind, hooks.chain {
      function(bucket, next) return next(bucket) end, build(case, false),
    }), native, 0)
  end
end

------------------------------------------------------------------------------------------- between

-- Native links and the same ones in Lua between the reductions.
local function between(...) return hooks.reduce { between = hooks.chain { ... } } end
local plain = reduced("hybrid", hooks.reduce())
close("reduce between", reduced("hybrid", between(hooks.reduce())), plain, 0)
close("a link in Lua between",
  reduced("hybrid", between(function(bucket, next) return next(bucket) end)), plain, 0)
local half = reduced("hybrid", between(hooks.cast { dtype = "bf16" }))
close("a twin between", reduced("hybrid", between(require "moonshard.hooks.cast" {
  dtype = "bf16",
})), half, 0)
assert((half[1] - plain[1]):abs():max():item() > 0)
local function fed(link) return hooks.chain { hooks.error_feedback(), link } end
close("error feedback around a twin",
  reduced("hybrid", fed(between(require "moonshard.hooks.cast" { dtype = "bf16" }))),
  reduced("hybrid", fed(between(hooks.cast { dtype = "bf16" }))), 0)
local cast = hooks.cast { dtype = "bf16" }
close("error feedback between, and in Lua",
  reduced("hybrid", between(hooks.error_feedback(), cast)),
  reduced("hybrid", between(require "moonshard.hooks.error_feedback" { name = "b" }, cast)), 0)

-- Each link is charged for its own work; links between the reductions have the numbers after the
-- link that contains them. The engine's account function shows the charges.
do
  local charged, now, account = {}, nil, core.bucket_account
  rawset(core, "bucket_account", function(owner)
    if owner then now, charged[#charged + 1] = owner, owner end
    return now
  end)
  local function pass(bucket, next) return next(bucket):and_then(function(mean) return mean end) end
  local link = hooks.chain { pass, between(pass, pass) }
  local compiled = hooks._compile(link, "hooks_kinds", nil, "hybrid")
  assert(#compiled.accounts == 4)
  reduced("hybrid", link)
  rawset(core, "bucket_account", account)
  -- First the links up to the reduction between, then back out; then the callbacks on results, in
  -- the order in which they were chained.
  local first = table.concat(charged, " ", 1, 9)
  if first ~= "1 2 3 4 5 4 3 2 1" then error("charged to " .. table.concat(charged, " ")) end
end

-- The bucket that a link between the reductions sees.
reduced("hybrid", between(function(bucket, next)
  assert(bucket:kind() == "all_reduce" and bucket:divisor() == 2)
  assert(bucket:group() == places and bucket:group("shard"):size() == 1)
  assert(bucket:buffer():numel() == PADDED // 2)
  local total, parameters = 0, bucket:parameters()
  for i, g in ipairs(bucket:gradients()) do
    assert(g:dim() == 1 and g:numel() <= parameters[i]:numel())
    total = total + g:numel()
  end
  assert(total == (pairs_of:rank() == 0 and PADDED // 2 or COUNT - PADDED // 2))
  return next(bucket)
end))

-- The result of a chain is checked on every kind of bucket; a chain that cannot work is refused.
for _, name in ipairs { "all_reduce", "post_local_sgd" } do
  for _, make in ipairs { hooks[name], (require("moonshard.hooks." .. name)) } do
    fails(function()
      hooks._compile(make { start_step = name == "post_local_sgd" and 1 or nil }, "fsdp", nil,
        "reduce_scatter")
    end, "fsdp: link 1", "does not work on buckets of the kind reduce_scatter")
  end
end
fails(function() hooks._compile(between "int8", "ddp") end, "need hybrid buckets")
fails(function() between(hooks.clip { max_norm = 1, scope = "bucket" }) end, "put it before reduce")
fails(function() between(between "int8") end, "a shard is reduced once")
fails(function()
  hooks._compile(hooks.chain { hooks.error_feedback(), between "adasum" }, "fsdp", nil, "hybrid")
end, "error_feedback")

print(("rank %d is done"):format(rank))
