-- The interactive session: from a pipe, on a terminal, which `script` provides, and what completes
-- a word.
local command = require "command"
local core = require "moonshard.core"

describe("moonshard repl", function()
  local folder
  before_each(function() folder = command.folder() end)
  after_each(function() command.remove(folder) end)

  -- The output for these lines of input, from the first prompt on.
  local function piped(lines)
    command.write(folder .. "/in", lines)
    return command.succeed(folder, "repl <in"):match "\n(> .*)$"
  end

  it("shows values, and goes on after errors with the user's lines alone", function()
    assert.equal("> [2] f32\n[1, 1]\n> 3\t4\n> >> 1\n2\n> \n",
      (piped "ms.ones { 2 }\nprint(3, 4)\nfor i = 1, 2 do\nprint(i) end\n"))
    assert.equal("> stdin:1: syntax error near 'x'\n> 2\n> \n", (piped "x x\n1 + 1\n"))
    local out = piped "local function f() error 'bad' end f()\nms.zeros { 2 }:view(3)\n"
    assert.equal("> stdin:1: bad\n\tstdin:1: in local 'f'\n\tstdin:1: in main chunk\n\z
      > stdin:1: view: [2] f32: it has 2 elements, which the asked sizes do not hold\n> \n", out)
    for _, of_ours in ipairs { "moonshard/", "%[C%]", "stack traceback" } do
      assert.is_nil(out:find(of_ours), of_ours)
    end
  end)

  it("has the reference", function()
    assert.matches("^> 'state_dict' is here: Module:state", (piped 'help "state_dict"\n'))
    assert.matches("^> nothing is called 'mutmul'", (piped 'help "mutmul"\n'))
  end)

  -- A session on a terminal. send(text, pattern) types a text and waits until the output after it
  -- has the pattern; finish() ends the session and returns all of the output.
  local function session(settings)
    local input, output = folder .. "/keys", folder .. "/typescript"
    assert(os.execute(("mkfifo '%s'"):format(input)))
    -- `timeout` would hand on Ctrl-C, which the terminal has sent, a second time.
    local line = command.line(folder, "repl", command.own_cache(folder) .. " " .. settings)
      :gsub(" timeout %-k 5 %d+ ", " ")
    assert(os.execute(("%s <'%s' >/dev/null &"):format(
      command.terminal(line, output, { code = true }), input)))
    local keys, seen, self = assert(io.open(input, "w")), 0, {}
    keys:setvbuf "no"
    function self.send(text, pattern)
      keys:write(text)
      local deadline = os.time() + 1800
      while true do
        local all = (command.read(output) or ""):gsub("\r", "")
        local _, last = all:find(pattern, seen + 1)
        if last then
          local shown = all:sub(seen + 1, last)
          seen = last
          return shown
        end
        if os.time() > deadline then error("no " .. pattern .. " in:\n" .. all, 2) end
        os.execute "sleep 0.02"
      end
    end
    function self.finish()
      self.send("\4", "ended 0")
      keys:close()
      os.remove(input)
      os.remove(output)
    end
    self.send("", "\n> ")
    return self
  end

  it("goes on after Ctrl-C, at the prompt and in a line that runs", function()
    for _, settings in ipairs { "TERM=dumb", "TERM=xterm" } do
      local one = session(settings)
      one.send("unfinished \3", "%^C\n> ")
      assert.matches("\n2\n> $", (one.send("1 + 1\n", "\n2\n> ")))
      one.send("for i = 1, 2 do\n", "\n>> ")
      one.send("\3", "%^C\n> ")
      -- The thread sanitizer keeps a signal until the program calls a function that it watches.
      local body = os.getenv "MOONSHARD_SANITIZE" == "thread" and "os.time()" or ""
      one.send(("print 'begun' while true do %s end\n"):format(body), "begun\n")
      assert.is_nil(one.send("\3", "\n> "):find "moonshard/")
      one.send("2 + 2\n", "\n4\n> ")
      one.finish()
    end
  end)

  local has_editor = os.execute "ldconfig -p 2>/dev/null | grep -q 'libedit\\.so'"
    or os.execute "/sbin/ldconfig -p 2>/dev/null | grep -q 'libedit\\.so'"
  local test = has_editor and it or pending

  test("edits lines with libedit: Tab completes, and the history outlives the session", function()
    local one = session "TERM=xterm"
    one.send("#ms.nn.Lin\t(2, 3):parameters() + 40\n", "\n42\n> ")
    one.send("t = ms.zeros { 7 }\n", "\n> ")
    one.send("t:num\t()\n", "\n7\n> ")
    one.finish()
    assert.equal("file", core.exists(folder .. "/cache/moonshard/repl_history"))
    one = session "TERM=xterm"
    -- Three lines up: the first one of the session before.
    one.send("\27[A\27[A\27[A\n", "\n42\n> ")
    one.finish()
  end)
end)

describe("what completes a word", function()
  local words = require "moonshard.cli.complete".words
  local before

  setup(function()
    before = { ms = rawget(_G, "ms"), probe = rawget(_G, "probe") }
    local ms = require "moonshard"
    rawset(_G, "ms", ms)
    rawset(_G, "probe", { t = ms.ones { 2 }, net = ms.nn.Linear(2, 3), tables = { inner = 1 } })
  end)
  teardown(function()
    for _, name in ipairs { "ms", "probe" } do rawset(_G, name, before[name]) end
  end)

  it("is a name of the library, also of a part that is not loaded yet", function()
    assert.same({ "ms.nn.Linear", "ms.nn.List" }, (words "ms.nn.Li"))
    assert.same({ "ms.world", "ms.world_size" }, (words "ms.wor"))
    assert.same({ "ms.scripts" }, (words "ms.scr"))
  end)

  it("is a method of a live value, or one of its fields", function()
    assert.same({ "probe.t:reshape" }, (words "probe.t:resh"))
    assert.same({ "probe.t:requires_grad", "probe.t:requires_grad_" }, (words "probe.t:requires"))
    assert.same({ "probe.net.weight" }, (words "probe.net.wei"))
    assert.same({ "probe.net:parameters" }, (words "probe.net:param"))
    assert.same({ "probe.net.weight:full_shape" }, (words "probe.net.weight:full_s"))
    assert.same({ "probe.tables" }, (words "probe.ta"))
  end)

  it("is a global name or a word of Lua, and nothing where nothing fits", function()
    assert.same({ "probe" }, (words "prob"))
    assert.same({ "while" }, (words "whi"))
    for _, word in ipairs { "zzqq", "no.such.thing", "ms.zzqq", "1 +", "f().x" } do
      assert.same({}, (words(word)), word)
    end
  end)
end)
