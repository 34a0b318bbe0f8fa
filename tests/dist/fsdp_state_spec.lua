-- States of sharded models and of their optimizers. fsdp_state.lua and fsdp_optimizer_state.lua
-- hold what each rank expects.
local command = require "command"
local full = os.getenv "MOONSHARD_TEST_FULL" == "1"
local folder
before_each(function() folder = command.folder() end)
after_each(function() command.remove(folder) end)

describe("fsdp's states", function()
  local function in_folder() return ("folder='%s'"):format(folder) end
  local function way(is_threads) return is_threads and " --thread-ranks" or "" end
  -- 4 ranks have all kinds of groups. In short ranges they are threads for optimizers' states.
  for _, ranks in ipairs(full and { 1, 2, 3, 4 } or { 1, 4 }) do
    it(("are right on %d ranks"):format(ranks), function()
      command.on_ranks("fsdp_state", ranks .. way(ranks == 3), in_folder())
    end)
    it(("of optimizers are right on %d ranks"):format(ranks), function()
      command.on_ranks("fsdp_optimizer_state", ranks .. way(ranks == (full and 3 or 4)))
    end)
  end
  it("need no more than a rank's part and two units", function()
    local model = full and "layers=12 width=768 heads=12 vocab=50257" or ""
    for _, ranks in ipairs(full and { 2, 4 } or { 3 }) do
      command.on_ranks("fsdp_state_memory", tostring(ranks), in_folder() .. " " .. model)
      os.execute(("rm -rf '%s/model' '%s/run'"):format(folder, folder))
    end
  end)
end)
