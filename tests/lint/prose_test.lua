-- Shows that prose.lua reports prose that is written twice and nothing else: each case is a small
-- tree and the expected report; and, in a copy of this library's Lua, prose above functions that
-- get their public names in different ways.
--
--     lua5.4 tests/lint/prose_test.lua

local lint = arg[0]:gsub("prose_test", "prose")
local library = arg[0]:gsub("[^/]*$", "../../lua/moonshard")

local META = [[
---@meta moonshard
---@class ms
---@field steps fun(count: integer): fun(): integer?
---@field size integer

---@class ms.Base
---@field name fun(self): string

---@class ms.Thing: ms.Base
--- What it does.
---@field step fun(self, how?: string)

---@class ms.optim
---@field sgd fun(lr: number): ms.Thing
---@field cosine fun(step: integer): number

---@type ms
local ms
return ms
]]

local THING = "-- a\n---@class ms.Thing\nlocal Thing = {}\n\n"
local BASE = "-- a\n---@class ms.Base\nlocal Base = {}\n\n"
local KINDS = "-- o\nlocal kinds = require \"moonshard.optim.kinds\"\n\n\z
  ---@class ms.optim\nlocal optim = {}\n"

-- name, files below lua/moonshard (path -> text), what the only line of the report must contain
-- (false: no report)
local cases = {
  {
    "types alone", { ["a.lua"] = THING
      .. "---@param how? string\nfunction Thing:step(how) end\n" }, false,
  },
  {
    "a comment about how it works", { ["a.lua"] = THING
      .. "-- By a table.\n---@param how? string\nfunction Thing:step(how) end\n" }, false,
  },
  {
    "a method", { ["a.lua"] = THING
      .. "--- Steps.\n---@param how? string\nfunction Thing:step(how) end\n" },
    "lua/moonshard/a.lua:5: ms.Thing.step is described in lua/moonshard/meta.lua",
  },
  {
    "prose after a type", { ["a.lua"] = THING
      .. "---@param how? string a way\n--- and more of it\nfunction Thing:step(how) end\n" },
    "a.lua:6: ms.Thing.step",
  },
  {
    "a method of a base", { ["a.lua"] = "-- a\n---@class ms.Thing: ms.Base\nlocal Thing = {}\n\n"
      .. "--- As a base's.\nfunction Thing:name() end\n" }, "a.lua:5: ms.Base.name",
  },
  {
    "a method that a derived class describes",
    { ["a.lua"] = BASE .. "--- Steps.\nfunction Base:step() end\n" },
    "a.lua:5: ms.Thing.step",
  },
  {
    "a method of a class of one file only",
    { ["a.lua"] = "-- a\n---@class ms.Own: ms.Thing\nlocal Own = {}\n\n--- Steps.\n"
      .. "function Own:step() end\n" }, "a.lua:5: ms.Thing.step",
  },
  {
    "what is not described", { ["a.lua"] = THING
      .. "--- For loops.\nfunction Thing:_step() end\n\n--- Also.\nlocal function step() end\n" },
    false,
  },
  {
    "another table",
    { ["a.lua"] = "-- a\nlocal Thing = {}\n\n--- Steps.\nfunction Thing:step() end\n" },
    false,
  },
  {
    "a row of dashes", { ["a.lua"] = "-- a\n---@class ms.Thing\nlocal Thing = {}\n"
      .. "-------------- steps\nfunction Thing:step() end\n" }, false,
  },
  {
    "prose of something else above", { ["a.lua"] = THING
      .. "--- A number.\nlocal number = 3\nfunction Thing:step() return number end\n" }, false,
  },
  {
    "the name of the main module", {
      ["init.lua"] = "-- ms\nlocal names = {\n  steps = \"moonshard.loop\",\n}\nreturn names\n",
      ["loop.lua"] = "-- loop\nlocal loop = {}\n\n--- Steps.\nfunction loop.steps(n) end\n\n"
        .. "--- Own.\nfunction loop.step(n) end\n\nreturn loop\n",
    }, "loop.lua:4: ms.steps",
  },
  {
    "the name of the main module, in a constructor", {
      ["init.lua"] = "-- ms\nlocal names = { steps = \"moonshard.loop\" }\nreturn names\n",
      ["loop.lua"] = "-- loop\n--- Steps.\nlocal function run(n) end\n\n"
        .. "return { steps = run, other = 3 }\n",
    }, "loop.lua:2: ms.steps",
  },
  {
    "a module of the class's name",
    { ["optim.lua"] = "-- o\nlocal optim = {}\n\n--- It.\nfunction optim.sgd(lr) end\n\n"
      .. "return closed(optim, \"ms.optim\")\n" }, "optim.lua:4: ms.optim.sgd",
  },
  {
    "a name that an assignment gives", {
      ["optim/init.lua"] = KINDS .. "optim.size, optim.sgd = 3, kinds.new\nreturn optim\n",
      ["optim/kinds.lua"] = "-- k\nlocal kinds = {}\n\n--- Makes it.\n"
        .. "function kinds.new(lr) end\n\n--- Own.\nfunction kinds.sgd(lr) end\n\n"
        .. "return kinds\n",
    }, "kinds.lua:4: ms.optim.sgd",
  },
  {
    "a name that an assignment gives, over two files", {
      ["optim/init.lua"] = "-- o\nlocal kinds = require \"moonshard.optim.kinds\"\n\n"
        .. "---@class ms.optim\nlocal optim = { sgd = kinds.new }\nreturn optim\n",
      ["optim/kinds.lua"] = "-- k\nlocal sgd = require \"moonshard.optim.sgd\"\n"
        .. "return { new = sgd }\n",
      ["optim/sgd.lua"] = "-- s\n\n--- Makes it.\nreturn function(lr) end\n",
    }, "sgd.lua:3: ms.optim.sgd",
  },
  {
    "a function that passes its arguments on", {
      ["optim/init.lua"] = KINDS .. "function optim.sgd(lr) return kinds.new(lr) end\n"
        .. "function optim.cosine(step) return kinds.other(step, 2) end\nreturn optim\n",
      ["optim/kinds.lua"] = "-- k\nlocal kinds = {}\n\n--- Makes it.\n"
        .. "function kinds.new(lr) end\n\n--- Own.\nfunction kinds.other(step, by) end\n\n"
        .. "return kinds\n",
    }, "kinds.lua:4: ms.optim.sgd",
  },
  {
    "a table that is copied", {
      ["optim/init.lua"] = "-- o\nlocal schedules = require \"moonshard.optim.schedules\"\n\n"
        .. "---@class ms.optim\nlocal optim = {}\n"
        .. "for name, f in pairs(schedules) do optim[name] = f end\nreturn optim\n",
      ["optim/schedules.lua"] = "-- s\nlocal schedules = {}\n\n--- Falls.\n"
        .. "function schedules.cosine(step) end\n\n--- Own.\nfunction schedules.check(step) end\n\n"
        .. "return schedules\n",
    }, "schedules.lua:4: ms.optim.cosine",
  },
  {
    "a table of another file", {
      ["a.lua"] = "-- a\nlocal a = {}\n---@class ms.Thing\nlocal Thing = {}\na.base = Thing\n"
        .. "return a\n",
      ["b.lua"] = "-- b\nlocal a = require \"moonshard.a\"\nlocal Thing = a.base\n\n--- Steps.\n"
        .. "function Thing:step() end\n",
    }, "b.lua:5: ms.Thing.step",
  },
  { "no annotations", { ["meta.lua"] = "-- nothing\n" }, "has no lua/moonshard/meta.lua" },
}

-- Functions of this library, each by its file and the line that begins it.
local planted = {
  { "parallel/group.lua", "function Group:all_reduce(" },
  { "parallel/fsdp.lua", "local function wrap(" },                 -- by __call
  { "parallel/fsdp.lua", "local function roots(" },                -- in a constructor
  { "parallel/ddp.lua", "function DDP:accumulate(" },              -- of a base class
  { "parallel/future.lua", "function future.stream(" },            -- in the names of init.lua
  { "parallel/overlap/chain.lua", "function chain.then_optimizer(" },  -- over two files
  { "parallel/link_state.lua", "function State:flat(" },
  { "train/steps.lua", "function steps.steps(" },
  { "base/sorted_pairs.lua", "return function(" },
  { "base/config.lua", "function config.config(" },
  { "init.lua", "function ms.flat(" },
  { "nn/files.lua", "function Module:save(" },                     -- of a table of another file
  { "nn/module.lua", "function Tensor:full_shape(" },
  { "nn/alone.lua", "function alone.alone(" },                     -- by passing arguments on
  { "nn/layers.lua", "function Linear:init(" },                    -- a class that is copied
  { "optim/schedules.lua", "function schedules.cosine(" },
  { "optim/scaler.lua", "local function scaler(" },
  { "optim/averager.lua", "local function averager(" },
  { "optim/step.lua", "function Optimizer:step(" },
  { "hooks/init.lua", "hooks.bf16_compress = " },
  { "hooks/init.lua", "function hooks.chain(" },                   -- the module of its class
  { "scripts/texts.lua", "return function(" },
  { "trace.lua", "function trace.start(" },
}

local function run(command)
  local handle = assert(io.popen(command .. " 2>&1"))
  local output = handle:read("a")
  return output, handle:close()
end

local function read(path)
  local file = assert(io.open(path, "rb"))
  local text = file:read("a")
  file:close()
  return text
end

local function write(path, text)
  run(("mkdir -p '%s'"):format(path:match("^(.*)/")))
  local file = assert(io.open(path, "wb"))
  file:write(text)
  file:close()
end

local folder = run("mktemp -d"):gsub("\n", "")
local failures = 0
local function fail(...)
  failures = failures + 1
  print(string.format(...))
end

for number, case in ipairs(cases) do
  local name, files, expected = table.unpack(case)
  local root = ("%s/%d"):format(folder, number)
  write(root .. "/lua/moonshard/meta.lua", META)
  for path, text in pairs(files) do write(root .. "/lua/moonshard/" .. path, text) end
  local output, passed = run(("'%s' '%s' '%s'"):format(arg[-1], lint, root))
  local right = passed and output == "0 problems\n"
  if expected then
    right = not passed and output:find(expected, 1, true) and output:find("\n1 problem\n", 1, true)
  end
  if not right then fail("%s: expected %s, got:\n%s", name, expected or "no report", output) end
end

local root = folder .. "/library"
run(("mkdir -p '%s/lua' && cp -r '%s' '%s/lua'"):format(root, library, root))
for _, place in ipairs(planted) do
  local path = ("%s/lua/moonshard/%s"):format(root, place[1])
  local text = read(path)
  local at = text:find("\n" .. place[2], 1, true)
  if at then
    write(path, text:sub(1, at) .. "--- Planted.\n" .. text:sub(at + 1))
  else
    fail("%s: no line begins with '%s': name another function", place[1], place[2])
  end
end
local output, passed = run(("'%s' '%s' '%s'"):format(arg[-1], lint, root))
local found, lines = {}, 0
for path, line in output:gmatch("lua/moonshard/(%S+):(%d+): ms[^\n]*\n") do
  lines = lines + 1
  local number = 0
  for text in io.lines(("%s/lua/moonshard/%s"):format(root, path)) do
    number = number + 1
    if number == tonumber(line) + 1 then found[path .. "\n" .. text] = true end
  end
end
for _, place in ipairs(planted) do
  local key, seen = place[1] .. "\n" .. place[2], false
  for text in pairs(found) do seen = seen or text:sub(1, #key) == key end
  if not seen then fail("prose above '%s' of %s was not found", place[2], place[1]) end
end
if passed or lines ~= #planted then
  fail("%d places were planted, and the report is:\n%s", #planted, output)
end

run(("rm -r '%s'"):format(folder))
print(("%d cases, %d failures"):format(#cases + #planted, failures))
os.exit(failures == 0)
