-- Text from models on several ranks whose forwards meet: prompts, counts and stops that differ.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local nn = ms.nn

local rank, size = ms.rank(), ms.world_size()
local VOCAB <const>, CONTEXT <const> = 23, 16

local function make(kind)
  ms.seed(3)
  local model = nn[kind] {
    vocab = VOCAB, context = CONTEXT, layers = expect.full and 3 or 2, width = 32, heads = 4,
    kv_heads = kind == "llama" and 2 or nil,
  }
  ms.no_grad(function()
    for _, p in ipairs(model:parameters()) do if p:dim() == 2 then p:mul_(8) end end
  end)
  return model
end

local function same(a, b, what)
  a, b = table.concat(a:to_table(), " "), table.concat(b:to_table(), " ")
  assert(a == b, ("rank %d, %s: %s is not %s"):format(rank, what, a, b))
end

-- Of this rank: prompts and counts that differ, past the context on the last rank.
local ids = {}
for i = 1, 3 + 2 * rank do ids[i] = (i * 5 + rank) % VOCAB end
ids = ms.tensor(ids)
local count = 6 + (expect.full and 6 * rank or 6 * rank // math.max(1, size - 1))

for number, kind in ipairs { "gpt2", "llama" } do
  local alone = make(kind)
  local text = alone:generate(ids, { count = count, temperature = 0 })
  local drawn = alone:generate(ids, { count = count, seed = 5 + rank, top_k = 4 })
  local list = text:to_table()
  -- The first rank ends early by an id, the others do not.
  local stop = rank == 0 and { list[3] } or false
  local stopped = alone:generate(ids, { count = count, temperature = 0, stop = stop })
  assert(rank > 0 or stopped:numel() <= 3)

  local ways = {
    { name = "by blocks", how = { wrap = { class = kind == "gpt2" and "GPT2Block"
      or "LlamaBlock" } } },
    { name = "one unit", how = {} },
    { name = "no_shard", how = { strategy = "no_shard" } },
    { name = "shard_grad_op", how = { strategy = "shard_grad_op" } },
  }
  if size == 4 then
    ways[#ways + 1] = { name = "hybrid", how = { strategy = "hybrid_shard" } }
  end
  local function check_way(way)
    local model = expect.models.fsdp(make(kind), way.how)
    local function check(what)
      same(model:generate(ids, { count = count, temperature = 0 }), text, way.name .. what)
      same(model:generate(ids, { count = count, seed = 5 + rank, top_k = 4 }), drawn,
        way.name .. what .. ", drawn")
      same(model:generate(ids, { count = count, temperature = 0, stop = stop }), stopped,
        way.name .. what .. ", stopped")
      local seen = 0
      local told = model:generate(ids, {
        count = count, temperature = 0,
        on_token = function()
          seen = seen + 1
          return seen < 2 + rank
        end,
      })
      assert(seen == 2 + rank and told:numel() == seen)
      assert(model:is_training())
    end
    check ""
    -- Between a training step's backward and the next forward.
    local x = ids:view(1, -1)
    model(x:narrow(2, 1, 3)):cross_entropy(x:narrow(2, 1, 3)):backward()
    check ", after backward"
    model:unwrap()
  end
  for i, way in ipairs(ways) do if expect.takes(number + i, 2) then check_way(way) end end

  -- The forwards of a ddp model meet only if they are asked to.
  local inner = make(kind)
  local model, forwards = ms.ddp(inner), 0
  local original = inner.last_logits
  inner.last_logits = function(...)
    forwards = forwards + 1
    return original(...)
  end
  same(model:generate(ids, { count = count, temperature = 0 }), text, "ddp")
  assert(forwards == count)
  forwards = 0
  same(model:generate(ids, { count = count, temperature = 0, stop = stop, group = ms.world() }),
    stopped, "ddp, with a group")
  local most = ms.world():_share("all_gather", "i64", { stopped:numel() }, "test")
  assert(forwards == math.max(table.unpack(most)), forwards .. " forwards")
  expect.fails(function() model:generate(ids, { count = 1, group = 3 }) end,
    "option group must be a group of ranks")
  model:unwrap()
end

-- Units that compute in 16 bits keep keys and values of 16 bits.
do
  local model = ms.fsdp(make "llama",
    { precision = { param = "bf16" }, wrap = { class = "LlamaBlock" } })
  local text = model:generate(ids, { count = count, temperature = 0 })
  assert(text:numel() == count)
  model:unwrap()
end

print(("rank %d is done"):format(rank))
