-- Checks of arguments and options. A wrong type raises and names function, argument and both types.
-- An unknown option raises and names the nearest known one.
local core = require "moonshard.core"

local options = {}

local function is_module(value)
  local meta = type(value) == "table" and getmetatable(value)
  return type(meta) == "table" and meta.module == true
end

local function is_callable(value)
  if type(value) == "function" then return true end
  local meta = (type(value) == "table" or type(value) == "userdata") and getmetatable(value)
  return type(meta) == "table" and meta.__call ~= nil
end

local function is_object(value)
  local meta = type(value) == "table" and getmetatable(value)
  return type(meta) == "table"
    and (meta.module == true or type(meta.__name) == "string" and meta.__name:find "^ms%." ~= nil)
end

local function is_table(value) return type(value) == "table" and not is_object(value) end

-- Whether a value is an object of this class of the library that is a table.
local function named(value, name)
  local meta = type(value) == "table" and getmetatable(value)
  return type(meta) == "table" and meta.__name == name
end

-- kind -> { its name in messages, test }. A list and a table are tables of the user, not objects of
-- the library.
local kinds = {
  string = { "a string", function(value) return type(value) == "string" end },
  number = { "a number", function(value) return type(value) == "number" end },
  integer = { "an integer", function(value) return math.type(value) == "integer" end },
  boolean = { "a boolean", function(value) return type(value) == "boolean" end },
  ["function"] = { "a function", is_callable },
  table = { "a table", is_table },
  list = { "a list", is_table },
  tensor = { "a tensor", core.is_tensor },
  module = { "a module", is_module },
  optimizer = { "an optimizer", function(value) return named(value, "ms.Optimizer") end },
  tokenizer = {
    "a tokenizer",
    function(value)
      return type(value) == "userdata" and pcall(core.Tokenizer.vocab_size, value)
    end,
  },
  group = {
    "a group of ranks (ms.world(), or what its split gives)",
    function(value) return core.is_group(value) end,
  },
}

-- What a value is, for messages.
local function name_of(value)
  if core.is_tensor(value) then return "a tensor" end
  if is_module(value) then return "a module" end
  if type(value) == "number" then return "the number " .. tostring(value) end
  return value == nil and "nil" or "a " .. type(value)
end

-- Whether a value is of one of the kinds "a|b"; if not, the second result is the expected kinds as
-- text.
local function mismatch(value, wanted)
  local names = {}
  for kind in wanted:gmatch "[^|]+" do
    if kinds[kind][2](value) then return nil end
    names[#names + 1] = kinds[kind][1]
  end
  return table.concat(names, " or ")
end

--- Raises unless an argument is of one of these kinds: string, number, integer, boolean, function
--- (or any callable value), table, list, tensor, module, tokenizer, group. "a|b" allows several
--- kinds; ? at the end also allows nil.
---@param what string the function; begins the message
---@param name string the argument
---@param value any
---@param wanted string
function options.argument(what, name, value, wanted)
  local required = wanted:match "^(.*)%?$"
  if required and value == nil then return end
  local expected = mismatch(value, required or wanted)
  if expected then
    core.raise(("%s: %s must be %s, not %s"):format(what, name, expected, name_of(value)))
  end
end

--- Raises unless value is a list (for kind "string?" and the like: or nil) whose items are all of
--- this kind.
---@param what string
---@param name string
---@param value any
---@param kind string
function options.items(what, name, value, kind)
  local required = kind:match "^(.*)%?$"
  options.argument(what, name, value, required and "list?" or "list")
  for i, item in ipairs(value or {}) do
    options.argument(what, ("%s[%d]"):format(name, i), item, required or kind)
  end
end

--- Wraps the methods of a class so that they check their object: object.method(x) instead of
--- object:method(x) raises with a message about the colon.
---@param class table
---@param what string what its objects are, as "an optimizer"
---@param is_own? fun(value: any): boolean whether its metatable is the class, unless given
---@param names? string[] only these
function options.methods(class, what, is_own, names)
  is_own = is_own or function(value) return getmetatable(value) == class end
  if not names then
    names = {}
    for name, method in pairs(class) do
      if type(method) == "function" and not name:find "^_" then names[#names + 1] = name end
    end
  end
  for _, name in ipairs(names) do
    local method = class[name]
    class[name] = function(self, ...)
      if not is_own(self) then
        core.raise(("%s is a method of %s, not of %s: write object:%s(...), with a colon")
          :format(name, what, name_of(self), name))
      end
      return method(self, ...)
    end
  end
end

-- The names of a specification, for messages.
local function names_in(known)
  if known[1] then return known end
  local names = {}
  for name in pairs(known) do names[#names + 1] = name end
  table.sort(names)
  return names
end

-- The public keys of these tables, sorted.
local function public_names(tables)
  local names = {}
  for _, t in ipairs(tables) do
    for name in pairs(t) do
      if type(name) == "string" and not name:find "^_" then names[#names + 1] = name end
    end
  end
  table.sort(names)
  return names
end

--- For __index of tables and objects of the library: reading an unknown name raises and names the
--- nearest known one. Names that begin with __ are nil, because tools probe them.
---@param what string
---@param name any
---@param ... table those whose keys are known
function options.no_field(what, name, ...)
  if type(name) ~= "string" or name:find "^__" then return nil end
  local nearest = core.nearest(name, public_names { ... })
  core.raise(("%s has no '%s'%s")
    :format(what, name, nearest and (": did you mean '%s'?"):format(nearest) or ""))
end

--- Closes a table of functions: reading an unknown name raises in the same way.
---@param t table
---@param what string its name
---@return table t
function options.closed(t, what)
  return setmetatable(t, { __index = function(_, name) return options.no_field(what, name, t) end })
end

--- Raises unless given is nil or a table whose keys are all in `known`, and whose values are of the
--- kinds that `known` gives (see `argument`).
---@param what string whose options they are; begins the message
---@param given? table
---@param known string[]|table<string, string> names; or kind by name, "any" where the caller checks
---@return table given, or an empty table
function options.check(what, given, known)
  if given == nil then return {} end
  if not is_table(given) then
    core.raise(("%s: a table of options is expected, not %s"):format(what, name_of(given)))
  end
  local typed = known[1] == nil
  for key, value in pairs(given) do
    local wanted = typed and known[key]
    local found = wanted ~= nil and wanted ~= false
    for _, name in ipairs(known) do found = found or name == key end
    if not found then
      local names = names_in(known)
      local nearest = core.nearest(tostring(key), names)
      core.raise(("%s: unknown option '%s'%s has %s"):format(what, tostring(key),
        nearest and (": did you mean '%s'? It"):format(nearest) or "; it",
        table.concat(names, ", ")))
    end
    if wanted and wanted ~= "any" then options.argument(what, "option " .. key, value, wanted) end
  end
  return given
end

--- Raises unless given is nil or a group of ranks.
---@param what string whose option it is; begins the message
---@param name string
---@param given any
function options.check_group(what, name, given)
  if given ~= nil and not core.is_group(given) then
    core.raise(("%s: %s must be a group of ranks (ms.world(), or what its split gives), not a %s")
      :format(what, name, type(given)))
  end
end

return options
