-- What every rank of growth_spec.lua runs: a small model trains for cfg.steps in configuration
-- cfg.config, one of CONFIGURATIONS. Prints "NAME RESERVED LATER RESIDENT LATER": the bytes of the
-- pool and of the process, after cfg.from steps and at the end.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local nn, optim = ms.nn, ms.optim
local cfg = ms.config { config = 1, from = 500, steps = 1000, source = "." }

local function recipe(name) return dofile(("%s/recipes/hooks/%s.lua"):format(cfg.source, name)) end
-- An edit of a watched script, now and then.
local function edited(step)
  if step % 50 ~= 0 or ms.rank() > 0 then return end
  local file <close> = assert(io.open("hook.lua", "w"))
  file:write(("return function(b, next) return next(b):and_then(function(t) return t * %g end) end")
    :format(1 - step / 1e6))
end

local function ddp(options) return function(net) return ms.ddp(net, options()) end end
local function fsdp(options) return function(net) return ms.fsdp(net, options) end end

-- name, how a model is wrapped, how it is made and trained
local CONFIGURATIONS = {
  { "ddp", ddp(function() return { bucket_bytes = 10000 } end) },
  { "ddp, bf16", ddp(function() return { bucket_bytes = 10000, comm_hook = "bf16_compress" } end) },
  { "ddp, powersgd", ddp(function()
      return { bucket_bytes = 10000, comm_hook = recipe "powersgd" { rank = 2, start_step = 5 } }
    end) },
  { "ddp, int8", ddp(function() return { comm_hook = recipe "int8_all_to_all" {} } end) },
  { "ddp, top_k in backward", ddp(function()
      return { comm_hook = ms.hooks.chain {
        ms.hooks.error_feedback(), ms.hooks.top_k { fraction = 0.1 },
      } }
    end), in_backward = true },
  { "ddp, watched", ddp(function()
      edited(0)
      ms.world():barrier()
      return { comm_hook = "hook.lua" }
    end), after = edited },
  { "ddp, generates", ddp(function() return {} end), after = function(step, net)
    if step % 10 == 0 then net:generate(ms.tensor { 1, 2 }, { count = 4, seed = step }) end
  end },
  { "fsdp", fsdp { prefetch = "none" }, batch = 32 },
  { "fsdp, generates", fsdp {}, after = function(step, net)
    if step % 10 == 0 then net:generate(ms.tensor { 1, 2 }, { count = 4, seed = step }) end
  end },
  { "fsdp, llama", fsdp { prefetch = "backward_post" }, llama = true, width = 32, layers = 4,
    batch = 8, length = 16 },
  { "fsdp, both", fsdp { prefetch = "both" }, llama = true, width = 32, clip = true },
  { "fsdp, shard_grad_op", fsdp { strategy = "shard_grad_op", prefetch = "forward" } },
  { "fsdp, no_shard", fsdp { strategy = "no_shard" } },
  { "fsdp, bf16", fsdp { precision = { param = "bf16", reduce = "bf16" } }, clip = true },
  { "fsdp, offload", fsdp { offload = "cpu", prefetch = "none" }, llama = true },
  { "fsdp, rows, in backward", fsdp { layout = "rows" }, in_backward = true, batch = 2 },
  { "fsdp, by_budget", fsdp { prefetch = "by_budget", budget_bytes = 500000 }, llama = true,
    layers = 4 },
  { "fsdp, hook", fsdp { comm_hook = function(b, next)
      return next(b):and_then(function(t) return t * 1 end)
    end } },
  { "fsdp, accumulates", fsdp { max_in_flight = 1 }, passes = 3, llama = true },
  { "fsdp, find_unused", fsdp { find_unused = true }, layers = 3 },
}

local c = CONFIGURATIONS[cfg.config]
local how = { vocab = 64, context = 16, layers = c.layers or 2, width = c.width or 64, heads = 2 }
local model = (c.llama and nn.llama or nn.gpt2)(how)
local net = c[2](model)
local optimizer = not c.in_backward and optim.adamw(net, { lr = 1e-3 })
if c.in_backward then optim.in_backward(optim.adamw, net:parameters(), { lr = 1e-3 }) end
local batch, length = c.batch or 4, c.length or 8
local ids = ms.randn { batch * length + 1, seed = 1 + ms.rank() }
ids = ids:mul(20):abs():clamp(0, 63):to "i64"
local x, y = ids:narrow(1, 1, batch * length), ids:narrow(1, 2, batch * length)
x, y = x:reshape(batch, length), y:reshape(-1)

local before
local function now()
  return { ms.memory().reserved, (expect.process()) * 1024 }
end
for step in ms.steps(cfg.steps) do
  net:accumulate(c.passes or 1, function()
    net(x):reshape(-1, how.vocab):cross_entropy(y):backward()
  end)
  if c.clip then net:clip_grad_norm(1) end
  if optimizer then optimizer:step() optimizer:zero_grad() end
  if c.after then c.after(step, net) end
  if step == cfg.from then before = now() end
end
local after = now()
if ms.rank() == 0 then
  print(("%s\t%d\t%d\t%d\t%d"):format(c[1], before[1], after[1], before[2], after[2]))
end
