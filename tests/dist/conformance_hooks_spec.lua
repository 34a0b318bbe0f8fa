-- PyTorch's own tests of comm hooks, quantized collectives, and optimizers that overlap or are
-- sharded: conformance_hooks.lua names each. Not covered: tests of model parallelism and device
-- placement.
local names, right, written, wrong = require "conformance".all("tests/dist/conformance_hooks.lua",
  { { 2, " --thread-ranks" }, { 3, "" } })

describe("PyTorch's", function()
  it("tests have all run", function() assert.is_true(#names >= written and written > 30, wrong) end)
  for _, name in ipairs(names) do it(name, function() assert.is_true(right[name], wrong) end) end
end)
