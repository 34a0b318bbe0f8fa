-- What every rank of lora_spec.lua runs: adapters train alike under ddp and fsdp; nothing of the
-- frozen weights is reduced; adapters are saved, read and merged from shards.
local ms = require "moonshard"
local core = require "moonshard.core"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local cfg = ms.config { folder = "" }
local nn = ms.nn
local rank, size, world = ms.rank(), ms.world_size(), ms.world()
local SIZES <const> = { vocab = 32, context = 16, layers = 2, width = 16, heads = 2 }

local bases = {}
for _, kind in ipairs { "gpt2", "llama" } do
  ms.seed(7)
  bases[kind] = cfg.folder .. "/" .. kind
  assert(nn[kind](SIZES):save(bases[kind]))
end
world:barrier()

-- The whole batch has 4 rows; a rank has its share.
local data = {}
do
  ms.seed(21)
  local rows = 4 // size
  for i = 1, 4 do
    data[i] = core.no_grad(function()
      return (ms.rand { 4, 9 } * 32):to "i64":narrow(1, rank * rows + 1, rows):contiguous():keep()
    end)
  end
end

local function make(kind, options)
  ms.seed(8)
  local model = assert(nn.pretrained(bases[kind], { recompute = options.recompute }))
  -- All layers of llama; those of gpt2 that are the default.
  return nn.lora(model, {
    rank = 3, alpha = 6, names = kind == "llama" and { ".*_proj" } or nil,
  })
end

-- Four steps; the wrapped model, and the adapters after them.
local function train(kind, wrap, options)
  options = options or {}
  local on = options.meta and function(f) return ms.device("meta", f) end
    or function(f) return f() end
  local model = wrap(on(function() return make(kind, options) end))
  local trained = model:parameters(function(p) return p:requires_grad() end)
  local optimizer = ms.optim.adamw(trained, { lr = 1e-2 })
  for step in ms.steps(4) do
    local ids = data[step + 1]
    model(ids:narrow(2, 1, 8)):cross_entropy(ids:narrow(2, 2, 8)):backward()
    model:clip_grad_norm(1)
    optimizer:step()
    optimizer:zero_grad()
  end
  local adapters, base = {}, {}
  for name, t in pairs(expect.whole(model)) do
    (name:find("lora_", 1, true) and adapters or base)[name] = t:detach():clone()
  end
  return model, adapters, base, optimizer
end

local tried = 0
for kind, path in ms.sorted_pairs(bases) do
  local plain = assert(nn.pretrained(path)):state()
  local _, expected, base = train(kind, ms.ddp)
  expect.same(base, plain, kind .. ": the base after training")
  local strategies = { "full_shard", "shard_grad_op", "no_shard" }
  local function check(strategy, way, options)
    local what = ("%s, %s, way %d"):format(kind, strategy, way)
    local model, adapters, own = train(kind, function(net)
      return ms.fsdp(net, {
        strategy = strategy, layout = options.layout, offload = options.offload,
      })
    end, options)
    -- The norm of all gradients is summed over shards, so its last bits differ from ddp's.
    expect.close(adapters, expected, 1e-5, what)
    expect.same(own, plain, what)
    if way > 1 then model:unwrap() end
  end
  for _, strategy in ipairs(strategies) do
    tried = tried + 1
    for way, options in ipairs {
      {}, { recompute = true }, { meta = true }, { layout = "rows" }, { offload = "cpu" },
    } do
      if expect.takes(tried + way, 3) then check(strategy, way, options) end
    end
  end
  -- Recompute under ddp gives the same bits.
  local _, again = train(kind, ms.ddp, { recompute = true })
  expect.same(again, expected, kind .. ", recompute")
  -- One rank has the whole batch; sums of gradients are in another order there.
  if rank == 0 then
    assert(ms.safetensors.save(("%s/%s_%d.safetensors"):format(cfg.folder, kind, size), expected))
  end
end

-------------------------------------------------------------------------------------------- traffic

-- Payload of a backward: the adapters' gradients alone.
do
  local function payload(wrap)
    local model = wrap(make("gpt2", {}))
    local ids = data[1]
    local total, trained = 0, 0
    for _, p in ipairs(model:parameters()) do
      local count = 1
      for _, n in ipairs(p:full_shape()) do count = count * n end
      if p:requires_grad() then trained = trained + 4 * count end
    end
    local function pass()
      model(ids:narrow(2, 1, 8)):cross_entropy(ids:narrow(2, 2, 8)):backward()
    end
    pass()
    for _, record in ipairs(expect.records(pass)) do
      if record.op == "all_reduce" or record.op == "reduce_scatter" then
        total = total + record.count * 4
      end
    end
    return total, trained
  end
  local bytes, trained = payload(ms.ddp)
  assert(bytes == trained, ("ddp: %d of %d"):format(bytes, trained))
  if size > 1 then
    bytes, trained = payload(ms.fsdp)
    -- Parts of shards are padded.
    assert(bytes >= trained and bytes < 1.5 * trained, ("fsdp: %d of %d"):format(bytes, trained))
  end
end

---------------------------------------------------------------------------------------------- files

for kind in ms.sorted_pairs(bases) do
  local ids = data[1]:narrow(2, 1, 8)
  local function outputs(model)
    return ms.no_grad(function() return model(ids) end):detach():clone()
  end
  for number, wrap in ipairs {
    ms.ddp, ms.fsdp, function(net) return ms.fsdp(net, { precision = { param = "bf16" } }) end,
  } do
    local what = ("%s, wrapped in way %d"):format(kind, number)
    local folder = ("%s/adapters_%s_%d"):format(cfg.folder, kind, number)
    local model, adapters = train(kind, wrap)
    assert(model:save_adapters(folder))
    world:barrier()
    -- Into a plain model, and into a wrapped one with other values.
    local read = assert(nn.pretrained(bases[kind]))
    assert(read:load_adapters(folder))
    expect.same(read:state(), adapters, what .. ", read")
    local other = wrap(nn.lora(assert(nn.pretrained(bases[kind])), {
      rank = 3, alpha = 6, names = kind == "llama" and { ".*_proj" } or nil,
    }))
    assert(other:load_adapters(folder))
    expect.same(expect.whole(other), adapters, what .. ", read into a wrapped one")
    local ok, message, code = other:load_adapters(cfg.folder .. "/nowhere")
    assert(ok == nil and message:find "adapter_config.json" and code == "not_found", message)
    -- Merged: the logits of the adapted model. With bf16 compute, the weights are f32 again.
    local expected = outputs(read)
    local merged = model:merge_adapters()
    assert(not getmetatable(merged).fsdp and not getmetatable(merged).ddp)
    local most = (outputs(merged) - expected):abs():max():item()
    assert(most <= 1e-5, ("%s: merged: %g"):format(what, most))
    assert(merged:save(folder .. "/merged"))
    world:barrier()
    local plain = assert(nn.pretrained(folder .. "/merged"))
    assert(plain(ids):eq(merged(ids)):all():item())
  end
end

---------------------------------------------------------------------------------------- checkpoints

-- Saved by fsdp, read by ddp, and the other way round: both go on alike.
for _, ways in ipairs { { ms.fsdp, ms.ddp }, { ms.ddp, ms.fsdp } } do
  local from, adapters, _, optimizer = train("gpt2", ways[1])
  local run = ("%s/run%d"):format(cfg.folder, ways[1] == ms.fsdp and 1 or 2)
  local path = assert(ms.checkpoint.save(run, { model = from, optimizer = optimizer, step = 4 }))
  assert(ms.checkpoint.wait())
  world:barrier()
  local into = ways[2](make("gpt2", {}))
  local other = ms.optim.adamw(into:parameters(function(p) return p:requires_grad() end),
    { lr = 1e-2 })
  assert(ms.checkpoint.load(path, { model = into, optimizer = other }))
  expect.same(expect.whole(into), adapters, "loaded")
  local function go_on(model, with)
    local ids = data[2]
    model(ids:narrow(2, 1, 8)):cross_entropy(ids:narrow(2, 2, 8)):backward()
    with:step()
    with:zero_grad()
    local found = {}
    for name, t in pairs(expect.whole(model)) do
      if name:find("lora_", 1, true) then found[name] = t:detach():clone() end
    end
    return found
  end
  expect.close(go_on(from, optimizer), go_on(into, other), 1e-6, "after a checkpoint")
  -- Ranks of a sharded model generate together.
  local text = into:generate(ms.tensor({ 1, 2 }, "i64"), { count = 4, temperature = 0 }):to_table()
  assert(#text == 4)
end
print(("rank %d is done"):format(rank))
