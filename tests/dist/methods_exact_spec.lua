-- Links that send each rank its own part of a bucket, on known gradients: methods_exact.lua holds
-- what each rank expects. And runs of the methods of recipes/ that are resumed; those of local= are
-- in local_spec.lua and local_methods_spec.lua.
local command = require "command"
local ms = require "moonshard"

describe("a link that sends each rank its own part", function()
  local cases = {
    parts = { "ddp", "flat", "rows" }, loco = { "ddp", "flat", "rows" },
    zeropp = { "ddp", "flat", "rows" }, sdp4bit = { "flat", "rows" }, odd = { "flat", "rows" },
    feedback = { "flat", "rows" },
  }
  for what, layouts in ms.sorted_pairs(cases) do
    it("gives the known result: " .. what, function()
      local jobs = {}
      for _, layout in ipairs(layouts) do
        jobs[#jobs + 1] = { 2, layout }
        jobs[#jobs + 1] = { what == "parts" and 3 or 4, layout }
        if layout ~= "ddp" and what ~= "feedback" then
          jobs[#jobs + 1] = { 4, layout .. " hybrid=true" }
        end
      end
      for _, job in ipairs(command.some(2, jobs)) do
        command.on_ranks("methods_exact", job[1] .. " --thread-ranks",
          ("source='%s' what=%s layout=%s"):format(command.source, what, job[2]))
      end
    end)
  end
end)

describe("a method that is resumed", function()
  local folder
  before_each(function()
    folder = command.folder()
    command.write(folder .. "/text", command.read(command.source .. "/README.md"):sub(1, 4000))
  end)
  after_each(function() command.remove(folder) end)
  local function train(options, name)
    local out = command.succeed(folder, ("run '%s/recipes/gpt_bytes.lua' --thread-ranks data=text \z
      length=16 batch=4 dtype=f32 every.eval=5 every.sample=0 every.save=5 model.layers=1 \z
      model.width=32 model.heads=2 steps=10 run=%s %s"):format(command.source, name,
      (options:gsub("HOOKS", command.source .. "/recipes/hooks"))))
    local losses = {}
    for i, line in ipairs(command.metrics(folder .. "/" .. name)) do
      losses[i] = ("%d %.9g"):format(line.step, line.loss)
    end
    return out, losses, assert(ms.safetensors.load(("%s/%s/model/model.safetensors"):format(folder,
      name)))
  end
  local cases = {
    "-n 2 hook=loco hook.reset=4 shard=full_shard",
    "-n 4 hook=zeropp hook.ranks=2 shard=full_shard",
    "-n 4 hook=sdp4bit hook.ranks=2 shard=shard_grad_op", "-n 2 hook=onebit_adam hook.warmup=3",
    "-n 2 hook=HOOKS/powersgd.lua hook.start_step=2", "-n 2 hook=dgc hook.fraction=0.1",
    "-n 2 hook=HOOKS/random_k.lua", "-n 2 hook=int8_all_to_all", "-n 2 hook=demo",
    "-n 2 hook=dion hook.rank=2", "-n 2 local=muloco local.period=3",
    "-n 2 optimizer=muon shard=full_shard",
    "-n 2 optimizer=shampoo optimizer.every=3 shard=full_shard",
  }
  -- The same methods in other models.
  if command.full then
    table.move({
      "-n 2 hook=loco hook.reset=4", "-n 2 hook=zeropp shard=full_shard",
      "-n 2 hook=sdp4bit shard=full_shard", "-n 2 optimizer=shampoo optimizer.every=3",
    }, 1, 4, #cases + 1, cases)
  end
  for _, options in ipairs(cases) do
    it("goes on bit for bit: " .. options, function()
      local _, losses, whole = train(options, "whole")
      local out, later, resumed = train(options .. " resume=whole/step-00000005", "again")
      assert.matches("resumed from", out)
      assert.same({ table.unpack(losses, 6, 10) }, { table.unpack(later, #later - 4) })
      for name, value in pairs(whole) do
        assert.equal(0, (value - resumed[name]):abs():max():item(), name)
      end
    end)
  end
end)
