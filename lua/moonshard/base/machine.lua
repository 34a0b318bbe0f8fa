-- What computes: the text that a run's first lines, its run.json and its trace have of the machine.
local core = require "moonshard.core"

local machine = {}

-- A GPU, with what its results and its speed depend on.
local function text_of(gpu, driver)
  return ("%s%s, compute capability %d.%d, driver of %s"):format(gpu.name,
    gpu.slice and (" (a slice with %d multiprocessors)"):format(gpu.multiprocessors) or "",
    gpu.major, gpu.minor, driver)
end

--- The GPU, or the processor with its kernels and its library of products; and the threads of this
--- rank.
---@return string
function machine.describe()
  local info = core.info()
  local gpu = info.gpus[info.gpu]
  if gpu then
    return ("%s; %s, %d threads"):format(text_of(gpu, info.gpu_driver), info.cpu, info.threads)
  end
  return ("%s, %d threads, %s kernels, %s"):format(info.cpu, info.threads, info.kernels, info.blas)
end

return machine
