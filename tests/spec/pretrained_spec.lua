-- Models from and to files of other tools: GPT-2 and Llama that PyTorch trained, as Hugging Face
-- lays them out.
local command = require "command"
local ms = require "moonshard"
local core = require "moonshard.core"

local GOLDEN = command.source .. "/tests/golden/data/"
local manifest = core.json_decode(command.read(GOLDEN .. "manifest.json"))

local function case_of(model)
  for _, case in ipairs(manifest.models) do
    if case.model == model and case.variant == "plain" then return case end
  end
end

-- A config.json for the golden models, as another tool writes it.
local configs = {
  gpt2 = function(c)
    return {
      model_type = "gpt2", vocab_size = c.vocab, n_positions = c.ctx, n_embd = c.dim,
      n_layer = c.layer, n_head = c.head,
      layer_norm_epsilon = 1e-5, activation_function = "gelu_new",
    }
  end,
  llama = function(c)
    return {
      model_type = "llama", vocab_size = c.vocab, max_position_embeddings = 64, hidden_size = c.dim,
      num_hidden_layers = c.layer,
      num_attention_heads = c.head, num_key_value_heads = c.kv, intermediate_size = c.ff,
      rms_norm_eps = 1e-5, rope_theta = 10000, hidden_act = "silu",
      tie_word_embeddings = false,
    }
  end,
}

describe("pretrained models", function()
  local folder
  before_each(function() folder = command.folder() end)
  after_each(function() command.remove(folder) end)

  -- Writes a folder as other tools would; returns the case, the weights, and the tokens of its
  -- first step.
  local function write(model, prefix, extra)
    local case = case_of(model)
    local golden = assert(ms.safetensors.load(GOLDEN .. case.file))
    local weights = {}
    for name, t in pairs(golden) do
      if name:match "^init%." then weights[prefix .. name:sub(6)] = t end
    end
    local file = {}
    for name, t in pairs(weights) do file[name] = t end
    for name, t in pairs(extra or {}) do file[name] = t end
    assert(ms.safetensors.save(folder .. "/model.safetensors", file, { format = "pt" }))
    command.write(folder .. "/config.json", core.json_encode(configs[model](case.config)))
    return case, weights, golden.tokens[1]
  end

  local function loss_of(model, tokens, case)
    return ms.no_grad(function()
      return model(tokens:narrow(2, 1, case.time))
        :cross_entropy(tokens:narrow(2, 2, case.time)):item()
    end)
  end

  -- 2e-5: how far PyTorch's own builds are apart is 1e-6 (tests/golden/data/README.md).
  local function check(model, prefix, extra)
    local case, weights, tokens = write(model, prefix, extra)
    local loaded = assert(ms.nn.pretrained(folder))
    assert.near(case.losses[1], loss_of(loaded, tokens, case), 2e-5)
    -- The saved file has the same names, shapes and dtypes, and the same bytes.
    assert(loaded:save(folder .. "/again/"))
    local saved = assert(ms.safetensors.load(folder .. "/again/model.safetensors"))
    for name, t in pairs(weights) do
      local same = assert(saved[name], name)
      assert.equal(tostring(t), tostring(same))
      assert.equal(core.bytes(t), core.bytes(same))
      saved[name] = nil
    end
    assert.is_nil(next(saved))
    local config = core.json_decode(command.read(folder .. "/again/config.json"))
    for key, value in pairs(configs[model](case.config)) do
      assert.equal(value, config[key], key)
    end
    -- The saved files are a complete model: a file and its config.json.
    assert.near(case.losses[1],
      loss_of(assert(ms.nn.pretrained(folder .. "/again/model.safetensors")), tokens, case), 2e-5)
  end

  it("GPT-2 without a prefix, with the masks that some files hold", function()
    check("gpt2", "",
      { ["h.0.attn.bias"] = ms.ones { 1, 1, 32, 32 }, ["h.0.attn.masked_bias"] = ms.zeros {} })
  end)

  it("GPT-2 with the prefix transformer. and a copy of the tied head", function()
    local wte =
      ms.safetensors.load(GOLDEN .. case_of "gpt2".file, { "init.wte.weight" })["init.wte.weight"]
    check("gpt2", "transformer.", { ["lm_head.weight"] = wte })
  end)

  it("Llama, with fewer heads of keys", function()
    assert.is_true(case_of "llama".config.kv < case_of "llama".config.head)
    check("llama", "", { ["model.layers.0.self_attn.rotary_emb.inv_freq"] = ms.ones { 4 } })
  end)

  it("in several files, as large models come", function()
    local case, weights, tokens = write("llama", "")
    os.remove(folder .. "/model.safetensors")
    local parts = { {}, {} }
    for name, t in pairs(weights) do parts[name:match "layers%.0" and 1 or 2][name] = t end
    for i = 1, 2 do
      assert(ms.safetensors.save(("%s/model-0000%d-of-00002.safetensors"):format(folder, i),
        parts[i]))
    end
    assert.near(case.losses[1], loss_of(assert(ms.nn.pretrained(folder)), tokens, case), 2e-5)
  end)

  it("16-bit weights are widened", function()
    local case, weights, tokens = write("llama", "")
    for name, t in pairs(weights) do weights[name] = t:to "bf16" end
    assert(ms.safetensors.save(folder .. "/model.safetensors", weights))
    local model = assert(ms.nn.pretrained(folder))
    assert.equal("f32", model:parameters()[1]:dtype())
    -- bf16 has 8 bits: weights are off by up to 0.4%, which averages out.
    assert.near(case.losses[1], loss_of(model, tokens, case), 0.02)
  end)

  local function refused(message, code)
    local model, why, kind = ms.nn.pretrained(folder)
    assert.is_nil(model)
    assert.matches(message, why)
    assert.equal(code, kind)
  end

  it("refuses what it would compute differently, or cannot read", function()
    local case = write("llama", "")
    local config = configs.llama(case.config)
    local function with(changes)
      local changed = {}
      for key, value in pairs(config) do changed[key] = value end
      for key, value in pairs(changes) do changed[key] = value end
      command.write(folder .. "/config.json", core.json_encode(changed))
    end
    with { hidden_act = "gelu" }
    refused("hidden_act is gelu; models here have silu", "unsupported")
    with { rope_scaling = { factor = 8 } }
    refused("the rope_type in rope_scaling is nil", "unsupported")
    with {
      rope_scaling = { type = "linear", factor = 2 }, rope_parameters = { rope_theta = 10000 },
    }
    refused("rope_parameters and rope_scaling describe different positions", "unsupported")
    with { rope_parameters = { full_attention = { rope_type = "default" } } }
    refused("rope_parameters.full_attention is a table", "unsupported")
    with { rope_scaling = { rope_type = "linear", factor = "two" } }
    refused("factor must be a finite number", "corrupt")
    with { rope_parameters = { rope_type = "default", rope_theta = -1 } }
    refused("rope_theta is %-1", "corrupt")
    with { rope_parameters = { rope_type = "default", partial_rotary_factor = 0.5 } }
    refused("partial_rotary_factor is 0.5", "unsupported")
    with { attention_bias = "some" }
    refused("attention_bias is some; models here have false or true", "unsupported")
    with { sliding_window = 4096 }
    refused("sliding_window is 4096; this is not supported", "unsupported")
    with { quantization_config = { quant_method = "gptq" } }
    refused('quantization_config is {"quant_method":"gptq"}', "unsupported")
    with { layer_types = { "full_attention", "sliding_attention" } }
    refused("layer_types%[1%] is sliding_attention", "unsupported")
    with { head_dim = 5 }
    refused("head_dim", "unsupported")
    with { head_dim = "five" }
    refused("head_dim", "unsupported")
    with { rms_norm_eps = "small" }
    refused("eps", "corrupt")
    with { model_type = "bert" }
    refused("model_type is bert; gpt2, llama, mistral, .* can be loaded", "unsupported")
    with { hidden_size = "wide" }
    refused("config.json", "corrupt")
    with { num_hidden_layers = case.config.layer + 1 }
    refused("missing: model.layers", "mismatch")
    command.write(folder .. "/config.json", "{")
    refused("not JSON", "corrupt")
    os.remove(folder .. "/config.json")
    refused("No such file", "not_found")
    assert.error_matches(function() ms.nn.pretrained(folder, { droput = 0.1 }) end,
      "unknown option 'droput'")
  end)
end)
