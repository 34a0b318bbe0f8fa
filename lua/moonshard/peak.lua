-- The machine's peak in matrix products, for MFU: measured once a machine, threads and dtype, kept in a cache file.
local core = require "moonshard.core"

local peak = {}

local function cache_path()
  local base = os.getenv "XDG_CACHE_HOME"
  if not base or base == "" then base = (os.getenv "HOME" or "/tmp") .. "/.cache" end
  return base .. "/moonshard", base .. "/moonshard/peak.json"
end

-- FLOP/s of the best of several products of n x n.
local function measure(dtype)
  local n, best = 1024, 0
  local a, b = core.randn { n, n, seed = 1 }, core.randn { n, n, seed = 2 }
  core.autocast(dtype == "f32" and "f32" or "bf16", function()
    core.no_grad(function()
      if dtype ~= "f32" then a, b = a:to "bf16", b:to "bf16" end
      a:matmul(b)
      core.synchronize()
      for _ = 1, 6 do
        local start = core.clock_ms()
        for _ = 1, 4 do a:matmul(b) end
        core.synchronize()
        best = math.max(best, 4 * 2 * n ^ 3 / ((core.clock_ms() - start) / 1e3))
      end
    end)
  end)
  return best
end

--- FLOP/s that products of this dtype reach here, and whether it was measured now. nil on the sim executor.
---@param dtype string
---@return number?, boolean?
function peak.flops(dtype)
  -- Whether it is measured, read or not needed: what memory looks like afterwards must be the same.
  local before = core.memory().peak
  local value, measured
  if not core.is_sim() then
    local info = core.info()
    local folder, path = cache_path()
    local key = table.concat({ info.cpu, info.kernels, info.threads, dtype, info.blas, info.version }, "/")
    local text = core.file_read(path)
    local cache = text and core.json_decode(text)
    if type(cache) ~= "table" then cache = {} end
    if type(cache[key]) ~= "number" then
      cache[key], measured = measure(dtype), true
      if core.make_directory(folder) then core.file_write(path, core.json_encode(cache)) end
    end
    value = cache[key]
  end
  core.collect()
  core.set_peak(before)
  return value, measured
end

return peak
