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

  it("reads rules, kinds of members and aliases in several lines", function()
    local blocks, aliases = read.blocks([[
---@alias ms.Two
---| fun(a: A): B
---| string
---@class ms.Thing
-- making: at once
---@field make fun(self)
-- looking
---@field look fun(self)
-- making
---@field again fun(self)
]], "part")
    assert.equal("fun(a: A): B|string", aliases[1].type)
    local kinds = {}
    for i, field in ipairs(blocks[1].fields) do kinds[i] = field.kind end
    assert.same({ "making", "looking", "making" }, kinds)
    assert.same({ making = "at once", looking = "" }, blocks[1].kinds)
    local rules = read.rules [[
---@meta
-- About the file.
--
-- Two rules hold.
--  1. One
--     goes on.
-- 12. Two.
--
-- After them.
---@alias ms.A "a"
]]
    assert.same({ before = "Two rules hold.", list = { "One goes on.", "Two." },
      after = "After them." }, rules)
    rules = read.all().rules
    assert.equal(12, #rules.list)
    assert.matches("^Twelve rules", rules.before)
    assert.matches("released at the end of that step", rules.list[8])
  end)

  it("tells of every function of the module and every method", function()
    for _, block in ipairs(read.all().blocks) do
      for _, field in ipairs(block.fields) do
        local is_called = block.class:match "^ms%.?%l*" == block.class or find.is_object(block)
        if field.parameters and is_called then
          assert.truthy(field.text ~= "", read.full_name(field) .. " has no text")
        end
      end
    end
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

-- What people type, and the entry that is to come first. Words of PyTorch, and of tools around it:
local FOREIGN = {
  { "state_dict", "Module:state" }, { "load_state_dict", "Module:load_state" },
  { "DataLoader", "Dataset:loader" }, { "torch.no_grad", "ms.no_grad" }, { "torch.cat", "ms.cat" },
  { "concat", "ms.cat" }, { "clip_grad_norm_", "Module:clip_grad_norm" },
  { "lr_scheduler", "OptimizerOptions.schedule" }, { "DistributedDataParallel", "ms.ddp" },
  { "FullyShardedDataParallel", "ms.fsdp" }, { "dist.all_reduce", "Group:all_reduce" },
  { "init_process_group", "ms.init" }, { "torch.autocast", "ms.autocast" },
  { "GradScaler", "ms.optim.scaler" }, { "torch.utils.checkpoint", "ms.recompute" },
  { "nn.Module", "ms.nn.class" }, { "nn.Sequential", "ms.nn.Sequential" },
  { "torch.nn.Linear", "ms.nn.Linear" }, { "F.softmax", "Tensor:softmax" },
  { "CrossEntropyLoss", "Tensor:cross_entropy" }, { "torch.save", "Module:save" },
  { "from_pretrained", "ms.nn.pretrained" }, { "torch.manual_seed", "ms.seed" },
  { "optim.AdamW", "ms.optim.adamw" }, { ".to", "Tensor:to" },
  { ".item()", "Tensor:item" }, { "numpy", "Tensor:to_table" },
  { "SummaryWriter", "TrainOptions.log" }, { "torch.profiler", "ms.trace.start" },
  { "zero_grad", "Optimizer:zero_grad" }, { "einsum", "ms.einsum" },
  { "torch.compile", "TrainOptions.graph" }, { "model.train()", "Module:train" },
  { "loss.backward()", "Tensor:backward" }, { "x.shape", "Tensor:shape" },
  { "net.state_dict()", "Module:state" }, { "param.grad", "Tensor:grad" },
  { "x.tolist()", "Tensor:to_table" }, { "work.wait()", "ms.Future" },
  { "AutoModelForCausalLM.from_pretrained", "ms.nn.pretrained" },
}

-- Names of ours, in any case, and words of the field.
local OWN = {
  { "ms.Tensor", "ms.Tensor" }, { "Tensor", "ms.Tensor" }, { "ms.tensor", "ms.tensor" },
  { "tensor", "ms.tensor" }, { "Module", "ms.Module" }, { "DType", "ms.DType" },
  { "dtype", "Tensor:dtype" }, { "bucket", "ms.Bucket" }, { "module", "ms.Module" },
  { "ms.train", "ms.train" }, { "train", "ms.train" }, { "matmul", "Tensor:matmul" },
  { "tensor:matmul()", "Tensor:matmul" }, { "ms.Tensor.matmul", "Tensor:matmul" },
  { "TrainOptions", "ms.TrainOptions" }, { "on_nan", "TrainOptions.on_nan" },
  { "state", "Module:state" }, { "load", "Module:load" }, { "ms.fsdp", "ms.fsdp" },
  { "set_sent", "Bucket:set_sent" }, { "add_", "Tensor:add" }, { "loader", "Dataset:loader" },
  { "optim", "ms.optim" }, { "nn", "ms.nn" }, { "rule 8", "rule 8" }, { "Rule 12", "rule 12" },
  { "freeze", "Tensor:requires_grad_" }, { "gradient accumulation", "TrainOptions.accumulate" },
  { "Gradient-Accumulation", "TrainOptions.accumulate" },
  { "early stopping", "TrainOptions.stop" }, { "apply_chat_template", "ms.chat.of" },
  { "learning rate", "OptimizerOptions.lr" },
  { "batch size", "LoaderOptions.batch" }, { "mixed precision", "ms.autocast" },
  { "resume", "TrainOptions.resume" }, { "gradient", "Tensor:grad" },
  { "out of memory", "ms.memory" }, { "nan loss", "TrainOptions.on_nan" }, { "gpu", "ms.device" },
  { "hazard", "hazard" }, { "ZeRO", "ZeRO" },
}

describe("what is found first", function()
  local all, entries = read.all(), nil
  before_each(function() entries = entries or find.entries(all) end)

  it("is the entry that people mean", function()
    for _, queries in ipairs { FOREIGN, OWN } do
      for _, query in ipairs(queries) do
        local first = find.answer(query[1], all).entries[1]
        assert.equal(query[2], first and first.name, query[1])
      end
    end
    assert.truthy(#FOREIGN >= 20 and #FOREIGN + #OWN >= 40)
  end)

  it("is an exact name, then a class, then a member, and others are named", function()
    local function answer(name)
      local found, list = find.answer(name, all), {}
      for i, entry in ipairs(found.entries) do list[i] = entry.name end
      local also = {}
      for _, entry in ipairs(found.also) do also[entry.name] = true end
      return list, also
    end
    local shown, also = answer "Tensor"
    assert.same({ "ms.Tensor" }, shown)
    assert.is_true(also["ms.tensor"])
    assert.same({ "ms.tensor", "ms.Tensor" }, (answer "tensor"))
    assert.same({ "ms.train", "Module:train" }, (answer "train"))
    shown, also = answer "bucket"
    assert.same({ "ms.Bucket" }, shown)
    assert.is_true(also["OverlapEntry.bucket"])
    shown, also = answer "state"
    assert.same({ "Module:state" }, shown)
    assert.is_true(also["Optimizer:state"] and also["ms.State"])
  end)

  it("has a target for every synonym, and each word is in one row only", function()
    local seen, count = {}, 0
    for _, row in ipairs(find.synonyms()) do
      assert.truthy(#row.names > 0, row.words[1])
      for _, name in ipairs(row.names) do
        local found = find.exactly(name, entries)
        assert.truthy(found and (not found.rule or all.rules.list[found.rule]),
          ("%s: %s is not in the reference"):format(row.words[1], name))
      end
      for _, word in ipairs(row.words) do
        assert.is_nil(seen[word:lower()], word)
        seen[word:lower()], count = true, count + 1
        assert.equal(row.words[1], find.synonym(word).words[1], word)
      end
    end
    assert.truthy(count >= 80)
    -- A planted target that is not there is noticed.
    assert.is_nil(find.exactly("Tensor:tensordot", entries))
    assert.is_nil(find.exactly("tensor:matmul", entries))
    assert.is_nil(find.synonym "zzqq")
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
    -- What is said of all collectives is long, and stands with the class.
    assert.matches("\n  Errors of the class: `moonshard help Group errors`%.", out)
    assert.matches("^Errors: another rank makes a different call",
      (command.succeed(folder, "help Group errors")))
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

  it("lists the methods of a class by kind, in one screen", function()
    local out = command.succeed(folder, "help Tensor")
    assert.truthy(select(2, out:gsub("\n", "")) <= 24, out)
    assert.matches("\n  reductions +sum mean max", out)
    assert.matches("\n  gradients +requires_grad ", out)
    -- Every method is there.
    local words = {}
    for word in out:gmatch "[%w_]+" do words[word] = true end
    for _, block in ipairs(read.all().blocks) do
      if block.class == "ms.Tensor" then
        for _, field in ipairs(block.fields) do assert.is_true(words[field.name], field.name) end
      end
    end
    for _, name in ipairs { "Tensor", "Module", "ms", "nn", "FSDP" } do
      for line in command.succeed(folder, "help " .. name):gmatch "[^\n]+" do
        assert.truthy(#line <= 80, line)
      end
    end
    assert.matches("^Errors: shapes that do not fit",
      (command.succeed(folder, "help Tensor errors")))
  end)

  it("shows rules, words of the glossary and its own help", function()
    assert.matches("^Twelve rules hold.*\n 1%. Objects.*\n12%. Work on tensors",
      (command.succeed(folder, "help rules")))
    assert.matches("^ 8%. A tensor that is made inside a step",
      (command.succeed(folder, "help rule 8")))
    assert.matches("\nbucket: gradients of several parameters",
      (command.succeed(folder, "help glossary")))
    assert.matches("^bucket: gradients of", (command.succeed(folder, "help glossary bucket")))
    assert.matches("^hazard: two tasks", (command.succeed(folder, "help hazard")))
    assert.matches("^Usage: moonshard help", (command.succeed(folder, "help --help")))
    assert.matches("\nSee also: ms.trace\n", (command.succeed(folder, "help trace")))
    local code, _, err = command.run(folder, "help glossary nothing")
    assert.equal(2, code)
    assert.matches("the glossary has no 'nothing'", err)
  end)

  it("says what a word of another tool is called here, or that there is nothing", function()
    assert.matches("^'state_dict' is here: Module:state, Optimizer:state%.\n\nModule:state%(",
      (command.succeed(folder, "help state_dict")))
    assert.equal(command.succeed(folder, "help 'gradient accumulation'"),
      (command.succeed(folder, "help gradient accumulation")))
    assert.matches("^There is nothing called 'data augmentation' here%. The nearest:",
      (command.succeed(folder, "help data augmentation")))
    assert.matches("^There is nothing called 'torch.compile' here%. The nearest: Train",
      (command.succeed(folder, "help torch.compile")))
  end)

  it("shows the errors of a function once, and those of others not", function()
    local out = command.succeed(folder, "help add sub")
    assert.equal(2, select(2, out:gsub("help Tensor errors", "")))
    out = command.succeed(folder, "help Module:accumulate")
    assert.matches("\n  Errors: f did not call backward%.\n$", out)
    assert.is_nil(out:find("unknown or missing names", 1, true))
  end)

  it("names what is nearest to a name that it does not know", function()
    local code, _, err = command.run(folder, "help mutmul")
    assert.equal(2, code)
    assert.matches("nothing is called 'mutmul': did you mean matmul%?", err)
    _, _, err = command.run(folder, "help orthonormal")
    assert.matches("These tell of it: Tensor:orthonormalize_", err)
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
      const answered = () => answers.filter(e => e.offsetParent).map(e => e.textContent).join();
      box.value = "concat"; say(search() > 0, shown().includes("ms.cat"), answered().slice(0, 20));
      box.value = "Gradient-Accumulation"; search();
      say(answered().includes("TrainOptions.accumulate"));
      box.value = "gradient accumulation"; search();
      say(["ms.train", "Module:accumulate"].every(name => shown().includes(name)));
      box.value = "dataloader"; search(); say(shown().includes("Dataset:loader"));
      box.value = "freeze"; search(); say(shown().includes("Tensor:requires_grad_"));
      box.value = "net.state_dict()"; search(); say(answered().includes("Module:state"));
      box.value = "linspace"; search(); say(answered().slice(0, 22));
      box.value = "rule 8 released"; search(); say(shown().join(" "), answered());
      box.value = ""; say(search() > 500);
    ]]
    assert.equal("|0|1 Tensor:matmul|0 true|1|true true It is called here: m|true|true|true|true|\z
      true|There is nothing of th|rule 8 |true", said)
    assert.equal("1", (open("say(search())", "?q=matmul+batched")))
  end)

  it("shows rules as text, not as annotations", function()
    command.succeed(folder, "docs --html . --force")
    local rules = command.read(folder .. "/index.html"):match 'id="rules">(.-)</section>'
    assert.matches('<li class="item" data%-name="rule 1"', rules)
    for _, raw in ipairs { "@alias", "@class", "@field", "%-%-" } do
      assert.is_nil(rules:find(raw), raw)
    end
  end)

  test("fits a phone", function()
    local said = open("say(document.documentElement.scrollWidth <= innerWidth, \z
      document.querySelector('main').clientWidth > 300)", nil, "390,800")
    assert.equal("true true", said)
  end)
end)
