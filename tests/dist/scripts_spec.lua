-- hook=, overlap= and buckets= on recipes: ms.scripts.
local command = require "command"
local folder
before_each(function() folder = command.folder() end)
after_each(function() command.remove(folder) end)

-- Multiplies gradients by one half, or by options.by, and prints its options once in a run.
local HALF = [[
return function(options)
  local by = options.by or 0.5
  return function(bucket, next)
    local step = require "moonshard".step()
    if bucket:index() == 0 then io.stdout:write(("by %s at step %d\n"):format(by, step)) end
    return next(bucket):and_then(function(mean) return mean:mul_(by) end)
  end
end
]]

-- Steps on gradients of 1; prints the weight, which shows the hook's factor.
local LOOP = [[
local ms = require "moonshard"
local cfg = ms.config(ms.scripts.options { steps = 4 })
local model = ms.nn.Linear(2, 2, { bias = false })
local net, optimizer = ms.scripts.apply(cfg, model, function(net)
  return ms.optim.sgd(net, { lr = 1 })
end)
ms.no_grad(function() model.weight:zero_() end)
for step in ms.steps(cfg.steps) do
  net(ms.ones { 1, 2 }):sum():backward()
  optimizer:step()
  if step % 3 == 2 and ms.rank() == 0 and io.open("next.lua") then
    os.rename("next.lua", "half.lua")
    local core = require "moonshard.core"
    local from = core.clock_ms()                            -- files are looked at every 20 ms
    while core.clock_ms() - from < 25 do end
  end
end
ms.log("weight %g, %s", model.weight:sum():item() / 4, tostring(net))
]]

describe("a recipe with ms.scripts", function()
  before_each(function()
    command.write(folder .. "/r.lua", LOOP)
    command.write(folder .. "/half.lua", HALF)
  end)
  local function run(arguments) return command.succeed(folder, "run r.lua " .. arguments) end
  local function fails(arguments, ...)
    local code, out, err = command.run(folder, "run r.lua " .. arguments)
    assert.equal(2, code, out .. err)
    for _, text in ipairs { ... } do assert.truthy(err:find(text, 1, true), err) end
  end

  it("keeps the plain model on one rank, and wraps it on several, or for a script", function()
    assert.matches("weight %-4, Linear", run "")
    assert.matches("weight %-4, ddp of", run "-n 2")
    assert.matches("weight %-2, ddp of", run "hook=half.lua")
  end)

  it("takes a link, a function that makes one, and native links with options", function()
    assert.matches("weight %-2, ddp", run "-n 2 hook=half.lua")
    assert.matches("weight %-1, ddp", run "-n 2 --thread-ranks hook=half.lua hook.by=0.25")
    command.write(folder .. "/link.lua", [[return function(b, next)
      return next(b):and_then(function(mean) return mean * 3 end)
    end]])
    command.write(folder .. "/own.lua", "return function(bucket) return bucket:buffer() * 5 end")
    command.write(folder .. "/stage.lua", [[return require "moonshard".hooks.stage {
      name = "s", decode = function(mean) return mean * 2 end,
    }]])
    assert.matches("weight %-12, ddp", run "hook=link.lua")
    assert.matches("weight %-20, ddp", run "hook=own.lua")
    assert.matches("weight %-8, ddp", run "hook=stage.lua")
    assert.matches("weight %-4, ddp", run "-n 2 hook=powersgd hook.rank=2 hook.start_step=1")
    assert.matches("weight %-4, ddp", run "-n 2 hook=top_k hook.fraction=1")
    assert.matches("weight %-4, ddp", run "-n 2 hook=cast hook.dtype=bf16")
  end)

  it("takes policies and bucket plans, ready-made and of one's own", function()
    for _, name in ipairs { "classic", "in_backward", "deferred", "early_where_hidden" } do
      assert.matches("weight %-12, ddp", run("-n 2 --thread-ranks steps=12 overlap=" .. name))
    end
    local where = command.source .. "/recipes/policies/"
    for _, arguments in ipairs {
      "overlap='%searly_with_room.lua' overlap.every=2 overlap.room=0.5",
      "overlap='%slate_for_late.lua' overlap.spare=2 overlap.every=3",
      "buckets='%ssmall_tail.lua' buckets.bytes=8 buckets.tail=4", "buckets=fitted",
      "overlap=deferred buckets=arrival hook=half.lua hook.by=1",
    } do
      local out = run("-n 2 --thread-ranks steps=12 " .. arguments:format(where))
      assert.matches("weight %-12, ddp", out)
      -- The files read their options when they are loaded: a run of one step warns of none.
      local _, told = run("-n 2 --thread-ranks steps=1 " .. arguments:format(where))
      assert.not_matches("has not read it", told)
    end
  end)

  it("lists what there is for a name that there is not", function()
    fails("hook=haf", "there is no hook 'haf'", "did you mean 'half.lua'?",
      "ready-made: adasum, all_reduce", "top_k", "files at hand: half.lua")
    fails("hook=haf.lua", "there is no file 'haf.lua'", "half.lua")
    fails("overlap=in_bakward", "there is no policy 'in_bakward': did you mean 'in_backward'?",
      "classic, deferred", "files at hand: half.lua")
    fails("buckets=fited", "there is no bucket plan 'fited': did you mean 'fitted'?",
      "arrival, fitted")
    -- A file of the same name lies beside, too.
    command.write(folder .. "/powersgd.lua", "return {}")
    fails("hook=powersgdd", "there is no hook 'powersgdd': did you mean 'powersgd'?")
  end)

  it("says what is wrong with a script or its options", function()
    fails("hook.by=2", "hook.by is given, but no hook=")
    fails("hook=top_k", "option hook=top_k: hooks.top_k: fraction is missing")
    fails("hook=powersgd hook.rnk=2", "option hook=powersgd", "'rnk'", "'rank'")
    fails("overlap=classic overlap.every=2", "'classic' is ready-made and takes no options")
    fails("hook=r.lua hook.x=1", "option hook=r.lua")
    command.write(folder .. "/link.lua", "return function(bucket, next) return next(bucket) end")
    fails("hook=link.lua hook.by=2", "the file 'link.lua' failed: takes no options")
    fails("overlap=half.lua", "option overlap=half.lua", "ms.overlap")
    local where = command.source .. "/recipes"
    fails(("buckets='%s/policies/late_for_late.lua'"):format(where), "what ms.buckets gives")
    local _, told = run "-n 2 hook=half.lua hook.bye=2"
    local warning = "hook.bye is given, but 'half.lua' has not read it: did you mean hook.by?"
    assert.truthy(told:find(warning, 1, true), told)
  end)

  it("goes on with the same options when a watched file changes", function()
    command.write(folder .. "/next.lua", (HALF:gsub("mul_%(by%)", "mul_(-by)")))
    local out = run "--watch steps=12 hook=half.lua hook.by=0.25"
    local first = tonumber(out:match "in force from step (%d+) on")
    assert.is_true(first == 3 or first == 4, out)
    assert.equal(-0.25 * first + 0.25 * (12 - first), tonumber(out:match "weight (%S+),"))
  end)
end)

describe("global_batch=", function()
  it("sets the passes of a step, and batch stays what a pass has", function()
    local recipe = ("run '%s/recipes/llama.lua' data='%s/README.md' bytes=true vocab=256 steps=2 \z
      length=16 dtype=f32 model.layers=1 model.width=32 model.heads=2 model.kv_heads=1 \z
      every.eval=0 every.sample=0 every.save=0 batch=4 "):format(command.source, command.source)
    local function losses(options, run)
      command.succeed(folder, recipe .. options .. " run=" .. run)
      local list = {}
      for i, line in ipairs(command.metrics(folder .. "/" .. run)) do list[i] = line.loss end
      return list
    end
    assert.same(losses("accumulate=3", "a"), losses("global_batch=12", "b"))
    for options, message in pairs {
      ["global_batch=10"] = "take a multiple of it", ["global_batch=2"] = "take a multiple of it",
      ["global_batch=8 accumulate=2"] = "global_batch and accumulate are both given",
    } do
      local code, _, err = command.run(folder, recipe .. options)
      assert.equal(2, code, err)
      assert.truthy(err:find(message, 1, true), err)
    end
  end)
end)

-- A new file may fail long after its first step.
describe("a watched script in ms.train", function()
  local RECIPE <const> = [[
local ms = require "moonshard"
local core = require "moonshard.core"
local cfg = ms.config(ms.scripts.options { steps = 14, resume = "never", save = true })
local model, optimizer = ms.scripts.apply(cfg, ms.nn.gpt2 {
  vocab = 256, context = 8, layers = 1, width = 16, heads = 2, dropout = 0.2,
}, function(net) return ms.optim.adamw(net, { lr = 1e-2 }) end)
local file = assert(ms.data.bytes "text")
local result = ms.train {
  model = model, optimizer = optimizer, steps = cfg.steps, run = "out", resume = cfg.resume,
  data = file:loader { batch = 4, length = 8, shuffle = true },
  save = cfg.save and { every = 1000, last = 1 } or nil,
  after_step = function(step)
    if step == 4 and ms.rank() == 0 and io.open "next.lua" then
      os.rename("next.lua", "link.lua")
      local from = core.clock_ms()                          -- files are looked at every 20 ms
      while core.clock_ms() - from < 25 do end
    end
  end,
}
local sum = 0
for _, p in ipairs(model:parameters()) do sum = sum + p:pow(2):sum():item() end
ms.log("weights %.17g", sum)
]]
  local GOOD <const> = "return function(bucket, next) return next(bucket) end"
  local BAD <const> = [[
return function(bucket, next)
  if require "moonshard".step() == 11 then error "this is wrong" end
  return next(bucket)
end
]]

  it("has a checkpoint from before its first step", function()
    command.write(folder .. "/r.lua", RECIPE)
    command.write(folder .. "/text", ("some text to learn, "):rep(50))
    command.write(folder .. "/link.lua", GOOD)
    local whole = command.succeed(folder, "run r.lua -n 2 hook=link.lua save=false")
    command.remove(folder .. "/out")
    command.write(folder .. "/next.lua", BAD)
    local code, out, err = command.run(folder, "run r.lua -n 2 --watch hook=link.lua")
    assert.equal(1, code, out .. err)
    assert.matches("this is wrong", err)
    local from = tonumber(out:match "in force from step (%d+) on")
    assert.truthy(command.read(("%s/out/step-%08d/manifest.json"):format(folder, from)))
    command.write(folder .. "/link.lua", GOOD)
    local resumed = command.succeed(folder, "run r.lua -n 2 hook=link.lua resume=auto")
    assert.matches(("resumed from out/step%%-%08d\n"):format(from), resumed)
    assert.equal(whole:match "weights %S+", resumed:match "weights %S+")
    -- A run that saves nothing does not begin to.
    command.remove(folder .. "/out")
    command.write(folder .. "/next.lua", GOOD .. " -- again")
    out = command.succeed(folder, "run r.lua -n 2 --watch hook=link.lua save=false")
    assert.matches("in force from step", out)
    assert.is_nil(out:find("saved out", 1, true))
  end)
end)

-- Small runs of the shipped recipes; each writes the options of its hook.
describe("every training recipe takes hook=, overlap= and buckets=:", function()
  local text = ("data='%s/README.md' "):format(command.source)
  local small = text .. "length=16 batch=4 dtype=f32 every.eval=0 every.sample=0 every.save=0 "
    .. "run=out model.layers=1 model.width=32 model.heads=2 "
  local recipes = {
    gpt_bytes = small, gpt2 = small .. "bytes=true vocab=256 accumulate=2",
    llama = small .. "bytes=true vocab=256 model.kv_heads=1", mnist = "data=. batch=10 run=out",
    ddp_by_hand = text .. "length=16 batch=4",
  }
  for name, options in pairs(recipes) do
    it(name, function()
      command.write(folder .. "/half.lua", HALF)
      local pixels = ("\1\7"):rep(30 * 28 * 28)
      local sizes, labels = (">I4I4I4"):pack(60, 28, 28), ("\0\1\2"):rep(20)
      command.write(folder .. "/images-idx3-ubyte", "\0\0\8\3" .. sizes .. pixels)
      command.write(folder .. "/labels-idx1-ubyte", "\0\0\8\1" .. (">I4"):pack(60) .. labels)
      local out = command.succeed(folder, ("run '%s/recipes/%s.lua' -n 2 --thread-ranks %s steps=4 "
        .. "hook=half.lua hook.by=0.75 overlap=in_backward buckets=fitted")
        :format(command.source, name, options))
      assert.truthy(out:find("by 0.75 at step 3", 1, true), out)
      assert.truthy(out:find("may step in backward: the chain clips by", 1, true), out)
    end)
  end
end)

it("README's first screen shows a line that works", function()
  local file <close> = assert(io.open(command.source .. "/README.md"))
  local line
  for _ = 1, 30 do line = line or (file:read "l" or ""):match "^    %./moonshard (.*hook=.*)$" end
  assert.equal(
    "run recipes/gpt_bytes.lua -n 2 hook=recipes/hooks/dgc.lua overlap=in_backward --watch", line)
  local out = command.succeed(folder, line:gsub("recipes/", command.source .. "/recipes/")
    .. (" data='%s/recipes/README.md' steps=8 dtype=bf16 length=16 batch=4 model.layers=1 ")
      :format(command.source) .. "model.width=32 model.heads=2 every.sample=0 run=out")
  assert.matches("validation loss [%d.]+ nats per byte", out)
end)

describe("ms.train with steps in backward", function()
  local TRAIN = [[
    local ms = require "moonshard"
    local cfg = ms.config(ms.scripts.options {
      steps = 6, clip = 0.0, dtype = "f32", on_nan = "stop", bad = 100,
    })
    ms.seed(1)
    local model = ms.nn.Linear(4, 4)
    local net, optimizer = ms.scripts.apply(cfg, model, function(net)
      return ms.optim.sgd(net, { lr = 0.1 })
    end)
    local step = -1
    ms.train {
      model = net, optimizer = optimizer, steps = cfg.steps, dtype = cfg.dtype,
      clip = cfg.clip > 0 and cfg.clip or nil,
      on_nan = cfg.on_nan, run = "out", save = { every = 2 },
      loss = function(m, x) return m(x):square():mean() end,
      data = function()
        step = step + 1
        return ms.full(step == cfg.bad and 1 / 0 or 1, { 2, 4 }), ms.zeros { 2 }
      end,
    }
    local sum = 0
    for _, p in ipairs(model:parameters()) do sum = sum + p:abs():sum():item() end
    ms.log("weights %.9g", sum)
  ]]
  local function run(arguments)
    command.write(folder .. "/t.lua", TRAIN)
    os.execute(("rm -rf '%s/out'"):format(folder))
    return command.run(folder, "run t.lua " .. arguments)
  end

  it("gives the weights of the plain loop", function()
    local code, out, err = run "overlap=classic"
    assert.equal(0, code, err)
    for _, policy in ipairs { "in_backward", "deferred", "early_where_hidden" } do
      local _, other, told = run("overlap=" .. policy)
      assert.equal(out:match "weights (%S+)", other:match "weights (%S+)", told)
    end
  end)

  it("refuses what needs all gradients first, and names the policy", function()
    for arguments, what in pairs {
      ["clip=1"] = "clip needs all gradients", ["dtype=f16"] = "dtype f16 (its loss scaler)",
      ["on_nan=skip"] = "on_nan = \"skip\"",
    } do
      local code, _, err = run("overlap=in_backward " .. arguments)
      assert.equal(1, code, err)
      assert.truthy(err:find(what, 1, true), err)
      assert.truthy(err:find("policy in_backward may step in backward", 1, true), err)
      assert.equal(0, (run("overlap=deferred " .. arguments)), arguments)
    end
  end)

  it("stops at nan before a checkpoint has them", function()
    local code, _, err = run "overlap=in_backward bad=3"
    assert.equal(4, code, err)
    assert.truthy(err:find("step 3: loss or gradients are inf or nan", 1, true), err)
    local told = "applied already, by policy in_backward: resume from the last checkpoint"
    assert.truthy(err:find(told, 1, true), err)
    assert.is_nil(command.read(folder .. "/out/step-00000004/manifest.json"))
    assert.truthy(command.read(folder .. "/out/step-00000002/manifest.json"))
  end)
end)

describe("groups of an optimizer", function()
  it("are told of where pieces of shards leave one empty", function()
    command.write(folder .. "/r.lua", [[
local ms = require "moonshard"
local cfg = ms.config(ms.scripts.options { how = "dim" })
local net = ms.scripts.apply(cfg, ms.nn.Linear(4, 4), function(net)
  local function is_matrix(p)
    if cfg.how == "dim" then return p:dim() > 1 end
    return #p:full_shape() > 1
  end
  local matrices, rest = {}, {}
  for _, p in ipairs(net:parameters()) do table.insert(is_matrix(p) and matrices or rest, p) end
  return ms.optim.adamw { { params = matrices }, { params = rest, weight_decay = 0 } }
end)
print(ms.rank(), net ~= nil)]])
    for options, warns in pairs {
      ["shard=full_shard"] = true, [""] = false, ["shard=full_shard how=shape"] = false,
    } do
      local _, err = command.succeed(folder, "run r.lua -n 2 " .. options)
      local told = err:find("adamw: group 1 has no parameter; a piece of 'weight', which is \z
        sharded, has one dimension: choose by #p:full_shape(), or", 1, true)
      assert.equal(warns, told ~= nil, options .. err)
    end
  end)
end)
