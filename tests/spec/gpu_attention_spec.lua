-- Which way attention goes on a GPU, as ms.info tells it: on the stand-in for the driver, with a
-- stand-in for cuDNN and without one.
local command = require "command"

local SCRIPT = [[
local ms = require "moonshard"
local function heads() return ms.randn { 1, 2, 8, 16 } end
local q, k, v = heads(), heads(), heads()
for _, x in ipairs { q, k, v } do x:requires_grad_() end
ms.autocast("bf16", function() q:attention(k, v):sum():backward() end)
ms.synchronize()
local found = ms.info()
print(("%d %d %s"):format(found.attention.cudnn, found.attention.own, found.gpu_dnn))
]]

local function counts(cudnn)
  local folder = command.folder()
  command.write(folder .. "/script.lua", SCRIPT)
  local code, out, err = command.run(folder, "run script.lua --device cuda",
    ("MOONSHARD_CUDA_DRIVER='%s' MOONSHARD_CUDNN='%s'")
      :format(os.getenv "MOONSHARD_STAND_IN", cudnn))
  command.remove(folder)
  assert.are.equal(0, code, err)
  return out
end

describe("attention on a GPU", function()
  it("is cuDNN's where there is one", function()
    local cudnn = os.getenv "MOONSHARD_STAND_IN_CUDNN_PATH"
    assert.are.equal("2 0 cuDNN 9.19, " .. cudnn .. "\n", counts(cudnn))
  end)

  it("is our own where it is off, and info says why", function()
    assert.are.equal("0 2 cuDNN is off, as MOONSHARD_CUDNN says: attention is slower\n",
      counts "off")
  end)

  it("is not told of on the CPU", function()
    assert.is_nil(require "moonshard".info().attention)
  end)
end)
