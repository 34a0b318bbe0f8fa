-- Models of Hugging Face transformers, as its releases 5 ("new") and 4 ("old") write them
-- (tests/golden/peer/README.md): what we compute, which files of a folder we read, and that what we
-- save is what we read.
local command = require "command"
local ms = require "moonshard"
local core = require "moonshard.core"
local log = require "moonshard.base.log"

local PEER = command.source .. "/tests/golden/peer/"
local golden = assert(ms.safetensors.load(PEER .. "logits.safetensors"))

describe("models of the peer", function()
  local folder, lines, write_line
  before_each(function()
    folder, lines, write_line = command.folder(), {}, log.log
    log.log = function(format, ...) -- luacheck: ignore 122
      lines[#lines + 1] = format:format(...)
    end
  end)
  after_each(function()
    log.log = write_line -- luacheck: ignore 122
    command.remove(folder)
  end)

  local function copy(from, to) command.write(to, assert(command.read(from), from)) end

  -- A folder with the files of one of the peer's; returns its path.
  local function folder_of(name)
    local path = folder .. "/" .. name
    assert(core.make_directory(path))
    for _, file in ipairs(core.list(PEER .. name)) do
      copy(PEER .. name .. "/" .. file, path .. "/" .. file)
    end
    return path
  end

  -- Largest difference of logits. The peer's are computed in f32 in another order: up to 2e-5 of
  -- numbers up to 6.
  local function difference(model, kind)
    return ms.no_grad(function()
      return (model(golden.tokens) - golden["logits." .. kind]):abs():max():item()
    end)
  end

  for _, form in ipairs { "new", "old" } do
    for _, kind in ipairs { "default", "linear", "llama3" } do
      it(("Llama, rotary positions %s in the %s form"):format(kind, form), function()
        local path = folder_of "llama_sharded"
        copy(("%sllama_%s_%s/config.json"):format(PEER, form, kind), path .. "/config.json")
        local model = assert(ms.nn.pretrained(path))
        assert.near(0, difference(model, kind), 1e-4)
        assert(model:save(folder .. "/again", { dtype = "f32" }))
        assert.near(0, difference(assert(ms.nn.pretrained(folder .. "/again")), kind), 1e-4)
      end)
    end

    for _, kind in ipairs { "dynamic", "yarn" } do
      it(("refuses rotary positions %s in the %s form"):format(kind, form), function()
        local path = folder_of "llama_sharded"
        copy(("%sllama_%s_%s/config.json"):format(PEER, form, kind), path .. "/config.json")
        local model, message, code = ms.nn.pretrained(path)
        assert.is_nil(model)
        assert.matches("the rope_type in rope_%w+ is " .. kind
          .. "; default, linear and llama3 are supported", message)
        assert.equal("unsupported", code)
      end)
    end
  end

  it("Llama, scaled linearly under the older name of its type, and by rope_scaling in place of \z
    rope_parameters", function()
    local path = folder_of "llama_sharded"
    local config = core.json_decode(command.read(PEER .. "llama_old_linear/config.json"))
    for _, scaling in ipairs {
      { type = "linear", factor = 4 },
      { rope_type = "linear", factor = 4, rope_theta = 500 },
    } do
      config.rope_scaling, config.rope_theta = scaling, not scaling.rope_theta and 500 or nil
      command.write(path .. "/config.json", core.json_encode(config))
      assert.near(0, difference(assert(ms.nn.pretrained(path)), "linear"), 1e-4)
    end
  end)

  it("a missing rms_norm_eps means 1e-6", function()
    local path = folder_of "llama_sharded"
    local config = command.read(path .. "/config.json")
    local without, count = config:gsub('%s*"rms_norm_eps": 1e%-06,', "")
    assert.equal(1, count)
    command.write(path .. "/config.json", without)
    assert.equal(1e-6, assert(ms.nn.pretrained(path)).model.norm.eps)
  end)

  it("scaled positions of a model made here are saved in a form that is read again", function()
    local scaling = {
      type = "llama3", factor = 4, low_freq_factor = 1, high_freq_factor = 2, original_context = 8,
    }
    local model = ms.nn.llama {
      vocab = 48, context = 64, layers = 1, width = 32, heads = 2, rotary_base = 300,
      rotary_scaling = scaling,
    }
    assert(model:save(folder))
    local config = core.json_decode(command.read(folder .. "/config.json"))
    assert.equal(300, config.rope_theta)
    assert.same({
      rope_type = "llama3", factor = 4, low_freq_factor = 1, high_freq_factor = 2,
      original_max_position_embeddings = 8,
    }, config.rope_scaling)
    local again = assert(ms.nn.pretrained(folder))
    assert.same(scaling, again.options.rotary_scaling)
    local x = golden.tokens:narrow(2, 1, 20)
    ms.no_grad(function() assert.equal(core.bytes(model(x)), core.bytes(again(x))) end)
    assert.error_matches(function()
      ms.nn.llama {
        vocab = 4, context = 4, layers = 1, width = 4, heads = 1,
        rotary_scaling = { type = "yarn" },
      }
    end, "rotary_scaling: type is yarn; default, linear and llama3 are built")
  end)

  -------------------------------------------------------------------------------------------- files

  it("a folder is read by its index; other files are named and not read", function()
    local path = folder_of "llama_sharded"
    local stray = {}
    for name, t in pairs(
        assert(ms.safetensors.load(path .. "/model-00001-of-00003.safetensors"))) do
      stray[name] = ms.zeros(t:shape())
    end
    for _, name in ipairs { "a", "model", "z" } do
      assert(ms.safetensors.save(("%s/%s.safetensors"):format(path, name), stray))
    end
    assert.near(0, difference(assert(ms.nn.pretrained(path)), "llama3"), 1e-4)
    assert.equal(3, #lines)
    assert.matches("a.safetensors is not read: model.safetensors.index.json does not name it",
      lines[1], 1, true)
  end)

  local function refused(path, pattern, code)
    local model, message, kind = ms.nn.pretrained(path)
    assert.is_nil(model)
    assert.matches(pattern, message)
    assert.equal(code, kind)
  end

  it("an index that does not fit its folder is an error that names both", function()
    local path = folder_of "llama_sharded"
    local index = path .. "/model.safetensors.index.json"
    local text = command.read(index)
    command.write(index,
      (text:gsub('"lm_head.weight": "model%-00003', '"lm_head.weight": "model-00001')))
    refused(path, "index.json' names it.*model%-00001.*has no tensor 'lm_head.weight'", "not_found")
    command.write(index,
      (text:gsub('"lm_head.weight": "model%-00003', '"lm_head.weight": "model-00009')))
    refused(path, "index.json' names it.*model%-00009", "not_found")
    command.write(index, (text:gsub('"lm_head.weight": "', '"lm_head.weight": "../')))
    refused(path, "files of this folder are expected", "corrupt")
    command.write(index, "{}")
    refused(path, "it has no weight_map", "corrupt")
    command.write(index, "{")
    refused(path, "not JSON", "corrupt")
  end)

  it("without an index, a name that stands in two files is an error that names both", function()
    local path = folder_of "llama_sharded"
    assert(os.remove(path .. "/model.safetensors.index.json"))
    assert.near(0, difference(assert(ms.nn.pretrained(path)), "llama3"), 1e-4)
    assert(ms.safetensors.save(path .. "/z.safetensors",
      { ["lm_head.weight"] = ms.zeros { 48, 32 } }))
    refused(path,
      "'lm_head.weight' occurs twice: .*model%-00003%-of%-00003.safetensors' and .*z.safetensors'",
      "mismatch")
    local model = ms.nn.Linear(2, 2)
    for _, name in ipairs { "one", "two" } do
      assert(model:save(("%s/%s.safetensors"):format(folder, name)))
    end
    local ok, message = model:load { folder .. "/one.safetensors", folder .. "/two.safetensors" }
    assert.is_nil(ok)
    assert.matches("occurs twice: .*one.safetensors' and .*two.safetensors'", message)
  end)

  it("the same weight with and without the prefix is a name that stands twice", function()
    local path = folder_of "gpt2"
    assert(ms.safetensors.save(path .. "/z.safetensors", { ["wte.weight"] = ms.zeros { 48, 16 } }))
    refused(path, "'wte.weight' occurs twice: as 'transformer.wte.weight' in .*model.safetensors' \z
      and as 'wte.weight' in .*z.safetensors'", "mismatch")
  end)

  it("a tied head that differs from its embedding is refused", function()
    local path = folder_of "gpt2"
    assert(ms.safetensors.save(path .. "/z.safetensors",
      { ["lm_head.weight"] = ms.zeros { 48, 16 } }))
    refused(path, "'lm_head.weight' differs from 'wte.weight'.*tie_word_embeddings", "mismatch")
  end)

  it("a model is not saved into a folder whose index would name other weights", function()
    local path = folder_of "llama_sharded"
    local ok, message, code = assert(ms.nn.pretrained(path)):save(path)
    assert.is_nil(ok)
    assert.matches(
      "holds a model in several files %(model.safetensors.index.json%): save to another folder",
      message)
    assert.equal("exists", code)
  end)

  it("an untied GPT-2 made here has the prefix without which the peer does not read its \z
    head", function()
    for tie, prefix in pairs { [true] = "", [false] = "transformer." } do
      local model = ms.nn.gpt2 {
        vocab = 48, context = 32, layers = 1, width = 16, heads = 2, tie = tie,
      }
      assert(model:save(folder))
      local header = ms.safetensors.header(folder .. "/model.safetensors")
      assert.is_truthy(header[prefix .. "wte.weight"])
      assert.equal(not tie, header["lm_head.weight"] ~= nil)
      local again = assert(ms.nn.pretrained(folder))
      ms.no_grad(function()
        assert.equal(core.bytes(model(golden.tokens)), core.bytes(again(golden.tokens)))
      end)
    end
  end)

  ------------------------------------------------------------------------------ saved equals loaded

  -- The tensors of a folder's files, as { dtype, shape, bytes } by name.
  local function contents(path)
    local found = {}
    for _, file in ipairs(core.list(path)) do
      for name, t in pairs(file:match "%.safetensors$"
          and assert(ms.safetensors.load(path .. "/" .. file)) or {}) do
        found[name] = { dtype = t:dtype(), shape = t:shape(), bytes = core.bytes(t) }
      end
    end
    return found
  end

  local companions = {
    ["tokenizer.json"] = '{"a": [1, 2]}',
    ["tokenizer_config.json"] = "{}\n",
    ["vocab.json"] = "{ }",
    ["merges.txt"] = "#version: 0.2\na b\n",
    ["special_tokens_map.json"] = '{"eos_token": "x"}',
    ["tokenizer.model"] = "\0\1\255",
    ["chat_template.jinja"] = "{{ x }}",
  }

  for _, name in ipairs { "llama_sharded", "gpt2" } do
    it(name .. ": names, dtypes, values, config.json and companions are saved as they were read",
      function()
        local path = folder_of(name)
        for file, text in pairs(companions) do command.write(path .. "/" .. file, text) end
        command.write(path .. "/notes.txt", "not a file of the model")
        local model = assert(ms.nn.pretrained(path))
        assert.equal("f32", model:parameters()[1]:dtype())
        assert(model:save(folder .. "/again"))
        assert.same(contents(path), contents(folder .. "/again"))
        for _, file in ipairs { "config.json", "generation_config.json" } do
          assert.equal(command.read(path .. "/" .. file), command.read(folder .. "/again/" .. file),
            file)
        end
        for file, text in pairs(companions) do
          assert.equal(text, command.read(folder .. "/again/" .. file), file)
        end
        assert.is_false(core.exists(folder .. "/again/notes.txt"))
      end)
  end

  it("rounding to the dtype of the file is logged, and dtype = 'f32' prevents it", function()
    local path = folder_of "llama_sharded"
    local model = assert(ms.nn.pretrained(path))
    local weight = model.model.norm.weight
    ms.no_grad(function() weight:fill_(1 + 2 ^ -12) end)            -- more bits than bf16 has
    assert(model:save(folder .. "/short"))
    assert.equal(1, #lines)
    assert.matches('21 tensors are rounded to bf16, as in the file that they were loaded from; \z
      save%(path, { dtype = "f32" }%) keeps all bits', lines[1])
    assert.equal(1, assert(ms.nn.pretrained(folder .. "/short")).model.norm.weight:max():item())
    assert(model:save(folder .. "/long", { dtype = "f32" }))
    assert.equal(1, #lines)
    local long = assert(ms.nn.pretrained(folder .. "/long"))
    assert.equal(1 + 2 ^ -12, long.model.norm.weight:max():item())
    -- config.json has the new dtype and all its other entries, also null and lists.
    local before, after = command.read(path .. "/config.json"),
      command.read(folder .. "/long/config.json")
    local expected = core.json_decode(before, true)
    assert.equal("bfloat16", expected.dtype)
    expected.dtype = "float32"
    assert.equal(core.json_encode(expected), core.json_encode(core.json_decode(after, true)))
    assert.matches('"bos_token_id": null', after, 1, true)
    -- After model:to, the dtype in memory counts.
    assert(assert(ms.nn.pretrained(path)):to("f32"):save(folder .. "/told"))
    assert.equal("f32",
      (ms.safetensors.header(folder .. "/told/model.safetensors"))["lm_head.weight"].dtype)
    assert.equal(1, #lines)
    assert.error_matches(function() model:save(folder .. "/x", { dtype = "i64" }) end,
      "dtype is f32, f16 or bf16, not i64")
  end)

  -- 65519 is rounded to the greatest number of f16, 65520 to inf; inf and nan stay what they are.
  it("never writes a finite number as inf, and leaves the older file", function()
    local function made(value, dtype)
      local layer = ms.nn.Linear(3, 2)
      ms.no_grad(function() layer.weight:narrow(1, 2, 1):narrow(2, 3, 1):fill_(value) end)
      return dtype and layer:to(dtype) or layer
    end
    local path = folder .. "/layer.safetensors"
    for _, case in ipairs {
      { 65519.0, "f16" }, { -65519.0, "f16" }, { math.huge, "f16" }, { -math.huge, "f16" },
      { 0 / 0, "f16" }, { 3.39e38, "bf16" }, { math.huge, "bf16" }, { 3.4e38, "f32" },
    } do
      assert(made(case[1]):save(path, { dtype = case[2] }))
    end
    local before = command.read(path)
    for _, case in ipairs {
      { 65520.0, "f16" }, { -70000.0, "f16" }, { 3.4e38, "f16" }, { 3.4e38, "bf16" },
      { -3.397e38, "bf16" }, { 1e30, "f16", "bf16" },
    } do
      local ok, message, code = made(case[1], case[3]):save(path, { dtype = case[2] })
      assert.is_nil(ok)
      assert.equal("unsupported", code)
      assert.matches("'weight' has the number ", message)
      assert.matches("which " .. case[2] .. " has no room for", message)
      assert.equal(before, command.read(path))
    end
    -- What is inf already does not hide what would become it.
    local layer = made(70000.0)
    ms.no_grad(function() layer.weight:narrow(1, 1, 1):fill_(math.huge) end)
    local _, message = layer:save(path, { dtype = "f16" })
    assert.matches("has the number 70000", message)
    assert.equal(before, command.read(path))
    collectgarbage()
    for _, name in ipairs(core.list(folder)) do assert.not_matches("%.tmp", name) end
    -- The dtype of the file that a model was read from.
    local model = assert(ms.nn.pretrained(folder_of "llama_sharded")):to "f32"
    assert(model:save(folder .. "/half", { dtype = "f16" }))
    model = assert(ms.nn.pretrained(folder .. "/half"))
    ms.no_grad(function() model.model.norm.weight:fill_(1e6) end)
    local ok, why, code = model:save(folder .. "/more")
    assert.is_nil(ok)
    assert.equal("unsupported", code)
    assert.matches("'model.norm.weight' has the number 1e%+06", why)
    assert(model:save(folder .. "/more", { dtype = "bf16" }))
  end)

  it("checkpoints are never rounded", function()
    local model = assert(ms.nn.pretrained(folder_of "llama_sharded"))
    ms.no_grad(function() model.model.norm.weight:fill_(1 + 2 ^ -12) end)
    local path = assert(ms.checkpoint.save(folder .. "/run", { model = model }))
    ms.checkpoint.wait()
    local other = assert(ms.nn.pretrained(PEER .. "llama_sharded"))
    assert(ms.checkpoint.load(path, { model = other }))
    assert.equal(1 + 2 ^ -12, other.model.norm.weight:max():item())
    assert.equal(0, #lines)
  end)
end)
