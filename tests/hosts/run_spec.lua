-- `moonshard run` in processes of each MPI: the programs of tests/dist, on one host and on several,
-- end with the bits of `-n 4`.
local hosts = require "hosts"
local command = require "command"
local ms = require "moonshard"

local folder
before_each(function() folder = command.folder() end)
after_each(function() command.remove(folder) end)

-- Launchers do not pass on all of the environment.
local program = ("env MOONSHARD_SOURCE='%s' '%s'"):format(command.source, command.program)

-- Runs a program of tests/dist on the hosts of an MPI; returns its output.
local function run(mpi, where, file, switches)
  local code, text = hosts.mpirun(mpi, where, ("%s run %s '%s/tests/dist/%s'")
    :format(program, switches, command.source, file)).finish()
  assert.equal(0, code, text)
  return text
end

-- What each rank says of its end, in the order of ranks: the hashes of its weights or gradients.
local function ends(text)
  local lines = {}
  for line in text:gmatch "rank %d[^\n]* is done, %a+ %x+" do lines[#lines + 1] = line end
  table.sort(lines)
  assert.equal(4, #lines, text)
  return table.concat(lines, "\n")
end

local alone = {}
local function bits_alone(file)
  alone[file] = alone[file] or ends(command.succeed(folder,
    ("run -n 4 '%s/tests/dist/%s'"):format(command.source, file)))
  return alone[file]
end

for _, mpi in ipairs(hosts.mpis()) do
  describe("run under " .. mpi, function()
    it("gives the bits of -n 4 on one host", function()
      assert.equal(bits_alone "ddp.lua", ends(run(mpi, "hosta:4", "ddp.lua", "")))
    end)
    it("carries out every collective on a host with one rank and one with three", function()
      run(mpi, "hosta:1,hostb:3", "collectives.lua", "")
      run(mpi, "hosta:1,hostb:3", "collectives.lua", "--sum-order ranks")
    end)
    it("steps and averages on two hosts as optimizers do on one", function()
      run(mpi, "hosta:2,hostb:2", "optim.lua", "--sum-order ranks")
    end)
    for file, where in ms.sorted_pairs {
      ["ddp.lua"] = "hosta:1,hostb:3", ["fsdp.lua"] = "hosta:2,hostb:2",
      ["hooks.lua"] = "hosta:3,hostb:1", ["overlap.lua"] = "hosta:2,hostb:2",
    } do
      it(("gives %s the bits of -n 4 on %s"):format(file, where), function()
        assert.equal(bits_alone(file), ends(run(mpi, where, file, "--sum-order ranks")))
      end)
    end
    -- A recipe, since the programs of tests/dist expect the bits of one host. Its text is short,
    -- since a tenth of it is held out, and evaluated in the end.
    it("repeats its bits where sums are first those of hosts", function()
      command.write(folder .. "/text", ("All of them learn the same text. "):rep(300))
      local function train(name)
        local code, text = hosts.mpirun(mpi, "hosta:1,hostb:1,hostc:2", ("%s run --threads 1 \z
          '%s/recipes/gpt_bytes.lua' steps=5 length=16 batch=8 model.width=32 model.layers=2 \z
          model.heads=2 data='%s/text' run='%s/%s'"):format(program, command.source, folder, folder,
          name)).finish()
        assert.equal(0, code, text)
        return assert(command.read(("%s/%s/model/model.safetensors"):format(folder, name)))
      end
      assert.truthy(train "one" == train "two")
    end)
  end)
end
if #hosts.mpis() == 0 then pending "runs over hosts: this build has no MPI" end
