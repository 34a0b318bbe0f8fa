-- Modules as scripts see them: names, order, ties, buffers, state, hooks, layers, models, writing
-- text, recomputation.
local ms = require "moonshard"
local core = require "moonshard.core"
local support = require "support"
local near, fails = support.near, support.fails
local nn = ms.nn

local function names_of(model)
  local list = {}
  for i, p in ipairs(model:parameters()) do list[i] = p:name() end
  return list
end

local function tiny(kind, more)
  local options = { vocab = 19, context = 12, layers = 2, width = 16, heads = 4 }
  for key, value in pairs(more or {}) do options[key] = value end
  ms.seed(3)
  return nn[kind](options)
end

local tokens = ms.randint { 3, 10, low = 0, high = 19, seed = 4 }

describe("a module", function()
  it("owns what is assigned, in order, with names from 0", function()
    local Block = nn.class "Block"
    function Block:init(width)
      self.up = nn.Linear(width, 2 * width)
      self.down = nn.Linear(2 * width, width, { bias = false })
      self.gain = nn.Parameter(ms.ones {})
      self.width = width
    end
    function Block:forward(x) return self.down(self.up(x):relu()) * self.gain end
    local model = nn.List { Block(2), Block(2) }
    -- A module's own before those of its parts.
    assert.same({
      "0.gain", "0.up.weight", "0.up.bias", "0.down.weight", "1.gain", "1.up.weight", "1.up.bias",
      "1.down.weight",
    }, names_of(model))
    assert.equal(2, model[2].width)
    assert.equal(2, #model)
    assert.equal("1.up.weight", model[2].up.weight:name())
    assert.same({ 4, 2 }, model[1].up.weight:full_shape())
    assert.equal("Block", model[1].class_name)
    assert.equal("", nn.Parameter(ms.ones { 1 }):name())
    local seen = {}
    for name, object in model:modules() do seen[#seen + 1] = name .. ":" .. object.class_name end
    assert.same({
      ":List", "0:Block", "0.up:Linear", "0.down:Linear", "1:Block", "1.up:Linear", "1.down:Linear",
    }, seen)
    assert.equal(2, #model[1]:children())
    assert.is_true(model[1]:children()[1] == model[1].up)
    near(model[1].down(model[1].up(ms.ones { 1, 2 }):relu()):to_table(), model[1](ms.ones { 1, 2 }))
  end)

  -- Each parameter has one name: from p:name(), in filters and lists, and in saved files.
  local function names_agree(model, expected)
    local filtered = {}
    model:parameters(function(p, name)
      assert.equal(name, p:name())
      filtered[#filtered + 1] = name
      return true
    end)
    assert.same(expected, filtered)
    local state, kept = model:state { live = true }, {}
    for i, item in ipairs(model:named_parameters()) do
      assert.equal(expected[i], item.name)
      assert.is_true(state[item.name] == item.parameter)
      kept[item.name] = true
    end
    for name in pairs(state) do assert.is_true(kept[name], name) end
    local path = os.tmpname()
    assert(model:save(path .. ".safetensors"))
    local saved = ms.safetensors.header(path .. ".safetensors")
    for _, name in ipairs(expected) do assert.is_truthy(saved[name], name) end
    os.remove(path)
    os.remove(path .. ".safetensors")
  end

  it("a tied weight has one name everywhere", function()
    local Pair = nn.class "Pair"
    function Pair:init()
      self.b = nn.Linear(2, 2, { bias = false })
      self.a = nn.Linear(2, 2, { bias = false })
      self.b.weight = self.a.weight
    end
    local model = Pair()
    names_agree(model, { "b.weight" })
    names_agree(nn.List { Pair(), model }, { "0.b.weight", "1.b.weight" })
    assert.equal("1.b.weight", model.a.weight:name())
    -- Places that have another value now do not count, and neither do modules that were replaced.
    local tied = Pair()
    local weight = tied.a.weight
    tied.b.weight = nn.Parameter(ms.ones { 2, 2 })
    names_agree(tied, { "b.weight", "a.weight" })
    assert.equal("a.weight", weight:name())
    tied.b.weight = weight
    local old = tied.a
    tied.a = nn.Linear(2, 2, { bias = false })
    names_agree(tied, { "b.weight", "a.weight" })
    assert.equal("b.weight", old.weight:name())
    tied.b = nil
    assert.equal("weight", old.weight:name())
    -- The parts of a block that another one has replaced, and got them from it.
    local Outer = nn.class "Outer"
    function Outer:init() self.blocks = nn.List { Pair(), Pair() } end
    local outer = Outer()
    local before = outer.blocks[2]
    local block = nn.class "Block"()
    block.inner = before.a
    outer.blocks[2] = block
    assert.equal("blocks.1.inner.weight", before.a.weight:name())
    -- Optimizers keep state by these names.
    local stepped = Pair()
    local optimizer = ms.optim.adam(stepped)
    stepped.a.weight:set_grad(ms.ones { 2, 2 })
    optimizer:step()
    assert.is_truthy(optimizer:state().parameters["b.weight"])
    -- Two models with equal names would have one state of the two.
    local one, two = nn.Linear(1, 1, { bias = false }), nn.Linear(1, 1, { bias = false })
    local both = ms.optim.adam { one.weight, two.weight }
    for _, p in ipairs { one.weight, two.weight } do p:set_grad(ms.ones { 1, 1 }) end
    both:step()
    assert.error_matches(function() both:state() end, "two parameters are called 'weight'")
  end)

  it("a module is no part of itself, on whatever way", function()
    local top, part, other = nn.Sequential(), nn.Sequential(), nn.Sequential()
    top[1], other[1] = part, part
    fails(function() part[1] = part end, "cannot be a part of itself")
    fails(function() part[1] = top end, "cannot be a part of itself")
    fails(function() part[1] = other end, "cannot be a part of itself")
  end)

  it("a module in two places, and one inside a wrapper, have one name", function()
    local shared = nn.Linear(2, 2, { bias = false })
    local Twice = nn.class "Twice"
    function Twice:init()
      self.z = nn.Sequential()
      self.y = nn.Sequential(shared)
      self.z[1] = shared
    end
    local model = Twice()
    names_agree(model, { "z.0.weight" })
    model.z = nil
    names_agree(model, { "y.0.weight" })
    local outer = nn.List { nn.Linear(1, 1), ms.ddp(model) }
    assert.equal("1.y.0.weight", shared.weight:name())
    assert.equal(3, #outer:parameters())
  end)

  it("filters parameters, and counts tied ones once under their first name", function()
    local model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, { bias = false }),
      nn.Linear(5, 5))
    model[2].weight = model[1].weight
    assert.same({ "0.weight", "2.weight", "2.bias" }, names_of(model))
    local filtered = model:parameters(function(p, name)
      return p:dim() == 2 and name ~= "0.weight"
    end)
    assert.equal(1, #filtered)
    assert.equal("2.weight", filtered[1]:name())
    model(ms.tensor { 1, 2 }):sum():backward()
    assert.truthy(model[1].weight:grad())
    assert.is_true(model[2].weight == model[1].weight)
  end)

  it("keeps buffers, saved or not", function()
    local model = nn.Linear(2, 2)
    model.mean = ms.ones { 3 }
    model:add_buffer("count", ms.zeros { 1 }, { save = false })
    local buffers = model:buffers()
    assert.is_true(buffers.mean == model.mean and buffers.count == model.count)
    assert.truthy(model:state().mean)
    assert.is_nil(model:state().count)
    assert.equal(2, #model:parameters())
    fails(function() model:add_buffer("w", model.weight) end, "parameter")
  end)

  it("loads what it saves, and says what does not fit before it changes anything", function()
    local a, b = tiny "gpt2", tiny "gpt2"
    for _, p in ipairs(b:parameters()) do ms.no_grad(function() p:add_(1) end) end
    b:load_state(a:state())
    for name, t in pairs(a:state()) do
      assert.is_true(core.bytes(t:detach()) == core.bytes(b:state()[name]:detach()))
    end
    local state, before = {}, core.bytes(b.wte.weight:detach())
    for name, t in pairs(a:state()) do state[name] = t:detach() + 1 end
    state["ln_f.bias"], state["h.0.ln_1.bias"], state.extra = nil, ms.zeros { 3 }, ms.zeros { 1 }
    fails(function() b:load_state(state) end, "missing: ln_f.bias", "unknown: extra",
      "wrong shape: h.0.ln_1.bias", "[16]", "[3]")
    assert.is_true(before == core.bytes(b.wte.weight:detach()))
    state["h.0.ln_1.bias"] = nil
    b:load_state(state, { partial = true })
    assert.is_false(before == core.bytes(b.wte.weight:detach()))
    fails(function() a:load_state({}) end, "missing", "and 25 more")
  end)

  it("has modes", function()
    local model = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 2))
    local x = ms.ones { 50, 2 }
    assert.is_true(model:is_training())
    assert.is_true(model[1](x):eq(0):any():item())
    assert.is_true(model:eval() == model)
    assert.is_true(model[1](x) == x)
    model:train()
    assert.is_true(model[1]:is_training())
    fails(function() nn.Dropout(1) end, "below 1")
  end)

  it("casts, and keeps ties, names, buffers and frozen parameters", function()
    local model = tiny("gpt2", { tie = true })
    model:add_buffer("table", ms.ones { 2 })
    model:add_buffer("ids", ms.tensor { 1, 2 })
    model.ln_f.bias:requires_grad_(false)
    local count = #model:parameters()
    assert.is_true(model:to "bf16" == model)
    for _, p in ipairs(model:parameters()) do
      assert.equal("bf16", p:dtype())
      assert.equal(p:name() ~= "ln_f.bias", p:requires_grad())
    end
    assert.equal(count, #model:parameters())
    assert.equal("wte.weight", model.wte.weight:name())
    assert.equal("bf16", model.table:dtype())
    assert.equal("i64", model.ids:dtype())
    local tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[2].weight = tied[1].weight
    tied:to "f16"
    assert.is_true(tied[1].weight == tied[2].weight)
    assert.equal("f16", model:to("f16")(tokens):dtype())
    fails(function() model:to "f23" end, "'f23'")
    fails(function() model:to "i64" end, "to: ", "are cast to f32, f16 or bf16, not i64")
    assert.equal("f16", model.table:dtype())
  end)

  it("accumulates", function()
    local model = nn.Linear(2, 1, { bias = false })
    model:accumulate(3, function(i) model(ms.full(i, { 1, 2 })):sum():backward() end)
    near({ { 6, 6 } }, model.weight:grad())
    fails(function() model:accumulate(0, function() end) end, "count")
  end)

  it("explains wrong use", function()
    local Empty = nn.class "Empty"
    fails(function() Empty()(1) end, "Empty", "forward")
    fails(function() nn.Parameter(5) end, "tensor", "number")
    fails(function() nn.Parameter(ms.tensor { 1, 2 }) end, "not i64", "add_buffer")
    local a = nn.List {}
    fails(function() a.self = a end, "part of itself")
    fails(function() nn.Linear(2, 2, { biass = true }) end, "Linear", "'biass'", "'bias'")
    fails(function() nn.MLP(2, 2, { activation = "tanh" }) end, "activation", "tanh")
    fails(function() nn.Attention { width = 5, heads = 2 } end, "5", "2")
    fails(function() nn.Attention { width = 4, head = 2 } end, "'head'", "'heads'")
    fails(function() nn.Linear(3, 2)(ms.ones { 1, 2 }) end, "linear", "[1, 2]", "[2, 3]")
  end)
end)

describe("module hooks", function()
  it("run around forward, in order, and replace", function()
    local model, calls = nn.Linear(2, 2, { bias = false }), {}
    ms.no_grad(function() model.weight:copy_(ms.tensor { { 1., 0 }, { 0, 1 } }) end)
    model:hook("pre_forward", function(m, inputs)
      calls[#calls + 1] = "pre"
      assert.is_true(m == model)
      return { inputs[1] * 2 }
    end)
    model:hook("pre_forward",
      function(_, inputs) calls[#calls + 1] = "pre2" return inputs[1] + 1 end)
    local remove = model:hook("forward", function(_, inputs, outputs)
      calls[#calls + 1] = "forward"
      near({ { 3, 5 } }, inputs[1])
      return outputs[1] * 10
    end)
    near({ { 30, 50 } }, model(ms.tensor { { 1., 2 } }))
    assert.same({ "pre", "pre2", "forward" }, calls)
    remove()
    near({ { 3, 5 } }, model(ms.tensor { { 1., 2 } }))
    fails(function() model:hook("fwd", function() end) end, "'fwd'", "'forward'")
    fails(function() model:hook("forward", 5) end, "function")
    model:hook("forward", function() return 5 end)
    fails(function() model(ms.ones { 1, 2 }) end, "number")
  end)

  it("see gradients of outputs and of inputs", function()
    local model, calls, seen = nn.Linear(2, 2, { bias = false }), {}, {}
    ms.no_grad(function() model.weight:copy_(ms.tensor { { 1., 2 }, { 3, 4 } }) end)
    model:hook("pre_backward", function(_, gradients)
      calls[#calls + 1] = "out"
      seen.out = gradients[1]:clone()
    end)
    model:hook("backward", function(_, gradients)
      calls[#calls + 1] = "in"
      seen.inputs = gradients[1]:clone()
      return gradients[1] * 0.5
    end)
    local x = ms.ones { 1, 2, requires_grad = true }
    -- x is used outside too: the hook sees the gradient of the module's input alone.
    ;(model(x):sum() + x:sum() * 100):backward()
    assert.same({ "out", "in" }, calls)
    near({ { 1, 1 } }, seen.out)
    near({ { 4, 6 } }, seen.inputs)
    near({ { 102, 103 } }, x:grad())
    -- Each call has its own alias; hooks do not accumulate on a leaf that is passed repeatedly.
    for _ = 1, 3 do model(x):sum():backward() end
    assert.equal(8, #calls)
  end)

  it("see gradients of several inputs together", function()
    local Sum, seen = nn.class "Sum", nil
    function Sum:forward(a, b) return a * 2 + b * 3 end
    local model = Sum()
    local remove = model:hook("backward", function(_, gradients)
      seen = { gradients[1]:clone(), gradients[2]:clone() }
    end)
    local a, b = ms.ones { 2, requires_grad = true }, ms.ones { 2, requires_grad = true }
    model(a, b):sum():backward()
    near({ 2, 2 }, seen[1])
    near({ 3, 3 }, seen[2])
    remove()
    model:hook("backward", function(_, gradients) return gradients[1] end)
    fails(function() model(a, b):sum():backward() end, "backward hook", "2 gradients")
  end)
end)

describe("layers", function()
  it("have the usual shapes and start", function()
    local x = ms.randn { 2, 5, 16 }
    assert.same({ 2, 5, 8 }, nn.Linear(16, 8)(x):shape())
    assert.same({ 2, 10, 6 }, nn.Embedding(19, 6)(tokens:narrow(1, 1, 2)):shape())
    assert.same({ 2, 5, 16 }, nn.LayerNorm(16)(x):shape())
    assert.equal(1, #nn.LayerNorm(16, { bias = false }):parameters())
    near(x:layer_norm(nil, nil, 0.1):to_table(), nn.LayerNorm(16, { eps = 0.1 })(x))
    near(x:rms_norm():to_table(), nn.RMSNorm(16)(x))
    near(x:gelu("erf"):to_table(), nn.GELU("erf")(x))
    near(x:relu():to_table(), nn.ReLU()(x))
    near(x:silu():to_table(), nn.SiLU()(x))
    local w = nn.Linear(100, 50).weight
    assert.is_true(w:abs():max():item() <= 0.1 and w:abs():max():item() > 0.09)
    for _, kind in ipairs { "gelu", "relu", "swiglu" } do
      local mlp = nn.MLP(16, 32, { activation = kind })
      assert.same({ 2, 5, 16 }, mlp(x):shape())
      assert.equal(kind == "swiglu" and 6 or 4, #mlp:parameters())
    end
    local sequence = nn.Sequential(nn.Linear(16, 4), nn.GELU(), nn.Linear(4, 1))
    assert.same({ 2, 5, 1 }, sequence(x):shape())
    assert.same({ "0.weight", "0.bias", "2.weight", "2.bias" }, names_of(sequence))
  end)

  it("attention is causal, grouped, rotary", function()
    local x = ms.randn { 2, 6, 16 }
    for _, options in ipairs { {}, { kv_heads = 2 }, { rotary = true }, { bias = false } } do
      options.width, options.heads = 16, 4
      local layer = nn.Attention(options)
      local out = layer(x)
      assert.same({ 2, 6, 16 }, out:shape())
      local changed = x:clone()
      changed:narrow(2, 5, 2):fill_(3)
      near(out:narrow(2, 1, 4):to_table(), layer(changed):narrow(2, 1, 4), 1e-5)
    end
    assert.same({ 8, 16 },
      nn.Attention({ width = 16, heads = 4, kv_heads = 2 }).k_proj.weight:shape())
  end)
end)

describe("models", function()
  local hugging = {
    gpt2 = {
      "wte.weight", "wpe.weight", "h.0.ln_1.weight", "h.0.ln_1.bias", "h.0.attn.c_attn.weight",
      "h.0.attn.c_attn.bias", "h.0.attn.c_proj.weight", "h.0.attn.c_proj.bias", "h.0.ln_2.weight",
      "h.0.ln_2.bias", "h.0.mlp.c_fc.weight", "h.0.mlp.c_fc.bias", "h.0.mlp.c_proj.weight",
      "h.0.mlp.c_proj.bias",
    },
    llama = {
      "model.embed_tokens.weight", "model.layers.0.input_layernorm.weight",
      "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight",
      "model.layers.0.self_attn.v_proj.weight", "model.layers.0.self_attn.o_proj.weight",
      "model.layers.0.post_attention_layernorm.weight", "model.layers.0.mlp.gate_proj.weight",
      "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight",
    },
  }

  for _, kind in ipairs { "gpt2", "llama" } do
    it(kind .. " has the names, shapes and counts of others' files", function()
      local model = tiny(kind)
      local state = model:state()
      for _, name in ipairs(hugging[kind]) do assert.truthy(state[name], name) end
      assert.same({ 3, 10, 19 }, model(tokens):shape())
      if kind == "gpt2" then
        assert.same({ 16, 48 }, state["h.0.attn.c_attn.weight"]:shape())
        assert.is_nil(state["lm_head.weight"])
        assert.equal(28, #model:parameters())
      else
        assert.same({ 64, 16 }, state["model.layers.0.mlp.up_proj.weight"]:shape())
        assert.truthy(state["lm_head.weight"])
        assert.same({ 8, 16 },
          tiny("llama", { kv_heads = 2 }):state()["model.layers.1.self_attn.k_proj.weight"]:shape())
      end
      fails(function() model(ms.zeros({ 1, 13, dtype = "i64" })) end, "13", "context of 12")
      fails(function() model(ms.zeros({ 13, dtype = "i64" })) end, "[batch, time]")
    end)

    it(kind .. " starts near an even guess, and learns", function()
      local model = tiny(kind)
      local optimizer = ms.optim.adamw(model, { lr = 1e-2 })
      local x, y = tokens:narrow(2, 1, 9), tokens:narrow(2, 2, 9)
      local first = model(x):cross_entropy(y):item()
      near(math.log(19), first, 0.1)
      for _ in ms.steps(40) do
        model(x):cross_entropy(y):backward()
        optimizer:step()
      end
      assert.is_true(model(x):cross_entropy(y):item() < 0.5)
    end)

    it(kind .. " gives the same gradients when blocks are recomputed", function()
      local function gradients(recompute)
        local model = tiny(kind, { recompute = recompute, dropout = kind == "gpt2" and 0.2 or nil })
        ms.seed(11)
        model(tokens):cross_entropy(tokens):backward()
        local list = {}
        for i, p in ipairs(model:parameters()) do list[i] = core.bytes(p:grad()) end
        return list
      end
      local plain, again = gradients(false), gradients(true)
      for i, bytes in ipairs(plain) do assert.is_true(bytes == again[i], "parameter " .. i) end
    end)

    -- The sums of attention have other lengths and orders, hence the tolerances. A gradient's is of
    -- its largest number.
    it(kind .. " has of packed documents the logits and gradients of each alone", function()
      local lengths = { { 4, 1, 5, 2 }, { 7, 5 } }
      for _, options in ipairs { {}, { recompute = true }, { kv_heads = 2 } } do
        if kind == "llama" or not options.kv_heads then
          local model, alone = tiny(kind, options), tiny(kind, options)
          local x = ms.randint { 2, 12, low = 0, high = 19, seed = 5 }
          local y, places = ms.randint { 2, 12, low = 0, high = 19, seed = 6 }, {}
          for row = 1, 2 do
            places[row] = {}
            for _, length in ipairs(lengths[row]) do
              for at = 0, length - 1 do table.insert(places[row], at) end
            end
          end
          local positions = ms.tensor(places, "i64")
          local logits = model(x, positions)
          logits:cross_entropy(y, { reduction = "sum" }):backward()
          for row = 1, 2 do
            local first = 1
            for _, length in ipairs(lengths[row]) do
              local function part(t) return t:narrow(1, row, 1):narrow(2, first, length) end
              local own = alone(part(x):contiguous())
              near(own:to_table(), part(logits), 1e-5)
              own:cross_entropy(part(y):contiguous(), { reduction = "sum" }):backward()
              first = first + length
            end
          end
          for i, p in ipairs(alone:parameters()) do
            local expected = p:grad()
            near(expected:to_table(), model:parameters()[i]:grad(),
              1e-5 * math.max(expected:abs():max():item(), 1))
          end
          -- They matter: a plain forward is another one.
          assert.is_true((model(x) - logits):abs():max():item() > 1e-3)
          fails(function() model(x, positions:narrow(2, 1, 11)) end,
            kind .. ": positions must be i64 [2, 12]", "[2, 11]")
          fails(function() model(x, positions:to "i32") end, "positions must be i64 [2, 12]", "i32")
          fails(function() model(x, places) end, "positions must be a tensor, not a table")
          fails(function()
            model(x, positions + 1)
            ms.synchronize()
          end, "row 0 is 1", "within 0 .. 0")
        end
      end
    end)

    it(kind .. " saves and loads files with config.json", function()
      local folder = os.tmpname()
      os.remove(folder)
      local model, other = tiny(kind), tiny(kind)
      for _, p in ipairs(other:parameters()) do ms.no_grad(function() p:zero_() end) end
      assert(model:save(folder))
      assert(other:load(folder))
      near(model(tokens):to_table(), other(tokens), 0)
      local config = core.json_decode(assert(core.file_read(folder .. "/config.json")))
      assert.equal(kind, config.model_type)
      assert.equal(19, config.vocab_size)
      local header = assert(ms.safetensors.header(folder .. "/model.safetensors"))
      for name, t in pairs(model:state()) do assert.same(t:shape(), header[name].shape) end
      -- A file with the prefix that other tools write.
      if kind == "gpt2" then
        local prefixed = {}
        for name, t in pairs(model:state()) do prefixed["transformer." .. name] = t end
        prefixed["lm_head.weight"] = model.wte.weight:detach():clone()
        assert(ms.safetensors.save(folder .. "/model.safetensors", prefixed))
        for _, p in ipairs(other:parameters()) do ms.no_grad(function() p:zero_() end) end
        assert(other:load(folder .. "/model.safetensors"))
        near(model(tokens):to_table(), other(tokens), 0)
      end
      local smaller = tiny(kind, { layers = 1 })
      local ok, message, code = smaller:load(folder)
      assert.is_nil(ok)
      assert.equal("mismatch", code)
      assert.truthy(message:find("unknown", 1, true), message)
      assert(smaller:load(folder, { partial = true }))
      ok, message, code = model:load(folder .. "/nothing.safetensors")
      assert.same({ nil, "not_found" }, { ok, code })
      assert.truthy(message:find("nothing.safetensors", 1, true))
      os.execute("rm -r '" .. folder .. "'")
    end)
  end

  it("call each norm, and the embedding of places, where a script stands between", function()
    local given = ms.randint { 2, 8, low = 0, high = 16, seed = 1 }
    for kind, names in pairs {
      gpt2 = { "h", "ln_1", "ln_2", "ln_f" },
      llama = { "layers", "input_layernorm", "post_attention_layernorm", "norm" },
    } do
      local function make()
        ms.seed(1)
        return nn[kind] { vocab = 16, context = 8, layers = 2, width = 16, heads = 2 }
      end
      local function norms_of(model)
        local body, list = model.model or model, {}
        for _, block in ipairs { body[names[1]][1], body[names[1]][2] } do
          list[#list + 1], list[#list + 2] = block[names[2]], block[names[3]]
        end
        list[#list + 1] = body[names[4]]
        return list
      end
      local alone, calls = make()(given):to_table(), 0
      local function count() calls = calls + 1 end
      local hooked, replaced = make(), make()
      for _, norm in ipairs(norms_of(hooked)) do norm:hook("forward", count) end
      near(alone, hooked(given))
      assert.equal(5, calls)
      for _, norm in ipairs(norms_of(replaced)) do
        local own = norm.forward
        norm.forward = function(self, x)
          count()
          return own(self, x)
        end
      end
      near(alone, replaced(given))
      assert.equal(10, calls)
    end
    local model, rows = nn.gpt2 { vocab = 16, context = 8, layers = 1, width = 16, heads = 2 }, nil
    local alone = model(given):to_table()
    model.wpe:hook("forward", function(_, inputs) rows = inputs[1]:to_table() end)
    near(alone, model(given))
    assert.same({ 0, 1, 2, 3, 4, 5, 6, 7 }, rows)
  end)

  it("check their options", function()
    fails(function() tiny("gpt2", { hed = 3 }) end, "nn.gpt2", "'hed'", "'heads'")
    fails(function() nn.gpt2 { vocab = 5 } end, "context")
    fails(function() tiny("gpt2", { heads = 5 }) end, "16", "5 heads")
    fails(function() tiny("llama", { kv_heads = 3 }) end, "4 heads", "3 key")
    fails(function() tiny("llama", { layers = 1.5 }) end, "layers", "integer")
  end)

  it("refuse the options of another model", function()
    fails(function() tiny("gpt2", { kv_heads = 2 }) end, "nn.gpt2: unknown option 'kv_heads'",
      "did you mean 'heads'")
    fails(function() tiny("gpt2", { rotary_base = 500 }) end,
      "nn.gpt2: unknown option 'rotary_base'")
    fails(function() tiny("gpt2", { rotary_scaling = { type = "default" } }) end,
      "unknown option 'rotary_scaling'")
    fails(function() tiny("llama", { dropout = 0.1 }) end, "nn.llama: unknown option 'dropout'")
    local folder = os.tmpname()
    os.remove(folder)
    tiny("llama"):save(folder .. "/")
    assert(nn.pretrained(folder, { dropout = 0 }))           -- recipes give their default
    fails(function() nn.pretrained(folder, { dropout = 0.1 }) end, "option dropout: the llama in",
      "has no dropout")
    os.execute("rm -r '" .. folder .. "'")
  end)
end)

describe("generate", function()
  for _, kind in ipairs { "gpt2", "llama" } do
    it(kind .. ": temperature 0 takes the most likely, as a loop would", function()
      local model, prompt = tiny(kind), { 1, 7, 3 }
      local all = { table.unpack(prompt) }
      for _ = 1, 14 do                              -- past the context of 12
        local window = { table.unpack(all, math.max(1, #all - 11)) }
        local logits = ms.no_grad(function() return model(ms.tensor({ window })) end)
        all[#all + 1] = logits[1][-1]:argmax():item()
      end
      local new = model:generate(ms.tensor(prompt), { count = 14, temperature = 0 })
      assert.same({ table.unpack(all, 4) }, new:to_table())
      assert.equal("i64", new:dtype())
      assert.same({ table.unpack(all, 4) },
        model:generate(ms.tensor(prompt), { count = 14, top_k = 1 }):to_table())
      assert.same({ table.unpack(all, 4) },
        model:generate(ms.tensor(prompt), { count = 14, top_p = 0 }):to_table())
    end)
  end

  it("repeats with a seed, and draws within top_k", function()
    local model = tiny "gpt2"
    local function draw(how)
      how.count = 20
      return model:generate(ms.tensor { 1 }, how):to_table()
    end
    assert.same(draw { seed = 1 }, draw { seed = 1 })
    assert.not_same(draw { seed = 1 }, draw { seed = 2 })
    assert.not_same(draw {}, draw {})
    local three = {}
    for _, id in ipairs(ms.no_grad(function()
      return select(2, model(ms.tensor { { 1 } })[1][1]:topk(3))
    end):to_table()) do
      three[id] = true
    end
    for seed = 1, 30 do
      assert.is_true(
        three[model:generate(ms.tensor { 1 }, { count = 1, top_k = 3, seed = seed }):item()])
    end
  end)

  it("leaves the mode as it was, also after an error", function()
    local model = tiny "gpt2"
    model:generate(ms.tensor { 1 }, { count = 1 })
    assert.is_true(model:is_training())
    model:eval():generate(ms.tensor { 1 }, { count = 1 })
    assert.is_false(model:is_training())
    model:train().last_logits = function() error "broken" end
    assert.has_error(function() model:generate(ms.tensor { 1 }, { count = 1 }) end)
    assert.is_true(model:is_training())
    fails(function() model:generate(ms.tensor { 1 }, { cuont = 1 }) end, "'cuont'", "'count'")
    fails(function() model:generate(ms.tensor { 1 }) end, "count")
    fails(function() model:generate(ms.zeros({ 0, dtype = "i64" }), { count = 1 }) end, "tokens")
    fails(function() model:generate(ms.tensor { 1 }, { count = 1, temperature = -1 }) end,
      "temperature")
  end)
end)
