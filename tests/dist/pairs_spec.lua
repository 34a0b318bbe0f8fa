-- send and recv: what both sides must agree in, and what is refused. And loops of pairs.
local command = require "command"

local folder
before_each(function() folder = command.folder() end)
after_each(function() command.remove(folder) end)

-- Runs a script on two ranks, which are given `rank`, `world` and `t`.
local function run(ranks, text)
  command.write(folder .. "/r.lua", [[
local ms = require "moonshard"
local rank, world, t = ms.rank(), ms.world(), ms.full(ms.rank() + 1, { 3 })
]] .. text)
  return command.run(folder, "run r.lua -n " .. ranks)
end

describe("labels of send and recv", function()
  for _, ranks in ipairs { "2", "2 --thread-ranks" } do
    it("are equal on both sides, on " .. ranks, function()
      local code, out, err = run(ranks, [[
for i = 1, 3 do
  local label = { label = "F" .. i }
  if rank == 0 then world:send(t * i, 1, label)
  else
    local sum = world:recv(i == 2 and ms.zeros { 3, 2 }:narrow(2, 1, 1):squeeze(2) or t, 0, label)
      :value():sum():item()
    io.stdout:write(("received %g\n"):format(sum))
  end
end
if rank == 0 then world:send(t, 1) else world:recv(t, 0):value() end]])
      assert.equal(0, code, err)
      for i = 1, 3 do assert.truthy(out:find(("received %d\n"):format(3 * i), 1, true), out) end
    end)

    it("name both calls where they differ, on " .. ranks, function()
      for theirs, shown in pairs { ['{ label = "F2" }'] = ', "F2"', ["nil"] = "" } do
        local code, _, err = run(ranks, ([[
if rank == 0 then world:send(t, 1, { label = "F1" }):sync()
else world:recv(t, 0, %s):sync() end]]):format(theirs))
        assert.not_equal(0, code)
        assert.truthy(err:find("ranks disagree", 1, true), err)
        assert.truthy(err:find('rank 0: send #1 [^\n]*, "F1", at r.lua:3'), err)
        assert.truthy(err:find("rank 1: recv #1 [^\n]*" .. shown .. ", at r.lua:4"), err)
      end
    end)
  end

  it("are shown by check", function()
    run("2", [[
if rank == 0 then world:send(t, 1, { label = "F1" }) else world:recv(t, 0, { label = "F1" }) end]])
    local out = command.succeed(folder, "check r.lua -n 2")
    assert.truthy(out:find('send of world, f32 x 3, channel 1 "F1"', 1, true), out)
  end)

  it("have 31 bytes at most, and are strings", function()
    local code, out, err = run("1", [[
local function refused(f)
  local ok, message = pcall(f)
  assert(not ok)
  io.stdout:write(message, "\n")
end
refused(function() world:send(t, 0, { label = ("x"):rep(32) }) end)
refused(function() world:recv(t, 0, { label = 3 }) end)
refused(function() world:send(t, 0, { lable = "F1" }) end)]])
    assert.equal(0, code, err)
    assert.truthy(out:find(("send: label '%s' has 32 bytes, and 31 are the most")
      :format(("x"):rep(32)), 1, true), out)
    assert.truthy(out:find("recv: option label must be a string, not the number 3", 1, true), out)
    assert.truthy(out:find("send: unknown option 'lable': did you mean 'label'?", 1, true), out)
  end)
end)

-- The order of keys that are strings differs between processes.
describe("collectives in a loop", function()
  local LOOP = [[
local tensors = {}
for i = 1, 40 do tensors["t" .. i] = ms.ones { i } end
for _, t in %s(tensors) do world:all_reduce(t) end
ms.synchronize()
io.stdout:write "reduced\n"]]

  it("of pairs end with an error that names what has one order", function()
    local code, out, err = run("3", LOOP:format "pairs")
    assert.falsy(out:find "reduced")
    assert.not_equal(0, code)
    assert.truthy(err:find("Both calls are at r.lua:5. If it is in a loop of pairs, its order \z
      differs between ranks: that of ms.sorted_pairs does not", 1, true), err)
  end)

  it("of ms.sorted_pairs have one order", function()
    local code, out, err = run("3", LOOP:format "ms.sorted_pairs")
    assert.equal(0, code, err)
    assert.equal(3, select(2, out:gsub("reduced", "")))
  end)
end)

describe("send", function()
  it("refuses a tensor through which a gradient would have to flow", function()
    local code, out, err = run("2", [[
local layer = ms.nn.Linear(3, 3)
if rank == 0 then
  local y = layer(ms.ones { 2, 3 })
  local ok, message = pcall(world.send, world, y, 1)
  assert(not ok)
  io.stdout:write(message, "\n")
  world:send(y:detach(), 1)
  ms.no_grad(function() world:send(y, 1):sync() end)
else for _ = 1, 2 do world:recv(ms.zeros { 2, 3 }, 0):sync() end end]])
    assert.equal(0, code, err)
    assert.truthy(out:find("send has no gradient, and the tensor requires one: call it inside \z
      ms.no_grad, or with a tensor of its own (t:detach(), ms.empty)", 1, true), out)
  end)
end)
