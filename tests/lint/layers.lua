-- Reads the sources as text and reports violations of the project's rules: layers, system calls,
-- global state, flags, first lines.
--
--     lua5.4 tests/lint/layers.lua [ROOT]
--
-- It parses C only as far as these rules need: comments and strings are blanked, the rest is
-- matched by words.

local root = arg[1] or "."

local ranks = dofile((arg[0]:gsub("[^/]*$", "ranks.lua")))

-- Headers of outside libraries, as patterns, and the only places that may include them.
local OUTSIDE = {
  { header = "^lua%.h$", place = "^bindings/" }, { header = "^lualib%.h$", place = "^bindings/" },
  { header = "^lauxlib%.h$", place = "^bindings/" },
  { header = "^cuda[%w_]*%.h$", place = "/cuda/" },
  { header = "^cu[bfs][%w_]*%.h$", place = "/cuda/" },
  { header = "^cudnn[%w_]*%.h$", place = "/cuda/" },
  { header = "^mpi%.h$", place = "/mpi/" }, { header = "^nccl%.h$", place = "/nccl/" },
  { header = "dnnl[%w_]*%.h$", place = "^engine/ops/cpu/" },
  { header = "^cblas%.h$", place = "^engine/ops/cpu/" },
  { header = "^pcre2%.h$", place = "^engine/text/" },
  { header = "^nettle/", place = "^engine/comm/control/cluster/" },
  { header = "^utf8proc%.h$", place = "^engine/text/" },
}

-- Calls that belong to the table ms_os, and calls with which a library would take over its host.
local SYSTEM = {}
for name in ([[malloc calloc realloc free reallocarray posix_memalign aligned_alloc memalign strdup
    strndup asprintf vasprintf getline open openat creat fopen fdopen freopen tmpfile mkstemp mmap
    munmap mremap opendir stat fstat lstat rename unlink mkdir clock_gettime gettimeofday time clock
    nanosleep usleep sleep fork vfork execv execve execvp execl execlp posix_spawn system popen
    pthread_create getenv setenv sysconf getrandom getpid]]):gmatch("%S+") do
  SYSTEM[name] = "goes through the table ms_os (engine/base/os_posix.c alone calls the system)"
end
for name in ("exit _exit abort quick_exit printf fprintf vprintf vfprintf puts fputs putchar \z
    perror longjmp siglongjmp"):gmatch("%S+") do
  SYSTEM[name] = "is for programs: a library returns an ms_status, and never prints, exits or jumps"
end

-- Exceptions: file -> the calls that it may make ("*" is all), each with its reason.
local ALLOWED = {
  ["engine/base/os_posix.c"] = { "*" },                -- it is the table
  -- The part of the table that speaks through sockets.
  ["engine/base/os_socket.c"] = { "*" },
  -- The part of the table that reaches other hosts.
  ["engine/base/os_tcp.c"] = { "*" },
  -- The part of the table that describes the machine.
  ["engine/base/os_machine.c"] = { "*" },
  -- Bounds how long a thread spins; no result depends on it.
  ["engine/base/thread.c"] = { "clock_gettime" },
  ["bindings/program/launcher.c"] = { "fprintf" },             -- the supervisor's warnings
  ["bindings/program/processes.c"] = { "open", "fork", "execve", "getpid", "_exit" },
  -- Starts an MPI launcher; warns as the supervisor does.
  ["bindings/program/start.c"] = {
    "open", "fork", "execv", "getpid", "_exit", "setenv", "fprintf",
  },
  -- Makes the process of an agent, which lives longer than the application.
  ["bindings/job_join.c"] = { "open", "fork", "execv", "_exit", "getenv" },
  -- Tells the driver of a GPU how many queues this process needs, before any rank starts.
  ["bindings/program/threads.c"] = { "pthread_create", "getpid", "setenv" },
  -- The CLI's entry is a program; a second request to stop ends it at once.
  ["bindings/program/main.c"] = { "fprintf" },
  ["bindings/program/rank.c"] = { "fprintf", "_exit", "getenv" },
  ["bindings/program/requests.c"] = { "_exit" },
  -- libedit frees what completes a word, and gives the line that it has allocated.
  ["bindings/program/prompt.c"] = { "strdup", "free" },
}

-- Folders of devices. No file outside such a folder names a header in it.
local DEVICES = { cpu = true, cuda = true, sim = true }

-- Mutable variables of a process that are allowed, as "file:name", each with its reason.
local GLOBALS = {}

local WORDS = { "TODO", "FIXME", "XXX", "not implemented" }

local problems = {}
local function report(file, line, message, ...)
  problems[#problems + 1] = ("%s:%d: %s"):format(file, line, message:format(...))
end

local function read(path)
  local handle = assert(io.open(root .. "/" .. path, "rb"))
  local text = handle:read("a")
  handle:close()
  return text
end

-- Files below folders of the root that match any of the find(1) name patterns, sorted.
local function list(folders, names)
  local expression = {}
  for i, name in ipairs(names) do expression[i] = ("-name '%s'"):format(name) end
  local handle = assert(io.popen(("cd '%s' && find %s -type f \\( %s \\) -print 2>/dev/null")
    :format(root, folders, table.concat(expression, " -o "))))
  local files = {}
  for line in handle:lines() do files[#files + 1] = (line:gsub("^%./", "")) end
  handle:close()
  table.sort(files)
  return files
end

local function blank(text)
  return (text:gsub("[^\n]", " "))
end

-- Walks over C text and blanks comments and, if asked, strings; line numbers do not change.
local function strip(text, strings_too)
  local out, at = {}, 1
  while at <= #text do
    local start = text:find("[/\"']", at)
    if not start then break end
    out[#out + 1] = text:sub(at, start - 1)
    local stop
    local two, quote = text:sub(start, start + 1), text:sub(start, start)
    if two == "/*" then
      stop = select(2, text:find("*/", start + 2, true)) or #text
      out[#out + 1] = blank(text:sub(start, stop))
    elseif two == "//" then
      stop = (text:find("\n", start, true) or #text + 1) - 1
      out[#out + 1] = blank(text:sub(start, stop))
    elseif quote == "/" then
      stop = start
      out[#out + 1] = "/"
    else
      stop = start + 1
      while stop <= #text and text:sub(stop, stop) ~= quote do
        stop = stop + (text:sub(stop, stop) == "\\" and 2 or 1)
      end
      local inside = text:sub(start + 1, stop - 1)
      out[#out + 1] = quote .. (strings_too and blank(inside) or inside) .. quote
    end
    at = stop + 1
  end
  out[#out + 1] = text:sub(at)
  return table.concat(out)
end

local function line_of(text, position)
  return select(2, text:sub(1, position - 1):gsub("\n", "")) + 1
end

-- The folder of a device (cpu, cuda, sim) that a header is in, or nil.
local function device_of(path)
  local folder = path:match("^(.*)/[^/]*$") or ""
  for name in folder:gmatch("[^/]+") do
    if DEVICES[name] then return name end
  end
end

-- Only a device's own folders name its headers: all else goes through the device's table.
local function check_device(path, header, line)
  local device = device_of(header)
  if not device or device_of(path) == device then return end
  report(path, line, "\"%s\" may be included only in folders called %s", header, device)
end

local function check_includes(path, text)
  local own = ranks.layer_of(path)
  if not ranks.of[own] then
    return report(path, 1, "\"%s\" is not a layer: the layers are those of engine/README.md",
      tostring(own))
  end
  for position, kind, header in strip(text, false)
      :gmatch("()#%s*include%s*([<\"])([^>\"\n]+)[>\"]") do
    local line = line_of(text, position)
    for _, rule in ipairs(OUTSIDE) do
      if header:find(rule.header) and not path:find(rule.place)
          and path ~= "engine/include/moonshard/moonshard_lua.h" then
        report(path, line, "<%s> may be included only in %s", header, rule.place:gsub("[%^%%]", ""))
      end
    end
    -- Without a folder it is a header beside the file.
    local other = header:find("/") and ranks.layer_of(header) or own
    if header:find("%.%.") then
      report(path, line, "\"%s\": write headers from engine/ on, as \"exec/ring.h\"", header)
    elseif ranks.of[other] and ranks.is_upward(own, other) then
      report(path, line, "%s includes \"%s\" of %s, which is not below it", own, header, other)
    elseif kind == "\"" and not ranks.of[other] then
      report(path, line, "\"%s\" belongs to no layer", header)
    end
    check_device(path, header, line)
  end
end

local function check_calls(path, code)
  local allowed = {}
  for _, name in ipairs(ALLOWED[path] or {}) do allowed[name] = true end
  if allowed["*"] then return end
  for position, name in code:gmatch("()%f[%w_]([%a_][%w_]*)%f[^%w_]%s*%(") do
    -- A member (os->open, table.free) is a function pointer, not the system's function.
    if SYSTEM[name] and not allowed[name] then
      local before = code:sub(math.max(1, position - 40), position - 1):match("(%S*)%s*$")
      if not before:find("%.$") and not before:find("->$") then
        report(path, line_of(code, position), "%s() %s", name, SYSTEM[name])
      end
    end
  end
end

-- Whether a declaration's head (all before its "=") leaves something to write to.
local function is_mutable(head)
  local pointer = head:match(".*%*([^*]*)$")
  return not (pointer or head):find("%f[%w_]const%f[^%w_]")
end

local function check_global(path, code, position, statement)
  -- Blanked comments are long, and the patterns below go over spaces again and again.
  statement = statement:gsub("%s+", " ")
  local head = statement:match("^%s*(.-)%s*=[^=]") or statement:match("^%s*(.-)%s*$")
  if head == "" or head:find("^typedef%f[^%w_]") or head:find("^extern%f[^%w_]")
      or head:find("^_Static_assert") or head:find("^static_assert") then
    return
  end
  -- What has parentheses is a function, unless they hold a pointer's star: static void
  -- (*handler)(int).
  if head:find("%(") and not head:find("^[%w_%s*]*%(%s*%*") then return end
  -- A type alone: struct point {}, enum {}, union value.
  if head:find("^%a+%s*[%w_]*%s*{}%s*$") or head:find("^struct%s+[%w_]+$")
      or head:find("^union%s+[%w_]+$") or head:find("^enum%s+[%w_]+$")
      or head:find("{}%s*__attribute__") then
    return
  end
  if is_mutable(head) then
    local bare = head:gsub("%b[]", "")
    local name = bare:match("%(%s*%*%s*([%w_]+)") or bare:match("([%w_]+)%s*$")
    if not GLOBALS[path .. ":" .. tostring(name)] then
      report(path, line_of(code, position),
        "\"%s\" is state of the whole process: hang it off ms_engine, or make it const",
        tostring(name))
    end
  end
end

-- Splits a file into its outermost statements; each block is replaced by {}. A block after a
-- closing parenthesis is a function's body and ends its statement; statics inside bodies are looked
-- for by their word.
local function check_globals(path, code)
  code = code:gsub("\\\n", "  ")
    :gsub("\n[ \t]*#[^\n]*", function(text) return "\n" .. blank(text:sub(2)) end)
  local at, start = 1, 1
  local statement = {}
  local function flush(stop)
    local first = code:find("%S", start)
    check_global(path, code, first or start, table.concat(statement))
    statement, start = {}, stop + 1
  end
  while true do
    local position = code:find("[;{]", at)
    if not position then break end
    statement[#statement + 1] = code:sub(at, position - 1)
    if code:sub(position, position) == ";" then
      flush(position)
      at = position + 1
    else
      local _, stop = code:find("^%b{}", position)
      stop = stop or #code
      local text = table.concat(statement)
      if text:find("%)%s*$") and not text:find("=") then
        for offset, head in code:sub(position, stop):gmatch("()%f[%w_]static%f[^%w_]([^;={]*)") do
          if is_mutable(head) then
            report(path, line_of(code, position + offset),
              "a static variable in a function is state of the whole process")
          end
        end
        statement, start = {}, stop + 1
      else
        statement[#statement + 1] = "{}"
      end
      at = stop + 1
    end
  end
end

local function check_words(path, text)
  for _, word in ipairs(WORDS) do
    local position = text:find("%f[%w]" .. word .. "%f[%W]")
    if position then
      report(path, line_of(text, position), "\"%s\": finish it, or leave it out", word)
    end
  end
end

-- A require inside of a function hides what a file needs, and files that need each other go
-- unnoticed. Users load init.lua, which loads each part at its first use; so does the command line.
-- A name that is computed cannot be at the top.
local function check_requires(path, text)
  if path == "lua/moonshard/init.lua" or path:find("^lua/moonshard/cli/") then return end
  local number = 0
  for line in (text .. "\n"):gmatch("([^\n]*)\n") do
    number = number + 1
    local code = line:gsub("%-%-.*", "")
    if code:find("%f[%w_]require%s*%(?%s*[\"']moonshard") and not code:find("^require%f[%W]")
        and not code:find("^local [%w_, <>]+= *require%f[%W]")
        and not code:find("require%(?%s*[\"']moonshard[%w_.]*[\"'] *%.%.") then
      report(path, number, "a require stands at the top of its file")
    end
  end
end

for _, path in ipairs(list("lua/moonshard", { "*.lua" })) do check_requires(path, read(path)) end

for _, path in ipairs(list("engine bindings", { "*.c", "*.h" })) do
  local text = read(path)
  check_includes(path, text)
  local code = strip(text, true)
  check_calls(path, code)
  if path:find("^engine/.*%.c$") then check_globals(path, code) end
end

for _, path in ipairs(list("engine bindings lua recipes tests",
    { "*.c", "*.h", "*.lua", "*.cmake", "CMakeLists.txt", "*.cu" })) do
  local text = read(path)
  local first = text:gsub("^#![^\n]*\n", ""):match("^[^\n]*")
  local comment = path:find("%.lua$") and "^%-%-+%s*%S" or path:find("%.[ch]u?$") and "^/[*/]+%s*%S"
    or "^#+%s*%S"
  if not first:find(comment) then
    report(path, 1, "the first line says in a comment what the file is")
  end
  if not path:find("^tests/") then check_words(path, text) end
end

for _, path in ipairs(list(". -path ./build -prune -o -path ./.git -prune -o",
      { "*.cmake", "CMakeLists.txt", "CMakePresets.json", "moonshard", "run" })) do
  local number = 0
  for line in (read(path) .. "\n"):gmatch("([^\n]*)\n") do
    number = number + 1
    local flag = line:gsub("#.*", ""):match("%-march=[%w_-]*")
      or line:gsub("#.*", ""):match("%-ffast%-math") or line:gsub("#.*", ""):match("%-Ofast")
    if flag then
      report(path, number, "%s: kernels are chosen at run time and keep IEEE arithmetic", flag)
    end
  end
end

for _, problem in ipairs(problems) do print(problem) end
print(("%d problem%s"):format(#problems, #problems == 1 and "" or "s"))
os.exit(#problems == 0)
