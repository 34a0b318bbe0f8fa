-- Metrics: one value a step, read some steps later.
local ms = require "moonshard"
local metric = require "moonshard.train.metric"
local support = require "support"
local near, fails = support.near, support.fails

describe("a metric", function()
  it("combines what a step pushes", function()
    local ops = { sum = 9, avg = 3, min = 2, max = 4, prod = 24 }
    for _ in ms.steps(1) do
      for op in ms.sorted_pairs(ops) do
        for _, form in ipairs { "number", "tensor", "mixed" } do
          local m = ms.metric(op .. "." .. form, op)
          for i = 2, 4 do
            m:push((form == "tensor" or form == "mixed" and i == 3) and ms.tensor(i) or i)
          end
        end
      end
    end
    for op, expected in pairs(ops) do
      for _, form in ipairs { "number", "tensor", "mixed" } do
        near(expected, metric.values(0)[op .. "." .. form])
      end
    end
    assert.is_true(ms.metric "avg.number" == ms.metric("avg.number", "avg"))
  end)

  it("keeps a nan, whatever is pushed before and after it, and in each form", function()
    local names = {}
    for _ in ms.steps(1) do
      for _, op in ipairs { "sum", "avg", "min", "max", "prod" } do
        for position = 1, 3 do
          for forms = 0, 7 do
            local name = ("nan.%s.%d.%d"):format(op, position, forms)
            names[#names + 1] = name
            for i = 1, 3 do
              local value = i == position and 0 / 0 or i + 0.
              ms.metric(name, op):push(forms >> (i - 1) & 1 == 1 and ms.tensor(value) or value)
            end
          end
        end
      end
    end
    local values = metric.values(0)
    for _, name in ipairs(names) do assert.is_true(values[name] ~= values[name], name) end
  end)

  it("is read by lag, nil where there is no value", function()
    local m, seen = ms.metric "lagged", {}
    for step in ms.steps(6) do
      if step ~= 2 then m:push(ms.full(step * 10, {})) end
      seen[step] = m:lag(2)
      if step == 5 then
        near(40, m:lag(1))
        near(10, m:lag(4))
        assert.is_nil(m:lag(3))
        assert.is_nil(m:lag(6))
      end
    end
    assert.is_nil(seen[0])
    assert.is_nil(seen[1])
    near({ 0, 10 }, { seen[2], seen[3] })
    assert.is_nil(seen[4])
    near(30, seen[5])
  end)

  it("keeps what is pushed beyond the step, and in any shape and dtype of one element", function()
    local m = ms.metric "shapes"
    for step in ms.steps(3) do
      m:push(({ ms.ones { 1, 1 }, ms.ones({ 1, dtype = "bf16" }), ms.tensor { 5 } })[step + 1])
    end
    near({ 1, 1, 5 }, { metric.values(0).shapes, metric.values(1).shapes, metric.values(2).shapes })
    local x = ms.ones { 1, requires_grad = true }
    for _ in ms.steps(1) do
      local loss = (x * 3):sum()
      m:push(loss)
      loss:backward()                            -- no graph is held
    end
    near(3, metric.values(0).shapes)
    -- In a recomputed function what is pushed survives too.
    for _ in ms.steps(1) do
      ms.recompute(function(t) m:push(t * 7) return t end, x)
    end
    near(7, metric.values(0).shapes)
  end)

  it("explains wrong use", function()
    local m = ms.metric "wrong"
    fails(function() m:push(ms.ones { 2 }) end, "wrong", "one element", "[2] f32")
    fails(function() m:push "5" end, "wrong", "string")
    fails(function() m:lag(0) end, "1 or more")
    fails(function() m:lag(1.5) end, "1 or more")
    fails(function() m:lag(1000) end, "at most")
    fails(function() ms.metric("wrong", "sum") end, "wrong", "avg", "sum")
    fails(function() ms.metric("new", "median") end, "median", "avg")
    fails(function() ms.metric(5) end, "name")
  end)
end)
