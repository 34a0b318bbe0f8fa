-- The families of models that nn.pretrained reads: what config.json of each says, as options of
-- nn.decoder and back. A missing key has the default of transformers.
local core = require "moonshard.core"
local rope = require "moonshard.nn.rope"

---@class ms.Family
---@field architecture string?
--- Keys of config.json that change what the model computes, with the supported values. A missing
--- key or null is supported. All other keys are kept and have no effect. An empty list: the feature
--- is not supported.
---@field built table<string, any[]>
---@field fixed? table<string, any>  options of nn.decoder that all models of the family have
---@field allowed? table<string, boolean> options that config.json of the family can say
---@field tie? boolean               of a model that does not say it
---@field only? string              what makes such a model, if nn.decoder does not
--- config.json as options; given(key, default) is the value of a key, and nil for null.
---@field read fun(given: function, config: table): table?, string?, string?
---@field write fun(o: ms.DecoderOptions): table

---@type table<string, ms.Family>   by model_type of config.json
local families = {}

------------------------------------------------------------------------------------------- reading

-- The list of layer_types as booleans: whether the window is a layer's. nil, message, code.
local function windows_in(list, count, window)
  local windows = {}
  for i, kind in ipairs(type(list) == "table" and list or {}) do
    if kind ~= "full_attention" and kind ~= "sliding_attention" then
      return nil, ("layer_types[%d] is %s; models here have full_attention or sliding_attention")
        :format(i - 1, tostring(kind)), "unsupported"
    end
    windows[i] = kind == "sliding_attention"
    if windows[i] and not window then
      return nil, ("layer_types[%d] is sliding_attention, and the model has no sliding_window")
        :format(i - 1), "unsupported"
    end
  end
  if #windows ~= count then
    return nil, ("layer_types must be a list of %d names"):format(count), "corrupt"
  end
  return windows
end

-- Fills the window of options and the layers that have it. default(i): whether layer i has it
-- unless layer_types says so.
local function read_windows(o, config, window, default)
  if window ~= nil and (math.type(window) ~= "integer" or window < 1) then
    return nil, ("sliding_window is %s; an integer of 1 or more is expected")
      :format(tostring(window)), "corrupt"
  end
  local windows = {}
  if config.layer_types ~= nil then
    local message, code
    windows, message, code = windows_in(config.layer_types, o.layers, window)
    if not windows then return nil, message, code end
  else
    for i = 1, o.layers do windows[i] = window ~= nil and default(i) end
  end
  local some, all = false, true
  for _, on in ipairs(windows) do some, all = some or on, all and on end
  if some then o.window, o.window_layers = window, not all and windows or nil end
  return o
end

-- What the families have in common. d: the defaults of transformers.
local function read_common(given, config, d)
  local positions, message, code = rope.read(config, d.base)
  if not positions then return nil, message, code end
  local heads, head = config.num_attention_heads or d.heads, given("head_dim", d.head_dim)
  if head ~= nil and not (math.type(head) == "integer" and head > 0 and head % 2 == 0) then
    return nil, ("head_dim is %s; an even number is expected"):format(tostring(head)), "unsupported"
  end
  local tie = config.tie_word_embeddings
  if tie == nil then tie = d.tie end
  local o = {
    vocab = config.vocab_size or d.vocab, context = config.max_position_embeddings or d.context,
    layers = config.num_hidden_layers or d.layers, width = config.hidden_size or d.width,
    heads = heads, kv_heads = given("num_key_value_heads", d.kv_heads) or heads,
    head_dim = head, hidden = config.intermediate_size or d.hidden,
    eps = config.rms_norm_eps or d.eps or 1e-6,
    rotary_base = positions.base, rotary_scaling = positions.scaling, tie = tie,
  }
  if math.type(o.layers) ~= "integer" then
    return nil, ("num_hidden_layers is %s"):format(tostring(o.layers)), "corrupt"
  end
  return o
end

-- Biases of attention and of the MLP, by the two keys of most families.
local function read_biases(o, config)
  o.bias, o.mlp_bias = config.attention_bias == true, config.mlp_bias == true
  return o
end

------------------------------------------------------------------------------------------- writing

local function write_common(o, model_type)
  local theta, scaling = rope.write(o.rotary_base, o.rotary_scaling)
  return {
    model_type = model_type, architectures = { families[model_type].architecture },
    vocab_size = o.vocab, max_position_embeddings = o.context, hidden_size = o.width,
    num_hidden_layers = o.layers, num_attention_heads = o.heads,
    num_key_value_heads = o.kv_heads or o.heads, intermediate_size = o.hidden,
    head_dim = o.head_dim,
    rms_norm_eps = o.eps or 1e-5, rope_theta = theta, rope_scaling = scaling,
    hidden_act = "silu", tie_word_embeddings = o.tie == true,
    attention_bias = o.bias == true or nil,
    -- Null, because the ids that begin and end a text are not known here; without the keys,
    -- transformers would assume ids of its own.
    bos_token_id = core.json_null, eos_token_id = core.json_null,
  }
end

-- The window of a model, in the keys of Qwen and SmolLM 3.
local function write_windows(config, o)
  config.use_sliding_window = o.window ~= nil
  config.sliding_window = o.window or core.json_null
  config.layer_types = {}
  for i = 1, o.layers do
    local on = o.window and (not o.window_layers or o.window_layers[i])
    config.layer_types[i] = on and "sliding_attention" or "full_attention"
  end
  return config
end

------------------------------------------------------------------------------------------- the rows

local SILU <const> = { "silu", "swish" }

-- What no model of these families has here.
local function built_with(more)
  local built = {
    hidden_act = SILU, quantization_config = {}, partial_rotary_factor = { 1 },
    attn_logit_softcapping = {}, final_logit_softcapping = {}, clip_qkv = {},
    num_local_experts = { 1 }, num_experts = { 1 },
  }
  for key, values in pairs(more) do built[key] = values end
  return built
end

local function fixed_with(more)
  local fixed = {
    norm = "rms", norm_place = "before", positions = "rotary", mlp = "swiglu", qk_norm = false,
    bias = false, mlp_bias = false, dropout = 0,
  }
  for key, value in pairs(more) do fixed[key] = value ~= "any" and value or nil end
  return fixed
end

-- Whether the window of a layer follows from max_window_layers, as in Qwen.
local function read_qwen(given, config, d)
  local o, message, code = read_common(given, config, d)
  if not o then return nil, message, code end
  local window = config.use_sliding_window == true and given("sliding_window", 4096) or nil
  local first = config.max_window_layers or 28
  if type(first) ~= "number" then
    return nil, ("max_window_layers is %s; a number is expected"):format(tostring(first)), "corrupt"
  end
  return read_windows(o, config, window, function(i) return i > first end)
end

families.qwen2 = {
  architecture = "Qwen2ForCausalLM",
  fixed = fixed_with { bias = "qkv" }, allowed = { window = true, window_layers = true },
  -- transformers has its biases whatever attention_bias says.
  built = built_with { mlp_bias = { false }, no_rope_layers = {} },
  read = function(given, config)
    local o, message, code = read_qwen(given, config, {
      vocab = 151936, context = 32768, layers = 32, width = 4096, heads = 32, kv_heads = 32,
      hidden = 22016,
    })
    if o then o.bias = "qkv" end
    return o, message, code
  end,
  write = function(o) return write_windows(write_common(o, "qwen2"), o) end,
}

families.qwen3 = {
  architecture = "Qwen3ForCausalLM",
  fixed = fixed_with { qk_norm = "head", bias = "any" },
  allowed = { window = true, window_layers = true },
  built = built_with {
    attention_bias = { false, true }, mlp_bias = { false }, no_rope_layers = {},
  },
  read = function(given, config)
    local o, message, code = read_qwen(given, config, {
      vocab = 151936, context = 32768, layers = 32, width = 4096, heads = 32, kv_heads = 32,
      hidden = 22016, head_dim = 128,
    })
    if o then o.qk_norm, o.bias = "head", config.attention_bias == true end
    return o, message, code
  end,
  write = function(o)
    local config = write_windows(write_common(o, "qwen3"), o)
    config.head_dim = o.head_dim or o.width // o.heads    -- 128 without the key
    return config
  end,
}

families.mistral = {
  architecture = "MistralForCausalLM",
  fixed = fixed_with {}, allowed = { window = true },
  built = built_with { attention_bias = { false }, mlp_bias = { false }, no_rope_layers = {} },
  read = function(given, config)
    local o, message, code = read_common(given, config, {
      vocab = 32000, context = 4096 * 32, layers = 32, width = 4096, heads = 32, kv_heads = 8,
      hidden = 14336,
    })
    if not o then return nil, message, code end
    local window = given("sliding_window", 4096)
    o, message, code = read_windows(o, config, window, function() return true end)
    if not o then return nil, message, code end
    -- transformers reads no layer_types of a Mistral: each layer has the window.
    if window and (not o.window or o.window_layers) then
      return nil, "layer_types has full_attention; all layers of a mistral have its sliding_window",
        "unsupported"
    end
    return o
  end,
  write = function(o)
    local config = write_common(o, "mistral")
    config.sliding_window = o.window or core.json_null
    return config
  end,
}

-- Whether each layer has rotary positions: no_rope_layers has 1 for those that do.
local function read_rotary_layers(o, config)
  local list, every = config.no_rope_layers, config.no_rope_layer_interval or 4
  if math.type(every) ~= "integer" or every < 1 then
    return nil, ("no_rope_layer_interval is %s; an integer of 1 or more is expected")
      :format(tostring(every)), "corrupt"
  end
  if list == nil then
    list = {}
    for i = 1, o.layers do list[i] = i % every ~= 0 and 1 or 0 end
  end
  if type(list) ~= "table" or #list < o.layers then
    return nil, ("no_rope_layers must be a list of %d numbers"):format(o.layers), "corrupt"
  end
  o.rotary_layers = {}
  for i = 1, o.layers do
    if list[i] ~= 0 and list[i] ~= 1 then
      return nil, ("no_rope_layers[%d] is %s; 0 or 1 is expected"):format(i - 1,
        tostring(list[i])), "corrupt"
    end
    o.rotary_layers[i] = list[i] == 1
  end
  return o
end

families.smollm3 = {
  architecture = "SmolLM3ForCausalLM", tie = true,
  fixed = fixed_with { bias = "any", mlp_bias = "any" },
  allowed = { window = true, window_layers = true, rotary_layers = true },
  built = built_with { attention_bias = { false, true }, mlp_bias = { false, true } },
  read = function(given, config)
    local o, message, code = read_common(given, config, {
      vocab = 128256, context = 32768, layers = 36, width = 2048, heads = 16, kv_heads = 4,
      hidden = 11008, base = 2000000.0, tie = true,
    })
    if o then o, message, code = read_rotary_layers(o, config) end
    if not o then return nil, message, code end
    local window = config.use_sliding_window == true and config.sliding_window or nil
    o, message, code = read_windows(read_biases(o, config), config, window,
      function(i) return not o.rotary_layers[i] end)
    return o, message, code
  end,
  write = function(o)
    local config = write_windows(write_common(o, "smollm3"), o)
    config.mlp_bias, config.pad_token_id = o.mlp_bias == true, core.json_null
    config.no_rope_layers = {}
    for i = 1, o.layers do
      config.no_rope_layers[i] = (not o.rotary_layers or o.rotary_layers[i]) and 1 or 0
    end
    return config
  end,
}

families.olmo2 = {
  architecture = "Olmo2ForCausalLM",
  fixed = fixed_with { norm_place = "after", qk_norm = "all", bias = "any" }, allowed = {},
  built = built_with {
    attention_bias = { false, true }, mlp_bias = { false }, sliding_window = {},
    no_rope_layers = {},
  },
  read = function(given, config)
    local o, message, code = read_common(given, config, {
      vocab = 50304, context = 2048, layers = 32, width = 4096, heads = 32, hidden = 11008,
      eps = 1e-5,
    })
    if not o then return nil, message, code end
    o.norm_place, o.qk_norm, o.bias = "after", "all", config.attention_bias == true
    return read_windows(o, config, nil, function() return false end)
  end,
  write = function(o)
    local config = write_common(o, "olmo2")
    config.pad_token_id = core.json_null
    return config
  end,
}

families.llama = {
  architecture = "LlamaForCausalLM",
  fixed = fixed_with { bias = "any", mlp_bias = "any" }, allowed = {},
  built = built_with {
    attention_bias = { false, true }, mlp_bias = { false, true }, sliding_window = {},
    use_qk_norm = { false }, embedding_multiplier = { 1 }, attention_multiplier = {},
    residual_multiplier = { 1 }, logits_scaling = { 1 }, no_rope_layers = {},
  },
  read = function(given, config)
    local o, message, code = read_common(given, config, {
      vocab = 32000, context = 2048, layers = 32, width = 4096, heads = 32, hidden = 11008,
    })
    if not o then return nil, message, code end
    return read_windows(read_biases(o, config), config, nil, function() return false end)
  end,
  write = function(o)
    local config = write_common(o, "llama")
    config.attention_bias = o.bias == true
    config.mlp_bias = o.mlp_bias == true or nil
    return config
  end,
}

-- A model that no family of transformers has: only this library reads its config.json.
local OPTIONS <const> = {
  "vocab", "context", "layers", "width", "heads", "kv_heads", "head_dim", "hidden", "tie", "eps",
  "norm", "norm_place", "positions", "mlp", "qk_norm", "bias", "mlp_bias", "rotary_base",
  "rotary_scaling", "rotary_layers", "window", "window_layers",
}
families.moonshard = {
  built = { quantization_config = {} },
  read = function(_, config)
    local o = {}
    for _, name in ipairs(OPTIONS) do o[name] = config[name] end
    return o
  end,
  write = function(o)
    local config = { model_type = "moonshard", architectures = { "MoonshardDecoder" } }
    for _, name in ipairs(OPTIONS) do config[name] = o[name] end
    config.bos_token_id, config.eos_token_id = core.json_null, core.json_null
    return config
  end,
}

-- GPT-2 has names and keys of its own.
families.gpt2 = {
  architecture = "GPT2LMHeadModel", only = "nn.gpt2",
  built = {
    activation_function = { "gelu_new", "gelu_pytorch_tanh" }, scale_attn_weights = { true },
    scale_attn_by_inverse_layer_idx = { false }, add_cross_attention = { false },
    quantization_config = {}, layer_types = {},
  },
  read = function(_, config)
    local width, heads, head = config.n_embd or 768, config.n_head or 12, config.head_dim
    if head ~= nil and (math.type(head) ~= "integer" or head * heads ~= width) then
      return nil, ("head_dim %s times %s heads is not n_embd %s"):format(tostring(head),
        tostring(heads), tostring(width)), "unsupported"
    end
    return {
      vocab = config.vocab_size or 50257, context = config.n_positions or config.n_ctx or 1024,
      layers = config.n_layer or 12, width = width, heads = heads, hidden = config.n_inner,
      eps = config.layer_norm_epsilon or 1e-5, tie = config.tie_word_embeddings,
    }
  end,
  write = function(o)
    return {
      model_type = "gpt2", architectures = { "GPT2LMHeadModel" }, vocab_size = o.vocab,
      n_positions = o.context, n_ctx = o.context, n_embd = o.width, n_layer = o.layers,
      n_head = o.heads, n_inner = o.hidden, layer_norm_epsilon = o.eps or 1e-5,
      activation_function = "gelu_new", tie_word_embeddings = o.tie ~= false,
      resid_pdrop = o.dropout or 0, embd_pdrop = o.dropout or 0, attn_pdrop = 0,
      -- Null, because the ids that begin and end a text are not known here; without the keys,
      -- transformers would assume 50256.
      bos_token_id = core.json_null, eos_token_id = core.json_null,
    }
  end,
}

return families
