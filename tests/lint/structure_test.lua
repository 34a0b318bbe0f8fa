-- Shows that structure.lua reports violations and nothing else: each case is a small tree that is
-- compiled, and the expected report.
--
--     lua5.4 tests/lint/structure_test.lua CC NM NINJA [OBJDUMP]
--
-- If NINJA is "none", the compiler is called without it.

local function run(command)
  local handle = assert(io.popen(command .. " 2>&1"))
  local output = handle:read("a")
  return output, handle:close()
end

local lint = run("realpath '" .. arg[0] .. "'"):gsub("structure_test.lua\n", "structure.lua")
local cc, nm, ninja, objdump = arg[1] or "cc", arg[2] or "nm", arg[3] or "ninja",
  arg[4] or "objdump"

-- Merges file lists.
local function both(a, b)
  for file, text in pairs(b) do a[file] = text end
  return a
end

-- The files a1 .. aN of a folder, each with a header, of which each includes the next, and the last
-- one the first.
local function ring(folder, count)
  local files, from = {}, folder:gsub("^engine/", "")
  for i = 1, count do
    files[("%s/a%d.h"):format(folder, i)] = ("void f%d(void);\n"):format(i)
    files[("%s/a%d.c"):format(folder, i)] =
      ('#include "%s/a%d.h"\n#include "%s/a%d.h"\nvoid f%d(void) {}\n')
        :format(from, i, from, i % count + 1, i)
  end
  return files
end

-- Sources that define f1 .. fN, and a header with a text.
local function header(path, count, text)
  local files = { [path] = text }
  for i = 1, count do
    files[("engine/exec/s%d.c"):format(i)] = ("void f%d(void);\nvoid f%d(void) {}\n"):format(i, i)
  end
  return files
end

-- A header with a struct, and a source that includes it.
local function struct(text)
  return {
    ["engine/exec/s.h"] = text, ["engine/exec/s.c"] = '#include "exec/s.h"\nint f;\n',
  }
end

-- A number of fields; {} is replaced by the number of each.
local function fields(count, form)
  local list = {}
  for i = 1, count do list[i] = form:gsub("{}", tostring(i)) end
  return table.concat(list, " ")
end

-- Sources without content.
local function sources(list)
  local files = {}
  for path in list:gmatch("%S+") do files[path] = "int v;\n" end
  return files
end

local ONE = { ["engine/exec/one.c"] = "int v;\n" }
local DECLARED = "void f1(void);\nvoid f2(void);\nvoid f3(void);\n"

-- name, files (path -> text), what the report must contain (false: no problem)
local cases = {
  { "four files", ring("engine/exec", 4), false },
  {
    "five files", ring("engine/exec", 5),
    "engine/exec/a1: 5 files reach each other by their headers, at most 4 may: move",
  },
  {
    "five files name what ties them", ring("engine/exec", 5),
    "engine/exec/a5 needs engine/exec/a1 (includes exec/a1.h)",
  },
  {
    "five files of the bindings", ring("bindings", 5), "bindings/a1: 5 files",
  },
  {
    "headers beside their files", both(ring("engine/exec", 4), {
      ["engine/exec/a4.c"] = '#include "a5.h"\nvoid f4(void) {}\n',
      ["engine/exec/a5.c"] = '#include "a1.h"\nvoid f5(void);\nvoid f5(void) {}\n',
      ["engine/exec/a5.h"] = "\n",
    }), "engine/exec/a1: 5 files",
  },
  {
    "headers that include", {
      ["engine/exec/a.c"] = '#include "exec/b.h"\nint a;\n', ["engine/exec/a.h"] = "\n",
      ["engine/exec/b.h"] = '#include "exec/c.h"\n', ["engine/exec/b.c"] = "int b;\n",
      ["engine/exec/c.h"] = '#include "exec/d.h"\n', ["engine/exec/c.c"] = "int c;\n",
      ["engine/exec/d.h"] = '#include "exec/e.h"\n', ["engine/exec/d.c"] = "int d;\n",
      ["engine/exec/e.h"] = "\n", ["engine/exec/e.c"] = '#include "exec/a.h"\nint e;\n',
    }, "engine/exec/a: 5 files",
  },
  {
    "a header that declares what another source defines", both(ring("engine/exec", 4), {
      ["engine/exec/a4.c"] = '#include "exec/a4.h"\nvoid f4(void) {}\n',
      ["engine/exec/a4.h"] = "void f4(void);\nvoid f5(void);\n",
      ["engine/exec/a5.c"] = '#include "exec/a1.h"\nvoid f5(void);\nvoid f5(void) {}\n',
    }), "engine/exec/a4 needs engine/exec/a5 (declares f5)",
  },
  {
    "what the compiler does not read", both(ring("engine/exec", 5), {
      ["engine/exec/a5.c"] = '#if 0\n#include "exec/a1.h"\n#endif\nvoid f5(void);\n\z
        void f5(void) {}\n',
    }), false,
  },
  {
    "a public header", {
      ["engine/include/moonshard/exec.h"] = "void f1(void); void f2(void); void f3(void);\n",
      ["engine/exec/a1.c"] = "#include <moonshard/exec.h>\nvoid f1(void) {}\n",
      ["engine/exec/a2.c"] = "#include <moonshard/exec.h>\nvoid f2(void) {}\n",
      ["engine/exec/a3.c"] = "#include <moonshard/exec.h>\nvoid f3(void) {}\n",
    }, false,
  },
  { "the known knot", ring("engine/exec/cuda", 15), false },
  { "the known knot grows", ring("engine/exec/cuda", 16), "16 files reach each other" },
  {
    "the known knot grows into another folder", both(ring("engine/exec/cuda", 14), {
      ["engine/exec/cuda/a14.c"] = '#include "exec/cuda/a14.h"\n#include "exec/other.h"\n\z
        void f14(void) {}\n',
      ["engine/exec/other.h"] = "\n",
      ["engine/exec/other.c"] = '#include "exec/cuda/a1.h"\nint v;\n',
    }), "15 files reach each other by their headers, at most 4 may",
  },
  { "tests do as they like", both(ring("tests/unit", 9), ONE), false },

  { "a header of two sources", header("engine/exec/h.h", 2, DECLARED), false },
  {
    "a header of three sources", header("engine/exec/h.h", 3, DECLARED),
    "engine/exec/h.h: declares functions of 3 sources, at most 2 may be: give each source a header",
  },
  {
    "a header that declares by a macro",
    header("engine/exec/h.h", 3, "#define F(n) int *f##n(void (*)(int));\nF(1) F(2)\nF(3)\n"),
    "engine/exec/h.h: declares functions of 3 sources",
  },
  {
    "a header that a comment describes",
    header("engine/exec/h.h", 3, "/* void f1(void);\n" .. DECLARED .. " */\n"), false,
  },
  { "the known header", header("engine/exec/cuda/task.h", 3, DECLARED), false },
  {
    "the known header grows",
    header("engine/exec/cuda/task.h", 4, DECLARED .. "void f4(void);\n"), "at most 3 may be",
  },

  { "40 fields", struct("struct s { " .. fields(40, "int a{};") .. " };\n"), false },
  {
    "41 fields", struct("/* A comment. */\ntypedef struct s { "
      .. fields(20, "int a{}, b{};") .. " char c[9]; } s;\n"),
    "engine/exec/s.h:2: s has 41 fields, at most 40 may be: what changes together",
  },
  {
    "a struct without a name", struct("typedef struct { " .. fields(41, "int a{};") .. " } t;\n"),
    "engine/exec/s.h:1: t has 41 fields",
  },
  {
    "fields that a macro makes", struct("#define F(n) int a##n; int b##n; int c##n;\n"
      .. "struct s { " .. fields(14, "F({})") .. " };\n"), "engine/exec/s.h:2: s has 42 fields",
  },
  {
    "structs in a struct", struct("struct s { "
      .. fields(20, "struct { int a, b, c; } a{}; union { int x{}; float y{}; };") .. " };\n"),
    false,
  },
  { "8 bools", struct("struct s { _Bool " .. fields(7, "a{},") .. " h; };\n"), false },
  {
    "9 bools", struct("#include <stdbool.h>\ntypedef const bool flag;\n"
      .. "struct s { bool a, b : 1, c[2]; _Atomic bool d; flag e; _Bool f, g, h, i; int j; };\n"),
    "engine/exec/s.h:3: s has 9 bools, at most 8 may be: states that exclude each other",
  },
  {
    "pointers to bools", struct("struct s { _Bool " .. fields(9, "*a{},") .. " b; };\n"), false,
  },
  {
    "structs of public headers", {
      ["engine/include/moonshard/exec.h"] = "struct s { " .. fields(41, "int a{};") .. " };\n",
      ["engine/exec/s.c"] = "#include <moonshard/exec.h>\nint f;\n",
    }, false,
  },
  {
    "a table of functions", struct("typedef struct ms_cuda { "
      .. fields(50, "int (*f{})(int);") .. " int gpus; } ms_cuda;\n"), false,
  },
  {
    "another table of functions", struct("struct s { " .. fields(41, "int (*f{})(int);")
      .. " };\n"), "s has 41 fields",
  },
  {
    "one name in two folders", {
      ["engine/exec/s.h"] = "typedef struct t { int a; } t;\n",
      ["engine/grad/s.h"] = "typedef struct t { float b; } t;\n", ["engine/exec/s.c"] = "int f;\n",
    }, false,
  },
  {
    "a header that needs another one first",
    both({ ["engine/exec/a.h"] = "t f(void);\n", ["engine/exec/b.h"] = "typedef int t;\n" }, ONE),
    "engine/exec: its headers do not compile together as C",
  },
  {
    "a header in C++", both({ ["engine/ops/cuda/device.h"] = "template <class T>\n" }, ONE), false,
  },

  {
    "names for backends",
    sources "engine/ops/a.c engine/ops/cpu/a.c engine/ops/cpu/isa/a.c engine/ops/cuda/a.c", false,
  },
  {
    "names for backends in the middle",
    sources "engine/comm/control/shm/a.c engine/comm/control/cluster/a.c", false,
  },
  { "a name for a binding", sources "engine/ops/a.c bindings/a.c", false },
  {
    "a name for the program", sources "engine/ops/a.c bindings/program/a.c",
    "a.c: bindings/program/a.c and engine/ops/a.c have one name",
  },
  {
    "a name in two layers", sources "engine/ops/a.c engine/text/a.c",
    "a.c: engine/ops/a.c and engine/text/a.c have one name: rename one, or list",
  },
  {
    "a name in two folders of a layer", sources "engine/comm/control/shm/a.c engine/comm/job/a.c",
    "engine/comm/control/shm/a.c and engine/comm/job/a.c have one name",
  },
  {
    "a binding of two subjects", sources "engine/ops/a.c engine/text/a.c bindings/a.c",
    "a.c: engine/ops/a.c and engine/text/a.c have one name",
  },
  { "a known name", sources "engine/ddp/pass.c engine/fsdp/pass.c", false },
  {
    "a known name in a third folder",
    sources "engine/ddp/pass.c engine/fsdp/pass.c engine/io/pass.c",
    "pass.c: engine/ddp/pass.c and engine/fsdp/pass.c and engine/io/pass.c have one name",
  },

  { "nothing built", {}, "no objects" },
}

local function write(path, text)
  local file = assert(io.open(path, "w"))
  file:write(text)
  file:close()
end

-- Writes a case's files, and compiles its sources as CMake's builds do.
local function build(root, files)
  local flags = ("-I%s/engine/include -I%s/engine -I%s"):format(root, root, root)
  local rule = ("'%s' %s -MD -MF %%s.d -o %%s -c %%s"):format(cc, flags)
  local ninjas = { ("rule cc\n  command = %s\n  depfile = $out.d\n  deps = gcc\n")
    :format(rule:format("$out", "$out", "$in")) }
  local commands, made = {}, {}
  for path, text in pairs(files) do
    local source = ("%s/%s"):format(root, path)
    made[#made + 1] = ("'%s'"):format(source:match("^(.*)/"))
    if path:find("%.c$") then
      local object = path:gsub("([^/]*)$", "CMakeFiles/target.dir/%1.o")
      ninjas[#ninjas + 1] = ("build %s: cc %s\n"):format(object, source)
      commands[#commands + 1] = ('{ "command": "%s", "file": "%s" }')
        :format(rule:format(object, object, source):gsub('"', '\\"'), source)
      made[#made + 1] = ("'%s/build/%s'"):format(root, object:match("^(.*)/"))
    end
  end
  run(("mkdir -p '%s/build' %s"):format(root, table.concat(made, " ")))
  for path, text in pairs(files) do write(("%s/%s"):format(root, path), text) end
  write(root .. "/build/build.ninja", table.concat(ninjas))
  write(root .. "/build/compile_commands.json", "[" .. table.concat(commands, ",\n") .. "]\n")
  local all = ("'%s' -C '%s/build'"):format(ninja, root)
  if ninja == "none" then
    for i, command in ipairs(commands) do
      commands[i] = command:match('"command": "(.-)", "file"')
    end
    all = ("cd '%s/build' && %s"):format(root, table.concat(commands, " && "))
  end
  if #commands > 0 then
    local output, compiled = run(all)
    assert(compiled, output)
  end
end

local folder = run("mktemp -d"):gsub("\n", "")
local failures = 0
for number, case in ipairs(cases) do
  local name, files, expected = table.unpack(case)
  local root = ("%s/%d"):format(folder, number)
  build(root, files)

  local output, passed = run(("cd '%s' && '%s' '%s' '%s/build' '%s' '%s' '%s' '%s'")
    :format(root, arg[-1], lint, root, nm, ninja, cc, objdump))
  local right = passed and output:find("\n0 problems\n", 1, true)
  if expected then
    right = not passed and output:find(expected, 1, true) and output:find("\n1 problem\n", 1, true)
  end
  if not right then
    failures = failures + 1
    print(("%s: expected %s, got:\n%s"):format(name, expected or "no problem", output))
  end
end
run(("rm -r '%s'"):format(folder))
print(("%d cases, %d failures"):format(#cases, failures))
os.exit(failures == 0)
