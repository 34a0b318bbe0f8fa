-- Run by every rank of fsdp_state_spec.lua: no rank needs more than its own part and two units
-- while a model and a checkpoint of it are saved and loaded, or a folder of Hugging Face is.
local ms = require "moonshard"
local core = require "moonshard.core"
local cfg = ms.config { folder = "", layers = 6, width = 128, heads = 4, vocab = 512 }
local rank, world = ms.rank(), ms.world()

local options = {
  vocab = cfg.vocab, context = 64, layers = cfg.layers, width = cfg.width, heads = cfg.heads,
}
local function make(on_meta)
  ms.seed(on_meta and 2 or 1)
  local net = on_meta and ms.device("meta", function() return ms.nn.gpt2(options) end)
    or ms.nn.gpt2(options)
  local model = ms.fsdp(net)
  core.collect()
  return model, ms.optim.adamw(model, { lr = 0.01 })
end

local function largest(model)
  local most = 0
  for _, unit in ipairs(model:units()) do most = math.max(most, unit.bytes) end
  return most
end

-- Runs f, whose memory ends where it began, or higher by what it has made for good.
local function within(what, unit, f)
  ms.synchronize()
  core.collect()
  local before = ms.memory().live
  ms.reset_peak()
  f()
  ms.synchronize()
  local peak = ms.memory().peak
  core.collect()
  local own = math.max(before, ms.memory().live)
  assert(peak <= own + 2 * unit, ("rank %d, %s: a peak of %d bytes, %d of them its own, a unit \z
    has %d"):format(rank, what, peak, own, unit))
  world:barrier()
end

local model, optimizer = make(false)
local unit = largest(model)
assert(world:size() == 1 or model:shard_group():size() == world:size())
local ids = ms.zeros { 2, 8, dtype = "i64" }
model(ids):cross_entropy(ids):backward()
optimizer:step()
core.collect()
local folder, path = cfg.folder .. "/model", nil
within("saving a model", unit, function() assert(model:save(folder)) end)
within("saving a checkpoint", unit, function()
  path = assert(ms.checkpoint.save(cfg.folder .. "/run",
    { step = 1, model = model, optimizer = optimizer }))
end)
local expected = model:state { kind = "sharded" }

local function same(other)
  for name, one in pairs(other:state { kind = "sharded" }) do
    local a, b = one, expected[name]
    if not core.is_tensor(a) then a, b = a.tensor, b.tensor end
    assert(a:numel() == 0 or (a - b):abs():max():item() == 0, name)
  end
end

local fresh, loaded = make(true)
within("loading a folder", unit, function() assert(fresh:load(folder)) end)
same(fresh)
within("loading a checkpoint", unit, function()
  assert(ms.checkpoint.load(path, { model = fresh, optimizer = loaded }))
end)
same(fresh)
if cfg.width == 768 then
  local count = 0
  for _, item in pairs(model:pieces()) do count = count + item.count end
  print(("rank %d: %.1fM numbers of its own, peak %.0f MiB in all"):format(rank, count / 1e6,
    ms.memory().peak / 0x1p20))
end
print(("rank %d is done"):format(rank))
