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

-- Tasks of attention that went to cuDNN, and those of them that are fast: in a scope; when backward
-- runs forward again; in training, of which each step has one layer.
local FAST = [[
local ms = require "moonshard"
local function counts(f)
  local before = ms.info().attention
  f()
  local now = ms.info().attention
  return ("%d %d"):format(now.cudnn - before.cudnn, now.fast - before.fast)
end
local x = ms.randn { 1, 2, 64, 16, dtype = "bf16" }:keep():requires_grad_()
local function attend(t) return t:attention(t, t) end
local function fast(f) return ms.attention("fast", f) end
print(counts(function() fast(function() return attend(x) end):sum():backward() end))
print(counts(function() fast(function() return ms.recompute(attend, x) end):sum():backward() end))
print(counts(function()
  local out = fast(function()
    return ms.attention("deterministic", function() return attend(x) end)
  end)
  out:sum():backward()
end))
print(counts(function() pcall(fast, function() error "no" end) attend(x):sum():backward() end))
local model = ms.nn.gpt2 { vocab = 16, context = 64, layers = 1, width = 16, heads = 1 }
for _, length in ipairs { 64, 32 } do
  print(counts(function()
    ms.train {
      model = model, optimizer = ms.optim.adamw(model), steps = 3, dtype = "bf16", run = "run",
      attention = "fast",
      data = function()
        local ids = ms.randint { 1, length, high = 16 }
        return ids, ids
      end,
    }
  end))
end
]]

-- Steps that are equal but for the last two, in which attention is fast. Prints the tasks of each
-- step that went to cuDNN, and those of them that are fast; a graph calls nothing.
local IN_GRAPHS = [[
local ms = require "moonshard"
local x = ms.randn { 1, 2, 64, 16, dtype = "bf16" }:keep():requires_grad_()
local function attend() return x:attention(x, x) end
local counted = {}
for step in ms.steps(10, 0, { graph = true }) do
  local before = ms.info().attention
  local out = step < 8 and attend() or ms.attention("fast", attend)
  out:sum():backward()
  ms.synchronize()
  local now = ms.info().attention
  counted[#counted + 1] = ("%d %d"):format(now.cudnn - before.cudnn, now.fast - before.fast)
end
print(ms.info().graph.graphs > 0, table.concat(counted, ", ", 8))
]]

describe("attention on a GPU", function()
  it("is cuDNN's where there is one", function()
    local cudnn = os.getenv "MOONSHARD_STAND_IN_CUDNN_PATH"
    assert.are.equal("2 0 cuDNN 9.19, " .. cudnn .. "\n", counts(cudnn))
  end)

  it("adds up gradients in no certain order where it is told to", function()
    local folder = command.folder()
    command.write(folder .. "/script.lua", FAST)
    local code, out, err = command.run(folder, "run script.lua --device cuda",
      ("MOONSHARD_CUDA_DRIVER='%s' MOONSHARD_CUDNN='%s'")
        :format(os.getenv "MOONSHARD_STAND_IN", os.getenv "MOONSHARD_STAND_IN_CUDNN_PATH"))
    assert.are.equal(0, code, err)
    local found = {}
    for line in out:gmatch "[^\n]+" do
      if line:match "^%d+ %d+$" then found[#found + 1] = line end
    end
    assert.are.same({ "2 1", "3 1", "2 0", "2 0", "6 3", "6 0" }, found)
    local told = 'attention: "fast" changes nothing: cuDNN has no such way'
    assert.are.equal(1, select(2, (out .. err):gsub(told, "")))
    command.remove(folder)
  end)

  it("is launched by a graph only where a step asks for the same way", function()
    local folder = command.folder()
    command.write(folder .. "/script.lua", IN_GRAPHS)
    local out = command.succeed(folder, "run script.lua --device cuda",
      ("MOONSHARD_CUDA_DRIVER='%s' MOONSHARD_CUDNN='%s'")
        :format(os.getenv "MOONSHARD_STAND_IN", os.getenv "MOONSHARD_STAND_IN_CUDNN_PATH"))
    assert.matches("true\t0 0, 2 1, 2 1", out)
    command.remove(folder)
  end)

  it("says on the CPU that fast changes nothing", function()
    local folder = command.folder()
    local out, err = command.succeed(folder, ("run '%s/recipes/gpt2.lua' bytes=true steps=1 \z
      batch=1 accumulate=1 length=16 model.layers=1 model.width=16 model.heads=1 vocab=256 \z
      'data=%s/README.md' attention=fast"):format(command.source, command.source))
    assert.matches('attention: "fast" changes nothing: device cpu has one way only', out .. err)
    command.remove(folder)
  end)

  it("is told of by a trace, and by a run that goes the slower way", function()
    local folder = command.folder()
    command.write(folder .. "/script.lua", SCRIPT)
    -- Each step has one layer; what a sample asks for, in f32, is not counted.
    local RECIPE = ("'%s/recipes/gpt_bytes.lua' --device cuda 'data=%s/README.md' steps=2 \z
      dtype=bf16 length=32 batch=4 model.layers=1 model.width=32 every.eval=0 every.save=0 run=run")
      :format(command.source, command.source)
    for cudnn, way in pairs { [os.getenv "MOONSHARD_STAND_IN_CUDNN_PATH"] = "cuDNN",
      off = "own kernels" } do
      local settings = ("MOONSHARD_CUDA_DRIVER='%s' MOONSHARD_CUDNN='%s'")
        :format(os.getenv "MOONSHARD_STAND_IN", cudnn)
      command.succeed(folder, "run script.lua --device cuda --trace trace.json", settings)
      local trace = command.read(folder .. "/trace.json")
      for _, task in ipairs { "attention", "attention gradient" } do
        assert.truthy(trace:find(('"%s, %s"'):format(task, way), 1, true), task)
        assert.is_nil(trace:find(('"%s"'):format(task), 1, true), task)
      end
      local out, err = command.succeed(folder, "run " .. RECIPE .. " every.sample=0 model.heads=4",
        settings)
      assert.is_nil((out .. err):find("our own kernels", 1, true))
      -- Heads of 4 numbers.
      out, err = command.succeed(folder, ("run %s every.sample=%d model.heads=8")
        :format(RECIPE, (command.full or way == "cuDNN") and 2 or 0), settings)
      assert.equal(way == "cuDNN" and 1 or 0, select(2, (out .. err):gsub(
        "attention: 2 of 2 tasks of a step go to our own kernels, which are slower: cuDNN", "")))
    end
    command.remove(folder)
  end)

  it("is our own where it is off, and info says why", function()
    assert.are.equal("0 2 cuDNN is off, as MOONSHARD_CUDNN says: attention is slower\n",
      counts "off")
  end)

  it("is not told of on the CPU", function()
    assert.is_nil(require "moonshard".info().attention)
  end)
end)
