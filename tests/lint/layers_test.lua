-- Shows that layers.lua reports violations and nothing else: each case is a small tree and the
-- expected report.
--
--     lua5.4 tests/lint/layers_test.lua

local lint = arg[0]:gsub("layers_test", "layers")

local GOOD = "/* a.c: fixture. */\n"

-- name, path, text, what the only line of the report must contain (false: no report)
local cases = {
  {
    "downward include", "engine/exec/a.c",
    GOOD .. '#include "base/os.h"\n#include "moonshard/base.h"\n', false,
  },
  { "own header", "engine/exec/a.c", GOOD .. '#include "exec/ring.h"\n#include "ring.h"\n', false },
  {
    "upward include", "engine/exec/a.c", GOOD .. '#include "tensor/op.h"\n',
    "a.c:2: exec includes \"tensor/op.h\"",
  },
  {
    "upward installed header", "engine/base/a.c", GOOD .. "#include <moonshard/exec.h>\n",
    "of exec",
  },
  { "sideways include", "engine/io/a.c", GOOD .. '#include "comm/group.h"\n', "of comm" },
  {
    "everything at once", "engine/io/a.c", GOOD .. '#include "moonshard/moonshard.h"\n',
    "not below",
  },
  {
    "bindings from the engine", "engine/fsdp/a.c", GOOD .. '#include "moonshard/moonshard_lua.h"\n',
    "of bindings",
  },
  {
    "bindings include all", "bindings/a.c",
    GOOD .. '#include <lua.h>\n#include "moonshard/moonshard.h"\n', false,
  },
  { "commented include", "engine/exec/a.c", GOOD .. '// #include "tensor/op.h"\n', false },
  { "unknown folder", "engine/helpers/a.c", GOOD, "not a layer" },
  { "path upwards", "engine/exec/a.c", GOOD .. '#include "../base/os.h"\n', "from engine/ on" },
  { "lua.h in the engine", "engine/exec/a.c", GOOD .. "#include <lua.h>\n", "<lua.h>" },
  {
    "lua.h in the installed header", "engine/include/moonshard/moonshard_lua.h",
    GOOD .. "#include <lua.h>\n", false,
  },
  { "mpi.h outside", "engine/comm/a.c", GOOD .. "#include <mpi.h>\n", "<mpi.h>" },
  { "mpi.h inside", "engine/comm/mpi/a.c", GOOD .. "#include <mpi.h>\n", false },
  { "cuda outside", "engine/exec/a.c", GOOD .. "#include <cuda_runtime.h>\n", "<cuda_runtime.h>" },
  { "nettle outside", "engine/comm/a.c", GOOD .. "#include <nettle/hmac.h>\n", "<nettle/hmac.h>" },
  { "nccl outside", "engine/comm/a.c", GOOD .. "#include <nccl.h>\n", "<nccl.h>" },
  { "oneDNN outside", "engine/grad/a.c", GOOD .. "#include <oneapi/dnnl/dnnl.h>\n", "dnnl" },

  {
    "a device's header outside", "engine/exec/a.c", GOOD .. '#include "exec/cpu/ring.h"\n',
    "a.c:2: \"exec/cpu/ring.h\" may be included only in folders called cpu",
  },
  {
    "another device's header", "engine/tensor/cuda/a.c", GOOD .. '#include "exec/cpu/ring.h"\n',
    "folders called cpu",
  },
  {
    "a device's header inside", "engine/tensor/cpu/a.c", GOOD .. '#include "exec/cpu/ring.h"\n',
    false,
  },
  {
    "a device's header in a folder below", "engine/ops/cpu/isa/a.c",
    GOOD .. '#include "ops/cpu/row.h"\n', false,
  },
  {
    "the program from the bindings", "bindings/a.c",
    GOOD .. '#include "bindings/program/a.h"\n', "of program",
  },

  {
    "malloc", "engine/exec/a.c", GOOD .. "void f(void)\n{\n  g(malloc (3));\n}\n",
    "a.c:4: malloc()",
  },
  {
    "malloc in bindings", "bindings/a.c", GOOD .. "void *f(void) { return malloc(3); }\n",
    "malloc()",
  },
  {
    "malloc in the table", "engine/base/os_posix.c",
    GOOD .. "void *f(void) { return malloc(3); }\n", false,
  },
  {
    "a member called free", "engine/exec/a.c",
    GOOD .. "void f(void) { os->free(p); table.open(q); }\n", false,
  },
  {
    "a longer name", "engine/exec/a.c",
    GOOD .. "void f(void) { ms_free(p); freely(q); snprintf(b, 1, c); }\n", false,
  },
  {
    "in comment and string", "engine/exec/a.c",
    GOOD .. '/* free(p) */\nvoid f(void) { g("abort(\\")"); } // fork()\n', false,
  },
  { "exec family", "engine/exec/a.c", GOOD .. "void f(void) { execvp(a, b); }\n", "execvp()" },
  { "printing", "engine/exec/a.c", GOOD .. 'void f(void) { printf("x"); }\n', "printf()" },
  { "abort", "engine/exec/a.c", GOOD .. "void f(void) { abort(); }\n", "abort()" },

  { "a global", "engine/exec/a.c", GOOD .. "\nstatic int counter;\n", "a.c:3: \"counter\"" },
  { "a global with a value", "engine/exec/a.c", GOOD .. "int counter = 3;\n", "\"counter\"" },
  {
    "a global array", "engine/exec/a.c", GOOD .. "static struct slot slots[3] = { { 0 } };\n",
    "\"slots\"",
  },
  {
    "a writable pointer to constants", "engine/exec/a.c", GOOD .. "static const char *name = 0;\n",
    "\"name\"",
  },
  {
    "a global function pointer", "engine/exec/a.c", GOOD .. "static void (*handler)(int);\n",
    "\"handler\"",
  },
  {
    "a static in a function", "engine/exec/a.c",
    GOOD .. "int f(void)\n{\n    static int n = 0;\n    return ++n;\n}\n", "static variable",
  },
  { "an atomic", "engine/exec/a.c", GOOD .. "static _Atomic int n;\n", "\"n\"" },
  {
    "after a function", "engine/exec/a.c", GOOD .. "int f(void) { return 1; }\nstatic int n;\n",
    "a.c:3: \"n\"",
  },
  {
    "constants",
    "engine/exec/a.c",
    GOOD .. "static const int a[] = { 1, 2 };\nstatic const char *const b[] = { \"x;{\" };\n"
      .. "static const struct ops c = { .f = g };\nstatic int (*const d[])(void) = { e };\n",
    false,
  },
  {
    "types and prototypes",
    "engine/exec/a.c",
    GOOD .. "struct s { int a; };\nenum { A, B };\ntypedef int t;\nunion u;\n"
      .. "typedef struct { int a; } r;\nstatic int f(struct s *p);\n\z
        extern int g(void (*h)(int));\n_Static_assert(sizeof(int) == 4, \"\");\n" .. "static int \z
        f(struct s *p)\n{\n    static const int k = 1;\n    for (;;) { p->a = k; }\n}\n",
    false,
  },
  {
    "macros", "engine/exec/a.c",
    GOOD .. "#define X(a) \\\n  static int a; {\nstatic int f(void) { return 1; }\n", false,
  },

  {
    "a require at the top", "lua/moonshard/nn/a.lua",
    "-- a: fixture.\nlocal core = require \"moonshard.core\"\nrequire \"moonshard.nn.b\"\n", false,
  },
  {
    "a require in a function", "lua/moonshard/nn/a.lua",
    "-- a: fixture.\nreturn function()\n  local b = require \"moonshard.nn.b\"\nend\n",
    "a.lua:3: a require stands at the top",
  },
  {
    "a require in an expression", "lua/moonshard/nn/a.lua",
    "-- a: fixture.\nreturn { f = function() require(\"moonshard.nn.b\").f() end }\n", "a.lua:2:",
  },
  {
    "a part that is loaded at its first use", "lua/moonshard/init.lua",
    "-- init: fixture.\nreturn function() return require \"moonshard.nn\" end\n", false,
  },

  { "no first line", "engine/exec/a.c", "int f(void);\n", "first line" },
  { "an empty file", "lua/moonshard/a.lua", "", "first line" },
  { "first line of Lua", "lua/moonshard/a.lua", "-- a: fixture.\nreturn 1\n", false },
  {
    "first line after #!", "lua/moonshard/a.lua", "#!/usr/bin/lua\n-- a: fixture.\nreturn 1\n",
    false,
  },
  { "unfinished", "lua/moonshard/a.lua", "-- a: fixture.\n-- TO" .. "DO: more\n", "finish it" },

  {
    "baked-in machine", "CMakeLists.txt", "# fixture\nadd_compile_options(-march=native)\n",
    "CMakeLists.txt:2: -march=native",
  },
  { "loose arithmetic", "engine/cmake/a.cmake", "# fixture\nset(f -ffast-math)\n", "-ffast-math" },
  { "flags in a comment", "CMakeLists.txt", "# never -march=native\n", false },
}

local trees = {}
for i, case in ipairs(cases) do
  local name, path, text, expected = table.unpack(case)
  trees[i] = { name, { [path] = text }, expected }
end
dofile((arg[0]:gsub("[^/]*$", "cases.lua")))(lint, trees)
