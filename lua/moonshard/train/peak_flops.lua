-- The machine's peak rate in matrix products, for MFU. It is measured once for each machine, number
-- of threads and dtype, and kept in a cache file.
local core = require "moonshard.core"

local peak = {}

local METHOD = 2                         -- version of the measurement; other versions are ignored
-- Rows x inputs -> outputs. Machines differ in which shape is fastest: one streams from memory, one
-- stays in caches, one is square.
local SHAPES = { { 2048, 1024, 256 }, { 256, 768, 768 }, { 1024, 1024, 1024 } }
local ROUNDS, PRODUCTS = 8, 2            -- of each shape, and in each round

--- The products whose rate is the peak: rows, inputs, outputs. On a GPU one square shape keeps all
--- multiprocessors busy: 8192 for 132 of them.
---@return integer[][]
function peak.shapes()
  if core.device() ~= "cuda" then return SHAPES end
  local side = math.max(1, core.info().gpus[1].multiprocessors * 62 // 64) * 64
  return { { side, side, side } }
end

local function cache_path()
  local base = os.getenv "XDG_CACHE_HOME"
  if not base or base == "" then base = (os.getenv "HOME" or "/tmp") .. "/.cache" end
  return base .. "/moonshard", base .. "/moonshard/peak.json"
end

-- The valid entries of the cache file; others are ignored.
local function read_cache()
  local _, path = cache_path()
  local text = core.file_read(path)
  local found, cache = text and core.json_decode(text), {}
  for key, value in pairs(type(found) == "table" and found or {}) do
    if type(key) == "string" and type(value) == "number" and value > 0 then cache[key] = value end
  end
  return cache
end

-- The cache file; nil if there is no folder for it: then each run measures.
local function write_cache(cache)
  local folder, path = cache_path()
  if core.make_directory(folder) then core.file_write(path, core.json_encode(cache)) end
end

local function key_of(dtype)
  local info = core.info()
  local gpu = info.device == "cuda" and info.gpus[1]
  if gpu then
    local kind = info.tf32 and dtype == "f32" and "tf32" or dtype
    return table.concat({ METHOD, gpu.name, gpu.multiprocessors, kind, info.gpu_blas }, "/")
  end
  return table.concat(
    { METHOD, info.cpu, info.kernels, info.threads, dtype, info.blas, info.blas_isa, info.version },
    "/")
end

-- FLOP/s of the best round of products of one shape. Each round writes the memory of the round
-- before; otherwise the time of getting new memory would be measured.
local function measure_shape(rows, inputs, outputs, dtype)
  local x, w = core.randn { rows, inputs, seed = 1 }:to(dtype),
    core.randn { outputs, inputs, seed = 2 }:to(dtype)
  local best = 0
  for _ = 1, ROUNDS do
    core.collect()
    core.synchronize()
    local start = core.clock_ms()
    for _ = 1, PRODUCTS do x:linear(w) end
    core.synchronize()
    best = math.max(best,
      PRODUCTS * 2 * rows * inputs * outputs / ((core.clock_ms() - start) / 1e3))
  end
  return best
end

local function measure(dtype)
  local best = 0
  core.autocast("f32", function()
    core.no_grad(function()
      for _, shape in ipairs(peak.shapes()) do
        best = math.max(best,
          measure_shape(shape[1], shape[2], shape[3], dtype == "f32" and "f32" or "bf16"))
      end
    end)
  end)
  return best
end

--- FLOP/s that products of this dtype reach here, and whether it was measured now. nil on the sim
--- device.
---@param dtype string
---@return number?, boolean?
function peak.flops(dtype)
  -- The state of memory afterwards must be the same whether the peak is measured, read or not
  -- needed.
  local before = core.memory().peak
  local value, measured
  if not core.is_sim() then
    local cache, key = read_cache(), key_of(dtype)
    if not cache[key] then
      cache[key], measured = measure(dtype), true
      write_cache(cache)
    end
    value = cache[key]
  end
  core.collect()
  core.set_peak(before)
  return value, measured
end

--- Notes that products have reached this many FLOP/s. If it is more than the measured peak (another
--- process may have slowed the measurement), it becomes the peak. Returns the peak from now on.
---@param dtype string
---@param flops number
---@return number
function peak.raise(dtype, flops)
  local cache, key = read_cache(), key_of(dtype)
  if flops > (cache[key] or 0) then
    cache[key] = flops
    write_cache(cache)
  end
  return cache[key]
end

return peak
