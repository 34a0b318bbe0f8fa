-- moonshard info: prints a description of this machine and this build.
local switches = require "moonshard.cli.switches"

local info = {}

-- Which launcher started this process as one of several.
local function launcher()
  local found = require "moonshard.core".hosts_launched()
  return found and ("%s, rank %d of %s"):format(found.launcher, found.rank, found.size or "?")
    or "none"
end

--- The parser of its command line.
---@return table
function info.parser()
  return switches.parser("info", "Prints a description of this machine and this build.")
end

function info.main(arguments)
  switches.apply(switches.parse(info.parser(), arguments))
  local ms = require "moonshard"
  local found = ms.info()
  local products = found.blas_isa ~= "" and found.blas .. ", " .. found.blas_isa or found.blas
  local lines = {
    { "version", found.version },
    { "cpu", found.cpu },
    { "cores", found.cores },
    { "threads", found.threads },
    { "kernels", found.kernels },
    { "matrix products", products },
    { "memory", ("%.1f GiB"):format(found.memory_bytes / 2 ^ 30) },
    { "devices", table.concat(found.devices, ", ") },
    { "interfaces", table.concat(found.interfaces, ", ") },
    { "launcher", launcher() },
    { "mpi", found.mpi or "not built" },
    { "nccl", #found.gpus > 0 and require "moonshard.core".gpu_nccl() or found.nccl },
    { "lua", found.lua },
  }
  for i, gpu in ipairs(found.gpus) do
    local node = gpu.node and (", NUMA node %d"):format(gpu.node) or ""
    local slice = gpu.slice
      and (", a slice (MIG) with %d multiprocessors"):format(gpu.multiprocessors) or ""
    table.insert(lines, 8 + i, { "gpu " .. i - 1,
      ("%s, compute capability %d.%d, %.1f GiB%s, PCI %s%s"):format(gpu.name, gpu.major,
        gpu.minor, gpu.memory_bytes / 2 ^ 30, slice, gpu.pci, node) })
  end
  table.insert(lines, 9 + #found.gpus, { "gpu driver", found.gpu_driver })
  if found.gpu_blas then
    table.insert(lines, 10 + #found.gpus, { "gpu products", found.gpu_blas })
    for i in ipairs(found.gpus) do
      table.insert(lines, 10 + #found.gpus + i,
        { ("gpu %d choices"):format(i - 1), require "moonshard.train.tune".describe(i - 1) })
    end
    table.insert(lines, 11 + 2 * #found.gpus, { "gpu attention", found.gpu_dnn })
  end
  for _, line in ipairs(lines) do print(("%-16s %s"):format(line[1], line[2])) end
  return 0
end

return info
