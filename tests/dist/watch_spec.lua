-- moonshard run --watch: scripts that change while a job runs.
local command = require "command"

-- In each step all ranks reduce the loss's gradient with the hook, whose factor shows in the
-- weights. Between steps rank 0 replaces files, as an editor would, but at known steps. It prints
-- the factor of the hook in each step.
local RECIPE = [[
local ms = require "moonshard"
local core = require "moonshard.core"
local cfg = ms.config { steps = 12, policy = "", buckets = "" }
local model = ms.nn.Linear(4, 4, { bias = false })
local net = ms.ddp(model,
  { comm_hook = "hook.lua", buckets = cfg.buckets ~= "" and cfg.buckets or nil })
local opt = ms.optim.sgd(model, { lr = 0.0 })
if cfg.policy ~= "" then opt:overlap(net, cfg.policy) end
local factors = {}
for step in ms.steps(cfg.steps) do
  model.weight:zero_grad()
  net(ms.ones { 1, 4 }):sum():backward()
  factors[#factors + 1] = ("%g"):format(model.weight:grad():select(1, 1):select(1, 1):item())
  opt:step()
  if step % 3 == 2 and ms.rank() == 0 then
    os.rename(("next-%d.lua"):format(step), "hook.lua")
    os.rename(("policy-%d.lua"):format(step), "policy.lua")
    -- The files are looked at every 20 ms.
    local from = core.clock_ms()
    while core.clock_ms() - from < 25 do end
  end
end
print(("rank %d: %s"):format(ms.rank(), table.concat(factors, " ")))
]]

local function times(factor)
  return ("return function(bucket, next) return next(bucket):and_then(function(mean) return mean \z
    * %d end) end"):format(factor)
end

describe("watched scripts", function()
  local folder
  before_each(function()
    folder = command.folder()
    command.write(folder .. "/r.lua",
      (RECIPE:gsub("model.weight:zero_grad%(%)", "opt:zero_grad()")))
    command.write(folder .. "/hook.lua", times(1))
  end)
  after_each(function() command.remove(folder) end)

  -- Runs the job; returns the line of the ranks, which must be equal on all.
  local function run(arguments, ranks)
    local out, err = command.succeed(folder, "run r.lua --watch " .. arguments)
    local first
    for rank = 0, ranks - 1 do
      local line = out:match(("rank %d: ([^\n]*)\n"):format(rank))
      assert.truthy(line, out)
      first = first or line
      assert.equal(first, line)
    end
    return first, out, err
  end

  -- The two steps from which a new script was in force. If rank 0 is ahead of others, all switch a
  -- step later.
  local function switches(out, file)
    local found = {}
    for step in out:gmatch(
        ("watch: '%s' has changed: the new one is in force from step (%%d+) on\n"):format(file)) do
      found[#found + 1] = tonumber(step)
    end
    assert.equal(2, #found, out)
    assert.is_true((found[1] == 3 or found[1] == 4) and (found[2] == 6 or found[2] == 7), out)
    return found[1], found[2]
  end

  for _, kind in ipairs { "-n 1", "-n 3", "-n 2 --thread-ranks" } do
    local ranks = tonumber(kind:match "%d")

    it("are in force on all ranks from the same step on: " .. kind, function()
      command.write(folder .. "/next-2.lua", "-- in Latin-1: \xe9\n" .. times(3))
      -- A script may be longer than other texts that ranks share.
      command.write(folder .. "/next-5.lua", ("-- long\n"):rep(2000) .. [[
        local hooks = require "moonshard.hooks"
        return hooks.chain {
          hooks.cast { dtype = "bf16" },
          hooks.stage { name = "by five", decode = function(mean) return mean * 5 end },
          hooks.all_reduce(),
        }
      ]])
      local factors, out, err = run(kind, ranks)
      assert.equal("", err)
      local first, second = switches(out, "hook.lua")
      assert.equal(("1 "):rep(first) .. ("3 "):rep(second - first) .. ("5 "):rep(12 - second),
        factors .. " ")
    end)

    it("go on as they were when the new one does not load or is none: " .. kind, function()
      command.write(folder .. "/next-2.lua", "return function(bucket, next")
      command.write(folder .. "/next-5.lua", "return 7")
      command.write(folder .. "/next-8.lua", "error 'not yet'")
      local factors, _, err = run(kind, ranks)
      assert.equal(("1 "):rep(12), factors .. " ")
      for rank = 0, ranks - 1 do
        local told =
          ("moonshard: rank %d: watch: 'hook.lua' has changed, but the old one stays in force: it ")
            :format(rank)
        for _, why in ipairs {
          "cannot be loaded: hook.lua:1:", "returned a number, not a link",
          "failed: hook.lua:1: not yet",
        } do
          assert.truthy(err:find(told .. why, 1, true), err)
        end
      end
    end)

    it("go on as they were when the new one fails in its first step: " .. kind, function()
      command.write(folder .. "/hook.lua", times(2))
      command.write(folder .. "/next-2.lua",
        "return function(bucket) local x = bucket:nothing() return x end")
      command.write(folder .. "/next-11.lua", [[
        return function(bucket, next)
          return next(bucket):and_then(function(mean) return mean:to "bf16" end)
        end
      ]])
      command.write(folder .. "/next-5.lua", [[return function(bucket, next) next(bucket) end]])
      command.write(folder .. "/next-8.lua", [[
        local hooks = require "moonshard.hooks"
        return hooks.chain {
          hooks.stage { name = "outer", decode = function(mean) return mean * 100 end },
          hooks.stage { name = "inner", encode = function(t) return t * 10 end,
            decode = function(mean) return mean.nothing.at_all end },
        }
      ]])
      local factors, _, err = run(kind .. " steps=15", ranks)
      assert.equal(("2 "):rep(15), factors .. " ")
      local told = "watch: 'hook.lua' failed in its first step, the old one stays in force: "
      assert.equal(4 * ranks, select(2, err:gsub(told:gsub("%p", "%%%0"), "")), err)
      assert.truthy(err:find(told .. "it returned nothing", 1, true), err)
      assert.matches(told:gsub("%p", "%%%0")
        .. "it returned [^\n]*bf16[^\n]*; 16 numbers in f32 are expected", err)
    end)
  end

  it("end the job where the new one fails on some ranks only", function()
    command.write(folder .. "/next-2.lua", [=[
      local ms = require "moonshard"
      return function(bucket, next)
        if ms.rank() == 1 then error "only here" end
        return next(bucket):and_then(function(mean) return mean * 3 end)
      end]=])
    local code, _, err = command.run(folder, "run r.lua --watch -n 2")
    assert.equal(1, code)
    assert.truthy(err:find("watch: 'hook.lua' failed in its first step on 1 of 2 ranks", 1, true),
      err)
  end)

  it("keep the state of their links, by name", function()
    local function counting(factor)
      return ([[
        local hooks = require "moonshard.hooks"
        local state = hooks.state "count"
        return function(bucket, next)
          local own = state:of "passes"
          own.n = (own.n or 0) + 1
          return next(bucket):and_then(function(mean) return mean * (%d + own.n) end)
        end]]):format(factor)
    end
    command.write(folder .. "/hook.lua", counting(0))
    command.write(folder .. "/next-2.lua", counting(100))
    command.write(folder .. "/next-5.lua", counting(200))
    local factors, out = run("-n 2", 2)
    local first, second = switches(out, "hook.lua")
    local expected = {}
    for step = 0, 11 do
      expected[step + 1] = step + 1 + (step >= second and 200 or step >= first and 100 or 0)
    end
    assert.equal(table.concat(expected, " "), factors)
  end)

  it("may be plans", function()
    local function policy(moment, name)
      return ([[return require "moonshard".overlap { name = "%s", plan = function(view)
        local plan = {}
        for i, b in ipairs(view.buckets) do plan[i] = { bucket = b.index, step = "%s" } end
        return plan
      end }]]):format(name or moment, moment)
    end
    command.write(folder .. "/policy.lua", policy "after_backward")
    command.write(folder .. "/policy-2.lua", policy "before_next_use")
    command.write(folder .. "/policy-5.lua", policy("whenever", "bad"))
    local _, out, err = run("-n 2 policy=policy.lua", 2)
    switches(out, "policy.lua")
    assert.matches("rank 0: watch: 'policy.lua' failed in its first step, the old one stays in \z
      force: [^\n]*unknown step 'whenever'", err)
    command.write(folder .. "/policy.lua", [[
      local function plan() return { caps_bytes = { 1 << 20 } } end
      return require "moonshard".buckets { name = "one", plan = plan }
    ]])
    command.write(folder .. "/policy-2.lua",
      [[return require "moonshard".buckets { name = "none", plan = function(view) return {} end }]])
    _, out, err = run("-n 2 buckets=policy.lua", 2)
    assert.matches("'policy.lua' has changed: the new one is in force from step [34] on", out)
    assert.matches("rank 1: watch: 'policy.lua' failed in its first step, the old one stays in \z
      force: ", err)
  end)

  it("are forgotten with the models that are unwrapped, until another has them", function()
    local script = command.write(folder .. "/unwrap.lua", [[
      local ms, core = require "moonshard", require "moonshard.core"
      local chain = ms.hooks.chain { "hook.lua" }
      local function wrap(hook)
        return ms.ddp(ms.nn.Linear(4, 4, { bias = false }),
          { comm_hook = hook, buckets = "plan.lua" })
      end
      local nets = { wrap(chain), wrap(chain), wrap "other.lua" }
      local optimizer = ms.optim.sgd(nets[1])
      optimizer:overlap(nets[1], "policy.lua")
      local last
      for step in ms.steps(12) do
        if step == 1 then
          for i = 1, 3 do nets[i]:unwrap() end
          nets = { wrap "other.lua" }
        elseif step == 8 then nets = { wrap(chain) } end
        last = (nets[#nets](ms.ones { 1, 4 }):sum():backward() or nets[#nets]).weight:grad()
          :select(1, 1):select(1, 1):item()
        nets[#nets].weight:set_grad(nil)
        if step == 2 and ms.rank() == 0 then
          for _, name in ipairs { "hook", "other", "plan", "policy" } do
            os.rename("next-" .. name .. ".lua", name .. ".lua")
          end
        end
        if ms.rank() == 0 then
          local from = core.clock_ms()
          while core.clock_ms() - from < 25 do end
        end
      end
      print(("rank %d ends with %g"):format(ms.rank(), last))
    ]])
    local plan, policy = 'return require "moonshard".buckets { name = "p", plan = function() \z
      return { caps_bytes = { 99 } } end }', [[
      return require "moonshard".overlap { name = "p", plan = function(view)
        local plan = {}
        for i, b in ipairs(view.buckets) do
          plan[i] = { bucket = b.index, step = "after_backward" }
        end
        return plan
      end }]]
    for name, text in pairs { other = times(1), plan = plan, policy = policy } do
      command.write(("%s/%s.lua"):format(folder, name), text)
    end
    for name, text in pairs {
      hook = times(3), other = times(1) .. " ", plan = plan .. " ", policy = policy .. " ",
    } do
      command.write(("%s/next-%s.lua"):format(folder, name), text)
    end
    local out, err = command.succeed(folder, ("run '%s' --watch -n 2"):format(script))
    assert.equal("", err)
    local told = {}
    for file, step in out:gmatch "watch: '(%w+)%.lua' has changed: the new one is in force from \z
        step (%d+)" do
      told[#told + 1] = file
      assert.is_true((tonumber(step) > 8) == (file == "hook"), out)
    end
    table.sort(told)
    -- The plan of the model that is still wrapped; no model uses the policy any more.
    assert.same({ "hook", "other", "plan" }, told, out)
    for rank = 0, 1 do
      assert.truthy(out:find(("rank %d ends with 3"):format(rank), 1, true), out)
    end
  end)

  it("are read once without --watch", function()
    command.write(folder .. "/next-2.lua", times(3))
    local out = command.succeed(folder, "run r.lua -n 2")
    assert.matches("rank 0: " .. ("1 "):rep(11) .. "1\n", out)
  end)

  -- A model of hybrid buckets would call _watch and _unwatch as ddp does.
  it("are links between the reductions of a hybrid bucket, until they are let go", function()
    command.write(folder .. "/r.lua", [[
      local ms, hooks = require "moonshard", require "moonshard.hooks"
      local core = require "moonshard.core"
      local world, factors = ms.world(), {}
      local compiled = hooks._compile(hooks.reduce { between = "hook.lua" }, "r", nil, "hybrid")
      local parameter = ms.zeros { 4 }:keep()
      local shards, replicas = world:split { { 0 }, { 1 } }, world:split { { 0, 1 } }
      hooks._watch(compiled.chain)
      local function put(name)
        if ms.rank() ~= 0 then return end
        os.rename(name, "hook.lua")
        local from = core.clock_ms()
        while core.clock_ms() - from < 25 do end
      end
      local left
      for step in ms.steps(200) do
        local mean = core.reduce_bucket({
          kind = "hybrid", group = world, shards = shards, replicas = replicas,
          parameters = { parameter }, names = { "p" }, flat = ms.ones { 4 },
        }, compiled)
        factors[#factors + 1] = ("%g"):format(mean:select(1, 1):item())
        if step == 2 then put "next-2.lua" end
        if not left and factors[#factors] == "3" then
          hooks._unwatch(compiled.chain)
          put "next-5.lua"
          left = 5
        end
        left = left and left - 1
        if left == 0 then break end
      end
      print(("rank %d: %s"):format(ms.rank(), table.concat(factors, " ")))]])
    command.write(folder .. "/next-2.lua", times(3))
    command.write(folder .. "/next-5.lua", times(5))
    local line, out = run("-n 2", 2)
    assert.matches("^1 1[ 1]* 3 3 3 3 3$", line)
    assert.equal(1, select(2, out:gsub("has changed", "")))
  end)
end)
