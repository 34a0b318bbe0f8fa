-- Run by every rank of group_spec.lua: each collective through Lua, compared with values computed
-- by hand, and gradients compared with closed forms.
local ms = require "moonshard"
local world = ms.world()
local rank, size = ms.rank(), ms.world_size()

local function same(want, got, what)
  got = got:to "f32"
  local texts = {
    (got - ms.tensor(want, "f32")):abs():max():item(), table.concat(got:shape(), "x"),
  }
  local wanted = table.concat(ms.tensor(want, "f32"):shape(), "x")
  if texts[1] ~= 0 or texts[2] ~= wanted then
    error(("rank %d: %s: %s, not %s"):format(rank, what, got:show(), ms.tensor(want, "f32"):show()),
      2)
  end
end

-- This rank's tensor [rows, 2]: small whole numbers that tell rank and position, so that all dtypes
-- hold sums exactly.
local function brought(of, rows, dtype)
  local values = {}
  for i = 1, rows do values[i] = { of + 1., i + 2. * (of % 2) } end
  return ms.tensor(values, "f32"):to(dtype or "f32")
end

local function table_of(rows, f)
  local values = {}
  for i = 1, rows do values[i] = { f(i, 1), f(i, 2) } end
  return values
end
local function value(of, i, column) return column == 1 and of + 1. or i + 2. * (of % 2) end
local function over_ranks(f, first)
  local result = first
  for r = 0, size - 1 do result = f(result, r) end
  return result
end
local function sum_at(i, column)
  return over_ranks(function(total, r) return total + value(r, i, column) end, 0.)
end

local rows = 2 * size
for _, dtype in ipairs { "f32", "f16", "bf16", "i64", "i32", "u16", "u8" } do
  local whole = dtype:match "^[iu]"
  same(table_of(rows, sum_at), world:all_reduce(brought(rank, rows, dtype)):value(),
    "sum " .. dtype)
  if not whole then
    same(table_of(rows, function(i, c) return sum_at(i, c) * 4 / size end),
      (world:all_reduce(brought(rank, rows, "f32") * 4, "avg"):value()), "avg")
    same(table_of(rows, function(i, c)
      return over_ranks(function(t, r) return t + (r + 1) * value(r, i, c) end, 0.)
    end), world:all_reduce(brought(rank, rows, dtype), { premul_sum = rank + 1 }):value(),
      "premul_sum " .. dtype)
  end
  same(table_of(rows, function(i, c)
    return over_ranks(function(m, r) return math.max(m, value(r, i, c)) end, 0.)
  end), world:all_reduce(brought(rank, rows, dtype), "max"):value(), "max " .. dtype)
  same(table_of(rows, function(i, c)
    return over_ranks(function(m, r) return math.min(m, value(r, i, c)) end, 99.)
  end), world:all_reduce(brought(rank, rows, dtype), "min"):value(), "min " .. dtype)
  same(table_of(2, function(i, c) return sum_at(2 * rank + i, c) end),
    world:reduce_scatter(brought(rank, rows, dtype)):value(), "reduce_scatter " .. dtype)
  same(table_of(2 * size, function(i, c) return value((i - 1) // 2, (i - 1) % 2 + 1, c) end),
    world:all_gather(brought(rank, 2, dtype)):value(), "all_gather " .. dtype)
end

-- Uneven parts: rank r has r rows (rank 0 none).
local counts, total = {}, 0
for r = 0, size - 1 do counts[r + 1], total = r, total + r end
local owner, position = {}, {}
for r = 0, size - 1 do for i = 1, r do owner[#owner + 1], position[#position + 1] = r, i end end
if total > 0 then
  local mine = rank == 0 and ms.zeros { 0, 2 } or brought(rank, rank)
  same(table_of(total, function(i, c) return value(owner[i], position[i], c) end),
    world:all_gather(mine, counts):value(), "all_gather by counts")
  local all = world:gather(mine, size - 1, counts):value()
  if rank == size - 1 then
    same(table_of(total, function(i, c) return value(owner[i], position[i], c) end), all,
      "gather by counts")
  end
  local part = world:reduce_scatter(brought(rank, total), "sum", counts):value()
  local before = rank * (rank - 1) // 2
  if rank > 0 then
    same(table_of(rank, function(i, c) return sum_at(before + i, c) end), part,
      "reduce_scatter by counts")
  end
end

-- all_to_all: part p of rank r goes to rank p.
same(table_of(size, function(i, c) return value(i - 1, rank + 1, c) end),
  world:all_to_all(brought(rank, size)):value(), "all_to_all")
local send, receive, sent = {}, {}, 0
for r = 0, size - 1 do
  send[r + 1], receive[r + 1] = (rank + r) % 3, (r + rank) % 3
  sent = sent + send[r + 1]
end
if sent > 0 then
  local got = world:all_to_all(ms.full(rank, { sent, 2 }), send, receive):value():to_table()
  local at = 0
  for r = 0, size - 1 do
    for _ = 1, receive[r + 1] do
      at = at + 1
      assert(got[at][1] == r and got[at][2] == r, "all_to_all by counts")
    end
  end
  assert(#got == at)
end

-- One root; tensors that are not contiguous; a ring of messages.
local last = size - 1
same(table_of(3, function(i, c) return value(last, i, c) end),
  world:broadcast(brought(rank, 3), last):value(), "broadcast")
local reduced = world:reduce(brought(rank, 3), last):value()
same(table_of(3, function(i, c) return rank == last and sum_at(i, c) or value(rank, i, c) end),
  reduced, "reduce")
local cut = world:scatter(rank == last and brought(last, rows) or ms.zeros { 2, 2 }, last):value()
same(table_of(2, function(i, c) return value(last, 2 * rank + i, c) end), cut, "scatter")
local turned = brought(rank, 3):t()
world:all_reduce(turned):value()
same({ { sum_at(1, 1), sum_at(2, 1), sum_at(3, 1) }, { sum_at(1, 2), sum_at(2, 2), sum_at(3, 2) } },
  turned, "all_reduce of a transposed tensor")
if size > 1 then
  local from = ms.zeros { 4 }
  local out, into = world:send(ms.full(rank, { 4 }), (rank + 1) % size),
    world:recv(from, (rank - 1) % size)
  same({ (rank - 1) % size, (rank - 1) % size, (rank - 1) % size, (rank - 1) % size }, into:value(),
    "a ring")
  out:value()
end

-- The same results where the memory is shared, and on the second channel.
local near, far = ms.full(rank + 1, { 1000, group = world }), ms.full(rank + 1, { 1000 })
world:channel(2):all_reduce(near)
world:all_reduce(far)
assert((near - far):abs():max():item() == 0 and near:select(1, 1):item() == size * (size + 1) / 2)

-- Sub-groups: halves, and a chain of levels.
local evens, odds = {}, {}
for r = 0, size - 1 do table.insert(r % 2 == 0 and evens or odds, r) end
local half = world:split(#odds > 0 and { evens, odds } or { evens })
local expected = 0
for _, r in ipairs(rank % 2 == 0 and evens or odds) do expected = expected + r + 1 end
assert(half:all_reduce(ms.full(rank + 1, { 3 })):value():select(1, 1):item() == expected)
assert(world:split { { 0 } } == nil or rank == 0)
if size % 2 == 0 then
  local within, across = world:levels(2)
  assert(within:size() == 2 and across:size() == size // 2)
  local t = ms.full(rank + 1, { 2 })
  within:all_reduce(t)
  across:all_reduce(t)
  assert(t:select(1, 1):item() == size * (size + 1) / 2)
end

-- Gradients: the job's loss is the sum of all ranks' losses, here rank's weights times the result.
local function gradient(f, n)
  local x = ms.full(rank + 1, { n }):requires_grad_()
  local y = f(x * 1):value()
  local weights = ms.arange(1, y:numel()):to "f32" * (rank + 1)
  ;(y * weights):sum():backward()
  return x:grad()
end
local ranks_sum = size * (size + 1) / 2
local function by_position(n, f)
  local list = {}
  for i = 1, n do list[i] = f(i) end
  return list
end
same(by_position(size, function(i) return i * ranks_sum end),
  gradient(function(x) return world:all_reduce(x) end, size), "gradient of all_reduce")
local factor = 3 * (rank + 1)
same(by_position(size, function(i) return i * ranks_sum * factor end),
  gradient(function(x) return world:all_reduce(x, { premul_sum = factor }) end, size),
  "of premul_sum")
same(by_position(size, function(i) return rank == last and i * ranks_sum or 0 end),
  gradient(function(x) return world:broadcast(x, last) end, size), "of broadcast")
same(by_position(2, function(i) return (2 * rank + i) * ranks_sum end),
  gradient(function(x) return world:all_gather(x) end, 2), "of all_gather")
same(by_position(2 * size, function(i) return ((i - 1) % 2 + 1) * ((i - 1) // 2 + 1) end),
  gradient(function(x) return world:reduce_scatter(x) end, 2 * size), "of reduce_scatter")
same(by_position(size, function(i) return (rank + 1) * i end),
  gradient(function(x) return world:all_to_all(x) end, size), "of all_to_all")

-- What is received has nothing to do with what the tensor was computed from, and no gradient comes
-- back to what is sent; a leaf stays as it is. Inside no_grad, and with tensors of their own, all
-- send and receive.
if size > 1 then
  local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
  local leaf = ms.ones { 2 }:requires_grad_()
  local columns = ms.ones { 3, 2 }:requires_grad_()
  for _, t in ipairs { leaf, leaf * 1, (columns * 1):t() } do
    expect.fails(function() world:recv(t, (rank + 1) % size) end, "recv", "no gradient")
    expect.fails(function() world:send(t, (rank + 1) % size) end, "send", "no gradient")
    expect.fails(function() world:scatter(t, 0) end, "scatter", "no gradient")
    assert((t:detach() - 1):abs():sum():item() == 0)
  end
  local h = leaf * 1
  local on_the_way = world:send(h:detach(), (rank + 1) % size)
  local here = ms.zeros { 2 }
  world:recv(here, (rank - 1) % size):value()
  on_the_way:value()
  same({ 1., 1. }, here, "recv beside a tape")
  ms.no_grad(function() world:scatter(rank == 0 and ms.full(7., { 2 * size }) or h, 0):value() end)
  same(rank == 0 and { 1., 1. } or { 7., 7. }, h:detach(), "scatter inside no_grad")
end

world:barrier()
print(("rank %d is done"):format(rank))
