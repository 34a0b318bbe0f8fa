-- moonshard check: its predictions equal the real run, to the byte.
local command = require "command"
local core = require "moonshard.core"

local TEXT = ("The quick brown fox jumps over the lazy dog. "):rep(60)

-- A recipe that prints its peak when another one has ended.
local WITH_PEAK = [[
dofile(os.getenv "RECIPE")
print("peak " .. require "moonshard".memory().peak)
]]

describe("moonshard check", function()
  local folder
  before_each(function()
    folder = command.folder()
    command.write(folder .. "/with_peak.lua", WITH_PEAK)
  end)
  after_each(function() command.remove(folder) end)

  local function checked(recipe, options)
    local out = command.succeed(folder, ("check '%s' --json %s"):format(recipe, options or ""))
    assert.equal(1, select(2, out:gsub("\n", "")), "one line of JSON: " .. out)
    return assert(core.json_decode(out))
  end

  -- Runs the recipe, and checks it; both peaks must be equal. Afterwards the folder must have only
  -- the files of the real run.
  local function same_peak(recipe, options)
    local before = core.list(folder)
    local predicted = checked(recipe, options)
    local after = {}
    for _, name in ipairs(core.list(folder)) do
      if name ~= ".stdout" and name ~= ".stderr" then after[#after + 1] = name end
    end
    local visible = {}
    for _, name in ipairs(before) do
      if name ~= ".stdout" and name ~= ".stderr" then visible[#visible + 1] = name end
    end
    assert.same(visible, after)
    local out = command.succeed(folder, "run with_peak.lua " .. (options or ""),
      ("RECIPE='%s'"):format(recipe))
    local real = math.tointeger(tonumber(out:match "peak (%d+)"))
    assert.equal(real, predicted.peak_bytes[1])
    return real
  end

  it("says what a run takes and sends, and nothing moves with one rank", function()
    command.write(folder .. "/r.lua", [[require "moonshard".zeros { 1000 }]])
    local result = checked(folder .. "/r.lua")
    assert.equal(4000, result.peak_bytes[1])
    assert.equal(1, #result.peak_bytes)
    assert.equal(1, result.ranks)
    assert.equal(0, result.payload_bytes)
    assert.equal(0, result.wire_bytes)
    assert.same({}, result.groups)
    assert.same({}, result.collectives)
    assert.matches("^%x+$", result.order_hash)
    assert.matches('"collectives":%[%]', command.succeed(folder, "check r.lua --json"))
    assert.matches("rank 0 .*4000 bytes", command.succeed(folder, "check r.lua"))
  end)

  -- More than the peak, and not exact: blocks are freed at other times in a real run.
  it("and about what a process takes beside", function()
    command.write(folder .. "/r.lua", [[
      local ms = require "moonshard"
      local model = ms.nn.gpt2 { vocab = 256, context = 16, layers = 2, width = 32, heads = 2 }
      local optimizer = ms.optim.adamw(model, { lr = 1e-3 })
      for _ in ms.steps(3) do
        model(ms.zeros { 4, 16, dtype = "i64" }):sum():backward()
        optimizer:step()
      end
      ms.synchronize()
      io.stdout:write(("reserved %d\n"):format(ms.memory().reserved))
    ]])
    local result = core.json_decode((command.succeed(folder, "check r.lua --json")):match "{.*}")
    assert.is_true(result.reserved_bytes[1] >= result.peak_bytes[1])
    local reserved = tonumber(command.succeed(folder, "run r.lua"):match "reserved (%d+)")
    assert.is_true(reserved < 2 * result.reserved_bytes[1]
      and 2 * reserved > result.reserved_bytes[1])
    assert.matches("a process needs more than that: its pool reserves about %d+ MiB",
      (command.succeed(folder, "check r.lua -n 3")))
  end)

  it("gpt_bytes, with validation, text and checkpoints", function()
    command.write(folder .. "/text", TEXT)
    local options = "data=text run=out steps=7 batch=4 length=32 dtype=bf16 model.layers=2 \z
      model.width=32 model.heads=2 every.eval=3 every.sample=3 every.save=2"
    local recipe = command.source .. "/recipes/gpt_bytes.lua"
    local peak = same_peak(recipe, options)
    local metrics = command.metrics(folder .. "/out")
    assert.equal(peak, metrics[#metrics].peak_bytes)
    -- A resumed run holds the loaded state besides the model; and a second run does not measure the
    -- peak first.
    same_peak(recipe, options:gsub("steps=7", "steps=9") .. " resume=auto")
    for _, dtype in ipairs { "f32", "f16" } do
      same_peak(recipe, options:gsub("run=out", "run=" .. dtype) .. " dtype=" .. dtype)
    end
  end)

  it("mnist", function()
    local pixels = {}
    for i = 1, 60 * 28 * 28 do pixels[i] = string.char(i * 7 % 256) end
    command.write(folder .. "/images-idx3-ubyte",
      ("\0\0\8\3" .. (">I4I4I4"):pack(60, 28, 28)) .. table.concat(pixels))
    command.write(folder .. "/labels-idx1-ubyte",
      "\0\0\8\1" .. (">I4"):pack(60) .. ("\0\1\2\3\4\5\6\7\8\9"):rep(6))
    same_peak(command.source .. "/recipes/mnist.lua", "data=. run=out steps=5 batch=10")
  end)

  -- A token shard of llm.c.
  local function shard(name, count, vocab)
    local tokens = {}
    for i = 1, count do tokens[i] = ("<I2"):pack(i * i * 7 % vocab) end
    command.write(folder .. "/" .. name,
      ("<I4I4I4"):pack(20240520, 1, count) .. ("\0"):rep(1012) .. table.concat(tokens))
  end

  it("gpt2 and llama on token shards, from scratch and from weights", function()
    shard("a.bin", 3000, 200)
    shard("b.bin", 3000, 200)
    shard("held-out", 3000, 200)
    local options = "data='*.bin' steps=4 dtype=bf16 batch=2 accumulate=2 length=32 vocab=256 \z
      every.eval=2 every.save=2 model.layers=2 model.width=64"
    local gpt2, llama = command.source .. "/recipes/gpt2.lua",
      command.source .. "/recipes/llama.lua"
    same_peak(gpt2, options .. " model.heads=2 run=gpt2 recompute=true")
    same_peak(gpt2, options .. " model.heads=2 run=gpt2-rest recompute=matmul")
    same_peak(gpt2, options .. " weights=gpt2/model run=gpt2-more valid=held-out")
    same_peak(llama, options .. " run=llama")
    same_peak(gpt2, options .. " model.heads=2 run=gpt2-packed packed=true end_of_text=7")
    same_peak(llama, options .. " run=llama-packed packed=true end_of_text=7 recompute=true")
    for _, file in ipairs { gpt2, llama } do
      same_peak(file, options .. " model.heads=4 every.eval=0 every.save=0 run=bare")
    end
    same_peak(llama,
      options:gsub("%*.bin", "a.bin") .. " weights=llama/model run=llama-more bytes=true")
  end)

  it("every size of gpt2 within seconds", function()
    shard("a.bin", 300000, 50257)
    for size, parameters in pairs { ["124M"] = 124e6, ["1558M"] = 1557e6 } do
      local result = checked(command.source .. "/recipes/gpt2.lua",
        "data=a.bin steps=3 size=" .. size)
      assert.is_true(result.peak_bytes[1] > 16 * parameters)
    end
  end)

  it("an optimizer in Lua", function()
    same_peak(command.source .. "/recipes/optim/lion.lua", "steps=4 width=16")
  end)

  it("a loop written by hand, with what is dropped, kept, read and cast", function()
    command.write(folder .. "/hand.lua", [[
      local ms = require "moonshard"
      local cfg = ms.config { steps = 5 }
      local model = ms.nn.Sequential(ms.nn.Linear(64, 256), ms.nn.GELU(), ms.nn.Linear(256, 64))
      local optimizer = ms.optim.sgd(model, { momentum = 0.9 })
      local kept = {}
      for _ = 1, 400 do ms.rand { 256, 64 } end  -- garbage outside of steps: 25 MB
      for step in ms.steps(cfg.steps) do
        local x = ms.randn { 64, 64 }
        local loss = ms.autocast("bf16", function()
          return ms.recompute(model, x):to("f32"):mse_loss(x)
        end)
        kept[#kept + 1] = x:t():keep()
        loss:backward()
        model:clip_grad_norm(1)
        optimizer:step()
        ms.no_grad(function() for _ = 1, 300 do model(x) end end)
        x:t():to_table()
        ms.metric "loss":push(loss)
      end
      ms.safetensors.save("out.safetensors", { a = kept[1], b = kept[2] })
      ms.checkpoint.save("ckpt", { model = model, optimizer = optimizer })
    ]])
    same_peak(folder .. "/hand.lua")
  end)

  it("prints no lines of training, and what the recipe prints goes to stderr", function()
    command.write(folder .. "/r.lua", [[
      local ms = require "moonshard"
      print("mine", 1)
      io.write "too\n"
      ms.log("a line of %d", 2)
      local report = ms.report { run = "out" }
      for _ in ms.steps(3) do report:step { loss = ms.ones {} } end
      report:close()
    ]])
    local out, err = command.succeed(folder, "check r.lua --json")
    assert.matches("^{[^\n]*}\n$", out)
    assert.equal("mine\t1\ntoo\n", err)
    assert.is_nil(command.read(folder .. "/out/metrics.jsonl"))
  end)

  it("never allocates the data: a model of 124M parameters in less than 300 MiB", function()
    command.write(folder .. "/big.lua", [[
      local ms = require "moonshard"
      local model = ms.nn.gpt2 {
        vocab = 50304, context = 1024, layers = 12, width = 768, heads = 12,
      }
      local optimizer = ms.optim.adamw(model)
      for _ in ms.steps(3) do
        local x = ms.randint { 4, 1024, low = 0, high = 50257 }
        model(x):cross_entropy(x):backward()
        optimizer:step()
      end
      model:save "model"
      ms.checkpoint.save("ckpt", { model = model, optimizer = optimizer })
      print(io.open "/proc/self/status":read "a":match "VmHWM:%s+(%d+)")
    ]])
    local out, err = command.succeed(folder, "check big.lua --json")
    -- Weights, gradients and two moments alone are 4 x 4 bytes x 124M.
    assert.is_true(core.json_decode(out).peak_bytes[1] > 16 * 124000000)
    -- Sanitizers keep shadow memory of their own.
    if (os.getenv "MOONSHARD_SANITIZE" or "") == "" then
      assert.is_true(tonumber(err:match "%d+") < 300 * 1024, err)
    end
  end)

  it("says whether a limit holds", function()
    command.write(folder .. "/r.lua",
      [[local ms = require "moonshard" A, B = ms.zeros { 1 << 20 }, ms.zeros { 1 << 20 }]])
    assert.equal(0, (command.run(folder, "check r.lua --memory 9000000")))
    local code, _, err = command.run(folder, "check r.lua --memory 6000000")
    assert.equal(8, code)
    assert.matches("no memory for 4194304 bytes: live 4194304", err)
  end)

  local RATES = [[return {
    flops_per_s = { f32 = %s, f16 = 1e12, bf16 = 1e12 }, bytes_per_s = %s,
    links = {
      { ranks = 2, latency_ns = 1000, bytes_per_s = 1e11 },
      { latency_ns = 1e4, bytes_per_s = %s },
    },
  }]]

  -- A recipe whose policy steps buckets early that are reduced before backward ends, and prints the
  -- moments.
  local PLANNED = [[
    local ms = require "moonshard"
    local o = ms.config { overlap = "classic" }
    local plan = ms.overlap { name = "tell", plan = function(view)
      local plan, early = {}, 0
      for i, b in ipairs(view.buckets) do
        local hidden = b.ready_ms + b.reduce_ms < view.backward_ms
        plan[i] = { bucket = b.index, step = hidden and "on_reduced" or "after_backward" }
        early = early + (hidden and 1 or 0)
      end
      print(("early %d of %d"):format(early, #view.buckets))
      return plan
    end }
    local model = ms.ddp(ms.nn.gpt2 { vocab = 64, context = 32, layers = 2, width = 32, heads = 2 },
      { bucket_bytes = 20000 })
    local optimizer = ms.optim.adamw(model)
    optimizer:overlap(model, o.overlap == "tell" and plan or o.overlap)
    for _ in ms.steps(5) do
      model(ms.randint { 4, 32, high = 64 }):cross_entropy(ms.randint { 4, 32, high = 64 })
        :backward()
      optimizer:step()
    end
  ]]

  it("estimates times from rates, on which nothing else depends", function()
    command.write(folder .. "/p.lua", PLANNED)
    command.write(folder .. "/slow.lua", RATES:format("1e6", "1e6", "1e3"))
    command.write(folder .. "/fast.lua", RATES:format("1e15", "1e15", "1e12"))
    local plain = checked(folder .. "/p.lua", "-n 4")
    assert.same({ rates = "built in", plans = {} }, plain.estimated_times)
    for _, name in ipairs { "slow", "fast" } do
      local file = ("%s/%s.lua"):format(folder, name)
      local other = checked(folder .. "/p.lua", "-n 4 --rates " .. file)
      assert.equal(file, other.estimated_times.rates)
      other.estimated_times = plain.estimated_times
      assert.same(plain, other)
    end
  end)

  it("estimates the time of a step, from the rates of a GPU or of a file", function()
    -- A product of 2 * 512^3 FLOPs, and as much memory as three of its matrices in each step.
    command.write(folder .. "/p.lua", [[
      local ms = require "moonshard"
      local x = ms.randn { 512, 512, seed = 1 }:keep()
      for _ in ms.steps(3) do x:matmul(x) end]])
    local flops = 2 * 512 ^ 3
    local function step_ms(switches)
      return checked(folder .. "/p.lua", switches).estimated_times.step_ms
    end
    command.write(folder .. "/plain.lua", RATES:format("1e9", "1e12", "1e9"))
    assert.near(flops / 1e9 * 1e3, step_ms("--rates " .. folder .. "/plain.lua"), 1e-3)
    command.write(folder .. "/shares.lua", (RATES:format("1e9", "1e12", "1e9"):gsub("return {", [[
      return { task_ns = 5e6, shares = { matmul = { flops = 0.5 }, other = { bytes = 0.1 } },]])))
    assert.near(2 * flops / 1e9 * 1e3 + 5, step_ms("--rates " .. folder .. "/shares.lua"), 1e-3)
    -- Without rates of this machine no time is told. A GPU is taken to be an H200.
    assert.is_nil(step_ms "")
    local h200 = step_ms "--device cuda"
    assert.equal(h200, step_ms "--device cuda --rates h200")
    assert.equal(h200, step_ms "--rates h200")
    assert.is_true(h200 > flops / 67e12 * 1e3 and h200 < 0.1, h200)
    assert.matches("a step takes some [%d.]+ ms by the rates of h100, an estimate",
      command.succeed(folder, "check p.lua --device cuda --rates h100"))
    assert.is_nil(command.succeed(folder, "check p.lua"):match "a step takes")
  end)

  it("estimates 124M's step on an H200 as a model of its bytes and products does", function()
    -- Half to two times what PyTorch compiled was measured at, 123 ms (tests/bench/results/h200).
    command.write(folder .. "/p.lua", [[
      local ms = require "moonshard"
      local model = ms.nn.gpt2 {
        vocab = 50304, context = 1024, layers = 12, width = 768, heads = 12,
      }
      model:to "bf16"
      local optimizer = ms.optim.adamw(model)
      local x = ms.randint { 64, 1024, high = 50304 }:keep()
      for _ in ms.steps(3) do
        model(x):cross_entropy(x):backward()
        optimizer:step()
      end]])
    local ms_of_step = checked(folder .. "/p.lua", "--device cuda").estimated_times.step_ms
    assert.is_true(ms_of_step > 80 and ms_of_step < 160, ms_of_step)
  end)

  it("says which plans were made from times", function()
    command.write(folder .. "/p.lua", PLANNED)
    -- Links that are slow compared with arithmetic, and fast links.
    command.write(folder .. "/hidden.lua", RATES:format("1e6", "1e15", "1e12"))
    command.write(folder .. "/late.lua", RATES:format("1e15", "1e15", "1e3"))
    for name, pattern in pairs { hidden = "early [1-9]%d* of", late = "early 0 of" } do
      local code, out, err = command.run(folder,
        ("check p.lua -n 4 overlap=tell --json --rates %s.lua"):format(name))
      assert.equal(0, code, err)
      assert.matches(pattern, err)
      local times = assert(core.json_decode(out)).estimated_times
      assert.equal(name .. ".lua", times.rates)
      assert.equal(1, #times.plans)
      assert.matches("^overlap plan tell %(.*p%.lua:3%)$", times.plans[1])
    end
    local text = command.succeed(folder, "check p.lua -n 4 overlap=early_where_hidden")
    assert.matches("estimated times %(rates: built in%), .* overlap plan early_where_hidden", text)
    assert.is_nil(command.succeed(folder, "check p.lua -n 4 overlap=in_backward")
      :match "estimated")
  end)

  it("refuses rates that are none", function()
    command.write(folder .. "/r.lua", [[require "moonshard".zeros { 1 }]])
    local good = RATES:format("1e12", "1e12", "1e9")
    local function refused(text, pattern, name)
      name = name or "rates.lua"
      command.write(folder .. "/" .. name, text)
      for _, ranks in ipairs { "", " -n 2" } do
        local code, out, err = command.run(folder, ("check r.lua --rates %s%s"):format(name, ranks))
        assert.equal(3, code, err)
        assert.equal("", out)
        assert.truthy(err:find("rates file " .. name, 1, true), err)
        assert.matches(pattern, err)
      end
    end
    refused("return 5", "returns no table")
    refused("return {", "expected")
    refused("error 'no'", "attempt to call a nil value")
    refused("{ 1 ", "JSON", "rates.json")
    refused((good:gsub("flops_per_s", "flops_per_S")), "did you mean 'flops_per_s'")
    refused((good:gsub("bf16 = 1e12", "")), "flops_per_s.bf16 must be a number; it is missing")
    refused((good:gsub("f32 = 1e12", "f32 = 0")), "flops_per_s must be above 0")
    refused((good:gsub("bytes_per_s = 1e12", "bytes_per_s = 'much'")),
      "bytes_per_s .* it is string")
    refused((good:gsub("latency_ns = 1e4", "latency_ns = -1")), "latency_ns must be 0 or more")
    refused((good:gsub("ranks = 2, ", "")), "each level but the last has a number of ranks")
    refused((good:gsub("links = %b{}", "links = {}")), "links must have 1 to 8 levels")
    refused((good:gsub("links =", "task_ns = -1, links =")), "task_ns must be 0 or more")
    local shares = {
      ["5"] = "shares must be a table; it is number",
      ["{ matmul = 1 }"] = "shares of 'matmul' must be a table, not a number",
      ["{ {} }"] = "shares are by the names of tasks, not by a number",
      ["{ matmul = { flop = 1 } }"] = "did you mean 'flops'",
      ["{ matmul = { flops = 1.5 } }"] = "shares must be above 0, and 1 at most",
      ["{ matmul = { bytes = 'all' } }"] = "bytes must be a number; it is string",
    }
    for text, pattern in pairs(shares) do
      refused((good:gsub("links =", "shares = " .. text .. ", links =")), pattern)
    end
    refused((good:gsub("links = %b{}", "links = { 1 }")), "a list of tables, not of number")
    local code, _, err = command.run(folder, "check r.lua --rates none.lua")
    assert.equal(3, code)
    assert.matches("none.lua", err)
    command.write(folder .. "/rates.lua", good)
    code, _, err = command.run(folder, "check r.lua --device cuda --rates h300")
    assert.equal(3, code)
    assert.matches("rates file h300: .* known: h100, h200", err)
    code, _, err = command.run(folder, "run r.lua --rates rates.lua")
    assert.equal(2, code)
    assert.matches("only the sim device", err)
    command.succeed(folder, "run r.lua --device sim --rates rates.lua")
    command.write(folder .. "/good.json", [[{
      "flops_per_s": { "f32": 1e9, "f16": 1e9, "bf16": 2e9 }, "bytes_per_s": 1e10,
      "enqueue_ns": 500, "links": [{ "latency_ns": 0, "bytes_per_s": 1e9 }] }]])
    command.succeed(folder, "check r.lua --rates good.json")
    local guide = command.read(command.source .. "/recipes/README.md")
    command.write(folder .. "/guide.lua", "return " .. assert(guide:match "\n    return (%b{})"))
    command.succeed(folder, "check r.lua --rates guide.lua")
  end)

  it("refuses what it cannot do", function()
    command.write(folder .. "/r.lua", [[require "moonshard".config { steps = 1 }]])
    local code, _, err
    assert.equal(2, (command.run(folder, "check r.lua --device cpu")))
    assert.equal(2, (command.run(folder, "check")))
    code, _, err = command.run(folder, "check r.lua stepps=2")
    assert.equal(2, code)
    assert.matches("did you mean 'steps'", err)
    command.write(folder .. "/bad.lua", [[error "no"]])
    code, _, err = command.run(folder, "check bad.lua")
    assert.equal(1, code)
    assert.matches("bad.lua:1: no", err)
  end)
end)
