-- Reads the annotations of the Lua API (lua/moonshard/meta.lua and meta/) and the sources beside
-- them, and reports prose that is written twice: of a function that the annotations describe, the
-- source has no lines with `---` but those of types (`---@param` and the like).
--
--     lua5.4 tests/lint/prose.lua [ROOT]
--
-- It parses Lua line by line, as far as this needs: which function has a public name. A name comes
-- from a table with a `---@class` above it, by a definition in it, by a constructor or an
-- assignment that names a function of another file, or by a loop that copies another table; or from
-- the table `names` of init.lua. A function that only passes its arguments on is the one that it
-- calls.

local root = arg[1] or "."

-- The parser of the annotations needs the core for reading files only, which is done here.
package.loaded["moonshard.core"] = {}
local annotations = dofile((arg[0]:gsub("[^/]*$", "../../lua/moonshard/docs/read.lua")))

local function read(path)
  local handle = assert(io.open(root .. "/" .. path, "rb"))
  local text = handle:read("a")
  handle:close()
  return text
end

local function list()
  local handle = assert(io.popen(("cd '%s' && find lua/moonshard -name '*.lua'"):format(root)))
  local files = {}
  for line in handle:lines() do files[#files + 1] = line end
  handle:close()
  table.sort(files)
  return files
end

local function sorted_keys(t)
  local keys = {}
  for key in pairs(t) do keys[#keys + 1] = key end
  table.sort(keys)
  return keys
end

local function is_meta(path) return path:find("^lua/moonshard/meta[./]") ~= nil end

-- What the annotations describe: class -> name of a function -> their file; and class -> its base.
local described, bases = {}, {}
local files = list()
for _, path in ipairs(files) do
  for _, block in ipairs(is_meta(path) and annotations.blocks(read(path), path) or {}) do
    local names = described[block.class] or {}
    described[block.class] = names
    bases[block.class] = block.base or bases[block.class]
    for _, field in ipairs(block.fields) do
      if field.parameters then names[field.name] = path end
    end
  end
end

----------------------------------------------------------------------------------- parsing a source

-- The fields of a table constructor that begins at a position of a text: name -> expression.
local function constructor(text, at)
  local inner, fields = text:match("^%b{}", at), {}
  if not inner then return fields end
  inner = inner:sub(2, -2):gsub("%-%-[^\n]*", "")
  for _, part in ipairs(annotations.split(inner, ",")) do
    local name, expression = part:match("^%s*([%a_][%w_]*)%s*=%s*(.-)%s*$")
    if name then fields[name] = expression end
  end
  return fields
end

-- Keys of a file are "Optimizer.step" (a field or method of a local), "roots" (a local) and
-- "return" (what the file returns). defined: keys of functions. prose: key -> the first line of
-- prose above. from: key -> the expression that is its value. class: local -> its class. copies:
-- local -> the locals that loops copy into it.
local function parse(path, text)
  local file = { path = path, defined = {}, prose = {}, from = {}, class = {}, copies = {} }
  local number, at = 0, 1                    -- of the current line: its number, and its beginning
  local prose, class                         -- of the comments directly above it
  local variable                             -- of the last `local NAME =` without indentation

  local function fields(owner, position)
    for name, expression in pairs(constructor(text, position)) do
      file.from[owner .. "." .. name] = expression
    end
  end

  -- A key whose function is all in this line, and passes its arguments on.
  local function passing(key, line)
    local own, other, given = line:match("(%b())%s*return%s+([%w_.]+)(%b())%s*end%s*,?%s*$")
    if not own then return end
    own, given = own:gsub("[()%s]", ""), given:gsub("[()%s]", "")
    if given == own or own == "_," .. given or given == "self" .. (own == "" and "" or ",") .. own
    then
      file.from[key] = other
    end
  end

  local function define(key, line)
    file.defined[key], file.prose[key] = true, prose
    passing(key, line)
  end

  -- a.b = c.d, or a.b, a.c = d.b, d.c.
  local function assignment(line)
    local left, right = line:match("^([%a_][%w_.,%s]-)%s*=%s*(.+)$")
    if not left or left:find("^local%s") then return end
    local values = annotations.split(right, ",")
    for i, key in ipairs(annotations.split(left, ",")) do
      key = key:match("^%s*([%a_][%w_]*%.[%a_][%w_]*)%s*$")
      if key then
        file.prose[key], file.from[key] = prose, (values[i] or ""):match("^%s*(.-)%s*$")
      end
    end
  end

  local function statement(line)
    local owner, name = line:match("^%s*function%s+([%a_][%w_]*)[.:]([%a_][%w_]*)")
    if owner then return define(owner .. "." .. name, line) end
    name = line:match("^%s*local%s+function%s+([%a_][%w_]*)")
    if name then return define(name, line) end
    name = line:match("^local%s+([%a_][%w_]*)%s*=")
    if name then
      variable, file.class[name] = name, class
      file.from[name] = line:match("=%s*(require.-)%s*$") or line:match("=%s*([%a_][%w_.]*)%s*$")
      local brace = line:find("{", 1, true)
      return brace and fields(name, at + brace - 1)
    end
    if variable and line:find("^%s+__call%s*=%s*function") then
      return passing(variable .. ".__call", line)
    end
    local source, target = line:match("^%s*for%s+[%w_]+,%s*[%w_]+%s+in%s+pairs%(([%w_]+)%)%s+do"
      .. "%s+([%w_]+)%[[%w_]+%]%s*=%s*[%w_]+%s+end")
    if source then
      file.copies[target] = file.copies[target] or {}
      return table.insert(file.copies[target], source)
    end
    if line:find("^return%s+function") then return define("return", line) end
    if line:find("^return%s*{") then return fields("return", text:find("{", at, true)) end
    name = line:match("^return%s+([%a_][%w_]*)%s*$")
      or line:match("^return%s+[%a_][%w_.]*%(([%a_][%w_]*)%s*,")
    if name then file.from["return"] = name else assignment(line) end
  end

  for line in (text .. "\n"):gmatch("([^\n]*)\n") do
    number = number + 1
    if line:find("^%s*%-%-") then
      local own, base = line:match("^%-%-%-@class%s+([%w_.]+)%s*:?%s*([%w_.]*)")
      class = own or class
      if own and base ~= "" then bases[own] = bases[own] or base end
      -- A row of dashes is no prose.
      if line:find("^%s*%-%-%-%f[^@-]") then prose = prose or number end
    else
      statement(line)
      prose, class = nil, nil
    end
    at = at + #line + 1
  end
  return file
end

-- Sources in order, and by the names that `require` gives them.
local sources, modules = {}, {}
for _, path in ipairs(files) do
  if not is_meta(path) then
    local file = parse(path, read(path))
    local name = path:match("^lua/(.*)%.lua$"):gsub("/init$", ""):gsub("/", ".")
    sources[#sources + 1], modules[name] = file, file
    -- What the module "moonshard.trace" returns is ms.trace.
    local class, variable = name:gsub("^moonshard", "ms"), file.from["return"]
    if described[class] and variable then file.class[variable] = file.class[variable] or class end
  end
end

------------------------------------------------------------------------------ from name to function

local walk

-- Visits what an expression in a file is.
local function follow(file, expression, visit, seen)
  local module, field = expression:match("^require%s*%(?%s*[\"']([%w_.]+)[\"']%s*%)?%.?([%w_]*)$")
  if module then
    local other = modules[module]
    if other then walk(other, field == "" and "return" or "return." .. field, visit, seen) end
  elseif expression:find("^[%a_][%w_]*%.[%a_][%w_]*$") or expression:find("^[%a_][%w_]*$") then
    walk(file, expression, visit, seen)
  end
end

-- Calls visit(file, key) for a key, and for the keys in this and other files that are its value.
function walk(file, key, visit, seen)
  local place = file.path .. " " .. key
  if seen[place] then return end
  seen[place] = true
  visit(file, key)
  if file.from[key] then follow(file, file.from[key], visit, seen) end
  local owner, name = key:match("^([%w_]+)%.([%w_]+)$")
  if owner then
    -- A field of what is required or returned, or of a table that is copied.
    local whole = file.from[owner]
    if whole and (owner == "return" or whole:find("^require")) then
      follow(file, whole .. "." .. name, visit, seen)
    end
    for _, other in ipairs(file.copies[owner] or {}) do
      walk(file, other .. "." .. name, visit, seen)
    end
  else -- a table that is called: a class of modules, for one
    if file.defined[key .. ".init"] then walk(file, key .. ".init", visit, seen) end
    if file.from[key .. ".__call"] then walk(file, key .. ".__call", visit, seen) end
  end
end

-- The class of a local: its own annotation, or that of the table in another file that it is.
local function class_of(file, variable)
  local class
  walk(file, variable, function(other, key) class = class or other.class[key] end, {})
  return class
end

-- Whether a class derives from the other.
local function derives(class, other)
  local seen = {}
  while class and not seen[class] do
    if class == other then return true end
    seen[class], class = true, bases[class]
  end
  return false
end

-- The class that describes a function of this class: itself, one that it derives from, or one that
-- derives from it (a parameter is a tensor, and its methods are in the table of all tensors).
local function describing(class, name)
  local above, seen = class, {}
  while above and not seen[above] do
    if described[above] and described[above][name] then return above end
    seen[above], above = true, bases[above]
  end
  for _, other in ipairs(sorted_keys(described)) do
    if described[other][name] and derives(other, class) then return other end
  end
end

local problems, reported = {}, {}
local function check(class, name, file, key)
  local owner = describing(class, name)
  if not owner then return end
  walk(file, key, function(place, of)
    local line = place.prose[of]
    local where = ("%s:%d"):format(place.path, line or 0)
    if not line or reported[where] then return end
    reported[where] = true
    local text = ("%s: %s.%s is described in %s: move there what is only here, and leave lines of \z
      types and comments with two dashes"):format(where, owner, name, described[owner][name])
    problems[#problems + 1] = { path = place.path, line = line, text = text }
  end, {})
end

for _, file in ipairs(sources) do
  local keys, classes = {}, {}               -- classes: local -> its class, or false
  for _, set in ipairs { file.defined, file.from } do
    for key in pairs(set) do keys[key] = true end
  end
  for _, key in ipairs(sorted_keys(keys)) do
    local variable, name = key:match("^([%w_]+)%.([%w_]+)$")
    if variable then
      if classes[variable] == nil then classes[variable] = class_of(file, variable) or false end
      if classes[variable] then check(classes[variable], name, file, key) end
    end
  end
  for _, variable in ipairs(sorted_keys(file.copies)) do
    local class = class_of(file, variable)
    for _, name in ipairs(sorted_keys(class and described[class] or {})) do
      check(class, name, file, variable .. "." .. name)
    end
  end
end

-- What init.lua loads at its first use: names = { steps = "moonshard.train.steps" }.
local main = modules["moonshard"]
for _, key in ipairs(sorted_keys(main and main.from or {})) do
  local name, module = key:match("^names%.([%w_]+)$"), main.from[key]:match("^[\"'](.*)[\"']$")
  if name and modules[module] then check("ms", name, modules[module], "return." .. name) end
end

if not next(described) then
  problems[1] = { path = "", line = 0, text = root .. " has no lua/moonshard/meta.lua" }
end
table.sort(problems, function(a, b)
  if a.path ~= b.path then return a.path < b.path end
  return a.line < b.line
end)
for _, problem in ipairs(problems) do print(problem.text) end
print(("%d problem%s"):format(#problems, #problems == 1 and "" or "s"))
os.exit(#problems == 0)
