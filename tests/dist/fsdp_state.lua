-- What every rank of fsdp_state_spec.lua runs: states of sharded models, in memory and in files,
-- against the same model without shards.
local ms = require "moonshard"
local core = require "moonshard.core"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local fails = expect.fails
local cfg = ms.config { folder = "" }
local rank, size, world = ms.rank(), ms.world_size(), ms.world()

-- A tied embedding, whose 13 rows do not divide, frozen weights, a buffer, and a number.
local Net = ms.nn.class "Net"
function Net:init(seed)
  ms.seed(seed)
  self.embed = ms.nn.Parameter(ms.randn { 13, 6 })
  self.inside = ms.nn.Sequential(ms.nn.Linear(6, 7), ms.nn.Linear(7, 6))
  self.after = ms.nn.Sequential(ms.nn.Linear(6, 6))
  self.after[1].weight:requires_grad_(false)
  self.scale = ms.nn.Parameter(ms.randn {})
  self.head = self.embed
  self:add_buffer("seen", ms.full(seed, { 3 }))
end
function Net:forward(x)
  local h = self.after(self.inside(x:embedding(self.embed)):tanh()) * self.scale
  return h:linear(self.head)
end

local function equal(what, a, b)
  local names = {}
  for name, t in pairs(b) do
    assert(a[name], ("%s: there is no %s"):format(what, name))
    assert(a[name]:dtype() == t:dtype() and tostring(a[name]) == tostring(t:detach():clone()), name)
    local same = (a[name]:detach():to "f32" - t:detach():to "f32"):abs():max():item() == 0
    assert(same, ("%s: %s differs"):format(what, name))
    names[name] = true
  end
  for name in pairs(a) do assert(names[name], ("%s: %s is too much"):format(what, name)) end
end

local function read(path)
  local file = assert(io.open(path, "rb"), path)
  local text = file:read "a"
  file:close()
  return text
end

local function place(name) return cfg.folder .. "/" .. name end

local configs = {
  {}, { layout = "rows" }, { wrap = { class = "Sequential" } },
  { layout = "rows", wrap = { class = "Sequential" } },
  { strategy = "shard_grad_op", wrap = { class = "Linear" } },
  { strategy = "no_shard" }, { ignored = { "embed" } },
}
if size == 4 then
  local within, across = world:levels(2)
  -- Rank 0 is the last of its shard group and of its replicas.
  local turned, columns = world:split { { 2, 0 }, { 3, 1 } }, world:split { { 2, 3 }, { 0, 1 } }
  for _, layout in ipairs { "flat", "rows" } do
    table.insert(configs, {
      strategy = "hybrid_shard", shard_group = within, replica_group = across, layout = layout,
    })
  end
  table.insert(configs, {
    strategy = "hybrid_shard_zero2", shard_group = turned, replica_group = columns,
  })
  table.insert(configs, { reshard_after_forward = 2, wrap = { class = "Sequential" } })
end

local function output(model) return model(ms.tensor({ 1, 12, 5 }, "i64")):detach():clone() end

local function check_states(what, model, whole)
  local full = model:state()
  if rank == 0 then equal(what, full, whole)
  else assert(next(full) == nil, "only rank 0 has everything") end
  local pieces, places, count = model:state { kind = "sharded" }, {}, 0
  for _, one in ipairs(model:pieces()) do places[one.name] = one end
  for name, t in pairs(whole) do
    local piece, place_of = pieces[name], places[name]
    if core.is_tensor(piece) then equal(what, { x = piece }, { x = t })
    else
      assert(piece.first == place_of.first and piece.count == place_of.count)
      local part = t:detach():contiguous():view(-1):narrow(1, piece.first + 1, piece.count)
      assert(piece.count == 0 or (piece.tensor - part):abs():max():item() == 0, name)
      assert(table.concat(piece.shape, " ") == table.concat(t:shape(), " "))
      count = count + piece.count
    end
  end
  return pieces, count
end

local reference = Net(1)
local whole, expected = reference:state(), output(reference)
assert(reference:save(place "reference.safetensors"))
world:barrier()
local original = read(place "reference.safetensors")

for i, options in ipairs(configs) do
  local what = ("configuration %d"):format(i)
  local model = ms.fsdp(Net(1), options)
  local pieces = check_states(what, model, whole)
  -- The file is that of the model without shards, to the bit.
  local path = place(("model-%d.safetensors"):format(i))
  assert(model:save(path))
  world:barrier()
  assert(read(path) == original, what)
  -- Other values, in all ways of loading. What was computed from the old ones is not used again.
  local function changed()
    local other = ms.fsdp(Net(2), options)
    assert((output(other) - expected):abs():max():item() > 0.01)
    return other
  end
  local ways = {
    function(other) assert(other:load(path)) end,
    function(other) assert(other:load { path }) end,
    function(other) other:load_state(whole) end,
    function(other) other:load_state(rank == 0 and whole or {}) end,
    function(other) other:load_state(pieces) end,
  }
  local function check_way(way)
    local other = changed()
    ways[way](other)
    equal(("%s, way %d"):format(what, way), expect.whole(other), whole)
    assert((output(other) - expected):abs():max():item() == 0, what)
    -- A step changes what was loaded, so the shards are still the parameters.
    local optimizer = ms.optim.sgd(other, { lr = 1 })
    other(ms.tensor({ 1, 12, 5 }, "i64")):square():mean():backward()
    optimizer:step()
    assert((output(other) - expected):abs():max():item() > 0)
  end
  for way in ipairs(ways) do if expect.takes(i + way, 4) then check_way(way) end end
  -- Some names only.
  local part = changed()
  part:load_state(rank == 0 and { ["inside.0.bias"] = ms.full(3, { 7 }) } or {}, { partial = true })
  local loaded = expect.whole(part)
  assert(loaded["inside.0.bias"]:min():item() == 3, what .. loaded["inside.0.bias"]:show())
  assert((loaded.embed - Net(2).embed:detach()):abs():max():item() == 0)
end

-- From one configuration to all others, through the pieces' file.
for i, options in ipairs(configs) do
  local other = ms.fsdp(Net(3), options)
  assert(other:load(place(("model-%d.safetensors"):format(#configs - i + 1))))
  equal("crossed", expect.whole(other), whole)
end

-- Parameters that few ranks have: rank 0 gets those of all ranks.
if size > 1 then
  local Experts = ms.nn.class "Experts"
  function Experts:init(own)
    ms.seed(5)
    self.base = ms.nn.Linear(6, 6)
    for _, number in ipairs(own) do
      ms.seed(10 + number)
      self["expert" .. number] = ms.nn.Linear(6, 6 + number)
    end
  end
  local all = {}
  local blocks = size == 4 and 2 or 1
  for number = 1, size // blocks do all[number] = number end
  local groups, together = world:levels(blocks), Experts(all):state()
  for _, layout in ipairs { "flat", "rows" } do
    local function make(seed)
      local net = Experts { rank // blocks + 1 }
      if seed then
        ms.no_grad(function() for _, p in ipairs(net:parameters()) do p:zero_() end end)
      end
      return ms.fsdp(net, {
        layout = layout, group_of = function(name) return name:find "expert" and groups or nil end,
      })
    end
    local model = make()
    local full = model:state()
    if rank == 0 then equal("experts", full, together) else assert(not next(full)) end
    local path = place(("experts-%s.safetensors"):format(layout))
    assert(model:save(path))
    world:barrier()
    if rank == 0 then equal("experts' file", assert(ms.safetensors.load(path)), together) end
    local own = {}
    for name, t in pairs(together) do
      if not name:find "expert" or name:find("expert" .. rank // blocks + 1) then own[name] = t end
    end
    for _, load in ipairs {
      function(other) assert(other:load(path)) end,
      function(other) other:load_state(full) end,
      function(other) other:load_state(together) end,
      function(other) other:load_state(own) end,
    } do
      local other = make(0)
      load(other)
      equal("experts loaded", expect.whole(other), own)
    end
  end
end

-- What is wrong is said on every rank, and nothing has changed.
do
  local model = ms.fsdp(Net(1), { wrap = { class = "Sequential" } })
  local bad = Net(2):state()
  bad["inside.0.bias"], bad.other = ms.zeros { 8 }, ms.zeros { 1 }
  bad.scale = nil
  local texts = {
    "wrong shape: inside.0.bias (f32 [7]", "missing: scale", "unknown: other", "given)",
  }
  fails(function() model:load_state(bad) end, table.unpack(texts))
  fails(function() model:load_state(rank == 0 and bad or {}) end, table.unpack(texts))
  -- One rank's mistake is all ranks' error.
  if size > 1 then
    local odd = Net(2):state()
    if rank == 1 then odd["inside.0.bias"] = ms.zeros { 9 } end
    fails(function() model:load_state(odd) end, "wrong shape: inside.0.bias", "[9] f32")
    fails(function() model:load_state(rank == 1 and whole or {}) end, "missing: ")
    local other = ms.fsdp(Net(2), { layout = "rows" })
    fails(function() model:load_state(other:state { kind = "sharded" }) end, "wrong shape",
      "elements from")
  end
  if rank == 0 then assert(ms.safetensors.save(place "bad.safetensors", bad)) end
  world:barrier()
  local ok, message, code = model:load(place "bad.safetensors")
  assert(not ok and code == "mismatch", message)
  for _, text in ipairs(texts) do assert(message:find(text, 1, true), message) end
  ok, message, code = model:load(place "no.safetensors")
  assert(not ok and code == "not_found" and message:find("no.safetensors", 1, true))
  -- Rank 0 alone writes, and all ranks learn that it could not.
  ok, message, code = model:save(place "reference.safetensors/model")
  assert(not ok and message and code, "a file is no folder")
  equal("unchanged", expect.whole(model), whole)
  -- A number that f16 has no room for, in one rank's part.
  local name = ms.sorted_pairs(whole)()
  local large = {}
  for key, t in pairs(whole) do large[key] = t:detach():clone() end
  large[name]:view(-1):narrow(1, large[name]:numel(), 1):fill_(1e5)
  model:load_state(large)
  ok, message, code = model:save(place "large.safetensors", { dtype = "f16" })
  assert(not ok and code == "unsupported", message)
  assert(message:find(("'%s' has the number 100000"):format(name), 1, true), message)
  assert(not core.exists(place "large.safetensors"))
  model:load_state(whole)
  equal("again", expect.whole(model), whole)
  fails(function() model:state { kind = "local" } end, "kind is full or sharded, not 'local'")
  fails(function() model:state { kin = "full" } end, "kind")
  model:summon({ writeback = false }, function()
    fails(function() model:state() end, "state inside of summon")
    fails(function() model:save(place "x.safetensors") end, "save inside of summon")
  end)
  model:unwrap()
  fails(function() model:state() end, "unwrapped")
end

-- No rank holds more than its part and the largest tensor, or what is copied of it.
do
  local layers = {}
  for i = 1, 8 do layers[i] = ms.nn.Linear(64, 64) end
  local model = ms.fsdp(ms.nn.Sequential(table.unpack(layers)), { wrap = { class = "Linear" } })
  core.collect()
  local unit = 4 * (64 * 64 + 64)
  local function peak_of(f)
    ms.synchronize()
    core.collect()
    local before = ms.memory().live
    ms.reset_peak()
    f()
    ms.synchronize()
    return ms.memory().peak - before
  end
  local path = place "large.safetensors"
  local saving = peak_of(function() assert(model:save(path)) end)
  world:barrier()
  local loading = peak_of(function() assert(model:load(path)) end)
  assert(saving <= 2 * unit and loading <= 2 * unit, ("%d and %d bytes, a unit has %d"):format(
    saving, loading, unit))
end
print(("rank %d is done"):format(rank))
