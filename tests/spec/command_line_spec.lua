-- The program's commands but `run` and `check`: what they answer, what they refuse, and the peak that figures are shares of.
-- ctest: serial
local core = require "moonshard.core"
local command = require "command"

describe("the command line", function()
  local folder
  before_each(function() folder = command.folder() end)
  after_each(function() command.remove(folder) end)

  it("prints help of every command on stdout", function()
    for _, name in ipairs { "run", "check", "info", "repl", "test", "bench step", "bench gemm", "bench optim", "bench enqueue", "bench hooks" } do
      for _, switch in ipairs { "--help", "-h" } do
        local out, err = command.succeed(folder, name .. " " .. switch)
        assert.matches("^Usage: moonshard " .. name, out)
        assert.equal("", err)
      end
    end
    assert.matches("^usage: moonshard bench step|gemm", (command.succeed(folder, "bench --help")))
  end)

  it("refuses switches that make no sense with code 2, saying what is expected", function()
    for arguments, text in pairs {
      ["info --threads=0"] = "1 or more", ["info --threads=x"] = "an integer", ["info --memory=1.5"] = "an integer", ["info --seed=x"] = "an integer",
      ["info extra"] = "too many arguments", ["info --devise cpu"] = "%-%-device", ["bench"] = "usage", ["bench speed"] = "usage",
      ["bench step --steps 0"] = "1 or more", ["bench optim --parameters 0"] = "1 or more", ["bench optim --kind addam"] = "must be one of",
      ["bench gemm --device sim"] = "sim", ["run -n 0 x.lua"] = "1 or more", ["run -n x x.lua"] = "an integer", ["run"] = "which recipe", ["check"] = "which recipe",
    } do
      local code, _, err = command.run(folder, arguments)
      assert.equal(2, code, arguments .. "\n" .. err)
      assert.matches(text, err, arguments)
    end
  end)

  it("keeps matrix products within the instruction set that was asked for", function()
    local function products(cap)
      local out = command.succeed(folder, "info", cap and "MOONSHARD_CPU=" .. cap)
      return out:match "kernels +(%S+)", out:match "matrix products +oneDNN [%d.]+, (%S+)"
    end
    local best, any = products()
    if not any then pending "these matrix products do not tell what they use" return end
    local order = { "portable", "avx2", "avx512", "avx512bf16" }
    local allowed = { portable = "^sse41$", avx2 = "^avx2", avx512 = "^avx512_core$", avx512bf16 = "^avx512_core_bf16$" }
    for _, cap in ipairs(order) do
      local kernels, isa = products(cap)
      assert.equal(cap, kernels)
      assert.matches(allowed[cap], isa)
      assert.is_nil(isa:match "amx")
      if cap == best then break end
    end
  end)

  it("writes no trace silently: who asked for one hears why there is none", function()
    command.write(folder .. "/small.lua", [[
      local ms = require "moonshard"
      ms.ones { 4 }:sum():item()
      assert(os.execute "rm -r traces")
    ]])
    assert(os.execute(("mkdir '%s/traces'"):format(folder)))
    local _, err = command.succeed(folder, "run --trace traces/t.json small.lua")
    assert.matches("the trace was not written: .*traces/t.json", err)
  end)
end)

describe("the peak of products", function()
  local folder
  before_each(function() folder = command.folder() end)
  after_each(function() command.remove(folder) end)

  local script = [[
    local core, peak = require "moonshard.core", require "moonshard.peak"
    local first, measured = peak.flops "f32"
    local second, again = peak.flops "f32"
    assert(first > 0 and first == second and not again)
    assert(peak.raise("f32", first / 2) == first and peak.flops "f32" == first)
    if measured then assert(peak.raise("f32", first * 2) == first * 2 and peak.flops "f32" == first * 2) end
    print(measured or false)
  ]]

  it("is measured once, and raised by what products are seen to reach", function()
    command.write(folder .. "/peak.lua", script)
    assert.equal("true\n", (command.succeed(folder, "run peak.lua")))
    assert.equal("false\n", (command.succeed(folder, "run peak.lua")))
    assert.equal("true\n", (command.succeed(folder, "run --threads 1 peak.lua")))
  end)

  it("is measured anew where its file holds something else", function()
    command.write(folder .. "/peak.lua", script)
    command.succeed(folder, "run peak.lua")
    local path = folder .. "/cache/moonshard/peak.json"
    for _, text in ipairs { "[1, 2]", "{", "7", '{"a": [1], "b": "c"}', command.read(path):gsub(":%s*[%d.e+]+", ":0"), (command.read(path):gsub(":%s*[%d.e+]+", ":null")) } do
      command.write(path, text)
      assert.equal("true\n", (command.succeed(folder, "run peak.lua")), text)
    end
  end)

  it("is at least what bench shows", function()
    local result = core.json_decode((command.succeed(folder, "bench gemm --json")))
    for _, row in ipairs(result.products) do assert.is_true(row.gflops > 0 and row.share_of_peak <= 1) end
  end)
end)
