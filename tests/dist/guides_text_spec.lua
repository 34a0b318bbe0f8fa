-- recipes/guides/text.md, as a reader follows it: from a folder of text to a folder that
-- transformers loads. Its Python runs where MOONSHARD_PYTHON names an interpreter that has torch,
-- transformers and tokenizers.
local command = require "command"
local core = require "moonshard.core"
local guide = require "guide"
local ms = require "moonshard"

local PYTHON = os.getenv "MOONSHARD_PYTHON"

-- What the test makes smaller: all else is as in the page.
local SMALL <const> = {
  ["steps=600"] = "steps=24 batch=4", ["steps=100"] = "steps=6",
  ["every.eval=100"] = "every.eval=12", ["every.save=100"] = "every.save=12",
  ["model.layers=4"] = "model.layers=2",
  ["model.width=128"] = "model.width=64", ["size=2000"] = "size=500",
}

describe("the guide from text to a model", function()
  local page = guide.read "text"
  local folder = guide.folder()
  teardown(function() command.remove(folder) end)

  local train
  local python = 0
  for _, block in ipairs(guide.blocks(page)) do
    if block.kind == "lua" then
      it("has a script", function() assert.truthy(guide.write_file(folder, block.text)) end)
    elseif block.kind == "python" then
      python = python + 1
      local number = python
      if PYTHON then
        it("has Python that runs, " .. number, function()
          command.write(folder .. "/script.py", block.text)
          local code = select(3, os.execute(("cd '%s' && HF_HUB_OFFLINE=1 '%s' script.py >printed")
            :format(folder, PYTHON)))
          assert.equal(0, code)
        end)
      end
    else
      for _, one in ipairs(guide.commands(block.text)) do
        it(one.line:match "^[^\n]*", function()
          guide.try(folder, one, SMALL, "INT")
          if one.stopped then train = one end
        end)
      end
    end
  end

  local function weights(run)
    return command.read(("%s/%s/model/model.safetensors"):format(folder, run))
  end

  it("resumes to the bits of a run that was never stopped", function()
    guide.try(folder, { line = train.line:gsub("run=runs/mine", "run=runs/whole") }, SMALL)
    assert.equal(24, #command.metrics(folder .. "/runs/mine"))
    assert.is_true(weights "runs/whole" == weights "runs/mine")
  end)

  it("trains on bytes with the options that it names", function()
    local options = page:match "`%./moonshard (run recipes/llama%.lua data=text bytes=true[^`]*)`"
    command.succeed(folder, options .. " steps=2 batch=2 length=16 model.layers=1 run=runs/bytes")
  end)

  it("gives a folder with the names and shapes that transformers expects", function()
    local model = folder .. "/runs/mine/model"
    local config = core.json_decode(command.read(model .. "/config.json"))
    assert.equal("llama", config.model_type)
    assert.same({ "LlamaForCausalLM" }, config.architectures)
    assert.equal(500, select(2, command.read(model .. "/tokenizer.json")
      :match '"vocab":(%b{})':gsub('":%d+', "")))
    assert.equal(0, config.eos_token_id)
    local bytes = command.read(model .. "/model.safetensors")
    local header = core.json_decode(bytes:sub(9, 8 + ("<I8"):unpack(bytes)))
    header.__metadata__ = nil
    local width, wide, heads = config.hidden_size, config.intermediate_size,
      config.num_attention_heads
    local narrow = width // heads * config.num_key_value_heads
    local expected = {
      ["model.embed_tokens.weight"] = { config.vocab_size, width },
      ["model.norm.weight"] = { width }, ["lm_head.weight"] = { config.vocab_size, width },
    }
    for layer = 0, config.num_hidden_layers - 1 do
      for name, shape in pairs {
        ["input_layernorm"] = { width }, ["post_attention_layernorm"] = { width },
        ["self_attn.q_proj"] = { width, width }, ["self_attn.k_proj"] = { narrow, width },
        ["self_attn.v_proj"] = { narrow, width }, ["self_attn.o_proj"] = { width, width },
        ["mlp.gate_proj"] = { wide, width }, ["mlp.up_proj"] = { wide, width },
        ["mlp.down_proj"] = { width, wide },
      } do
        expected[("model.layers.%d.%s.weight"):format(layer, name)] = shape
      end
    end
    local shapes = {}
    for name, entry in pairs(header) do shapes[name] = entry.shape end
    assert.same(expected, shapes)
  end)

  it("merges adapters that change the model, and keeps the base", function()
    assert.is_true(weights "runs/adapted" ~= weights "runs/mine")
    local base = assert(ms.nn.pretrained(folder .. "/runs/mine/model"))
    assert(base:load_adapters(folder .. "/runs/adapted/adapter"))
    local merged = assert(ms.nn.pretrained(folder .. "/runs/adapted/model"))
    local tokens = ms.tensor({ { 1, 2, 3, 4 } }, "i64")
    assert.is_true(base:eval()(tokens):sub(merged:eval()(tokens)):abs():max():item() < 1e-4)
  end)

  it("learns a tokenizer that gives the text back", function()
    local tokenizer = assert(ms.tokenizer.load(folder .. "/tok"))
    local text = "Ranks, tokens; \"quotes\" \\ and\n\tumlauts: \u{e4}\u{2581} end"
    local ids = tokenizer:encode(text)
    assert.equal(text, tokenizer:decode(ids))
    assert.is_true(ids:numel() < #text - 10, ids:numel())
  end)

  if not PYTHON then return end
  it("prints in Python what generate prints", function()
    local own = command.succeed(folder,
      'generate runs/mine --prompt "A recipe" --count 40 --greedy')
    local theirs = command.read(folder .. "/printed")
    assert.equal(own:gsub("%s+$", ""), (theirs:gsub("<|endoftext|>", ""):gsub("%s+$", "")))
  end)
end)

it("the guide's text is at most 1,200 words", function()
  assert.is_true(guide.words(guide.read "text") <= 1200)
end)
