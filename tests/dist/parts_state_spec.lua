-- Files and checkpoints of models of which ranks have parts: parts_state.lua holds what each rank
-- expects.
local command = require "command"

describe("models of parts", function()
  local grids = {
    { "1", 1, 1, "none" }, { "2", 2, 1, "none" }, { "4 --thread-ranks", 4, 1, "none" },
    { "4 --thread-ranks", 2, 2, "none" }, { "4 --thread-ranks", 2, 1, "ddp" },
    { "4 --thread-ranks", 2, 1, "fsdp" },
  }
  local function job(folder, grid, what)
    command.on_ranks("parts_state", grid[1],
      ("folder='%s' what=%s tensor=%d stages=%d wrap=%s"):format(folder, what, grid[2], grid[3],
        grid[4]))
  end

  it("are saved as whole tensors, and read by any other grid of ranks", function()
    local numbers = {}
    for i in ipairs(grids) do numbers[i] = i end
    for _, i in ipairs(command.some(2, numbers, 2)) do
      local folder, grid = command.folder(), grids[i]
      job(folder, grid, "save")
      job(folder, grid, "resume")
      for k, other in ipairs(grids) do
        local same_model = grid[3] == other[3]
        if same_model and (command.full or (i + k) % 3 == 0) then job(folder, other, "other") end
      end
      command.remove(folder)
    end
  end)
end)
