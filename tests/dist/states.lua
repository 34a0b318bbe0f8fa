-- Run by every rank of states_spec.lua: a state stays what it was when it was asked for, and going
-- back to it gives the same bits again, under every wrapper.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local rank, nn, optim = ms.rank(), ms.nn, ms.optim

local wraps = {
  plain = function(m) return nn.alone(m, { merge = "mean" }) end,
  ddp = ms.ddp,
  fsdp = ms.fsdp,
  rows = function(m) return ms.fsdp(m, { layout = "rows", wrap = { class = "Linear" } }) end,
  no_shard = function(m) return ms.fsdp(m, { strategy = "no_shard" }) end,
}
local kinds = {
  adamw = optim.adamw,
  sgd = function(m) return optim.sgd(m, { lr = 0.1, momentum = 0.9 }) end,
  zero = function(m) return optim.adamw(m, { shard = ms.world() }) end,
}

local Net = nn.class "Net"
function Net:init()
  self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)
  self.seen = ms.zeros { 1 }
end
function Net:forward(x)
  ms.no_grad(function() self.seen:add_(1) end)
  return self.b(self.a(x))
end

local function step(model, optimizer, number, dtype)
  local x = ms.full(1 + number * 0.25 + rank, { 2, 4 }):to(dtype)
  model(x):sum():backward()
  optimizer:step()
  optimizer:zero_grad()
end

-- All numbers of a state, as text.
local function written(state, path, list)
  list, path = list or {}, path or ""
  if type(state) == "table" and state.tensor and state.first then
    written(state.tensor, path .. "piece", list)
  elseif type(state) == "table" then
    for key, value in ms.sorted_pairs(state) do
      written(value, ("%s/%s"):format(path, key), list)
    end
  elseif type(state) == "userdata" then
    list[#list + 1] = path .. table.concat(state:to("f32"):view(-1):to_table(), " ")
  else list[#list + 1] = ("%s=%s"):format(path, tostring(state)) end
  return list
end
local function text_of(state) return table.concat(written(state), "\n") end

local taken = 0
for wrapper, wrap in ms.sorted_pairs(wraps) do
  local sharded = wrapper == "fsdp" or wrapper == "rows" or wrapper == "no_shard"
  for kind, make in ms.sorted_pairs(kinds) do
    for _, dtype in ipairs { "f32", "bf16" } do
      for _, form in ipairs(sharded and { "full", "sharded" } or { "full" }) do
        local skipped = kind == "zero" and wrapper ~= "ddp"
        if not skipped and expect.takes(#wrapper + #kind + #dtype + #form, 2) then
          local what = ("%s, %s, %s, %s"):format(wrapper, kind, dtype, form)
          local model = wrap(Net():to(dtype))
          local optimizer = make(model)
          local best, moments, in_step
          for i = 1, 2 do step(model, optimizer, i, dtype) end
          -- A state outlives the step in which it was asked for.
          for _ in ms.steps(1) do
            best, moments = model:state { kind = form }, optimizer:state { kind = form }
            in_step = text_of(best) .. text_of(moments)
          end
          for i = 3, 5 do step(model, optimizer, i, dtype) end
          assert(text_of(best) .. text_of(moments) == in_step, what .. ": the state has changed")
          local last = text_of(model:state { kind = form })
          assert(next(best) == nil or last ~= text_of(best), what .. ": nothing was trained")
          model:load_state(best)
          -- Of states that are shared out, rank 0 has all; others have their own.
          if kind ~= "zero" then
            optimizer:load_state(moments)
            for i = 3, 5 do step(model, optimizer, i, dtype) end
            assert(text_of(model:state { kind = form }) == last, what .. ": it goes on otherwise")
          end
          -- Writes into a state stay there.
          ms.no_grad(function()
            for _, t in pairs(model:state { kind = form }) do
              local own = type(t) == "table" and t.tensor or t
              if own:numel() > 0 then own:fill_(7) end
            end
          end)
          if kind ~= "zero" then
            assert(text_of(model:state { kind = form }) == last, what .. ": a write has reached it")
          end
          taken = taken + 1
        end
      end
    end
  end
end
assert(taken > 8)

-- The tensors themselves, where one asks for them.
do
  local model = nn.alone(Net(), { merge = "rank0" })
  local optimizer = optim.adamw(model)
  step(model, optimizer, 1, "f32")
  local live, copy = model:state { live = true }, model:state()
  ms.no_grad(function() live["a.weight"]:fill_(3) end)
  assert(model.a.weight:max():item() == 3 and copy["a.weight"]:max():item() ~= 3)
  expect.fails(function() model:state { alive = true } end, "did you mean 'live'")
  local scaler = optim.scaler { init_scale = 8 }
  local before = scaler:state()
  scaler:load_state { factor = ms.full(2, {}), good = ms.zeros {} }
  assert(before.factor:item() == 8 and scaler:state().factor:item() == 2)
end
print(("rank %d is done"):format(rank))
