-- The cuda device as users see it, over the stand-in for NVIDIA's driver (tests/cuda/driver), whose
-- GPU is the host: what a run there gives, what its errors say. (Values of operators: the unit
-- tests marked "cuda"; missing waits end the process, MOONSHARD_STAND_IN_WATCH.)
local command = require "command"
local core = require "moonshard.core"

local STAND_IN = os.getenv "MOONSHARD_STAND_IN"
local QUIETLY = ("MOONSHARD_CUDA_DRIVER='%s'"):format(STAND_IN)
local ON_GPU = QUIETLY .. " MOONSHARD_STAND_IN_WATCH=stop"
-- Where other tests watch the same tasks.
if command.full then QUIETLY = ON_GPU end

describe("on a GPU", function()
  local folder
  before_each(function() folder = command.folder() end)
  after_each(function() command.remove(folder) end)

  -- A sample runs the model hundreds of times, so only one test has samples.
  local RECIPE = ("'%s/recipes/gpt_bytes.lua' 'data=%s/README.md' model.layers=1 \z
    model.heads=2 %s")
    :format(command.source, command.source, command.full and "length=32 batch=4 model.width=64"
      or "length=16 batch=4 model.width=32")

  -- Trains there, or without settings on the CPU; returns the loss of each step.
  local function train(options, settings)
    if not options:find "every.eval" then options = options .. " every.eval=0 every.sample=0" end
    local out, err = command.succeed(folder, ("run %s %s %s"):format(RECIPE,
      settings and "--device cuda" or "", options), settings)
    local losses = {}
    for _, row in ipairs(command.metrics(folder .. "/" .. options:match "run=(%S+)")) do
      if row.loss then losses[row.step + 1] = row.loss end
    end
    return losses, out .. (err or "")
  end
  -- What a run has saved of its model.
  local function model(run)
    local text = {}
    for _, name in ipairs(core.list(folder .. "/" .. run .. "/model")) do
      text[#text + 1] = command.read(("%s/%s/model/%s"):format(folder, run, name))
    end
    return table.concat(text)
  end

  it("gpt_bytes learns as on a CPU, in each dtype", function()
    for dtype, options in pairs {
      bf16 = command.full and "steps=30" or "steps=14 lr=2e-2", f16 = "steps=8",
      f32 = "steps=8 every.eval=1000 every.sample=1000",
    } do
      local steps = tonumber(options:match "%d+")
      local there = train(("run=gpu-%s dtype=%s %s"):format(dtype, dtype, options), ON_GPU)
      local here = train(("run=cpu-%s dtype=%s %s"):format(dtype, dtype, options))
      assert.equal(steps, #there)
      -- Orders of additions differ, and in 16 bits a product may be rounded to its neighbour: 2^-8
      -- of it. Losses are means over 64 targets or more.
      for step = 1, steps do
        assert.is_true(math.abs(there[step] - here[step]) < (dtype == "f32" and 1e-4 or 2e-3),
          ("%s, step %d: %.5f there, %.5f here"):format(dtype, step, there[step], here[step]))
      end
      if dtype == "bf16" then assert.is_true(there[steps] < there[1] - 0.8) end
    end
  end)

  local COUNTED = QUIETLY .. " MOONSHARD_STAND_IN_CALLS='%s/calls'"
  -- How often a process made each call of the driver.
  local function counts_of()
    local counts = {}
    for name, count in command.read(folder .. "/calls"):gmatch "([^\n]+): (%d+)" do
      counts[name] = tonumber(count)
    end
    return counts
  end

  it("takes pinned memory in its first steps only", function()
    train("run=few steps=10", COUNTED:format(folder))
    local few = counts_of()
    train("run=many steps=28", COUNTED:format(folder))
    local many = counts_of()
    assert.is_true(few.cuMemHostAlloc > 10)
    assert.is_true(many.cuLaunchKernel > few.cuLaunchKernel + 1000)
    -- How much is in use at once depends on when copies are found to be done.
    assert.is_true(many.cuMemHostAlloc <= few.cuMemHostAlloc + 2)
    assert.is_true(many.cuMemFreeHost <= few.cuMemFreeHost + 2)
  end)

  it("gives streams of scripts their priorities", function()
    local function streams_with(options)
      command.write(folder .. "/streams.lua", ([[
        local ms = require "moonshard"
        ms.stream("side", { %s }):run(function() ms.ones { 4 } end)
      ]]):format(options))
      command.succeed(folder, "run streams.lua --device cuda", COUNTED:format(folder))
      local counts = counts_of()
      return counts["a stream of high priority"] or 0, counts["a stream of normal priority"]
    end
    local none, all = streams_with ""
    assert.equal(0, none)
    assert.same({ 1, all - 1 }, { streams_with 'priority = "high"' })
    assert.same({ 0, all }, { streams_with 'priority = "low"' })
  end)

  it("has the same bits in each order of its streams, and goes on where it was", function()
    train("run=a steps=8 every.save=4 model.dropout=0.1", ON_GPU)
    train("run=b steps=8 every.save=4 model.dropout=0.1", ON_GPU .. " MOONSHARD_STAND_IN_SEED=5")
    assert.is_true(#model "a" > 1000)
    assert.is_true(model "a" == model "b", "two orders gave two models")
    train("run=c steps=8 every.save=4 model.dropout=0.1 resume=a/step-00000004", QUIETLY)
    assert.is_true(model "a" == model "c", "the resumed run gave another model")
  end)

  -- The arguments of dropout and of the optimizer change in each step, of f16 also the scale; two
  -- passes in a step are two runs of tasks that begin alike.
  it("gives the same bits with graph = true", function()
    for name, options in pairs { dropout = "model.dropout=0.1", f16 = "dtype=f16" } do
      options = options .. " steps=11"
      train(("run=%s-a %s"):format(name, options), QUIETLY)
      local _, err = train(("run=%s-b graph=true %s"):format(name, options), ON_GPU)
      assert.is_true(#model(name .. "-a") > 1000)
      assert.is_true(model(name .. "-a") == model(name .. "-b"), name .. ": other bits")
      -- f16 asks in each step whether the gradients are finite, by tasks of which there are few.
      local of, replayed = err:match "graph: of (%d+) tasks of a step (%d+) are launched"
      assert.is_true(tonumber(replayed) > 0.9 * tonumber(of), err)
    end
  end)

  it("says what comes between the tasks of a step", function()
    command.write(folder .. "/reads.lua", [[
      local ms = require "moonshard"
      local layers = {}
      for i = 1, 8 do layers[i] = ms.nn.Linear(8, 8) end
      local model = ms.nn.Sequential(table.unpack(layers))
      local optimizer, sum = ms.optim.sgd(model, { lr = 0.01 }), 0
      for _ in ms.steps(12, 0, { graph = true }) do
        local loss = model(ms.ones { 4, 8 }):sum()
        sum = sum + loss:item()
        loss:backward()
        optimizer:step()
        optimizer:zero_grad()
      end
      local graph = ms.info().graph
      print(graph.graphs, graph.launches > 8, graph.replayed > graph.alone, graph.why)]])
    local out, err = command.succeed(folder, "run reads.lua --device cuda", ON_GPU)
    assert.matches("2\ttrue\ttrue\tthe host's wait for a task %(at .*reads%.lua:8%)\n", out)
    assert.matches("graph: of (%d+) tasks of a step %1 are launched as 2 graphs\n", out .. err)
    out, err = command.succeed(folder, "run reads.lua")
    assert.matches("0\tfalse\tfalse\tnil", out)
    assert.matches("device cpu carries out each task as it comes", out .. err)
  end)

  -- A loop that is over before it is certain ends as it would, and says so.
  it("refuses graph = true where nothing of a step can be part of a graph", function()
    command.write(folder .. "/looks.lua", [[
      local ms = require "moonshard"
      local t = ms.ones { 4 }:keep()
      for step in ms.steps(ms.config { steps = 12 }.steps, 0, { graph = true }) do
        for i = 1, 4 do assert(t:sum():item() == 4) end
        print(step)
      end]])
    local out, err = command.succeed(folder, "run looks.lua --device cuda", ON_GPU)
    assert.matches("graph: no run of tasks of a step came again with the same arguments; \z
      the first thing between two tasks: the host's wait for a task %(at .*looks%.lua:4%)\n",
      out .. err)
    local code
    code, out, err = command.run(folder, "run looks.lua steps=1000 --device cuda", ON_GPU)
    assert.equal(1, code, out .. err)
    assert.matches("\n15\n$", out)
    assert.matches("looks.lua:3: steps: graph = true, but nothing of a step can be part of a \z
      graph; the first reason: the host's wait for a task %(at .*looks%.lua:4%); take it out of \z
      the step, or leave out graph = true\n", err)
  end)

  it("says which tensors had other addresses where no run of tasks came again", function()
    command.write(folder .. "/moves.lua", [[
      local ms = require "moonshard"
      local kept = {}
      for step in ms.steps(12, 0, { graph = true }) do
        local t = ms.ones { 64 * (step + 1) }:keep()
        for i = 1, 8 do t = t:add(i):keep() end
        kept[step] = t
      end]])
    local out, err = command.succeed(folder, "run moves.lua --device cuda", ON_GPU)
    assert.matches("graph: no run of tasks of a step came again with the same arguments; \z
      other addresses or shapes in each step has ", out .. err)
  end)

  -- Shapes, values and gradients; or the error, as of attention without a key.
  it("gives what the CPU gives for tensors without elements", function()
    command.write(folder .. "/empty.lua", [[
      local ms = require "moonshard"
      local function write(t)
        return ("%s %s"):format(t, table.concat(t:reshape(-1):to_table(), " "))
      end
      local function case(name, shapes, f)
        local leaves = {}
        for i, shape in ipairs(shapes) do leaves[i] = ms.ones(shape):keep():requires_grad_() end
        local ok, text = pcall(function()
          local out = f(table.unpack(leaves))
          local lines = { write(out:detach()) }
          out:sum():backward()
          for i, leaf in ipairs(leaves) do lines[i + 1] = write(leaf:grad()) end
          return table.concat(lines, "; ")
        end)
        print(("%s: %s: %s"):format(name, ok, text))
      end
      local none = ms.zeros({ 0, dtype = "i64" }):keep()
      local function attention(q, k, v) return q:attention(k, v, { causal = true }) end
      case("softmax", { { 0, 5 } }, function(x) return x:softmax() end)
      case("softmax of none", { { 3, 0 } }, function(x) return x:softmax() end)
      case("log_softmax", { { 0, 5 } }, function(x) return x:log_softmax() end)
      case("cross_entropy", { { 0, 5 } }, function(x) return x:cross_entropy(none) end)
      local function layer_norm(x, w, b) return x:layer_norm(w, b) end
      local function linear(x, w, b) return x:linear(w, b) end
      case("layer_norm", { { 0, 5 }, { 5 }, { 5 } }, layer_norm)
      case("rms_norm", { { 0, 5 }, { 5 } }, function(x, w) return x:rms_norm(w) end)
      case("embedding", { { 4, 3 } }, function(w) return none:embedding(w) end)
      case("linear", { { 0, 4 }, { 3, 4 }, { 3 } }, linear)
      case("linear of none", { { 2, 0 }, { 3, 0 }, { 3 } }, linear)
      case("matmul", { { 2, 0 }, { 0, 3 } }, function(a, b) return a:matmul(b) end)
      case("attention", { { 0, 2, 4, 8 }, { 0, 2, 4, 8 }, { 0, 2, 4, 8 } }, attention)
      case("attention of none", { { 1, 2, 0, 8 }, { 1, 2, 0, 8 }, { 1, 2, 0, 8 } }, attention)
      case("sum", { { 0, 3 } }, function(x) return x:sum(1) end)
      case("mean", { { 3, 0 } }, function(x) return x:mean(2) end)
      case("max", { { 0, 3 } }, function(x) return x:max(2) end)
      case("var", { { 3, 0 } }, function(x) return x:var(2) end)
      case("prod", { { 0, 3 } }, function(x) return x:prod(1) end)
      case("sort", { { 3, 0 } }, function(x) return (x:sort()) end)
      case("tril", { { 3, 0 } }, function(x) return x:tril() end)
      case("round", { { 0 } }, function(x) return x:round() end)
      case("einsum", { { 2, 0 }, { 0, 3 } }, function(a, b) return ms.einsum("ij,jk", a, b) end)
      case("gelu", { { 0 } }, function(x) return x:gelu() end)
      case("add", { { 0, 3 }, { 3 } }, function(a, b) return a:add(b) end)
      case("cat", { { 0, 3 }, { 2, 3 } }, function(a, b) return ms.cat({ a, b }, 1) end)
      case("dropout", { { 0, 3 } }, function(x) return x:dropout(0.5) end)]])
    local here = command.succeed(folder, "run empty.lua")
    assert.matches("attention: true: tensor %[0, 2, 4, 8%]", here)
    assert.matches("linear of none: true: tensor %[2, 3%] f32 1%.0 1%.0 1%.0 1%.0 1%.0 1%.0; ",
      here)
    assert.equal(here, (command.succeed(folder, "run empty.lua --device cuda", ON_GPU)))
  end)

  it("refuses offloaded memory that is not pinned", function()
    command.write(folder .. "/pin.lua", [[
      local ms = require "moonshard"
      ms.fsdp(ms.nn.Linear(2, 2), { offload = "cpu", pin = false })]])
    command.succeed(folder, "run pin.lua")
    local code, _, err = command.run(folder, "run pin.lua --device cuda", ON_GPU)
    assert.equal(1, code)
    assert.matches("pin.lua:2: fsdp: pin = false: the GPU's tasks use offloaded memory, which has \z
      to be pinned: leave pin out", err)
  end)

  it("says where a run has what computes: run.json and the trace", function()
    local gpu = "stand%-in 0, compute capability 9%.0, driver of CUDA 13%.0; .*, %d+ threads"
    local _, err = train("run=t steps=12 graph=true --trace t.json", QUIETLY)
    assert.matches(gpu, core.json_decode(command.read(folder .. "/t/run.json")).machine)
    assert.matches('"machine":"' .. gpu, command.read(folder .. "/t.json"))
    assert.falsy(err:find("kernels, ", 1, true), err)
    assert.matches("memory     %d+ MiB of tensors at the peak; beside it %d+ MiB of the GPU: ", err)
    assert.matches("graph: a trace is recorded, which shows each task, so each is launched by \z
      itself; graph = true changes nothing", err)
    train "run=c steps=1"
    assert.matches("%d+ threads, %g+ kernels, ",
      core.json_decode(command.read(folder .. "/c/run.json")).machine)
  end)

  it("has one device, and takes \"cpu\" for it", function()
    command.write(folder .. "/names.lua", [[
      local ms = require "moonshard"
      local t = ms.ones { 2 }
      print(ms.device(), t:device(), t:to("cpu"):device(), t:to("cuda"):device())
      print(ms.zeros({ 1, device = "cpu" }):device(), ms.zeros({ 1, device = "cuda" }):device(),
        ms.device("cpu", function() return ms.zeros { 1 } end):device())
      print(select(2, pcall(t.to, t, "cuda:0")))
      print(select(2, pcall(ms.zeros, { 1, device = "cuda:0" })))
      print(ms.info().gpu)]])
    local out = command.succeed(folder, "run names.lua --device cuda", ON_GPU)
    assert.matches("^cuda\tcuda\tcuda\tcuda\ncuda\tcuda\tcuda\n", out)
    assert.matches("unknown dtype or device 'cuda:0': did you mean 'cuda'%?", out)
    assert.matches("device 'cuda:0': this engine runs on 'cuda'\n1\n", out)
  end)

  it("check predicts the peak to the byte", function()
    command.write(folder .. "/with_peak.lua", [[
      dofile(os.getenv "RECIPE")
      local ms = require "moonshard"
      print("peak " .. ms.memory().peak)
      -- The stand-in shows that 3 GiB are in use. Of its last piece the pool has handed out a part.
      local rest = (3 << 30) - ms.memory().reserved - ms.info().memory_beside
      print("all", rest >= 0 and rest < 32 << 20)]])
    local options = RECIPE:match "lua' (.*)" .. " steps=4 every.eval=4 every.sample=0 run=p"
    local recipe = RECIPE:match "^'(.-)'"
    local predicted = core.json_decode(command.succeed(folder,
      ("check '%s' --device cuda --json %s"):format(recipe, options)))
    local out = command.succeed(folder, "run with_peak.lua --device cuda " .. options,
      ("%s RECIPE='%s'"):format(QUIETLY, recipe))
    assert.equal(predicted.peak_bytes[1], math.tointeger(tonumber(out:match "peak (%d+)")))
    assert.matches("all\ttrue\n", out)
    local text = command.succeed(folder, ("check '%s' --device cuda %s"):format(recipe, options))
    assert.same({ products = 32 << 20, attention = 1 << 30, attention_most = 2 << 30 },
      predicted.scratch_bytes_of_stream)
    assert.matches("beside it on the GPU, for each stream that has such tasks: 32 MiB for \z
      products, or for attention by cuDNN up to 1024 MiB %(2048 where a head needs more%)\n  and \z
      some for the driver's context, libraries: a run there tells how much in all", text)
    text = command.succeed(folder, ("check '%s' -n 2 --device cuda %s"):format(recipe, options))
    assert.matches("the driver's context, libraries, NCCL's buffers: a run there", text)
    assert.is_nil(command.succeed(folder, ("check '%s' %s"):format(recipe, options))
      :find("beside it on the GPU", 1, true))
  end)

  it("check predicts the peak of what a GPU's products make beside", function()
    command.write(folder .. "/gelu.lua", [[
      local ms = require "moonshard"
      local x = ms.ones { 64, 32, dtype = "bf16" }
      local w = ms.ones { 128, 32, dtype = "bf16" }
      ms.no_grad(function() x:linear(w, nil, "gelu"):sum():item() end)
      print("peak " .. ms.memory().peak)]])
    local function predicted(switch)
      return core.json_decode(command.succeed(folder, "check gelu.lua --json" .. switch))
        .peak_bytes[1]
    end
    local function measured(switch, settings)
      local out = command.succeed(folder, "run gelu.lua" .. switch, settings)
      return math.tointeger(tonumber(out:match "peak (%d+)"))
    end
    assert.equal(predicted " --device cuda", measured(" --device cuda", ON_GPU))
    assert.equal(predicted "", measured "")
    assert.is_true(predicted " --device cuda" - predicted "" > 64 * 128 * 3 // 2)
    command.write(folder .. "/sim.lua",
      'require "moonshard".init { device = "sim", for_gpu = true }\ndofile "gelu.lua"')
    assert.equal(("peak %d\n"):format(predicted " --device cuda"),
      command.succeed(folder, "run sim.lua"))
  end)

  it("is shown by info, with the driver and the library of products", function()
    local out = command.succeed(folder, "info", ON_GPU)
    assert.matches("devices +cpu, cuda\n", out)
    assert.matches("gpu 0 +stand%-in 0, compute capability 9%.0, 4%.0 GiB, \z
      PCI 0000:1A:00%.0", out)
    assert.matches("gpu driver +CUDA 13%.0\n", out)
    assert.matches("gpu products +cuBLASLt 13%.1, .*libcublasLt", out)
    assert.matches("gpu driver +this machine shows no GPU", command.succeed(folder, "info"))
  end)

  it("info names the NCCL that ranks would use, or why there is none", function()
    local nccl = os.getenv "MOONSHARD_NCCL"
    local function line(settings)
      return command.succeed(folder, "info", settings):match "nccl +([^\n]*)"
    end
    assert.equal("NCCL 2.28.9, " .. nccl, line(ON_GPU))
    assert.equal("NCCL 2.28.9, " .. nccl,
      line(("%s MOONSHARD_NCCL= MOONSHARD_CUDA_LIBS='/nowhere:%s'"):format(ON_GPU,
        nccl:match "^(.*)/")), "it is sought where the other libraries are")
    assert.matches("^several ranks on GPUs need NCCL: /nowhere/libnccl.*: MOONSHARD_NCCL names \z
      it: unset that", line(ON_GPU .. " MOONSHARD_NCCL=/nowhere/libnccl.so.2"))
    assert.matches(": '.*' is NCCL 2%.27%.7, too old: ",
      line(ON_GPU .. " MOONSHARD_STUB_NCCL=version:ncclGetVersion:1:22707"))
    assert.equal("2.28 or later, loaded when it is asked for", line())
    local other = folder .. "/other"
    assert(os.execute(("mkdir -p '%s' && ln -sf '%s' '%s/libnccl.so.2'"):format(other,
      os.getenv "MOONSHARD_CUBLASLT", other)))
    local settings = ("%s MOONSHARD_NCCL= MOONSHARD_CUDA_LIBS='%s:%s'"):format(ON_GPU, other,
      nccl:match "^(.*)/")
    assert.matches("^NCCL 2%.28%.9, .*; passed over: '.*/other/libnccl%.so%.2' %(no NCCL: it \z
      has no nccl%w+%)$", line(settings))
  end)

  -- Runs a line of a recipe and returns its error.
  local function fails(code, line, settings)
    command.write(folder .. "/r.lua", 'local ms = require "moonshard"\n' .. line)
    local found, _, err = command.run(folder, "run r.lua --device cuda", settings)
    assert.equal(code, found, err)
    assert.equal(1, select(2, err:gsub("\n", "")), "one line: " .. err)
    return err
  end

  it("names what is missing, and what to do", function()
    local line = "print(ms.ones({ 2, 2 }):matmul(ms.ones { 2, 2 }):sum():item())"
    assert.matches("this machine has no NVIDIA driver: .*nowhere.*: install one, or set \z
      MOONSHARD_CUDA_DRIVER", fails(3, line, "MOONSHARD_CUDA_DRIVER=/nowhere/libcuda.so.1"))
    assert.matches("r%.lua:2: products of matrices on a GPU need cuBLASLt of CUDA 13: \z
      /nowhere/.*: MOONSHARD_CUBLASLT names it: unset that, or set it to the path of cuBLASLt \z
      13%.0 or later; the device cpu works without it",
      fails(3, line, ON_GPU .. " MOONSHARD_CUBLASLT=/nowhere/libcublasLt.so.13"))
    assert.matches("is cuBLASLt 12%.4, too old: .*; the device cpu works without it",
      fails(3, line, ON_GPU .. " MOONSHARD_STAND_IN_CUBLASLT_VERSION=120400"))
    local attends = "local q = ms.ones { 1, 1, 8, 16, dtype = 'bf16' }\nq:attention(q, q)"
    local err = fails(3, attends, ON_GPU .. " MOONSHARD_CUDNN=/nowhere/libcudnn.so.9")
    assert.matches("^moonshard: attention on a GPU cannot use cuDNN: /nowhere/.*: MOONSHARD_CUDNN \z
      names it: unset that, or set it to the path of cuDNN 9%.16 or later, or to off: attention \z
      is then slower, enqueued at r%.lua:3\n", err)
    assert.matches("no memory for 17179869184 bytes: live 4194304, .*limit 966367638%d*; largest \z
      owners: .*r%.lua:2",
      fails(8, "local t = ms.zeros { 1 << 20 }\nms.zeros { 1 << 32 }", ON_GPU))
    assert.matches("GPU 0, stand%-in 0, has compute capability 7%.0: 8%.0 or later is needed",
      fails(3, line, ON_GPU .. " MOONSHARD_STAND_IN_MAJOR=7"))
    -- Of a command without a script no line is at fault, least of all one of ours.
    for _, rest in ipairs { "bench gemm --device cuda", "repl --device cuda </dev/null" } do
      local code, _, told = command.run(folder, rest, "MOONSHARD_CUDA_DRIVER=/nowhere/x.so")
      assert.equal(3, code, told)
      assert.falsy(told:find("lua/[%d.]*/?moonshard/"), told)
    end
    local several, _, why = command.run(folder, "run r.lua -n 2 --device cuda",
      "MOONSHARD_CUDA_DRIVER=/nowhere/x.so")
    assert.equal(3, several, why)
    assert.matches('device "cuda": this machine shows none: CUDA_VISIBLE_DEVICES=MIG%-x \z
      hides all, or names some that are not there: unset it, or name what nvidia%-smi %-L lists',
      fails(1, line, ON_GPU .. " MOONSHARD_STAND_IN_GPUS=0 CUDA_VISIBLE_DEVICES=MIG-x"))
    local first = "a process computes on the first .* that it is shown: set \z
      CUDA_VISIBLE_DEVICES=3 in its environment"
    assert.matches('device "cuda:3": ' .. first,
      fails(1, "ms.init { device = 'cuda:3' }\nms.ones { 1 }", ON_GPU))
    local _, _, told = command.run(folder, "run r.lua --device cuda:3", ON_GPU)
    assert.matches("%-%-device cuda:3: " .. first, told)
    assert.matches("this engine runs on 'cuda",
      fails(1, "print(ms.device('cuda:1'))", ON_GPU))
  end)

  it("computes f32 products in TF32 where it is asked to", function()
    -- TF32 lacks the last bit of this number.
    command.write(folder .. "/tf32.lua", [[
      local ms = require "moonshard"
      local x = ms.ones { 8, 16 } * (1 + 0x1p-12)
      print(ms.info().tf32, x:matmul(x:transpose(1, 2)):max():item() > 16)]])
    command.write(folder .. "/init.lua", [[
      require "moonshard".init { tf32 = true }
      dofile "tf32.lua"]])
    local function prints(what, line, settings)
      os.remove(folder .. "/log")
      local out = command.succeed(folder, "run " .. line,
        (settings or "") .. " MOONSHARD_STAND_IN_CUBLASLT_LOG=log")
      assert.equal(what, out)
      return select(2, (command.read(folder .. "/log") or ""):gsub("computes 77\n", ""))
    end
    assert.equal(0, prints("false\ttrue\n", "tf32.lua --device cuda", ON_GPU))
    assert.equal(1, prints("true\tfalse\n", "tf32.lua --device cuda --tf32", ON_GPU))
    assert.equal(1, prints("true\tfalse\n", "init.lua --device cuda", ON_GPU))
    assert.equal(0, prints("false\ttrue\n", "tf32.lua --tf32"))
  end)

  it("names the script's line of a value that a kernel refuses", function()
    local err = fails(1, "local t = ms.ones { 4, 3 }\nprint(t:index_select(1, ms.tensor { 9 }))\n\z
      ms.synchronize()", ON_GPU)
    assert.matches("index_select", err)
    assert.matches("9", err)
    assert.matches('in stream "compute", enqueued at r%.lua:3', err)
  end)

  -- The second line's product is the cause, and the third line's wait finds it.
  local STOPS <const> = "local t = ms.ones { 4, 3 }\nlocal p = t:exp()\n\z
    local q = p:gelu()\nms.synchronize()"
  it("is measured by bench enqueue", function()
    local found = core.json_decode((command.succeed(folder, "bench enqueue --device cuda --json",
      QUIETLY)))
    assert.equal("cuda", found.device)
    assert.is_true(found.ns_lua_enqueue > 0 and found.ns_lua_operator > 0)
    assert.is_nil(found.ns_enqueue)
  end)

  it("tells which tasks may have stopped it", function()
    local fault = ON_GPU .. " MOONSHARD_STAND_IN_FAULT=exp:1"
    local err = fails(1, STOPS, fault)
    assert.matches("the GPU has stopped: CUDA_ERROR_ILLEGAL_ADDRESS", err)
    assert.matches("one of the %d tasks that were under way", err)
    assert.matches("gelu %(r%.lua:4%)", err)
    err = fails(1, STOPS, fault .. " CUDA_LAUNCH_BLOCKING=1")
    assert.matches('in task exp of stream "compute", enqueued at r%.lua:3', err)
    assert.not_matches("gelu", err)
  end)

  it("waits for each task where CUDA_LAUNCH_BLOCKING asks for it, with the same bits", function()
    local losses = train("steps=4 run=usual", QUIETLY)
    local blocking, out = train("steps=12 graph=true run=blocking",
      QUIETLY .. " CUDA_LAUNCH_BLOCKING=1")
    for i = 1, 4 do assert.equal(losses[i], blocking[i]) end
    assert.matches("carries out each task as it comes %(CUDA_LAUNCH_BLOCKING=1%)", out)
  end)
end)
