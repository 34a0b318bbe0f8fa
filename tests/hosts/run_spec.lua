-- `moonshard run` in processes of each MPI: the programs of tests/dist, on one host and on several,
-- end with the bits of as many ranks without MPI. Each program under one MPI, under all and with
-- more ranks in the full suite.
local hosts = require "hosts"
local command = require "command"

local folder
before_each(function() folder = command.folder() end)
after_each(function() command.remove(folder) end)

-- Launchers do not pass on all of the environment.
local program = ("env MOONSHARD_SOURCE='%s' MOONSHARD_TEST_FULL=%d '%s'"):format(command.source,
  command.full and 1 or 0, command.program)

-- Runs a program of tests/dist on the hosts of an MPI; returns its output.
local function run(mpi, where, file, switches)
  local code, text = hosts.mpirun(mpi, where, ("%s run %s '%s/tests/dist/%s'")
    :format(program, switches, command.source, file)).finish()
  assert.equal(0, code, text)
  return text
end

local function count(where)
  local ranks = 0
  for number in where:gmatch ":(%d)" do ranks = ranks + tonumber(number) end
  return ranks
end

-- What each rank says of its end, in the order of ranks: the hashes of its weights or gradients.
local function ends(ranks, text)
  local lines = {}
  for line in text:gmatch "rank %d[^\n]* is done, %a+ %x+" do lines[#lines + 1] = line end
  table.sort(lines)
  assert.equal(ranks, #lines, text)
  return table.concat(lines, "\n")
end

local alone = {}
local function check_bits(mpi, where, file, switches)
  local ranks = count(where)
  alone[file] = alone[file] or {}
  alone[file][ranks] = alone[file][ranks] or ends(ranks, command.succeed(folder,
    ("run -n %d '%s/tests/dist/%s'"):format(ranks, command.source, file)))
  assert.equal(alone[file][ranks], ends(ranks, run(mpi, where, file, switches)))
end

-- Where each program runs; the collectives of hosts with several ranks are those of ddp.lua and
-- collectives.lua.
local two = "hosta:1,hostb:1"
local one, uneven, even, programs = "hosta:3", "hosta:1,hostb:2", two, {
  { "ddp.lua", "hosta:1,hostb:2" }, { "fsdp.lua", two }, { "hooks.lua", two },
  { "overlap.lua", two },
}
if command.full then
  one, uneven, even = "hosta:4", "hosta:1,hostb:3", "hosta:2,hostb:2"
  programs = {
    { "ddp.lua", uneven }, { "fsdp.lua", even }, { "hooks.lua", "hosta:3,hostb:1" },
    { "overlap.lua", even },
  }
end

local mpis = hosts.mpis()
for _, mpi in ipairs(mpis) do
  local function try(number, what, f)
    if hosts.is_tried(number, mpi) then it(what, f) end
  end

  describe("run under " .. mpi, function()
    try(0, "gives the bits of ranks without MPI on one host", function()
      check_bits(mpi, one, "ddp.lua", "")
    end)
    try(1, "carries out every collective where hosts have one rank and several", function()
      run(mpi, uneven, "collectives.lua", "")
      run(mpi, uneven, "collectives.lua", "--sum-order ranks")
    end)
    try(1, "steps and averages on two hosts as optimizers do on one", function()
      run(mpi, even, "optim.lua", "--sum-order ranks")
    end)
    for number, case in ipairs(programs) do
      local file, where = table.unpack(case)
      try(number, ("gives %s the bits of ranks without MPI on %s"):format(file, where), function()
        check_bits(mpi, where, file, "--sum-order ranks")
      end)
    end
    -- A recipe, since the programs of tests/dist expect the bits of one host. Its text is short,
    -- since a tenth of it is held out, and evaluated in the end.
    try(1, "repeats its bits where sums are first those of hosts", function()
      command.write(folder .. "/text", ("All of them learn the same text. "):rep(300))
      local function train(name)
        local code, text = hosts.mpirun(mpi, "hosta:1,hostb:1,hostc:2", ("%s run --threads 1 \z
          '%s/recipes/gpt_bytes.lua' steps=3 dtype=bf16 length=16 batch=8 model.width=32 \z
          model.layers=2 model.heads=2 data='%s/text' run='%s/%s'")
          :format(program, command.source, folder, folder, name)).finish()
        assert.equal(0, code, text)
        return assert(command.read(("%s/%s/model/model.safetensors"):format(folder, name)))
      end
      assert.truthy(train "one" == train "two")
    end)
  end)
end
if #mpis == 0 then pending "runs over hosts: this build has no MPI" end
