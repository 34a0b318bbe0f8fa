-- Shows that symbols.lua reports violations and nothing else: each case is a small build tree of
-- compiled objects, and the expected report.
--
--     lua5.4 tests/lint/symbols_test.lua CC NM

local function run(command)
  local handle = assert(io.popen(command .. " 2>&1"))
  local output = handle:read("a")
  return output, handle:close()
end

local lint = run("realpath '" .. arg[0] .. "'"):gsub("symbols_test.lua\n", "symbols.lua")
local cc, nm = arg[1] or "cc", arg[2] or "nm"

-- The files a1 .. aN of a folder, of which each calls the next, and the last one the first.
local function ring(folder, count)
  local files = {}
  for i = 1, count do
    files[("%s/a%d"):format(folder, i)] =
      ("void f%d(void); void f%d(void) { f%d(); }"):format(i, i, i % count + 1)
  end
  return files
end

-- Merges file lists.
local function both(a, b)
  for file, text in pairs(b) do a[file] = text end
  return a
end

local CALL = "void f(void); void g(void); void g(void) { f(); }"
local DEFINE = "void f(void); void f(void) {}"

-- name, files (path without .c.o -> C text), what the report must contain (false: no problem)
local cases = {
  { "downwards", { ["engine/ddp/a"] = CALL, ["engine/hook/b"] = DEFINE }, false },
  {
    "upwards", { ["engine/hook/a"] = CALL, ["engine/ddp/b"] = DEFINE },
    "engine/hook/a.c uses f of engine/ddp/b.c: ddp is not below hook",
  },
  {
    "sideways", { ["engine/io/a"] = CALL, ["engine/comm/b"] = DEFINE },
    "comm is not below io",
  },
  {
    "upwards through a table of functions",
    { ["engine/exec/a"] = "void f(void); void (*const t[])(void) = { f };",
      ["engine/tensor/cpu/b"] = DEFINE },
    "tensor is not below exec",
  },
  {
    "the bindings do not need the program",
    { ["bindings/a"] = CALL, ["bindings/program/b"] = DEFINE },
    "program is not below bindings",
  },
  { "four files", ring("engine/exec", 4), false },
  { "five files", ring("engine/exec", 5), "exec: 5 files reach each other, at most 4 may" },
  {
    "five files name what ties them", ring("engine/exec", 5),
    "engine/exec/a5.c uses engine/exec/a1.c (f1)",
  },
  {
    "five files of two folders", both(ring("engine/tensor", 3), {
      ["engine/tensor/cpu/b"] = "void b(void); void f1(void); void b(void) { f1(); }",
      ["engine/tensor/cpu/c"] = "void c(void); void b(void); void c(void) { b(); }",
      ["engine/tensor/a3"] =
        "void f3(void); void f1(void); void c(void); void f3(void) { f1(); c(); }",
    }), "tensor: 5 files",
  },
  {
    "tests do as they like", both(ring("tests/unit", 9), { ["engine/exec/a"] = DEFINE }),
    false,
  },
  {
    "an object of a source that is gone",
    { ["engine/exec/a"] = CALL, ["engine/tensor/gone"] = DEFINE }, false,
  },
  { "nothing built", {}, "no object files" },
}

local function write(path, text)
  local file = assert(io.open(path, "w"))
  file:write(text)
  file:close()
end

-- Writes a case's files, as sources of the tree, and compiles them to where CMake puts the objects
-- of a layer's target.
local function build(root, files)
  for path, text in pairs(files) do
    local layer, rest = path:match("^(%w+/%w+)/(.*)$")
    if not layer then layer, rest = path:match("^(%w+)/(.*)$") end
    local object = ("%s/%s/CMakeFiles/target.dir/%s.c.o"):format(root, layer, rest)
    local source = ("%s/%s.c"):format(root, path)
    run(("mkdir -p '%s' '%s'"):format(object:match("^(.*)/"), source:match("^(.*)/")))
    write(source, text .. "\n")
    local output, compiled = run(("'%s' -c '%s' -o '%s'"):format(cc, source, object))
    assert(compiled, output)
    if path:find("/gone$") then os.remove(source) end
  end
end

local folder = run("mktemp -d"):gsub("\n", "")
local failures = 0
for number, case in ipairs(cases) do
  local name, files, expected = table.unpack(case)
  local root = ("%s/%d"):format(folder, number)
  run(("mkdir -p '%s'"):format(root))
  build(root, files)

  local output, passed = run(("cd '%s' && '%s' '%s' '%s' '%s'"):format(root, arg[-1],
    lint, root, nm))
  local right = passed and output:find("\n0 problems\n", 1, true)
  if expected then right = not passed and output:find(expected, 1, true) end
  if not right then
    failures = failures + 1
    print(("%s: expected %s, got:\n%s"):format(name, expected or "no problem", output))
  end
end
run(("rm -r '%s'"):format(folder))
print(("%d cases, %d failures"):format(#cases, failures))
os.exit(failures == 0)
