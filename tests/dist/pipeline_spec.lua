-- Pipelines: pipeline.lua holds what each rank expects. Tables of PyTorch are read, too.
local command = require "command"

describe("a pipeline", function()
  local function job(ranks, options) command.on_ranks("pipeline", ranks, options) end

  it("trains as the whole model does on one rank", function()
    for _, schedule in ipairs { "gpipe", "1f1b" } do
      job("2", "schedule=" .. schedule)
      job("4 --thread-ranks", "schedule=" .. schedule)
    end
    job("1", "microbatches=3")
    job("2 --thread-ranks", "schedule=interleaved each=2")
    for _, ranks in ipairs { 2, 4 } do
      job(ranks .. " --thread-ranks", "schedule=zb_h1")
      job(ranks .. " --thread-ranks", "schedule=zbv each=2")
    end
  end)

  it("has chunks that ddp and fsdp reduce over ranks with other data", function()
    for _, wrap in ipairs { "ddp", "fsdp" } do
      job("4 --thread-ranks", "stages=2 wrap=" .. wrap)
      job("4 --thread-ranks", "stages=2 each=2 schedule=interleaved wrap=" .. wrap)
      job("4 --thread-ranks", "stages=2 schedule=zb_h1 wrap=" .. wrap)
    end
  end)

  it("is one model in norms, states, files and checkpoints", function()
    local jobs <const> = {
      { "4", "stages=2 each=2 schedule=interleaved wrap=fsdp" },
      { "4 --thread-ranks", "stages=2 each=2 schedule=interleaved wrap=ddp" },
      { "8 --thread-ranks", "stages=4 wrap=fsdp" },
      { "3 --thread-ranks", "stages=1 each=4 schedule=interleaved wrap=fsdp" },
      { "2 --thread-ranks", "each=2 schedule=zbv" },
      { "1", "each=4 schedule=interleaved" },
    }
    for i, one in ipairs(jobs) do
      if not command.full and i > 3 then break end
      local folder = command.folder()
      job(one[1], ("what=saved %s folder='%s'"):format(one[2], folder))
      for k, other in ipairs(jobs) do
        if command.full or (i + k) % 3 == 0 then
          job(other[1], ("what=loaded %s folder='%s'"):format(other[2], folder))
        end
      end
      command.remove(folder)
    end
  end)

  it("has sharded chunks, whose own states a module above does not drop", function()
    local folder = command.folder()
    job("4", ("what=unsaved stages=2 folder='%s'"):format(folder))
    command.remove(folder)
  end)

  it("gives the same bits by any schedule", function()
    job("3 --thread-ranks", "what=same microbatches=5")
    for _, ranks in ipairs { 2, 3, 6 } do
      job(ranks .. " --thread-ranks", "what=random tables=" .. (command.full and 500 or 12))
    end
  end)

  it("asks schedules again with measured times, which change no bit", function()
    for _, how in ipairs { "1", "2", "3 --thread-ranks" } do job(how, "what=measured") end
    for _, wrap in ipairs { "ddp", "fsdp" } do
      job("4 --thread-ranks", "what=measured stages=2 wrap=" .. wrap)
    end
  end)

  it("refuses answers that change the placement, or that ranks do not share", function()
    job("2", "what=disagreed")
  end)

  -- Rank 0 replaces the file between steps; the files are looked at every 20 ms.
  local WATCHED <const> = [[
    local ms, core = require "moonshard", require "moonshard.core"
    local pipe = ms.pipeline { chunks = ms.nn.Linear(6, 6), microbatches = 4, schedule = "s.lua" }
    local bits, name = {}, {}
    for step in ms.steps(12) do
      local x = ms.rand { 8, 6, seed = step }
      local loss = pipe:step(x, ms.zeros { 8, dtype = "i64" })
      bits[#bits + 1], name[#name + 1] = ("%a"):format(loss:item()), pipe.plan.schedule.name
      if step % 3 == 2 and ms.rank() == 0 then
        os.rename(("next-%d.lua"):format(step), "s.lua")
        local from = core.clock_ms()
        while core.clock_ms() - from < 25 do end
      end
    end
    print(("rank %d: %s: %s"):format(ms.rank(), table.concat(name, " "), table.concat(bits, " ")))]]
  local function plan(name, body)
    return ([[
      local ms = require "moonshard"
      local function all(view, turn)
        local placement, actions = {}, {}
        for r = 1, view.ranks do
          placement[r], actions[r] = { r - 1 }, {}
          local function add(kind, i) table.insert(actions[r], (r - 1) .. kind .. i) end
          for _, kind in ipairs { "F", "B" } do
            for i = 0, view.microbatches - 1 do
              if turn and kind == "F" then add("F", i) add("B", i)
              elseif not turn then add(kind, i) end
            end
          end
        end
        return { placement = placement, actions = actions }
      end
      return ms.schedule { name = "%s", plan = function(view) %s end }]]):format(name, body)
  end

  it("takes a watched schedule on all ranks at one step, or keeps the old one", function()
    for _, kind in ipairs { "1", "3", "2 --thread-ranks" } do
      local folder = command.folder()
      command.write(folder .. "/r.lua", WATCHED)
      command.write(folder .. "/s.lua", plan("old", "return all(view)"))
      command.write(folder .. "/next-2.lua", plan("new", "return all(view, true)"))
      command.write(folder .. "/next-5.lua", plan("broken", [[
        local t = all(view)
        table.remove(t.actions[1])
        return t]]))
      command.write(folder .. "/next-8.lua", "return ms.schedule { name = 'unread'")
      local out, err = command.succeed(folder, "run r.lua --watch -n " .. kind)
      local line
      for rank = 0, tonumber(kind:match "%d") - 1 do
        local own = out:match(("rank %d: ([^\n]*)\n"):format(rank))
        assert.equal(line or own, own)
        line = own
        assert.truthy(err:find(rank .. ": watch: 's.lua' failed in its first step, the old one \z
          stays in force: r.lua:6: pipeline: broken (s.lua:16): rank 0: '0B3' is missing", 1, true)
          or kind == "1", err)
      end
      assert.truthy(err:find("'0B3' is missing", 1, true), err)
      assert.truthy(err:find("but the old one stays in force: it cannot be loaded", 1, true), err)
      local from = out:match "'s.lua' has changed: the new one is in force from step (%d+) on"
      assert.equal(("old "):rep(from) .. ("new "):rep(12 - from),
        line:match "^([^:]*)" .. " ")
      -- The same bits as without a change.
      command.write(folder .. "/s.lua", plan("old", "return all(view)"))
      local again = command.succeed(folder, "run r.lua -n " .. kind)
      assert.equal(again:match "rank 0: [^:]*: ([^\n]*)", line:match ": (.*)")
      command.remove(folder)
    end
  end)

  it("takes a watched table, or keeps the old one", function()
    local folder = command.folder()
    finally(function() command.remove(folder) end)
    local tables <const> = {
      ["s.csv"] = "0F0,0F1,,,0B0,0B1\n,1F0,1F1,1B0,1B1\n",
      ["next-2.csv"] = "0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n",
      ["next-5.csv"] = "0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1\n",
    }
    local function write()
      for name, text in pairs(tables) do command.write(folder .. "/" .. name, text) end
    end
    write()
    command.write(folder .. "/r.lua", (WATCHED:gsub("microbatches = 4", "microbatches = 2")
      :gsub('next%-%%d%.lua', "next-%%d.csv"):gsub('s%.lua', "s.csv")))
    local out, err = command.succeed(folder, "run r.lua --watch -n 2")
    assert.matches("'s.csv' has changed: the new one is in force from step %d+ on", out)
    assert.truthy(err:find("'s.csv' failed in its first step, the old one stays in force: \z
      r.lua:6: pipeline: s.csv: rank 1: '1B1' is missing", 1, true), err)
    write()
    local again = command.succeed(folder, "run r.lua -n 2")
    assert.equal(again:match "rank 0: [^\n]*", out:match "rank 0: [^\n]*")
  end)

  it("holds no more microbatches than its schedule says", function()
    job("3 --thread-ranks", "what=memory microbatches=6")
  end)

  it("is shown by check, with the messages of each rank", function()
    local folder = command.folder()
    command.write(folder .. "/r.lua", [[
      local ms = require "moonshard"
      local pipe = ms.pipeline { chunks = ms.nn.Linear(8, ms.rank() == 0 and 8 or 4),
        microbatches = 4, passes = { { dtype = "f32", 2, 8 } } }
      for _ in ms.steps(2) do pipe:step(ms.ones { 8, 8 }, ms.zeros { 8, dtype = "i64" }) end]])
    local out = command.succeed(folder, "check r.lua -n 2")
    assert.truthy(out:find("\n1f1b: bubble 20.0%, at most 2, 1 microbatches held", 1, true), out)
    assert.truthy(out:find("\nrank 0   F0 F1       B0", 1, true), out)
    assert.truthy(out:find("send of world, f32 x 16, channel 1 \"0F3.0\"", 1, true), out)
    -- The schedule is before the messages, which are those of one rank.
    assert.truthy(out:find("1f1b: bubble", 1, true) < out:find("\ncollectives of", 1, true), out)
    assert.matches(" on the wire, by rank 0 (--rank R: by another rank)\n", out, 1, true)
    local own = command.succeed(folder, "check r.lua -n 2 --rank 1")
    assert.matches("^rank 1 +peak memory", own)
    assert.matches(" on the wire, by rank 1\n", own, 1, true)
    local recipe = command.read(folder .. "/r.lua")
    for passes, text in pairs {
      ['{ dtype = "f32", 2, 16 }'] = "passes has f32 [2, 16], and chunk 0 gives f32 [2, 8]: \z
        give passes = { { dtype = \"f32\", 2, 8 } }",
      ['{ dtype = "f32", 2, 8 }, { dtype = "f32", 2, 8 }'] = "passes has 2 tensors, and chunk 0 \z
        gives 1: give passes = { { dtype = \"f32\", 2, 8 } }",
    } do
      command.write(folder .. "/r.lua", (recipe:gsub("passes = %b{}", function()
        return ("passes = { %s }"):format(passes)
      end)))
      local code, told, err = command.run(folder, "check r.lua -n 2")
      assert.same({ 1, "" }, { code, told })
      assert.equal(1, select(2, err:gsub("pipeline: passes", "")))
      assert.truthy(err:find(text, 1, true), err)
      err = select(3, command.run(folder, "run r.lua -n 2"))
      assert.truthy(err:find("rank 0: pipeline: " .. text, 1, true), err)
    end
    command.write(folder .. "/r.lua", (recipe:gsub(", passes = %b{}", "")))
    local code, _, err = command.run(folder, "check r.lua -n 2")
    assert.equal(1, code)
    assert.truthy(err:find("nothing tells the shapes that go into chunk 1: give passes", 1, true))
    command.remove(folder)
  end)

  it("is refused by check where chunks of nn.cut pass another dtype", function()
    local folder = command.folder()
    command.write(folder .. "/r.lua", [[
      local ms = require "moonshard"
      local whole = ms.device("meta", function()
        return ms.nn.gpt2 {
          vocab = 64, context = 16, layers = 2, width = 32, heads = 4, tie = false,
        }
      end)
      local number = ms.rank() + 1
      local chunk = ms.nn.owned(ms.nn.cut(whole, number, number), ms.world())
      local model = ms.fsdp(chunk, {
        group = ms.world():split { { 0 }, { 1 } }, precision = { param = "bf16" },
      })
      local pipe = ms.pipeline { chunks = model, microbatches = 2 }
      local x = ms.zeros { 4, 16, dtype = "i64" }
      for _ in ms.steps(2) do pipe:step(x, x) end]])
    local code, _, err = command.run(folder, "check r.lua -n 2")
    assert.equal(1, code)
    assert.truthy(err:find("without passes a check takes f32 [2, 16, 32], f32 [2, 16, 32], and \z
      chunk 0 gives bf16 [2, 16, 32], bf16 [2, 16, 32]: give passes = {", 1, true), err)
    command.remove(folder)
  end)

  it("refuses tables that cannot run, before the first step", function()
    job("2", "what=refused")
  end)
end)
