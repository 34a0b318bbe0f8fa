-- The reference: what `moonshard help` prints of an entry, and the page of `moonshard docs`.
local browser = require "browser"
local command = require "command"
local core = require "moonshard.core"
local find = require "moonshard.docs.find"
local read = require "moonshard.docs.read"

describe("the reference", function()
  it("reads comments above, beside and below", function()
    local blocks, aliases = read.blocks([[
---@alias ms.Kind "a"|"b"  of two

--- What it is.
---@class ms.Thing: ms.Base   shortly
--- Above,
--- in two lines.
---@field do_it fun(self, f: fun(a: table<string, A>, b?: T): U, n?: integer): V?, string?   beside
---@field size? integer  in bytes
--- Errors: none.

--- A stray comment.

---@class ms.Thing
---@field more { a: integer, b?: string }[]
]], "part")
    assert.equal("of two", aliases[1].text)
    assert.equal(2, #blocks)
    assert.equal("shortly. What it is.", blocks[1].text)
    assert.equal("ms.Base", blocks[1].base)
    assert.equal("Errors: none.", blocks[1].notes)
    local do_it, size = table.unpack(blocks[1].fields)
    assert.equal("beside. Above, in two lines.", do_it.text)
    assert.equal("V?, string?", do_it.returns)
    assert.same({ "self", "f", "n" }, {
      do_it.parameters[1].name, do_it.parameters[2].name, do_it.parameters[3].name,
    })
    assert.equal("fun(a: table<string, A>, b?: T): U", do_it.parameters[2].type)
    assert.equal("Thing:do_it(f: fun(a: table<string, A>, b?: T): U, n?: integer): V?, string?",
      read.signature(do_it))
    assert.equal("size?: integer", read.signature(size, true))
    assert.equal("{ a: integer, b?: string }[]", blocks[2].fields[1].type)
  end)

  it("finds functions before options, and classes by their names", function()
    local all = read.all()
    local function names(name)
      local list = {}
      local fields, blocks = find.named(name, all)
      for i, field in ipairs(fields) do list[i] = read.full_name(field) end
      for _, block in ipairs(blocks) do list[#list + 1] = block.class end
      return list
    end
    assert.same({ "ms.train" }, names "ms.train")
    assert.same({ "ms.train", "Module:train" }, names "train")
    assert.same({ "Tensor:matmul" }, names "matmul")
    assert.same({ "Tensor:matmul" }, names "ms.Tensor.matmul")
    assert.same({ "Tensor:matmul" }, names "tensor:matmul()")
    assert.same({ "ms.TrainOptions" }, names "TrainOptions")
    assert.same({ "TrainOptions.on_nan" }, names "on_nan")
  end)

  it("has every part, and every part has a file", function()
    local all, parts = read.all(), {}
    for _, block in ipairs(all.blocks) do parts[block.part] = true end
    for _, part in ipairs(read.parts) do assert.is_true(parts[part[1]], part[1]) end
    local known = { meta = true }
    for _, part in ipairs(read.parts) do known[part[1]] = true end
    for _, file in ipairs(core.list(command.source .. "/lua/moonshard/meta")) do
      if file ~= "README.md" then assert.is_true(known[file:match "^(.*)%.lua$"], file) end
    end
  end)
end)

describe("moonshard help", function()
  local folder
  before_each(function() folder = command.folder() end)
  after_each(function() command.remove(folder) end)

  it("shows a function with its options and errors, in 80 columns", function()
    local out = command.succeed(folder, "help optim.adamw all_reduce")
    assert.matches("^ms%.optim%.adamw%(params: ms%.Params, options%?: ms%.OptimizerOptions%)", out)
    assert.matches("\n    lr%?: ms%.Number\n      learning rate", out)
    assert.matches("\n    schedule%?: fun%(step: integer%): number\n", out)
    assert.matches("\n\nGroup:all_reduce%(t: ms%.Tensor, op%?: ms%.Op%): ms%.Future\n", out)
    assert.matches("\n  Errors: another rank makes a different call", out)
    -- Lines of examples are not wrapped.
    for line in out:gmatch "[^\n]+" do assert.truthy(#line <= 84 or line:find "^      ", line) end
    -- A table that is also a function.
    assert.matches("^ms%.fsdp%(model: ms%.Module, options%?: ms%.FSDPOptions%): ms%.FSDP\n  Shards",
      (command.succeed(folder, "help ms.fsdp")))
  end)

  it("shows a class, and the help of a command", function()
    local out = command.succeed(folder, "help ms.Loader")
    assert.matches("^ms%.Loader\n.*\n  Loader:next%(%): ms%.Tensor, ms%.Tensor, ms%.Tensor%?\n",
      out)
    assert.equal(command.succeed(folder, "plot --help"), (command.succeed(folder, "help plot")))
    assert.matches("usage: moonshard COMMAND", (command.succeed(folder, "help")))
  end)

  it("names what is nearest to a name that it does not know", function()
    local code, _, err = command.run(folder, "help mutmul")
    assert.equal(2, code)
    assert.matches("nothing is called 'mutmul': did you mean matmul%?", err)
  end)
end)

describe("the man page and completions", function()
  local folder
  before_each(function() folder = command.folder() end)
  after_each(function() command.remove(folder) end)

  it("tell of all commands, variables, and the exit codes of recipes/README.md", function()
    local page = command.succeed(folder, "docs --man")
    for _, one in ipairs(require "moonshard.cli".commands) do
      assert.truthy(page:find("\n.SS moonshard " .. one[1] .. "\n", 1, true), one[1])
    end
    assert.truthy(page:find("\n.B MOONSHARD_LOG\n", 1, true))
    local told = command.read(command.source .. "/recipes/README.md")
    for code, meaning in page:match "EXIT STATUS\n(.*)":gmatch "%.B (%S+)\n([^\n]+)\n" do
      local line = ("| %s | %s |"):format(code, (meaning:gsub("\\%-", "-")))
      assert.truthy(told:gsub("`", ""):find(line, 1, true), line)
    end
    -- Troff would take other lines that begin with a dot for requests.
    local requests = { TH = 1, SH = 1, SS = 1, PP = 1, TP = 1, B = 1, nf = 1, fi = 1 }
    for line in page:gmatch "[^\n]+" do
      assert.truthy(not line:find "^[.']" or requests[line:match "^%.(%a+)"], line)
    end
  end)

  it("complete commands and switches in bash", function()
    command.write(folder .. "/c", (command.succeed(folder, "docs --completions bash")))
    local function complete(words)
      local last = select(2, words:gsub("%S+", ""))
      local pipe = io.popen(("bash -c '. %s/c; COMP_WORDS=(moonshard %s); COMP_CWORD=%d; \z
        _moonshard; echo ${COMPREPLY[@]}'"):format(folder, words, last))
      return pipe:read "a":gsub("\n$", ""), pipe:close() and nil
    end
    assert.equal("plot", (complete "pl"))
    assert.equal("--smooth", (complete "plot --sm"))
    assert.equal("gemm generate", (complete "bench g"))
    assert.equal("bash zsh", (complete "docs --completions \"\""))
    assert.matches("^#compdef moonshard\n", (command.succeed(folder, "docs --completions zsh")))
  end)
end)

describe("the page of moonshard docs", function()
  local folder
  before_each(function() folder = command.folder() end)
  after_each(function() command.remove(folder) end)

  it("is not written over another one", function()
    local out = command.succeed(folder, "docs --html a/b")
    assert.matches("the reference is in a/b/index.html", out)
    command.write(folder .. "/a/b/index.html", "mine")
    local code, _, err = command.run(folder, "docs --html a/b/")
    assert.equal(2, code)
    assert.matches("'a/b/index.html' exists: name another folder, or %-%-force", err)
    assert.equal("mine", command.read(folder .. "/a/b/index.html"))
    command.succeed(folder, "docs --html a/b --force")
    code, _, err = command.run(folder, "docs")
    assert.equal(2, code)
    assert.matches("%-%-html FOLDER must be given", err)
  end)

  local test = browser.tests(it, pending)

  local function open(js, address, size)
    command.succeed(folder, "docs --html . --force")
    return browser.open(folder, command.read(folder .. "/index.html"), js, address, size)
  end

  test("has no link that leads nowhere, and finds by several words", function()
    local said = open [[
      say([...document.querySelectorAll("a")].filter(
        a => !document.getElementById(a.getAttribute("href").slice(1))).map(a => a.textContent));
      const ids = [...document.querySelectorAll("[id]")].map(e => e.id);
      say(ids.length - new Set(ids).size);
      const shown = () => [...document.querySelectorAll(".item")].filter(e => e.offsetParent)
        .map(e => e.dataset.name);
      box.value = "matmul batched"; say(search(), shown().join(" "));
      box.value = "zzqqzz"; say(search(), document.getElementById("nothing").offsetParent !== null);
      box.value = "rajbhandari"; say(search());
      box.value = ""; say(search() > 500);
    ]]
    assert.equal("|0|1 Tensor:matmul|0 true|1|true", said)
    assert.equal("1", (open("say(search())", "?q=matmul+batched")))
  end)

  test("fits a phone", function()
    local said = open("say(document.documentElement.scrollWidth <= innerWidth, \z
      document.querySelector('main').clientWidth > 300)", nil, "390,800")
    assert.equal("true true", said)
  end)
end)
