-- Adapters (LoRA) against peft: what adapters that peft wrote compute, and their gradients
-- (tests/golden/peft); that what we write is what peft wrote; merging; what is refused.
local command = require "command"
local ms = require "moonshard"
local core = require "moonshard.core"
local support = require "support"
local nn = ms.nn
local fails = support.fails

local PEER, PEFT = command.source .. "/tests/golden/peer/", command.source .. "/tests/golden/peft/"
local golden = assert(ms.safetensors.load(PEFT .. "results.safetensors"))
local KINDS = { gpt2 = "gpt2", llama_sharded = "llama_sharded", gpt2_some = "gpt2" }
local TARGETS = {
  gpt2 = { "c_attn" }, llama_sharded = { "q_proj", "v_proj" },
  gpt2_some = { "attn.c_proj", "h.1.mlp.c_fc" },
}

local function base(kind, options)
  return assert(nn.pretrained(PEER .. KINDS[kind], options))
end

local function adapted(kind, options)
  local model = base(kind, options)
  assert(model:load_adapters(PEFT .. kind))
  return model
end

local function logits(model) return ms.no_grad(function() return model(golden.tokens) end) end

-- The largest difference. The peer's sums are f32 in another order: numbers up to 6 differ by up to
-- 1e-5. Without adapters logits differ by more than 1.
local function difference(a, b) return (a - b):abs():max():item() end

local function small(options)
  local o = { vocab = 16, context = 12, layers = 2, width = 8, heads = 2 }
  for key, value in pairs(options or {}) do o[key] = value end
  return nn.gpt2(o)
end

describe("adapters", function()
  local folder
  before_each(function() folder = command.folder() end)
  after_each(function() command.remove(folder) end)

  for kind in pairs(KINDS) do
    it("of peft give its logits and its gradients: " .. kind, function()
      local y = ms.arange(0, 31):mul(7):add(1):to_table()
      for i, value in ipairs(y) do y[i] = value % 48 end
      for _, recompute in ipairs { false, true } do
        local model = adapted(kind, { recompute = recompute }):eval()
        assert.near(0, difference(logits(model), golden["logits." .. kind]), 1e-4)
        assert.is_true(difference(logits(base(kind)), golden["logits." .. kind]) > 1)
        model(golden.tokens):cross_entropy(ms.tensor({ y }, "i64")):backward()
        local count = 0
        for _, item in ipairs(model:named_parameters()) do
          local p = item.parameter
          assert.equal(item.name:find("lora_", 1, true) ~= nil, p:requires_grad(), item.name)
          if p:requires_grad() then
            local prefix = kind:find "gpt2" and "transformer." or ""
            local expected = golden[("gradient.%s.base_model.model.%s%s"):format(kind, prefix,
              item.name)]
            -- Gradients are up to 0.9.
            assert.near(0, difference(p:grad(), expected), 1e-5, item.name)
            count = count + 1
          else assert.is_nil(p:grad(), item.name) end
        end
        assert.equal(kind == "llama_sharded" and 8 or kind == "gpt2" and 4 or 6, count)
      end
    end)

    it("are written as peft writes them: " .. kind, function()
      local model = adapted(kind)
      assert(model:save_adapters(folder .. "/again/"))
      local written = assert(ms.safetensors.load(folder .. "/again/adapter_model.safetensors"))
      local count = 0
      for name, t in pairs(assert(ms.safetensors.load(PEFT .. kind
          .. "/adapter_model.safetensors"))) do
        assert.equal(core.bytes(t), core.bytes(written[name]), name)
        assert.same(t:shape(), written[name]:shape())
        written[name], count = nil, count + 1
      end
      assert.is_nil(next(written))
      assert.is_true(count > 0)
      local own = core.json_decode(command.read(folder .. "/again/adapter_config.json"))
      local peer = core.json_decode(command.read(PEFT .. kind .. "/adapter_config.json"))
      for _, key in ipairs {
        "peft_type", "task_type", "r", "lora_alpha", "lora_dropout", "fan_in_fan_out", "bias",
        "use_rslora",
      } do
        assert.equal(peer[key], own[key], key)
      end
      assert.equal(PEER .. KINDS[kind], own.base_model_name_or_path)
      local expected = kind == "gpt2_some" and {
        "transformer.h.0.attn.c_proj", "transformer.h.1.attn.c_proj", "transformer.h.1.mlp.c_fc",
      } or TARGETS[kind]
      assert.same(expected, own.target_modules)
      local read = base(kind)
      assert(read:load_adapters(folder .. "/again"))
      assert.equal(core.bytes(logits(model:eval())), core.bytes(logits(read:eval())))
    end)

    it("folded into the weights give the same logits, and a plain folder: " .. kind, function()
      local model = adapted(kind):eval()
      local before = logits(model)
      assert.equal(model, model:merge_adapters())
      -- W x + s B (A x) and (W + s B A) x are rounded in other places.
      assert.near(0, difference(before, logits(model)), 1e-4)
      for _, p in ipairs(model:parameters()) do assert.is_true(p:requires_grad()) end
      assert(model:save(folder .. "/plain", { dtype = "f32" }))
      local names = ms.safetensors.header(folder .. "/plain/model.safetensors")
      for name in pairs(names) do assert.is_nil(name:find "lora", name) end
      local read = assert(nn.pretrained(folder .. "/plain"))
      assert.equal(core.bytes(logits(model)), core.bytes(logits(read:eval())))
    end)
  end

  it("are small and change nothing at first; A is drawn as a linear layer's weight", function()
    ms.seed(3)
    local model = small():eval()
    local x = ms.tensor({ { 1, 2, 3 } }, "i64")
    local before = core.bytes(model(x))
    assert.equal(model, nn.lora(model, { rank = 4, alpha = 8 }))
    assert.equal(before, core.bytes(model(x)))
    local names = {}
    for _, item in ipairs(model:named_parameters()) do
      if item.parameter:requires_grad() then names[#names + 1] = item.name end
    end
    assert.same({
      "h.0.attn.c_attn.lora_A.weight", "h.0.attn.c_attn.lora_B.weight",
      "h.1.attn.c_attn.lora_A.weight", "h.1.attn.c_attn.lora_B.weight",
    }, names)
    local layer = model.h[1].attn.c_attn
    assert.same({ 4, 8 }, layer.lora_A.weight:shape())
    assert.same({ 24, 4 }, layer.lora_B.weight:shape())
    local most = layer.lora_A.weight:abs():max():item()
    assert.is_true(most <= 1 / math.sqrt(8) and most > 0.5 / math.sqrt(8))
    assert.is_true(layer.lora_B.weight:eq(0):all():item())
  end)

  it("add alpha / rank * B (A x), before the activation", function()
    local layer = nn.Linear(3, 2)
    local model = nn.Sequential(layer)
    nn.lora(model, { rank = 1, alpha = 5, names = { "0" } })
    local x = ms.randn { 4, 3 }
    ms.no_grad(function() layer.lora_B.weight:copy_(ms.tensor { { 1 }, { -2 } }) end)
    local sum = x:linear(layer.weight, layer.bias)
      + x:matmul(layer.lora_A.weight:transpose(1, 2)) * 5 * ms.tensor { 1.0, -2.0 }
    support.near(sum:to_table(), layer(x):to_table())
    support.near(sum:gelu():to_table(), layer(x, "gelu"):to_table())
  end)

  it("drop their inputs in training, and only there", function()
    local layer = nn.Linear(64, 4)
    local model = nn.Sequential(layer)
    nn.lora(model, { rank = 4, dropout = 0.5, names = { "0" } })
    ms.no_grad(function() layer.lora_B.weight:fill_(1) end)
    local x = ms.ones { 1, 64 }
    local first, second = model(x):to_table(), model(x):to_table()
    assert.not_same(first, second)
    model:eval()
    assert.same(model(x):to_table(), model(x):to_table())
    local plain = layer(x):to_table()
    model:merge_adapters()
    support.near(plain, model(x):to_table(), 1e-5)
  end)

  it("are for names, ends of names and patterns", function()
    local function adapted_names(names)
      local model, list = small(), {}
      nn.lora(model, { names = names })
      for name, object in model:modules() do
        if rawget(getmetatable(object).fields, "lora_A") then list[#list + 1] = name end
      end
      return list
    end
    assert.same({ "h.0.attn.c_proj", "h.0.mlp.c_proj", "h.1.attn.c_proj", "h.1.mlp.c_proj" },
      adapted_names { "c_proj" })
    assert.same({ "h.0.attn.c_proj", "h.1.attn.c_proj" }, adapted_names { "attn.c_proj" })
    assert.same({ "h.1.mlp.c_fc" }, adapted_names { "h.1.mlp.c_fc" })
    assert.same({ "h.1.attn.c_attn", "h.1.attn.c_proj" }, adapted_names { "h%.1%.attn%..*" })
  end)

  it("may adapt a head of its own", function()
    local model = small { tie = false }:eval()
    nn.lora(model, { names = { "lm_head" } })
    ms.no_grad(function() model.lm_head.lora_B.weight:fill_(1) end)
    model(ms.tensor({ { 1, 2, 3 } }, "i64")):sum():backward()
    assert.is_true(model.lm_head.lora_A.weight:grad():abs():max():item() > 0)
    assert(model:save_adapters(folder))
    assert.is_truthy(ms.safetensors.header(folder .. "/adapter_model.safetensors")
      ["base_model.model.lm_head.lora_A.weight"])
  end)

  it("train while the base stays, to the bit; generating uses them, with kept keys too", function()
    ms.seed(5)
    local model = nn.lora(small { tie = false }, { rank = 2, names = { ".*" } })
    local before = {}
    for name, t in pairs(model:state()) do before[name] = core.bytes(t) end
    local optimizer = ms.optim.adamw(model, { lr = 5e-2, weight_decay = 0.1 })
    local x = ms.tensor({ { 1, 2, 3, 4, 5, 6, 7, 8 } }, "i64"):keep()
    local y = ms.tensor({ { 2, 3, 4, 5, 6, 7, 8, 9 } }, "i64"):keep()
    local first, last
    for _ in ms.steps(60) do
      local loss = model(x):cross_entropy(y)
      loss:backward()
      optimizer:step()
      optimizer:zero_grad()
      last = loss:item()
      first = first or last
    end
    assert.is_true(last < 0.5 * first, ("%g, %g"):format(first, last))
    for name, t in pairs(model:state()) do
      assert.equal(not name:find "lora_", before[name] == core.bytes(t), name)
    end
    local text = model:generate(ms.tensor({ 1 }, "i64"), { count = 6, temperature = 0 }):to_table()
    local ids = { 1 }
    for _ = 1, 6 do
      local all = ms.no_grad(function() return model(ms.tensor({ ids }, "i64")) end)
      ids[#ids + 1] = math.tointeger(all:narrow(2, #ids, 1):argmax(3):item())
    end
    assert.same({ table.unpack(ids, 2) }, text)
  end)

  it("are in checkpoints, and a resumed run has the bits of one that was never stopped", function()
    local function make()
      ms.seed(9)
      local model = nn.lora(small(), { rank = 2, dropout = 0.25 })
      return model, ms.optim.adamw(model, { lr = 1e-2 })
    end
    local x = ms.tensor({ { 1, 2, 3, 4 } }, "i64"):keep()
    local function train(model, optimizer, count)
      for _ in ms.steps(count) do
        model(x):cross_entropy(x):backward()
        optimizer:step()
        optimizer:zero_grad()
      end
    end
    local model, optimizer = make()
    train(model, optimizer, 3)
    local path = assert(ms.checkpoint.save(folder .. "/run",
      { model = model, optimizer = optimizer }))
    ms.checkpoint.wait()
    train(model, optimizer, 3)
    local again, other = make()
    assert(ms.checkpoint.load(path, { model = again, optimizer = other }))
    train(again, other, 3)
    for name, t in pairs(model:state()) do
      assert.equal(core.bytes(t), core.bytes(again:state()[name]), name)
    end
  end)

  it("keep the dtype of 16-bit weights, and may be on \"meta\" until values are made", function()
    local short = nn.lora(small():to "bf16", { rank = 2 })
    assert.equal("bf16", short.h[1].attn.c_attn.lora_B.weight:dtype())
    local read = ms.device("meta", function()
      local model = base "gpt2"
      assert(model:load_adapters(PEFT .. "gpt2"))
      return model
    end)
    assert.equal("meta", read.h[1].attn.c_attn.lora_A.weight:device())
    fails(function() read:merge_adapters() end, "on \"meta\" and has no values yet")
    read:materialize()
    assert.equal(core.bytes(logits(adapted "gpt2":eval())), core.bytes(logits(read:eval())))
  end)

  ---------------------------------------------------------------------------------- what is refused

  it("that fit no layer, or options that are none, are errors that say what there is", function()
    local model = small()
    fails(function() nn.lora(model, { names = { "c_atn" } }) end, "nn.lora: names[1]: no layer \z
      is called 'c_atn': did you mean 'c_attn'?; linear layers are called c_attn, c_proj, c_fc")
    fails(function() nn.lora(model, { names = { "c_fc", "ln_1" } }) end,
      "names[2]: 'h.0.ln_1' is a LayerNorm, and adapters are for Linear")
    fails(function() nn.lora(nn.Sequential(nn.Linear(2, 2))) end, "give names, those of the \z
      layers that get an adapter: linear layers are called 0")
    fails(function() nn.lora(nn.LayerNorm(2), { names = { "x" } }) end, "has no linear layer")
    fails(function() nn.lora(model, { names = "c_attn" }) end, "names is a list of names")
    fails(function() nn.lora(model, { rank = 0 }) end, "rank must be an integer of 1 or more")
    fails(function() nn.lora(model, { alpha = 0 }) end, "alpha must be a number above 0")
    fails(function() nn.lora(model, { dropout = 1 }) end, "0 or more and below 1, not 1")
    fails(function() nn.lora(model, { ranks = 2 }) end, "did you mean 'rank'?")
    fails(function() nn.lora(2) end, "model must be a module")
    for _, p in ipairs(model:parameters()) do assert.is_true(p:requires_grad()) end
  end)

  it("come once, before wrappers and optimizers, and are not saved as weights", function()
    local model = small()
    -- One that was dropped owns nothing, once it is collected.
    local optimizer = ms.optim.sgd(model)
    fails(function() nn.lora(model) end, "belongs to an optimizer already")
    assert.equal(1, #optimizer:groups())
    model = nn.lora(small())
    fails(function() nn.lora(model) end,
      "'h.0.attn.c_attn' has an adapter already: merge_adapters() folds it")
    fails(function() model:save(folder .. "/x") end,
      "save: the model has adapters: save_adapters(folder)")
    fails(function() small():save_adapters(folder) end, "the model has no adapters")
    fails(function() small():merge_adapters() end, "the model has no adapters")
    for _, wrap in ipairs { "ddp", "fsdp" } do
      local wrapped = ms[wrap](small())
      fails(function() nn.lora(wrapped) end, "this model is wrapped in " .. wrap .. " already")
      fails(function() wrapped:merge_adapters() end, "before it is wrapped")
      fails(function() wrapped:load_adapters(folder) end, "before it is wrapped")
    end
    for _, wrap in ipairs { "ddp", "fsdp" } do
      local wrapped = ms[wrap](nn.lora(small()))
      fails(function() wrapped.module:merge_adapters() end,
        ("what ms.%s returned"):format(wrap))
      assert.is_true(nn.is_module(wrapped:unwrap():merge_adapters()))
      wrapped = ms[wrap](small())
      fails(function() nn.lora(wrapped.module) end, "wrapped in " .. wrap)
    end
    local wrapped = ms.fsdp(nn.lora(small()))
    fails(function() wrapped:save(folder .. "/x") end, "save: the model has adapters")
    assert.is_false(core.exists(folder .. "/x"))
  end)

  it("in damaged or foreign folders are refused, and the model stays as it was", function()
    local function refused(change, pattern, code, kind)
      kind = kind or "gpt2"
      command.remove(folder)
      assert(core.make_directory(folder))
      for _, name in ipairs { "adapter_config.json", "adapter_model.safetensors" } do
        command.write(folder .. "/" .. name, command.read(PEFT .. kind .. "/" .. name))
      end
      change()
      local model = base "gpt2"
      local ok, message, got = model:load_adapters(folder)
      assert.is_nil(ok)
      assert.matches(pattern, message)
      assert.equal(code, got)
      for _, p in ipairs(model:parameters()) do assert.is_true(p:requires_grad()) end
      assert.is_nil(next(model.h[1].attn.c_attn:children()))
    end
    local function set(key, value)
      return function()
        local config = core.json_decode(command.read(folder .. "/adapter_config.json"))
        config[key] = value
        command.write(folder .. "/adapter_config.json", core.json_encode(config))
      end
    end
    local function weights(edit)
      return function()
        local path = folder .. "/adapter_model.safetensors"
        local tensors = assert(ms.safetensors.load(path))
        edit(tensors)
        assert(ms.safetensors.save(path, tensors))
      end
    end
    local A = "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight"
    refused(set("use_dora", true), "adapter_config.json': use_dora is true", "unsupported")
    refused(set("bias", "all"), "bias is all", "unsupported")
    refused(set("modules_to_save", { "wte" }), 'modules_to_save is %["wte"%]', "unsupported")
    refused(set("rank_pattern", { c_attn = 2 }), "rank_pattern is {", "unsupported")
    refused(set("init_lora_weights", "pissa_niter_16"), "init_lora_weights is pissa_niter_16",
      "unsupported")
    refused(set("init_lora_weights", "olora"), "init_lora_weights is olora", "unsupported")
    refused(set("of_tomorrow", 0), "of_tomorrow is 0; this is not supported", "unsupported")
    refused(set("loftq_config", { bits = 4 }), 'loftq_config is {"bits":4}', "unsupported")
    refused(set("peft_type", "LOHA"), "peft_type is LOHA; LORA is supported", "unsupported")
    refused(set("r", 8), "lora_%w of 'h.%d.attn.c_attn' is %[%d+, %d+%], and with r = 8",
      "mismatch")
    refused(set("r", nil), "r is nil", "corrupt")
    refused(function() command.write(folder .. "/adapter_config.json", "{") end, "not JSON",
      "corrupt")
    refused(function() os.remove(folder .. "/adapter_model.safetensors") end, "adapter_model",
      "not_found")
    refused(weights(function(t) t[A] = nil end), "adapter of 'h.0.attn.c_attn' has no lora_A",
      "corrupt")
    refused(weights(function(t) t["base_model.model.x.lora_A.weight"] = ms.zeros { 4, 4 } end),
      "'base_model.model.x.lora_A.weight' belongs to no linear layer", "mismatch")
    refused(weights(function(t) t["base_model.model.transformer.wte.weight"] = ms.zeros { 4 } end),
      "wte.weight' is no weight of an adapter", "unsupported")
    refused(function() end, "belongs to no linear layer of this model", "mismatch", "llama_sharded")
    local model, message, code = nn.pretrained(PEFT .. "gpt2")
    assert.is_nil(model)
    assert.matches("these are adapters, and no model", message)
    assert.equal("unsupported", code)
    local other = nn.lora(base "gpt2", { rank = 2 })
    local ok, why = other:load_adapters(PEFT .. "gpt2")
    assert.is_nil(ok)
    assert.matches("its rank is 4 and its scale 1.5, and those of the model are 2 and 1", why)
  end)

  it("with rank-stabilized scaling have alpha / sqrt(rank), and keep it in files", function()
    assert(core.make_directory(folder))
    local config = core.json_decode(command.read(PEFT .. "gpt2/adapter_config.json"))
    config.use_rslora, config.lora_alpha = true, 3
    command.write(folder .. "/adapter_config.json", core.json_encode(config))
    command.write(folder .. "/adapter_model.safetensors",
      command.read(PEFT .. "gpt2/adapter_model.safetensors"))
    local model = base "gpt2"
    assert(model:load_adapters(folder))
    -- 3 / sqrt(4) is the scale of the golden adapter, 6 / 4.
    assert.equal(core.bytes(logits(adapted "gpt2":eval())), core.bytes(logits(model:eval())))
    assert(model:save_adapters(folder .. "/again"))
    local again = core.json_decode(command.read(folder .. "/again/adapter_config.json"))
    assert.is_true(again.use_rslora)
    assert.equal(3, again.lora_alpha)
  end)
end)
