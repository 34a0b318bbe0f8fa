-- Shows that pages.lua reports violations and nothing else: each case is a small tree and the
-- expected report.
--
--     lua5.4 tests/lint/pages_test.lua

local lint = arg[0]:gsub("pages_test", "pages")

-- A tree of empty files, with the page of engine/exec.
local function tree(paths, page)
  local files = {}
  for path in paths:gmatch("%S+") do files[path] = "\n" end
  files["engine/exec/README.md"] = page
  return files
end

-- A page with a list of files.
local function page(list)
  return "# A\n\nText.\n\n## Files\n\n" .. list .. "\n## Rules\n\n- One.\n"
end

local A = "engine/exec/a.c engine/exec/a.h"
local LINK = "- [a.c](a.c): it.\n"

-- name, files (path -> text), what the only line of the report must contain (false: no report)
local cases = {
  { "a page", tree(A, page(LINK)), false },
  {
    "a page at its end",
    tree(A .. " engine/exec/b.h engine/exec/c.cu engine/exec/c.h engine/exec/d.c engine/exec/d.cu",
      "# A\n\n## Files\n\n" .. LINK .. "- [b.h](b.h), [c.cu](c.cu): two.\n- [d.c](d.c): d.\n"),
    false,
  },
  {
    "a source is missing", tree(A .. " engine/exec/b.c", page(LINK)),
    "engine/exec/README.md: b.c is not listed: add a line",
  },
  { "a source of C++", tree(A .. " engine/exec/b.cpp", page(LINK)), "b.cpp is not listed" },
  { "a kernel is missing", tree(A .. " engine/exec/b.cu", page(LINK)), "b.cu is not listed" },
  {
    "a kernel beside its source", tree("engine/exec/a.c engine/exec/a.cu",
      page(LINK .. "- [a.cu](a.cu): its kernels.\n")), false,
  },
  {
    "a header is missing", tree(A .. " engine/exec/b.h", page(LINK)), "b.h is not listed",
  },
  {
    "a header with a source", tree(A, page(LINK .. "- [a.h](a.h): its header.\n")),
    "a.h is listed: the source of its name is enough",
  },
  { "twice", tree(A, page(LINK .. LINK)), "a.c is listed 2 times: leave one" },
  {
    "in the other sections", tree(A, "[a.c](a.c), [a.h](a.h)\n" .. page(LINK) .. "[a.c](a.c)\n"),
    false,
  },
  { "only in another section", tree(A, page("") .. LINK), "a.c is not listed" },
  { "in code", tree(A, page("- `[a.c](a.c)`\n```\n" .. LINK .. "```\n")), "a.c is not listed" },
  {
    "what is not there", tree(A, page(LINK .. "- [b.c](b.c): gone.\n")),
    "engine/exec/README.md: the link to b.c leads nowhere: correct it",
  },
  {
    "another file", tree(A .. " engine/exec/CMakeLists.txt",
      page(LINK .. "- [CMakeLists.txt](CMakeLists.txt): it.\n")),
    "CMakeLists.txt is listed: it is no source",
  },
  {
    "a list of Lua", {
      ["lua/moonshard/nn/README.md"] = page("- [a.lua](a.lua): it.\n"),
      ["lua/moonshard/nn/a.lua"] = "\n", ["lua/moonshard/nn/b.lua"] = "\n",
    }, "lua/moonshard/nn/README.md: b.lua is not listed",
  },
  { "no list", tree(A, "# A\n\n" .. LINK), "there is no section \"## Files\"" },
  {
    "a folder is missing", tree(A .. " engine/exec/cpu/b.c", page(LINK)),
    "engine/exec/README.md: cpu/ is not listed",
  },
  {
    "folders", tree(A .. " engine/exec/cpu/b.c engine/exec/sim/b.c",
      page(LINK .. "- [cpu/](cpu/), [sim](sim/README.md): [cpu/](cpu/) is one.\n")),
    "the link to sim/README.md leads nowhere",
  },

  {
    "links", tree(A .. " engine/hook/b.c tests/lint/a.lua", page(LINK)
      .. "[b](../hook/b.c#here) [c](../hook/) [d](https://a.org/b) [e](#files) [f](./a.c 'f')\n\z
        [g](../../tests/lint/a.lua)"), false,
  },
  { "a broken link", tree(A, page(LINK) .. "[b](../hook/b.c)\n"), "../hook/b.c leads nowhere" },
  {
    "a broken link of the map", {
      ["engine/README.md"] = "[a](exec/README.md)\n", ["engine/exec/a.c"] = "\n",
    }, "engine/README.md: the link to exec/README.md leads nowhere",
  },

  { "600 words", tree(A, page(LINK .. ("word "):rep(588))), false },
  {
    "601 words", tree(A, page(LINK .. ("word "):rep(589))),
    "engine/exec/README.md: 601 words, at most 600 may be",
  },
  { "1200 words of the map", { ["engine/README.md"] = ("word\n"):rep(1200) }, false },
  {
    "1201 words of the map", { ["engine/README.md"] = ("word\n"):rep(1201) },
    "engine/README.md: 1201 words, at most 1200 may be",
  },
  {
    "40 words of a cell",
    tree(A, page(LINK) .. "\n| a | b |\n|---|---|\n| " .. ("b "):rep(39) .. "\\| | "
      .. ("b "):rep(40) .. "|\n"), false,
  },
  {
    "41 words of a cell", tree(A, "\n| a | " .. ("b "):rep(41) .. "|\n" .. page(LINK)),
    "engine/exec/README.md:2: a cell of 41 words, at most 40 may be",
  },

  { "seven files", tree("engine/io/1 engine/io/2 engine/io/3 engine/io/4 engine/io/5 engine/io/6 \z
      engine/io/7 engine/io/CMakeLists.txt"), false },
  {
    "eight files", tree("bindings/1 bindings/2 bindings/3 bindings/4 bindings/5 bindings/6 \z
      bindings/7 bindings/8"), "bindings: 8 files and no README.md: write one",
  },
  {
    "the build's files", tree("engine/cmake/1 engine/cmake/2 engine/cmake/3 engine/cmake/4 \z
      engine/cmake/5 engine/cmake/6 engine/cmake/7 engine/cmake/8"), false,
  },
  { "other folders", { ["tests/README.md"] = "[a](b)\n" }, "has no engine/" },
}

dofile((arg[0]:gsub("[^/]*$", "cases.lua")))(lint, cases)
