-- Families of language models: folders that Hugging Face transformers wrote, with what it computes
-- with them (tests/golden/decoders), and models that a table describes.
local command = require "command"
local core = require "moonshard.core"
local log = require "moonshard.base.log"
local ms = require "moonshard"
local nn = ms.nn

local GOLDEN = command.source .. "/tests/golden/decoders/"
local golden = assert(ms.safetensors.load(GOLDEN .. "results.safetensors"))

-- name of a config.json = the folder that has its weights
local CASES = {
  qwen2 = "qwen2", qwen2_window = "qwen2", qwen3 = "qwen3", qwen3_window = "qwen3",
  mistral = "mistral", mistral_whole = "mistral", smollm2 = "smollm2", smollm3 = "smollm3",
  smollm3_window = "smollm3", olmo2 = "olmo2", llama_bias = "llama_bias",
}

local folder, write_line
before_each(function()
  folder, write_line = command.folder(), log.log
  log.log = function() end -- luacheck: ignore 122
end)
after_each(function()
  log.log = write_line -- luacheck: ignore 122
  command.remove(folder)
end)

-- A folder with a case's weights and config.json; changes: entries of config.json instead.
local function folder_of(name, changes)
  local path = folder .. "/" .. name
  assert(core.make_directory(path))
  command.write(path .. "/model.safetensors",
    command.read(GOLDEN .. CASES[name] .. "/model.safetensors"))
  local config = core.json_decode(command.read(GOLDEN .. name .. "/config.json"), true)
  for key, value in pairs(changes or {}) do config[key] = value end
  command.write(path .. "/config.json", core.json_encode(config))
  return path
end

local function difference(a, b) return (a - b):abs():max():item() end

local function logits(model, tokens, positions)
  return ms.no_grad(function() return model(tokens or golden.tokens, positions) end)
end

-- A model that other tests may change, with options that all families take.
local function small(extra)
  local o = {
    vocab = 48, context = 32, layers = 2, width = 32, heads = 4, kv_heads = 2, hidden = 40,
  }
  for key, value in pairs(extra) do o[key] = value end
  ms.seed(5)
  local model = nn.decoder(o)
  ms.no_grad(function()
    for _, p in ipairs(model:parameters()) do p:add_(ms.randn(p:shape()) * 0.1) end
  end)
  return model
end

describe("models of transformers", function()
  for name in ms.sorted_pairs(CASES) do
    it(name .. " computes what transformers computes", function()
      local model = assert(nn.pretrained(folder_of(name)))
      -- Sums of f32 in another order: up to 2.3e-6.
      assert.near(0, difference(logits(model), golden["logits." .. name]), 1e-5)
      local ids = model:generate(golden.tokens:view(-1):narrow(1, 1, 10),
        { count = 20, temperature = 0 })
      assert.same(golden["continued." .. name]:to_table(), ids:to_table())
      local targets = (ms.arange(0, 23):mul(7) + 1):to_table()
      for i, target in ipairs(targets) do targets[i] = target % 48 end
      model(golden.tokens):view(24, 48):cross_entropy(ms.tensor(targets, "i64")):backward()
      local checked = 0
      for _, item in ipairs(model:named_parameters()) do
        local expected = golden[("gradient.%s.%s"):format(name, item.name)]
        if expected then
          checked = checked + 1
          assert.near(0, difference(item.parameter:grad(), expected), 1e-6, item.name)
        end
      end
      assert.equal(name == "llama_bias" and 1 or 2, checked)
    end)

    it(name .. " is saved as it was read, and read on meta", function()
      local path = folder_of(name)
      local model = assert(nn.pretrained(path))
      assert(model:save(folder .. "/again"))
      assert.equal(command.read(path .. "/config.json"),
        command.read(folder .. "/again/config.json"))
      local before = assert(ms.safetensors.load(path .. "/model.safetensors"))
      local after = assert(ms.safetensors.load(folder .. "/again/model.safetensors"))
      for weight, t in pairs(before) do
        assert.equal(core.bytes(t), core.bytes(after[weight]), weight)
        after[weight] = nil
      end
      assert.is_nil(next(after))
      local delayed = ms.device("meta", function() return assert(nn.pretrained(path)) end)
      assert.equal(core.bytes(logits(model)), core.bytes(logits(delayed:materialize())))
    end)

    it(name .. " is written in this form when it is made here", function()
      local model = assert(nn.pretrained(folder_of(name)))
      local config = model:config()
      local path = folder .. "/made"
      assert(core.make_directory(path))
      command.write(path .. "/config.json", core.json_encode(config))
      command.write(path .. "/model.safetensors",
        command.read(GOLDEN .. CASES[name] .. "/model.safetensors"))
      local again = assert(nn.pretrained(path))
      assert.equal(core.bytes(logits(model)), core.bytes(logits(again)))
      local given = core.json_decode(command.read(GOLDEN .. name .. "/config.json"))
      assert.equal(given.model_type, config.model_type)
      assert.same(given.architectures, config.architectures)
    end)
  end

  it("see the documents of a packed row apart, also where a window is shorter", function()
    for _, name in ipairs { "mistral", "qwen2_window", "smollm3_window", "olmo2", "qwen3" } do
      local model = assert(nn.pretrained(folder_of(name)))
      local positions = {}
      for i = 0, 23 do positions[i + 1] = i < 10 and i or i - 10 end
      local packed = logits(model, golden.tokens, ms.tensor({ positions }, "i64"))
      for _, part in ipairs { { 1, 10 }, { 11, 14 } } do
        local alone = logits(model, golden.tokens:narrow(2, part[1], part[2]):contiguous())
        assert.near(0, difference(packed:narrow(2, part[1], part[2]), alone), 1e-5, name)
      end
    end
  end)

  it("get adapters for queries and values, which merge into the weights", function()
    for name in ms.sorted_pairs(CASES) do
      local model = nn.lora(assert(nn.pretrained(folder_of(name))), { rank = 2 })
      local count = 0
      ms.no_grad(function()
        for _, p in ipairs(model:parameters(function(p) return p:requires_grad() end)) do
          count = count + 1
          p:add_(ms.randn(p:shape()) * 0.1)
        end
      end)
      assert.equal(4 * model.options.layers, count)
      local adapted = logits(model)
      assert.is_true(difference(adapted, golden["logits." .. name]) > 1e-3)
      assert(model:save_adapters(folder .. "/adapters"))
      local other = assert(nn.pretrained(folder .. "/" .. name))
      assert(other:load_adapters(folder .. "/adapters"))
      assert.equal(core.bytes(adapted), core.bytes(logits(other)))
      assert.near(0, difference(adapted, logits(model:merge_adapters())), 1e-5)
    end
  end)

  it("have the sizes of the published ones", function()
    -- Qwen 3 0.6B: 16 heads of 128 for a width of 1024.
    local model = ms.device("meta", function()
      return nn.decoder {
        family = "qwen3", vocab = 151936, context = 40960, layers = 28, width = 1024, heads = 16,
        kv_heads = 8, head_dim = 128, hidden = 3072, tie = true,
      }
    end)
    local numbers = 0
    for _, p in ipairs(model:parameters()) do numbers = numbers + p:numel() end
    assert.equal(596049920, numbers)
  end)

  it("refuse by name what is not here", function()
    local function refused(name, changes, pattern, code)
      local path = folder_of(name, changes)
      local model, message, kind = nn.pretrained(path)
      assert.is_nil(model)
      assert.matches(pattern, message)
      assert.equal(code or "unsupported", kind)
      command.remove(path)
    end
    refused("qwen2", { hidden_act = "gelu" }, "hidden_act is gelu; models here have silu or swish")
    refused("qwen3", { rope_parameters = { rope_type = "yarn", factor = 4, rope_theta = 1e6 } },
      "the rope_type in rope_parameters is yarn")
    refused("qwen2", { layer_types = { "full_attention", "chunked_attention", "full_attention" } },
      "layer_types%[1%] is chunked_attention; models here have full_attention or sliding_attention")
    refused("qwen2", { layer_types = { "full_attention" } },
      "layer_types must be a list of 3 names", "corrupt")
    refused("qwen2",
      { layer_types = { "sliding_attention", "full_attention", "full_attention" } },
      "layer_types%[0%] is sliding_attention, and the model has no sliding_window")
    refused("qwen2_window", { sliding_window = 0 }, "sliding_window is 0", "corrupt")
    refused("mistral", { layer_types = { "full_attention", "sliding_attention" } },
      "all layers of a mistral have its sliding_window")
    refused("olmo2", { sliding_window = 8 }, "sliding_window is 8; this is not supported")
    refused("qwen3", { head_dim = 15 }, "head_dim is 15; an even number is expected")
    refused("qwen3", { num_experts = 8 }, "num_experts is 8; models here have 1")
    refused("smollm3", { no_rope_layers = { 1, 1, 2, 0 } }, "no_rope_layers%[2%] is 2", "corrupt")
    refused("smollm3", { no_rope_layers = { 1 } }, "no_rope_layers must be a list of 4", "corrupt")
    refused("smollm3", { no_rope_layer_interval = 0 }, "no_rope_layer_interval is 0", "corrupt")
    refused("qwen2", { max_window_layers = "all" }, "max_window_layers is all", "corrupt")
    refused("qwen2", { num_hidden_layers = "all" }, "num_hidden_layers is all", "corrupt")
    refused("mistral", { model_type = "mixtral" }, "model_type is mixtral; gpt2, llama, mistral,")
    refused("qwen3", { attention_bias = true }, "missing: .*q_proj.bias", "mismatch")
  end)

  it("read the defaults of transformers where keys are missing", function()
    local path = folder_of "mistral"
    local text = command.read(path .. "/config.json")
    command.write(path .. "/config.json", (text:gsub('"sliding_window":6,?', "")))
    assert.equal(4096, assert(nn.pretrained(path)).options.window)
    path = folder_of "mistral_whole"
    assert.is_nil(assert(nn.pretrained(path)).options.window)
    path = folder_of("qwen2", { use_sliding_window = false, sliding_window = 32768 })
    command.write(path .. "/config.json",
      (command.read(path .. "/config.json"):gsub('"layer_types":%b[],?', "")))
    assert.is_nil(assert(nn.pretrained(path)).options.window)
  end)
end)

describe("models that a table describes", function()
  local mixes = {
    { norm = "layer", norm_place = "after", qk_norm = "all", mlp = "gelu", mlp_bias = true },
    { positions = "learned", bias = "qkv", dropout = 0.5, tie = true },
    { qk_norm = "head", head_dim = 6, window = 3, window_layers = { true, false } },
    { rotary_layers = { false, true }, bias = true, rotary_base = 500 },
    { rotary_scaling = { type = "linear", factor = 2 }, window = 5 },
  }

  it("train, generate as without kept keys, and are saved and read again", function()
    for i, mix in ipairs(mixes) do
      local model = small(mix)
      local optimizer = ms.optim.adamw(model, { lr = 1e-2 })
      local first, last
      for _ = 1, 12 do
        local loss = model(golden.tokens):view(24, 48):cross_entropy(golden.tokens:view(24))
        loss:backward()
        optimizer:step()
        optimizer:zero_grad()
        first, last = first or loss:item(), loss:item()
      end
      assert.is_true(last < first, "mix " .. i)
      model:eval()
      local ids = golden.tokens:view(-1):narrow(1, 1, 4)
      local new = model:generate(ids, { count = 20, temperature = 0 })
      local whole = ms.cat({ ids, new }, 1)
      local next_ids = logits(model, whole:view(1, 24)):argmax(3):view(24)
      assert.same(new:to_table(), next_ids:narrow(1, 4, 20):to_table(), "mix " .. i)
      assert(model:save(folder .. "/mix"))
      local again = assert(nn.pretrained(folder .. "/mix"))
      assert.equal(core.bytes(logits(model)), core.bytes(logits(again:eval())), "mix " .. i)
      command.remove(folder .. "/mix")
    end
  end)

  it("compute the same with recompute, and the same bits from one seed on meta", function()
    for i, mix in ipairs(mixes) do
      local function gradients(recompute)
        local model = small(mix)
        model.options.recompute = recompute
        model:eval()
        model(golden.tokens):sum():backward()
        local found = {}
        for _, item in ipairs(model:named_parameters()) do
          found[item.name] = core.bytes(item.parameter:grad())
        end
        return found
      end
      assert.same(gradients(false), gradients(true), "mix " .. i)
      local o = { vocab = 48, context = 32, layers = 2, width = 32, heads = 4 }
      for key, value in pairs(mix) do o[key] = value end
      ms.seed(6)
      local made = nn.decoder(o):state()
      ms.seed(6)
      local delayed = ms.device("meta", function() return nn.decoder(o) end):materialize():state()
      for name, t in pairs(made) do
        assert.equal(core.bytes(t), core.bytes(delayed[name]), name)
      end
    end
  end)

  it("do not see beyond their window", function()
    local model = small { window = 4, layers = 1 }
    local tokens = golden.tokens:clone()
    local before = logits(model, tokens):narrow(2, 5, 20):contiguous()
    tokens:narrow(2, 1, 1):fill_(9)
    local after = logits(model, tokens):narrow(2, 5, 20):contiguous()
    assert.equal(core.bytes(before), core.bytes(after))
    tokens:narrow(2, 2, 1):fill_(9)
    assert.is_true(difference(before, logits(model, tokens):narrow(2, 5, 20)) > 1e-4)
  end)

  it("check their table", function()
    local function fails(mix, pattern)
      assert.error_matches(function() small(mix) end, pattern)
    end
    fails({ norm = "batch" }, "nn.decoder: norm must be rms or layer, not batch")
    fails({ qk_norm = true }, "qk_norm must be false or head or all, not true")
    fails({ bias = "all" }, "bias must be false or true or qkv, not all")
    fails({ window = 0 }, "window must be an integer of 1 or more, not 0")
    fails({ window_layers = { true, false } }, "window_layers needs a window")
    fails({ window = 4, window_layers = { true } }, "window_layers%[2%] must be a boolean, not nil")
    fails({ rotary_layers = { true, true, true } },
      "rotary_layers has 3 items, and the model 2 layers")
    fails({ positions = "learned", rotary_base = 500 }, "positions are learned")
    fails({ heads = 5, kv_heads = 5 }, "width 32 does not divide by 5 heads")
    fails({ head_dim = 5 }, "head_dim 5 is odd, and rotary positions turn pairs of numbers")
    fails({ family = "bert" }, "family is bert; known are llama, mistral, moonshard, olmo2,")
    fails({ family = "gpt2" }, "nn.gpt2 makes a gpt2")
    fails({ family = "qwen3", qk_norm = "all" }, "models of the family qwen3 have head")
    fails({ family = "olmo2", window = 4 }, "models of the family olmo2 have no window")
    fails({ family = "qwen3", bias = "qkv" }, "bias is qkv; models of the family qwen3 have")
    fails({ famliy = "qwen3" }, "did you mean 'family'")
    for message, wrong in pairs {
      ["sizes are integers of 1 or more, not 0"] = { window = 0 },
      ["sizes are integers of 1 or more, not wide"] = { head_dim = "wide" },
      ["width 8 does not divide by 3 heads"] = { heads = 3 },
      ['qk_norm must be false, "head" or "all", not true'] = { qk_norm = true },
      ['bias must be true, false or "qkv", not all'] = { bias = "all" },
    } do
      wrong.width, wrong.heads = 8, wrong.heads or 2
      assert.error_matches(function() nn.Attention(wrong) end, message)
    end
  end)
end)
