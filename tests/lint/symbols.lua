-- Reads the symbols of a build's object files and reports references that point to a higher layer,
-- and knots: files of one layer that all reach each other.
--
--     lua5.4 tests/lint/symbols.lua BUILD [NM]
--
-- It runs in the source folder: objects whose source is gone are left over from earlier builds.
--
-- Includes alone do not show these: a header of a lower layer can declare a function that a higher
-- layer defines. A knot is cut by moving code to the file that it belongs to, not by a function
-- pointer that has a single target.

local ranks = dofile((arg[0]:gsub("[^/]*$", "ranks.lua")))
local knots = dofile((arg[0]:gsub("[^/]*$", "knots.lua")))
local build, nm = arg[1], arg[2] or "nm"

-- Files of one layer that may reach each other.
local MOST = 4

-- The source file of an object: the part of the path that CMake inserts is cut out. One source
-- compiled for several instruction sets is one file.
local function source_of(object)
  return object:sub(#build + 2):gsub("CMakeFiles/[^/]+%.dir/", ""):gsub("%.o$", "")
end

local is_source = {}
local function exists(file)
  if is_source[file] == nil then
    local handle = io.open(file)
    is_source[file] = handle ~= nil
    if handle then handle:close() end
  end
  return is_source[file]
end

-- Reads all objects: file -> list of undefined symbols, symbol -> set of files that define it.
local function read_symbols()
  local uses, definitions = {}, {}
  local command = ("find '%s' -path '%s/tests' -prune -o -name '*.c.o' -print0"
    .. " | xargs -0 '%s' -A -P"):format(build, build, nm)
  local handle = assert(io.popen(command))
  for line in handle:lines() do
    local object, name, kind = line:match("^(.*): (%S+) (%a)")
    local file = object and source_of(object)
    if file and ranks.of[ranks.layer_of(file)] and exists(file) then
      uses[file] = uses[file] or {}
      if kind == "U" then
        table.insert(uses[file], name)
      elseif kind:find("[TDRBVW]") then
        definitions[name] = definitions[name] or {}
        definitions[name][file] = true
      end
    end
  end
  handle:close()
  return uses, definitions
end

-- file -> { other file -> a symbol of it that the file uses }
local function graph_of(uses, definitions)
  local graph = {}
  for file, names in pairs(uses) do
    graph[file] = {}
    for _, name in ipairs(names) do
      for other in pairs(definitions[name] or {}) do
        if other ~= file then graph[file][other] = name end
      end
    end
  end
  return graph
end

local problems = 0
local function report(message, ...)
  problems = problems + 1
  print(message:format(...))
end

local function check_directions(graph)
  for _, file in ipairs(knots.sorted_keys(graph)) do
    for _, other in ipairs(knots.sorted_keys(graph[file])) do
      local user, used = ranks.layer_of(file), ranks.layer_of(other)
      if ranks.is_upward(user, used) then
        report("%s uses %s of %s: %s is not below %s", file, graph[file][other], other, used, user)
      end
    end
  end
end

local function check_knots(graph)
  local sizes = {}
  for _, knot in ipairs(knots.of(graph)) do
    local layer = ranks.layer_of(knot[1])
    sizes[#sizes + 1] = ("%s %d"):format(layer, #knot)
    if #knot > MOST then
      report("%s: %d files reach each other, at most %d may:", layer, #knot, MOST)
      knots.print(graph, knot, "%s uses %s (%s)")
    elseif os.getenv("VERBOSE") then
      print(("%s: %d files reach each other:"):format(layer, #knot))
      knots.print(graph, knot, "%s uses %s (%s)")
    end
  end
  print("knots: " .. (#sizes > 0 and table.concat(sizes, ", ") or "none"))
end

local graph = graph_of(read_symbols())
if next(graph) == nil then report("%s has no object files of the engine", build) end
check_directions(graph)
check_knots(graph)
print(("%d problem%s"):format(problems, problems == 1 and "" or "s"))
os.exit(problems == 0)
