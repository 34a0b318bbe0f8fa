-- The methods of recipes/hooks: a tiny GPT trains by each about as well as by plain means with the
-- same optimizer, and each sends exactly the bytes of its formula. Each rank runs methods.lua,
-- which also makes the text.
local command = require "command"
local full = os.getenv "MOONSHARD_TEST_FULL" == "1"
local folder = command.folder()
teardown(function() command.remove(folder) end)

local ranks, steps = 2, full and 200 or 60
local dimensions = full and "width=64 context=32 batch=64" or "width=32 context=16 batch=16"

-- Runs once for each set of arguments: { first, last, step, sent, shapes, buckets }.
local known = {}
local function run(method, optimizer, seed, way)
  local key = table.concat({ method, optimizer, seed, way }, " ")
  if not known[key] then
    local out = command.succeed(folder,
      ("run '%s/tests/dist/methods.lua' %s method=%s optimizer=%s seed=%d steps=%d %s source='%s'")
        :format(command.source, way, method, optimizer, seed, steps, dimensions, command.source))
    local first, last, step, sent = out:match "first (%S+) last (%S+) step (%d+) sent (%d+)"
    local shapes, buckets = {}, {}
    for shape in out:match("shapes ([^\n]*)"):gmatch "%S+" do
      local sizes = {}
      for size in shape:gmatch "%d+" do sizes[#sizes + 1] = math.tointeger(size) end
      shapes[#shapes + 1] = sizes
    end
    for count in out:match("buckets ([^\n]*)"):gmatch "%d+" do
      buckets[#buckets + 1] = math.tointeger(count)
    end
    known[key] = {
      first = tonumber(first), last = tonumber(last), step = math.tointeger(step),
      sent = math.tointeger(sent), shapes = shapes, buckets = buckets,
    }
  end
  return known[key]
end

local function product(sizes)
  local count = 1
  for _, size in ipairs(sizes) do count = count * size end
  return count
end

local function ceil(a, b) return (a + b - 1) // b end

local function each_bucket(f)
  return function(got)
    local sum = 0
    for _, n in ipairs(got.buckets) do sum = sum + f(n) end
    return sum
  end
end

-- Two exchanges: a rank sends all parts once, then its own part of the mean.
local function both_ways(bytes_of)
  return each_bucket(function(n)
    local chunk = ceil(n, ranks * 256) * 256
    return (ranks + 1) * bytes_of(chunk)
  end)
end

local function powersgd(got)
  local sum = 0
  for _, sizes in ipairs(got.shapes) do
    local rows, columns = sizes[1], product(sizes) // sizes[1]
    local r = math.min(rows, columns, 8)
    sum = sum
      + 4 * ((rows + columns) * r * 2 < rows * columns and (rows + columns) * r or rows * columns)
  end
  return sum
end

local function whole(got)
  local sum = 0
  for _, sizes in ipairs(got.shapes) do sum = sum + 4 * product(sizes) end
  return sum
end

-- How many of the steps end a period.
local function rounds(period) return steps // period end

-- Codes with a scale for each `block` of n numbers.
local function codes(n, bits, block) return 4 * ceil(n, block) + ceil(n * bits, 8) end

-- 4 bits to the rank that adds up, 8 bits of the mean to all.
local four_bits = each_bucket(function(n)
  local part = ceil(n, ranks)
  return ranks * codes(part, 4, 256) + codes(part, 8, 256)
end)

-- step: bytes of the last step; sent: of all steps. limit: of the loss, against plain means.
local methods = {
  powersgd = { limit = 1.03, step = powersgd },
  dgc = {
    limit = 1.03,
    optimizer = "momentum",
    step = each_bucket(function(n) return math.ceil(n * 0.1) * (4 + 4) end),
  },
  onebit_adam = { limit = 1.03, step = both_ways(function(n) return n // 256 * 4 + n // 8 end) },
  int8_all_to_all = { limit = 1.03, step = both_ways(function(n) return n // 256 * 4 + n end) },
  demo = { limit = 1.03, step = each_bucket(function(n) return ceil(n, 64) * 40 * (4 + 1) end) },
  loco = { limit = 1.03, step = four_bits },
  zeropp = { limit = 1.03, step = four_bits },
  random_k = {
    limit = 1.03,
    optimizer = "sgd",
    step = each_bucket(function(n) return math.ceil(n * 0.7) * 4 end),
  },
  diloco = { limit = 1.10, sent = function(got) return rounds(steps // 20) * whole(got) end },
  -- Fragment i begins (i - 1) thirds of a period later.
  streaming_diloco = { limit = 1.10, sent = function(got)
    local period, sum, fragment_of = steps // 20, 0, { 0, 0, 0 }
    for i, sizes in ipairs(got.shapes) do
      local at = i <= 2 and 1 or i <= 14 and 2 or 3
      fragment_of[at] = fragment_of[at] + 4 * product(sizes)
    end
    for i, bytes in ipairs(fragment_of) do
      sum = sum + bytes * ((steps - period - (i - 1) * period // 3) // period + 1)
    end
    return sum
  end },
  local_sgd = { limit = 1.10, sent = function(got)
    local often, seldom, sum = steps // 30, steps // 15, 0
    for step = 1, steps do if step % often == 0 or step % seldom == 0 then sum = sum + 1 end end
    return sum * whole(got)
  end },
  slowmo = { limit = 1.10, sent = function(got) return rounds(steps // 30) * whole(got) end },
}

-- Of sharded models. A block gathers its n numbers of each rank for forward and for backward (once
-- only with again = false), the root once; ranks also tell each other which parameters have
-- gradients.
local function each_unit(gathered, reduced, again)
  return function(got)
    local sum = 4 * #got.shapes
    for i, n in ipairs(got.buckets) do
      sum = sum + (i == 1 and 1 or again == false and 1 or 2) * gathered(n) + ranks * reduced(n)
    end
    return sum
  end
end
local function plain_numbers(n) return 4 * n end
local function four(n) return codes(n, 4, 256) end
local sharded = {
  loco = { limit = 1.03, step = each_unit(plain_numbers, four) },
  zeropp = { limit = 1.03, step = each_unit(function(n) return codes(n, 8, 256) end, four) },
  sdp4bit = { limit = 1.03, step = each_unit(function(n) return codes(n, 4, 32) end,
    function(n) return codes(ceil(n, 32) * 32, 4, 128) end, false) },
}

describe("a method of recipes/hooks", function()
  for name, method in pairs(sharded) do
    it("trains as well as plain means do in a sharded model: " .. name, function()
      local way = ("-n %d --thread-ranks shard=full_shard"):format(ranks)
      local plain, got = run("none", "adamw", 1, way), run(name, "adamw", 1, way)
      assert.near(plain.first, got.first, 1e-3)
      assert.is_true(got.last <= method.limit * plain.last,
        ("loss %.4f, plain %.4f"):format(got.last, plain.last))
      assert.equal(each_unit(plain_numbers, plain_numbers)(plain), plain.step)
      assert.equal(method.step(got), got.step)
    end)
  end

  for name, method in pairs(methods) do
    for seed = 1, full and 3 or 1 do
      it(("trains as well as plain means do: %s, seed %d"):format(name, seed), function()
        local way = ("-n %d --thread-ranks"):format(ranks)
        local plain, got = run("none", method.optimizer or "adamw", seed, way),
          run(name, method.optimizer or "adamw", seed, way)
        assert.equal(plain.first, got.first)
        assert.is_true(got.last <= method.limit * plain.last,
          ("loss %.4f, plain %.4f"):format(got.last, plain.last))
        assert.is_true(got.last < 0.7 * got.first,
          ("loss %.4f of %.4f"):format(got.last, got.first))
        if method.step then
          assert.equal(method.step(got), got.step)
        else
          assert.equal(method.sent(got), got.sent)
        end
      end)
    end
  end

  it("does the same on ranks that are processes", function()
    for _, name in ipairs { "int8_all_to_all", "streaming_diloco" } do
      assert.same(run(name, "adamw", 1, ("-n %d --thread-ranks"):format(ranks)),
        run(name, "adamw", 1, ("-n %d"):format(ranks)))
    end
  end)

  it("is a short file that names its paper", function()
    local listing = io.popen(("ls '%s/recipes/hooks'"):format(command.source))
    local found, others = 0, command.read(command.source .. "/tests/dist/local_methods_spec.lua")
    for file in listing:lines() do
      if file:match "%.lua$" then
        found = found + 1
        local lines, head = 0, ""
        for line in io.lines(("%s/recipes/hooks/%s"):format(command.source, file)) do
          lines = lines + 1
          if lines <= 8 then head = head .. line end
          assert.is_true(#line <= 120, ("%s:%d has %d characters"):format(file, lines, #line))
        end
        assert.is_true(lines <= 150, file)
        assert.matches('".+", 20%d%d', head:gsub("%s*%-%-%s*", " "))
        local name = file:match "(.*)%.lua"
        assert.truthy(methods[name] or sharded[name] or name == "dion"
          or others:find(("\n  %s = {"):format(name), 1, true), file .. " has no test")
      end
    end
    listing:close()
    assert.is_true(found >= 10)
  end)
end)

describe("methods at their edges:", function()
  local function recipe(text, ...)
    command.write(folder .. "/edge.lua", text)
    return command.run(folder,
      ("run edge.lua -n 2 --thread-ranks folder='%s/recipes/hooks' %s"):format(command.source, ...))
  end

  it("links take any model: parameters without dimensions or numbers, 16 bits, a bucket for each; \z
    and no options", function()
    local code, _, err = recipe([[
      local ms = require "moonshard"
      local o = ms.config { folder = "" }
      local Odd = ms.nn.class "Odd"
      function Odd:init()
        self.first, self.inner, self.scale = ms.nn.Parameter(ms.zeros { 0 }), ms.nn.Linear(16, 16),
          ms.nn.Parameter(ms.ones {})
        self.last = ms.nn.Parameter(ms.zeros { 0, 3 })
      end
      function Odd:forward(x)
        return self.inner(x + self.last:sum()) * self.scale + self.first:sum()
      end
      for _, dtype in ipairs { "f32", "bf16", "f16" } do
        for _, name in ipairs {
          "powersgd", "demo", "dgc", "random_k", "int8_all_to_all", "onebit_adam",
          "loco", "zeropp",
        } do
          for _, bytes in ipairs { 1, 1 << 20 } do
            local made = dofile(("%s/%s.lua"):format(o.folder, name))(name == "powersgd"
              and { start_step = 0 } or name == "onebit_adam" and { warmup = 2 } or nil)
            local net = ms.ddp(Odd():to(dtype),
              { comm_hook = type(made) == "table" and made.link or made, bucket_bytes = bytes })
            for _ in ms.steps(4) do
              net(ms.ones { 2, 16, dtype = dtype }):sum():backward()
              for _, p in ipairs(net:parameters()) do
                assert(p:grad():is_finite():all():item() and p:grad():dtype() == dtype, name)
              end
            end
            net:unwrap()
          end
        end
      end]], "")
    assert.equal(0, code, err)
  end)

  it("streaming DiLoCo without delay lands at once, and refuses a delay past the next \z
    start", function()
    local text = [[
      local ms = require "moonshard"
      local o = ms.config { folder = "", delay = 0 }
      local model = ms.nn.Linear(4, 4)
      local opt = ms.optim.sgd(model, { lr = 0.1 })
      local outer = dofile(o.folder .. "/streaming_diloco.lua") {
        fragments = { { model } }, period = 2, delay = o.delay, mix = 0, lr = 1, momentum = 0,
      }
      for step in ms.steps(4) do
        model(ms.randn { 2, 4, seed = 10 * step + ms.rank(), per_rank = false })
          :square():sum():backward()
        opt:step()
        outer.after_step(step)
        local all = ms.world():all_gather(model.weight:detach():view(1, -1)):sync()
        assert((step % 2 == 1) == ((all[1] - all[2]):abs():max():item() < 1e-6), "step " .. step)
      end]]
    local code, _, err = recipe(text, "delay=0")
    assert.equal(0, code, err)
    code, _, err = recipe(text, "delay=2")
    assert.equal(1, code)
    assert.matches("delay must be below period", err)
  end)
end)

describe("moonshard bench hooks", function()
  it("compares ways of communicating over links, and tells their bytes", function()
    local core, seen, own = require "moonshard.core", {}, {}
    command.write(folder .. "/third.lua", [[return function(options) return function(bucket)
      local buffer = bucket:buffer()
      local sum = bucket:group():all_reduce(buffer:narrow(1, 1, options.count), "sum")
      return sum:and_then(function() return buffer end)
    end end]])
    -- Ranks meet in each third step, and exchange 7 numbers.
    command.write(folder .. "/own.lua", [[return function(options)
      local ms = require "moonshard"
      ms.nn.alone(options.model, { merge = "mean" })
      return { after_step = function(step)
        if (step + 1) % options.period == 0 then ms.world():all_reduce(ms.ones { 7 }):value() end
      end }
    end]])
    local policy = ("'%s/recipes/policies/late_for_late.lua spare=2'"):format(command.source)
    local sizes = "--steps 1 --width 64 --batch 1"
    local out = command.succeed(folder, "bench hooks --thread-ranks --json " .. sizes
      .. " --links 10Gbit,1us --hook 'third.lua count=5' --local 'own.lua period=3' --overlap "
      .. policy)
    for line in out:gmatch "[^\n]+" do
      local row = core.json_decode(line)
      assert.is_true(row.ms_step_med > 0 and row.link == "10Gbit,1us")
      local is_local = row.hook:find "^local "
      assert.is_true((row.exposed_comm_ms or -1) >= 0 == not is_local)
      assert.is_true((row.ms_step_mean or -1) >= row.ms_step_min == (is_local ~= nil))
      local is_own = row.hook:find "third" or row.hook:find "late_for_late"
      local list = is_own and own or seen
      list[row.hook] = row.payload_bytes
    end
    local third = own["hook third"]
    assert.is_true(third > 0 and third % 20 == 0 and third < 400)
    assert.equal(own["hook third"], own["third + late_for_late"])
    assert.equal(seen.all_reduce, own["overlap late_for_late"])
    local code, _, err = command.run(folder, "bench hooks --hook thrid.lua")
    assert.equal(2, code)
    assert.truthy(err:find("did you mean 'third.lua'?", 1, true), err)
    local plain = seen.all_reduce
    -- The model's weights in each tenth step, and the mean of 28 bytes in each third.
    assert.equal(plain // 10, seen["local local_sgd, every 10"])
    assert.equal(plain // 10, seen["local diloco, every 10"])
    assert.equal(plain // 10, seen["local slowmo, every 10"])
    assert.equal(plain // 10, seen["local streaming_diloco, every 10"])
    assert.equal(9, seen["local own, every 3"])
    assert.same({ 0, plain, plain }, { seen.noop, 2 * seen.bf16_compress, seen["plan deferred"] })
    assert.is_true(seen["powersgd, rank 1"] < plain / 20)
    -- A minute more, for the output.
    if (os.getenv "MOONSHARD_SANITIZE" or "") ~= "" then return end
    out = command.succeed(folder, "bench hooks --thread-ranks --links none " .. sizes)
    assert.matches("without a link ", out)
    seen["local own, every 3"] = nil
    for hook, bytes in pairs(seen) do
      assert.truthy(
        out:find(("\n%s +[%%d.]+ %%( *[-%%d.]+%%) +%d\n"):format(hook:gsub("%p", "%%%0"), bytes)),
        out)
    end
  end)
end)
