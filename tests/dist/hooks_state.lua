-- Run by every rank of hooks_spec.lua for states: three passes with a state that differs between
-- ranks and is saved after the second pass; or, from the saved state, the third pass alone.
local ms = require "moonshard"
local hooks, rank, size = ms.hooks, ms.rank(), ms.world_size()
local cfg = ms.config { folder = "", saved = 0 }        -- saved: by how many ranks; 0: save

local Two = ms.nn.class "Two"
function Two:init()
  self.a, self.b = ms.nn.Parameter(ms.ones { 3 }), ms.nn.Parameter(ms.ones { 5 })
end
function Two:forward() return (self.a:sum() + self.b:sum() * 2) * (rank + 1) end

local state = hooks.state "sums"
local function adding(bucket, next)
  local own, all = state:flat(bucket, "own"), state:of "all"
  own:add_(bucket:buffer())
  all.passes = (all.passes or 0) + 1
  all.rank = all.rank or rank
  for _, p in ipairs(bucket:parameters()) do
    local at = state:of(p)
    at.numbers = at.numbers or ms.full(rank + 1, { p:numel() }):to "bf16"
  end
  return next(bucket):and_then(function() return bucket:group():all_reduce(own:clone()) end)
end
local model = ms.ddp(Two(), { bucket_bytes = 1, comm_hook = adding })
local function pass()
  for _, p in ipairs(model:parameters()) do p:set_grad(nil) end
  model():backward()
  return model.a:grad():to_table()[1], model.b:grad():to_table()[5]
end

local function check(what, got, expected)
  if math.abs(got - expected) > 1e-6 * math.abs(expected) then
    error(("rank %d: %s: expected %g, got %g"):format(rank, what, expected, got), 0)
  end
end
local ranks = cfg.saved > 0 and cfg.saved or size
local of_one = ranks * (ranks + 1) / 2  -- what one pass adds up to over the ranks that saved
if cfg.saved == 0 then
  for _ in ms.steps(2) do pass() end
  assert(ms.checkpoint.save(cfg.folder, { step = 2 }))
else assert(ms.checkpoint.load(ms.checkpoint.latest(cfg.folder), {})) end
local passes = state:of "all".passes
local a, b = pass()
-- Each rank had its own sum. If another number of ranks loads them, each rank continues with their
-- mean.
local before = cfg.saved == size and 2 * of_one or 2 * of_one / ranks * size
if cfg.saved == 0 then before = 2 * of_one end
check("a", a, before + size * (size + 1) / 2)
check("b", b, 2 * (before + size * (size + 1) / 2))
check("passes", passes, 3)  -- buckets: one in the first pass, two in the second
check("rank", state:of "all".rank, (cfg.saved == 0 or cfg.saved == size) and rank or 0)
local numbers = state:of(model.b).numbers
assert(numbers:numel() == 5 and numbers:dtype() == "bf16")
check("numbers", numbers:to_table()[5],
  (cfg.saved == 0 or cfg.saved == size) and rank + 1 or of_one / ranks)
ms.synchronize()
io.stdout:write(("rank %d is done\n"):format(rank))
