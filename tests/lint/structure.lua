-- Reads a build and reports what makes the C code hard to change: files that all need each other
-- (knots), headers that serve many sources, large structs, and one file name for two subjects.
--
--     lua5.4 tests/lint/structure.lua BUILD NM NINJA CC [OBJDUMP]
--
-- It runs in the source folder, on a build by GCC. If NINJA is "none", the compiler's own lists of
-- dependencies are read (*.o.d). What the compiler knows is asked of it: which file an #include
-- names, which functions a header declares, which fields a struct has.

local knots = dofile((arg[0]:gsub("[^/]*$", "knots.lua")))
local sorted_keys = knots.sorted_keys
local build, nm, ninja, cc, objdump = arg[1], arg[2] or "nm", arg[3] or "ninja", arg[4] or "cc",
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

-- Structs whose pointers to functions are not counted as fields.
local TABLES = {
  ms_cuda = true,     -- a field for each function of NVIDIA's driver that is called
}

-- Headers in C++, which only the kernels of GPUs include. The C compiler cannot read them.
local NOT_C = {}
for name in ("device gelu order scan sine small_float tile"):gmatch("%S+") do
  NOT_C[("engine/ops/cuda/%s.h"):format(name)] = true
end

-- Folders that have the same subjects as the folder above, each for another backend.
local BACKENDS = {}
for name in ("cpu cuda sim isa shm mpi nccl fake cluster none"):gmatch("%S+") do
  BACKENDS[name] = true
end

-- Base names that several folders have for one subject: name -> these folders, without those of
-- backends, and the subject. A further folder with the name is reported.
local SUBJECTS = {
  backend = { "engine/ops engine/optim", "the functions of a device: of kernels, of optimizers" },
  backends = { "engine/ops engine/optim", "which functions belong to the engine's device" },
  clip = { "engine/hook/links engine/optim", "gradients are scaled to a norm" },
  copy = { "engine/exec engine/ops", "copies: of storages, of tensors" },
  graphs = { "engine/comm engine/comm/transport", "collectives that are launched as graphs" },
  load = {
    "engine/comm engine/comm/transport engine/exec", "a library that is loaded at run time",
  },
  oob = { "engine/comm engine/comm/control", "numbers out of band" },
  pass = { "engine/ddp engine/fsdp", "a forward and its backward" },
  reduce = {
    "engine/comm engine/fsdp engine/hook/links engine/ops", "sums: over ranks, in a tensor",
  },
  shm = {
    "engine/comm/control engine/comm/transport", "the table of functions over shared memory",
  },
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
  if ninja ~= "none" then
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
    local file <close> = io.open(build .. "/" .. object)
    if file then list[#list + 1] = object .. "\n" end
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
      report("%s: its headers do not compile together as C: %s: let each include what it needs, \z
        or list the one for kernels in NOT_C", folder,
        (messages:match("[^\n]*error[^\n]*") or messages):gsub("\n.*", ""))
    else
      objects[#objects + 1] = stem .. ".o"
    end
    local lines = read(stem .. ".aux") or ""
    for path, line in lines:gmatch("/%* (%S-):%d+:%u+ %*/ (extern [^\n]*)") do
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
  typedef = true, const_type = true, volatile_type = true, atomic_type = true, array_type = true,
}

-- What a member is, in a table of entries by their offsets: the entry of its type without names,
-- qualifiers and dimensions.
local function type_of(entries, entry)
  repeat entry = entries[entry.type] until not entry or not PASSING[entry.tag]
  return entry or {}
end

-- Calls visit(struct, file number) for each struct in the dump of an object's debug information. A
-- struct has name, line, fields, functions (fields that are pointers to functions) and bools. A
-- struct without a name of its own has that of its type, or none.
local function each_struct(dump, visit)
  local HEAD = "^ <(%x+)><(%x+)>: Abbrev Number: %d+ %(DW_TAG_([%w_]+)%)"
  local entries, structs, open, entry = {}, {}, {}, nil
  for line in dump:gmatch("[^\n]+") do
    local depth, offset, tag = line:match(HEAD)
    if depth then
      depth = tonumber(depth, 16)
      entry = { tag = tag }
      entries[offset], open[depth] = entry, entry
      if tag == "structure_type" then
        entry.members = {}
        structs[#structs + 1] = entry
      elseif tag == "member" and open[depth - 1].members then
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
    local used = user.tag == "typedef" and entries[user.type]
    if used and used.members then used.name = used.name or user.name end
  end
  for _, struct in ipairs(structs) do
    local bools, functions = 0, 0
    for _, member in ipairs(struct.members) do
      local kind = type_of(entries, member)
      if kind.tag == "base_type" and (kind.name == "_Bool" or kind.name == "bool") then
        bools = bools + 1
      elseif kind.tag == "pointer_type" and type_of(entries, kind).tag == "subroutine_type" then
        functions = functions + 1
      end
    end
    visit({
      name = struct.name or "a struct", line = struct.line or 0, fields = #struct.members,
      functions = functions, bools = bools,
    }, struct.file)
  end
end

-- Structs of private headers, each with its file, in the order of files and lines.
local function read_structs(objects)
  local found, seen = {}, {}
  for _, object in ipairs(objects) do
    local names = files_of(output("'%s' --dwarf=rawline '%s'", objdump, object))
    each_struct(output("'%s' --dwarf=info '%s'", objdump, object), function(struct, number)
      struct.file = number and inside(names[number] or "")
      local place = struct.file and ("%s:%d"):format(struct.file, struct.line)
      if place and not seen[place] and not is_public(struct.file) then
        seen[place] = true
        found[#found + 1] = struct
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
    if ("/" .. other):sub(-#name - 1) == "/" .. name and (not found or #other < #found) then
      found = other
    end
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
      report("%s: %d files reach each other by their headers, at most %d may: move what they \z
        share below them", knot[1], #knot, most)
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
  local most_fields, most_bools = 0, 0
  for _, struct in ipairs(structs) do
    local place = ("%s:%d: %s"):format(struct.file, struct.line, struct.name)
    local fields = struct.fields - (TABLES[struct.name] and struct.functions or 0)
    most_fields, most_bools = math.max(most_fields, fields), math.max(most_bools, struct.bools)
    if fields > MOST_FIELDS then
      report("%s has %d fields, at most %d may be: what changes together is a struct of its own",
        place, fields, MOST_FIELDS)
    end
    if struct.bools > MOST_BOOLS then
      report("%s has %d bools, at most %d may be: states that exclude each other are one enum",
        place, struct.bools, MOST_BOOLS)
    end
    if os.getenv("VERBOSE") and (fields > MOST_FIELDS / 2 or struct.bools > MOST_BOOLS / 2) then
      print(("%s has %d fields and %d bools"):format(place, fields, struct.bools))
    end
  end
  print(("structs: %d, with at most %d fields and %d bools"):format(#structs, most_fields,
    most_bools))
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
      local subject = subject_of(path)
      local known = subjects[base][subject]
      if not known or #path < #known then subjects[base][subject] = path end
    end
  end
  for _, base in ipairs(sorted_keys(subjects)) do
    local set = subjects[base]
    -- A binding has the name of what it binds.
    local binding = ("bindings/%s.c"):format(base)
    if next(set) ~= binding or next(set, binding) then set[binding] = nil end
    local known, paths, strangers = {}, {}, 0
    for folder in (SUBJECTS[base] or { "" })[1]:gmatch("%S+") do known[folder] = true end
    for subject, path in pairs(set) do
      paths[#paths + 1] = path
      if not known[folder_of(subject)] then strangers = strangers + 1 end
    end
    table.sort(paths)
    local names = table.concat(paths, " and ")
    if #paths > 1 and strangers > 0 then
      report("%s.c: %s have one name: rename one, or list their folders in SUBJECTS if they have \z
        one subject", base, names)
    elseif #paths > 1 and os.getenv("VERBOSE") then
      print(("%s.c: %s: %s"):format(base, names, SUBJECTS[base][2]))
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
