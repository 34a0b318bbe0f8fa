-- Ranks have different string seeds, so plain tables have different orders; tables of named tensors
-- that the library gives have one. Run on 3 ranks.
local core = require "moonshard.core"
local ms = require "moonshard"

local world = ms.world()

local function model()
  ms.seed(1)
  return ms.nn.gpt2 { vocab = 16, context = 8, layers = 2, width = 16, heads = 2 }
end

-- The keys of a table and of the tables in it, in the order of `pairs`.
local function order(t, list)
  list = list or {}
  for key, value in pairs(t) do
    list[#list + 1] = tostring(key)
    if type(value) == "table" and getmetatable(value) == getmetatable(t) then order(value, list) end
  end
  return list
end

-- All ranks have the same order, which is that of names.
local function check(what, t)
  local list = order(t)
  assert(#list > 0 and t[next(t)] ~= nil, what)
  local texts = world:_share_texts(core.json_encode(core.json_list(list)), what)
  for _, text in ipairs(texts) do assert(text == texts[1], what) end
  local own = {}
  for key in pairs(t) do own[#own + 1] = key end
  for i = 2, #own do assert(own[i - 1] < own[i], what) end
end

local function with_buffers()
  local net = ms.nn.Linear(4, 4)
  for _, name in ipairs { "mean", "variance", "count", "left", "right", "up", "down" } do
    net:add_buffer(name, ms.full(ms.rank(), { 2 }))
  end
  return net
end

local one = model()
check("state", one:state())
check("live state", one:state { live = true })
for name, t in pairs(one:state()) do
  world:all_reduce(t:fill_(#name)):value()
  assert(t:reshape(-1)[1]:item() == 3 * #name, name)
end

local net, seen = with_buffers(), nil
check("buffers", net:buffers())
local wrapped = ms.ddp(net, { buffer_hook = function(buffers)
  seen = order(buffers)
  local last
  for name, t in pairs(buffers) do
    t:fill_(ms.rank() + #name)
    last = world:all_reduce(t)
  end
  return last
end })
for name, t in pairs(net:buffers()) do
  wrapped(ms.ones { 1, 4 }):sum():backward()
  assert(t[1]:item() == 3 + 3 * #name, name)
end
assert(#seen == 7 and seen[1] == "count" and seen[7] == "variance")

local optimizer = ms.optim.adamw(one, { lr = 1e-3 })
one(ms.randint { 1, 8, low = 0, high = 16, seed = 1 }):sum():backward()
optimizer:step()
for _, name in ipairs { "lr", "weight_decay", "eps" } do
  optimizer:groups()[1][name] = optimizer:groups()[1][name] / 2
end
for _, how in ipairs { false, { live = true } } do
  local state = optimizer:state(how or nil)
  check("optimizer", state)
  check("optimizer's parameters", state.parameters)
  check("a group", state.groups[1])
  for _, slot in pairs(state.parameters) do check("a parameter's state", slot) end
end

local sharded = ms.fsdp(model(), { group = world })
local whole = sharded:state()
if ms.rank() == 0 then
  local names = {}
  for name in pairs(whole) do names[#names + 1] = name end
  assert(#names == #one:parameters())
  for i = 2, #names do assert(names[i - 1] < names[i]) end
end
check("pieces", sharded:state { kind = "sharded" })
check("live pieces", sharded:state { kind = "sharded", live = true })

-- They are plain tables otherwise.
local state = one:state()
state[1], state[true], state.more = 2, false, "text"
local count = 0
for key in pairs(state) do
  count = count + 1
  state[key] = nil
end
assert(count == #one:parameters() + 3 and next(state) == nil)
one:load_state(one:state())
optimizer:load_state(optimizer:state())
local holder = ms.nn.class "Holder" ()
local ok, why = pcall(function() holder.parts = one:state { live = true } end)
assert(not ok and why:find("is a table of modules or parameters", 1, true))
print(("rank %d is done"):format(ms.rank()))
