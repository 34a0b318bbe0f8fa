-- moonshard bench step: what it measures of a step on the CPU and over the stand-in for a GPU.
local command = require "command"
local core = require "moonshard.core"

local ON_GPU = ("MOONSHARD_CUDA_DRIVER='%s'"):format(os.getenv "MOONSHARD_STAND_IN")

describe("bench step", function()
  local folder
  before_each(function() folder = command.folder() end)
  after_each(function() command.remove(folder) end)

  local function bench(switches, settings)
    return core.json_decode((command.succeed(folder, "bench step --config micro --json "
      .. switches, settings)))
  end

  it("measures steps of a batch and a length, here and on a GPU", function()
    for device, settings in pairs { cpu = "", cuda = ON_GPU } do
      local found = bench("--batch 3 --length 8 --steps 5 --dtype bf16 --device " .. device,
        settings)
      assert.equal(device, found.device)
      assert.equal(3, found.batch)
      assert.equal(8, found.length)
      assert.equal("bf16", found.dtype)
      assert.equal(5, found.steps)
      assert.is_true(found.ms_step_min > 0 and found.ms_step_min <= found.ms_step_med)
      assert.near(24e3 / found.ms_step_med, found.tok_s, 1e-6 * found.tok_s)
      for _, part in ipairs { "forward", "backward", "optimizer" } do
        assert.is_true(found["ms_" .. part] > 0)
      end
      -- The weights, their gradients and two states.
      local elements = 64 * 32 + 8 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32
      assert.is_true(found.peak_mib > 4 * 4 * elements / 2 ^ 20)
    end
  end)

  it("computes in bf16 alone with --parameters bf16", function()
    for device, settings in pairs { cpu = "", cuda = ON_GPU } do
      local switches = "--batch 12 --length 16 --steps 1 --device " .. device
      local whole = bench(switches .. " --dtype f32", settings)
      local cast = bench(switches .. " --dtype bf16", settings)
      local alone = bench(switches .. " --parameters bf16", settings)
      assert.equal("f32 bf16", cast.parameters .. " " .. alone.parameters)
      assert.equal("bf16", alone.dtype)
      assert.is_true(alone.ms_step_med > 0)
      -- Activations are most of it: f32, or bf16.
      assert.is_true(cast.peak_mib < 0.8 * whole.peak_mib)
      assert.is_true(alone.peak_mib < 0.8 * whole.peak_mib)
    end
  end)

  it("tells beforehand the peak of a run, and whether it fits", function()
    for device, settings in pairs { cpu = "", cuda = ON_GPU } do
      for _, switches in ipairs { "--dtype bf16", "--parameters bf16" } do
        switches = "--batch 3 --steps 2 --device " .. device .. " " .. switches
        local found = bench(switches .. " --check")
        assert.equal(device, found.device)
        assert.equal(bench(switches, settings).peak_mib, found.peak_mib)
        assert.is_true(found.reserved_mib >= found.peak_mib)
        -- The time of a GPU's step, by its rates.
        if device == "cuda" then
          assert.equal("h200", found.rates)
          assert.near(found.batch * found.length, found.estimated_tok_s * found.estimated_ms / 1e3,
            1e-6 * found.batch * found.length)
        else assert.is_nil(found.estimated_ms) end
      end
    end
    local code, _, err = command.run(folder, "bench step --config gpt2-124m --device cuda --check \z
      --memory 4000000000")
    assert.equal(8, code)
    assert.matches("no memory for %d+ bytes", err)
  end)

  -- gpt2's batch is small, so what autocast adds are the casts of its weights. Backward frees each
  -- after its last use, while gradients take twice as much.
  it("takes as much memory in bf16 as in f32, on a CPU", function()
    local function peak(config, dtype)
      return core.json_decode((command.succeed(folder, ("bench step --check --json --config %s \z
        --dtype %s"):format(config, dtype)))).peak_mib
    end
    assert.is_true(peak("tiny", "bf16") <= peak("tiny", "f32"))
    assert.is_true(peak("gpt2", "bf16") <= 1.02 * peak("gpt2", "f32"))
  end)

  it("keeps less memory with --recompute", function()
    local plain = bench("--length 16 --batch 64 --steps 1 --device cpu")
    local again = bench("--length 16 --batch 64 --steps 1 --device cpu --recompute")
    assert.is_true(again.peak_mib < 0.9 * plain.peak_mib)
  end)

  -- A program nvidia-smi that prints this.
  local function smi(text)
    command.write(folder .. "/nvidia-smi", "#!/bin/sh\n" .. text .. "\n")
    assert(os.execute(("chmod +x '%s/nvidia-smi'"):format(folder)))
    return bench("--device cuda --steps 1", ("%s PATH='%s':\"$PATH\""):format(ON_GPU, folder))
      .process_mib
  end

  it("tells the process's memory as nvidia-smi does, if that knows it", function()
    local own = 'pid=$PPID; while [ "$(cat /proc/$pid/comm)" != moonshard ]; do \z
      pid=$(cut -d" " -f4 /proc/$pid/stat); done; echo "$pid, 321"; echo "1, 5"'
    assert.equal(321, smi(own))
    assert.equal(777, smi 'echo "4242424, 777"')
    assert.is_nil(smi 'echo "4242424, 777"; echo "4242425, 778"')
    assert.is_nil(smi 'echo "4242424, [N/A]"')
    assert.is_nil(smi "exit 9")
  end)

  it("compares steps without and with a hook in Lua", function()
    for device, settings in pairs { cpu = "", cuda = command.full and ON_GPU or nil } do
      local found = bench("--hook-pairs --steps 1 --batch 2 --length 8 --device " .. device,
        settings)
      assert.equal(10, found.pairs)
      assert.is_true(found.ms_step_native > 0 and found.ms_step_lua > 0)
      assert.is_true(found.percent_min <= found.percent_med)
      assert.is_true(found.percent_med <= found.percent_max)
    end
    assert.equal(2, bench("--hook-pairs --steps 1 --batch 2 --length 8 -n 2").ranks)
  end)

  it("measures products with the fastest algorithms, or with the first ones", function()
    local file = folder .. "/products.json"
    local settings = ("%s MOONSHARD_TUNED='%s' MOONSHARD_STAND_IN_CUBLASLT_FAST=2"):format(ON_GPU,
      file)
    assert.is_true(bench("--tune --steps 2 --device cuda", settings).tuned)
    local _, choices = next(core.json_decode(core.file_read(file)).places)
    assert.is_true(next(choices) ~= nil)
    -- Without the switch the file is not looked at.
    command.write(file, "damaged")
    local out, err = command.succeed(folder, "bench step --config micro --steps 2 --json \z
      --device cuda", settings)
    assert.is_nil(core.json_decode(out).tuned)
    assert.equal("", err)
  end)

  it("refuses what it cannot measure", function()
    for switches, message in pairs {
      ["--batch 0"] = "1 or more", ["--length 0"] = "1 or more", ["--dtype f16"] = "on a GPU only",
      ["--hook-pairs --hook fp16_compress"] = "leave out %-%-hook fp16_compress",
      ["--check -n 2"] = "leave out %-n", ["--check --hook-pairs"] = "leave out %-%-hook%-pairs",
      ["--config gpt3"] = "must be one of",
      ["--tune"] = "add %-%-device cuda", ["--tune --check"] = "leave out %-%-check",
      ["--parameters bf16 --dtype f32"] = "leave out %-%-dtype f32",
    } do
      local code, _, err = command.run(folder, "bench step " .. switches)
      assert.equal(2, code, switches)
      assert.matches(message, err)
    end
  end)
end)
