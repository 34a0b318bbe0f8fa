-- Names that do not exist: reading one raises where it is and suggests the nearest.
local ms = require "moonshard"
local core = require "moonshard.core"

-- What f raises.
local function failure(f)
  local ok, message = pcall(f)
  assert.is_false(ok)
  return message
end

local function layer_of() return ms.nn.Linear(2, 2) end

describe("an unknown name", function()
  local layer = layer_of()
  local optimizer = ms.optim.sgd(layer)
  local places = {
    ms = ms, ["ms.nn"] = ms.nn, ["ms.hooks"] = ms.hooks, ["ms.optim"] = ms.optim,
    ["ms.data"] = ms.data,
    ["ms.checkpoint"] = ms.checkpoint, ["ms.safetensors"] = ms.safetensors, ["ms.trace"] = ms.trace,
    ["ms.scripts"] = ms.scripts, ["a tensor"] = ms.zeros { 2 }, ["an optimizer"] = optimizer,
    ["ms.Group"] = ms.world(),
    ["ms.Stream"] = ms.stream(), ["ms.Codec"] = ms.codec "int8",
  }

  it("is answered with the nearest", function()
    for place, misspelled in pairs {
      ms = { "zeroes", "zeros" }, ["ms.nn"] = { "Linaer", "Linear" },
      ["ms.hooks"] = { "topk", "top_k" },
      ["ms.optim"] = { "adamW", "adamw" }, ["ms.data"] = { "byte", "bytes" },
      ["ms.checkpoint"] = { "sve", "save" },
      ["ms.safetensors"] = { "laod", "load" }, ["ms.trace"] = { "strat", "start" },
      ["ms.scripts"] = { "option", "options" },
      ["a tensor"] = { "shpe", "shape" }, ["an optimizer"] = { "setp", "step" },
      ["ms.Group"] = { "allreduce", "all_reduce" },
      ["ms.Stream"] = { "snyc", "sync" }, ["ms.Codec"] = { "encod", "encode" },
    } do
      local message = failure(function() return places[place][misspelled[1]] end)
      local text = ("%s has no '%s': did you mean '%s'?")
        :format(place, misspelled[1], misspelled[2])
      assert.is_truthy(message:find(text, 1, true), message)
      assert.matches("names_spec.lua:%d+: ", message)
    end
    assert.is_truthy(failure(function() return ms.world_sise end):find("'world_size'", 1, true))
    assert.matches("ms has no 'q+'$", failure(function() return ms[("q"):rep(50)] end))
  end)

  it("is nil where tools probe, and names that exist stay what they are", function()
    for _, object in pairs(places) do
      assert.is_nil(object.__pairs)
      assert.is_nil(object[true])
    end
    assert.equal("function", type(ms.zeros { 1 }.add_))
    assert.equal("function", type(optimizer.step))
  end)

  it("among options is answered with the nearest, or with what has these initials", function()
    local function says(name, text)
      local message = failure(function() ms.optim.adamw(layer, { [name] = 1 }) end)
      assert.is_truthy(message:find(("unknown option '%s': did you mean '%s'?"):format(name, text),
        1, true), message)
    end
    says("learning_rate", "lr")
    says("wd", "weight_decay")
    says("weight_deacy", "weight_decay")
    says("Eps", "eps")
    assert.equal("lr", core.nearest("learning_rate", { "lr_decay", "lr", "rate" }))
    assert.is_nil(core.nearest("learning_rate_x", { "lr" }))
  end)
end)

describe("a missing folder", function()
  it("is named as it was given", function()
    for _, folder in ipairs { "no/where", "no/where/", "./no//where" } do
      for name, f in pairs {
        bytes = ms.data.bytes, tokens = ms.data.tokens, mnist = ms.data.mnist,
        pretrained = ms.nn.pretrained,
        checkpoint = ms.checkpoint.load, safetensors = ms.safetensors.load,
        module = function(path) return layer_of():load(path) end,
      } do
        local result, message, code = f(folder)
        assert.is_nil(result)
        assert.is_truthy(message:find(("'%s'"):format(folder), 1, true), name .. ": " .. message)
        assert.equal("not_found", code)
      end
    end
  end)
end)
