-- moonshard generate --chat: which text the model gets, where its answers end, what is refused.
local command = require "command"
local core = require "moonshard.core"
local ms = require "moonshard"

local TOKENIZER = command.source .. "/tests/golden/tokenizers/gpt2/"
local CHATML = command.read(command.source .. "/tests/golden/chat/templates/chatml.jinja")
local START, END = 500, 501                -- ids of <|im_start|> and <|im_end|>
local CONTEXT = 160

describe("moonshard generate --chat", function()
  local models, folder, tokenizer, template, model
  -- The model writes <|im_end|> after these positions, from 0 on.
  local ENDS = { 69, 119 }

  local function added(token) return { content = token, special = true } end

  -- A folder with the model, and a tokenizer with this template.
  local function make(name, source)
    local path = ("%s/%s"):format(models, name)
    assert(model:save(path))
    for _, file in ipairs { "vocab.json", "merges.txt" } do
      command.write(("%s/%s"):format(path, file), command.read(TOKENIZER .. file))
    end
    command.write(path .. "/tokenizer_config.json", core.json_encode {
      added_tokens_decoder = { ["0"] = added "<|endoftext|>",
        [tostring(START)] = added "<|im_start|>", [tostring(END)] = added "<|im_end|>" },
    })
    if source then command.write(path .. "/chat_template.jinja", source) end
    return path
  end

  setup(function()
    models = command.folder()
    ms.seed(4)
    model = ms.nn.gpt2 { vocab = END + 1, context = CONTEXT, layers = 2, width = 32, heads = 4 }
    ms.no_grad(function()
      -- Larger weights: each token depends on all before it.
      for _, item in ipairs(model:named_parameters()) do
        if item.parameter:dim() == 2 then item.parameter:mul_(12) end
      end
      for _, at in ipairs(ENDS) do
        model.wpe.weight:narrow(1, at + 1, 1):copy_(model.wte.weight:narrow(1, END + 1, 1) * 1000)
      end
    end)
    local path = make("chatml", CHATML)
    make("plain")
    tokenizer = assert(ms.tokenizer.load(path))
    template = assert(ms.chat.of(path))
  end)
  teardown(function() command.remove(models) end)
  before_each(function() folder = command.folder() end)
  after_each(function() command.remove(folder) end)

  local function run(name, rest, input)
    command.write(folder .. "/in", input or "")
    return command.run(folder, ("generate %s/%s --chat %s <%s/in"):format(models, name, rest,
      folder))
  end

  local function answers(name, rest, input)
    local code, out, err = run(name, rest, input)
    assert.equal(0, code, err)
    return out, err
  end

  local function fails(code, name, rest, ...)
    local given, out, err = run(name, rest, "Hi\n")
    assert.equal(code, given, err)
    assert.equal("", out)
    for _, text in ipairs { ... } do assert.truthy(err:find(text, 1, true), err) end
    assert.falsy(err:find("traceback", 1, true), err)
  end

  -- What the model answers to messages, by the library; how many tokens the answer and what is
  -- before it have, and whether it ends by itself.
  local function answer(messages, how)
    how = how or {}
    local text = assert(template:render(messages, { add_generation_prompt = true,
      date = how.date })).text
    local ids = tokenizer:encode(text, { special = "parse", bos = false, eos = false })
    local new = model:generate(ids, { count = how.count or CONTEXT - ids:numel(),
      stop = how.stop == nil and { END, 0 } or how.stop, temperature = how.temperature or 0,
      seed = how.seed }):to_table()
    local last = new[#new]
    local ended = last == END or last == 0
    return tokenizer:decode(new), #new, ids:numel(), ended
  end

  local function user(content) return { role = "user", content = content } end

  -- An answer in later messages: a byte that is no UTF-8 is U+FFFD there.
  local function assistant(content)
    local parts, i = {}, 1
    while i <= #content do
      local ok, code = pcall(utf8.codepoint, content, i)
      parts[#parts + 1] = ok and utf8.char(code) or "\u{FFFD}"
      i = i + (ok and #parts[#parts] or 1)
    end
    return { role = "assistant", content = table.concat(parts) }
  end

  it("gives one answer to --prompt, up to the end of its turn", function()
    local text, count, before, ended = answer { user "one word" }
    assert.is_true(ended)
    assert.is_true(count > 3 and before + count <= ENDS[1] + 2)
    assert.is_true(#text > 3)
    local out, err = answers("chatml", "--greedy --prompt 'one word'")
    assert.equal(text .. "\n", out)
    assert.equal("", err)
    command.write(folder .. "/in", "two\nlines")
    assert.equal(answer { user "two\nlines" } .. "\n",
      (answers("chatml", "--greedy --prompt -", "two\nlines")))
    assert.equal(answer({ user "one" }, { temperature = 0.8, seed = 6 }) .. "\n",
      (answers("chatml", "--prompt one --seed 6")))
  end)

  it("tells the model what --system says", function()
    local text = answer { { role = "system", content = "Be brief." }, user "one word" }
    assert.not_equal(text, (answer { user "one word" }))
    assert.equal(text .. "\n",
      (answers("chatml", "--greedy --system 'Be brief.' --prompt 'one word'")))
  end)

  it("answers each line, and keeps the conversation", function()
    local first, _, _, ended = answer { user "one" }
    assert.is_true(ended)
    assert.is_nil(utf8.len(first))
    local second, count, before
    second, count, before, ended = answer { user "one", assistant(first), user "and two" }
    assert.is_true(ended)
    assert.is_true(count > 1 and before + count <= ENDS[2] + 2)
    local expected = first .. "\n" .. second .. "\n"
    assert.equal(expected, (answers("chatml", "--greedy", "one\n\nand two\n")))
    assert.equal(expected, (answers("chatml", "--greedy", "one\r\n  \nand two")))
    assert.equal("", (answers("chatml", "--greedy", "\n")))
  end)

  it("cuts answers to --count tokens, and goes on", function()
    local first = answer({ user "one" }, { count = 2 })
    local second = answer({ user "one", assistant(first), user "two" }, { count = 2 })
    assert.equal(first .. "\n" .. second .. "\n",
      (answers("chatml", "--greedy --count 2", "one\ntwo\n")))
  end)

  it("cuts answers that do not end to 1024 tokens, and says so", function()
    local whole = model
    finally(function() model = whole end)
    model = ms.nn.gpt2 { vocab = END + 1, context = 1200, layers = 1, width = 8, heads = 2 }
    make("large", CHATML)
    local expected = answer({ user "one" }, { count = 1024, stop = false })
    local out, err = answers("large", "--greedy --stop none --prompt one")
    assert.equal(expected .. "\n", out)
    assert.equal("the answer is cut after 1024 tokens (--count N for more)\n", err)
    out, err = answers("large", "--greedy --stop none --count 1025 --prompt one")
    assert.equal(expected, out:sub(1, #expected))
    assert.equal("", err)
  end)

  it("ends with an error where the context is full, and drops no message", function()
    local long = ("word "):rep(60)
    local code, out, err = run("chatml", "--greedy", "one\n" .. long .. "\n")
    assert.equal(3, code)
    assert.equal(answer { user "one" } .. "\n", out)
    assert.matches("the conversation has %d+ tokens, and the model's context 160: nothing of it \z
      is left out, so it ends here", err)
    -- Without an end of its turn an answer goes on to the end of the context.
    code, out, err = run("chatml", "--greedy --stop none", "one\ntwo\n")
    assert.equal(3, code)
    assert.equal(answer({ user "one" }, { stop = false }) .. "\n", out)
    assert.matches("the conversation has 160 tokens, and the model's context 160", err, 1, true)
  end)

  it("tells a template today's date, and says so, or that of --date", function()
    make("dated", [[{{ "<|im_start|>" + strftime_now("%Y-%m-%d") + " " + messages[-1].content }}]]
      .. "<|im_end|>")
    template = assert(ms.chat.of(models .. "/dated"))
    finally(function() template = assert(ms.chat.of(models .. "/chatml")) end)
    local out, err = answers("dated", "--count 3 --greedy --date 2001-02-03 --prompt Hi")
    assert.equal(answer({ user "Hi" }, { count = 3, date = "2001-02-03" }) .. "\n", out)
    assert.equal("", err)
    local before = os.date "%Y-%m-%d"
    out, err = answers("dated", "--count 3 --prompt Hi")
    assert.equal("\n", out:sub(-1))
    local told = err:match "^the chat template asks for the date, and is told (%S+) %(%-%-date \z
      for another%)\n$"
    assert.is_true(told == before or told == os.date "%Y-%m-%d")
  end)

  it("says that nothing ends an answer", function()
    local path = make("endless", [[{% for m in messages %}{{ m.content }}{% endfor %}]])
    local vocabulary = command.read(path .. "/vocab.json"):gsub("<|endoftext|>", "<|text|>")
    command.write(path .. "/vocab.json", vocabulary)
    command.write(path .. "/tokenizer_config.json", "{}")
    local _, err = answers("endless", "--count 3 --prompt Hi")
    assert.matches("nothing ends an answer: neither the chat template nor the tokenizer", err)
  end)

  it("tells what is missing or does not fit", function()
    fails(3, "plain", "", "--chat: ", "has no chat template")
    local bytes = ms.nn.gpt2 { vocab = 256, context = 16, layers = 1, width = 8, heads = 2 }
    assert(bytes:save(models .. "/bytes"))
    fails(3, "bytes", "", "the model works on bytes")
    make("strict", [[{% if messages[0].role == "system" %}{{ raise_exception("no system") }}]]
      .. "{% endif %}{{ messages[0].content }}<|im_end|>")
    fails(3, "strict", "--system S", "chat template", "no system")
    make("broken", "{% if %}")
    fails(3, "broken", "", "--chat: ")
    fails(2, "chatml", "--date today", "a date like 2026-03-05 is expected, not 'today'")
    for switch, value in pairs { system = "S", date = "2026-03-05" } do
      local code, _, err = command.run(folder, ("generate %s/chatml --prompt a --%s %s"):format(
        models, switch, value))
      assert.equal(2, code)
      assert.matches(("--%s is for conversations: give --chat, too"):format(switch), err, 1, true)
    end
  end)

  it("shows an answer at once, and a sign before the user's lines on a terminal", function()
    local line = command.line(folder, ("generate %s/chatml --chat --greedy"):format(models))
    command.write(folder .. "/in", "one\n")
    assert(os.execute(("%s >'%s/out' <'%s/in'"):format(command.terminal(line, folder .. "/screen"),
      folder, folder)))
    local screen = command.read(folder .. "/out")
    assert.truthy(screen:find("> ", 1, true), screen)
    assert.truthy(screen:gsub("\r\n", "\n"):find(answer { user "one" }, 1, true), screen)
  end)
end)
