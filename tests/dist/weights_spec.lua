-- The loss of a step is the mean over its targets, however they are divided over passes and ranks.
local command = require "command"

describe("passes with different numbers of targets", function()
  for _, ranks in ipairs { "1", "2", "4 --thread-ranks" } do
    it("make one large batch, on " .. ranks, function() command.on_ranks("weights", ranks) end)
  end

  local HEAD = [[
    local ms = require "moonshard"
    local model = ms.nn.Embedding(4, 4)
    local function optimizer() return ms.optim.sgd(model, { lr = 1 }) end
    local function batch(...) return ms.tensor({ 1, 2 }, "i64"), ms.tensor({ ... }, "i64") end
  ]]

  local function run(body, ranks)
    local folder = command.folder()
    command.write(folder .. "/r.lua", HEAD .. body)
    local code, out, err = command.run(folder, "run r.lua" .. (ranks or ""))
    command.remove(folder)
    return code, out, err
  end

  it("and a step without any is told", function()
    local code, _, err = run [[
      ms.train { model = model, optimizer = optimizer(), steps = 3, accumulate = 2, run = "run",
        data = function() return batch(-100, ms.step() == 1 and -100 or 3) end }]]
    assert.equal(4, code, err)
    assert.truthy(err:find("step 1: loss or gradients are inf or nan (no target of the step counts",
      1, true), err)
  end)

  it("need a weight in each pass, or in none", function()
    local code, _, err = run [[
      local n = 0
      ms.train { model = model, optimizer = optimizer(), steps = 3, accumulate = 2, run = "run",
        data = function() return batch(1, 3) end,
        loss = function(m, x, y)
          n = n + 1
          return m(x):cross_entropy(y), nil, n == 1 and 2 or nil
        end }]]
    assert.equal(1, code, err)
    assert.truthy(err:find("gives a weight, its third result, in some passes", 1, true), err)
    code, _, err = run [[
      ms.train { model = model, optimizer = optimizer(), steps = 3, run = "run",
        data = function() return batch(1, 3) end,
        loss = function(m, x, y) return m(x):cross_entropy(y), nil, "many" end }]]
    assert.equal(1, code, err)
    assert.truthy(err:find("the third result of loss: a weight is a finite number", 1, true), err)
  end)

  -- Validation batches with 1 and 2 targets: the mean is over three.
  it("weigh in the loss of an evaluation", function()
    for _, loss in ipairs { "nil",
      "function(m, x, y) return m(x):cross_entropy(y), m(x), y:ne(-100):sum() end" } do
      local code, out, err = run(([[
        local held = { { batch(1, -100) }, { batch(2, 3) } }
        local valid = {}
        function valid.batches()
          local i = 0
          return function() i = i + 1 if held[i] then return table.unpack(held[i]) end end
        end
        local all = (model(held[1][1]):cross_entropy(held[1][2]) +
          2 * model(held[2][1]):cross_entropy(held[2][2])):div(3):item()
        local result = ms.train { model = model, optimizer = ms.optim.sgd(model, { lr = 0.0 }),
          steps = 1, run = "run", valid = valid, eval = { every = 1 },
          data = function() return batch(1, 3) end, loss = %s }
        print(math.abs(result.valid.loss / all - 1) < 1e-6 and "equal" or result.valid.loss / all)
      ]]):format(loss))
      assert.equal(0, code, err)
      assert.truthy(out:find("equal", 1, true), out)
    end
  end)
end)
