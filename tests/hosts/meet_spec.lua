-- Ranks of several hosts that meet without MPI, as torchrun or srun start them. Their tensors
-- travel through the library of tests/stub/nccl, which has NCCL's functions.
-- ctest: waits
local hosts = require "hosts"
local command = require "command"

local folder
before_each(function() folder = command.folder() end)
after_each(function()
  hosts.kill_all()
  command.remove(folder)
end)

-- What torchrun sets for a rank of hosta:2,hostb:2.
local function torchrun(rank)
  return ("RANK=%d WORLD_SIZE=4 LOCAL_RANK=%d LOCAL_WORLD_SIZE=2 MASTER_ADDR=hosta \z
    MASTER_PORT=29400"):format(rank, rank % 2)
end

local function srun(rank)
  return ("SLURM_PROCID=%d SLURM_NTASKS=4 SLURM_LOCALID=%d SLURM_STEP_ID=0 \z
    MOONSHARD_MASTER=hosta:29501"):format(rank, rank % 2)
end

local TOKEN = "MOONSHARD_TOKEN=0123456789abcdef"

-- The variables of the test's own environment that name NCCL's stub.
local nccl = ("MOONSHARD_TRANSPORT=nccl MOONSHARD_NCCL='%s'")
  :format(os.getenv "MOONSHARD_NCCL" or "")

--- Starts four ranks, two on each host; their exit codes and outputs, in the order of ranks.
---@param settings fun(rank: integer): string
---@param arguments string of run
local function start(settings, arguments)
  local running, codes, texts = {}, {}, {}
  for rank = 0, 3 do
    running[rank] = hosts.start(rank < 2 and "hosta" or "hostb", ("cd '%s' && %s '%s' run %s")
      :format(folder, settings(rank), command.program, arguments))
  end
  for rank = 0, 3 do codes[rank], texts[rank] = running[rank].finish() end
  return codes, texts
end

local function weights(text) return assert(text:match "weights (%x+)", text) end

describe("moonshard info", function()
  it("names the launcher and the interfaces that are found", function()
    local code, text = hosts.on("hostb", ("%s '%s' info"):format(torchrun(3), command.program))
    assert.equal(0, code, text)
    assert.truthy(text:find("\nlauncher +torchrun, rank 3 of 4\n"), text)
    assert.truthy(text:find("\ninterfaces +eth0 10%.77%.0%.2[,\n]"), text)
    code, text = hosts.on("hostb", ("'%s' info"):format(command.program))
    assert.equal(0, code, text)
    assert.truthy(text:find("\nlauncher +none\n"), text)
  end)
end)

describe("ranks of several hosts that meet without MPI", function()
  local expected
  for name, launcher in pairs { torchrun = torchrun, srun = srun } do
    it("train through NCCL as those of one host: " .. name, function()
      command.write(folder .. "/small.lua", hosts.TRAINING)
      expected = expected or weights(command.succeed(folder, "run -n 4 small.lua"))
      local codes, texts = start(function(rank)
        return table.concat({ launcher(rank), TOKEN, nccl }, " ")
      end, (name == "torchrun" and "--port 29500 " or "") .. "small.lua")
      for rank = 0, 3 do
        assert.equal(0, codes[rank], texts[rank])
        assert.equal(expected, weights(texts[rank]))
      end
      assert.truthy(texts[0]:find("4 ranks on 2 hosts, started by " .. name .. ", over NCCL", 1,
        true), texts[0])
      assert.truthy(texts[0]:find("hosts: hosta %(ranks 0, 1%), hostb %(ranks 2, 3%); \z
        their keepers meet at 10.77.0.1 port %d+ %(eth0%)"), texts[0])
    end)
  end

  -- Four ranks add on GPUs, of which each host shows so many.
  local function add_on_gpus(gpus, library, switches)
    command.write(folder .. "/sum.lua", [[
      local ms = require "moonshard"
      local t = ms.ones { 3 } * (ms.rank() + 1)
      local sum = ms.world():all_reduce(t):value():sum():item()
      print(("rank %d has %g on %s"):format(ms.rank(), sum, t:device()))
    ]])
    local settings = ("MOONSHARD_NCCL='%s' MOONSHARD_CUDA_DRIVER='%s' MOONSHARD_STAND_IN_GPUS=%d \z
      MOONSHARD_STAND_IN_KERNELS='%s'"):format(library, os.getenv "MOONSHARD_STAND_IN", gpus,
      os.getenv "MOONSHARD_STAND_IN_KERNELS")
    return start(function(rank)
      return table.concat({ torchrun(rank), TOKEN, settings }, " ")
    end, "--port 29500 --device cuda sum.lua " .. switches)
  end

  for _, case in ipairs {
    { "without NCCL", 2, "/nowhere/libnccl.so.2", "",
      "several ranks on GPUs need NCCL: /nowhere/libnccl.so.2", 3 },
    { "with more ranks than GPUs", 1, os.getenv "MOONSHARD_NCCL", "--share-gpu",
      "--share-gpu: ranks of several hosts exchange tensors by NCCL, which needs a GPU for each",
      1 },
  } do
    local name, gpus, library, switches, said, wanted = table.unpack(case)
    it("are refused on GPUs " .. name, function()
      local codes, texts = add_on_gpus(gpus, library, switches)
      local reports = 0
      for rank = 0, 3 do
        assert.equal(wanted, codes[rank], texts[rank])
        if texts[rank]:find(said, 1, true) then reports = reports + 1 end
      end
      assert.truthy(reports > 0, texts[0])
    end)
  end

  it("reduce on GPUs of their own without being told to use NCCL", function()
    local codes, texts = add_on_gpus(2, os.getenv "MOONSHARD_NCCL", "")
    for rank = 0, 3 do
      assert.equal(0, codes[rank], texts[rank])
      assert.truthy(texts[rank]:find(("rank %d has 30 on cuda"):format(rank), 1, true), texts[rank])
    end
  end)

  it("end with one report when a rank raises an error", function()
    command.write(folder .. "/fails.lua", [[
      local ms = require "moonshard"
      local world = ms.world()
      world:all_reduce(ms.ones { 4 }):sync()
      if world:rank() == 3 then error("rank 3 has had enough", 0) end
      world:all_reduce(ms.ones { 4 }):sync()
    ]])
    local codes, texts = start(function(rank)
      return table.concat({ torchrun(rank), TOKEN, nccl }, " ")
    end, "--port 29500 fails.lua")
    for rank = 0, 3 do assert.equal(1, codes[rank], texts[rank]) end
    assert.truthy(texts[0]:find("rank 3 has had enough", 1, true), texts[0])
    assert.falsy(texts[1]:find "enough", texts[1])
  end)

  it("end with the code of the rank that has failed", function()
    command.write(folder .. "/exits.lua", [[
      local ms = require "moonshard"
      if ms.rank() == 3 then os.exit(9) end
      ms.world():barrier()]])
    local codes, texts = start(function(rank)
      return table.concat({ torchrun(rank), TOKEN, nccl }, " ")
    end, "--port 29500 exits.lua")
    for rank = 0, 3 do assert.equal(9, codes[rank], texts[rank]) end
  end)

  it("compare their recipes", function()
    command.write(folder .. "/a.lua", "print 'a'")
    command.write(folder .. "/b.lua", "print 'b'")
    local running = {}
    for rank = 0, 3 do
      running[rank] = hosts.start(rank < 2 and "hosta" or "hostb",
        ("cd '%s' && %s %s %s '%s' run --port 29500 %s.lua"):format(folder, torchrun(rank), TOKEN,
          nccl, command.program, rank == 2 and "b" or "a"))
    end
    local all = {}
    for rank = 0, 3 do
      local code, text = running[rank].finish()
      assert.equal(2, code, text)
      all[#all + 1] = text
    end
    local text = table.concat(all)
    assert.equal(1, select(2, text:gsub("the ranks were started differently", "")), text)
    assert.truthy(text:find("rank 2 on host hostb: recipe=b.lua", 1, true), text)
  end)

  it("compare their versions", function()
    command.write(folder .. "/a.lua", "print 'a'")
    local other, version = command.other_version(folder)
    local running, texts = {}, {}
    for rank = 0, 3 do
      running[rank] = hosts.start(rank < 2 and "hosta" or "hostb",
        ("cd '%s' && %s %s %s '%s' run --init-timeout 1800 --port 29500 a.lua"):format(folder,
          torchrun(rank), TOKEN, nccl, rank < 2 and command.program or other))
    end
    for rank = 0, 3 do
      local code, text = running[rank].finish()
      assert.equal(2, code, text)
      texts[#texts + 1] = text
    end
    local text = table.concat(texts)
    local says = ("rank 2 on host hostb runs Moonshard %s, rank 0 on host hosta runs %s: \z
      install the same version on all hosts"):format(version, require "moonshard".version)
    assert.equal(1, select(2, text:gsub(says, "")), text)
    assert.equal(1, select(2, text:gsub("moonshard: ", "")), text)
  end)

  -- Each says in one line per host what is wrong, and what to do.
  local refused = {
    { "the token is missing", function(rank) return torchrun(rank) .. " " .. nccl end,
      "--port 29500", 2, "MOONSHARD_TOKEN is not set" },
    { "the token is short", function(rank)
      return torchrun(rank) .. " MOONSHARD_TOKEN=1 " .. nccl
    end, "--port 29500", 2, "MOONSHARD_TOKEN has 1 bytes: 8 to 32 are expected" },
    { "no port is given", function(rank) return torchrun(rank) .. " " .. TOKEN .. " " .. nccl end,
      "", 2, "%-%-port PORT says which" },
    { "the place is none", function(rank)
      return srun(rank) .. " MOONSHARD_MASTER=hosta " .. TOKEN .. " " .. nccl
    end, "", 2, "MOONSHARD_MASTER=hosta: HOST:PORT is expected" },
    { "nothing carries tensors", torchrun, "", 2, "on CPUs start them with mpirun or srun" },
  }
  for _, case in ipairs(refused) do
    it("are refused where " .. case[1], function()
      command.write(folder .. "/a.lua", "print 'a'")
      local codes, texts = start(case[2], case[3] .. " a.lua")
      local lines = 0
      for rank = 0, 3 do
        assert.equal(case[4], codes[rank], texts[rank])
        lines = lines + select(2, texts[rank]:gsub(case[5], ""))
      end
      assert.equal(2, lines, table.concat(texts, "", 0))
    end)
  end

  -- The texts of a host's ranks, of which one says what is wrong.
  local function says_once(texts, first, what)
    local text = texts[first] .. texts[first + 1]
    assert.equal(1, select(2, text:gsub("moonshard: ", "")), text)
    assert.equal(1, select(2, text:gsub(what, "")), text)
  end

  it("end with one error for each host where another job waits at the port", function()
    command.write(folder .. "/a.lua", "print 'a'")
    local waiting = hosts.start("hosta", ("cd '%s' && %s %s %s '%s' run \z
      --port 29500 a.lua"):format(folder, torchrun(0), TOKEN, nccl, command.program))
    hosts.await("it does not listen", function()
      return select(2, hosts.on("hosta", "ss -Hltn 'sport = 29500'")):find "LISTEN"
    end)
    local codes, texts = start(function(rank)
      return table.concat({ torchrun(rank), TOKEN .. "0", nccl }, " ")
    end, "--port 29500 a.lua")
    waiting.stop()
    waiting.finish()
    for rank = 0, 3 do assert.equal(2, codes[rank], texts[rank]) end
    says_once(texts, 0, "port 29500 of this host, where the ranks are to meet, cannot be used")
    says_once(texts, 2, "port 29500 of host hosta [^\n]*another program has that port")
  end)

  -- Two jobs that meet at one port: the exit codes and outputs of each, in the order of ranks.
  local function start_two(seconds)
    local running, jobs = {}, {}
    for i, launcher in ipairs { torchrun, srun } do
      running[i] = {}
      for rank = 0, 3 do
        running[i][rank] = hosts.start(rank < 2 and "hosta" or "hostb", ("cd '%s' && %s %s%d %s \z
          MOONSHARD_MASTER=hosta:29500 '%s' run --init-timeout %d a.lua"):format(folder,
          launcher(rank), TOKEN, i, nccl, command.program, seconds))
      end
    end
    for i = 1, 2 do
      local codes, texts = {}, {}
      for rank = 0, 3 do codes[rank], texts[rank] = running[i][rank].finish() end
      jobs[i] = { codes = codes, texts = texts }
    end
    return jobs
  end

  -- A rank may have been turned away by the other job, and its own then waits for it. On a busy
  -- machine both jobs may need more time to begin.
  it("train, or end with one error for each host at most, beside a job at the port", function()
    command.write(folder .. "/a.lua", "print 'a'")
    local jobs
    for _, seconds in ipairs { 3, 10, 60 } do
      jobs = start_two(seconds)
      if jobs[1].codes[0] == 0 or jobs[2].codes[0] == 0 then break end
    end
    local trained = 0
    for i = 1, 2 do
      local codes, texts = jobs[i].codes, jobs[i].texts
      for rank = 0, 3 do
        assert.equal(codes[0], codes[rank], table.concat(texts, "\n", 0, 3))
      end
      if codes[0] == 0 then
        trained = trained + 1
      else
        assert.equal(2, codes[0], texts[0])
        local told = 0
        for first = 0, 2, 2 do
          local text = texts[first] .. texts[first + 1]
          local count = select(2, text:gsub("moonshard: ", ""))
          assert.equal(count, select(2, text:gsub("moonshard: [^\n]*port 29500 of", "")), text)
          assert.is_true(count <= 1, text)
          told = told + count
        end
        assert.is_true(told >= 1)
      end
    end
    assert.is_true(trained >= 1)
  end)

  -- Of many at once, some end before their keeper, which then has to start too, has looked at them.
  it("may end at once", function()
    command.write(folder .. "/a.lua", "print 'a'")
    local running = {}
    for job = 0, 15 do
      for rank = 0, 1 do
        running[#running + 1] = hosts.start(rank == 0 and "hosta" or "hostb", ("cd '%s' && env \z
          SLURM_PROCID=%d SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_STEP_ID=0 %s %s \z
          MOONSHARD_MASTER=hosta:%d '%s' run --lost 1800 a.lua"):format(folder, rank, TOKEN, nccl,
          29500 + job, command.program))
      end
    end
    for _, one in ipairs(running) do
      local code, text = one.finish()
      assert.equal(0, code, text)
    end
  end)

  -- A program that has bound rank 0's port before the ranks come, and writes what it is sent, each
  -- visitor's bytes in hexadecimal in a line. It answers as a true rank 0 does at the end of the
  -- proof, or sends back what the visitor says. It is in Perl, because every Debian has Perl.
  local FALSE_RANK_0 = [[
use Socket;
my ($way, $path) = @ARGV;
socket(my $port, AF_INET, SOCK_STREAM, 0) or die $!;
setsockopt($port, SOL_SOCKET, SO_REUSEADDR, 1) or die $!;
bind($port, sockaddr_in(29500, INADDR_ANY)) or die $!;
listen($port, 16) or die $!;
sub take {
  my ($visitor, $most) = @_;
  my $all = "";
  while (length $all < $most) {
    defined recv($visitor, my $some, $most - length $all, 0) or last;
    length $some or last;
    $all .= $some;
  }
  return $all;
}
while (accept(my $visitor, $port)) {
  my $sent = take($visitor, 44);
  if ($way eq "welcome") { send($visitor, pack("LSSLx64", unpack("L", "MSF2"), 2, 0, 0), 0) }
  else {
    send($visitor, "MSG1" . substr($sent, 12), 0);
    my $answer = take($visitor, 32);
    $sent .= $answer;
    send($visitor, $answer, 0);
  }
  $sent .= take($visitor, 1 << 20);
  open(my $file, ">>", $path);
  print $file unpack("H*", $sent), "\n";
  close($file);
  close($visitor);
}
]]

  for way, taken in pairs { welcome = 44, reflect = 76 } do
    it("tell nothing to a false rank 0: " .. way, function()
      command.write(folder .. "/a.lua", "print 'a'")
      command.write(folder .. "/false.pl", FALSE_RANK_0)
      local impostor = hosts.start("hosta", ("perl '%s/false.pl' %s '%s/sent'"):format(folder, way,
        folder))
      hosts.await("it does not listen", function()
        return select(2, hosts.on("hosta", "ss -Hltn 'sport = 29500'")):find "LISTEN"
      end)
      local codes, texts = start(function(rank)
        return table.concat({ torchrun(rank), TOKEN, nccl }, " ")
      end, "--port 29500 --init-timeout 1800 a.lua")
      hosts.await("it has not written what it was sent", function()
        return select(2, (command.read(folder .. "/sent") or ""):gsub("\n", "")) == 3
      end)
      impostor.stop()
      impostor.finish()
      for rank = 0, 3 do assert.equal(2, codes[rank], texts[rank]) end
      says_once(texts, 0, "port 29500 of this host, where the ranks are to meet, cannot be used")
      says_once(texts, 2, "port 29500 of host hosta has not proven to rank [23] that it has the \z
        same MOONSHARD_TOKEN: another program has that port")
      for line in command.read(folder .. "/sent"):gmatch "[^\n]+" do
        local sent = line:gsub("%x%x", function(byte) return string.char(tonumber(byte, 16)) end)
        assert.equal(taken, #sent)
        assert.equal("MSG1", sent:sub(1, 4))
        assert.falsy(sent:find("0123456789abcdef", 1, true))
      end
    end)
  end

  -- Connects so often and says nothing, or a byte now and then, until it is ended.
  local CROWD = [[
use Socket;
$SIG{PIPE} = "IGNORE";
my @all;
for (1 .. 400) {
  socket(my $one, AF_INET, SOCK_STREAM, 0) or die $!;
  connect($one, sockaddr_in(29500, inet_aton("hosta"))) or die $!;
  send($one, "M", 0) if $_ % 8 == 0;
  push @all, $one;
}
$| = 1;
print "they are there\n";
while (1) {
  select(undef, undef, undef, 0.5);
  for (my $i = 7; $i < @all; $i += 8) { send($all[$i], "S", 0) }
}
]]

  it("meet beside a crowd at the port that is silent or slow", function()
    command.write(folder .. "/a.lua", "print 'a'")
    command.write(folder .. "/crowd.pl", CROWD)
    local function rank_of(rank)
      return hosts.start(rank < 2 and "hosta" or "hostb", ("cd '%s' && %s %s %s '%s' run \z
        --port 29500 --init-timeout 1800 a.lua"):format(folder, torchrun(rank), TOKEN, nccl,
        command.program))
    end
    local running = { [0] = rank_of(0) }
    hosts.await("rank 0 does not listen", function()
      return select(2, hosts.on("hosta", "ss -Hltn 'sport = 29500'")):find "LISTEN"
    end)
    local crowd = hosts.start("hostc", ("perl '%s/crowd.pl'"):format(folder))
    assert.equal("they are there", crowd.line())
    for rank = 1, 3 do running[rank] = rank_of(rank) end
    for rank = 0, 3 do
      local code, text = running[rank].finish()
      assert.equal(0, code, text)
      if rank == 0 then
        assert.truthy(text:find("a connection to port 29500, where the ranks meet, is closed: \z
          too many have come", 1, true), text)
      end
    end
    crowd.stop()
    crowd.finish()
  end)

  -- On a busy machine the stranger and the others may need more time to come.
  it("keep a stranger out, who has another token", function()
    command.write(folder .. "/a.lua", "print 'a'")
    for _, seconds in ipairs { 2, 10, 60 } do
      local codes, texts = start(function(rank)
        return table.concat({ torchrun(rank), rank == 3 and TOKEN .. "0" or TOKEN, nccl }, " ")
      end, ("--port 29500 --init-timeout %d a.lua"):format(seconds))
      for rank = 0, 3 do assert.equal(2, codes[rank], texts[rank]) end
      local closed = texts[0]:find("a connection to port 29500, where the ranks meet, is closed: \z
        it has not this job's token", 1, true)
      local absent = texts[0]:find(("these ranks have not come to port 29500 of rank 0's host in \z
        %d s: 3;"):format(seconds), 1, true)
      if closed and absent or seconds == 60 then
        assert.truthy(closed, texts[0])
        assert.truthy(absent, texts[0])
        break
      end
    end
  end)
end)
