-- The dtype of a run's autocast, also where the recipe leaves it to the machine: dtype = "auto".
local core = require "moonshard.core"
require "moonshard.parallel.group"                -- methods of the world
local launch = require "moonshard.base.launch"

local dtype = {}

-- Whether products of bf16 take instructions of their own on this rank's device, and why.
local function multiplies_bf16()
  local info = core.info()
  local gpu = info.gpus[info.gpu]
  if gpu or launch.for_gpu then
    return true, (gpu and gpu.name or "a GPU") .. " multiplies bf16"
  end
  if info.kernels ~= "avx512bf16" then return false, "this processor does not multiply bf16" end
  if not info.blas:find "^oneDNN" then
    return false, ("%s does not multiply bf16"):format(info.blas)
  end
  return true, "this processor multiplies bf16"
end

--- The dtype that all ranks use, and why. saved: of the checkpoint from which the run continues.
---@param asked string
---@param saved? string
---@return "f32"|"bf16"|"f16"
---@return string? why nil: the recipe has named it
function dtype.settle(asked, saved)
  if asked ~= "auto" then return asked end
  if saved then return saved, "the checkpoint's" end
  local own, why = multiplies_bf16()
  local world = core.world()
  local able = world:size() == 1 and (own and 1 or 0)
    or world:_share("sum", "i64", { own and 1 or 0 }, "dtype")[1]
  if own and able < world:size() then why = "another rank's processor does not multiply bf16" end
  local chosen = able == world:size() and "bf16" or "f32"
  table.insert(launch.assumptions, ("dtype %s: %s"):format(chosen, why))
  return chosen, why
end

--- f(), with the autocast and the attention that the options of a training ask for.
---@param o ms.TrainOptions settled
---@param f function
---@return any ...
function dtype.run(o, f)
  local function how()
    if o.dtype == "f32" then return f() end
    return core.autocast(o.dtype, f, { emulate = o.emulate })
  end
  if o.attention == "fast" then return core.attention("fast", how) end
  return how()
end

return dtype
