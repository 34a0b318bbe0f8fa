-- Golden data of sharded training: the cases for as many ranks as there are, under the case's own
-- strategy and under others. In long ranges each runs with both layouts; otherwise with one, and
-- only some under other strategies.
local ms = require "moonshard"
local core = require "moonshard.core"
local golden = require "moonshard.cli.golden.fsdp"
local report = require "moonshard.cli.golden.report"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local options = ms.config { folder = "", strategies = "own" }

local file = assert(io.open(options.folder .. "/manifest.json"))
local manifest = core.json_decode(file:read "a")
file:close()

local found, count, way = report.new "fsdp", 0, 0
-- All ranks have the same whole tensors: each compares its share of them, in long ranges all. What
-- is missing is told by all. Only rank 0 is asked to compare logits, so these take no turn.
for _, name in ipairs { "relative", "absolute" } do
  local compare, turn = found[name], 0
  found[name] = function(self, what, ours, theirs, tolerance)
    local takes_turn = what ~= "logits"
    turn = (turn + (takes_turn and 1 or 0)) % ms.world_size()
    if expect.full or not takes_turn or not ours or not theirs or turn == ms.rank() then
      compare(self, what, ours, theirs, tolerance)
    end
  end
end
for strategy in options.strategies:gmatch "%S+" do
  local number = 0
  way = way + 1
  for _, case in ipairs(manifest.fsdp) do
    for key, value in pairs(case) do if value == core.json_null then case[key] = nil end end
    local is_here = case.ranks == ms.world_size()
    number = number + (is_here and 1 or 0)
    if is_here and (strategy == "own" or expect.takes(number + way, 8)) then
      count = count + 1
      found:begin(("%s (%s)"):format(case.case, strategy))
      local tensors = assert(ms.safetensors.load(("%s/%s"):format(options.folder, case.file)))
      golden.run(case, tensors, found, {
        strategy = strategy ~= "own" and strategy or nil,
        layout = not expect.full and ((number + way) % 2 == 0 and "flat" or "rows") or nil,
      })
    end
  end
end
for _, line in ipairs(found.failures) do print(line) end
print(("%d cases, %d failures, largest %.2g of its tolerance (%s)"):format(count, #found.failures,
  found.share, found.place))
