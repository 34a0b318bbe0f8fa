-- Shows that words.lua reports violations and nothing else: each case is a small tree and the
-- expected report.
--
--     lua5.4 tests/lint/words_test.lua

local lint = arg[0]:gsub("words_test", "words")

-- name, path, text, what the only line of the report must contain (false: no report)
local cases = {
  {
    "an old name in a comment", "engine/exec/a.c", "int a;\n/* The\n * Keeper of a node. */\n",
    "engine/exec/a.c:3: \"keeper\" is an old name: write agent",
  },
  { "after a comment", "engine/exec/a.c", "/* a */ int verdict;\n", "a.c:1: \"verdict\"" },
  { "the old name of a group of functions", "bindings/a.c", "ms_keeper_open();\n", "\"keeper\"" },
  { "in an identifier", "engine/exec/a.h", "int ms_errand_run(void);\n", "\"errand\"" },
  { "in a macro", "engine/ops/cuda/a.cu", "#define MS_PARCELS 3\n", "\"parcels\" is" },
  { "in a line comment", "bindings/a.c", "// a \\\n a detour\n", "a.c:2: \"detour\"" },
  {
    "in strings and characters", "engine/exec/a.c",
    'f("the keeper \\" mirror", \'"\', "/* poster"); /* " */ g("errand", \'\\\'\');\n', false,
  },
  { "after a string", "engine/exec/a.c", 'f("\\\\"); // aside\n', "\"aside\"" },
  { "after a quote", "engine/exec/a.c", "f('\"', '\\\\'); int anew;\n", "\"anew\"" },
  { "between digits", "engine/ops/cuda/a.cu", "int a = 1'000; // stands\n", "\"stands\"" },
  { "longer words", "engine/exec/a.c", "/* standalone, bookkeeper, belief, outlies */\n", false },
  {
    "stand-ins", "engine/exec/a.c", "/* A stand-in, stand-ins. */ int ms_stand_in, STAND_INS;\n",
    false,
  },
  { "what stands in", "engine/exec/a.c", "/* It stands in for a. */\n", "\"stands\"" },
  { "what stands inside", "engine/exec/a.c", "int stand_inside;\n", "\"stand\"" },
  { "it lies", "lua/moonshard/a.lua", "-- It lies there.\n", "\"lies\" has a plainer word: write" },
  { "twice in a line", "lua/moonshard/a.lua", "lies = lies\n", "\"lies\" has" },

  { "a lane", "engine/comm/a.c", "int lanes;\n", "write channel" },
  { "a lane of a vector", "engine/comm/cpu/isa/a.c", "int lanes = MS_LANES;\n", false },
  { "a letter beside vectors", "engine/comm/cpu/a.c", "int letter;\n", "\"letter\"" },
  { "letters elsewhere", "engine/text/a.c", "int letter, lanes;\n", false },
  {
    "letters of a node's name", "engine/comm/job/node_list.c", "bool is_letter; // Letters\n",
    false,
  },

  { "an old identifier", "engine/comm/a.c", "x = host_of(y);\n", "a.c:1: \"host_of\" is an old" },
  { "a longer identifier", "engine/comm/a.c", "x = ms_host_of_place(y);\n", false },
  { "an old field", "bindings/a.c", "x->between_hosts_bytes = 0;\n", "\"between_hosts_bytes\"" },
  { "a field in Lua", "bindings/a.c", 'set(L, "between_hosts_bytes", "by_hosts");\n', false },
  { "in Lua itself", "lua/moonshard/a.lua", "local by_hosts = 1\n", false },
  {
    "a known comment", "bindings/group.c", "/* { wire_bytes, between_hosts_bytes } */\n", false,
  },

  { "in a comment of Lua", "lua/moonshard/a.lua", "local a = 1 -- a mirror\n", "\"mirror\"" },
  {
    "in a long comment", "recipes/a.lua", "--[==[ a\n]] a\nverdict ]==]\n",
    "a.lua:3: \"verdict\"",
  },
  {
    "in strings of Lua", "lua/moonshard/a.lua",
    "f(\"keeper \\\" poster\", 'aside \\\\', [[ anew\n\"]], [=[ ]] mirror ]=])\nf \"\\z\n lies\"\n",
    false,
  },
  { "after a long string", "lua/moonshard/a.lua", "f([[ -- ]]) local stand\n", "\"stand\"" },
  { "after an index", "lua/moonshard/a.lua", "local a = b[c[1]] -- anew\n", "\"anew\"" },
  { "a minus", "lua/moonshard/a.lua", "local a = b - c -d --e \" keeper\n", "\"keeper\"" },
  { "a known name of Lua", "lua/moonshard/train/history.lua", "local aside = 1\n", false },
  { "another word there", "lua/moonshard/train/history.lua", "local anew = 1\n", "\"anew\"" },

  { "a page", "engine/exec/README.md", "# A\n\nIts `keeper`.\n", "README.md:3: \"keeper\"" },
  { "a page of tests", "tests/README.md", "An errand.\n", "\"errand\"" },
  { "a page for users", "recipes/launch/README.md", "Keepers: a keeper.\n", false },
  { "tests", "tests/unit/a.c", "/* A keeper. */\n", "has no files to read" },
}

local trees = {}
for i, case in ipairs(cases) do
  local name, path, text, expected = table.unpack(case)
  trees[i] = { name, { [path] = text }, expected }
end
dofile((arg[0]:gsub("[^/]*$", "cases.lua")))(lint, trees)
