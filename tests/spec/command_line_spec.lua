-- The program's commands except `run` and `check`: their output, their errors, and the peak of
-- which figures are shares.
local core = require "moonshard.core"
local command = require "command"

describe("the command line", function()
  local folder
  before_each(function() folder = command.folder() end)
  after_each(function() command.remove(folder) end)

  local commands = {
    "run", "check", "info", "repl", "trace", "test", "tokenize", "bench step", "bench gemm",
    "bench optim", "bench enqueue", "bench collectives", "bench hook", "bench hooks", "bench fsdp",
    "bench tokenize", "bench generate", "bench kernels", "generate", "eval",
  }

  it("prints help of every command on stdout", function()
    for _, name in ipairs(commands) do
      for _, switch in ipairs { "--help", "-h" } do
        local out, err = command.succeed(folder, name .. " " .. switch)
        assert.matches("^Usage: moonshard " .. name, out)
        assert.equal("", err)
      end
    end
    local kinds = command.succeed(folder, "bench --help")
    assert.matches("^usage: moonshard bench step|gemm", kinds)
    for _, name in ipairs(commands) do
      local kind = name:match "^bench (.*)"
      if kind then assert.matches("\n  " .. kind .. " +%a", kinds) end
    end
  end)

  -- This machine need have no GPU: a recipe of the program's own process answers for it.
  it("says how to use a GPU that is there, where a run is on the CPU", function()
    command.write(folder .. "/r.lua", 'print(require "moonshard".device())')
    command.write(folder .. "/shown.lua", [[
      local core, switch = require "moonshard.core", os.getenv "SWITCH"
      core.has_gpu = function() return os.getenv "SHOWN" == "yes" end
      require "moonshard.cli.run".main { "r.lua", switch and "--device" or nil, switch }]])
    local LINE <const> = "moonshard: this machine has a GPU: --device cuda computes there\n"
    for settings, expected in pairs {
      ["SHOWN=yes"] = LINE, ["SHOWN=yes SWITCH=cpu"] = LINE,
      ["SHOWN=no"] = "", ["SHOWN=yes SWITCH=sim"] = "",
    } do
      local out, err = command.succeed(folder, "run shown.lua", settings)
      assert.equal(settings:find "sim" and "sim\n" or "cpu\n", out)
      assert.equal(expected, err, settings)
    end
  end)

  it("lists the variables of the environment that a user may set", function()
    local out = command.succeed(folder, "help")
    local count = 0
    for name in ("TRANSPORT NCCL CUDA_LIBS TUNED MPI MASTER TOKEN LOG"):gmatch "%S+" do
      assert.matches("\n  MOONSHARD_" .. name .. " +%w", out)
      count = count + 1
    end
    assert.equal(count, select(2, out:gsub("\n  MOONSHARD_", "")))
    assert.matches("\n  CUDA_VISIBLE_DEVICES +%w.*\n  CUDA_LAUNCH_BLOCKING +1: ", out)
  end)

  it("says the default of every switch once, in its help", function()
    local seen = 0
    for _, name in ipairs(commands) do
      local options = command.succeed(folder, name .. " --help"):match "\nOptions:\n(.*)"
      -- A switch begins its line with three spaces; longer helps go on in lines that are further
      -- in. -n, --ranks takes two lines.
      options = ("\n" .. options):gsub("\n +%-n N,([^\n]*)\n   %-%-ranks N", "\n   -n N %1")
        :gsub("\n" .. (" "):rep(9) .. "+", " ")
      for switch in options:gmatch "\n   ([^\n]+)" do
        local _, count = switch:gsub("default", "")
        -- The help of a switch with a value states its default. These switches have no default.
        local none = switch:match "^%-%-trace" or switch:match "^%-%-html"
          or switch:match "^%-%-golden" or switch:match "^%-%-rank "
          or switch:match "^%-%-config FILE"
          or switch:match "^%-%-pattern" or name == "tokenize" and switch:match "^%-%-out"
            or name == "tokenize" and switch:match "^%-%-tokenizer"
          or name == "bench fsdp" and switch:match "^%-%-prefetch" or name == "bench hooks"
            and (switch:match "^%-%-overlap" or switch:match "^%-%-hook"
              or switch:match "^%-%-buckets" or switch:match "^%-%-local")
        local takes_value = switch:match "^%-%-[%w-]+ [%u{<]" or switch:match "^%-n N "
        seen = seen + 1
        assert.equal(takes_value and not none and 1 or 0, count, name .. ": " .. switch)
        assert.is_nil(switch:match "%(%d+%)", name .. ": " .. switch)
      end
    end
    assert.is_true(seen > 100)
  end)

  it("helps with the launcher's own commands and builds nothing", function()
    assert(os.execute(("cp '%s/moonshard' '%s/moonshard'"):format(command.source, folder)))
    local function launcher(arguments)
      local line = ("cd '%s' && ./moonshard %s >out 2>err"):format(folder, arguments)
      local _, _, code = os.execute(line)
      local out, err = command.read(folder .. "/out"), command.read(folder .. "/err")
      os.remove(folder .. "/out")
      os.remove(folder .. "/err")
      return code, out, err
    end
    for _, name in ipairs { "test", "build", "clean", "lua-path", "packages" } do
      for _, arguments in ipairs {
        name .. " --help", name .. " -h", name .. " --full release --help",
      } do
        local code, out, err = launcher(arguments)
        assert.equal(0, code, arguments)
        assert.matches("^usage: moonshard .*" .. name:gsub("%-", "%%-"), out)
        assert.equal("", err)
      end
    end
    for _, arguments in ipairs { "build release extra", "clean extra", "lua-path extra" } do
      local code, _, err = launcher(arguments)
      assert.equal(1, code)
      assert.matches('unknown argument "extra"', err)
    end
    local entries = io.popen(("ls -A '%s'"):format(folder)):read "a"
    assert.equal("moonshard\n", entries)
  end)

  it("configures a build without kernels for GPUs, until --cuda wants them", function()
    assert(os.execute(("cp '%s/moonshard' '%s/moonshard'"):format(command.source, folder)))
    command.write(folder .. "/cmake", '#!/bin/sh\necho "$*" >"${0%/*}/given"\nexit 1\n')
    assert(os.execute(("chmod +x '%s/cmake'"):format(folder)))
    local function given(arguments)
      os.execute(("cd '%s' && PATH=$PWD:$PATH ./moonshard %s >/dev/null 2>&1"):format(folder,
        arguments))
      return command.read(folder .. "/given")
    end
    assert.matches("%-%-preset release .*%-DMOONSHARD_WITH_CUDA=OFF", given "build")
    assert.matches("%-%-preset clang .*%-DMOONSHARD_WITH_CUDA=ON", given "build --cuda clang")
    local tree = folder .. "/build/release"
    local root = io.popen(("cd '%s' && pwd -P"):format(folder)):read()
    assert(os.execute(("mkdir -p '%s' && touch '%s/build.ninja'"):format(tree, tree)))
    local cache = "CMAKE_HOME_DIRECTORY:INTERNAL=" .. root .. "\nMOONSHARD_TESTS:BOOL=ON\n"
    command.write(tree .. "/CMakeCache.txt", cache .. "MOONSHARD_WITH_CUDA:STRING=OFF\n")
    assert.matches("%-%-preset release .*%-DMOONSHARD_WITH_CUDA=ON", given "build release --cuda")
    assert.matches("^%-%-build ", given "build")
    command.write(tree .. "/CMakeCache.txt", cache .. "MOONSHARD_WITH_CUDA:STRING=ON\n")
    assert.matches("^%-%-build ", given "build --cuda")
  end)

  it("refuses switches that make no sense with code 2, saying what is expected", function()
    for arguments, text in pairs {
      ["info --threads=0"] = "1 or more", ["info --threads=x"] = "an integer",
      ["info --memory=1.5"] = "an integer", ["info --memory-limit=1.5"] = "an integer",
      ["info --seed=x"] = "an integer",
      ["info extra"] = "too many arguments", ["info --devise cpu"] = "%-%-device",
      ["bench"] = "usage", ["bench speed"] = "usage",
      ["bench step --steps 0"] = "1 or more", ["bench optim --parameters 0"] = "1 or more",
      ["bench optim --kind addam"] = "must be one of",
      ["bench gemm --device sim"] = "sim",
      ["bench hooks --hook top_k --hook int8"] = "%-%-hook' must be used at most 1 time",
      ["run --seed 1 x.lua --seed=2"] = "%-%-seed' must be used at most 1 time",
      ["info --memory 1e9 --memory 2e9"] = "%-%-memory' must be used",
      ["run -n 1 x.lua --ranks 2"] = "ranks' must be used",
      ["bench gemm --product 8x8"] = "ROWSxINPUTSxOUTPUTS, such as",
      ["run -n 0 x.lua"] = "1 or more", ["run -n x x.lua"] = "an integer",
      ["run"] = "which recipe", ["check"] = "which recipe",
    } do
      local code, _, err = command.run(folder, arguments)
      assert.equal(2, code, arguments .. "\n" .. err)
      assert.matches(text, err, arguments)
    end
  end)

  it("says why a value is nil that a call has refused to give", function()
    command.write(folder .. "/r.lua", [[
      local ms = require "moonshard"
      local set = ms.data.bytes "nosuch"
      local other = ms.nn.Linear(2, 2)
      set:split(0.5)
    ]])
    local code, _, err = command.run(folder, "run r.lua")
    assert.equal(3, code)                          -- as where the script had asserted it
    assert.matches("r.lua:4: attempt to index a nil value %(local 'set'%)\nr.lua:2: a call has \z
      failed here and given nil: cannot open 'nosuch'", err)
    -- A nil of the script's own.
    command.write(folder .. "/r.lua", "require 'moonshard'\nlocal t\nt.x = 1")
    code, _, err = command.run(folder, "run r.lua")
    assert.equal(1, code)
    assert.is_nil(err:find("a call has failed", 1, true), err)
  end)

  it("shows texts with percent signs", function()
    command.write(folder .. "/r.lua", [[
      local ms = require "moonshard"
      ms.log "100% done"
      ms.log "100%"
      ms.log "100%%"
      ms.log("%d%% of %s", 5, ms.ones { 2 })
      ms.warn "50% free" ]])
    local out, err = command.succeed(folder, "run r.lua")
    assert.equal("100% done\n100%\n100%\n5% of tensor [2] f32\n", out)
    assert.equal("moonshard: rank 0: 50% free\n", err)
  end)

  it("works where LUA_PATH and LUA_CPATH are those of another Lua", function()
    command.write(folder .. "/r.lua", 'local ms = require "moonshard"\n\z
      ms.config { a = 1 }\nprint(ms.world_size(), require "argparse" ~= nil)')
    for _, name in ipairs { "LUA_PATH", "LUA_PATH_5_4" } do
      local settings = ("%s='/nowhere/?.lua' %s='/nowhere/?.so'"):format(name,
        (name:gsub("PATH", "CPATH")))
      assert.matches("^version", command.succeed(folder, "info", settings))
      for ranks, how in pairs { [1] = "", [2] = "-n 2", [3] = "-n 3 --thread-ranks" } do
        local out = command.succeed(folder, "run r.lua " .. how, settings)
        assert.equal(("%d\ttrue\n"):format(ranks):rep(ranks), out)
      end
      assert.matches("recipe", command.succeed(folder, "run r.lua --help", settings))
    end
  end)

  it("finds modules beside the recipe first, from any folder, and its own before them", function()
    for path, text in pairs {
      ["sub/r.lua"] = 'local ms = require "moonshard"\nms.config { a = 1 }\n\z
        print(require "helper", require "package_of_mine", (require "here_only"))',
      ["sub/helper.lua"] = 'return "beside"', ["helper.lua"] = 'return "of the current folder"',
      ["sub/package_of_mine/init.lua"] = 'return "package"', ["here_only.lua"] = 'return "here"',
      ["sub/moonshard/config.lua"] = 'error "not the library"',
    } do
      core.make_directory(folder .. "/" .. (path:match "^(.*)/" or "."))
      command.write(folder .. "/" .. path, text)
    end
    for recipe in pairs { ["sub/r.lua"] = true, ["./sub/r.lua"] = true,
      [folder .. "/sub/r.lua"] = true } do
      for how, count in pairs { [""] = 1, ["-n 2"] = 2, ["-n 2 --thread-ranks"] = 2 } do
        assert.equal(("beside\tpackage\there\n"):rep(count),
          command.succeed(folder, ("run %s %s"):format(recipe, how)))
      end
    end
    assert.matches("beside", command.succeed(folder .. "/sub", "run r.lua", "LUA_PATH='../?.lua'"))
  end)

  it("suggests the nearest switch, or the option of the recipe that was meant", function()
    command.write(folder .. "/own.lua", [[
      local ms = require "moonshard"
      -- ms.config { stop = 1 }
      ms.config { steps = 10, model = { width = 4 }, lr = { 1e-3, help = "steep = 3" } }
    ]])
    for arguments, text in pairs {
      ["run own.lua --step 3"] = "'--step': did you mean steps=VALUE, an option of the recipe?",
      ["run -n 2 own.lua --steps=3"] = "'--steps': did you mean steps=VALUE",
      ["check own.lua --learning_rate=3"] = "'--learning_rate': did you mean lr=VALUE",
      ["run own.lua --sed 3"] = "'--sed': did you mean --seed?",
      ["run --sed 3"] = "did you mean --seed?",
      ["bench step --jsno"] = "did you mean --json?", ["trace --htm x"] = "did you mean --html?",
    } do
      local code, _, err = command.run(folder, arguments)
      assert.equal(2, code, arguments .. "\n" .. err)
      assert.is_truthy(err:find(text, 1, true), arguments .. "\n" .. err)
    end
    assert.matches("unknown switch '%-%-quxquxqux'\n",
      (select(3, command.run(folder, "run own.lua --quxquxqux"))))
  end)

  it("keeps matrix products within the instruction set that was asked for", function()
    local function products(cap)
      local out = command.succeed(folder, "info", cap and "MOONSHARD_CPU=" .. cap)
      return out:match "kernels +(%S+)", out:match "matrix products +oneDNN [%d.]+, (%S+)"
    end
    local best, any = products()
    if not any then pending "these matrix products do not tell what they use" return end
    local order = { "portable", "avx2", "avx512", "avx512bf16" }
    local allowed = {
      portable = "^sse41$", avx2 = "^avx2", avx512 = "^avx512_core$",
      avx512bf16 = "^avx512_core_bf16$",
    }
    for _, cap in ipairs(order) do
      local kernels, isa = products(cap)
      assert.equal(cap, kernels)
      assert.matches(allowed[cap], isa)
      assert.is_nil(isa:match "amx")
      if cap == best then break end
    end
  end)

  it("writes no trace silently: who asked for one hears why there is none", function()
    command.write(folder .. "/small.lua", [[
      local ms = require "moonshard"
      ms.ones { 4 }:sum():item()
      assert(os.execute "rm -r traces")
    ]])
    assert(os.execute(("mkdir '%s/traces'"):format(folder)))
    local _, err = command.succeed(folder, "run --trace traces/t.json small.lua")
    assert.matches("the trace was not written: .*traces/t.json", err)
  end)
end)

describe("the peak of products", function()
  local folder
  before_each(function() folder = command.folder() end)
  after_each(function() command.remove(folder) end)

  -- small: of products that take no time.
  local script = [[
    local core, peak = require "moonshard.core", require "moonshard.train.peak_flops"
    local small = require "moonshard".config { small = false }.small
    if small then peak.shapes = function() return { { 64, 64, 64 } } end end
    local first, measured = peak.flops "f32"
    local second, again = peak.flops "f32"
    assert(first > 0 and first == second and not again)
    assert(peak.raise("f32", first / 2) == first and peak.flops "f32" == first)
    if measured then
      assert(peak.raise("f32", first * 2) == first * 2 and peak.flops "f32" == first * 2)
    end
    print(measured or false)
  ]]

  local function run(arguments)
    return (command.succeed(folder, "run " .. arguments, command.own_cache(folder)))
  end

  it("is measured once, and raised by what products are seen to reach", function()
    command.write(folder .. "/peak.lua", script)
    assert.equal("true\n", run "peak.lua")
    assert.equal("false\n", run "peak.lua")
    assert.equal("true\n", run "--threads 1 peak.lua small=true")
  end)

  it("is measured anew where its file holds something else", function()
    command.write(folder .. "/peak.lua", script)
    run "peak.lua small=true"
    local path = folder .. "/cache/moonshard/peak.json"
    for _, text in ipairs {
      "[1, 2]", "{", "7", '{"a": [1], "b": "c"}', command.read(path):gsub(":%s*[%d.e+]+", ":0"),
      (command.read(path):gsub(":%s*[%d.e+]+", ":null")),
    } do
      command.write(path, text)
      assert.equal("true\n", run "peak.lua small=true", text)
    end
  end)

  it("is at least what bench shows", function()
    local result = core.json_decode((command.succeed(folder, "bench gemm --json --threads 1 \z
      --product 256x256x768 --product 64x768x256", command.own_cache(folder))))
    assert.same({ 64, 768, 256 },
      { result.products[2].m, result.products[2].k, result.products[2].n })
    assert.equal(2, #result.products)
    for _, row in ipairs(result.products) do
      assert.is_true(row.gflops > 0 and row.share_of_peak <= 1)
    end
  end)
end)
