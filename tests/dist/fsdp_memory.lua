-- What every rank of fsdp_memory_spec.lua runs: the memory of a model of twelve units, to the byte,
-- against a sum of its parts, where activations are those of one rank without shards.
local ms = require "moonshard"
local size = ms.world_size()
local shared = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")

local WIDTH <const>, UNITS <const>, ROWS <const> = 32, 12, 4

-- An odd width, so that shards need padding.
local Block = ms.nn.class "Block"
function Block:init()
  self.up, self.down = ms.nn.Linear(WIDTH, 65), ms.nn.Linear(65, WIDTH)
end
function Block:forward(x) return self.down(self.up(x):gelu()) end

-- Is between two units, in the root; calls note when forward comes by.
local Between = ms.nn.class "Between"
function Between:init(note) self.note = note end
function Between:forward(x)
  self.note()
  return x
end

local function live() return (shared.memory()) end

local function sum(list, f)
  local total = 0
  for _, one in ipairs(list) do total = total + f(one) end
  return total
end

-- Live bytes of one step: between units in forward and in backward, and when a unit's backward has
-- begun. A unit's backward begins between the two hooks of its outputs, since the first is its own.
-- Only noted while points.are_noted, as each note takes a full collection.
local function probed(points)
  local function note(where)
    return function() if points.are_noted then table.insert(points[where], live()) end end
  end
  local list = { ms.nn.Linear(WIDTH, WIDTH) }
  for _ = 1, UNITS do
    local block, between = Block(), Between(note "forward")
    block:hook("pre_backward", note "backward")
    between:hook("pre_backward", note "inside")
    list[#list + 1], list[#list + 2] = block, between
  end
  list[#list + 1] = ms.nn.Linear(WIDTH, 1)
  return ms.nn.Sequential(table.unpack(list))
end

-- Some steps; the memory of the last one, above what was live before it. how: options of fsdp, and
-- freeze: matrices are not trained
local function measure(how)
  local points, trained, start = {}, {}, live()
  local inner = probed(points)
  for _, item in ipairs(inner:named_parameters()) do
    if how.freeze and item.name:find "weight" then item.parameter:requires_grad_(false)
    else trained[#trained + 1] = item.parameter end
  end
  local options = { wrap = { class = "Block" }, prefetch = "none" }
  local model = shared.models.fsdp(inner, options, how.options)
  local optimizer, x = ms.optim.adamw(trained, { lr = 1e-3 }), ms.ones { ROWS, WIDTH }:keep()
  local before, reserved
  for step in ms.steps(8) do
    before = live()
    if step == 4 then reserved = ms.memory().reserved end
    if step == 7 then
      points.forward, points.backward, points.inside, points.are_noted = {}, {}, {}, true
      ms.reset_peak()
    end
    model(x):mean():backward()
    optimizer:step()
    optimizer:zero_grad()
  end
  local peak = ms.memory().peak
  assert(live() == before, "a step leaves nothing behind")
  -- Where padding differs, a pool may still take one unit and its gradient; not some in each step.
  local grown = ms.memory().reserved - reserved
  assert(grown <= 2 * 4 * (2 * 65 * WIDTH + 65 + WIDTH + 4),
    ("pools have grown by %d from %d"):format(grown, reserved))
  for _, list in ipairs { points.forward, points.backward, points.inside } do
    assert(#list == UNITS)
    for i, bytes in ipairs(list) do list[i] = bytes - before end
  end
  return {
    model = model, before = before - start - x:numel() * 4, peak = peak - before, points = points,
  }
end

-- Bytes of a unit's whole parameters, padded to `ranks` shards, and of what is trained of them.
local function bytes_of(unit, ranks)
  local counts = { [true] = 0, [false] = 0 }
  for _, p in ipairs(unit.parameters) do
    local count = 1
    for _, rows in ipairs(p:full_shape()) do count = count * rows end
    counts[p:requires_grad()] = counts[p:requires_grad()] + count
  end
  local function padded(count) return (count + ranks - 1) // ranks * ranks * 4 end
  return padded(counts[true]) + padded(counts[false]), padded(counts[true]),
    counts[false] > 0 and 2 or 1
end

local function expect(what, value, least, most)
  if value < least or value > (most or least) then
    error(("%s: %d bytes, not %d%s"):format(what, value, least,
      most and " to " .. most or ""), 2)
  end
end

-- One rank has all parameters and gradients at all times: what a step adds are activations.
local alone = {}
for rank = 0, size - 1 do alone[rank + 1] = { rank } end
alone = ms.world():split(alone)

local function check(case)
  local activations = measure { options = { group = alone }, freeze = case.freeze }
  local own = measure(case)
  local units = own.model:units()
  local shards, trained, flats, parameters = 0, 0, 0, 0
  for _, unit in ipairs(units) do
    local whole, gradients, count = bytes_of(unit, size)
    assert(unit.bytes == whole and unit.shard_bytes == whole // size)
    shards, trained, flats = shards + whole // size, trained + gradients // size, flats + count
    parameters = parameters + #unit.parameters
  end
  -- A shard of a flat parameter ends with an element for pieces without elements. AdamW has two
  -- numbers for each of the piece, not always for padding, and a counter for each parameter.
  local pieces = sum(own.model:parameters(), function(p)
    return p:requires_grad() and p:numel() * 4 or 0
  end)
  local parts = shards + (size > 1 and 4 * flats or 0) + trained
  expect("between steps", own.before, parts + 2 * pieces, parts + 2 * trained + 8 * parameters)

  local root, root_gradients = bytes_of(units[1], size)
  local unit, unit_gradients = bytes_of(units[2], size)
  if size == 1 then root, root_gradients, unit, unit_gradients = 0, 0, 0, 0 end
  local kept = case.options and case.options.strategy == "shard_grad_op"
  local ahead = case.options and case.options.prefetch and 1 or 0
  for i = 1, UNITS do
    local a = activations.points
    -- Backward comes to the last unit first. With shard_grad_op units stay until theirs has ended.
    expect("forward after unit " .. i, own.points.forward[i],
      a.forward[i] + root + (kept and i * unit or 0))
    local there = kept and (UNITS - i + 1) * unit or ahead * unit
    -- Frozen parameters are needed until the gradient of the input is there: the unit before ends
    -- with this gradient, but after the hook that looks here.
    if case.freeze and i > 1 then there = unit + unit_gradients end
    expect("backward before unit " .. UNITS + 1 - i, own.points.backward[i],
      a.backward[i] + root + root_gradients + there)
    if case.freeze then there = 0 end
    local coming = kept and there or unit + (i < UNITS and ahead * unit or 0)
    expect("backward in unit " .. UNITS + 1 - i, own.points.inside[i],
      a.inside[i] + root + root_gradients + coming + unit_gradients)
  end
  -- The most is in the backward of the last unit, where activations are.
  local units_there = kept and UNITS or 1 + ahead
  expect("the most", own.peak,
    activations.peak + root + root_gradients + units_there * unit + unit_gradients)
end
for i, case in ipairs {
  {}, { freeze = true }, { options = { prefetch = "backward_pre" } },
  { options = { strategy = "shard_grad_op" } },
} do
  if shared.takes(i, 2) then check(case) end
end
print(("rank %d: memory is the sum of its parts"):format(ms.rank()))
