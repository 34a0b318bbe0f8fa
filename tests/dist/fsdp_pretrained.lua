-- What every rank of fsdp_pretrained_spec.lua runs: the weights of a folder of another tool go
-- straight into shards, with the bits that they have in a whole model; no rank holds more than its
-- shards and a unit, or reads more than its shards; and the folder is written again as it was.
local ms = require "moonshard"
local core = require "moonshard.core"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local cfg = ms.config { folder = "" }
local nn, fails = ms.nn, expect.fails
local rank, size, world = ms.rank(), ms.world_size(), ms.world()
local SIZES <const> = { vocab = 64, context = 32, layers = 4, width = 64, heads = 4 }

-- Rank 0 writes a folder for each kind: f32, bf16, and one with a head of its own.
local function write(name, net, dtype)
  assert(net:save(cfg.folder .. "/" .. name, { dtype = dtype }))
  world:barrier()
  return cfg.folder .. "/" .. name
end
ms.seed(7)
local folders = {
  write("gpt2", nn.gpt2(SIZES)),
  write("llama", nn.llama(SIZES), "bf16"),
}

local function open(path)
  return ms.device("meta", function() return assert(nn.pretrained(path)) end)
end

-- Bytes that this process has read so far.
local function bytes_read()
  local file <close> = assert(io.open "/proc/self/io")
  return math.tointeger(file:read("a"):match "rchar: (%d+)")
end

local function bytes_of(name)
  local file <close> = assert(io.open(name, "rb"))
  return file:seek "end"
end

-------------------------------------------------------------------------------------------- values

local strategies = { "full_shard", "shard_grad_op", "no_shard" }
if size ~= 3 then strategies[4] = "hybrid_shard" end

for i, path in ipairs(folders) do
  local precise = { param = "bf16", keep = { i == 1 and ".*ln_.*" or ".*norm.*" } }
  local ways = { {}, { layout = "rows" }, { offload = "cpu" }, { precision = precise } }
  local expected = assert(nn.pretrained(path)):state()
  local function check(strategy, number)
    local what = ("%s, %s, way %d"):format(path, strategy, number)
    local options = expect.models.merged({ strategy = strategy }, ways[number])
    local model = ms.fsdp(open(path), options)
    for _, p in ipairs(model:parameters()) do assert(p:device() ~= "meta") end
    expect.same(expect.whole(model), expected, what)
  end
  for k, strategy in ipairs(strategies) do
    for number in ipairs(ways) do
      if expect.takes(i + k + number, 5) then check(strategy, number) end
    end
  end
  expect.same(open(path):materialize():state(), expected, path .. ", materialized")
  expect.same(ms.ddp(open(path)):state(), expected, path .. ", ddp")
  -- A model of one's own, into which a file is loaded.
  local model = ms.device("meta", function() return (i == 1 and nn.gpt2 or nn.llama)(SIZES) end)
  assert(model:load(path))
  expect.same(expect.whole(ms.fsdp(model)), expected, path .. ", loaded")
end

-- A part of the model was there before; another is made by what init draws.
do
  local expected = assert(nn.pretrained(folders[1])):state()
  local Both = nn.class "Both"
  function Both:init(inner) self.inner, self.head = inner, nn.Linear(4, 4) end
  ms.seed(11)
  local whole = Both(assert(nn.pretrained(folders[1])))
  ms.seed(11)
  local model = ms.device("meta", function() return Both(assert(nn.pretrained(folders[1]))) end)
  model.inner.ln_f.bias = nn.Parameter(ms.full(3, { 64 }))
  model = ms.fsdp(model)
  local state = expect.whole(model)
  expected["ln_f.bias"] = nil
  local found = {}
  for name, t in pairs(state) do found[name:gsub("^inner%.", "")] = t end
  expect.same(found, expected, "in another model")
  assert(found["ln_f.bias"]:eq(3):all():item())
  assert(state["head.weight"]:eq(whole.head.weight):all():item())
end

-- A reset computes a buffer that is in no file. It writes all that init computes, but what is in
-- the file, or had memory, stays.
do
  local Cached = nn.class "Cached"
  function Cached:init()
    self.weight = nn.Parameter(ms.zeros { 5 })
    self.bias = nn.Parameter(ms.zeros { 3 })
    self:add_buffer("scale", ms.zeros { 4 })
    self:add_buffer("cache", ms.zeros { 4 }, { save = false })
    self:reset()
  end
  function Cached:reset()
    self.weight:copy_(ms.arange(1, 5):to "f32")
    self.bias:copy_(ms.arange(1, 3):to "f32")
    self.scale:copy_(ms.arange(1, 4):to "f32")
    self.cache:copy_(ms.arange(2, 5):to "f32")
  end
  local Holder = nn.class "Holder"
  function Holder:init()
    ms.no_grad(function() self.inner, self.last = Cached(), nn.Linear(3, 3) end)
  end
  local made = Holder()
  ms.no_grad(function()
    made.inner.weight:fill_(100)
    made.inner.bias:fill_(100)
    made.inner.scale:fill_(200)
  end)
  local path = write("cached", made)
  local function read()
    local model = ms.device("meta", function() return Holder() end)
    assert(model:load(path))
    return model
  end
  local ways = {
    function(model) return model:materialize() end,
    ms.ddp,
    ms.fsdp,
    function(model)
      return ms.fsdp(model, { strategy = "no_shard", wrap = { class = { "Cached" } } })
    end,
    function(model) return ms.fsdp(model, { ignored = { "inner.*" } }) end,
    function(model) return ms.fsdp(model, { wrap = { class = { "Cached" } } }) end,
    -- A state of another model on "meta" is in the same file.
    function(model)
      local other = ms.device("meta", function() return Holder() end)
      other:load_state(model:state())
      return ms.fsdp(other)
    end,
  }
  for i, wrap in ipairs(ways) do
    local model = read()
    local net = wrap(model)
    expect.same(expect.whole(net), made:state(), "reset, way " .. i)
    local own = (getmetatable(net).fsdp or getmetatable(net).ddp) and net.module or net
    assert(own.inner.cache:eq(made.inner.cache):all():item())
    model = read()
    model.inner.weight = nn.Parameter(ms.full(7, { 5 }))
    if i < #ways then
      assert(expect.whole(wrap(model))["inner.weight"]:eq(7):all():item(), "memory, way " .. i)
    end
  end
end

---------------------------------------------------------------------------------- memory and reads

if size > 1 then
  for _, path in ipairs(folders) do
    core.collect()
    ms.synchronize()
    local before, read = ms.memory().live, bytes_read()
    ms.reset_peak()
    local model = ms.fsdp(open(path))
    ms.synchronize()
    read = bytes_read() - read
    local peak, own, largest = ms.memory().peak - before, 0, 0
    core.collect()
    for _, unit in ipairs(model:units()) do
      own, largest = own + unit.shard_bytes, math.max(largest, unit.bytes)
    end
    assert(peak <= own + largest + 64 * #model:units(),
      ("%s: peak %d, own %d, unit %d"):format(path, peak, own, largest))
    -- Ranks as threads share the process, and its count.
    if cfg.folder:find "processes" then
      local all = bytes_of(path .. "/model.safetensors")
      assert(read < all / size + 65536, ("%s: read %d of %d bytes"):format(path, read, all))
      assert(read > all / size / 2, "the count is of these reads")
    end
  end
end

-------------------------------------------------------------------------------------------- saving

for i, path in ipairs(folders) do
  local model = ms.fsdp(open(path))
  local again = ("%s/again%d"):format(cfg.folder, i)
  assert(model:save(again))
  if rank == 0 then
    local a <close> = assert(io.open(path .. "/model.safetensors", "rb"))
    local b <close> = assert(io.open(again .. "/model.safetensors", "rb"))
    assert(a:read "a" == b:read "a", again)
  end
end

---------------------------------------------------------------------------------------- what fails

-- What would be lost, or not be what the file says, is refused.
local net = open(folders[1])
ms.no_grad(function() net.ln_f.weight:mul_(2) end)
fails(function() ms.fsdp(net) end, "'ln_f.weight' was written on \"meta\" after its file")
net = open(folders[1])
ms.no_grad(function() net.ln_f.weight:mul_(2) end)
do
  local other = open(folders[1])
  other:load_state(net:state())
  fails(function() ms.fsdp(other) end, "'ln_f.weight' was written on \"meta\" after its file")
end
fails(function() open(folders[1]):to "bf16" end, "will be read from a file: convert the model")
-- A file of other weights on one rank, of which ms.fsdp would make a mixture.
if size > 1 then
  local paths = { folders[1], write("other", nn.gpt2(SIZES)) }
  for _, strategy in ipairs(strategies) do
    net = open(paths[rank == size - 1 and 2 or 1])
    fails(function() ms.fsdp(net, { strategy = strategy }) end, ("fsdp: 'wte.weight' is not the \z
      same in the files of rank 0 and of rank %d: give all ranks the same"):format(size - 1))
  end
  ms.fsdp(net, { init_sync = false })
end
-- A file that got shorter between opening and reading.
if size > 1 then
  local path = write("short", nn.gpt2(SIZES))
  net = open(path)
  world:barrier()
  if rank == 0 then
    local name = path .. "/model.safetensors"
    assert(os.execute(("truncate -s 20000 '%s'"):format(name)))
  end
  world:barrier()
  fails(function() ms.fsdp(net) end, ": fsdp: '" .. path .. "/model.safetensors' ends at byte")
  world:barrier()
end
-- What makes a model fails, or makes none.
for _, shard in ipairs { "", "full_shard" } do
  local function apply(make)
    ms.scripts.apply({ shard = shard }, make, function() end)
  end
  fails(function() apply(function() return nn.pretrained(cfg.folder .. "/nowhere") end) end,
    "scripts.apply: the function that makes the model failed: there is no file or folder '")
  fails(function() apply(function() return ms.zeros { 2 } end) end,
    "scripts.apply: the function that makes the model must return a module, not a tensor")
end
print(("rank %d is done"):format(rank))
