-- `moonshard test --golden` notices what it must: changed values, unknown names, missing tensors.
-- (That all cases pass is the test golden.data.)
local core = require "moonshard.core"
local ms = require "moonshard"
local program = os.getenv "MOONSHARD_BIN"
local data = (os.getenv "MOONSHARD_SOURCE" or ".") .. "/tests/golden/data"

-- A folder with a copy of the manifest, changed by `change`, and links to the files.
local function folder_with(change)
  local folder = os.tmpname()
  os.remove(folder)
  assert(core.make_directory(folder))
  for _, name in ipairs(assert(core.list(data))) do
    if name:match "%.safetensors$" then
      assert(os.execute(("ln -s '%s/%s' '%s/%s'"):format(data, name, folder, name)))
    end
  end
  local manifest = core.json_decode(assert(core.file_read(data .. "/manifest.json")))
  change(manifest, folder)
  assert(core.file_write(folder .. "/manifest.json", core.json_encode(manifest)))
  return folder
end

local function run(change)
  local folder = folder_with(change)
  local pipe = io.popen(("'%s' test --golden '%s' 2>&1; echo rc=$?"):format(program, folder))
  local text = pipe:read "a"
  pipe:close()
  assert(core.remove(folder))
  return tonumber(text:match "rc=(%d+)"), text
end

local function only(manifest, kind)
  for _, other in ipairs { "optimizers", "operators", "models", "comm_hooks" } do
    if other ~= kind then manifest[other] = nil end
  end
end

-- Writes a changed copy of a tensor file.
local function rewrite(folder, name, change)
  local tensors = assert(ms.safetensors.load(data .. "/" .. name))
  change(tensors)
  os.remove(folder .. "/" .. name)
  assert(ms.safetensors.save(folder .. "/" .. name, tensors))
end

describe("moonshard test --golden", function()
  it("counts the cases of each kind and says what is not built", function()
    -- A few of each kind; golden.data runs all.
    local manifest
    local code, text = run(function(m)
      manifest = m
      for i, list in ipairs { m.optimizers.cases, m.operators.cases, m.models, m.comm_hooks } do
        for k = #list, 6 - i, -1 do list[k] = nil end
      end
    end)
    assert.equal(0, code, text)
    assert.truthy(text:find(("optimizers +%d+ cases"):format(#manifest.optimizers.cases)))
    assert.equal(tostring(#manifest.optimizers.cases), text:match "optimizers +(%d+) cases")
    assert.equal(tostring(#manifest.operators.cases), text:match "operators +(%d+) cases")
    assert.equal(tostring(#manifest.models), text:match "models +(%d+) cases")
    assert.equal(tostring(#manifest.comm_hooks), text:match "comm_hooks +(%d+) cases: 0 run here")
  end)

  -- Twice the tolerance of 1e-5 in one element.
  it("sees an error of twice the tolerance in a result", function()
    local code, text = run(function(manifest, folder)
      only(manifest, "operators")
      rewrite(folder, "operators.safetensors", function(tensors)
        local t = tensors["0.out"]
        local place = t:abs():reshape(-1):argmax()
        t:view(-1):scatter_add_(1, place:view(1), t:abs():max():view(1) * 2e-5)
      end)
    end)
    assert.equal(1, code, text)
    assert.truthy(text:find("FAILED operators, case 0 (matmul), out: error 2", 1, true), text)
  end)

  it("sees a value that is not a number", function()
    local code, text = run(function(manifest, folder)
      only(manifest, "optimizers")
      rewrite(folder, "optimizers.safetensors", function(tensors)
        tensors["3.param.2"][1][1]:fill_(0 / 0)
      end)
    end)
    assert.equal(1, code, text)
    assert.truthy(text:find("case 3 (sgd), param.2", 1, true), text)
  end)

  it("runs hooks on their number of ranks, and sees a changed result", function()
    local function first_only(manifest)
      only(manifest, "comm_hooks")
      for i = #manifest.comm_hooks, 2, -1 do manifest.comm_hooks[i] = nil end
    end
    local code, text = run(first_only)
    assert.equal(0, code, text)
    assert.truthy(text:find("hooks +1 cases, 0 failures"), text)
    code, text = run(function(manifest, folder)
      first_only(manifest)
      rewrite(folder, manifest.comm_hooks[1].file, function(tensors)
        tensors["iter0.reduced.0"][1][1]:mul_(1.000001)
      end)
    end)
    assert.equal(1, code, text)
    assert.truthy(text:find("FAILED hooks, case allreduce, 2 ranks, iter0.reduced.0 by all_reduce",
      1, true), text)
  end)

  it("sees a missing tensor", function()
    local code, text = run(function(manifest, folder)
      only(manifest, "models")
      for i = #manifest.models, 2, -1 do manifest.models[i] = nil end
      rewrite(folder, manifest.models[1].file, function(tensors)
        tensors["final.ln_f.bias"] = nil
      end)
    end)
    assert.equal(1, code, text)
    assert.truthy(text:find("final.ln_f.bias: the file has no such tensor", 1, true), text)
  end)

  local changes = {
    {
      "kind",
      function(m) only(m, "none"); m.tokenizers = { { case = 0 } } end,
      "unknown kind 'tokenizers'",
    },
    {
      "optimizer",
      function(m) only(m, "optimizers"); m.optimizers.cases[1].optimizer = "linear" end,
      "unknown optimizer 'linear'",
    },
    {
      "hyper-parameter",
      function(m)
        only(m, "optimizers")
        m.optimizers.cases[1].hyperparameters.betas = { 0.9, 0.99 }
      end,
      "unknown option 'betas'",
    },
    {
      "option that is no hyper-parameter",
      function(m) only(m, "optimizers"); m.optimizers.cases[1].hyperparameters.schedule = 1 end,
      "unknown hyper-parameter 'schedule'",
    },
    {
      "operator",
      function(m) only(m, "operators"); m.operators.cases[3].op = "fold" end,
      "unknown operator 'fold'",
    },
    {
      "attribute",
      function(m) only(m, "operators"); m.operators.cases[3].attributes = { scale = 2 } end,
      "unknown attribute 'scale'",
    },
    {
      "input",
      function(m) only(m, "operators"); m.operators.cases[1].inputs[3] = "c" end,
      "unknown input 'c'",
    },
    {
      "model",
      function(m) only(m, "models"); m.models[1].model = "rnn" end,
      "unknown model 'rnn'",
    },
    {
      "configuration",
      function(m) only(m, "models"); m.models[1].config.experts = 8 end,
      "unknown configuration 'experts'",
    },
    {
      "hook",
      function(m)
        only(m, "comm_hooks")
        m.comm_hooks = { m.comm_hooks[1] }
        m.comm_hooks[1].hook = "gossip"
      end,
      "unknown hook 'gossip'",
    },
  }
  for _, change in ipairs(changes) do
    it("refuses an unknown " .. change[1], function()
      local code, text = run(change[2])
      assert.equal(1, code, text)
      assert.truthy(text:find(change[3], 1, true), text)
    end)
  end

  it("takes numbers of steps, sizes and hyper-parameters from the manifest", function()
    -- Hyper-parameters that differ from the file's must be noticed: results must be compared with
    -- the file's, not with our own.
    local code, text = run(function(m)
      only(m, "optimizers")
      m.optimizers.cases[1].hyperparameters.lr = 0.2
    end)
    assert.equal(1, code, text)
    assert.truthy(text:find("case 0 (sgd), param.1: error", 1, true), text)
    -- Fewer steps are fewer comparisons, not a failure.
    code, text = run(function(m) only(m, "optimizers"); m.optimizers.cases[1].steps = 2 end)
    assert.equal(0, code, text)
    code, text = run(function(m) only(m, "optimizers"); m.optimizers.cases[1].steps = 100 end)
    assert.equal(1, code, text)
  end)

  it("refuses a folder without cases or manifest", function()
    local code, text = run(function(m) only(m, "none") end)
    assert.equal(1, code, text)
    local pipe = io.popen(("'%s' test --golden /nowhere 2>&1; echo rc=$?"):format(program))
    text = pipe:read "a"
    pipe:close()
    assert.truthy(text:find "rc=3", text)
    assert.truthy(text:find("there is no folder '/nowhere'", 1, true), text)
  end)
end)
