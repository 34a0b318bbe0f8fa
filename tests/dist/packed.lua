-- What every rank of packed_spec.lua runs: models of packed documents train alike under ddp and
-- under fsdp's strategies, with recomputed blocks, on "meta", offloaded, in another dtype.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local cfg = ms.config { folder = "" }
local rank, size, world = ms.rank(), ms.world_size(), ms.world()

local path = ("%s/text_%d_%d"):format(cfg.folder, size, rank)
local file = assert(io.open(path, "w"))
file:write(("the cat. a dog sat. on. its mat, while it rained outside. "):rep(20))
file:close()
local text = assert(ms.data.bytes(path))

local function make(kind, options)
  ms.seed(8)
  return ms.nn[kind] {
    vocab = 256, context = 24, layers = 2, width = 16, heads = 4, recompute = options.recompute,
    kv_heads = kind == "llama" and 2 or nil,
  }
end

-- Four steps; the whole tensors of the model after them, and the last loss.
local function train(kind, wrap, options)
  local function made() return make(kind, options) end
  local model
  if options.meta then model = wrap(ms.device("meta", made)) else model = wrap(made()) end
  local optimizer = ms.optim.adamw(model, { lr = 1e-2 })
  local loader = text:loader {
    batch = 4, length = 24, shuffle = true, seed = 3, packed = true, end_of_text = ("."):byte(),
  }
  local last
  for _ in ms.steps(4) do
    local x, y, positions = loader:next()
    assert(#positions == 4 // size)
    if options.plain then positions = nil end
    last = model(x, positions):cross_entropy(y)
    last:backward()
    last = last:item()
    optimizer:step()
    optimizer:zero_grad()
  end
  return expect.whole(model), last
end

for _, kind in ipairs { "gpt2", "llama" } do
  local expected, loss = train(kind, ms.ddp, {})
  local plain = train(kind, ms.ddp, { plain = true })
  assert(expect.difference(plain, expected) > 1e-2, "positions change nothing")
  for _, strategy in ipairs { "full_shard", "shard_grad_op", "no_shard" } do
    for number, options in ipairs {
      {}, { recompute = true }, { meta = true }, { offload = "cpu" },
      { precision = { param = "bf16", reduce = "f32" } },
    } do
      local own, own_loss = train(kind, function(net)
        return ms.fsdp(net, {
          strategy = strategy, offload = options.offload, precision = options.precision,
        })
      end, options)
      -- fsdp has ddp's bits. bf16 has 8 bits of a number.
      local most = options.precision and math.abs(own_loss / loss - 1) - 1 / 128
        or expect.difference(own, expected)
      assert(most <= 0, ("%s, %s, way %d: %g"):format(kind, strategy, number, most))
    end
  end
  if rank == 0 then
    assert(ms.safetensors.save(("%s/%s_%d.safetensors"):format(cfg.folder, kind, size), expected))
  end
end
world:barrier()
print(("rank %d is done"):format(rank))
