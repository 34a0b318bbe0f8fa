-- Unused parameters, static graphs, uneven inputs and delayed parameters on several ranks: ddp_graph.lua holds what each rank expects; here, the ways of running it, and
-- what a job says in which a rank leaves the others alone.
local command = require "command"
local folder
before_each(function() folder = command.folder() end)
after_each(function() command.remove(folder) end)

local ways = { processes = "", threads = " --thread-ranks" }

for ranks = 1, 4 do
  for name, way in pairs(ways) do
    it(("graphs that differ between ranks, and uneven inputs, give the bits of one process on %d ranks as %s"):format(ranks, name), function()
      local out = command.succeed(folder, ("run '%s/tests/dist/ddp_graph.lua' -n %d%s"):format(command.source, ranks, way))
      for rank = 0, ranks - 1 do assert.truthy(out:find(("rank %d of %d is done"):format(rank, ranks), 1, true), out) end
    end)
  end
end

-- Runs a script on 3 ranks; exit code and all that was said.
local function run(text, way)
  local script = command.write(folder .. "/script.lua", 'local ms = require "moonshard"\nlocal rank = ms.rank()\n' .. text)
  local code, out, err = command.run(folder, ("run '%s' -n 3%s"):format(script, way))
  return code, out .. err
end

for name, way in pairs(ways) do
  it("an error inside join ends the job for all, even where it is caught, as " .. name, function()
    local code, text = run([[
      local model = ms.ddp(ms.nn.Linear(4, 4))
      pcall(function()
        model:join({}, function()
          for step = 1, 3 do
            if rank == 1 and step == 2 then error "no more" end
            model(ms.ones { 2, 4 }):sum():backward()
          end
        end)
      end)
      ms.synchronize()
      model(ms.ones { 2, 4 }):sum():backward()
      ms.synchronize()
    ]], way)
    assert.not_equal(0, code)
    assert.truthy(text:find("no more", 1, true) and text:find("rank 1", 1, true), text)
  end)
end

it("a graph without unused parameters is remarked on once", function()
  local code, text = run([[
    local model = ms.ddp(ms.nn.Linear(4, 4), { find_unused = true })
    for step = 1, 3 do model(ms.ones { 2, 4 }):sum():backward() end
  ]], "")
  assert.equal(0, code)
  local _, count = text:gsub("find_unused: the outputs", "")
  assert.equal(3, count, text)
end)
