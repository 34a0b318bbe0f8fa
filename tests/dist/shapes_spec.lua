-- What links hand back in another shape: shapes.lua holds what each rank expects. And what is not
-- accepted, which ends a job.
local command = require "command"

describe("numbers that a link hands back in another shape", function()
  for _, ranks in ipairs { "1", "2", "4 --thread-ranks" } do
    it("count as they are, on " .. ranks, function() command.on_ranks("shapes", ranks) end)
  end

  it("must be as many, and of that dtype", function()
    local folder = command.folder()
    for result, text in pairs {
      ["t:narrow(1, 1, 1)"] = "it returned [1] f32, expected is [",
      ["t:reshape(1, -1):narrow(2, 1, 2)"] = "it returned [2] f32, expected is [",
      ["t:to 'f16':reshape(1, -1)"] = "f16, expected is [",
      ["t:sum()"] = "it returned [1] f32, expected is [",
    } do
      for _, wrap in ipairs { "ddp", "fsdp" } do
        command.write(folder .. "/r.lua", ([[
          local ms = require "moonshard"
          local model = ms.%s(ms.nn.Linear(3, 4), { comm_hook = function(bucket, next)
            return next(bucket):and_then(function(t) return %s end)
          end })
          model(ms.ones { 1, 3 }):sum():backward()]]):format(wrap, result))
        local code, _, err = command.run(folder, "run r.lua -n 2")
        assert.equal(1, code, err)
        assert.truthy(err:find(text, 1, true), result .. err)
      end
    end
    command.remove(folder)
  end)
end)
