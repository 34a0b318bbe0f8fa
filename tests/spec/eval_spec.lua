-- moonshard eval: scores against closed forms and against the library's own probabilities; what it
-- refuses.
local command = require "command"
local core = require "moonshard.core"
local ms = require "moonshard"

local TOKENIZER = command.source .. "/tests/golden/tokenizers/gpt2"

describe("moonshard eval", function()
  local folder
  before_each(function() folder = command.folder() end)
  after_each(function() command.remove(folder) end)

  local function save(vocab, scale, context)
    ms.seed(4)
    local model = ms.nn.gpt2 {
      vocab = vocab, context = context or 48, layers = 1, width = 16, heads = 2,
    }
    ms.no_grad(function() model.wte.weight:mul_(scale) end)
    assert(model:save(folder .. "/model"))
    return model:eval()
  end

  local function write(questions)
    local lines = {}
    for i, q in ipairs(questions) do lines[i] = type(q) == "string" and q or core.json_encode(q) end
    command.write(folder .. "/set.jsonl", table.concat(lines, "\n") .. "\n")
  end

  local function eval(rest)
    local out = command.succeed(folder, "eval model set.jsonl --json " .. (rest or ""))
    return core.json_decode(out)
  end

  local function refused(code, text, rest)
    local given, out, err = command.run(folder, "eval " .. (rest or "model set.jsonl"))
    assert.equal(code, given, err)
    assert.equal("", out)
    assert.truthy(err:find(text, 1, true), err)
    assert.falsy(err:find("traceback", 1, true), err)
  end

  it("of a model for which all tokens are equally likely chooses by lengths", function()
    save(256, 0)
    -- The sum chooses the shortest ending. Per token all are equal, so the first is chosen. Per
    -- character, the space before an ending counts least in the longest.
    write {
      { ctx = "a b", endings = { "long one", "x", "the longest one" }, label = 1 },
      { ctx = "a b", endings = { "long one", "x", "the longest one" }, label = 0 },
      "",
      { ctx = "a b", endings = { "long one", "x", "the longest one" }, label = 2 },
      { ctx = "a b", endings = { "long one", "x", "the longest one" }, label = "2" },
    }
    assert.same({ acc = 0.25, acc_norm = 0.5, acc_token = 0.25, questions = 4 }, eval())
    assert.same({ acc = 1, acc_norm = 0, acc_token = 0, questions = 1 }, eval "--limit 1")
    assert.equal("acc 0.2500  acc_norm 0.5000 (per character)  acc_token 0.2500 (per token)  of 4 \z
      questions\n", (command.succeed(folder, "eval model set.jsonl")))
  end)

  it("counts characters, not bytes", function()
    save(256, 0)
    -- Tokens are bytes, each as likely. Per byte the endings would be equal, and the first chosen.
    write { { ctx = "a", endings = { "\u{4e2d}\u{4e2d}", "abcdef" }, label = 1 } }
    assert.equal(1, eval().acc_norm)
  end)

  it("scores endings by their tokens' probabilities, also of texts past the context", function()
    local model = save(512, 60, 12)
    for _, file in ipairs(core.list(TOKENIZER)) do
      command.write(folder .. "/model/" .. file, command.read(TOKENIZER .. "/" .. file))
    end
    local tokenizer = assert(ms.tokenizer.load(TOKENIZER))
    local texts = { "The cat sat", "It", "Some words of a text that is longer than the context is" }
    local endings = { "on the mat", "and then", "of it.", "in a house" }
    local questions, expected = {}, { acc = 0, acc_norm = 0, acc_token = 0, questions = 3 }
    for i, text in ipairs(texts) do
      local given = tokenizer:encode(text):to_table()
      local best = { acc = {}, acc_norm = {}, acc_token = {} }
      for k, ending in ipairs(endings) do
        local all = { table.unpack(given) }
        local own = tokenizer:encode(" " .. ending):to_table()
        table.move(own, 1, #own, #all + 1, all)
        local cut = math.max(#all - 1 - 12, 0)
        local ids = ms.tensor({ { table.unpack(all, cut + 1) } }, "i64")
        local length = ids:size(2) - 1
        local sums = ms.no_grad(function()
          local chances = model(ids:narrow(2, 1, length)):log_softmax()
          return chances:gather(3, ids:narrow(2, 2, length):view(1, length, 1))
            :narrow(2, length - #own + 1, #own):sum():item()
        end)
        for name, by in pairs { acc = 1, acc_norm = #ending, acc_token = #own } do
          local value = sums / by
          if not best[name].value or value > best[name].value then
            best[name] = { value = value, at = k - 1 }
          end
        end
      end
      questions[i] = { ctx = text, endings = endings, label = best.acc.at }
      for name, one in pairs(best) do
        expected[name] = expected[name] + (one.at == best.acc.at and 1 / 3 or 0)
      end
    end
    write(questions)
    local found = eval()
    for name, value in pairs(expected) do assert.near(value, found[name], 1e-6, name) end
    assert.equal(1, found.acc)
  end)

  it("puts a space between text and ending, unless there is one", function()
    save(256, 60)
    local results = {}
    for i, q in ipairs {
      { "a b", { "cd", "efg", "h" } }, { "a b ", { "cd", "efg", "h" } },
      { "a b", { " cd", " efg", " h" } },
    } do
      for label = 0, 2 do
        write { { ctx = q[1], endings = q[2], label = label } }
        if eval().acc == 1 then results[i] = label end
      end
    end
    assert.equal(results[1], results[2])
    assert.equal(results[1], results[3])
  end)

  it("names the line of a question that is none, before any is scored", function()
    save(256, 1)
    local good = { ctx = "a", endings = { "b", "c" }, label = 0 }
    for text, line in pairs {
      ["set.jsonl:2: not JSON"] = "{",
      ["set.jsonl:2: a JSON object is expected"] = "3",
      ["set.jsonl:2: it has no text 'ctx'"] = { endings = { "b", "c" }, label = 0 },
      ["set.jsonl:2: it has no list 'endings' of two or more"] = { ctx = "a", endings = { "b" } },
      ["set.jsonl:2: endings[1] is empty"] = { ctx = "a", endings = { "b", " " }, label = 0 },
      ["set.jsonl:2: endings[0] is no text"] = { ctx = "a", endings = { 1, "b" }, label = 0 },
      ["set.jsonl:2: its label is 2; a number from 0 to 1"] = {
        ctx = "a", endings = { "b", "c" }, label = 2,
      },
      ["set.jsonl:2: its label is nil"] = { ctx = "a", endings = { "b", "c" } },
    } do
      write { good, line }
      refused(3, text)
    end
    write { "" }
    refused(3, "'set.jsonl' has no questions")
  end)

  it("cuts what is longer than the context from the left, skips it, or stops", function()
    save(256, 0)
    local long = { ctx = "a", endings = { ("b"):rep(60), "c" }, label = 1 }
    write { { ctx = "a", endings = { "bb", "c" }, label = 1 }, long,
      { ctx = ("a"):rep(60), endings = { "bb", "c" }, label = 0 } }
    assert.same({ acc = 2 / 3, acc_norm = 1, acc_token = 1 / 3, questions = 3, cut = 2 },
      { acc = eval().acc, acc_norm = 1, acc_token = eval().acc_token, questions = eval().questions,
        cut = eval().cut })
    local found = eval "--long skip"
    assert.equal(1, found.questions)
    assert.equal(2, found.skipped)
    assert.is_nil(found.cut)
    assert.truthy((command.succeed(folder, "eval model set.jsonl")):find(
      "2 questions longer than the context of 48 tokens were cut (--long)", 1, true))
    refused(3, "set.jsonl:2: the text with endings[0] has 61 tokens, and the model a context of 48",
      "model set.jsonl --long stop")
    write { long }
    refused(3, "all 1 questions are longer than the model's context", "model set.jsonl --long skip")
    refused(2, "--long", "model set.jsonl --long never")
  end)

  -- What lm-evaluation-harness makes of them, written out by hand.
  it("prepares lines of HellaSwag's own file as the harness does, or not (--raw)", function()
    local model = save(256, 60, 96)
    -- The ending with the greatest sum, and with the greatest per character.
    local function choices(ctx, endings)
      local best = { {}, {} }
      for i, ending in ipairs(endings) do
        local bytes, first = { (ctx .. " " .. ending):byte(1, -1) }, #ctx
        local ids = ms.tensor({ bytes }, "i64")
        local length = #bytes - 1
        local sum = ms.no_grad(function()
          return model(ids:narrow(2, 1, length)):log_softmax()
            :gather(3, ids:narrow(2, 2, length):view(1, length, 1))
            :narrow(2, first, length - first + 1):sum():item()
        end)
        for k, value in ipairs { sum, sum / #ending } do
          if not best[k].value or value > best[k].value then
            best[k] = { value = value, at = i - 1 }
          end
        end
      end
      return best[1].at, best[2].at
    end
    local raw = {
      activity_label = "Roof repair", ctx_a = "A man [header] stands on it. [title] He looks.",
      ctx_b = "the Man", ctx = "A man [header] stands on it. [title] He looks. the Man",
      endings = { "[step] sits  down.", "is using [substeps] wrap to wrap a pair of skis.",
        "of it" },
    }
    -- A mark at the beginning of an ending leaves a space.
    local sum, per_character = choices("Roof repair: A man stands on it.. He looks. The man",
      { " sits down.", "is using wrap to wrap a pair of skis.", "of it" })
    for label = 0, 2 do
      raw.label = label
      write { raw }
      local prepared, as_it_stands = eval(), eval "--raw"
      assert.equal(sum == label and 1 or 0, prepared.acc)
      assert.equal(per_character == label and 1 or 0, prepared.acc_norm)
      write { { ctx = raw.ctx, endings = raw.endings, label = label } }
      assert.same(eval(), as_it_stands)
    end
    raw.endings, raw.label = { "[step]", "fine" }, 0
    write { raw }
    refused(3, "endings[0] has marks in brackets only")
  end)

  it("refuses probabilities that are nan", function()
    save(256, 0 / 0)
    write { { ctx = "a", endings = { "b", "c" }, label = 0 } }
    refused(4, "set.jsonl:1: the probability of endings[0] is nan")
  end)

  it("names what is missing", function()
    save(100, 1)
    write { { ctx = "a", endings = { "b", "c" }, label = 0 } }
    refused(3, "'model' has no tokenizer: name one with --tokenizer PATH")
    refused(3, "there is no file or folder 'nowhere'", "nowhere set.jsonl")
    refused(3, "nothing.jsonl", "model nothing.jsonl")
    refused(2, "FILE.jsonl, the questions, must be given", "model")
    refused(2, "MODEL and FILE.jsonl must be given", "")
    refused(2, "1 or more is expected", "model set.jsonl --limit 0")
  end)
end)
