-- What ranks hold differently, in checkpoints: alone.lua holds what each rank expects. And what
-- ms.train refuses on several ranks.
local command = require "command"

describe("values that each rank has of its own", function()
  it("come back bit for bit on as many ranks, and merged on others", function()
    local folder = command.folder()
    local function job(ranks, what)
      return command.on_ranks("alone", ranks, ("folder='%s' hooks='%s/recipes/hooks' what=%s")
        :format(folder, command.source, what))
    end
    local out = job("2", "save")
    assert.truthy(out:find("weights of ranks 0 and 1 differ (0.weight first): each rank's are \z
      saved", 1, true), out)
    job("2 --thread-ranks", "load")
    for _, ranks in ipairs { "1", "3 --thread-ranks" } do job(ranks, "other") end
    command.remove(folder)
  end)

  -- The format that older versions read is kept where ranks hold the same.
  it("alone change the format", function()
    local folder = command.folder()
    for case, version in pairs { ["ms.ddp(m)"] = 1, ["ms.nn.alone(m, { merge = 'mean' })"] = 3,
      ["ms.fsdp(m)"] = 2 } do
      command.write(folder .. "/r.lua", ([[
        local ms = require "moonshard"
        local m = ms.nn.Linear(2, 1)
        local model = %s
        ms.no_grad(function()
          if not ms.nn.is_module(model.module) then m.weight:add_(ms.rank()) end
        end)
        assert(ms.checkpoint.save("kept", { model = model, step = 1, note = "same" }))]])
        :format(case))
      command.succeed(folder, "run r.lua -n 2")
      local text = command.read(folder .. "/kept/step-00000001/manifest.json")
      assert.equal(version, tonumber(text:match '"version":(%d+)'), case)
      command.remove(folder .. "/kept")
    end
    command.remove(folder)
  end)
end)

describe("ms.train on several ranks", function()
  local function run(folder, model, options, ranks)
    command.write(folder .. "/r.lua", ([[
      local ms = require "moonshard"
      local m = ms.nn.Sequential(ms.nn.Linear(4, 2), ms.nn.Linear(2, 1))
      local model = %s
      local optimizer = ms.optim.sgd(m, { lr = 0.1 })
      ms.train { model = model, optimizer = optimizer, steps = 2, run = "run", %s
        data = function() return ms.full(ms.rank() + 1, { 2, 4 }), ms.ones { 2, 1 } end,
        loss = function(net, x, y) return ((net(x) - y) ^ 2):mean() end }
      print "trained"]]):format(model, options))
    local code, out, err = command.run(folder, "run r.lua -n " .. ranks)
    command.remove(folder .. "/run")
    return code, out, err
  end

  it("refuses weights that nothing reduces", function()
    local folder = command.folder()
    for _, case in ipairs { { "m", "0.weight" },
      { "ms.nn.Sequential(ms.ddp(m[1]), m[2])", "1.weight" } } do
      local code, out, err = run(folder, case[1], "after_backward = function() end,", 2)
      assert.equal(1, code, err)
      assert.truthy(err:find(("train: nothing reduces the gradient of '%s' over the 2 ranks")
        :format(case[2]), 1, true), err)
      for _, way in ipairs { "ms.ddp", "ms.fsdp", "ms.nn.alone", "by_hand" } do
        assert.truthy(err:find(way, 1, true), err)
      end
      assert.falsy(out:find("step", 1, true), out)
    end
    command.remove(folder)
  end)

  it("takes what is reduced, sharded, declared or frozen, and averages by hand", function()
    local folder = command.folder()
    for _, case in ipairs {
      { "m", "", 1 },
      { "m", "by_hand = true,", 2 },
      { "ms.ddp(m)", "", 2 },
      { "ms.ddp(m, { ignored = { '1%..*' } })", "", 2 },
      { "ms.ddp(m, { comm_hook = ms.hooks.noop() })", "", 2 },
      { "ms.nn.alone(m, { merge = 'rank0' })", "", 2 },
      { "ms.nn.owned(m, ms.world(), { values = 'kept' })", "", 2 },
      { "(function() ms.nn.alone(m[1], { merge = 'mean' }) m[2].weight:requires_grad_(false) \z
        m[2].bias:requires_grad_(false) return m end)()", "", 2 },
    } do
      local code, out, err = run(folder, table.unpack(case))
      assert.equal(0, code, case[1] .. err)
      assert.truthy(out:find("trained", 1, true))
    end
    command.remove(folder)
  end)
end)

describe("nn.alone", function()
  it("refuses what is no module, no merge, or reduced", function()
    local folder = command.folder()
    for call, text in pairs {
      ["ms.nn.alone(3, { merge = 'mean' })"] = "nn.alone: module must be a module",
      ["ms.nn.alone(m, { merge = 'sum' })"] = "\"mean\" or \"rank0\", not 'sum'",
      ["ms.nn.alone(m)"] = "\"mean\" or \"rank0\", not nothing",
      ["ms.nn.alone(m, { merg = 'mean' })"] = "did you mean 'merge'",
      ["ms.ddp(m) ms.nn.alone(m, { merge = 'mean' })"] = "ddp reduces the gradient of 'weight'",
      ["ms.fsdp(m) ms.nn.alone(m, { merge = 'mean' })"] = "'weight' is sharded by fsdp",
      ["ms.ddp(ms.nn.alone(m, { merge = 'mean' }))"] = "ddp: 'weight' is declared by nn.alone",
      ["ms.fsdp(ms.nn.alone(m, { merge = 'mean' }))"] = "fsdp: 'weight' is declared by nn.alone",
    } do
      command.write(folder .. "/r.lua", ([[
        local ms = require "moonshard"
        local m = ms.nn.Linear(2, 1)
        %s]]):format(call))
      local code, _, err = command.run(folder, "run r.lua -n 2")
      assert.equal(1, code, call .. err)
      assert.truthy(err:find(text, 1, true), call .. err)
    end
    command.remove(folder)
  end)
end)
