-- recipes/guides/method.md, as a reader follows it: a link written for ms.ddp, then for ms.fsdp,
-- checked with known gradients, counted and measured.
local command = require "command"
local guide = require "guide"

-- What the test makes smaller: all else is as in the page.
local TINY <const> = "steps=3 data=CHANGELOG.md length=16 batch=4 model.layers=1 model.width=32 \z
  model.heads=2 every.sample=0"
local SMALL <const> = {
  ["steps=200"] = TINY, ["bench hooks"] = "bench hooks --steps 1 --width 64 --batch 1 --links none",
}

describe("the guide to a method from a paper", function()
  local folder = guide.folder()
  teardown(function() command.remove(folder) end)
  local shown = 0

  for _, block in ipairs(guide.blocks(guide.read "method")) do
    if block.kind == "lua" then
      it("has a file", function() assert.truthy(guide.write_file(folder, block.text)) end)
    else
      for _, one in ipairs(guide.commands(block.text)) do
        shown = shown + ((one.shown or one.fails) and 1 or 0)
        it(one.line, function() guide.try(folder, one, SMALL) end)
      end
    end
  end

  it("says what its commands print", function() assert.is_true(shown >= 15, shown) end)

  -- error_feedback asks what they sent.
  it("has links that fit into other chains", function()
    command.write(folder .. "/chain.lua", [[
      local ms = require "moonshard"
      for _, wrap in ipairs { ms.ddp, ms.fsdp } do
        for _, name in ipairs { "ef21", "qsgd" } do
          local link = dofile(name .. ".lua") {}
          local hook = ms.hooks.chain { "error_feedback", link }
          local net = wrap(ms.nn.Linear(5, 3), { comm_hook = hook })
          local optimizer = ms.optim.sgd(net, { lr = 0.1 })
          for _ = 1, 3 do
            net(ms.ones { 2, 5 }):sum():backward()
            optimizer:step()
          end
        end
      end
      ms.log "done"]])
    assert.matches("done", command.succeed(folder, "run chain.lua -n 2"))
  end)

  -- The check goes on after the switch: it agrees only if h and the mean are those of before.
  it("keeps the state of a link whose file is edited", function()
    local wait = [[optimizer:step()
  if step == 1 and ms.rank() == 0 and os.rename("next.lua", "live.lua") then
    local core = require "moonshard.core"
    local from = core.clock_ms()                            -- files are looked at every 20 ms
    while core.clock_ms() - from < 25 do end
  end]]
    local check, link = command.read(folder .. "/check.lua"), command.read(folder .. "/ef21.lua")
    check = check:gsub("optimizer:step%(%)", wait, 1):gsub("= 24, 6", "= 24, 12", 1)
    command.write(folder .. "/edited.lua", check)
    for _, shard in ipairs { "", " shard=full_shard" } do
      command.write(folder .. "/live.lua", link)
      command.write(folder .. "/next.lua", link .. "-- edited\n")
      local out = command.succeed(folder, "run edited.lua -n 2 --watch hook=live.lua" .. shard)
      assert.matches("is in force from step", out)
      assert.matches("steps 0 to 11 agree", out)
    end
  end)

  it("names its guide to links in the folder of methods", function()
    assert.truthy(command.read(command.source .. "/recipes/hooks/README.md")
      :find("(../guides/method.md)", 1, true))
  end)
end)

it("the guide to a method is at most 1,200 words", function()
  assert.is_true(guide.words(guide.read "method") <= 1200, guide.words(guide.read "method"))
end)
