-- Run by every rank of fsdp_state_spec.lua: no rank needs more than its own part and two units
-- while a model and a checkpoint of it are saved and loaded, or a folder of Hugging Face is. At the
-- size of GPT-2 this is tested for the memory of the process, too: files are read and written
-- through memory that is no tensor's.
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

-- Bytes of the process: what it has, or, as VmHWM, the most that it had since forget_most.
local is_large = cfg.width == 768
local function of_process(name)
  for line in io.lines "/proc/self/status" do
    local kib = line:match("^" .. name .. ":%s*(%d+) kB")
    if kib then return tonumber(kib) * 1024 end
  end
end
-- Whether that can be measured here.
local function forget_most()
  local file = is_large and io.open("/proc/self/clear_refs", "w")
  return file and file:write "5" and file:close() or false
end

-- What the heap of small objects may grow by.
local SLACK <const> = 32 << 20

-- Runs f, whose memory ends where it began, or higher by what it has made for good.
local function within(what, unit, f)
  ms.synchronize()
  core.collect()
  local before = ms.memory().live
  ms.reset_peak()
  local resident = forget_most() and of_process "VmRSS"
  f()
  ms.synchronize()
  local peak, grown = ms.memory().peak, resident and of_process "VmHWM" - resident
  core.collect()
  local own = math.max(before, ms.memory().live)
  assert(peak <= own + 2 * unit, ("rank %d, %s: a peak of %d bytes, %d of them its own, a unit \z
    has %d"):format(rank, what, peak, own, unit))
  if grown then
    print(("rank %d, %s: %.0f MiB of its own, tensors of %.0f MiB more, the process grew by %.0f \z
      MiB; a unit has %.0f"):format(rank, what, own / 0x1p20, (peak - own) / 0x1p20,
      grown / 0x1p20, unit / 0x1p20))
    assert(grown <= own - before + 2 * unit + SLACK, what .. ": the process has grown too much")
  end
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
if is_large then
  local count = 0
  for _, item in pairs(model:pieces()) do count = count + item.count end
  print(("rank %d: %.1fM numbers of its own"):format(rank, count / 1e6))
end
print(("rank %d is done"):format(rank))
