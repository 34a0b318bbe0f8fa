-- Models that are changed after they were wrapped: changed.lua holds what each rank expects.
local command = require "command"

describe("a model that is changed after it was wrapped", function()
  for _, strategy in ipairs {
    "ddp", "find_unused", "static_graph", "small_buckets", "clip", "error_feedback", "in_backward",
    "deferred", "fsdp", "no_shard",
  } do
    it("trains as on one rank, or is refused: " .. strategy, function()
      command.on_ranks("changed", "2 --thread-ranks", "strategy=" .. strategy)
    end)
  end
end)

describe("to", function()
  -- A dropped optimizer does not hinder it; functions of on_grad do.
  it("is refused where somebody would go on with the old values", function()
    local folder = command.folder()
    for _, case in ipairs {
      { [[ms.optim.sgd(m) m:to "bf16" print "fine"]], false },
      { [[local o = ms.optim.sgd(m)
          m:to "bf16" print(o)]], "to: 'weight' belongs to an optimizer" },
      { [[local remove = m.weight:on_grad(print)
          remove() m:to "bf16" print "fine"]], false },
      { [[m.weight:on_grad(print) m:to "bf16"]], "to: 'weight' has functions of on_grad" },
      { [[m.bias:on_grad_ready(print) m:to "bf16"]], "to: 'bias' has functions of on_grad" },
      { [[m = ms.ddp(m):unwrap() m:to "bf16" print "fine"]], false },
      { [[m = ms.ddp(m) m:to "bf16"]], "to: ddp reduces the gradient of 'weight'" },
      { [[local o = ms.optim.sgd(m) m:to "f32" print("fine", o)]], false },
    } do
      local script, text = case[1], case[2]
      command.write(folder .. "/r.lua", [[
        local ms = require "moonshard"
        local m = ms.nn.Linear(2, 1)
        ]] .. script)
      local code, out, err = command.run(folder, "run r.lua")
      assert.equal(text and 1 or 0, code, script .. err)
      assert.truthy((text and err or out):find(text or "fine", 1, true), err)
    end
    command.remove(folder)
  end)
end)
