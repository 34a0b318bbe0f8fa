-- Run by every rank of cut_spec.lua: language models in chunks of nn.cut against the whole model on
-- each rank: losses, norms, states, and files that nn.pretrained reads.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local cfg = ms.config { folder = "" }
local nn, world = ms.nn, ms.world()
local rank, size, LAYERS <const> = ms.rank(), ms.world_size(), 3

local function same(a, b, what) assert((a - b):abs():max():item() < 1e-6, what) end

-- The blocks of this rank, as equally as can be.
local function chunk_of(model, tied)
  local first, last = LAYERS * rank // size + 1, LAYERS * (rank + 1) // size
  local chunk = nn.cut(model, first, last)
  if tied and size > 1 then
    local ends = world:split { { 0, size - 1 } }
    if ends then nn.shared(chunk.wte.weight, ends) end
  end
  return nn.owned(chunk, world)
end

for _, kind in ipairs { "gpt2", "llama" } do
  local tied, folder = kind == "gpt2", cfg.folder .. "/" .. kind
  local o = {
    vocab = 50, context = 16, layers = LAYERS, width = 16, heads = 2,
    kv_heads = not tied and 1 or nil,
  }
  ms.seed(1)
  local whole = nn[kind](o)
  ms.seed(1)
  local chunk = chunk_of(ms.device("meta", function() return nn[kind](o) end), tied)
  chunk:materialize()
  local pipe = ms.pipeline { chunks = chunk, microbatches = 2 }
  local x, y = ms.randint { 4, 8, high = 50, seed = 2 }, ms.randint { 4, 8, high = 50, seed = 3 }
  local positions = ms.arange(0, 7):view(1, 8):expand(4, 8):contiguous()
  local a, b = ms.optim.sgd(whole, { lr = 0.3 }), ms.optim.sgd(chunk, { lr = 0.3 })
  for step in ms.steps(4) do
    local with = step % 2 == 1 and positions or nil
    local loss = whole(x, with):cross_entropy(y)
    loss:backward()
    local got = pipe:step(x, y, with)
    assert(math.abs(got:item() / loss:item() - 1) < 1e-6)
    local n, m = whole:clip_grad_norm(0.5):item(), chunk:clip_grad_norm(0.5):item()
    assert(math.abs(n / m - 1) < 2e-6, ("norms %g and %g"):format(n, m))
    a:step()
    b:step()
  end
  local state = chunk:state()
  if rank == 0 then for name, t in pairs(whole:state()) do same(state[name], t, name) end end
  assert(chunk:save(folder))
  same(assert(nn.pretrained(folder))(x), whole(x), "read")
  local read = ms.device("meta", function() return assert(nn.pretrained(folder)) end)
  local part = chunk_of(read, tied)
  local again = part:materialize():state()
  if rank == 0 then expect.same(again, state, "parts that are read") end
  -- What a check takes for what a chunk passes is what it passes.
  for _, dtype in ipairs { "f32", "bf16", "fp8" } do
    ms.autocast(dtype, function()
      local given = { nn.cut(whole, 1, 1)(x) }
      for i, one in ipairs(nn.cut(whole, 2, 2):_passes(4, 8)) do
        assert(one.dtype == given[i]:dtype(), dtype)
        assert(table.concat(one.shape, " ") == table.concat(given[i]:shape(), " "), dtype)
      end
    end)
  end
  expect.fails(function() nn.cut(whole, 2, 1) end, "nn.cut: no blocks from 2 to 1")
  expect.fails(function() nn.cut(whole, 1, 4) end, "last must be a block of 1 to 3, not 4")
  expect.fails(function() nn.cut(nn.Linear(2, 2), 1, 1) end, "nn.cut: a model of nn.gpt2")
end
print(("rank %d is done"):format(rank))
