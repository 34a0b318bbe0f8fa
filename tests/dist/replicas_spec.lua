-- What ranks must hold alike: replicas.lua holds what each rank expects; and what a run ends with.
local command = require "command"

describe("check_replicas", function()
  for _, ranks in ipairs { "2", "4 --thread-ranks" } do
    it("finds what differs and nothing else, on " .. ranks, function()
      local folder = command.folder()
      command.on_ranks("replicas", ranks, ("folder='%s'"):format(folder))
      command.remove(folder)
    end)
  end

  -- A recipe whose last rank does something else in step 3.
  local function recipe(what, options)
    return ([[
      local ms = require "moonshard"
      local model = ms.ddp(ms.nn.Linear(4, 1))
      local optimizer = ms.optim.sgd(model, { lr = 0.1, momentum = 0.9 })
      local data = function() return ms.ones { 2, 4 }, ms.ones { 2, 1 } end
      ms.train { model = model, optimizer = optimizer, data = data, steps = 6, run = "run",
        loss = function(m, x, y) return ((m(x) - y) ^ 2):mean() end,
        after_step = function(step)
          if step == 3 and ms.rank() == 1 then %s end
        end, %s }
      print "trained"]]):format(what, options)
  end

  it("ends a run of ms.train with code 5", function()
    local folder = command.folder()
    local rate = "optimizer:groups()[1].lr = 0.2"
    local weight = "ms.no_grad(function() model.weight:add_(1) end)"
    for i, case in ipairs {
      { rate, "", "train: after step 5: 'optimizer/groups/1/lr' is 0.1 on rank 0, 0.2 on rank 1" },
      { weight, "", "train: after step 5: 'model/weight' of rank 1 differs from that of rank 0" },
      { weight, "check_replicas = 2", "train: after step 3: 'model/weight' of rank 1" },
      { weight, "save = { every = 3 }", "checkpoint.save: 'model/weight' of rank 1" },
      { "", "check_replicas = 1, save = { every = 2 }" },
    } do
      command.write(folder .. "/r.lua", recipe(case[1], case[2]))
      local code, out, err = command.run(folder, "run r.lua -n 2")
      if case[3] then
        assert.equal(5, code, err)
        assert.truthy(err:find(case[3], 1, true), err)
        assert.falsy(out:find("trained", 1, true))
        -- The checkpoint before it stays, and is the only one.
        local list = io.popen(("ls %s/run | grep step-"):format(folder))
        assert.equal(i == 4 and "step-00000003\n" or "", list:read "a")
        list:close()
      else
        assert.equal(0, code, err)
      end
      command.remove(folder .. "/run")
    end
    command.remove(folder)
  end)
end)
