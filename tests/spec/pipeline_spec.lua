-- Tables of pipelines: ready-made schedules have the bubble that their papers state, tables made by
-- chance are played, and what cannot run is refused with the rank and the action.
local command = require "command"
local ms = require "moonshard"
local actions = require "moonshard.parallel.pipeline.actions"
local play = require "moonshard.parallel.pipeline.play"
local schedules = require "moonshard.parallel.pipeline.schedules"

local function shape_of(ranks, microbatches, each)
  return { ranks = ranks, chunks = ranks * (each or 1), microbatches = microbatches }
end

local function read(name, shape, given)
  return actions.read(name, shape, given or schedules[name](shape))
end

-- How long a table runs with the times of a view.
local function length_by(view, t)
  local at, free, ended, left = {}, {}, {}, 3 * view.chunks * view.microbatches
  for r in ipairs(t.lists) do at[r], free[r] = 1, 0 end
  while left > 0 do
    for r, list in ipairs(t.lists) do
      local action = list[at[r]]
      local from = action and free[r]
      for _, need in ipairs(action and actions.needs(t, action) or {}) do
        from = from and ended[need.text] and math.max(from, ended[need.text])
      end
      if from then
        free[r] = from + view.times[action.chunk][action.kind]
        ended[action.text], at[r], left = free[r], at[r] + 1, left - 1
      end
    end
  end
  return math.max(table.unpack(free))
end

describe("schedules", function()
  -- Time with equal costs for F, I and W: 3 for each microbatch and stage, and the bubble.
  it("have the bubble of their papers", function()
    for _, case in ipairs { { 2, 2 }, { 2, 6 }, { 4, 4 }, { 4, 9 }, { 6, 12 } } do
      local ranks, count = table.unpack(case)
      for name, bubble in pairs { gpipe = 3, ["1f1b"] = 3, zb_h1 = 1 } do
        local played = play.run(read(name, shape_of(ranks, count)))
        assert.equal(3 * count + bubble * (ranks - 1), played.length, name)
        local share = bubble * (ranks - 1) / (3 * count + bubble * (ranks - 1))
        assert.near(share, play.bubble(played), 1e-12)
      end
    end
    for _, ranks in ipairs { 2, 3, 4 } do
      local played = play.run(read("interleaved", shape_of(ranks, 2 * ranks, 2)))
      assert.equal(3 * 2 * 2 * ranks + 3 * (ranks - 1), played.length)
      local v = play.bubble(play.run(read("zbv", shape_of(ranks, 2 * ranks, 2))))
      assert.is_true(v < play.bubble(play.run(read("zb_h1", shape_of(ranks, 2 * ranks)))))
    end
  end)

  it("are shown", function()
    local t = read("1f1b", shape_of(2, 3))
    assert.equal("1f1b: bubble 25.0%, at most 2, 1 microbatches held by the ranks\n\z
      rank 0   F0 F1       B0    F2 B1       B2\n\z
      rank 1      F0 B0    F1 B1    F2 B2", play.show(t, play.run(t)))
    local v = read("interleaved", shape_of(2, 2, 2))
    assert.truthy(play.show(v, play.run(v)):find("\nrank 1       1F0 1F1 3F0", 1, true))
  end)

  it("hold as many microbatches as they say", function()
    local ranks = 5
    local function live(name, each) return play.run(read(name, shape_of(ranks, 10, each))).live end
    assert.same({ 5, 4, 3, 2, 1 }, live "1f1b")
    assert.same({ 10, 10, 10, 10, 10 }, live "gpipe")
    for _, most in ipairs(live "zb_h1") do assert.is_true(most <= ranks) end
    for _, most in ipairs(live("zbv", 2)) do assert.is_true(most <= 2 * ranks) end
  end)

  it("refuse what they are not made for", function()
    local function fails(name, shape, text)
      assert.error_matches(function() schedules[name](shape) end, text)
    end
    fails("1f1b", shape_of(2, 2, 2), "one chunk on each of the 2 ranks, not 4 chunks")
    fails("interleaved", shape_of(2, 3, 2), "2 ranks do not divide 3 microbatches")
    fails("zbv", shape_of(2, 3), "two chunks on each of the 2 ranks, not 2 chunks")
  end)

  it("tell their placement", function()
    local function placement(schedule, ranks, each)
      return ms.schedule(schedule):placement { ranks = ranks, each = each, microbatches = 4 }
    end
    assert.same({ { 0 }, { 1 }, { 2 } }, placement("1f1b", 3))
    assert.same({ { 0, 3 }, { 1, 2 } }, placement("zbv", 2, 2))
    assert.same({ { 0, 2 }, { 1, 3 } }, placement("interleaved", 2, 2))
    local folder = command.folder()
    command.write(folder .. "/v.csv", "3F0,0F0,3B0,0B0\n2F0,1F0,1B0,2B0\n")
    assert.same({ { 0, 3 }, { 1, 2 } },
      ms.schedule(folder .. "/v.csv"):placement { ranks = 2, each = 2, microbatches = 1 })
    assert.error_matches(function() placement(folder .. "/v.csv", 2, 2) end, "'0F1' is missing")
    command.remove(folder)
    assert.error_matches(function() ms.schedule("gpipe"):placement { ranks = 2 } end,
      "microbatches is 1 or more")
    assert.error_matches(function() placement("zbw", 2) end, "there is no schedule 'zbw'")
    assert.error_matches(function() ms.schedule { name = "x", plan = print, every = 0 } end,
      "every must be a whole number of 1 or more")
  end)

  it("of recipes/parallel/schedules hold and wait as they say", function()
    local function of(name, options)
      local made = dofile(command.source .. "/recipes/parallel/schedules/" .. name .. ".lua")
      return type(made) == "function" and made(options or {}) or made
    end
    local function played(name, shape, options)
      return play.run(read(name, shape, of(name, options).plan(shape)))
    end
    assert.same({ 2, 2, 2, 1 }, played("limited", shape_of(4, 6)).live)
    assert.same({ 1, 1, 1, 1 }, played("limited", shape_of(4, 6), { most = 1 }).live)
    assert.same(play.run(read("1f1b", shape_of(4, 6))),
      played("limited", shape_of(4, 6), { most = 4 }))
    local broad, depth = played("breadth_first", shape_of(3, 6, 2)),
      play.run(read("interleaved", shape_of(3, 6, 2)))
    assert.equal(depth.length, broad.length)
    assert.same({ 12, 12, 12 }, broad.live)
    local own = played("by_times", shape_of(4, 8), { every = 7 })
    assert.equal(play.run(read("zb_h1", shape_of(4, 8))).length, own.length)
    assert.equal(7, of("by_times", { every = 7 }).every)
    assert.is_nil(of("limited").every)
    -- By times the pass is shorter: 18.5 ms, and 20 by zb_h1.
    local view = shape_of(4, 4)
    view.times = {
      [0] = { F = 2, I = 0.5, W = 0.5 }, { F = 2, I = 1, W = 1 }, { F = 1.5, I = 0.5, W = 1 },
      { F = 0.5, I = 1, W = 1.5 },
    }
    assert.equal(20, length_by(view, read("zb_h1", view)))
    assert.equal(18.5, length_by(view, read("by_times", view, of("by_times").plan(view))))
  end)

  it("read the tables of PyTorch", function()
    local shape = shape_of(2, 2)
    local make = schedules.from_csv("t.csv",
      "0F0,0SEND_F0,0F1,0SEND_F1,,0RECV_B0,0B0,0RECV_B1,0B1\n,1RECV_F0,1F0,1B0,1SEND_B0,1F1,1B1\n")
    local t = read("t.csv", shape, make(shape))
    assert.equal("0B1", t.lists[1][4].text)
    assert.equal(4, #t.lists[2])
    play.run(t)
    assert.error_matches(function() make(shape_of(3, 2)) end, "2 rows, and there are 3 ranks")
  end)
end)

-- A number of 1 to n.
local state = 88172645463325252
local function draw(n)
  state = (state * 6364136223846793005 + 1442695040888963407) & math.maxinteger
  return (state >> 20) % n + 1
end

-- A valid table, whose chunks each have their backward in one or in two parts.
local function random_table(view)
  local lists, placement, done, next_of, split, left = {}, {}, {}, {}, {}, 0
  for r = 1, view.ranks do lists[r], placement[r] = {}, {} end
  for c = 0, view.chunks - 1 do
    table.insert(placement[draw(view.ranks)], c)
    next_of[c], split[c] = { F = 0, B = 0, I = 0, W = 0 }, draw(2) == 1
    left = left + view.microbatches * (split[c] and 3 or 2)
  end
  local rank_of = {}
  for r, own in ipairs(placement) do for _, c in ipairs(own) do rank_of[c] = r end end
  while left > 0 do
    local c = draw(view.chunks) - 1
    local kind = ({ "F", "B", "I", "W" })[draw(4)]
    local i = next_of[c][kind]
    local function is_done(chunk, k) return done[chunk .. k .. i] end
    local ok = i < view.microbatches and (kind == "F" or (kind == "B") ~= split[c])
    if ok and kind == "F" then ok = c == 0 or is_done(c - 1, "F")
    elseif ok and kind == "W" then ok = is_done(c, "I")
    elseif ok then
      ok = is_done(c, "F")
        and (c == view.chunks - 1 or is_done(c + 1, split[c + 1] and "I" or "B"))
    end
    if ok then
      local text = c .. kind .. i
      done[text], next_of[c][kind], left = true, i + 1, left - 1
      table.insert(lists[rank_of[c]], text)
    end
  end
  return { placement = placement, actions = lists }
end

-- Every message is on both sides, in one order for each pair of ranks, after what makes it and
-- before what needs it.
local function check_messages(t, played)
  local place, pairs_of = {}, {}
  for r, steps in ipairs(played.steps) do
    for at, step in ipairs(steps) do
      local message = step.send or step.recv
      if message then
        local key = ("%d-%d"):format(math.min(message.from, message.to),
          math.max(message.from, message.to))
        pairs_of[key] = pairs_of[key] or {}
        pairs_of[key][r] = (pairs_of[key][r] or "") .. message.label .. " "
        local side = (step.send and "send " or "recv ") .. message.label .. " " .. message.chunk
        assert.is_nil(place[side])
        place[side] = at
      else place[step.action.text] = at end
    end
  end
  for _, sides in pairs(pairs_of) do
    local seen
    for _, text in pairs(sides) do
      assert.equal(seen or text, text)
      seen = text
    end
  end
  for _, list in ipairs(t.lists) do
    for _, action in ipairs(list) do
      for _, need in ipairs(actions.needs(t, action)) do
        if need.rank ~= action.rank then
          local name = need.text .. " " .. action.chunk
          assert.is_true(place["send " .. name] > place[need.text])
          assert.is_true(place["recv " .. name] < place[action.text])
        end
      end
    end
  end
end

describe("tables", function()
  local COUNT <const> = command.full and 10000 or 200

  it("that are valid are played", function()
    for _ = 1, COUNT do
      local ranks = draw(5) + 1
      local shape = { ranks = ranks, chunks = ranks + draw(3) - 1, microbatches = draw(5) }
      local given = random_table(shape)
      local empty = false
      for _, own in ipairs(given.placement) do empty = empty or #own == 0 end
      local t = read("chance", shape, given)
      check_messages(t, play.run(t))
      assert.is_true(empty or #t.lists == ranks)
    end
  end)

  it("that are not valid are refused with the rank and the action", function()
    for _ = 1, COUNT do
      local ranks = draw(5) + 1
      local shape = { ranks = ranks, chunks = ranks, microbatches = draw(4) + 1 }
      local given = random_table(shape)
      local r
      repeat r = draw(ranks) until #given.actions[r] > 0
      local list = given.actions[r]
      local at, kind = draw(#list), draw(4)
      local text = list[at]
      if kind == 1 then table.remove(list, at)
      elseif kind == 2 then table.insert(list, draw(#list), text)
      elseif kind == 3 then list[at] = text:gsub("^%d+", tostring(shape.chunks))
      else                                    -- its forward after its backward
        local chunk, micro = text:match "^(%d+)%u(%d+)$"
        local first, last
        for i, other in ipairs(list) do
          if other:match "^%d+" == chunk and other:match "%d+$" == micro then
            first, last = first or i, i
          end
        end
        list[first], list[last] = list[last], list[first]
      end
      local ok, message = pcall(function() play.run(read("chance", shape, given)) end)
      assert.is_false(ok)
      assert.truthy(message:find("rank %d", 1, false) and message:find "'%d+%u%d+'", message)
    end
  end)
end)
