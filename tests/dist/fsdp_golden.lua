-- Golden data of sharded training: the cases for as many ranks as there are, under the case's own
-- strategy and under others.
local ms = require "moonshard"
local core = require "moonshard.core"
local golden = require "moonshard.cli.golden.fsdp"
local report = require "moonshard.cli.golden.report"
local options = ms.config { folder = "", strategies = "own" }

local file = assert(io.open(options.folder .. "/manifest.json"))
local manifest = core.json_decode(file:read "a")
file:close()

local found, count = report.new "fsdp", 0
for strategy in options.strategies:gmatch "%S+" do
  for _, case in ipairs(manifest.fsdp) do
    for key, value in pairs(case) do if value == core.json_null then case[key] = nil end end
    if case.ranks == ms.world_size() then
      count = count + 1
      found:begin(("%s (%s)"):format(case.case, strategy))
      local tensors = assert(ms.safetensors.load(("%s/%s"):format(options.folder, case.file)))
      golden.run(case, tensors, found, strategy ~= "own" and { strategy = strategy } or nil)
    end
  end
end
for _, line in ipairs(found.failures) do print(line) end
print(("%d cases, %d failures, largest %.2g of its tolerance (%s)"):format(count, #found.failures,
  found.share, found.place))
