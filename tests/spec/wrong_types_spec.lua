-- Every public function gets every wrong type at every argument and every option that the
-- annotations declare. It must raise, and the message must name the argument or the function, at
-- the script's line: never "attempt to index a nil value (local 'x')" in one of our files.
local annotations = require "annotations"
local command = require "command"
local ms = require "moonshard"

local classes, aliases = annotations.read()

-- Not called: functions that start an engine, wait for other processes, or change global settings.
local left_out = { ["ms.init"] = true, ["ms.trace.start"] = true, ["ms.trace.stop"] = true }

-- Any value is a condition, as everywhere in Lua. A function in C that takes text also takes
-- numbers, as in Lua's own library. A tensor is allowed in place of a future. Operators of tensors
-- take the same values as their arithmetic.
local function is_lenient(class, kinds, specimen)
  return kinds.boolean and specimen ~= nil or kinds.string and type(specimen) == "number"
    or kinds["ms.Future"] or class == "ms.Tensor"
end

describe("wrong types", function()
  local folder = command.folder()
  teardown(function() command.remove(folder) end)
  command.write(folder .. "/text", ("some text to read "):rep(20))
  local dataset = assert(ms.data.bytes(folder .. "/text"))
  local report = ms.report { run = folder .. "/run" }
  local states = 0

  local function linear() return ms.nn.Linear(2, 2) end
  -- A new object of each class: an earlier call may have used one up.
  local make = {
    ms = function() return ms end,
    ["ms.Tensor"] = function() return ms.ones { 2, 2 } end,
    ["ms.Parameter"] = function() return linear().weight end,
    ["ms.Module"] = linear,
    ["ms.LanguageModel"] = function()
      return ms.nn.gpt2 { vocab = 4, context = 4, layers = 1, width = 4, heads = 1 }
    end,
    ["ms.Optimizer"] = function() return ms.optim.sgd(linear()) end,
    ["ms.Scaler"] = function() return ms.optim.scaler() end,
    ["ms.Stream"] = ms.stream,
    ["ms.Group"] = ms.world,
    ["ms.DDP"] = function() return ms.ddp(linear()) end,
    ["ms.Future"] = function() return ms.all {} end,
    ["ms.Averager"] = function() return ms.optim.averager { period = 2 } end,
    ["ms.Codec"] = function() return ms.codec "int8" end,
    ["ms.Metric"] = function() return ms.metric "of_wrong_types" end,
    ["ms.Report"] = function() return report end,
    ["ms.Dataset"] = function() return dataset end,
    ["ms.Loader"] = function() return dataset:loader { batch = 1, length = 4 } end,
    ["ms.State"] = function()
      states = states + 1
      return ms.hooks.state("of_wrong_types_" .. states)
    end,
  }
  for _, part in ipairs { "nn", "optim", "data", "checkpoint", "safetensors", "trace", "hooks" } do
    make["ms." .. part] = function() return ms[part] end
  end

  local specimens = {
    boolean = true,
    number = 0.5,
    integer = 3,
    string = "wrong",
    table = {},
    ["function"] = function() end,
    tensor = ms.ones { 2, 2 },
    thread = coroutine.create(function() end),
    ["ms.Module"] = linear(),
    ["ms.Group"] = ms.world(),
    ["ms.Optimizer"] = make["ms.Optimizer"](),
  }
  local right = {
    integer = 1,
    tensor = ms.ones { 2, 2 },
    ["ms.Module"] = linear(),
    string = folder .. "/value",
    boolean = true,
    ["function"] = function() end,
    table = {}, any = 1, number = 0.5, ["ms.Group"] = ms.world(),
  }
  local by_name = { scope = "global" }                      -- arguments that take certain strings
  local order = {
    "integer", "tensor", "ms.Module", "string", "boolean", "function", "table", "any", "number",
    "ms.Group",
  }

  local function value_for(declared)
    if by_name[declared.name] then return by_name[declared.name] end
    local kinds = annotations.kinds(declared.type, classes, aliases)
    for _, kind in ipairs(order) do if kinds[kind] then return right[kind] end end
    for kind in pairs(kinds) do if make[kind] then return make[kind]() end end
  end

  -- Objects are tables too, and ddp models modules; an integer is a number.
  local function is_right(kinds, kind)
    return kinds.any or kinds[kind] or kind == "integer" and kinds.number
      or kind == "ms.Module" and (kinds["ms.DDP"] or kinds["function"])
      or (kind == "ms.Optimizer" or kind == "ms.Module") and kinds.table
  end

  -- Under the thread sanitizer errors leave frames in its account of calls, which ends the process
  -- at some ten thousand.
  local budget = os.getenv "MOONSHARD_SANITIZE" == "thread" and 3000 or math.huge

  local function judge(where, f, arguments, count, words, lenient)
    budget = budget - 1
    if budget < 0 then return end
    local results = table.pack(pcall(f, table.unpack(arguments, 1, count)))
    if results[1] then
      if not lenient then error(where .. " was accepted", 0) end
      return
    end
    local message = tostring(results[2])
    if message:find "lua/moonshard/[%w_/]+%.lua:%d+:" or message:find "attempt to" then
      error(("%s: an error of our own files: %s"):format(where, message), 0)
    end
    local named = message:find "bad argument #%d" ~= nil
    for _, word in ipairs(words) do
      named = named or message:find(word:match "^overlap" or word, 1, true) ~= nil
    end
    if not named and not lenient then error(("%s is not named: %s"):format(where, message), 0) end
  end

  -- f(specimen's name, specimen) for all that a declaration does not allow.
  local function each_wrong(declared, f)
    local kinds = annotations.kinds(declared.type, classes, aliases)
    if not declared.optional and not kinds.any then f("nil", nil, kinds) end
    for kind, value in ms.sorted_pairs(specimens) do
      if not is_right(kinds, kind) then f(kind, value, kinds) end
    end
  end

  local function check_function(class, declared)
    local list, words = declared.parameters, { declared.name }
    local first = list[1] and list[1].type == "self" and 2 or 1
    local function prepared(position)
      local arguments, object = {}, make[class]()
      if first == 2 then arguments[1] = object end
      for i = first, position - 1 do arguments[i] = value_for(list[i]) end
      return arguments, object[declared.name]
    end
    if first == 2 then
      for kind, value in ms.sorted_pairs(specimens) do
        local own = kind == class or kind == "tensor" and class == "ms.Parameter"
          or kind == "tensor" and class == "ms.Tensor"
        if not own then
          judge(("%s.%s on a %s"):format(class, declared.name, kind), make[class]()[declared.name],
            { value }, 1, words, false)
        end
      end
      judge(("%s.%s on nil"):format(class, declared.name), make[class]()[declared.name], {}, 1,
        words, false)
    end
    for position = first, #list do
      local parameter = list[position]
      if parameter.name == "..." then return end
      local where = ("%s.%s, %s"):format(class, declared.name, parameter.name)
      each_wrong(parameter, function(kind, value, kinds)
        local arguments, f = prepared(position)
        arguments[position] = value
        judge(("%s = a %s"):format(where, kind), f, arguments, position,
          { declared.name, parameter.name }, is_lenient(class, kinds, value))
      end)
      local fields = annotations.fields(parameter.type, classes)
      for _, field in ipairs(fields) do
        each_wrong(field, function(kind, value, kinds)
          local arguments, f = prepared(position)
          local options = {}
          for _, other in ipairs(fields) do
            if not other.optional then options[other.name] = value_for(other) end
          end
          options[field.name] = value
          arguments[position] = options
          judge(("%s.%s = a %s"):format(where, field.name, kind), f, arguments, position,
            { declared.name, field.name }, is_lenient(class, kinds, value))
        end)
      end
    end
  end

  it("given to layers and models are errors that name the input", function()
    local nn = ms.nn
    local sizes = { vocab = 4, context = 4, layers = 1, width = 4, heads = 1 }
    local layers = {
      Linear = linear(), Embedding = nn.Embedding(2, 2), LayerNorm = nn.LayerNorm(2),
      RMSNorm = nn.RMSNorm(2), Dropout = nn.Dropout(0.5), ReLU = nn.ReLU(),
      GELU = nn.GELU(), SiLU = nn.SiLU(), MLP = nn.MLP(2, 2), Conv2d = nn.Conv2d(2, 2, 1),
      MaxPool2d = nn.MaxPool2d(2), AvgPool2d = nn.AvgPool2d(2), Flatten = nn.Flatten(),
      Attention = nn.Attention { width = 2, heads = 1 },
      gpt2 = nn.gpt2(sizes), llama = nn.llama(sizes),
    }
    layers["Linear "] = nn.Sequential(linear())
    layers["Linear  "] = ms.ddp(linear())
    for name, layer in ms.sorted_pairs(layers) do
      local words = { name:match "%w+" .. ": " }
      judge(name .. " of nil", layer, {}, 1, words)
      for kind, value in ms.sorted_pairs(specimens) do
        if kind ~= "tensor" then
          judge(("%s of a %s"):format(name, kind), layer, { value }, 1, words)
        end
      end
    end
  end)

  it("inside of lists and tables are errors that name the place", function()
    local cases = {
      { "path[2]", ms.data.bytes, { { "a", true } } },
      { "modules[1]", ms.nn.List, { { 5 } } },
      { "names[1]", ms.safetensors.load, { "x", { {} } } },
      { "params[2]", ms.optim.clip_grad_norm, { { linear().weight, 3 }, 1 } },
      { "values.x", report.add, { report, { x = ms.world() } } },
      { "unknown: 1, a", linear().load_state, { linear(), { [1] = 1, a = 1 } } },
      { "group", ms.optim.averager, { { period = 1, group = true } } },
      { "images", ms.data.mnist, { folder, { images = true, labels = "x" } } },
      { "option bias", ms.nn.Linear, { 1, 1, { bias = 1 } } },
      { "option eps", ms.nn.RMSNorm, { 2, { eps = "x" } } },
      {
        "option only_if", ms.optim.sgd(linear()).step, { ms.optim.sgd(linear()), { only_if = 1 } },
      },
    }
    for _, case in ipairs(cases) do judge(case[1], case[2], case[3], #case[3], { case[1] }) end
  end)

  for class, content in ms.sorted_pairs(classes) do
    if make[class] then
      for _, declared in ipairs(content.functions) do
        if not left_out[class .. "." .. declared.name] then
          it(("of %s.%s are errors that name it"):format(class, declared.name), function()
            check_function(class, declared)
          end)
        end
      end
    end
  end
end)
