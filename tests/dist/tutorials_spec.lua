-- The tutorials of recipes/README.md, run as the page says, with what each of them claims.
local command = require "command"
local store = require "moonshard.checkpoint.store"
local ms = require "moonshard"

local text = assert(command.read(command.source .. "/recipes/README.md"))
local section = text:match "\n## Tutorials\n(.-)\n## "

local folder
before_each(function() folder = command.folder() end)
after_each(function() command.remove(folder) end)

-- The command of a tutorial, on this machine's files.
local function line_of(name)
  local line = section:match("`%./moonshard (run recipes/" .. name .. "[^`]*)`")
  assert(line, name .. " is not in the table")
  return (line:gsub("recipes/", command.source .. "/recipes/"))
end

-- Texts that a tutorial reads by default are named from the top of a checkout.
local function run(name, rest)
  return command.succeed(folder, line_of("tutorials/" .. name) .. " " .. (rest or ""))
end

describe("the tutorial", function()
  it("module.lua learns what it says", function()
    local out = run("module.lua", "run=out" .. (command.full and "" or " steps=250"))
    assert.matches("layers%.1%.gate: 64 numbers", out)
    local right = tonumber(out:match "(%d+)%% of the digits are at their place")
    assert.is_true(right >= 99, out)
  end)

  it("loop.lua goes on with the bits of a run that was not stopped", function()
    local data = (" data='%s/README.md'"):format(command.source)
    -- Stopped in the middle of a long run.
    local code = select(3, os.execute(([[cd '%s' && { timeout 1800 '%s' %s %s run=cut >out 2>&1 & }
      job=$!
      until grep -qs '"step":7[,}]' cut/metrics.jsonl; do kill -0 $job || break; done
      pkill -TERM -P $job -x moonshard
      wait $job]]):format(folder, command.program, line_of "tutorials/loop.lua",
        data .. " steps=1000000")))
    assert.equal(75, code, command.read(folder .. "/out"))
    local saved = store.list(folder .. "/cut")
    local steps = tonumber(saved[#saved].path:match "step%-(%d+)$") + 10
    local tensors = {}
    for _, run_of in ipairs { "cut", "whole" } do
      run("loop.lua", ("%s steps=%d run=%s"):format(data, steps, run_of))
      tensors[run_of] = assert(command.read(("%s/%s/step-%08d/tensors.safetensors")
        :format(folder, run_of, steps)))
    end
    assert.is_true(tensors.cut == tensors.whole)
  end)

  it("finetune.lua lowers the loss, and writes folders that are read again", function()
    -- Without long ranges a model that knows less learns a text that is easier than the tutorial's.
    local data, sizes = command.source .. "/lua/moonshard/train/init.lua", ""
    if not command.full then
      local lines = {}
      for i = 1, 400 do lines[i] = ("step %d: the loss is %.3f\n"):format(i, 3 / i) end
      data = command.write(folder .. "/text", table.concat(lines))
      sizes = "pretrain=40 steps=40 batch=4 length=32"
    end
    local out = run("finetune.lua", ("run=out data='%s' first='%s/README.md' %s")
      :format(data, command.source, sizes))
    local before, after = out:match "held%-out text ([%d.]+) before, ([%d.]+) after"
    assert.is_true(tonumber(after) < tonumber(before) - 0.1, out)
    local model = assert(ms.nn.pretrained(folder .. "/out/model"))
    assert.is_true(model:parameters()[1]:is_finite():all():item() ~= 0)
    assert(assert(ms.nn.pretrained(folder .. "/out/base")):load_adapters(folder .. "/out/adapter"))
  end)

  it("hook.lua sends the bytes and keeps the order of losses that the page shows", function()
    local bytes, losses = {}, {}
    local out = run("hook.lua", command.full and "" or "steps=100")
    for sent, loss in out:gmatch "(%d+) bytes, waits +[%d.]+ ms +loss ([%d.]+)" do
      bytes[#bytes + 1], losses[#losses + 1] = sent, tonumber(loss)
    end
    local shown = {}
    for sent in section:gmatch "\n    [%a, ]+(%d+) bytes" do shown[#shown + 1] = sent end
    assert.same(shown, bytes)
    local most = command.full and 0.2 or 0.25
    assert.is_true(losses[1] < most and losses[2] < most and losses[4] < 0.3 and losses[3] > 0.4)
  end)
end)
