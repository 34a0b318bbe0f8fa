-- Golden communication hooks: gradients after reduction, on the number of ranks of the case.
local ms = require "moonshard"
local link_state = require "moonshard.parallel.link_state"
local report = require "moonshard.cli.golden.report"
local hooks = ms.hooks

local cases = {}

-- The native link for each name of the manifest; the link in Lua has the same name.
local links = { allreduce = "all_reduce", fp16 = "fp16_compress" }

local function powersgd_rank(case)
  return math.tointeger(tonumber(tostring(case.hook):match "^powersgd_(%d+)$"))
end

local entries = {
  hook = 1, world_size = 1, file = 1, iterations = 1, start_powersgd_iter = 1,
  min_compression_rate = 1, shapes = 1, layout = 1, q_init = 1, convention = 1, one_bucket = 1,
}

---@param case table
---@return string
function cases.name(case)
  return ("%s, %s ranks"):format(tostring(case.hook), tostring(case.world_size))
end

--- Raises for unknown hooks.
---@param case table
function cases.check(case)
  if not links[case.hook] and not powersgd_rank(case) then
    error(("unknown hook '%s'"):format(tostring(case.hook)), 0)
  end
end

-- A loss whose gradients are the rank's given numbers: the sum of the parameters times these
-- numbers.
local Weighted = ms.nn.class "Weighted"
function Weighted:init(shapes)
  for i, shape in ipairs(shapes) do self[i] = ms.nn.Parameter(ms.zeros(shape)) end
end
function Weighted:forward(constants)
  local total = ms.zeros {}
  for i, constant in ipairs(constants) do total = total + (self[i] * constant):sum() end
  return total
end

-- The distance between an f16 number and the next one.
local function f16_step(x)
  local step = 0x1p-24
  while step * 2048 <= math.abs(x) do step = step * 2 end
  return step
end

-- With two ranks there is one order of addition, so results are bitwise equal to the file; with
-- more ranks the last place may differ.
local function compare(case, found, what, ours, golden)
  if powersgd_rank(case) then return found:relative(what, ours, golden, 1e-5) end
  if case.world_size == 2 or not golden then return found:absolute(what, ours, golden, 0x1p-149) end
  if case.hook == "allreduce" then return found:relative(what, ours, golden, 1e-6) end
  local a, b = ours:reshape(-1):to_table(), golden:reshape(-1):to_table()
  for i = 1, #b do
    local step = f16_step(b[i])
    a[i], b[i] = a[i] / step, b[i] / step
  end
  found:absolute(what, ms.tensor(a, "f32"), ms.tensor(b, "f32"), 1)
end

local function run_link(case, tensors, found, link, name)
  local model = ms.ddp(Weighted(case.shapes), { comm_hook = link })
  for t = 0, case.iterations - 1 do
    local constants = {}
    for k = 0, #case.shapes - 1 do
      local own = ("rank%d.iter%d.local.%d"):format(ms.rank(), t, k)
      constants[k + 1] = tensors[own] or error(("the file has no tensor '%s'"):format(own), 0)
    end
    model(constants):backward()
    for k, p in ipairs(model:parameters()) do
      local reduced = ("iter%d.reduced.%d"):format(t, k - 1)
      compare(case, found, ("%s by %s"):format(reduced, name), p:grad(), tensors[reduced])
      p:set_grad(nil)
    end
  end
  model:unwrap()
end

-- Puts the file's random draws into the state: one for each compressed matrix, in the order of the
-- bucket, which is the reverse order of registration.
local function put_draws(case, tensors, state, rank)
  local own, draw = link_state.core(state), 0
  for k = #case.shapes - 1, 0, -1 do
    local n, m = case.shapes[k + 1][1], case.shapes[k + 1][2]
    local r = m and math.min(n, m, rank)
    if m and (n + m) * r * case.min_compression_rate < n * m then
      local name = ("q_init.%d"):format(draw)
      own:put("q", tostring(k),
        tensors[name] or error(("the file has no tensor '%s'"):format(name), 0))
      draw = draw + 1
    end
  end
end

--- Runs a case, with the native link and with the link in Lua. The number of ranks must be the
--- case's.
---@param case table
---@param tensors table<string, ms.Tensor>
---@param found ms.GoldenReport
function cases.run(case, tensors, found)
  report.known_keys("entry", case, entries)
  if case.world_size ~= ms.world_size() then
    error(("%s ranks are wanted, there are %d"):format(tostring(case.world_size), ms.world_size()),
      0)
  end
  local rank, name = powersgd_rank(case), links[case.hook] or "powersgd"
  local options = rank
    and { rank = rank, start_step = case.start_powersgd_iter, min_rate = case.min_compression_rate }
    or {}
  local link = hooks[name](options)
  if rank then put_draws(case, tensors, link.keeps, rank) end
  run_link(case, tensors, found, link, name)
  options.name = "golden " .. name
  link = require("moonshard.hooks." .. name)(options)
  if rank then put_draws(case, tensors, link_state.find(options.name), rank) end
  run_link(case, tensors, found, link, name .. " in Lua")
end

return cases
