-- Ranks without a launcher: ms.init with a group, in stock interpreters.
local command = require "command"

-- Calls ms.init with these options and an all-reduce, and prints the result.
local SCRIPT = [[
local ms = require "moonshard"
local rank, size, path = math.tointeger(arg[1]), math.tointeger(arg[2]), arg[3]
local ok, message = pcall(ms.init,
  { group = "local", rank = rank, world_size = size, rendezvous = path, threads = 1 })
if not ok then print("refused: " .. message) os.exit(1) end
local t = ms.full(rank + 1, { 3 })
ms.world():all_reduce(t):sync()
print(("rank %d of %d: %g"):format(ms.rank(), ms.world_size(), t:to_table()[1]))
]]

-- Connects to a socket and sends a message that no rank sends, then one of a rank of another job.
-- It is in Perl, because every Debian has Perl.
local STRANGER = [[
use Socket;
my $rank = pack("Q<a16L<L<a160", 0x3154454d4d44534d, "9.9.9", 2, 1, "");
for my $message ("GET / HTTP/1.0\r\n\r\n", "x" x 4096, "", $rank) {
  socket(my $s, AF_UNIX, SOCK_SEQPACKET, 0) or die $!;
  connect($s, sockaddr_un($ARGV[0])) or die $!;
  if (length $message) { send($s, $message, 0) } else { shutdown($s, 1) }
  recv($s, my $answer, 4096, 0);
  print length($answer), "\n";
}
]]

describe("ms.init", function()
  local folder, socket
  before_each(function()
    folder = command.folder()
    socket = folder .. "/meet"
    command.write(folder .. "/rank.lua", SCRIPT)
  end)
  after_each(function() command.remove(folder) end)

  local function interpreter()
    local i = -1
    while arg[i - 1] do i = i - 1 end
    return arg[i]
  end

  -- said: the file for its output.
  local function start(rank, size, path, said)
    local line = ("timeout 1800 '%s' '%s/rank.lua' %d %d '%s' 2>&1")
      :format(interpreter(), folder, rank, size, path or socket)
    local pipe = io.popen(said and ("%s >'%s'"):format(line, said) or line)
    return function()
      local text = pipe:read "a"
      pipe:close()
      return text
    end
  end

  it("makes a group of processes, in any order of arrival", function()
    for _, order in ipairs { { 0, 1, 2 }, { 2, 1, 0 }, { 1, 0, 2 } } do
      local ends = {}
      for i, rank in ipairs(order) do ends[i] = start(rank, 3) end
      for i, rank in ipairs(order) do
        assert.equal(("rank %d of 3: 6\n"):format(rank), ends[i]())
      end
      assert.is_nil(command.read(socket))
      assert.equal("", io.popen(("ls -A '%s' | grep meet"):format(folder)):read "a")
    end
  end)

  it("replaces what a crash left, and nothing else", function()
    -- A listener that is killed leaves its socket.
    os.execute(("perl -e 'use Socket; socket(my $s, AF_UNIX, SOCK_SEQPACKET, 0); bind($s, \z
      sockaddr_un($ARGV[0])); listen($s, 5)' '%s'"):format(socket))
    assert.matches("^s", io.popen(("stat -c %%A '%s'"):format(socket)):read "a")
    local first, second = start(0, 2), start(1, 2)
    assert.equal("rank 0 of 2: 3\n", first())
    assert.equal("rank 1 of 2: 3\n", second())
    command.write(socket, "a file of somebody")
    assert.matches("refused: .*another job meets there, or it is another kind of file",
      start(0, 2)())
    assert.equal("a file of somebody", command.read(socket))
  end)

  it("admits only ranks of this job", function()
    command.write(folder .. "/stranger.pl", STRANGER)
    local first = start(0, 3)
    -- The strangers and a rank with another world_size connect when the socket is open; the right
    -- ranks come after them.
    while not io.popen(("stat -c %%A '%s' 2>/dev/null"):format(socket)):read "l" do end
    local answers = io.popen(("perl '%s/stranger.pl' '%s'"):format(folder, socket)):read "a"
    assert.equal(4, select(2, answers:gsub("%d+\n", "")), answers)
    assert.matches("refused: .*its world_size is another one", start(1, 2)())
    -- Of two processes with the same rank the later one is refused. The last rank comes after that:
    -- then the socket is closed, and a late process waits for another job.
    local said = { folder .. "/said-1", folder .. "/said-2" }
    local pair = { start(1, 3, nil, said[1]), start(1, 3, nil, said[2]) }
    while not ((command.read(said[1]) or "") .. (command.read(said[2]) or "")):find "\n" do
      io.popen("stat ."):close()
    end
    local third = start(2, 3)
    for i = 1, 2 do pair[i]() end
    local texts = { command.read(said[1]), command.read(said[2]) }
    assert.equal("rank 2 of 3: 6\n", third())
    assert.equal("rank 0 of 3: 6\n", first())
    table.sort(texts)
    assert.equal("rank 1 of 3: 6\n", texts[1])
    assert.matches("refused: .*its rank is taken", texts[2])
  end)

  it("names what is wrong", function()
    local bad = {
      { [[group = "locl"]], "did you mean 'local'" },
      { [[group = "local", rank = 0]], "a group needs its world_size" },
      { [[group = "local", rank = 2, world_size = 2, rendezvous = "x"]], "rank" },
      { [[group = "local", rank = 0, world_size = 2]], "needs rendezvous, the path of a socket" },
      { [[group = "local", rank = 0, world_size = 129, rendezvous = "x"]], "world_size" },
      { [[rank = 0]], "belong to a group" },
      { [[group = "mpi", rank = 0, world_size = 2]], "belong to a group" },
      { [[group = "mpi"]], "is for other interpreters: `moonshard run` makes" },
      { [[lost = 3]], "lost belongs to a group \"mpi\"" },
      {
        [[group = "local", rank = 0, world_size = 2, rendezvous = "/nowhere/at/all"]],
        "/nowhere/at/all",
      },
      { ([[group = "local", rank = 0, world_size = 2, rendezvous = ("x"):rep(300)]]), "xxx" },
    }
    for _, case in ipairs(bad) do
      command.write(folder .. "/bad.lua", ("require 'moonshard'.init { %s }"):format(case[1]))
      local code, _, err = command.run(folder, "run bad.lua")
      assert.truthy(code == 1 or code == 3, case[1])
      assert.truthy(err:find(case[2], 1, true), err)
    end
  end)

  it("makes ranks that do not wait for one that has left", function()
    command.write(folder .. "/leaves.lua", [[
local ms = require "moonshard"
local cfg = ms.config { rank = 0 }
ms.init { group = "local", rank = cfg.rank, world_size = 2, rendezvous = "meet", threads = 1 }
ms.world():barrier()
if cfg.rank == 0 then ms.world():all_reduce(ms.ones { 5 }):sync() end
]])
    local other = command.start(folder, "leaves.lua rank=1")
    local code, _, err = command.run(folder, "run leaves.lua rank=0")
    assert.equal(5, code)
    assert.matches("rank 1 left after barrier #1 of world", err)
    assert.equal(0, (other.finish()))
  end)

  it("makes ranks that find out when one is killed", function()
    command.write(folder .. "/rank.lua", [[
local ms = require "moonshard"
local rank, size, path = math.tointeger(arg[1]), math.tointeger(arg[2]), arg[3]
ms.init { group = "local", rank = rank, world_size = size, rendezvous = path, threads = 1 }
for step in ms.steps(10) do
  if step == 4 and rank == 2 then os.execute "kill -KILL $PPID" end
  local ok, message = pcall(function() ms.world():all_reduce(ms.ones { 8 }):sync() end)
  if not ok then print(message) os.exit(1) end
end
]])
    local ends = {}
    for rank = 0, 2 do ends[rank] = start(rank, 3) end
    for rank = 0, 1 do
      assert.matches("rank 2 %(pid %d+%) has ended without leaving after all_reduce #4 of world \z
        %[f32 x 8, sum, at [^\n]*rank.lua:6%] at step 4", ends[rank]())
    end
    ends[2]()
  end)

  it("makes a fake world", function()
    command.write(folder .. "/fake.lua", [[
local ms = require "moonshard"
ms.init { group = "fake", rank = 5, world_size = 1000 }
local t = ms.ones { 2 }
ms.world():all_reduce(t)
print(ms.rank(), ms.world_size(), t:to_table()[2])
]])
    assert.equal("5\t1000\t1000.0\n", command.succeed(folder, "run fake.lua"))
  end)
end)
