-- The annotations that editors read (lua/moonshard/meta.lua and meta/) name only what exists, under
-- its name.
local ms = require "moonshard"
local core = require "moonshard.core"
local annotations = require "annotations"
local command = require "command"

local all = annotations.read()

-- class -> list of the names of its functions, as the annotations declare them.
local function declared()
  local classes = {}
  for class, told in pairs(all) do
    classes[class] = {}
    for _, one in ipairs(told.functions) do table.insert(classes[class], one.name) end
  end
  return classes
end

-- The hyper-parameters of each kind of optimizer, as its comment tells them.
local function hyper_parameters()
  local kinds = {}
  for _, one in ipairs(all["ms.optim"].functions) do
    local first, second = table.unpack(one.parameters)
    if first.type == "ms.Params" and second.type == "ms.OptimizerOptions" then
      local other = one.text:match "^as (%w+);"
      kinds[one.name] = other and kinds[other] .. " " .. one.text or one.text
    end
  end
  return kinds
end

describe("the annotations", function()
  local classes = declared()
  local kinds = hyper_parameters()
  local folder = os.tmpname()
  os.remove(folder)
  assert(core.make_directory(folder))
  assert(core.file_write(folder .. "/text", ("some text to read "):rep(20)))
  local set = assert(ms.data.bytes(folder .. "/text"))
  assert(core.file_write(folder .. "/records", "{}\n"))
  local records = assert(ms.data.jsonl(folder .. "/records"))
  local tokenizer = assert(ms.tokenizer.load((os.getenv "MOONSHARD_SOURCE" or ".")
    .. "/tests/golden/tokenizers/gpt2"))
  local layer = ms.nn.Linear(2, 2)
  local bucket
  local ddp = ms.ddp(ms.nn.Linear(2, 2), { comm_hook = function(b, next)
    bucket = b
    return next(b)
  end })
  ddp(ms.ones { 2 }):sum():backward()
  local fsdp = ms.fsdp(ms.nn.Linear(2, 2))
  local objects = {
    ms = ms, ["ms.nn"] = ms.nn, ["ms.optim"] = ms.optim, ["ms.data"] = ms.data,
    ["ms.checkpoint"] = ms.checkpoint,
    ["ms.safetensors"] = ms.safetensors, ["ms.trace"] = ms.trace, ["ms.scripts"] = ms.scripts,
    ["ms.tokenizer"] = ms.tokenizer, ["ms.Tokenizer"] = tokenizer,
    ["ms.TokenDecoder"] = tokenizer:decoder(),
    ["ms.chat"] = ms.chat, ["ms.ChatTemplate"] = assert(ms.chat.template ""),
    ["ms.Tensor"] = ms.zeros { 1 }, ["ms.Parameter"] = layer.weight,
    ["ms.Module"] = layer,
    ["ms.LanguageModel"] = ms.nn.gpt2 { vocab = 4, context = 4, layers = 1, width = 4, heads = 1 },
    ["ms.Optimizer"] = ms.optim.sgd(layer), ["ms.Scaler"] = ms.optim.scaler(),
    ["ms.Stream"] = ms.stream(), ["ms.Group"] = ms.world(),
    ["ms.Pipeline"] = ms.pipeline { chunks = ms.nn.Linear(2, 2), microbatches = 1 },
    ["ms.Schedule"] = ms.schedule "gpipe",
    ["ms.DDP"] = ddp, ["ms.fsdp"] = ms.fsdp, ["ms.FSDP"] = fsdp,
    ["ms.Bucket"] = bucket, ["ms.State"] = ms.hooks.state "of_api_spec",
    ["ms.hooks"] = ms.hooks, ["ms.Future"] = ms.all {},
    ["ms.EMA"] = ms.optim.ema(layer),
    ["ms.Averager"] = ms.optim.averager { period = 2 },
    ["ms.Codec"] = ms.codec "int8", ["ms.Metric"] = ms.metric "of_api_spec",
    ["ms.Report"] = ms.report { run = folder }, ["ms.Dataset"] = set,
    ["ms.Loader"] = set:loader { batch = 1, length = 4 },
    ["ms.JsonLines"] = records, ["ms.JsonLoader"] = records:loader { batch = 1, make = type },
  }
  -- Descriptions of tables that users write: the library has no such tables.
  local descriptions = {
    ["ms.TrainOptions"] = true, ["ms.OptimizerOptions"] = true, ["ms.Kind"] = true,
    ["ms.DDPOptions"] = true, ["ms.FSDPOptions"] = true, ["ms.ApplyOptions"] = true,
    ["ms.Stage"] = true, ["ms.EvalOptions"] = true,
    ["ms.OverlapPlanner"] = true, ["ms.BucketsPlanner"] = true,
    ["ms.PrefetchPlanner"] = true, ["ms.SchedulePlanner"] = true,
    ["ms.GenerateOptions"] = true,
    ["ms.JsonLoaderOptions"] = true, ["ms.PipelineOptions"] = true,
    ["ms.CustomOptions"] = true, ["ms.PartState"] = true, ["ms.Pieces"] = true,
    ["ms.WholeKind"] = true, ["ms.MatrixOptions"] = true,
  }

  for class, fields in pairs(classes) do
    if #fields > 0 and not descriptions[class] then
      it("name what " .. class .. " has", function()
        local object = assert(objects[class], "this spec has no object of class " .. class)
        for _, field in ipairs(fields) do
          local ok, value = pcall(function() return object[field] end)
          local callable = type(value) == "function" or type(value) == "table"
            and (getmetatable(value) or {}).__call ~= nil
          assert.is_true(ok and callable,
            ("%s.%s is annotated but does not exist"):format(class, field))
        end
      end)
    end
  end

  -- Methods that the library has in Lua are there before a script uses the part that brings them.
  for class, make in pairs {
    ["ms.Tensor"] = "ms.ones { 1 }", ["ms.Parameter"] = "ms.ones { 1 }",
    ["ms.Group"] = 'require "moonshard.core".world()',
    ["ms.Stream"] = 'require "moonshard.core".stream "own"',
  } do
    it("name what " .. class .. " has in a script that uses nothing else", function()
      local lines = { 'local ms = require "moonshard"\nlocal object = ' .. make }
      for _, field in ipairs(classes[class]) do
        lines[#lines + 1] = ("assert(object.%s, %q)"):format(field, field)
      end
      lines[#lines + 1] = "assert(not pcall(function() return object.nme end))"
      assert(core.file_write(folder .. "/first.lua", table.concat(lines, "\n")))
      command.succeed(folder, "run first.lua")
    end)
  end

  -- What exists, under the names of the classes of the annotations: the tables of functions
  -- themselves.
  local function methods_of(object)
    local index = debug.getmetatable(object).__index
    return type(index) == "table" and index or debug.getmetatable(object)
  end
  local function upvalue(f, wanted)
    for i = 1, math.huge do
      local name, value = debug.getupvalue(f, i)
      assert(name, "no upvalue " .. wanted)
      if name == wanted then return value end
    end
  end
  local tables = {
    ms = ms, ["ms.nn"] = ms.nn, ["ms.optim"] = ms.optim, ["ms.hooks"] = ms.hooks,
    ["ms.data"] = ms.data,
    ["ms.checkpoint"] = ms.checkpoint, ["ms.safetensors"] = ms.safetensors, ["ms.trace"] = ms.trace,
    ["ms.scripts"] = ms.scripts, ["ms.Tensor"] = core.tensor_methods,
    ["ms.Module"] = require "moonshard.nn.module".base,
    ["ms.DDP"] = upvalue(debug.getmetatable(ddp).__index, "DDP"),
    ["ms.fsdp"] = ms.fsdp,
    ["ms.FSDP"] = upvalue(debug.getmetatable(fsdp).__index, "FSDP"),
  }
  for _, name in ipairs {
    "Optimizer", "Scaler", "Averager", "EMA",
    "Stream", "Group", "Bucket", "State", "Future", "Codec",
    "Metric", "Report", "Dataset", "Loader",
  } do
    tables["ms." .. name] = methods_of(objects["ms." .. name])
  end

  local function fields_of(class)
    local by_name = {}
    for _, field in ipairs(all[class].fields) do by_name[field.name] = field end
    return by_name
  end

  for class, methods in pairs(tables) do
    it("tell of all that " .. class .. " has", function()
      local known = fields_of(class)
      -- Parameters are tensors, and ddp models modules.
      local more = ({ ["ms.Tensor"] = "ms.Parameter", ["ms.DDP"] = "ms.Module",
        ["ms.FSDP"] = "ms.Module" })[class]
      for name, field in pairs(more and fields_of(more) or {}) do known[name] = field end
      for name in pairs(methods) do
        -- In-place forms are documented together.
        local told = known[name] or class == "ms.Tensor" and known[name:match "^(.*)_$"]
        assert.is_truthy(name:find "^_" or told,
          ("%s.%s is not in the annotations"):format(class, name))
      end
    end)
  end

  local folder_of_tables = {
    "nn", "optim", "hooks", "data", "checkpoint", "safetensors", "trace", "scripts", "version",
  }
  it("name the parts of ms", function()
    local known = fields_of "ms"
    for _, name in ipairs(folder_of_tables) do
      assert.is_truthy(known[name] and ms[name] ~= nil, name)
    end
    for name in pairs(known) do assert.is_true(ms[name] ~= nil, name) end
  end)

  -- Each function with a table of options, as something that takes these options.
  local x, planes = ms.zeros { 2, 2 }, ms.zeros { 1, 1, 2, 2 }
  local function on(class, method, ...)
    local before = { ... }
    return function(options)
      local arguments = { objects[class], table.unpack(before) }
      arguments[#arguments + 1] = options
      return objects[class][method](table.unpack(arguments))
    end
  end
  local function of(t, name, ...)
    local before = { ... }
    return function(options)
      local arguments = { table.unpack(before) }
      arguments[#arguments + 1] = options
      return t[name](table.unpack(arguments))
    end
  end
  local function nothing() end
  local takes = {
    ["ms.Codec.encode"] = on("ms.Codec", "encode", x),
    ["ms.DDP.join"] = function(o) ddp:join(o, nothing) end,
    ["ms.Group.send"] = on("ms.Group", "send", x, 0),
    ["ms.Group.recv"] = on("ms.Group", "recv", x, 0),
    ["ms.FSDP.join"] = function(o) fsdp:join(o, nothing) end,
    ["ms.FSDP.summon"] = function(o) fsdp:summon(o, nothing) end,
    ["ms.FSDP.set_reshard"] = function(o) fsdp:set_reshard(o) end,
    ["ms.FSDP.state"] = on("ms.FSDP", "state"),
    ["ms.FSDP.load_state"] = on("ms.FSDP", "load_state", {}),
    ["ms.FSDP.save"] = on("ms.FSDP", "save", folder .. "/m.safetensors"),
    ["ms.FSDP.load"] = on("ms.FSDP", "load", folder),
    ["ms.Dataset.loader"] = on("ms.Dataset", "loader"),
    ["ms.JsonLines.loader"] = on("ms.JsonLines", "loader"),
    ["ms.LanguageModel.generate"] = on("ms.LanguageModel", "generate",
      ms.zeros { 1, 2, dtype = "i64" }),
    ["ms.Module.add_buffer"] = on("ms.Module", "add_buffer", "b", x),
    ["ms.Module.load"] = on("ms.Module", "load", folder),
    ["ms.Module.load_state"] = on("ms.Module", "load_state", layer:state()),
    ["ms.Module.save"] = on("ms.Module", "save", folder),
    ["ms.Module.state"] = on("ms.Module", "state"),
    ["ms.Optimizer.state"] = on("ms.Optimizer", "state"),
    ["ms.Module.load_adapters"] = on("ms.Module", "load_adapters", "."),
    ["ms.EMA.state"] = on("ms.EMA", "state"), ["ms.optim.ema"] = of(ms.optim, "ema", layer),
    ["ms.Optimizer.step"] = on("ms.Optimizer", "step"),
    ["ms.Optimizer.step_param"] = on("ms.Optimizer", "step_param", layer.weight, x),
    ["ms.Tensor.attention"] = function(o) x:attention(x, x, o) end,
    ["ms.Tensor.backward"] = function(o) x:backward(o) end,
    ["ms.Tensor.cross_entropy"] = function(o) x:cross_entropy(x, o) end,
    ["ms.Tensor.linear_cross_entropy"] = function(o) x:linear_cross_entropy(x, x, o) end,
    ["ms.Tensor.conv2d"] = function(o) planes:conv2d(planes, nil, o) end,
    ["ms.Tensor.max_pool2d"] = function(o) planes:max_pool2d(1, o) end,
    ["ms.Tensor.avg_pool2d"] = function(o) planes:avg_pool2d(1, o) end,
    ["ms.Tensor.rotary"] = function(o) x:view(1, 1, 2, 2):rotary(0, 1e4, o) end,
    ["ms.codec"] = of(ms, "codec", "int8"),
    ["ms.stream"] = of(ms, "stream", "of_api_spec"), ["ms.custom"] = of(ms, "custom"),
    ["ms.autocast"] = of(ms, "autocast", "fp8", nothing),
    ["ms.ddp"] = of(ms, "ddp", layer),
    ["ms.data.mnist"] = of(ms.data, "mnist", folder),
    ["ms.nn.pretrained"] = of(ms.nn, "pretrained", folder),
    ["ms.nn.lora"] = of(ms.nn, "lora", ms.nn.Linear(2, 2)),
    ["ms.nn.Linear"] = of(ms.nn, "Linear", 2, 2), ["ms.nn.LayerNorm"] = of(ms.nn, "LayerNorm", 2),
    ["ms.nn.RMSNorm"] = of(ms.nn, "RMSNorm", 2), ["ms.nn.MLP"] = of(ms.nn, "MLP", 2, 2),
    ["ms.nn.Conv2d"] = of(ms.nn, "Conv2d", 2, 2, 1),
    ["ms.nn.MaxPool2d"] = of(ms.nn, "MaxPool2d", 2),
    ["ms.nn.AvgPool2d"] = of(ms.nn, "AvgPool2d", 2),
    ["ms.scripts.apply"] = of(ms.scripts, "apply", {}, layer, nothing),
    ["ms.optim.in_backward"] = of(ms.optim, "in_backward", ms.optim.sgd, layer:parameters()),
  }

  -- Options that are required besides the unknown one.
  local function with(f, name, value)
    return function(o)
      o[name] = value
      f(o)
    end
  end
  takes["ms.nn.alone"] = with(of(ms.nn, "alone", ms.nn.Linear(2, 2)), "merge", "mean")
  takes["ms.pipeline"] = with(with(function(o) ms.pipeline(o) end, "microbatches", 1), "chunks",
    ms.nn.Linear(2, 2))
  takes["ms.Schedule.placement"] = function(o) ms.schedule("gpipe"):placement(o) end
  takes["ms.nn.owned"] = of(ms.nn, "owned", ms.nn.Linear(2, 2), ms.world())
  takes["ms.nn.split"] = function(o) ms.nn.split(ms.nn.Linear(2, 2).weight, ms.world(), o) end
  takes["ms.nn.Dropout"] = of(ms.nn, "Dropout", 0.1)
  takes["ms.Tensor.dropout"] = function(o) ms.ones({ 2 }):dropout(0.1, o) end
  takes["ms.hooks.top_k"] = with(of(ms.hooks, "top_k"), "fraction", 0.5)
  takes["ms.hooks.post_local_sgd"] = with(of(ms.hooks, "post_local_sgd"), "start_step", 1)
  takes["ms.hooks.clip"] = with(with(of(ms.hooks, "clip"), "scope", "bucket"), "max_norm", 1)
  takes["ms.tokenizer.load"] = function(o) ms.tokenizer.load("x", o) end
  for _, name in ipairs { "encode", "decode" } do
    takes["ms.Tokenizer." .. name] = function(o) tokenizer[name](tokenizer, "", o) end
  end
  takes["ms.Tokenizer.decoder"] = function(o) tokenizer:decoder(o) end
  takes["ms.chat.template"] = of(ms.chat, "template", "")
  takes["ms.chat.of"] = of(ms.chat, "of", ".")
  takes["ms.ChatTemplate.render"] = function(o) assert(ms.chat.template ""):render({}, o) end
  takes["ms.steps"] = function(o) ms.steps(1, 0, o) end
  takes["ms.full"] = of(ms, "full", 1)
  takes["ms.nn.GroupNorm"] = of(ms.nn, "GroupNorm", 1, 2)
  takes["ms.nn.BatchNorm"] = of(ms.nn, "BatchNorm", 1)
  takes["ms.fsdp"] = function(o) ms.fsdp(ms.nn.Linear(2, 2), o) end
  takes["ms.scripts.matrices"] = of(ms.scripts, "matrices", { model = ms.nn.Linear(2, 2) })
  takes["ms.randint"] = with(of(ms, "randint"), "high", 2)

  -- The options that a function lists in its error about an unknown option.
  local function accepted(f)
    local ok, message = pcall(f, { zzqqxxzzqqxx = 1 })
    assert.is_false(ok)
    local list = message:match "'zzqqxxzzqqxx'; it has (.*)$"
      or message:match "'zzqqxxzzqqxx': known are (.*)$"
    assert.is_truthy(list, message)
    local names = {}
    for name in list:gmatch "[%w_]+" do names[name] = true end
    return names
  end

  local function compare(where, known, fields, open)
    local documented = {}
    for _, field in ipairs(fields) do
      documented[field.name] = true
      assert.is_true(known[field.name] == true,
        ("%s does not take %s, which the annotations tell of"):format(where, field.name))
    end
    for name in pairs(known) do
      assert.is_true(
        documented[name] or open ~= nil and open:find("%f[%w_]" .. name .. "%f[^%w_]") ~= nil,
        ("the annotations do not tell that %s takes %s"):format(where, name))
    end
  end

  for class, description in pairs(all) do
    for _, method in ipairs(description.functions) do
      local last = method.parameters[#method.parameters]
      if last and last.name == "f" then last = method.parameters[#method.parameters - 1] end
      local fields = last and last.type and annotations.fields(last.type, all) or {}
      local is_table = last
        and (last.type:match "^{" or last.type:match "Options$" or last.type:match "Shape$"
          or last.type:match "Stage$" or last.type:match "Scaling$" or last.type:match "Planner$"
          or last.type:match "Files$")
      if is_table and #fields > 0 and not last.type:match "^{ %[" then
        local where = class .. "." .. method.name
        it("tell of the options that " .. where .. " takes", function()
          local f = takes[where]
          local optimizer = last.type == "ms.OptimizerOptions"
          if not f and optimizer then f = of(ms.optim, method.name, layer) end
          if not f and tables[class] then
            f = function(o) return tables[class][method.name](o) end
          end
          assert.is_truthy(f, "this spec has no call of " .. where)
          -- The hyper-parameters of a kind are in its comment.
          local open = optimizer
            and (method.name == "in_backward" and kinds.sgd or kinds[method.name]) or nil
          local base = ({
            ["ms.RandomShape"] = "ms.Shape", ["ms.DecoderOptions"] = "ms.ModelOptions",
          })[last.type]
          if base then table.move(all[base].fields, 1, #all[base].fields, #fields + 1, fields) end
          local known = accepted(f)
          -- Models share one table of options; a field's comment says if only one model has it.
          if last.type == "ms.ModelOptions" then
            for _, other in ipairs { "gpt2", "llama" } do
              for name in pairs(accepted(ms.nn[other])) do known[name] = true end
            end
          end
          compare(where, known, fields, open)
        end)
      end
    end
  end

  -- Scripts may require them: meta.lua says so.
  it("name parts that are modules of the same name", function()
    for _, name in ipairs {
      "nn", "optim", "hooks", "data", "checkpoint", "safetensors", "trace", "scripts", "tokenizer",
      "chat",
    } do
      assert.equal(ms[name], require("moonshard." .. name), name)
    end
    local links = 0
    for _, file in ipairs(core.list(command.source .. "/lua/moonshard/hooks")) do
      local name = file:match "^(.*)%.lua$"
      if name and name ~= "init" then
        assert.equal("function", type(require("moonshard.hooks." .. name)), name)
        links = links + 1
      end
    end
    assert.is_true(links > 10)
  end)

  it("tell of the options inside of options", function()
    compare("precision", accepted(function(o) ms.ddp(layer, { precision = o }) end),
      all["ms.Precision"].fields)
    local own, of_unit = ms.nn.Linear(2, 2), {}
    for _, class in ipairs { "ms.UnitPrecision", "ms.Precision" } do
      table.move(all[class].fields, 1, #all[class].fields, #of_unit + 1, of_unit)
    end
    compare("precision of a unit",
      accepted(function(o) ms.fsdp(own, { precision = function() return o end }) end), of_unit)
    local more = { table.unpack(all["ms.ShardedPrecision"].fields) }
    table.move(of_unit, 1, #of_unit, #more + 1, more)
    compare("fsdp's precision", accepted(function(o) ms.fsdp(own, { precision = o }) end),
      more)
  end)

  it("are found at all", function()
    assert.is_true(#classes["ms.Tensor"] > 100)
    assert.is_true(#classes.ms > 25)
  end)
end)
