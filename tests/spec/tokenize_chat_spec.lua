-- moonshard tokenize --chat: which tokens of conversations are targets; and masks beside shards, as
-- loaders and ms.train take them.
local command = require "command"
local core = require "moonshard.core"
local ms = require "moonshard"

local CHAT <const> = command.source .. "/tests/golden/chat/"
local TOKENIZER <const> = command.source .. "/tests/golden/tokenizers/byte_level/tokenizer.json"

describe("tokenize --chat", function()
  local folder
  before_each(function() folder = command.folder() end)
  after_each(function() command.remove(folder) end)

  -- A tokenizer of bytes and merges with the tokens of this template.
  local function tokenizer(template, eos)
    os.execute(("mkdir -p '%s/tok'"):format(folder))
    local model = core.json_decode(command.read(TOKENIZER), true)
    for i, name in ipairs { "<|im_start|>", "<|im_end|>" } do
      table.insert(model.added_tokens, {
        id = 601 + i, content = name, special = true, single_word = false, lstrip = false,
        rstrip = false, normalized = false,
      })
    end
    command.write(folder .. "/tok/tokenizer.json", core.json_encode(model, true))
    command.write(folder .. "/tok/tokenizer_config.json", core.json_encode {
      eos_token = eos or "<|im_end|>", chat_template = template,
    })
    return assert(ms.tokenizer.load(folder .. "/tok"))
  end
  local function template(name) return command.read(CHAT .. "templates/" .. name .. ".jinja") end
  local function tokenize(options)
    return command.run(folder, "tokenize --chat --tokenizer tok --out shards/c " .. options)
  end
  local function fails(code, options, ...)
    local found, out, err = tokenize(options)
    assert.equal(code, found, out .. err)
    for _, text in ipairs { ... } do assert.truthy(err:find(text, 1, true), err) end
  end

  it("learns what the assistant says, with the end of its turn", function()
    local words = tokenizer(template "chatml")
    local conversations = core.json_decode(command.read(CHAT .. "conversations.json"))
    local rendered = core.json_decode(command.read(CHAT .. "rendered.json")).chatml
    local lines, answers, whole = {}, {}, {}
    for i, one in ipairs(conversations) do
      if rendered[i].text then
        lines[#lines + 1] = core.json_encode(one)
        whole[#whole + 1] = rendered[i].text .. "<|endoftext|>"
        for _, message in ipairs(one.messages) do
          if message.role == "assistant" then
            answers[#answers + 1] = message.content .. "<|im_end|>"
          end
        end
      end
    end
    assert.truthy(#lines > 50)
    command.write(folder .. "/c.jsonl", table.concat(lines, "\n"))
    local code, out, err = tokenize "c.jsonl"
    assert.equal(0, code, out .. err)
    assert.matches("%d+ tokens of %d+ are learned, %d+%%", out)
    local set = assert(ms.data.tokens(folder .. "/shards/c_*.bin"))
    local loader = set:loader { batch = 1, length = set:size() - 1 }
    assert.is_true(loader:is_masked())
    local x, y = loader:next()
    x, y = x:to_table()[1], y:to_table()[1]
    local learned = {}
    for i, target in ipairs(y) do
      if target ~= -100 then
        learned[#learned + 1] = target
        assert.truthy(i == #y or x[i + 1] == target)
      end
    end
    assert.equal(table.concat(answers), words:decode(learned, { special = "text" }))
    assert.equal(table.concat(whole):sub(1, -#"<|endoftext|>" - 1),
      words:decode(x, { special = "text" }))
    -- A run that has done this already makes nothing again; another template is other work.
    assert.matches("0 of them new", (select(2, tokenize "c.jsonl")))
    tokenizer((template "chatml":gsub("Answer as well", "Answer as badly")))
    fails(3, "c.jsonl", "choose another name, or --force")
  end)

  it("takes prompt and completion, and the template's own marks", function()
    tokenizer(template "generation", "</s>")
    command.write(folder .. "/c.jsonl", [[{"prompt": "What?", "completion": "That."}]] .. "\n")
    local code, out, err = tokenize "c.jsonl"
    assert.equal(0, code, out .. err)
    local set = assert(ms.data.tokens(folder .. "/shards/c_*.bin"))
    local _, y = set:loader({ batch = 1, length = set:size() - 1 }):next()
    assert.truthy(y:ne(-100):sum():item() > 0 and y:eq(-100):sum():item() > 0)
  end)

  it("removes masks with the shards that they belong to", function()
    tokenizer(template "chatml")
    command.write(folder .. "/c.jsonl", [[{"prompt": "What?", "completion": "That."}]] .. "\n")
    assert.equal(0, (tokenize "c.jsonl"))
    assert.equal("file", core.exists(folder .. "/shards/c_00000.mask"))
    command.write(folder .. "/text", "a text")
    command.succeed(folder, "tokenize --tokenizer tok --out shards/c --force text")
    assert.falsy((core.exists(folder .. "/shards/c_00000.mask")))
    local set = assert(ms.data.tokens(folder .. "/shards/c_*.bin"))
    assert.is_false(set:loader({ batch = 1, length = 1 }):is_masked())
  end)

  it("names file and line of what is wrong", function()
    tokenizer(template "inst")
    local good = [[{"prompt": "What?", "completion": "That."}]] .. "\n"
    local function says(line, ...)
      command.write(folder .. "/c.jsonl", good:rep(1000) .. "\n" .. line .. "\n" .. good)
      fails(3, "--force c.jsonl", "'c.jsonl', line 1002: ", ...)
    end
    says('{"messages": [{"role": "assistant", "content": "I begin"}]}')
    says('{"question": "What?"}')
    says '{"messages": [}'
    says "7"
    tokenizer(nil)
    fails(3, "--force c.jsonl", "has no chat template")
    tokenizer "{% for m in messages %}{{ m.content + strftime_now('%Y') }}{% endfor %}"
    command.write(folder .. "/c.jsonl", good)
    fails(2, "--force c.jsonl", "--date YYYY-MM-DD says which")
    assert.equal(0, (tokenize "--force --date 2026-03-05 c.jsonl"))
    assert.equal("2026-03-05",
      core.json_decode(command.read(folder .. "/shards/c.json")).date)
    fails(2, "--date yesterday --force c.jsonl", "it is YYYY-MM-DD")
    fails(2, "--field text c.jsonl", "--chat beside --field")
    command.write(folder .. "/c.txt", good)
    fails(2, "c.txt", "is not named *.jsonl")
  end)

  it("refuses an end of documents that ends turns, too", function()
    tokenizer(template "chatml")
    command.write(folder .. "/c.jsonl", [[{"prompt": "What?", "completion": "That."}]] .. "\n")
    fails(3, "--end-of-text '<|im_end|>' c.jsonl", "'c.jsonl', line 1: ",
      "packed documents would be cut there")
  end)
end)

describe("a mask beside shards", function()
  local folder
  before_each(function() folder = command.folder() end)
  after_each(function() command.remove(folder) end)

  local function shard(name, first, count, mask)
    local ids = {}
    for i = 1, count do ids[i] = ("<I2"):pack(first + i - 1) end
    command.write(folder .. "/" .. name .. ".bin",
      ("<I4I4I4"):pack(20240520, 1, count) .. ("\0"):rep(1012) .. table.concat(ids))
    if mask then command.write(folder .. "/" .. name .. ".mask", mask) end
  end

  it("makes -100 of targets, in every part and order of the data", function()
    -- 13 tokens, of which the even ones are targets; 10 without a mask; 7 of which the last is one.
    shard("a_1", 0, 13, "\x55\x15")
    shard("a_2", 100, 10)
    shard("a_3", 200, 7, "\x40")
    local function is_target(id)
      if id < 100 then return id % 2 == 0 end
      return id < 200 or id == 206
    end
    local set = assert(ms.data.tokens(folder .. "/a_*.bin"))
    local first, rest = set:split(0.4)
    local seen = 0
    for _, part in ipairs { set, first, rest } do
      for _, shuffle in ipairs { false, true } do
        local loader = part:loader { batch = 1, length = 3, shuffle = shuffle, packed = true,
          end_of_text = 104 }
        for _ = 1, 12 do
          local x, y = loader:next()
          x, y = x:to_table()[1], y:to_table()[1]
          for i = 1, 2 do
            assert.equal(is_target(x[i + 1]) and x[i + 1] or -100, y[i])
            seen = seen + 1
          end
        end
      end
    end
    assert.equal(2 * 12 * 6, seen)
  end)

  it("is refused where it is not of its shard", function()
    shard("a", 0, 13, "\x55")
    local set, message, code = ms.data.tokens(folder .. "/a.bin")
    assert.is_nil(set)
    assert.equal("corrupt", code)
    assert.matches("a.mask' has 1 bytes, and the mask of the 13 tokens of '[^']*a.bin' has 2",
      message)
    shard("a", 0, 13, "\x55\x55\x55")
    set, message = ms.data.tokens(folder .. "/a.bin")
    assert.is_nil(set, message)
  end)

  -- The mean over the targets of all passes and ranks, however many each of them has.
  it("weights losses by targets, over passes and ranks, in training and validation", function()
    shard("t", 0, 97, ("\x0f\x00\xff\x81"):rep(4):sub(1, 13))
    shard("v", 0, 33, "\x01\xff\x00\xf0\x00")
    command.write(folder .. "/r.lua", [[
      local ms = require "moonshard"
      local cfg = ms.config { batch = 4, accumulate = 1 }
      local model = ms.nn.gpt2 { vocab = 100, context = 8, layers = 1, width = 16, heads = 2 }
      if ms.world_size() > 1 then model = ms.ddp(model) end
      local train, valid = ms.data.tokens "t.bin", ms.data.tokens "v.bin"
      ms.train {
        model = model, optimizer = ms.optim.sgd(model, { lr = 0.1 }), steps = 6, run = "out",
        data = train:loader { batch = cfg.batch, length = 8 }, accumulate = cfg.accumulate,
        valid = valid:loader { batch = 2, length = 8 }, eval = { every = 3 },
      }
    ]])
    local function run(options)
      command.remove(folder .. "/out")
      command.succeed(folder, "run r.lua " .. options)
      local list = {}
      for i, line in ipairs(command.metrics(folder .. "/out")) do
        list[#list + 1] = line.loss
        if i % 3 == 0 then list[#list + 1] = assert(line.val_loss) end
      end
      assert.equal(8, #list)
      return list
    end
    local whole = run ""
    for _, options in ipairs { "-n 2", "batch=2 accumulate=2", "-n 2 batch=2 accumulate=2" } do
      for i, loss in ipairs(run(options)) do assert.near(whole[i], loss, 2e-6) end
    end
  end)
end)
