-- The speeds of GPUs, from which `moonshard check` estimates the time of a step: --rates h200.
--
-- Products, copies and attention were measured with PyTorch on an H200 (tests/bench/results/h200).
-- All rates are 7% below, for what a step loses to the limit of power. No kernel of this project
-- has been timed on a GPU yet: the shares of memory-bound tasks are estimates from their machine
-- code (instructions, registers, bytes under way). What `moonshard bench kernels` measures belongs
-- here.
local H200 <const> = {
  -- Dense peaks of tensor cores; f32 has none. `shares` says what products reach of them.
  flops_per_s = { f32 = 62e12, f16 = 920e12, bf16 = 920e12 },
  bytes_per_s = 4.0e12,      -- a copy: 4.29e12
  enqueue_ns = 4500,         -- a launch, with the call's way through Lua and the core
  task_ns = 1500,            -- the gap between two kernels
  -- By the data sheets, for each GPU: within a machine 18 links of 20.6 GB/s, and between machines
  -- a port of 400 Gbit/s.
  links = {
    { ranks = 8, latency_ns = 3000, bytes_per_s = 370e9 },
    { latency_ns = 10e3, bytes_per_s = 47e9 },
  },
  shares = {
    matmul = { flops = 0.77 },
    -- With sums in a fixed order. The gradient writes and reads its scores, which `bytes` does not
    -- count.
    attention = { flops = 0.33 },
    ["attention gradient"] = { flops = 0.20 },
    norm = { bytes = 0.72 },
    -- Between loads and stores it waits for the sums of a row. It also adds up those of parts.
    ["norm gradient"] = { bytes = 0.70 },
    gelu = { bytes = 0.75 },
    ["linear gradient"] = { bytes = 0.70 },
    cross_entropy = { bytes = 0.60 },
    ["cross_entropy gradient"] = { bytes = 0.80 },
    -- It reads the logits twice, the second time from a cache.
    ["cross_entropy in place"] = { bytes = 0.55 },
    softmax = { bytes = 0.60 },
    ["softmax gradient"] = { bytes = 0.60 },
    embedding = { bytes = 0.80 },
    ["embedding gradient"] = { bytes = 0.50 },
    optimizer = { bytes = 0.75 },
    add = { bytes = 0.85 },
    cast = { bytes = 0.60 },
    -- It reads its operand twice, unless a kernel has given the greatest size of it; it also writes
    -- the transpose.
    ["fp8 encode"] = { bytes = 0.60 },
    ["fp8 span most"] = { bytes = 0.70 },
    ["fp8 span encode"] = { bytes = 0.60 },
    ["fp8 span decode"] = { bytes = 0.60 },
    copy = { bytes = 0.70 },
    reduce = { bytes = 0.70 },
  },
}

-- The chip of an H200 with slower memory.
local H100 <const> = { bytes_per_s = 2.8e12 }
for name, value in pairs(H200) do
  if H100[name] == nil then H100[name] = value end
end

return { h100 = H100, h200 = H200 }
