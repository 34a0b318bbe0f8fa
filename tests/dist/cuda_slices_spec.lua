-- Ranks on slices of GPUs (MIG), over the stand-in for NVIDIA's driver, which shows a process the
-- first slice of CUDA_VISIBLE_DEVICES, as NVIDIA's does.
local command = require "command"
local folder
before_each(function() folder = command.folder() end)
after_each(function() command.remove(folder) end)

local SHOW = [[
  local ms = require "moonshard"
  ms.init {}
  local t = ms.world():all_reduce(ms.ones { 3 } * (ms.rank() + 1)):value():sum():item()
  io.write(("rank %d: %s, %s, sum %g\n"):format(ms.rank(), ms.info().gpus[1].name,
    os.getenv "CUDA_VISIBLE_DEVICES", t))
]]

-- There is no NCCL: slices need none.
local function run(switches, visible)
  command.write(folder .. "/show.lua", SHOW)
  return command.run(folder, "run show.lua --device cuda " .. switches,
    ("MOONSHARD_LOG=info MOONSHARD_CUDA_DRIVER='%s' MOONSHARD_STAND_IN_MIG=4 \z
      CUDA_VISIBLE_DEVICES=%s MOONSHARD_NCCL=/nowhere/libnccl.so.2"):format(
      os.getenv "MOONSHARD_STAND_IN", visible))
end

describe("slices of GPUs", function()
  it("are described by info", function()
    local out = command.succeed(folder, "info", ("MOONSHARD_CUDA_DRIVER='%s' \z
      MOONSHARD_STAND_IN_MIG=4 CUDA_VISIBLE_DEVICES=MIG-2"):format(os.getenv "MOONSHARD_STAND_IN"))
    assert.matches("gpu 0 +stand%-in 1 MIG 1g%.4gb, compute capability 9%.0, 4%.0 GiB, a slice \z
      %(MIG%) with 2 multiprocessors, PCI 0000:1B:00%.0", out)
  end)

  it("are GPUs of ranks, one for each, without NCCL", function()
    local code, out, err = run("-n 3", "MIG-1,MIG-0,MIG-2")
    assert.equal(0, code, err)
    for rank, expected in pairs {
      [0] = "stand-in 0 MIG 1g.4gb, MIG-1", "stand-in 0 MIG 1g.4gb, MIG-0",
      "stand-in 1 MIG 1g.4gb, MIG-2" } do
      assert.truthy(out:find(("rank %d: %s, sum 18"):format(rank, expected), 1, true), out)
    end
    assert.equal(1, select(2, err:gsub("each rank has a slice of a GPU %(MIG%); tensors travel \z
      through memory of the host", "")), err)
  end)

  it("are shared by more ranks if the user says so", function()
    local code, _, err = run("-n 3", "MIG-0,MIG-1")
    assert.equal(1, code, err)
    assert.truthy(err:find("3 ranks on this host and 2 GPUs (CUDA_VISIBLE_DEVICES=MIG-0,MIG-1): "
      .. "each rank needs a GPU of its own", 1, true), err)
    local out
    code, out, err = run("-n 3 --share-gpu", "MIG-0,MIG-1")
    assert.equal(0, code, err)
    assert.truthy(out:find("rank 2: stand-in 0 MIG 1g.4gb, MIG-0, sum 18", 1, true), out)
    assert.truthy(err:find("ranks 0, 2 share GPU 0", 1, true), err)
  end)

  it("are one for each process, whose ranks cannot be threads", function()
    local code, _, err = run("-n 2 --thread-ranks", "MIG-0,MIG-1")
    assert.equal(1, code, err)
    assert.truthy(err:find("2 ranks on this host, each of which sees the first slice (MIG) of "
      .. "CUDA_VISIBLE_DEVICES=MIG-0,MIG-1 alone: let `moonshard run -n 2` start them as "
      .. "processes, which get a slice each", 1, true), err)
    code, _, err = run("-n 2", "MIG-0")
    assert.equal(1, code, err)
    assert.truthy(err:find("2 ranks on this host and 1 GPU (CUDA_VISIBLE_DEVICES=MIG-0)", 1, true),
      err)
  end)

  it("that are not there, or are named twice, are one error", function()
    local code, _, err = run("-n 2", "MIG-0,MIG-9")
    assert.equal(1, code, err)
    assert.truthy(err:find('device "cuda": this machine shows none: CUDA_VISIBLE_DEVICES=MIG-9 '
      .. "hides all, or names some that are not there", 1, true), err)
    code, _, err = run("-n 2", "MIG-0,MIG-0")
    assert.equal(1, code, err)
    assert.truthy(err:find("2 ranks on this host and 1 GPU", 1, true), err)
  end)
end)
