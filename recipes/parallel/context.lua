-- A GPT on bytes whose sequences are cut over the ranks of a context group: each rank has the
-- activations of some times of each sequence, and all weights. Ranks meet in attention only. Other
-- groups have other sequences.
--     ./moonshard run recipes/parallel/context.lua -n 4 context=4 length=512 data=FILE_OR_FOLDER
--     ./moonshard run recipes/parallel/context.lua -n 4 how=ring zigzag=true
--     ./moonshard run recipes/parallel/context.lua -n 4 how=ulysses packed=true
local ms = require "moonshard"
local nn, optim, data = ms.nn, ms.optim, ms.data

local cfg = ms.config {
  data     = { "", help = "a text file or a folder; sayings in English unless given" },
  context  = { 4, help = "consecutive ranks that have one sequence together; others have others" },
  how      = { "gather", choices = { "gather", "ring", "ulysses" }, help = "see README.md" },
  zigzag   = { false, help = "with gather or ring: a rank has early and late times, equal work" },
  packed   = { false, help = "a token sees its own document only; each line is one" },
  recompute = { false, help = "run blocks again in backward: they keep only what goes into them" },
  steps    = { 300, help = "optimizer steps" },
  batch    = { 16, help = "sequences of a step, over all groups" },
  length   = { 128, help = "bytes of a sequence" },
  lr       = { 5e-3, help = "peak learning rate" },
  warmup   = { 50, help = "steps until the peak" },
  decay    = { 0.1, help = "weight decay" },
  clip     = { 1.0, help = "global norm of gradients" },
  dropout  = { 0.0, help = "probability of zero, of embeddings" },
  dtype    = {
    "auto", choices = { "auto", "f32", "bf16", "f16" },
    help = "of matrix products; auto: bf16 where the device multiplies it, else f32",
  },
  resume   = { "never", help = "never, auto, or a checkpoint" },
  run      = { "", help = "folder of the run" },
  every    = {
    eval = { 100, help = "steps between validations; 0: none" },
    save = { 0, help = "steps between checkpoints, of which the last two stay; 0: none" },
  },
  model    = { layers = 4, width = 128, heads = 4 },
}

-- Ranks of a context group follow each other, so that they are on one host.
local context, replicas = ms.world():levels(math.min(cfg.context, ms.world_size()))
local ranks, rank = context:size(), context:rank()

-- The sequence is cut into pieces. In a zigzag a rank has piece `rank` from the beginning, and the
-- same from the end: late queries see many keys and early ones few, so all have as much to do.
local each = cfg.zigzag and 2 or 1
local pieces = ranks * each
local function pieces_of(of) return cfg.zigzag and { of, pieces - 1 - of } or { of } end
local function stop(...) error((...):format(select(2, ...)), 0) end
if cfg.length % pieces ~= 0 then
  stop("length=%d cannot be cut into %d equal pieces", cfg.length, pieces)
end
if cfg.how == "ulysses" and cfg.zigzag then
  stop "how=ulysses: all ranks have equal work already: leave out zigzag"
end
if cfg.how == "ulysses" and cfg.model.heads % ranks ~= 0 then
  stop("how=ulysses: %d ranks do not divide %d heads", ranks, cfg.model.heads)
end

-- This rank's times of [batch, length].
local function own(t)
  local list = {}
  for i, piece in ipairs(pieces_of(rank)) do
    list[i] = t:narrow(2, piece * cfg.length // pieces + 1, cfg.length // pieces)
  end
  return #list == 1 and list[1] or ms.cat(list, 2)
end

-- The places of all tokens of the batch in their documents, [batch, length]; own: of this rank's.
local places

---------------------------------------------------------------------------------------- attention

-- Of queries, keys and values [batch, heads, times, width] of this rank's times. Pieces are parts
-- of the third dimension.
local function part(t, i, count) return t:chunk(count, 3)[i] end

-- Attention of a query piece to some keys, which begin at time `from`, and its lse.
local function attend(q, k, v, piece, from)
  local size = cfg.length // pieces
  return q:attention(k, v, {
    offset = piece * size - from, lse = true,
    positions = places and places:narrow(2, piece * size + 1, size) or nil,
  })
end

-- All ranks' keys and values, in the order of times.
local function all_of(t)
  local batch, heads, _, width = table.unpack(t:shape())
  local all = context:all_gather(t:permute(3, 1, 2, 4):contiguous()):value()
  local list, size = {}, cfg.length // pieces
  for of = 0, ranks - 1 do
    for i, piece in ipairs(pieces_of(of)) do
      list[piece + 1] = all:narrow(1, (of * each + i - 1) * size + 1, size)
    end
  end
  local ordered = #list == 1 and list[1] or ms.cat(list, 1)
  return ordered:view(cfg.length, batch, heads, width):permute(2, 3, 1, 4)
end

local function by_gather(q, k, v)
  local outs = {}
  k, v = all_of(k), all_of(v)
  for i, piece in ipairs(pieces_of(rank)) do
    outs[i] = (attend(part(q, i, each), k, v, piece, 0))
  end
  return #outs == 1 and outs[1] or ms.cat(outs, 3)
end

-- What this rank has goes to the next rank, and that of the rank before comes: an all_to_all in
-- which all but one part is empty has a gradient, which goes the other way.
local function shift(t)
  local send, receive = {}, {}
  for of = 0, ranks - 1 do
    send[of + 1] = of == (rank + 1) % ranks and t:size(1) or 0
    receive[of + 1] = of == (rank - 1) % ranks and t:size(1) or 0
  end
  return context:all_to_all(t, send, receive)
end

-- Keys and values go round. A query's results of several parts of the keys are added up by their
-- shares of the whole sum, exp(lse - whole lse). Pieces that a query does not see at all are
-- attended to as well, which costs nothing but keeps all ranks' gradients going round.
local function by_ring(q, k, v)
  local outs, sums, kv = {}, {}, ms.stack { k, v }
  for i = 1, each do outs[i], sums[i] = {}, {} end
  for hop = 0, ranks - 1 do
    local ahead = hop < ranks - 1 and shift(kv:contiguous())      -- travels meanwhile
    local from = pieces_of((rank - hop) % ranks)
    for i, piece in ipairs(pieces_of(rank)) do
      for j, key_piece in ipairs(from) do
        local at = #outs[i] + 1
        outs[i][at], sums[i][at] = attend(part(q, i, each), part(kv:select(1, 1), j, each),
          part(kv:select(1, 2), j, each), piece, key_piece * cfg.length // pieces)
      end
    end
    if ahead then kv = ahead:value() end
  end
  for i = 1, each do
    local all = ms.stack(sums[i])
    local top = all:detach():max(1)
    local shares = (all - top):exp()
    local whole, sum = shares:sum(1), nil
    for at, out in ipairs(outs[i]) do
      local share = (shares:select(1, at) / whole):unsqueeze(4):to(out:dtype())
      sum = sum and sum + out * share or out * share
    end
    outs[i] = sum
  end
  return each == 1 and outs[1] or ms.cat(outs, 3)
end

-- Each rank gets all times of some heads, and gives back the results.
local function exchange(t, back)
  local batch, heads, times, width = table.unpack(t:shape())
  if back then -- [batch, heads of a rank, all times, width]
    local cut = t:view(batch, heads, ranks, times // ranks, width):permute(3, 1, 2, 4, 5)
    return context:all_to_all(cut:contiguous()):value():permute(2, 1, 3, 4, 5)
      :reshape(batch, ranks * heads, times // ranks, width)
  end
  local cut = t:view(batch, ranks, heads // ranks, times, width):permute(2, 1, 3, 4, 5)
  return context:all_to_all(cut:contiguous()):value():permute(2, 3, 1, 4, 5)
    :reshape(batch, heads // ranks, ranks * times, width)
end

local function by_ulysses(q, k, v)
  local out = exchange(q):attention(exchange(k), exchange(v), { positions = places })
  return exchange(out, true)
end

local attention = ({ gather = by_gather, ring = by_ring, ulysses = by_ulysses })[cfg.how]

--------------------------------------------------------------------------------------------- model

local gpt = nn.gpt2 {
  vocab = 256, context = cfg.length, layers = cfg.model.layers, width = cfg.model.width,
  heads = cfg.model.heads, dropout = cfg.dropout, recompute = cfg.recompute,
}
for i = 1, #gpt.h do
  local attn = gpt.h[i].attn
  function attn:forward(x)
    local batch, times, width = table.unpack(x:shape())
    local qkv = self.c_attn(x):split(width, 3)
    for k = 1, 3 do qkv[k] = qkv[k]:view(batch, times, -1, self.head):transpose(2, 3) end
    local joined = attention(table.unpack(qkv)):transpose(2, 3)
    return self.c_proj(joined:reshape(batch, times, width))
  end
end

-- A rank's gradients are those of its times, and all ranks have as many: their mean over the world
-- is that of all tokens.
local model = ms.ddp(gpt)
ms.log("ranks of a context group: %d, context groups: %d", ranks, replicas:size())

-- Ranks of a group read one batch. Places are those of a row, or of documents in it.
local function loss(net, x, y, positions)
  places = positions
  local at = positions or ms.arange(0, cfg.length - 1):unsqueeze(1):expand(#x, cfg.length)
  return net(own(x), own(at):contiguous()):cross_entropy(own(y))
end

local text = cfg.data ~= "" and assert(data.bytes(cfg.data)) or ms.scripts.default_text()
local train, valid = text:split(0.9)
local how = {
  batch = cfg.batch, length = cfg.length, group = replicas, packed = cfg.packed,
  end_of_text = cfg.packed and ("\n"):byte() or nil,
}
local function loader(set, shuffle)
  how.shuffle = shuffle
  return set:loader(how)
end
local result = ms.train {
  model = model, steps = cfg.steps, clip = cfg.clip, dtype = cfg.dtype, loss = loss,
  optimizer = optim.adamw(model, {
    lr = cfg.lr, betas = { 0.9, 0.99 }, weight_decay = cfg.decay,
    schedule = optim.cosine { warmup = cfg.warmup, steps = cfg.steps, floor = 0.05 },
  }),
  data = loader(train, true), valid = loader(valid),
  eval = { every = cfg.every.eval, batches = 40 },
  save = { every = cfg.every.save, last = 2 },
  resume = cfg.resume, run = cfg.run ~= "" and cfg.run or nil,
}
ms.scripts.save(result, model)
