-- moonshard bench kernels: that it measures each kernel of the tables, on the CPU and over the
-- stand-in for a GPU, and what its figures are.
local command = require "command"
local core = require "moonshard.core"

local ON_GPU = ("MOONSHARD_CUDA_DRIVER='%s'"):format(os.getenv "MOONSHARD_STAND_IN")

describe("bench kernels", function()
  local folder
  before_each(function() folder = command.folder() end)
  after_each(function() command.remove(folder) end)

  local function bench(switches, settings)
    return core.json_decode((command.succeed(folder, "bench kernels --small --json " .. switches,
      settings)))
  end

  -- The names of all tasks of the GPU's tables, from their sources.
  local function declared()
    local names = {}
    local list = command.read(command.source .. "/engine/ops/backend.h")
      :match "define MS_ELEMENTWISE_KERNELS%(K%)(.-)/%* K%(NAME%)"
    for name in list:gmatch "K%(([%w_]+)%)" do names[name] = true end
    for _, layer in ipairs { "ops", "optim" } do
      local path = ("%s/engine/%s/cuda"):format(command.source, layer)
      for _, file in ipairs(core.list(path)) do
        local text = file:match "%.c$" and command.read(path .. "/" .. file) or ""
        for name in text:gmatch 'MS_CUDA_TASK[%u_]*%(%s*[%w_]+,%s*"([^"]+)"' do
          names[name] = true
        end
      end
    end
    return names
  end

  it("measures every kernel of the tables", function()
    local names, found = declared(), bench("--device cuda", ON_GPU)
    assert.is_true(names.gelu_backward and names["norm gradient"] and names.gradient_norm)
    for _, row in ipairs(found.kernels) do
      -- In a trace, the name of an attention task ends with a comma and its library.
      for _, task in ipairs(row.tasks) do names[task:match "^[^,]*"] = nil end
      if row.family == "attention" then assert.equal("own kernels", row.way, row.kernel) end
    end
    assert.same({}, names)
    assert.equal("cuda", found.device)
  end)

  it("tells time, rate, share of the ceiling, and the aim", function()
    local found = bench ""
    assert.equal("cpu", found.device)
    assert.is_true(found.copy_gb_s > 0 and found.product_tflop_s > 0)
    assert.is_true(#found.kernels > 100)
    for _, row in ipairs(found.kernels) do
      local name = row.family .. " " .. row.kernel
      assert.is_true(row.us > 0, name)
      assert.is_true((row.gb_s == nil) ~= (row.tflop_s == nil), name)
      local ceiling = row.gb_s and found.copy_gb_s or found.product_tflop_s
      assert.near((row.gb_s or row.tflop_s) / ceiling, row.share, 1e-6 * row.share, name)
      assert.near(row.gb_s and row.bytes / row.us / 1e3 or row.flops / row.us / 1e6,
        row.gb_s or row.tflop_s, 1e-6 * (row.gb_s or row.tflop_s), name)
      assert.equal(row.gb_s and 0.85 or 0.8, row.target, name)
    end
  end)

  it("counts what a step of AdamW moves, and the FLOPs of a product", function()
    local rows = {}
    for _, row in ipairs(bench("--dtype f32").kernels) do rows[row.kernel] = row end
    -- 64 x 32 embeddings and a block of width 32: parameter and two states read and written, the
    -- gradient read.
    local elements = 64 * 32 + 12 * 32 * 32 + 13 * 32
    assert.equal(7 * 4 * elements, rows.adamw.bytes)
    assert.equal(3 * 4 * elements, rows["clipping that scales"].bytes)
    assert.equal(2 * 32 * 32 * 96, rows["32 x 32 -> 96, bias"].flops)
    assert.equal(2 * 2 * 32 * 32 * 96, rows["32 x 32 -> 96, bias, gradient"].flops)
    -- Of 16 queries of 16 numbers, query i sees i keys: two products of 2 FLOPs, for 2 x 2 heads.
    assert.equal(2 * 2 * 4 * 16 * (16 * 17 / 2), rows.attention.flops)
  end)

  it("measures what --only names, and refuses what no kernel is called", function()
    local rows = bench("--only embedding").kernels
    assert.equal(4, #rows)
    local out = command.succeed(folder, "bench kernels --small --only adamw")
    assert.matches("^cpu, bf16, batch 2, length 16: copies %d+ GB/s, products [%d.]+ TFLOP/s\n",
      out)
    assert.matches("\noptimizers +adamw +[%d.]+ MB +[%d.]+ us +[%d.]+ GB/s +%d+%%  %(85%%%)\n",
      out)
    assert.matches("\nproducts +32 x 32 %-> 96, bias +0%.000196608 GFLOP +[%d.]+ us +[%d.]+ TFLOP",
      (command.succeed(folder, "bench kernels --small --only '32 x 32 -> 96, bias'")))
    for text, code in pairs { ["--only nothing"] = 2, ["--dtype f16"] = 2, ["--batch 0"] = 2 } do
      local found, _, err = command.run(folder, "bench kernels --small " .. text)
      assert.equal(code, found)
      assert.matches(text:match "^%-%-[%w]+", err)
    end
  end)
end)
