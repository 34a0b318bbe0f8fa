-- moonshard generate: the text of a model's folder, what it shows when, what does not fit together.
local command = require "command"
local core = require "moonshard.core"
local ms = require "moonshard"

local TOKENIZERS = command.source .. "/tests/golden/tokenizers/"

describe("moonshard generate", function()
  local folder, tokenizer, models
  setup(function()
    models = command.folder()
    ms.seed(4)
    local function make(name, vocab, tokenizer_name, context)
      local model = ms.nn.gpt2 {
        vocab = vocab, context = context or 48, layers = 2, width = 32, heads = 4,
      }
      ms.no_grad(function() model.wte.weight:mul_(40) end)
      assert(model:save(("%s/%s"):format(models, name)))
      for _, file in ipairs(tokenizer_name and core.list(TOKENIZERS .. tokenizer_name) or {}) do
        command.write(("%s/%s/%s"):format(models, name, file),
          command.read(("%s%s/%s"):format(TOKENIZERS, tokenizer_name, file)))
      end
      return model
    end
    make("words", 512, "gpt2")
    make("small", 100)
    make("bytes", 256)
    make("slow", 256, nil, 16)
    make("pieces", 720, "sentencepiece")
    assert(core.make_directory(models .. "/run"))
    assert(make("run/model", 512, "gpt2"))
    assert(core.make_directory(models .. "/empty"))
    tokenizer = assert(ms.tokenizer.load(TOKENIZERS .. "gpt2"))
  end)
  teardown(function() command.remove(models) end)
  before_each(function() folder = command.folder() end)
  after_each(function() command.remove(folder) end)

  local function generate(rest, settings)
    local out, err = command.succeed(folder, "generate " .. rest, settings)
    assert.equal("", err)
    return out
  end

  local function fails(rest, code, ...)
    local given, out, err = command.run(folder, "generate " .. rest)
    assert.equal(code, given, err)
    assert.equal("", out)
    for _, text in ipairs { ... } do assert.truthy(err:find(text, 1, true), err) end
    assert.falsy(err:find("traceback", 1, true), err)
  end

  -- The text that the model of a folder writes, by the library.
  local function expected(name, prompt, how)
    local model = assert(ms.nn.pretrained(("%s/%s"):format(models, name)))
    local ids = tokenizer:encode(prompt)
    local all = core.cat { ids, model:generate(ids, how) }
    return tokenizer:decode(all) .. "\n"
  end

  it("prints the prompt and what follows", function()
    local prompt = "one word"
    local how = { count = 30, temperature = 0 }
    assert.equal(expected("words", prompt, how),
      generate(models .. "/words --count 30 --greedy --prompt '" .. prompt .. "'"))
    assert.equal(expected("words", prompt, how),
      generate(models .. "/words --count 30 --temperature 0 --prompt '" .. prompt .. "'"))
    how = { count = 9, temperature = 1.5, top_k = 20, top_p = 0.9, seed = 7 }
    assert.equal(expected("words", prompt, how),
      generate(models .. "/words --count 9 --temperature 1.5 --top-k 20 --top-p 0.9 --seed 7 \z
        --prompt 'one word'"))
    -- Unless given: 0.8, the seed 0, as many as fit.
    local ids = tokenizer:encode(prompt):numel()
    how = { count = 48 - ids, temperature = 0.8, seed = 0 }
    assert.equal(expected("words", prompt, how),
      generate(models .. "/words/ --prompt 'one word'"))
  end)

  it("finds the model of a run's folder, and of a file", function()
    local how = { count = 5, temperature = 0 }
    local text = expected("run/model", "a", how)
    assert.equal(text, generate(models .. "/run --prompt a --count 5 --greedy"))
    assert.equal(text, generate(models
      .. "/run/model/model.safetensors --prompt a --count 5 --greedy"))
  end)

  it("takes a prompt from standard input, or the token that begins texts", function()
    command.write(folder .. "/prompt", "one\ntwo")
    local how = { count = 5, temperature = 0 }
    assert.equal(expected("words", "one\ntwo", how),
      generate(models .. "/words --prompt - --count 5 --greedy <" .. folder .. "/prompt"))
    local model = assert(ms.nn.pretrained(models .. "/words"))
    local first = tokenizer:bos() or tokenizer:eos() or tokenizer:id "<|endoftext|>"
    local begun = tokenizer:decode(model:generate(ms.tensor { first }, how)) .. "\n"
    assert.equal(begun, generate(models .. "/words --count 5 --greedy"))
    assert.equal(begun, generate(models .. "/words --count 5 --greedy --prompt ''"))
  end)

  it("keeps the bytes of a prompt, also of half a character", function()
    for _, prompt in ipairs { "w\xc3", "\xff\xfe x", "\xe2\x82", "caf\u{e9}" } do
      for _, name in ipairs { "words", "bytes" } do
        command.write(folder .. "/prompt", prompt)
        local out = generate(("%s/%s --prompt - --count 40 <%s/prompt"):format(models, name,
          folder))
        assert.equal(prompt, out:sub(1, #prompt))
        assert.equal("\n", out:sub(-1))
      end
      assert.equal(expected("words", prompt, { count = 40, temperature = 0.8, seed = 0 }),
        generate(models .. "/words --prompt - --count 40 <" .. folder .. "/prompt"))
    end
  end)

  it("does not lose the space before a word that a SentencePiece model writes", function()
    local pieces = assert(ms.tokenizer.load(TOKENIZERS .. "sentencepiece"))
    local model = assert(ms.nn.pretrained(models .. "/pieces"))
    local ids = pieces:encode "one word"
    local how = { count = 30, temperature = 1, seed = 2 }
    local known = {}
    for _, id in ipairs(model:generate(ids, how):to_table()) do
      if pieces:token(id) then known[#known + 1] = id end
    end
    local text = pieces:decode(table.move(known, 1, #known, ids:numel() + 1, ids:to_table()))
    local out = generate(models
      .. "/pieces --prompt 'one word' --count 30 --temperature 1 --seed 2")
    assert.equal(text .. "\n", (out:gsub("\u{FFFD}", "")))
  end)

  it("works on bytes if the model has 256 ids and no tokenizer", function()
    local model = assert(ms.nn.pretrained(models .. "/bytes"))
    local how = { count = 30, temperature = 0.8, seed = 0 }
    local text = ms.data.to_text(model:generate(ms.data.to_tokens "ab", how))
    assert.equal("ab" .. text .. "\n", generate(models .. "/bytes --prompt ab --count 30"))
    text = ms.data.to_text(model:generate(ms.data.to_tokens "\n", how))
    assert.equal(text .. "\n", generate(models .. "/bytes --count 30"))
  end)

  it("ends where the model or the tokenizer ends a text", function()
    local path = folder .. "/ends"
    assert(os.execute(("cp -r '%s/words' '%s'"):format(models, path)))
    local whole = generate(path .. " --prompt one --count 20 --greedy")
    local model = assert(ms.nn.pretrained(path))
    local ids = tokenizer:encode "one"
    local new = model:generate(ids, { count = 20, temperature = 0 }):to_table()
    local stop = new[4]
    command.write(path .. "/generation_config.json",
      core.json_encode { eos_token_id = { stop } })
    local list = {}
    for i, id in ipairs(new) do
      list[i] = id
      if id == stop then break end
    end
    assert.is_true(#list <= 4)
    local short = "one" .. tokenizer:decode(list) .. "\n"
    assert.equal(short, generate(path .. " --prompt one --count 20 --greedy"))
    assert.equal(short, generate(path .. " --prompt one --count 20 --greedy --stop auto"))
    assert.equal(whole, generate(path .. " --prompt one --count 20 --greedy --stop none"))
  end)

  it("tells what is missing or does not fit", function()
    fails("", 2, "which model?")
    fails("nowhere", 3, "there is no file or folder 'nowhere'")
    fails(models .. "/empty", 3, "has no model", "config.json")
    command.write(folder .. "/metrics.jsonl", "")
    fails(".", 3, "'.' has no model", "./model; a run's model is saved when its recipe ends")
    fails(models .. "/small", 3, "has no tokenizer", "--tokenizer PATH")
    fails(("%s/small --tokenizer %sgpt2"):format(models, TOKENIZERS), 3, "500 ids",
      "rows for 100")
    fails(("%s/small --tokenizer nowhere"):format(models), 3, "nowhere")
    fails(models .. "/words --count 0", 2, "1 or more")
    fails(models .. "/words --temperature hot", 2, "0 or more", "hot")
    fails(models .. "/words --top-p 1.5", 2, "from 0 to 1")
    fails(models .. "/words --stop never", 2, "'auto', 'none'")
    command.write(folder .. "/broken", "text")
    fails(("%s/words --tokenizer %s/broken"):format(models, folder), 3, "broken")
    assert(os.execute(("cp -r '%s/words' '%s/cut'"):format(models, folder)))
    command.write(folder .. "/cut/vocab.json", '{ "a": 0')
    fails(folder .. "/cut", 3, "vocab.json")
    command.write(folder .. "/cut/model.safetensors", "short")
    fails(folder .. "/cut", 3, "model.safetensors")
  end)

  -- A reader that takes only the beginning, or a request to stop.
  it("shows each token at once, and ends cleanly when it is stopped", function()
    local fifo = folder .. "/fifo"
    assert(os.execute(("mkfifo '%s'"):format(fifo)))
    local line = command.line(folder, ("generate %s/slow --prompt ab --count 100000000")
      :format(models))
    for signal, number in pairs { INT = 2, TERM = 15 } do
      local shell = io.popen(([[bash -c 'set -m; { %s; echo "code $?" >&2; } >"%s" 2>"%s/err" &
        echo $!']]):format(line:gsub("'", "'\\''"), fifo, folder))
      local pid = shell:read "n"
      local reader = assert(io.open(fifo, "rb"))
      assert.equal("ab", reader:read(2))
      assert.equal(200, #reader:read(200))
      -- The group: the shell, timeout and the program.
      os.execute(("kill -%s $(pgrep -P $(pgrep -P %d))"):format(signal, pid))
      local rest = reader:read "a"
      reader:close()
      shell:close()
      assert.equal("\n", rest:sub(-1))
      local err
      repeat err = command.read(folder .. "/err") until err:find "code %d+"
      assert.equal(("code %d\n"):format(128 + number), err)
    end
    local code, out = command.run(folder, ("generate %s/slow --count 100000000 | head -c 50")
      :format(models))
    assert.equal(0, code)
    assert.equal(50, #out)
  end)

  it("says how fast it was on a terminal only", function()
    local line = command.line(folder, ("generate %s/bytes --prompt ab --count 7"):format(models))
    assert(os.execute(("%s >'%s/out'"):format(command.terminal(line, folder .. "/screen"), folder)))
    local screen = command.read(folder .. "/out")
    assert.matches("\r?\n7 tokens, %d+%.%d tokens/s\r?\n", screen)
  end)
end)
