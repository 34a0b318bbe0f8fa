-- Run by every rank of error_feedback_spec.lua: ranks have different, constant gradients. The
-- average of the applied gradients must tend to the mean of all ranks' gradients.
local ms = require "moonshard"
local hooks, rank, size = ms.hooks, ms.rank(), ms.world_size()
local expected = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local takes = expected.takes

-- Without feedback each link that rounds is off by at least 1.5 times what is allowed after 96
-- steps.
local STEPS = expected.full and 128 or 96
-- powersgd compresses the matrix, and not the vector.
local SHAPES = { { 12, 10 }, { 33 } }

local Weighted = ms.nn.class "Weighted"
function Weighted:init()
  for i, shape in ipairs(SHAPES) do self[i] = ms.nn.Parameter(ms.zeros(shape)) end
end
function Weighted:forward(given) return (self[1] * given[1]):sum() + (self[2] * given[2]):sum() end

-- Numbers of about 3 on rank 0, -1 elsewhere: most ranks point away from the mean.
local function gradients(r)
  local list = {}
  for i, shape in ipairs(SHAPES) do
    local size_of = ms.rand { seed = 7 + i, table.unpack(shape) } + 0.5
    local noise = ms.randn { seed = 31 * r + i, table.unpack(shape) } * 0.1
    list[i] = size_of * (r == 0 and 3 or -1) + noise
  end
  return list
end

local truth = {}
for r = 0, size - 1 do
  for i, g in ipairs(gradients(r)) do truth[i] = truth[i] and truth[i] + g / size or g / size end
end

-- The greatest distance between the mean of the applied gradients of STEPS steps and the true mean.
local function distance(chain)
  local net = ms.ddp(Weighted(), { comm_hook = chain, init_sync = false })
  local sums, own, most = {}, gradients(rank), 0
  for i, g in ipairs(own) do sums[i], own[i] = g:zeros_like():keep(), g:clone():keep() end
  for _ in ms.steps(STEPS) do
    net(own):backward()
    for i, p in ipairs(net.module:parameters()) do
      sums[i]:add_(p:grad())
      p:set_grad(nil)
    end
  end
  net:unwrap()
  for i, sum in ipairs(sums) do
    most = math.max(most, (sum / STEPS - truth[i]):abs():max():item())
  end
  return most
end

local number = 0
-- The link of that name, natively or in Lua. Links in Lua have names of their own for their states.
local function make(name, options, twin)
  local given = expected.models.merged(options)
  if not twin then return hooks[name](given) end
  number = number + 1
  given.name = ("twin %d"):format(number)
  return require("moonshard.hooks." .. name)(given)
end

-- kept: a bound of the residual at the end, as a multiple of a gradient's size (about 4): the mean
-- of STEPS steps is off by at most kept * 4 / STEPS. 1e-3: rounding of the sums here.
local function powersgd(kept, options) return { "powersgd", options, kept = kept } end
local cases = {
  { "cast", { dtype = "bf16" }, kept = 1 / 64 }, { "cast", { dtype = "f16" }, kept = 1 / 512 },
  { "bf16_compress", kept = 1 / 64 }, { "fp16_compress", kept = 1 / 512 },
  { "all_reduce", kept = 1e-3 }, { "post_local_sgd", { start_step = STEPS }, kept = 1e-3 },
  { "post_local_sgd", { start_step = 1, subgroup = ms.world() }, kept = 1e-3 },
  { "int8", kept = 1 / 32 }, { "int8", { per = "channel", block = 64 }, kept = 1 / 32 },
  { "int8", { per = "block", block = 32 }, kept = 1 / 32 },
  { "int8", { form = "all_to_all" }, kept = 1 / 16 },
  { "int8", { form = "all_to_all", per = "channel", block = 16 }, kept = 1 / 16 },
  { "int8", { form = "all_to_all", per = "block", block = 16 }, kept = 1 / 16 },
  { "top_k", { fraction = 0.25 }, kept = 2 },
  powersgd(2, { start_step = 0, rank = 2 }),
  powersgd(2, { start_step = 0, rank = 2, error_feedback = false }),
  powersgd(2, { start_step = 4, rank = 2 }),
  powersgd(2, { start_step = 4, rank = 2, error_feedback = false }),
  powersgd(3, { start_step = 0, rank = 2, batched = true }),
  powersgd(3, { start_step = 0, rank = 2, batched = true, error_feedback = false }),
}

local function expect(what, case, chain)
  local off, allowed = distance(chain), 4 * case.kept / STEPS
  if off <= allowed then return end
  error(("rank %d: %s: the mean is off by %g, allowed is %g"):format(rank, what, off, allowed), 0)
end

-- before, after: whether error_feedback and the link are those in Lua.
local function check(at, case, before, after)
  local chain = { make("error_feedback", nil, before), make(case[1], case[2], after) }
  local what = ("case %d, error_feedback%s before %s%s"):format(at, before and " in Lua" or "",
    case[1], after and " in Lua" or "")
  expect(what, case, hooks.chain(chain))
end
for at, case in ipairs(cases) do
  for how = 0, 3 do
    if takes(at + how, 4) then check(at, case, how & 1 ~= 0, how & 2 ~= 0) end
  end
end
-- Methods in Lua: those with residuals of their own, and one that rounds twice.
local folder = debug.getinfo(1, "S").source:match "^@(.*)tests/dist/[^/]*$" .. "recipes/hooks/"
for name, case in ms.sorted_pairs {
  random_k = { "random_k", { fraction = 0.3 }, kept = 6 },
  powersgd = powersgd(2, { start_step = 0, rank = 2 }),
} do
  local link = dofile(folder .. name .. ".lua")(case[2])
  expect("error_feedback before " .. name .. ".lua", case, hooks.chain { "error_feedback", link })
end
-- Links with residuals of their own, without error_feedback.
for _, twin in ipairs { false, true } do
  local top_k = { "top_k", { fraction = 0.25 }, kept = 2 }
  for _, case in ipairs { top_k, powersgd(2, { start_step = 0, rank = 2 }) } do
    expect(case[1] .. " alone" .. (twin and " in Lua" or ""), case, make(case[1], case[2], twin))
  end
end

io.stdout:write(("rank %d is done\n"):format(rank))
