-- Run by every rank of alone_spec.lua: what ranks hold differently is saved and loaded. what=save
-- trains, saves in the middle, and keeps the end; what=load, in another process, goes on from there
-- and must come to the same end, bit for bit, on as many ranks; on another number it tells what one
-- model of all is.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local cfg = ms.config { folder = "", what = "save", hooks = "" }
local rank, size, nn, optim = ms.rank(), ms.world_size(), ms.nn, ms.optim
local STEPS <const>, MIDDLE <const> = 9, 5

local function linear() return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)) end
local function hook(name) return assert(loadfile(("%s/%s.lua"):format(cfg.hooks, name)))() end

-- name -> function() that gives things, step(i), and what merges
local cases = {}

-- Without a wrapper; averaging by a recipe.
local function by_recipe(name, options)
  cases[name] = function()
    local model = linear()
    local optimizer = optim.adamw(model, { lr = 0.01 })
    local recipe = hook(name)(options(model))
    return { model = model, optimizer = optimizer, outer = recipe.state and recipe or nil },
      function(i) optimizer:step() recipe.after_step(i) end
  end
end
by_recipe("diloco", function(model) return { model = model, period = 3 } end)
by_recipe("slowmo", function(model) return { model = model, period = 3 } end)
by_recipe("local_sgd", function(model) return { model = model, periods = { { 3, size } } } end)
by_recipe("streaming_diloco", function(model)
  return { fragments = { { model[1] }, { model[2] } }, period = 4, delay = 2 }
end)

local function wrapped(hooks)
  return function()
    local model = ms.ddp(linear(), { comm_hook = hooks() })
    local optimizer = optim.sgd(model, { lr = 0.01, momentum = 0.9 })
    return { model = model, optimizer = optimizer }, function() optimizer:step() end
  end
end
cases.noop = wrapped(ms.hooks.noop)
cases.post_local_sgd = wrapped(function()
  return ms.hooks.post_local_sgd { start_step = 2, subgroup = ms.world():split(
    size == 2 and { { 0 }, { 1 } } or { { 0 }, { 1 }, { 2 } }) }
end)
cases.averager = function()
  local model = nn.alone(linear(), { merge = "rank0" })
  local optimizer, averager = optim.adamw(model), optim.averager { period = 3 }
  return { model = model, optimizer = optimizer, averager = averager }, function()
    optimizer:step()
    averager:step(model)
  end
end
-- A part of a wrapped model, random numbers, values and tensors of a rank's own.
cases.ignored = function()
  local model = linear()
  nn.alone(model[2], { merge = "mean" })
  model = ms.ddp(model, { ignored = { "1%..*" } })
  local optimizer, own = optim.adamw(model), { seen = 0, tensor = ms.zeros { 2 + rank }:keep() }
  function own:state()
    return { seen = self.seen, tensor = self.tensor, same = 7, nested = { ms.ones { 1 } } }
  end
  function own:load_state(saved)
    self.seen, self.tensor = saved.seen, saved.tensor:clone():keep()
    assert(saved.same == 7)
  end
  return { model = model, optimizer = optimizer, own = own, rank = rank, both = "value" },
    function(i)
      optimizer:step()
      own.seen = own.seen + rank * i
      own.tensor:add_(rank + i)
      if rank == 1 then ms.randn { 3 } end
    end
end
cases.sharded = function()
  local model = linear()
  model = ms.fsdp(model, { ignored = { "1%..*" }, wrap = { class = "Linear" } })
  local optimizer = optim.adamw(model)
  return { model = model, optimizer = optimizer }, function() optimizer:step() end
end

local function train(things, step, from, to)
  for i = from, to - 1 do
    local x = ms.full(1 + 0.1 * i * (rank + 1), { 2, 4 }) + ms.tensor { 0, 0.1, 0.2, 0.3 }
    things.model(x):pow(2):sum():backward()
    step(i)
    things.optimizer:zero_grad()
  end
end

-- What a rank has at the end.
local function values_of(things)
  local found = {}
  local function add(prefix, value)
    if type(value) == "table" and getmetatable(value) == nil then
      for key, item in ms.sorted_pairs(value) do add(("%s.%s"):format(prefix, key), item) end
    elseif type(value) == "userdata" then found[prefix] = value:detach():clone() end
  end
  for i, p in ipairs(things.model:parameters()) do add("p" .. i, p) end
  for i, p in ipairs(things.optimizer.order) do
    for key, value in pairs(things.optimizer.slots[p].state) do
      add(("s%d.%s"):format(i, key), value)
    end
  end
  if things.own then
    add("own", things.own.tensor)
    found.seen = ms.full(things.own.seen, {})
    found.drawn = ms.randn { 4 }
  end
  return found
end

local function end_file(name) return ("%s/end-%s-%d.safetensors"):format(cfg.folder, name, rank) end

if cfg.what == "save" then
  for name, make in ms.sorted_pairs(cases) do
    ms.seed(3)
    local things, step = make()
    train(things, step, 0, MIDDLE)
    things.step = MIDDLE
    assert(ms.checkpoint.save(cfg.folder .. "/" .. name, things))
    assert(ms.checkpoint.wait())
    if name == "diloco" then assert(things.model:save(cfg.folder .. "/one.safetensors")) end
    if name == "noop" then
      expect.fails(function() things.model:save(cfg.folder .. "/x.safetensors") end,
        "save: ", "of rank 1 differs from that of rank 0", "nn.alone")
    end
    train(things, step, MIDDLE, STEPS)
    assert(ms.safetensors.save(end_file(name), values_of(things)))
  end
elseif cfg.what == "load" then
  for name, make in ms.sorted_pairs(cases) do
    ms.seed(99)
    local things, step = make()
    local path = assert(ms.checkpoint.latest(cfg.folder .. "/" .. name))
    local loaded = assert(ms.checkpoint.load(path, things))
    if name == "ignored" then assert(loaded.rank == rank and loaded.both == "value") end
    train(things, step, MIDDLE, STEPS)
    expect.same(values_of(things), assert(ms.safetensors.load(end_file(name))), name)
  end
else
  -- Another number of ranks.
  for name, make in ms.sorted_pairs(cases) do
    ms.seed(99)
    if name ~= "post_local_sgd" or size == 3 then
      local things = make()
      local path = assert(ms.checkpoint.latest(cfg.folder .. "/" .. name))
      local loaded, message, code = ms.checkpoint.load(path, things)
      if name == "noop" or name == "post_local_sgd" or name == "sharded" then
        assert(loaded == nil and code == "mismatch")
        for _, part in ipairs { "saved by 2 ranks that held different 'model/",
          "resume it on 2 ranks", "nn.alone" } do
          assert(message:find(part, 1, true), message)
        end
        assert(select(2, message:gsub("'[^' ]+/[^' ]+'", "")) >= 3, message)
      elseif name == "ignored" then
        assert(loaded == nil and message:find("'own", 1, true), message)
        things.own, things.rank = nil, nil
        loaded = assert(ms.checkpoint.load(path, things))
        assert(loaded.rank == 0 and loaded.both == "value")
      else assert(loaded, message) end
      if name == "diloco" then
        local one = assert(ms.safetensors.load(cfg.folder .. "/one.safetensors"))
        expect.same(things.model:state(), one, "the mean")
      end
    end
  end
end
print(("rank %d is done"):format(rank))
