-- PyTorch's own tests of sharded training: one spec for each case of conformance_fsdp.lua.
-- tests/README.md lists all of PyTorch's files, with where each is tested.
local conformance = require "conformance"

describe("PyTorch's sharded", function()
  conformance.each("tests/dist/conformance_fsdp.lua",
    { { 1, "" }, { 2, " --thread-ranks" }, { 4, "" } }, 30)
end)
