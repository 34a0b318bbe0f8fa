-- Reads a build and reports what makes the C code hard to change: files that all need each other
-- (knots), headers that serve many sources, large structs, and one file name for two subjects.
--
--     lua5.4 tests/lint/structure.lua BUILD NM NINJA CC [OBJDUMP]
--
-- It runs in the source folder, on a build by GCC. With an empty NINJA the compiler's own lists of
-- dependencies are read (*.o.d). What the compiler knows is asked of it: which file an #include
-- names, which functions a header declares, which fields a struct has.

local knots = dofile((arg[0]:gsub("[^/]*$", "knots.lua")))
local sorted_keys = knots.sorted_keys
local build, nm, ninja, cc, objdump = arg[1], arg[2], arg[3] or "", arg[4] or "cc",
  arg[5] or "objdump"

-- Files that may reach each other. A header and the source of its name are one file.
local MOST_FILES = 4
-- Sources whose functions a header may declare.
local MOST_SOURCES = 2
-- Fields of a struct, and how many of these may be bools.
local MOST_FIELDS, MOST_BOOLS = 40, 8

-- Exceptions: the folder of a knot -> how many files it may have. The number never grows.
local KNOTS = {
  -- There are five ways to postpone a task. They become one once a GPU has run what is there.
  ["engine/exec/cuda"] = 15,
}

-- Exceptions: header -> how many sources it may serve. The number never grows.
local HEADERS = {
  ["engine/exec/cuda/task.h"] = 3,     -- for the same reason
}

-- Headers in C++, which only the kernels of GPUs include. The C compiler cannot read them.
local NOT_C = {}
for name in ("device gelu order scan sine tile"):gmatch("%S+") do
  NOT_C[("engine/ops/cuda/%s.h"):format(name)] = true
end

-- Folders that have the same subjects as the folder above, each for another backend.
local BACKENDS = {}
for name in ("cpu cuda sim isa shm mpi nccl fake cluster none"):gmatch("%S+") do
  BACKENDS[name] = true
end

-- Base names that several folders have for one subject: name -> these folders, and the subject.
local SUBJECTS = {
}

local problems = 0
local function report(message, ...)
  problems = problems + 1
  print(message:format(...))
end

local function read(path)
  local handle = io.open(path, "rb")
  local text = handle and handle:read("a")
  if handle then handle:close() end
  return text
end

local function write(path, text)
  local file = assert(io.open(path, "wb"))
  file:write(text)
  file:close()
end

local function output(command, ...)
  local handle = assert(io.popen(command:format(...)))
  local text = handle:read("a")
  handle:close()
  return text
end

-- The source folder, as the shell calls it and without symbolic links.
local roots = {}
for line in output("pwd -L; pwd -P"):gmatch("[^\n]+") do roots[#roots + 1] = line .. "/" end
local root = roots[1]

-- The path from the source folder on of a file of engine/ or bindings/, or nil.
local function inside(path)
  for _, folder in ipairs(roots) do
    if path:sub(1, #folder) == folder then path = path:sub(#folder + 1) end
  end
  return (path:find("^engine/") or path:find("^bindings/")) and path or nil
end

local function folder_of(path) return path:match("^(.*)/[^/]*$") or "" end
local function base_of(path) return path:match("([^/]*)%.[^./]*$") end
local function is_header(path) return path:find("%.h$") ~= nil end
local function is_public(path) return path:find("/include/", 1, true) ~= nil end

-- The C files of engine/ and bindings/, and the node of each: the path without its extension, if
-- there is a source of that name.
local files, exists, node_of, has_source = {}, {}, {}, {}
for path in output("find engine bindings -type f 2>/dev/null"):gmatch("[^\n]+") do
  local stem, extension = path:match("^(.*)%.(%w+)$")
  if extension == "h" or extension == "c" or extension == "cu" or extension == "cpp" then
    files[#files + 1], exists[path] = path, true
    if extension ~= "h" then has_source[stem] = true end
  end
end
table.sort(files)
for _, path in ipairs(files) do
  local stem = path:match("^(.*)%.%w+$")
  node_of[path] = has_source[stem] and stem or path
end

------------------------------------------------------------------------------- what was compiled

-- Calls visit(object, files) for each object of the build, with the files of which it was made.
local function each_object(visit)
  if ninja ~= "" then
    local object, list
    for line in output("'%s' -C '%s' -t deps", ninja, build):gmatch("[^\n]*") do
      local head = line:match("^(%S.*): #deps ")
      if head then
        if object then visit(object, list) end
        object, list = head, {}
      elseif object and line:find("^ ") then
        list[#list + 1] = line:match("^%s+(.*)$")
      end
    end
    if object then visit(object, list) end
    return
  end
  for path in output("cd '%s' && find . -name '*.o.d'", build):gmatch("%./([^\n]+)") do
    local text, list = read(build .. "/" .. path):gsub("^[^\n]-:", ""):gsub("\\\n", " "), {}
    for name in text:gmatch("%S+") do list[#list + 1] = name end
    visit(path:match("^(.*)%.d$"), list)
  end
end

-- objects: object -> its source; those of the tests are left out. together: file -> the set of the
-- files that some compilation read together with it.
local function read_objects()
  local objects, together = {}, {}
  each_object(function(object, list)
    local ours, source = {}, nil
    for _, path in ipairs(list) do
      path = inside(path)
      if path and exists[path] then
        ours[#ours + 1] = path
        if not source and not is_header(path) then source = path end
      end
    end
    if source and not object:find("^tests/") then objects[object] = source end
    for _, path in ipairs(ours) do
      local set = together[path] or {}
      together[path] = set
      for _, other in ipairs(ours) do set[other] = true end
    end
  end)
  return objects, together
end

-- symbol -> set of the nodes that define it.
local function read_definitions(objects, scratch)
  local list = {}
  for object in pairs(objects) do
    if io.open(build .. "/" .. object) then list[#list + 1] = object .. "\n" end
  end
  write(scratch .. "/objects", table.concat(list))
  local definitions = {}
  local text = output("cd '%s' && xargs -r -a '%s' -d '\\n' '%s' -A -P", build,
    scratch .. "/objects", nm)
  for object, name in text:gmatch("([^\n]-): (%S+) [TDRBVW] ") do
    if objects[object] then
      definitions[name] = definitions[name] or {}
      definitions[name][node_of[objects[object]]] = true
    end
  end
  return definitions
end

--------------------------------------------------------------------------- what the headers contain

-- How the compiler was called for engine/ and bindings/: all their folders of headers, and the
-- settings of the first file.
local function flags_of_build()
  local text = read(build .. "/compile_commands.json") or ""
  local flags, settings, seen = {}, nil, {}
  for entry in text:gmatch("%b{}") do
    local file = entry:match('"file": "([^"]*)"') or ""
    local command = entry:match('"command": "(.-[^\\])"')
    if command and inside(file) and file:find("%.c$") and not file:find("/module/") then
      local own = {}
      command = command:gsub("\\(.)", "%1"):gsub("%-isystem ", "-isystem")
      for flag in command:gmatch("%S+") do
        if flag:find("^%-D") or flag:find("^%-std=") then
          own[#own + 1] = flag
        elseif (flag:find("^%-I") or flag:find("^%-isystem")) and not seen[flag] then
          seen[flag], flags[#flags + 1] = true, flag
        end
      end
      settings = settings or own
    end
  end
  table.move(settings or {}, 1, #(settings or {}), #flags + 1, flags)
  return table.concat(flags, " ")
end

-- Compiles the headers of each folder together. The headers of all folders at once would not do,
-- since folders use some names for different types. Returns the objects, and the functions that
-- each header declares: header -> { function -> true }.
local function compile_headers(scratch)
  local folders, objects, declared = {}, {}, {}
  for _, path in ipairs(files) do
    if is_header(path) and not NOT_C[path] then
      local folder = folder_of(path)
      folders[folder] = folders[folder] or {}
      table.insert(folders[folder], ('#include "%s%s"\n'):format(root, path))
    end
  end
  local flags = flags_of_build()
  for number, folder in ipairs(sorted_keys(folders)) do
    local stem = ("%s/%d"):format(scratch, number)
    write(stem .. ".c", table.concat(folders[folder]))
    local messages = output("'%s' %s -w -g -gdwarf-4 -fno-eliminate-unused-debug-types -aux-info \z
      %s.aux -c %s.c -o %s.o 2>&1", cc, flags, stem, stem, stem)
    if messages ~= "" then
      report("%s: its headers do not compile together as C: %s: let each include what it needs, or \z
        list the one for kernels in NOT_C", folder,
        (messages:match("[^\n]*error[^\n]*") or messages):gsub("\n.*", ""))
    else
      objects[#objects + 1] = stem .. ".o"
    end
    for path, line in (read(stem .. ".aux") or ""):gmatch("/%* (%S-):%d+:%u+ %*/ (extern [^\n]*)")
    do
      path = inside(path)
      local name = line:match("([%a_][%w_]*) %([^*]")
      if path and name then
        declared[path] = declared[path] or {}
        declared[path][name] = true
      end
    end
  end
  return objects, declared
end

-- The files of an object by their numbers, from the dump of its table of lines.
local function files_of(dump)
  local folders, names, from = {}, {}, dump:find("The Directory Table", 1, true) or #dump
  for line in dump:sub(from):gmatch("[^\n]+") do
    local number, folder, name = line:match("^%s+(%d+)\t(%d+)\t%d+\t%d+\t(.*)$")
    if number then
      names[tonumber(number)] = (folders[folder] and folders[folder] .. "/" or "") .. name
    else
      number, name = line:match("^%s+(%d+)\t(.*)$")
      if number then folders[number] = name end
    end
  end
  return names
end

local PASSING = {
  DW_TAG_typedef = true, DW_TAG_const_type = true, DW_TAG_volatile_type = true,
  DW_TAG_atomic_type = true, DW_TAG_array_type = true,
}

-- Whether a member's type is bool, or an array of bools, in a table of entries by their offsets.
local function is_bool(entries, entry)
  while entry and PASSING[entry.tag] do entry = entries[entry.type] end
  return entry and entry.tag == "DW_TAG_base_type" and (entry.name == "_Bool")
end

-- Calls visit(name, file number, line, fields, bools) for each struct in the dump of an object's
-- debug information. A struct without a name of its own has that of its type, or none.
local function each_struct(dump, visit)
  local entries, structs, open, entry = {}, {}, {}, nil
  for line in dump:gmatch("[^\n]+") do
    local depth, offset, tag = line:match("^ <(%x+)><(%x+)>: Abbrev Number: %d+ %((DW_TAG_[%w_]+)%)")
    if depth then
      depth = tonumber(depth, 16)
      entry = { tag = tag }
      entries[offset], open[depth] = entry, entry
      if tag == "DW_TAG_structure_type" then
        entry.members, structs[#structs + 1] = {}, entry
      elseif tag == "DW_TAG_member" and open[depth - 1].members then
        table.insert(open[depth - 1].members, entry)
      end
    elseif entry then
      local attribute, value = line:match("^%s+<%x+>%s+DW_AT_([%w_]+)%s*: (.*)$")
      if attribute == "type" then
        entry.type = value:match("<0x(%x+)>")
      elseif attribute == "name" then
        entry.name = value:gsub("^%(indirect string[^)]*%): ", ""):gsub("%s+$", "")
      elseif attribute == "decl_file" then
        entry.file = tonumber(value:match("%d+"))
      elseif attribute == "decl_line" then
        entry.line = tonumber(value:match("%d+"))
      end
    end
  end
  for _, user in pairs(entries) do
    local used = user.tag == "DW_TAG_typedef" and entries[user.type]
    if used and used.members then used.name = used.name or user.name end
  end
  for _, struct in ipairs(structs) do
    local bools = 0
    for _, member in ipairs(struct.members) do
      if is_bool(entries, entries[member.type]) then bools = bools + 1 end
    end
    visit(struct.name, struct.file, struct.line, #struct.members, bools)
  end
end

-- Structs of private headers, as { file, line, name, fields, bools }, in the order of files.
local function read_structs(objects)
  local found, seen = {}, {}
  for _, object in ipairs(objects) do
    local names = files_of(output("'%s' --dwarf=rawline '%s'", objdump, object))
    each_struct(output("'%s' --dwarf=info '%s'", objdump, object),
      function(name, number, line, fields, bools)
        local path = number and inside(names[number] or "")
        local place = path and ("%s:%d"):format(path, line or 0)
        if place and not seen[place] and not is_public(path) then
          seen[place] = true
          found[#found + 1] = {
            file = path, line = line or 0, name = name or "a struct", fields = fields, bools = bools,
          }
        end
      end)
  end
  table.sort(found, function(a, b)
    if a.file ~= b.file then return a.file < b.file end
    return a.line < b.line
  end)
  return found
end

------------------------------------------------------------------------------------------- checks

-- The file that an #include of another file names: the one that was read together with it. It is
-- beside the file, or else in a folder of headers.
local function included(path, name, together)
  local beside = ("%s/%s"):format(folder_of(path), name)
  local set = together[path] or {}
  if set[beside] then return beside end
  local found
  for other in pairs(set) do
    if other:sub(-#name - 1) == "/" .. name and (not found or #other < #found) then found = other end
  end
  return found
end

-- header -> set of nodes that define a function that it declares.
local function served_by(declared, definitions)
  local served = {}
  for header, names in pairs(declared) do
    served[header] = {}
    for name in pairs(names) do
      for node in pairs(definitions[name] or {}) do served[header][node] = name end
    end
  end
  return served
end

-- node -> { other node -> why }. Public headers are no nodes, since each serves its whole layer.
local function graph_of(together, served)
  local graph = {}
  for _, path in ipairs(files) do
    if not is_public(path) then graph[node_of[path]] = graph[node_of[path]] or {} end
  end
  for _, path in ipairs(files) do
    local node = node_of[path]
    for line in (graph[node] and read(path) or ""):gmatch("[^\n]+") do
      local name = line:match("^%s*#%s*include%s*[\"<]([^\">]+)[\">]")
      local other = name and included(path, name, together)
      if other and graph[node_of[other]] and node_of[other] ~= node then
        graph[node][node_of[other]] = ("includes %s"):format(name)
      end
    end
    for other, name in pairs(graph[node] and served[path] or {}) do
      if other ~= node then
        graph[node][other] = graph[node][other] or ("declares %s"):format(name)
      end
    end
  end
  return graph
end

-- The folder that all files of a knot are in, or "".
local function common_folder(knot)
  local folder = folder_of(knot[1])
  for _, file in ipairs(knot) do
    if folder_of(file) ~= folder then return "" end
  end
  return folder
end

local FORM = "%s needs %s (%s)"

local function check_knots(graph)
  local sizes = {}
  for _, knot in ipairs(knots.of(graph)) do
    sizes[#sizes + 1] = #knot
    local most = KNOTS[common_folder(knot)] or MOST_FILES
    if #knot > most then
      report("%s: %d files reach each other by their headers, at most %d may: move what they share \z
        below them", knot[1], #knot, most)
    elseif os.getenv("VERBOSE") then
      print(("%s: %d files reach each other by their headers:"):format(knot[1], #knot))
    end
    if #knot > most or os.getenv("VERBOSE") then knots.print(graph, knot, FORM) end
  end
  table.sort(sizes, function(a, b) return a > b end)
  print("knots: " .. (#sizes > 0 and table.concat(sizes, ", ") or "none"))
end

local function check_headers(served)
  for _, header in ipairs(sorted_keys(served)) do
    local sources = sorted_keys(served[header])
    local most = HEADERS[header] or MOST_SOURCES
    if not is_public(header) and #sources > most then
      report("%s: declares functions of %d sources, at most %d may be: give each source a header \z
        (%s)", header, #sources, most, table.concat(sources, ", "))
    end
  end
end

local function check_structs(structs)
  local fields, bools = 0, 0
  for _, struct in ipairs(structs) do
    fields, bools = math.max(fields, struct.fields), math.max(bools, struct.bools)
    local place = ("%s:%d: %s"):format(struct.file, struct.line, struct.name)
    if struct.fields > MOST_FIELDS then
      report("%s has %d fields, at most %d may be: what changes together is a struct of its own",
        place, struct.fields, MOST_FIELDS)
    end
    if struct.bools > MOST_BOOLS then
      report("%s has %d bools, at most %d may be: states that exclude each other are one enum",
        place, struct.bools, MOST_BOOLS)
    end
  end
  print(("structs: %d, with at most %d fields and %d bools"):format(#structs, fields, bools))
end

-- The subject of a source: its path without folders of backends.
local function subject_of(path)
  return (path:gsub("[^/]+/", function(folder)
    return BACKENDS[folder:sub(1, -2)] and "" or folder
  end))
end

local function check_names()
  local subjects = {}
  for _, path in ipairs(files) do
    if path:find("%.c$") then
      local base = base_of(path)
      subjects[base] = subjects[base] or {}
      subjects[base][subject_of(path)] = path
    end
  end
  for _, base in ipairs(sorted_keys(subjects)) do
    local set = subjects[base]
    -- A binding has the name of what it binds.
    local binding = ("bindings/%s.c"):format(base)
    if next(set) ~= binding or next(set, binding) then set[binding] = nil end
    local folders, paths = {}, {}
    for subject, path in pairs(set) do
      folders[#folders + 1], paths[#paths + 1] = folder_of(subject), path
    end
    table.sort(folders)
    table.sort(paths)
    local known = SUBJECTS[base]
    if #folders > 1 and not (known and known[1] == table.concat(folders, " ")) then
      report("%s.c: %s have one name: if their subjects differ, rename one, or else list it in \z
        SUBJECTS", base, table.concat(paths, " and "))
    end
  end
end

local scratch = output("mktemp -d"):gsub("\n", "")
local objects, together = read_objects()
if next(objects) == nil then report("%s has no objects of engine/ or bindings/", build) end
local definitions = read_definitions(objects, scratch)
local compiled, declared = compile_headers(scratch)
local structs = read_structs(compiled)
os.execute(("rm -r '%s'"):format(scratch))

local served = served_by(declared, definitions)
check_knots(graph_of(together, served))
check_headers(served)
check_structs(structs)
check_names()
print(("%d problem%s"):format(problems, problems == 1 and "" or "s"))
os.exit(problems == 0)
