-- Names of parameters: paths from the root module. A parameter or a module may be in several places
-- (tied weights). Its name is that of the first place from the root, in order of assignment;
-- `parameters`, `state` and `save` visit places in the same order.
local names = {}

-- parameter, or fields of a module (which wrappers share) -> list of the places { state of a
-- module, key } to which it was assigned. Places that have another value by now are ignored.
local places = setmetatable({}, { __mode = "k" })
-- cast that temporarily takes a parameter's place -> the parameter
local parameter_of = setmetatable({}, { __mode = "k" })
-- state of a root -> { version, of = name by parameter }
local known = setmetatable({}, { __mode = "k" })
-- Grows when a place gets or loses a parameter or a module.
local version = 0
-- Grows when a parameter begins or ceases to require a gradient.
local trained = 0

--- "h" and 1 give "h.0": list items count from 0 in names, as in other tools' files.
---@param prefix string
---@param key any
---@return string
function names.join(prefix, key)
  local part = math.type(key) == "integer" and tostring(key - 1) or tostring(key)
  return prefix == "" and part or prefix .. "." .. part
end

local function module_state(value)
  local meta = type(value) == "table" and getmetatable(value)
  return type(meta) == "table" and meta.module and meta or nil
end

--- Must be called when a module gets or loses a parameter or a module: names may change.
function names.changed() version = version + 1 end

--- Must be called when it changes whether a parameter requires a gradient.
function names.trained() trained = trained + 1 end

--- A number that grows with every change of what some model is made of, or of what is trained. Who
--- relies on a model's parameters compares it, and looks at them again where it has grown.
---@return integer
function names.structure() return version + trained end

--- Notes that a parameter, or a module with these fields, was assigned to a place.
---@param what any
---@param state table of the module that has it now
---@param key any
function names.note(what, state, key)
  local list = places[what] or {}
  places[what] = list
  for _, place in ipairs(list) do if place.state == state and place.key == key then return end end
  list[#list + 1] = { state = state, key = key }
end

--- The places that have a parameter now.
---@param parameter ms.Tensor
---@return { state: table, key: any }[]
function names.places(parameter)
  local list = {}
  for _, place in ipairs(places[parameter] or {}) do
    if rawget(place.state.fields, place.key) == parameter then list[#list + 1] = place end
  end
  return list
end

--- Notes that `new` has taken all places of `old`.
function names.replace(old, new)
  places[new] = places[old]
  names.changed()
end

--- Notes that `cast` takes the places of a parameter for a while; the parameter keeps its name.
function names.stand_in(cast, parameter) parameter_of[cast] = parameter end

local function holds(place, what)
  local value = rawget(place.state.fields, place.key)
  if value == what or parameter_of[value] == what then return value ~= nil end
  local inner = module_state(value)
  return inner ~= nil and inner.fields == what
end

--- Whether a module, or one below it, has these fields.
---@param state table
---@param fields table
---@param seen? table
---@return boolean
function names.contains(state, fields, seen)
  seen = seen or {}
  if seen[state.fields] then return false end
  seen[state.fields] = true
  if state.fields == fields then return true end
  for _, key in ipairs(state.order) do
    local inner = module_state(rawget(state.fields, key))
    if inner and names.contains(inner, fields, seen) then return true end
  end
  return false
end

-- The state of the module at the top, and how far it is. Modules never contain themselves. A part
-- may be in several trees, such as a block that was replaced and the one in its place, to which its
-- parts were given: the tallest one is the model, of equal ones the last.
local function root_of(state)
  local root, height = state, 0
  for _, place in ipairs(places[state.fields] or {}) do
    if holds(place, state.fields) then
      local above, distance = root_of(place.state)
      if distance + 1 >= height then root, height = above, distance + 1 end
    end
  end
  return root, height
end

-- All names below a root.
local function collect(root)
  local found, seen = setmetatable({}, { __mode = "k" }), {}
  local function visit(state, prefix)
    if seen[state.fields] then return end
    seen[state.fields] = true
    local inner = {}  -- a module's own before those of its parts
    for _, key in ipairs(state.order) do
      local value = rawget(state.fields, key)
      if module_state(value) then
        inner[#inner + 1] = { module_state(value), names.join(prefix, key) }
      elseif value ~= nil then
        local parameter = parameter_of[value] or value
        found[parameter] = found[parameter] or names.join(prefix, key)
      end
    end
    for _, part in ipairs(inner) do visit(part[1], part[2]) end
  end
  visit(root, "")
  return found
end

---@param parameter ms.Tensor
---@return string
function names.of(parameter)
  local root, height
  for _, place in ipairs(places[parameter] or {}) do
    if holds(place, parameter) then
      local above, distance = root_of(place.state)
      if not root or distance >= height then root, height = above, distance end
    end
  end
  if not root then return "" end
  local found = known[root]
  if not found or found.version ~= version then
    found = { version = version, of = collect(root) }
    known[root] = found
  end
  return found.of[parameter] or ""
end

return names
