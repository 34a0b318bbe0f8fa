-- Calls of NVIDIA's driver that fail while a run saves, over the stand-in for it: what is committed
-- is what a run without failures has committed there. Bytes that were not delivered are never
-- saved.
local command = require "command"
local core = require "moonshard.core"

local ON_GPU = ("MOONSHARD_CUDA_DRIVER='%s'"):format(os.getenv "MOONSHARD_STAND_IN")

local SCRIPT = [[
local ms = require "moonshard"
ms.seed(1)
local cfg = ms.config { by = "checkpoint" }
local model = ms.nn.Sequential(ms.nn.Linear(8, 16), ms.nn.Linear(16, 4))
if cfg.by == "fsdp" then model = ms.fsdp(model) end
local optimizer = ms.optim.adamw(model)
for step in ms.steps(3) do
  model(ms.full(step + 1, { 2, 8 })):sum():backward()
  optimizer:step()
  if cfg.by == "model" then assert(model:save(("out/%d.safetensors"):format(step)))
  else
    assert(ms.checkpoint.save("out", { model = model, optimizer = optimizer, step = step }))
    assert(ms.checkpoint.wait())
  end
end]]

-- How often a run calls the driver, by the names of its functions.
local function calls_of(folder, by)
  command.succeed(folder, "run r.lua --device cuda by=" .. by, ON_GPU
    .. (" MOONSHARD_STAND_IN_CALLS='%s/calls'"):format(folder))
  local calls = {}
  for name, count in command.read(folder .. "/calls"):gmatch "(%w+): (%d+)" do
    if tonumber(count) > 0 then calls[name] = tonumber(count) end
  end
  return calls
end

-- The files with tensors that a run has committed, by path.
local function committed(folder)
  local found = {}
  for _, name in ipairs(core.list(folder .. "/out") or {}) do
    if name:match "^step" then
      for _, file in ipairs(core.list(("%s/out/%s"):format(folder, name))) do
        if file:match "safetensors$" then
          found[name .. "/" .. file] = command.read(("%s/out/%s/%s"):format(folder, name, file))
        end
      end
    elseif name:match "%.safetensors$" then
      found[name] = command.read(folder .. "/out/" .. name)
    end
  end
  return found
end

-- The Nth calls to try: in long ranges most of them.
local function positions(count)
  local list, every = {}, command.full and math.max(1, count // 12) or math.max(1, count // 2)
  for n = 1, count, every do list[#list + 1] = n end
  if list[#list] ~= count then list[#list + 1] = count end
  return list
end

-- The calls whose failures are tried in short ranges: those that deliver bytes.
local READS = { cuMemcpyDtoHAsync = true, cuMemcpyDtoHAsync_v2 = true, cuStreamSynchronize = true,
  cuEventSynchronize = true }

describe("a call of the driver that fails", function()
  for _, by in ipairs { "checkpoint", "model", "fsdp" } do
    it("leaves no wrong bytes in what is saved: " .. by, function()
      local folder = command.folder()
      command.write(folder .. "/r.lua", SCRIPT)
      core.make_directory(folder .. "/out")
      local calls = calls_of(folder, by)
      local right, tried, stopped = committed(folder), 0, 0
      assert.is_true(next(right) ~= nil)
      for name, count in pairs(calls) do
        for _, n in ipairs((command.full or READS[name]) and positions(count) or {}) do
          for _, more in ipairs { "", "+" } do
            command.remove(folder .. "/out")
            core.make_directory(folder .. "/out")
            local what = ("%s:%d%s"):format(name, n, more)
            local code = command.run(folder, "run r.lua --device cuda by=" .. by,
              ("%s MOONSHARD_STAND_IN_FAIL=%s"):format(ON_GPU, what))
            local found, files = committed(folder), 0
            for path, bytes in pairs(found) do
              files = files + 1
              assert.is_true(bytes == right[path], ("%s: %s is not what it was"):format(what, path))
            end
            -- A run that ends well has saved all.
            if code == 0 then
              for path in pairs(right) do assert.truthy(found[path], what .. ": " .. path) end
            else stopped = stopped + 1 end
            tried = tried + 1
          end
        end
      end
      assert.is_true(tried >= 8 and stopped > 0, ("%d, %d"):format(tried, stopped))
      command.remove(folder)
    end)
  end
end)
