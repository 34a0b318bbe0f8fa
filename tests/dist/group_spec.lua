-- Collectives of several ranks, as processes and as threads: collectives.lua has the expectations
-- of each rank.
local command = require "command"

describe("collectives", function()
  local folder
  before_each(function() folder = command.folder() end)
  after_each(function() command.remove(folder) end)

  for _, how in ipairs { "", " --thread-ranks" } do
    for ranks = 1, 4 do
      it(("give what they should on %d ranks as %s")
        :format(ranks, how == "" and "processes" or "threads"), function()
        command.on_ranks("collectives", ranks .. how)
      end)
    end
  end

  for _, ranks in ipairs(command.some(2, { "3", "1", "4 --thread-ranks", "2" })) do
    it("of groups that are closed and given again, on ranks: " .. ranks, function()
      command.on_ranks("closed_groups", ranks)
    end)
  end

  it("tell ranks that have not all closed their parts", function()
    command.write(folder .. "/s.lua", [[
      local ms = require "moonshard"
      local group = ms.world():split { { 0 }, { 1 } }
      if ms.rank() == 0 then group:close() end
      ms.world():split { { 0 }, { 1 } }]])
    local code, _, err = command.run(folder, "run s.lua -n 2")
    assert.equal(5, code, err)
    assert.matches("ranks disagree in call #%d+ of world:\n  rank 0: split", err)
  end)

  -- A checkpoint's description, the states of a sharded optimizer and of links, and the text of a
  -- join: hosts wait for them, so they must not wait for computation.
  it("of numbers that hosts wait for are on a channel of their own", function()
    command.write(folder .. "/s.lua", [[
      local ms, core = require "moonshard", require "moonshard.core"
      local world = ms.world()
      local long = ("x"):rep(9000)
      local texts = world:_share_texts(ms.rank() == 0 and "" or long, "t")
      assert(#texts == 2 and texts[1] == "" and texts[2] == long)
      assert(world:_share_text(ms.rank() == 1 and long or "other", 1, "t") == long)
      assert(world:_share_text(ms.rank() == 0 and "" or long, 0, "t") == "")
      local state = ms.hooks.state "own"
      local model = ms.ddp(ms.nn.Linear(4, 4), { comm_hook = function(bucket, next)
        state:of "all".rank = ms.rank()
        return next(bucket)
      end })
      local optimizer = ms.optim.adamw(model, { lr = 1e-3, shard = world })
      core.comm_record(true)
      model:join({}, function()
        for _ = 1, ms.rank() + 1 do
          model(ms.ones { 1, 4 }):sum():backward()
          optimizer:step()
        end
      end)
      assert(ms.checkpoint.save("c", { step = 1, model = model, optimizer = optimizer }))
      local kinds = {}
      for _, record in ipairs((core.comm_records())) do
        local is_pair = record.op == "send" or record.op == "recv"
        kinds[("%s %s"):format(is_pair and "pair" or record.channel, record.dtype)] = true
      end
      if ms.rank() == 0 then
        for kind in ms.sorted_pairs(kinds) do print(kind) end
      end]])
    local out = command.succeed(folder, "run s.lua -n 2")
    -- Send and recv have no channel: they move the tensors of sharded states. Barriers bring no
    -- numbers, and are listed as f32.
    for kind in out:gmatch "1 (%w+)\n" do assert.equal("f32", kind, out) end
    assert.matches("numbers i32\n", out)
    assert.matches("numbers i64\n", out)
    assert.matches("numbers u8\n", out)
  end)

  it("of random numbers show which belong to everyone and which to a rank", function()
    command.write(folder .. "/r.lua", [[
      local ms = require "moonshard"
      local function alike(t)
        local all = ms.world():all_gather(t:view(1, -1)):value()
        return all[1]:eq(all[2]):all():item()
      end
      local function say(name, ...)
        local list = {}
        for i, t in ipairs { ... } do list[i] = tostring(alike(t)) end
        if ms.rank() == 0 then print(name, table.concat(list, " ")) end
      end
      local rounding = ms.codec("int4", { rounding = "stochastic" })
      say("same", ms.rand { 99 }, ms.randn { 99, seed = 4 },
        ms.randint { 99, low = 0, high = 9, per_rank = false })
      say("own", ms.rand { 99, per_rank = true }, ms.randn { 99, seed = 4, per_rank = true },
        ms.ones { 99 }:dropout(0.5), (rounding:encode(ms.rand { 99, seed = 1 })))
      say("then", ms.rand { 99 })]])
    local out = command.succeed(folder, "run r.lua -n 2")
    assert.matches("same\ttrue true true\n", out)
    assert.matches("own\tfalse false false false\n", out)
    assert.matches("then\ttrue\n", out)
    assert.equal(out, (command.succeed(folder, "run r.lua -n 2 --thread-ranks")))
  end)
end)
