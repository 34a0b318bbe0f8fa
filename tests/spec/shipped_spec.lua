-- Recipes that come with the program: found by their bare names, from any folder.
local command = require "command"

describe("recipes of the installation", function()
  local folder
  before_each(function() folder = command.folder() end)
  after_each(function() command.remove(folder) end)

  local function refused(arguments)
    local code, out, err = command.run(folder, arguments)
    assert.equal(2, code, err)
    assert.equal("", out)
    return err
  end

  it("are found by name, and by the path that documents give", function()
    for _, name in ipairs { "gpt_bytes", "recipes/gpt_bytes.lua" } do
      assert.matches(("^usage: moonshard run %s "):format(name),
        (command.succeed(folder, ("run %s --help"):format(name))))
      local report = command.succeed(folder, ("check %s dtype=f32 steps=2 batch=2 length=16 \z
        model.layers=1 model.width=16 model.heads=2 data='%s/README.md'"):format(name,
        command.source))
      assert.matches("^rank 0 +peak memory", report)
    end
  end)

  it("give way to a file of the user's", function()
    command.write(folder .. "/gpt_bytes", "print 'mine'")
    assert.equal("mine\n", (command.succeed(folder, "run gpt_bytes")))
    command.remove(folder .. "/gpt_bytes")
    assert(os.execute(("mkdir -p '%s/recipes/hooks' '%s/gpt_bytes'"):format(folder, folder)))
    command.write(folder .. "/recipes/gpt_bytes.lua", "print 'mine, too'")
    assert.equal("mine, too\n", (command.succeed(folder, "run gpt_bytes")))
    assert.equal("mine, too\n", (command.succeed(folder, "run recipes/gpt_bytes.lua")))
    command.write(folder .. "/recipes/own.lua", "print(...)")
    command.succeed(folder, "run own")
  end)

  it("are listed where a name is wrong", function()
    local err = refused "run gpt_byte"
    assert.matches("there is no recipe 'gpt_byte': did you mean 'gpt_bytes'?", err, 1, true)
    assert.matches("\nrecipes: ddp_by_hand, gpt2, gpt2_hybrid, gpt_bytes, llama, ", err, 1, true)
    assert.matches("which recipe?\nrecipes: ddp_by_hand, gpt2, ", refused "run", 1, true)
    assert.matches("there is no recipe 'mnits': did you mean 'mnist'?", refused "check mnits", 1,
      true)
    assert.matches("cannot open recipes/nosuch.lua", refused "run recipes/nosuch.lua", 1, true)
  end)

  it("bring their scripts", function()
    local small = "dtype=f32 steps=1 batch=2 length=16 warmup=1 model.layers=1 model.width=16 \z
      model.heads=2 data='" .. command.source .. "/README.md' run=run"
    command.succeed(folder, "run gpt_bytes -n 2 hook=recipes/hooks/dgc.lua " .. small)
    local err = refused("run gpt_bytes -n 2 hook=recipes/hooks/dcg.lua " .. small)
    assert.matches("did you mean 'recipes/hooks/dgc.lua'?", err, 1, true)
    -- Each once, by a name that can be given, also for a recipe that is given by its path.
    local by_path = refused(("run '%s/recipes/gpt_bytes.lua' hook=recipes/hooks/dcg.lua"):format(
      command.source))
    for _, text in ipairs { err, by_path } do
      local hooks = assert(text:match "\nfiles at hand: ([^\n]*)")
      assert.equal(1, select(2, hooks:gsub("recipes/hooks/dgc%.lua", "")), hooks)
      assert.falsy(hooks:find("/recipes/", 1, true), hooks)
      assert.falsy(hooks:find("share/moonshard", 1, true), hooks)
    end
  end)
end)
