-- The annotations that editors read (lua/moonshard/meta.lua) name only what exists, under its name.
local ms = require "moonshard"
local core = require "moonshard.core"

-- class -> list of fields, as meta.lua declares them; functions only.
local function declared()
  local file = assert(io.open((os.getenv "MOONSHARD_SOURCE" or ".") .. "/lua/moonshard/meta.lua"))
  local classes, class = {}, nil
  for line in file:lines() do
    local name = line:match "^%-%-%-@class%s+([%w_.]+)"
    if name then
      class = name
      classes[class] = classes[class] or {}
    end
    local field, kind = line:match "^%-%-%-@field%s+([%w_]+)%??%s+(%S+)"
    if field and class and kind:match "^fun" then table.insert(classes[class], field) end
    if line == "" then class = nil end
  end
  file:close()
  return classes
end

describe("the annotations", function()
  local classes = declared()
  local folder = os.tmpname()
  os.remove(folder)
  assert(core.make_directory(folder))
  assert(core.file_write(folder .. "/text", ("some text to read "):rep(20)))
  local set = assert(ms.data.bytes(folder .. "/text"))
  local layer = ms.nn.Linear(2, 2)
  local bucket
  local ddp = ms.ddp(ms.nn.Linear(2, 2), { comm_hook = function(b, next)
    bucket = b
    return next(b)
  end })
  ddp(ms.ones { 2 }):sum():backward()
  local objects = {
    ms = ms, ["ms.nn"] = ms.nn, ["ms.optim"] = ms.optim, ["ms.data"] = ms.data, ["ms.checkpoint"] = ms.checkpoint,
    ["ms.safetensors"] = ms.safetensors, ["ms.trace"] = ms.trace, ["ms.Tensor"] = ms.zeros { 1 }, ["ms.Parameter"] = layer.weight,
    ["ms.Module"] = layer, ["ms.LanguageModel"] = ms.nn.gpt2 { vocab = 4, context = 4, layers = 1, width = 4, heads = 1 },
    ["ms.Optimizer"] = ms.optim.sgd(layer), ["ms.Scaler"] = ms.optim.scaler(), ["ms.Stream"] = ms.stream(), ["ms.Group"] = ms.world(),
    ["ms.DDP"] = ddp, ["ms.Bucket"] = bucket, ["ms.State"] = ms.hooks.state "of_api_spec", ["ms.hooks"] = ms.hooks, ["ms.Future"] = ms.all {},
    ["ms.Averager"] = ms.optim.averager { period = 2 }, ["ms.Codec"] = ms.codec "int8", ["ms.Metric"] = ms.metric "of_api_spec",
    ["ms.Report"] = ms.report { run = folder }, ["ms.Dataset"] = set, ["ms.Loader"] = set:loader { batch = 1, length = 4 },
  }
  -- Descriptions of tables that users write: nothing of them exists by itself.
  local descriptions = { ["ms.TrainOptions"] = true, ["ms.OptimizerOptions"] = true, ["ms.Kind"] = true, ["ms.DDPOptions"] = true, ["ms.Stage"] = true }

  for class, fields in pairs(classes) do
    if #fields > 0 and not descriptions[class] then
      it("name what " .. class .. " has", function()
        local object = assert(objects[class], "this spec has no object of class " .. class)
        for _, field in ipairs(fields) do
          local ok, value = pcall(function() return object[field] end)
          local callable = type(value) == "function" or type(value) == "table" and (getmetatable(value) or {}).__call ~= nil
          assert.is_true(ok and callable, ("%s.%s is annotated but does not exist"):format(class, field))
        end
      end)
    end
  end

  it("are found at all", function()
    assert.is_true(#classes["ms.Tensor"] > 100)
    assert.is_true(#classes.ms > 25)
  end)
end)
