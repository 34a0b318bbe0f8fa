-- Every recipe and tutorial also runs inside of ms.autocast, in bf16 and f16: whatever it does with
-- tensors, results of 16 bits and weights of f32 go together.
local command = require "command"
local ms = require "moonshard"

local RUN <const> = [[
local ms = require "moonshard"
ms.autocast(os.getenv "DTYPE", function() dofile(os.getenv "RECIPE") end)
]]
local SMALL <const> = "steps=3 length=32 batch=2 model.layers=2 model.width=64 model.heads=4 \z
  every.eval=0 every.sample=0 data=README.md"

local RECIPES <const> = {
  gpt_bytes = SMALL,
  gpt2 = SMALL .. " bytes=true accumulate=1",
  llama = SMALL .. " bytes=true accumulate=1",
  mnist = "steps=3 batch=10",
  ddp_by_hand = "steps=3", gpt2_hybrid = "steps=3", llama_fsdp = "steps=3",
  ["parallel/tensor"] = "steps=3 length=32 batch=4 sequence=true",
  ["parallel/pipeline"] = "steps=3 length=32 batch=4",
  ["parallel/context"] = "steps=3 length=32 batch=4 how=ring zigzag=true every.eval=0",
  ["parallel/experts"] = "steps=3 length=32 batch=4 every.eval=0",
  ["parallel/gpt2_3d"] = "steps=3 length=32 batch=4 stages=2 tensor=1",
}
-- These have no options, and train for some seconds. Sanitizers see them in dist.tutorials.
local TUTORIALS <const> = { "finetune", "hook", "loop", "module" }

describe("inside of autocast", function()
  local folder
  before_each(function()
    folder = command.folder()
    command.write(folder .. "/run.lua", RUN)
    local source = os.getenv "MOONSHARD_SOURCE"
    for _, name in ipairs { "README.md", "lua" } do
      assert(os.execute(("ln -s '%s/%s' '%s/%s'"):format(source, name, folder, name)))
    end
  end)
  after_each(function() command.remove(folder) end)

  local function run(recipe, dtype, ranks, options)
    command.succeed(folder, ("run run.lua -n %d %s"):format(ranks, options),
      ("RECIPE='%s/recipes/%s.lua' DTYPE=%s"):format(os.getenv "MOONSHARD_SOURCE", recipe, dtype))
  end

  local turn = 0
  for name, options in ms.sorted_pairs(RECIPES) do
    turn = turn + 1
    local dtypes <const> = { "bf16", "f16" }
    for _, dtype in ipairs(command.short and { "bf16" } or command.some(2, dtypes, turn % 2 + 1)) do
      it(("runs the recipe %s in %s"):format(name, dtype), function()
        if name == "mnist" then
          command.write_digits(folder)
          options = options .. " data=."
        end
        run(name, dtype, 2, options)
      end)
    end
  end
  for _, name in ipairs(command.short and {} or command.some(2, TUTORIALS)) do
    for _, dtype in ipairs(command.some(2, { "bf16", "f16" })) do
      it(("runs the tutorial %s in %s"):format(name, dtype), function()
        run("tutorials/" .. name, dtype, 1, "")
      end)
    end
  end
end)
