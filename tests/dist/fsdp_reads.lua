-- Run by every rank of fsdp_checkpoint_spec.lua: what a rank reads of a checkpoint, and of a folder
-- of Hugging Face. do = save: writes both. do = load: loads both, which other ranks have saved, and
-- counts the bytes that the system has given to this process.
local ms = require "moonshard"
local core = require "moonshard.core"
local cfg = ms.config { folder = "", ["do"] = "save", strategy = "full_shard" }
local rank, world = ms.rank(), ms.world()

local options = { strategy = cfg.strategy }
if cfg.strategy == "hybrid_shard" then
  options.shard_group, options.replica_group = world:levels(2)
end
local function make(seed)
  ms.seed(seed)
  local net = ms.nn.gpt2 { vocab = 4096, context = 16, layers = 1, width = 384, heads = 4 }
  local model = ms.fsdp(net, options)
  return { model = model, optimizer = ms.optim.adamw(model, { lr = 0.01 }) }
end

local BLOCK <const> = 1 << 20                        -- what has a hash of its own in a manifest
local SMALL <const> = 256 << 10                      -- the manifest, headers, and /proc itself

-- Bytes that this process has read from files.
local function read_so_far()
  local file <close> = assert(io.open "/proc/self/io")
  return tonumber(file:read "a":match "rchar: (%d+)")
end

-- f reads that many bytes, and little else.
local function reads(what, own, expected, f)
  world:barrier()
  local before = read_so_far()
  f()
  local bytes = read_so_far() - before
  print(("rank %d, %s: %.1f MiB are its own, and it reads %.1f"):format(rank, what, own / 0x1p20,
    bytes / 0x1p20))
  assert(expected <= bytes and bytes <= expected + SMALL,
    ("%s: %d bytes are expected, not %d"):format(what, expected, bytes))
  world:barrier()
end

-- Bytes of the blocks that some elements of f32 touch, in the parts of a tensor that were saved.
local function touched(parts, first, count)
  local bytes = 0
  for _, part in ipairs(parts) do
    local from, to = math.max(first, part.first), math.min(first + count, part.first + part.count)
    local size = part.blocks and BLOCK or 4 * part.count
    if from < to then
      local begin = 4 * (from - part.first) // size * size
      local stop = (4 * (to - part.first) + size - 1) // size * size
      bytes = bytes + math.min(stop, 4 * part.count) - begin
    end
  end
  return bytes
end

local things = make(cfg["do"] == "save" and 1 or 2)
if cfg["do"] == "save" then
  local ids = ms.zeros { 1, 8, dtype = "i64" }
  things.model(ids):cross_entropy(ids):backward()
  things.optimizer:step()
  things.step = 1
  assert(ms.checkpoint.save(cfg.folder .. "/run", things))
  assert(things.model:save(cfg.folder .. "/hub"))
else
  local path = cfg.folder .. "/run/step-00000001"
  local saved = core.json_decode(assert(core.file_read(path .. "/manifest.json"))).manifest.pieces
  local own, blocks = 0, 0
  for _, item in ipairs(things.model:pieces()) do
    own = own + 4 * item.count
    blocks = blocks + touched(saved["model/" .. item.name].parts, item.first, item.count)
  end
  -- The model's part and both moments of it; twice, because all is compared with its hashes before
  -- anything is changed.
  reads("a checkpoint", 3 * own, 2 * 3 * blocks, function()
    assert(ms.checkpoint.load(path, things))
  end)
  reads("a folder", own, own, function() assert(things.model:load(cfg.folder .. "/hub")) end)
end
core.collect()
print(("rank %d is done"):format(rank))
