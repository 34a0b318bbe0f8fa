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

local ranks = dofile(arg[0]:gsub("[^/]*$", "ranks.lua"))
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

local function sorted_keys(set)
  local keys = {}
  for key in pairs(set) do keys[#keys + 1] = key end
  table.sort(keys)
  return keys
end

-- Strongly connected components of more than one file, by Tarjan's algorithm.
local function knots_of(graph)
  local index, low, stack, on_stack, knots, count = {}, {}, {}, {}, {}, 0
  local function visit(file)
    count = count + 1
    index[file], low[file] = count, count
    stack[#stack + 1], on_stack[file] = file, true
    for _, other in ipairs(sorted_keys(graph[file])) do
      if not index[other] then
        visit(other)
        low[file] = math.min(low[file], low[other])
      elseif on_stack[other] then
        low[file] = math.min(low[file], index[other])
      end
    end
    if low[file] ~= index[file] then return end
    local knot = {}
    repeat
      local member = table.remove(stack)
      on_stack[member] = nil
      knot[#knot + 1] = member
    until member == file
    table.sort(knot)
    if #knot > 1 then knots[#knots + 1] = knot end
  end
  for _, file in ipairs(sorted_keys(graph)) do
    if not index[file] then visit(file) end
  end
  return knots
end

local problems = 0
local function report(message, ...)
  problems = problems + 1
  print(message:format(...))
end

-- Each file of the knot, and what it uses of the others.
local function print_knot(graph, knot)
  local inside = {}
  for _, file in ipairs(knot) do inside[file] = true end
  for _, file in ipairs(knot) do
    for _, other in ipairs(sorted_keys(graph[file])) do
      if inside[other] then
        print(("    %s uses %s (%s)"):format(file, other, graph[file][other]))
      end
    end
  end
end

local function check_directions(graph)
  for _, file in ipairs(sorted_keys(graph)) do
    for _, other in ipairs(sorted_keys(graph[file])) do
      local user, used = ranks.layer_of(file), ranks.layer_of(other)
      if ranks.is_upward(user, used) then
        report("%s uses %s of %s: %s is not below %s", file, graph[file][other], other, used, user)
      end
    end
  end
end

local function check_knots(graph)
  local sizes = {}
  for _, knot in ipairs(knots_of(graph)) do
    local layer = ranks.layer_of(knot[1])
    sizes[#sizes + 1] = ("%s %d"):format(layer, #knot)
    if #knot > MOST then
      report("%s: %d files reach each other, at most %d may:", layer, #knot, MOST)
      print_knot(graph, knot)
    elseif os.getenv("VERBOSE") then
      print(("%s: %d files reach each other:"):format(layer, #knot))
      print_knot(graph, knot)
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
