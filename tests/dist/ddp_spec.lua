-- ddp on several ranks, as processes and as threads: ddp.lua and golden.lua have the expectations
-- of each rank. Here: results do not depend on processes or threads, nor on the number of threads;
-- and the message of a job whose ranks do not agree.
local command = require "command"
local folder
before_each(function() folder = command.folder() end)
after_each(function() command.remove(folder) end)

local ways = { processes = "", threads = " --thread-ranks" }

describe("ddp", function()
  for ranks = 1, command.full and 4 or 3 do
    it(("gives the bits of one process on %d ranks, whatever these are"):format(ranks), function()
      local hashes = {}
      -- The bits of several ways are compared on 2 ranks, in long ranges on other numbers, too.
      local both = { ways.processes, ways.threads .. " --threads 3" }
      local all = {
        ways.processes, ways.threads, " --threads 3", command.full and " --threads 2" or nil,
      }
      local one = { both[ranks == 3 and 2 or 1] }
      for number, way in ipairs(ranks == 2 and all or command.full and both or one) do
        -- All of it runs in one of the ways, and in the others the training that the hash is of.
        local rest = number > 1 and not command.full and " hash_only=true" or ""
        hashes[command.weights("ddp", ranks .. way .. rest)] = true
      end
      local first = next(hashes)
      assert.is_nil(next(hashes, first))
    end)
  end

  -- golden.data has 2 and 3 processes.
  for name, way in pairs(command.full and ways or { threads = ways.threads }) do
    for ranks = command.full and 2 or 4, 4 do
      it(("agrees with PyTorch on %d ranks as %s"):format(ranks, name), function()
        local tests = command.source .. "/tests"
        local out = command.succeed(folder, ("run '%s/dist/golden.lua' -n %d%s \z
          folder='%s/golden/data'"):format(tests, ranks, way, tests))
        for rank = 0, ranks - 1 do
          assert.truthy(out:find(("rank %d agrees"):format(rank), 1, true), out)
        end
        assert.truthy(out:find "models +%d+ cases, 0 failures", out)
      end)
    end
  end
end)

describe("recipes", function()
  local text = "data='" .. command.source .. "/README.md'"

  it("accumulate passes on two ranks as on one", function()
    local arguments = ("run '%s/recipes/gpt2.lua' %s bytes=true vocab=256 length=16 batch=4 \z
      accumulate=2 steps=3 dtype=f32 %s"):format(command.source, text,
      "model.layers=1 model.width=32 model.heads=2 every.eval=0 every.sample=0 every.save=0")
    assert.same(command.losses(command.succeed(folder, arguments .. " run=one")),
      command.losses(command.succeed(folder, arguments .. " run=two -n 2")))
  end)

  it("ddp_by_hand trains on two ranks as on one", function()
    local arguments = ("run '%s/recipes/ddp_by_hand.lua' %s steps=3 length=16")
      :format(command.source, text)
    local one, two = command.succeed(folder, arguments .. " run=one"),
      command.succeed(folder, arguments .. " run=two -n 2 --thread-ranks")
    assert.same(command.losses(one), command.losses(two))
    assert.truthy(two:match "validation loss [%d.]+ nats", two)
    command.succeed(folder, arguments .. " run=three -n 2 hook=bf16_compress")
  end)
end)

-- Temporaries of a hook, casts, rebuilt buckets, accumulated passes: on the sim device all of it
-- needs the same memory and sends the same bytes as with data.
it("check tells peak memory and bytes of ddp exactly", function()
  local script = command.write(folder .. "/script.lua", [[
    local ms = require "moonshard"
    local function link(bucket, next)
      local twice = bucket:buffer() * 2
      return next(bucket):and_then(function(reduced) return reduced + twice end)
    end
    local model = ms.ddp(ms.nn.gpt2 { vocab = 64, context = 16, layers = 2, width = 32, heads = 4 },
      { bucket_bytes = { 8000, 30000 }, comm_hook = ms.hooks.chain { link, "bf16_compress" } })
    local optimizer = ms.optim.adamw(model)
    local x = ms.randint { 4, 16, low = 0, high = 64 }
    for _ in ms.steps(4) do
      model:accumulate(2, function() model(x):cross_entropy(x):backward() end)
      model:clip_grad_norm(1)
      optimizer:step()
    end
    local link = model:stats()
    io.stdout:write(("%d %d %d %d\n"):format(ms.memory().peak, link.payload_bytes, link.wire_bytes,
      model:stats().collectives.all_reduce))
  ]])
  for name, way in pairs(ways) do
    local fewest = (command.full or name == "processes") and 2 or 3
    for ranks = fewest, command.full and 3 or fewest do
      local core = require "moonshard.core"
      local told = core.json_decode(
        command.succeed(folder, ("check '%s' -n %d --json"):format(script, ranks)):match "({.*})")
      local line = ("%d %d %d %d\n")
        :format(told.peak_bytes[1], told.payload_bytes, told.wire_bytes, #told.collectives)
      assert.equal(line:rep(ranks),
        (command.succeed(folder, ("run '%s' -n %d%s"):format(script, ranks, way))))
    end
  end
end)

describe("a job whose ranks do not agree", function()
  -- Runs a script on 3 ranks; returns the exit code and all output.
  local function fails(text, way)
    local script = command.write(folder .. "/script.lua",
      'local ms = require "moonshard"\nlocal rank = ms.rank()\n' .. text)
    local code, out, err = command.run(folder, ("run '%s' -n 3%s"):format(script, way))
    assert.not_equal(0, code)
    return code, out .. err
  end

  for name, way in pairs(ways) do
    -- Every second case as processes and the others as threads, or in long ranges all as both.
    local number = name == "threads" and 1 or 0
    local function it_as(what, test)
      number = number + 1
      if command.full or number % 2 == 0 then it(what .. ", as " .. name, test) end
    end

    it_as("is told the first parameter that differs", function()
      local code, text = fails([[
        local model = ms.nn.MLP(4, rank == 2 and 9 or 8)
        ms.ddp(model)
      ]], way)
      assert.equal(5, code, text)
      assert.truthy(text:find("ranks have different models: parameter 1 is", 1, true), text)
      assert.truthy(text:find("on rank 0, 1", 1, true) and text:find("on rank 2", 1, true), text)
    end)

    it_as("ends for all when a hook raises on one", function()
      local code, text = fails([[
        local model = ms.ddp(ms.nn.Linear(4, 4), { comm_hook = function(bucket, next)
          if rank == 1 then error "not today" end
          return next(bucket)
        end })
        for step = 1, 3 do model(ms.ones { 2, 4 }):sum():backward() end
        ms.synchronize()
      ]], way)
      assert.equal(1, code, text)
      assert.truthy(text:find("not today", 1, true) and text:find("rank 1", 1, true)
        and text:find('bucket 0 "weight"', 1, true), text)
    end)

    it_as("ends for all when a hook returns something wrong on one", function()
      local code, text = fails([[
        local model = ms.ddp(ms.nn.Linear(4, 4), { comm_hook = function(bucket, next)
          return rank == 2 and bucket:buffer():to "bf16" or next(bucket)
        end })
        model(ms.ones { 2, 4 }):sum():backward()
        ms.synchronize()
      ]], way)
      assert.equal(1, code, text)
      assert.truthy(text:find("[20] bf16", 1, true) and text:find("[20] f32", 1, true)
        and text:find("rank 2", 1, true), text)
    end)

    it_as("ends for all when a parameter got no gradient on one", function()
      local _, text = fails([[
        local Both = ms.nn.class "Both"
        function Both:init() self.a, self.b = ms.nn.Linear(4, 4), ms.nn.Linear(4, 4) end
        function Both:forward(x) return rank == 1 and self.a(x) or self.b(self.a(x)) end
        local model = ms.ddp(Both())
        for step = 1, 3 do model(ms.ones { 2, 4 }):sum():backward() end
        ms.synchronize()
      ]], way)
      assert.truthy(text:find("no gradient came for 'b.weight', 'b.bias'", 1, true), text)
    end)
  end
end)
