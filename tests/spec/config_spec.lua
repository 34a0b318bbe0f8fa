-- Options of recipes: types, groups, choices, files, errors, help; as a user meets them, through
-- `moonshard run`.
local support = require "support"

local declare = [[
local ms = require "moonshard"
local cfg = ms.config {
  steps = { 200, help = "how many" }, lr = 3e-4, name = "x", fast = false, deep = { 1.0 },
  kind = { "b", choices = { "a", "b", "c" } }, model = { layers = 4, inner = { width = 8 } },
}
print(cfg.steps, math.type(cfg.steps), cfg.lr, cfg.name, cfg.fast, cfg.deep, cfg.kind,
  cfg.model.layers, cfg.model.inner.width)
]]

local function run(arguments, text) return support.recipe(text or declare, arguments) end

local function shows(expected, arguments, text)
  local code, output = run(arguments, text)
  assert.equal(0, code, output)
  assert.equal(expected, (output:gsub("\t", " ")))
end

-- One line that names all of these; exit code 2.
local function refuses(arguments, ...)
  local code, output = run(arguments)
  assert.equal(2, code, output)
  for _, text in ipairs { ... } do assert.truthy(output:find(text, 1, true), output) end
  assert.is_nil(output:find("stack traceback", 1, true))
end

local function file_with(suffix, text)
  local path = os.tmpname() .. suffix
  local file = assert(io.open(path, "w"))
  file:write(text)
  file:close()
  return path
end

describe("ms.config", function()
  it("gives defaults, and what the command line says", function()
    shows("200 integer 0.0003 x false 1.0 b 4 8\n", "")
    shows("7 integer 1.0 y=z true 2.0 c 1 16\n",
      "steps=7 lr=1 'name=y=z' fast=true deep=2 kind=c model.layers=1 model.inner.width=16")
    shows("7 integer 0.0003  false 1.0 b 4 8\n", "steps=7.0 name=")
  end)

  it("checks types, and shows the default", function()
    refuses("steps=1.5", "steps", "integer", "200", "1.5")
    refuses("steps=many", "steps", "integer", "many")
    refuses("lr=fast", "lr", "number", "0.0003")
    refuses("lr=1e400", "lr", "number", "1e400")
    refuses("lr=-1e400", "lr", "number", "-1e400")
    refuses("steps=1e400", "steps", "integer", "1e400")
    refuses("fast=1", "fast", "boolean")
    refuses("kind=d", "kind", "a", "b", "c", "d")
    refuses("steps", "key=value")
  end)

  it("gives the value of one option or of the one that replaces it", function()
    local text = [[
      local ms = require "moonshard"
      local cfg = ms.config { minutes = 3.0, steps = { 0, replaces = "minutes", help = "or so" } }
      print(cfg.minutes, cfg.steps)
    ]]
    local file = file_with(".json", '{"minutes": 5}')
    shows("3.0 nil\n", "", text)
    shows("2.0 nil\n", "minutes=2", text)
    shows("nil 7\n", "steps=7", text)
    shows("nil 7\n", "steps=7 --config " .. file, text)
    shows("5.0 nil\n", "--config " .. file, text)
    local code, output = run("steps=7 minutes=2", text)
    assert.equal(2, code, output)
    assert.matches("options steps and minutes are both given %(from the command line%)", output)
    code, output = run("--help", text)
    assert.equal(0, code)
    assert.matches("\n  steps = +or so\n", output)
    os.remove(file)
  end)

  it("names the nearest option", function()
    refuses("step=3", "'step'", "'steps'")
    refuses("model.layer=3", "'model.layer'", "'model.layers'")
    refuses("model=3", "'model'")
    refuses("zzzzzzzzzzzzzz=3", "steps", "model.layers")
  end)

  it("reads files, which the command line overrides", function()
    local lua, json = file_with(".lua", "return { steps = 9, model = { layers = 2 } }"),
      file_with(".json", '{"lr": 1, "fast": true, "model": {"inner": {"width": 3}}}')
    shows("9 integer 0.0003 x false 1.0 b 2 8\n", "--config " .. lua)
    shows("1 integer 0.0003 x false 1.0 b 2 8\n", "--config " .. lua .. " steps=1")
    shows("200 integer 1.0 x true 1.0 b 4 3\n", "--config " .. json)
    local wrong = file_with(".json", '{"stesp": 1}')
    refuses("--config " .. wrong, "'stesp'", "'steps'", wrong)
    local kind = file_with(".json", '{"steps": "5"}')
    refuses("--config " .. kind, "steps", "integer", kind)
    local broken = file_with(".json", '{"steps": ')
    local code, output = run("--config " .. broken)
    assert.truthy(code == 2 or code == 3)
    assert.truthy(output:find(broken, 1, true), output)
    for _, path in ipairs { lua, json, wrong, kind, broken } do os.remove(path) end
    code, output = run "--config /nowhere.lua"
    assert.truthy(code == 2 or code == 3)
    assert.truthy(output:find("/nowhere.lua", 1, true), output)
  end)

  it("prints help", function()
    local code, output = run "--help"
    assert.equal(0, code)
    for _, text in ipairs {
      "steps = 200", "how many", 'kind = "b"', "a|b|c", "model.inner.width = 8", "key=value",
    } do
      assert.truthy(output:find(text, 1, true), output)
    end
    -- The recipe stops there.
    assert.is_nil(output:find("200\tinteger", 1, true))
  end)

  it("refuses declarations that make no sense", function()
    for text, expected in pairs {
      ["ms.config { 5 }"] = "names",
      ["ms.config { a = print }"] = "function",
      ["ms.config(5)"] = "table",
      ["ms.config { a = 1 } ms.config { b = 2 }"] = "already",
      ["ms.config { a = { 1, replaces = 'b' } }"] = "option a replaces b",
      ["ms.config { a = { 1, replaces = 'a' } }"] = "option a replaces a",
    } do
      local code, output = run("", 'local ms = require "moonshard" ' .. text)
      assert.equal(1, code, output)
      assert.truthy(output:find(expected, 1, true), output)
      assert.truthy(output:find("RECIPE:1:", 1, true), output)
    end
  end)

  it("refuses options where a recipe declares none", function()
    local code, output = run("steps=3", "print 'hello'")
    assert.equal(2, code)
    assert.truthy(output:find("declares no options", 1, true), output)
  end)
end)

describe("moonshard run", function()
  it("ends with 1 and the user's lines when the recipe fails", function()
    local code, output = run("",
      'local ms = require "moonshard"\nlocal function deep() return 1 + ms.zeros { 2 } + ms.zeros \z
        { 3 } end\nlocal x = deep()\nprint(x)')
    assert.equal(1, code)
    assert.truthy(output:find("RECIPE:2: add: [2] f32 and [3] f32", 1, true), output)
    assert.truthy(output:find("RECIPE:3:", 1, true), output)
    assert.is_nil(output:find("lua/moonshard/", 1, true), output)
  end)

  it("shows where in a hook an error was raised", function()
    local code, output = run("", [[
local ms = require "moonshard"
local function helper(t) return t.x.y end
local x = ms.ones { 1, requires_grad = true }
x:on_grad(function(g) local v = helper(g) return v end)
x:sum():backward()]])
    assert.equal(1, code)
    assert.truthy(output:find("RECIPE:2:", 1, true), output)
    assert.truthy(output:find("RECIPE:4:", 1, true), output)
  end)

  it("knows files that are not there, and syntax errors", function()
    local code, output = support.shell(("'%s' run /nowhere/recipe.lua")
      :format(os.getenv "MOONSHARD_BIN"))
    assert.equal(2, code)
    assert.truthy(output:find("/nowhere/recipe.lua", 1, true), output)
    code, output = run("", "x = = 1")
    assert.equal(1, code)
    assert.truthy(output:find("RECIPE:1:", 1, true), output)
  end)

  it("ends with 3 for what is missing or unfit outside, whoever finds it", function()
    for call, text in pairs {
      ["ms.data.mnist '/proc/self/fdinfo'"] = "images%-idx3%-ubyte",
      ["ms.data.tokens '/tmp/no-such-*.bin'"] = "no file matches",
      ["ms.data.bytes '/no/such'"] = "No such file",
      ["ms.checkpoint.load '/proc/self'"] = "no checkpoint",
      ["ms.nn.Linear(1, 1):load '/proc/self/fdinfo'"] = "no .safetensors",
      ["ms.nn.pretrained '/proc/self'"] = "config.json",
    } do
      local code, output = support.recipe("local ms = require 'moonshard'\nassert(" .. call .. ")")
      assert.equal(3, code, output)
      assert.matches(text, output)
    end
  end)

  it("takes values that are errors", function()
    for _, text in ipairs {
      "error()", "error(nil)", "error({})", "error(5)",
      "error(setmetatable({}, { __tostring = function() return 'my error' end }))",
      "error(setmetatable({}, { __tostring = function() error 'again' end }))",
    } do
      local code, output = run("", text)
      assert.equal(1, code, text .. output)
      assert.truthy(output:find("moonshard:", 1, true), text .. output)
    end
  end)

  it("does not load binary chunks", function()
    local code, output = run("", "local f, message = load(string.dump(function() end), 'x') \z
      print(f, message) print(pcall(load, 'return 1', 'x', 'b'))")
    assert.equal(0, code, output)
    assert.truthy(output:find("nil", 1, true) and output:find("binary", 1, true)
      and output:find("false", 1, true), output)
  end)
end)
