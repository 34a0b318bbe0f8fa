-- A stranger's path: a Llama folder that Hugging Face transformers has written, a text, and the
-- command line. Tokenize, fine-tune adapters on two ranks, plot, generate, and give the result back
-- to the peer. The last step is run by hand: it is a test only where MOONSHARD_PYTHON names an
-- interpreter, which must have torch, transformers and peft.
local command = require "command"
local core = require "moonshard.core"
local ms = require "moonshard"

local PYTHON = os.getenv "MOONSHARD_PYTHON"

-- Prints logits: of the merged model, and of the first model with the adapters.
local READ = [=[
import sys, torch
from transformers import AutoModelForCausalLM
from peft import PeftModel
ids = torch.tensor([[int(i) for i in sys.argv[4].split()]])
def show(model):
    with torch.no_grad():
        print(" ".join("%.6f" % v for v in model.float().eval()(ids).logits[0, -1, :20]))
merged, told = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
assert not any(told.values()), told
show(merged)
base = AutoModelForCausalLM.from_pretrained(sys.argv[2], torch_dtype=torch.float32)
show(PeftModel.from_pretrained(base, sys.argv[3]))
]=]

describe("a stranger", function()
  local folder = command.folder()
  teardown(function() command.remove(folder) end)
  local given = command.source .. "/tests/golden/peer/stranger"
  local text = ("The quick brown fox jumps over the lazy dog, and then it sleeps.\n"):rep(300)
  command.write(folder .. "/text.txt", text)
  local ids, logits

  it("makes shards of a text", function()
    command.succeed(folder,
      ("tokenize --tokenizer '%s' --out shards/train text.txt"):format(given))
    local named = core.json_decode(command.read(folder .. "/shards/train.json"))
    assert.equal(given, named.tokenizer)
    assert.truthy(command.read(folder .. "/shards/train_00000.bin"))
  end)

  it("fine-tunes adapters on two ranks", function()
    command.succeed(folder, ("run '%s/recipes/llama.lua' -n 2 --threads 1 data=shards \z
      weights='%s' lora=4 adapt.names=q_proj,v_proj,o_proj,down_proj dtype=f32 lr=3e-2 warmup=5 \z
      steps=40 batch=4 length=32 every.eval=20 every.sample=20 \z
      every.save=20 run=mine"):format(command.source, given))
    local metrics = command.metrics(folder .. "/mine")
    assert.equal(40, #metrics)
    assert.is_true(metrics[40].loss < metrics[1].loss - 0.5,
      ("%g, then %g"):format(metrics[1].loss, metrics[40].loss))
  end)

  it("sees the curve and the run", function()
    local curve = command.succeed(folder, "plot mine --key loss")
    assert.matches("loss", curve)
    command.succeed(folder, "plot mine --html curves.html")
    assert.matches("<html", command.read(folder .. "/curves.html"))
    local runs = command.succeed(folder, "runs .")
    assert.matches("mine[^\n]*done", runs)
  end)

  it("generates text, which repeats for a seed", function()
    local arguments = 'generate mine --prompt "The quick" --count 12 --seed 3'
    local first = command.succeed(folder, arguments)
    assert.matches("^The quick", first)
    assert.is_true(#first > #"The quick" + 2, first)
    assert.equal(first, (command.succeed(folder, arguments)))
  end)

  it("has two folders with the same logits", function()
    local merged = assert(ms.nn.pretrained(folder .. "/mine/model"))
    local adapted = assert(ms.nn.pretrained(given)):to "f32"
    assert(adapted:load_adapters(folder .. "/mine/adapter"))
    merged, adapted = merged:to "f32":eval(), adapted:eval()
    local tokens = assert(ms.tokenizer.load(folder .. "/mine/model")):encode "The quick brown fox"
    ids = tokens:to_table()
    local function last(model)
      return model(tokens:reshape(1, -1)):select(2, -1):reshape(-1):narrow(1, 1, 20):to_table()
    end
    logits = { last(merged), last(adapted) }
    -- The merged weights are rounded to bf16, as those that were given.
    for i, logit in ipairs(logits[1]) do assert.near(logits[2][i], logit, 0.05) end
  end)

  if not PYTHON then return end
  it("gives them to the peer", function()
    command.write(folder .. "/read.py", READ)
    local pipe = assert(io.popen(("cd '%s' && HF_HUB_OFFLINE=1 '%s' read.py mine/model '%s' \z
      mine/adapter '%s' 2>errors"):format(folder, PYTHON, given, table.concat(ids, " "))))
    for _, own in ipairs(logits) do
      local line = assert(pipe:read "l", command.read(folder .. "/errors"))
      local i = 0
      for value in line:gmatch "%S+" do
        i = i + 1
        assert.near(tonumber(value), own[i], 1e-4) -- f32 sums in another order
      end
      assert.equal(20, i)
    end
    pipe:close()
  end)
end)
