-- optimizer= on recipes, and files of hook=, gather=, optimizer= and local= that give several
-- pieces of a method: what each does, and what is refused.
local command = require "command"
local folder
before_each(function() folder = command.folder() end)
after_each(function() command.remove(folder) end)

-- Steps on gradients of 1 from weights of 0, and prints what came of it.
local LOOP <const> = [[
local ms = require "moonshard"
local cfg = ms.config(ms.scripts.options { steps = 4, more = "", lr = 1.0, join = false })
local model = ms.nn.Linear(2, 2, { bias = false })
ms.no_grad(function() model.weight:zero_() end)
local net, optimizer = ms.scripts.apply(cfg, model, function(net)
  return ms.optim.sgd(net, { lr = cfg.lr, schedule = ms.optim.linear { steps = 8, warmup = 0 } })
end)
for step in ms.steps(cfg.steps) do
  local function pass()
    net(ms.ones { 1, 2 }):sum():backward()
    optimizer:step()
  end
  -- In join, rank 1 has inputs for two steps.
  if not cfg.join then pass()
  else net:join({}, function() if ms.rank() == 0 or step < 2 then pass() end end) end
  local method = require "moonshard.base.ownership".methods[net]
  if method then method.after_step(step) end
  if step % 3 == 2 and ms.rank() == 0 and io.open("next.lua") then
    os.rename("next.lua", "watched.lua")
    local core = require "moonshard.core"
    local from = core.clock_ms()                            -- files are looked at every 20 ms
    while core.clock_ms() - from < 25 do end
  end
end
local whole = net:state().weight
if ms.rank() == 0 then
  ms.log("weight %g, %s, %s", whole:sum():item() / 4, optimizer:groups()[1].name or "no name",
    tostring(net))
end
]]

-- Files by name.
local FILES <const> = {
  double = [[return function(bucket, next)
    return next(bucket):and_then(function(mean) return mean:mul_(2) end)
  end]],
  -- SGD with the recipe's lr, times options.by, under its own name.
  own = [[local ms = require "moonshard"
    return function(options)
      local group = options.recipe:groups()[1]
      assert(#options.model:parameters() == #group.params)
      return ms.optim.sgd({ { params = group.params, name = "own" } }, {
        lr = group.lr * (options.by or 3), schedule = not options.flat and group.schedule or nil,
      })
    end]],
  same = [[return function(options)
    options.recipe:groups()[1].lr = 2
    return options.recipe
  end]],
  -- A link that doubles, an optimizer that takes five steps at once, exact gathers that count.
  all = [[local ms = require "moonshard"
    return function(options)
      local made, count = {}, 0
      function made.link(bucket, next)
        return next(bucket):and_then(function(mean) return mean:mul_(2) end)
      end
      function made.optimizer(model, recipe)
        assert(#model:parameters() == 1)
        return ms.optim.sgd({ { params = recipe:groups()[1].params, name = "five" } }, { lr = 5 })
      end
      made.gather = { before_gather = function(shard)
        count = count + 1
        if ms.rank() == 0 and count == 1 then print "gathers" end
        return shard
      end }
      made.shard = { reshard_after_forward = false, layout = "rows" }
      for name in (options.leave or ""):gmatch "%a+" do made[name] = nil end
      return made
    end]],
  alone = [[local ms = require "moonshard"
    return { ["local"] = function(model)
      ms.nn.alone(model, { merge = "mean" })
      return { after_step = function(step)
        if ms.rank() == 0 then print("met", step, #model:parameters()) end
      end }
    end, optimizer = function(model, recipe)
      return ms.optim.sgd({ { params = recipe:groups()[1].params, name = "alone" } }, { lr = 7 })
    end }]],
}

describe("the pieces of a method:", function()
  before_each(function()
    command.write(folder .. "/r.lua", LOOP)
    for name, text in pairs(FILES) do command.write(("%s/%s.lua"):format(folder, name), text) end
  end)
  local function run(arguments)
    return command.succeed(folder, "run r.lua --thread-ranks " .. arguments)
  end
  local function fails(arguments, ...)
    local code, out, err = command.run(folder, "run r.lua --thread-ranks " .. arguments)
    assert.equal(2, code, out .. err)
    for _, text in ipairs { ... } do assert.truthy(err:find(text, 1, true), err) end
  end
  local function file(name, text) command.write(("%s/%s.lua"):format(folder, name), text) end

  it("optimizer= takes the place of the recipe's optimizer, and has its groups", function()
    -- The schedule falls from 1 to 1/2 in four steps: 1 + 7/8 + 6/8 + 5/8.
    assert.matches("weight %-3.25, no name", run "-n 2")
    for _, more in ipairs { "", "-n 2", "-n 2 shard=full_shard", "-n 2 overlap=in_backward" } do
      assert.matches("weight %-9.75, own", run("optimizer=own " .. more), more)
    end
    assert.matches("weight %-8, own", run "-n 2 optimizer=own.lua optimizer.by=2 optimizer.flat=1")
    -- 1 + 7/8 + (6/8 + 5/8) / 2, three times and twice.
    assert.matches("weight %-7.6875, own", run "-n 2 optimizer=own shard=full_shard join=true")
    assert.matches("weight %-5.125, no name", run "-n 2 optimizer=same shard=full_shard join=true")
    assert.matches("weight %-6.5, own, ddp", run "-n 2 hook=double optimizer=own optimizer.by=1")
    local _, told = run "optimizer=own optimizer.bye=2"
    assert.truthy(told:find("optimizer.bye is given, but 'own.lua' has not read it", 1, true), told)
  end)

  it("every option that takes a file takes all of them", function()
    for _, name in ipairs { "hook", "gather", "optimizer", "local" } do
      if name ~= "local" then
        local out = run(("-n 2 %s=all shard=full_shard"):format(name))
        assert.matches("weight %-40, five, fsdp", out)
        assert.matches("gathers", out)
        -- layout: the user's goes before the file's.
        assert.matches("weight %[1, 2%]", out)
        assert.matches("weight %[2%]", run(("-n 2 %s=all shard=full_shard shard.layout=flat")
          :format(name)))
      end
      if name ~= "gather" then
        assert.matches("weight %-40, five, ddp",
          run(("-n 2 %s=all %s.leave=gather,shard"):format(name, name)))
        local out = run(("-n 2 %s=alone"):format(name))
        assert.matches("weight %-28, alone, Linear", out)
        assert.matches("met\t3\t1", out)
      end
    end
    -- A file each.
    assert.matches("weight %-40, five, fsdp",
      run "-n 2 shard=full_shard hook=double gather=int8 optimizer=all \z
        optimizer.leave=link,gather,shard")
  end)

  it("a watched file takes a new link, and keeps its other pieces", function()
    local text = FILES.all:gsub("made.gather.-end }\n", ""):gsub("made.shard[^\n]*", "")
    file("watched", text)
    file("next", (text:gsub("mul_%(2%)", "mul_(3)"):gsub("lr = 5", "lr = 1000")))
    local out = run "-n 2 --watch steps=12 hook=watched"
    local first = tonumber(out:match "in force from step (%d+) on")
    -- At once, or some steps later on a busy machine.
    assert.is_true(first >= 3 and first < 12, out)
    assert.equal(-5 * (2 * first + 3 * (12 - first)), tonumber(out:match "weight (%S+),"))
    assert.matches("five", out)
  end)

  it("a file is found by its name, and a ready-made name comes first", function()
    assert.matches("weight %-6.5", run "-n 2 hook=double")
    file("noop", "return function(bucket) return bucket:buffer():mul_(100) end")
    assert.matches("weight %-3.25", run "-n 2 hook=noop")
    assert.matches("weight %-325", run "-n 2 hook=noop.lua")
    assert.matches("weight %-3.2", run "-n 2 gather=int8 shard=full_shard")
    assert.matches("weight %-3.2", run "-n 2 hook=int8_all_to_all")
    fails("hook=doubel", "there is no hook 'doubel'", "did you mean 'double.lua'?")
    fails("gather=int9 shard=full_shard", "there is no gather 'int9': did you mean \z
      'recipes/gathers/int8.lua'?")
    fails("optimizer=onw", "there is no optimizer 'onw': did you mean 'own.lua'?")
  end)

  it("says what does not go together", function()
    fails("hook=double optimizer=all optimizer.leave=gather,shard",
      "options hook=double and optimizer=all both give the piece link: leave one of the two out")
    fails("hook=all", "option hook=all: its piece gather is for a sharded model: give shard=")
    fails("hook=all hook.leave=gather", "option hook=all: its piece shard is for a sharded model")
    fails("hook=alone shard=full_shard", "option hook=alone: each rank trains its own weights, so \z
      that shard=full_shard has nothing to do")
    fails("optimizer=alone hook=bf16_compress", "option optimizer=alone: each rank trains its own",
      "hook=bf16_compress has nothing to do")
    fails("local=alone overlap=deferred", "overlap=deferred has nothing to do")
    file("both", [[return { link = function(bucket, next) return next(bucket) end,
      ["local"] = function() end }]])
    fails("hook=both", "option hook=both: each rank trains its own weights, so that the piece \z
      link of hook=both has nothing to do")
    fails("hook=all hook.leave=gather hook.shard=1 shard=full_shard \z
      shard.layout=rws", "layout = 'rws'")
  end)

  it("says what is wrong with a piece", function()
    file("p", "return { link = function() end, optimiser = function() end }")
    fails("hook=p", "a table of pieces has no 'optimiser': did you mean 'optimizer'?")
    fails("hook=p hook.x=1", "takes no options: it returns pieces of a method")
    file("p", "return { link = 5 }")
    fails("hook=p", "'p.lua': link is a number, and a link is expected")
    file("p", "return { optimizer = {} }")
    fails("optimizer=p", "'p.lua': optimizer is a table, and a function is expected")
    file("p", "return { optimizer = function() return 5 end }")
    fails("hook=p", "option hook=p: it gives a number, and an ms.Optimizer is expected")
    file("p", "return { optimizer = function() error 'it is broken' end }")
    fails("hook=p", "option hook=p: ", "it is broken")
    file("p", "return { ['local'] = function() return {} end }")
    fails("hook=p",
      "option hook=p: its piece local gives a table: a table with after_step(step, optimizer)")
    file("p", "return { gather = { before = function() end } }")
    fails("gather=p shard=full_shard", "before_gather and after_gather are expected")
    file("p", "return { shard = { layuot = 'rows' } }")
    fails("hook=p shard=full_shard", "'layuot', and ms.fsdp has no such option", "'layout'?")
    file("p", "return { shard = { strategy = 'zero2' } }")
    fails("hook=p shard=full_shard", "its piece shard has strategy, which is given by shard=")
    for text, what in pairs {
      ["return 5"] = "returns a number: a function(options) that gives an ms.Optimizer",
      [""] = "returns a nil: a function(options) that gives an ms.Optimizer",
      ["return {}"] = "returns a table: a function(options) that gives an ms.Optimizer",
      ["return function() return 5 end"] = "it gives a number, and an ms.Optimizer is expected",
    } do
      file("p", text)
      fails("optimizer=p", "option optimizer=p", what)
    end
    fails("optimizer=lion", "returns a function of two arguments: a function(options) that gives")
    fails("hook=diloco", "model is missing; a method with which each rank trains its own weights \z
      is for local=")
    fails("optimizer.by=3", "optimizer.by is given, but no optimizer=")
  end)

  it("resolve gives a piece that is alone, and refuses others", function()
    file("r", [[
      local ms = require "moonshard"
      local cfg = ms.config(ms.scripts.options { name = "hook" })
      print(type(ms.scripts.resolve(cfg, cfg.name)))
    ]])
    assert.matches("function", run "hook=double")
    assert.matches("function", run "name=optimizer optimizer=own")
    assert.matches("table", run "name=gather gather=int8")
    fails("hook=all", "it gives the piece optimizer, too: ms.scripts.apply uses all pieces")
  end)
end)

describe("1-bit Adam", function()
  it("works as hook=onebit_adam, and with shard= says what it needs", function()
    command.write(folder .. "/text", command.read(command.source .. "/README.md"):sub(1, 4000))
    local small = ("run '%s/recipes/gpt_bytes.lua' -n 2 --thread-ranks data=text length=16 \z
      batch=4 dtype=f32 every.eval=0 every.sample=0 every.save=0 model.layers=1 model.width=32 \z
      model.heads=2 steps=12 "):format(command.source)
    command.succeed(folder, small .. "run=plain")
    command.succeed(folder, small .. "run=own hook=onebit_adam hook.warmup=8")
    local plain, own = command.metrics(folder .. "/plain"), command.metrics(folder .. "/own")
    -- The recipe's AdamW has other betas and decays weights, so losses are alike, not the same.
    assert.equal(plain[1].loss, own[1].loss)
    assert.equal(plain[12].lr, own[12].lr)
    assert.is_true(own[12].loss < 1.1 * plain[12].loss and own[12].loss ~= plain[12].loss)
    local code, _, err = command.run(folder, small .. "shard=full_shard hook=onebit_adam")
    assert.equal(2, code, err)
    assert.matches("this kind of optimizer needs whole", err)
  end)
end)
