-- Modules: Lua objects that own parameters, buffers and other modules, in order of assignment.
local core = require "moonshard.core"
local named = require "moonshard.base.named"
local names = require "moonshard.nn.names"
local options_of = require "moonshard.base.options"
local piece = require "moonshard.parallel.shard_piece"
local tree = require "moonshard.nn.tree"
local ownership = require "moonshard.base.ownership"
local check, argument = options_of.check, options_of.argument

-- An object's fields are kept in its metatable, so that every assignment runs `assign`:
--   fields   all values by key (the object itself stays empty); falls back to the class
--   order    keys of parameters, buffers and modules, in order of first assignment
--   training train or eval
--   counter  state of the random numbers that reset begins with, of modules made on "meta"
--   drawn    numbers of the draws that init has made: seed, step, first, and last, the one after it
--   unsaved  names of buffers that are not saved;  hooks   lists of functions by moment
local module = {}

---@class ms.Module
local Module = {}
Module.__index = Module
Module.__name = "ms.Module"
module.base = Module

-- tensor -> dtype that it has in the file from which nn.pretrained read it. `save` writes it in
-- this dtype; Module:to removes the entry.
module.loaded_dtype = setmetatable({}, { __mode = "k" })

-- tensor on "meta" -> { source, version }: its values are read from files when they are made, if
-- the tensor still has that version.
module.unread = setmetatable({}, { __mode = "k" })

local function state_of(object)
  local meta = getmetatable(object)
  if type(meta) ~= "table" or not meta.module then
    core.raise("a module is expected, not " .. type(object))
  end
  return meta
end

---@param value any
---@return boolean
function module.is_module(value)
  local meta = type(value) == "table" and getmetatable(value)
  return type(meta) == "table" and meta.module == true
end

-- Whether modules hold tensors of such a dtype in other precisions, too.
local floats = { f32 = true, f16 = true, bf16 = true }
local integers = { i64 = true, i32 = true, u16 = true, u8 = true, bool = true }

---@param t ms.Tensor
---@return ms.Parameter
function module.Parameter(t)
  if not core.is_tensor(t) then
    core.raise("nn.Parameter: a tensor is expected, not " .. type(t))
  end
  if not floats[t:dtype()] then
    core.raise(("nn.Parameter: parameters are f32, f16 or bf16, not %s: add_buffer(name, tensor) \z
      holds integers"):format(t:dtype()))
  end
  if not t:requires_grad() then t:requires_grad_() end
  return core.mark_parameter(t)
end

-- Whether an assignment of this value can change names. Buffers have no names; forward may assign
-- them often.
local function is_named(value) return module.is_module(value) or core.is_parameter(value) end

-- Whether a plain table has a module or a parameter in it, at most so deep.
local function holds_named(value, depth)
  if not named.is_plain(value) or depth == 0 then return false end
  for _, item in next, value do
    if is_named(item) or holds_named(item, depth - 1) then return true end
  end
  return false
end

local function refuse_table(state, key)
  core.raise(("%s.%s is a table of modules or parameters, which are not trained and not saved: \z
    put modules into nn.List { ... }, or assign each as a field of its own")
    :format(state.class and state.class.class_name or "module", tostring(key)))
end

-- Tables that were filled after they were assigned.
local function check_tables(state)
  for key, value in next, state.fields do
    if holds_named(value, 3) then refuse_table(state, key) end
  end
end

-- A list of modules is a part of the model as nn.List is; other tables of them are refused.
local function as_part(state, key, value)
  if not holds_named(value, 3) then return value end
  for k, item in next, value do
    if math.type(k) ~= "integer" or k > #value or not module.is_module(item) then
      refuse_table(state, key)
    end
  end
  return ownership.functions.list(value)
end

local function assign(object, key, value)
  local state = getmetatable(object)
  local fields = state.fields
  if key == "training" then
    core.raise(("%s.training cannot be written: train() and eval() set it, of all parts")
      :format(state.class and state.class.class_name or "module"))
  end
  value = as_part(state, key, value)
  local owned = module.is_module(value) or core.is_tensor(value)
  if owned and not state.place[key] then
    state.order[#state.order + 1] = key
    state.place[key] = true
  end
  if module.is_module(value) then
    local child = getmetatable(value)
    if names.contains(child, state.fields) then
      core.raise("a module cannot be a part of itself")
    end
    names.note(child.fields, state, key)
  elseif core.is_parameter(value) then names.note(value, state, key)
  elseif owned then value:keep() end
  if is_named(value) or is_named(rawget(fields, key)) then names.changed() end
  fields[key] = value
end

-- Inputs, outputs and gradients are lists; a single tensor that a hook returns is a list of one.
local function as_list(value, what)
  if core.is_tensor(value) then return { value, n = 1 } end
  if type(value) ~= "table" then
    core.raise(("a %s hook returned a %s; a tensor, a list or nothing is expected")
      :format(what, type(value)))
  end
  return value
end

-- Calls the hooks in order. A value that a hook returns replaces the last argument, also for the
-- hooks after it.
local function run_hooks(what, list, ...)
  local values = table.pack(...)
  for _, hook in ipairs { table.unpack(list) } do
    local replaced = hook(table.unpack(values, 1, values.n))
    if replaced ~= nil then values[values.n] = as_list(replaced, what) end
  end
  return values[values.n]
end

-- Runs hooks on the gradients of these tensors, once all gradients are complete. With one tensor, a
-- hook may return a replacement of its gradient. With several that is refused, because backward has
-- already used some of them.
local function on_gradients(object, what, tensors, list)
  local wanted, arrived, count = {}, {}, 0
  for i = 1, tensors.n or #tensors do
    local t = tensors[i]
    if core.is_tensor(t) and t:requires_grad() then wanted[#wanted + 1] = t end
  end
  for i, t in ipairs(wanted) do
    t:on_grad(function(gradient)
      arrived[i] = gradient:detach()
      count = count + 1
      if count < #wanted then return end
      count = 0
      local given = arrived
      arrived = {}
      local gradients = run_hooks(what, list, object, given)
      if gradients == given then return end
      if gradients[1] == nil then
        core.raise(("a %s hook returned a list without a gradient"):format(what))
      end
      if #wanted > 1 then
        core.raise(("a %s hook replaced one of %d gradients; that is possible where there is one")
          :format(what, #wanted))
      end
      return gradients[1]
    end)
  end
end

-- Aliases of the inputs. The gradients of an alias are those of this call alone, and its hooks are
-- freed with this call's graph.
local function alias_inputs(inputs)
  local aliases = { n = inputs.n or #inputs }
  for i = 1, aliases.n do
    local t = inputs[i]
    aliases[i] = core.is_tensor(t) and t:requires_grad() and core.is_recording()
      and t:view(table.unpack(t:shape())) or t
  end
  return aliases
end

-- Forwards that store no tensor: what they make and do not return, only the engine needs. The value
-- tells of a call's arguments whether such tensors are released when the call has returned.
local tidies = setmetatable({}, { __mode = "k" })

local function never() return false end

--- Says of a forward of the library that it stores no tensor.
---@param forward function
---@param releases? fun(...): boolean whether a call with these arguments ends with the release of
--- what it has made and does not return. Without it no call does: the module is a part of others.
function module.tidy(forward, releases) tidies[forward] = releases or never end

-- Whether neither the module nor a part of it stores a tensor, and no hook sees one. A layer's own
-- forward, such as an adapter's, calls that of its class. A part that is a unit of a sharded model
-- is refused, as its edges make the tensors of its parameters.
local function is_tidy(state)
  local fields, order = state.fields, state.order
  if state.hooks or not tidies[fields.forward] or not tidies[state.class.forward] then
    return false
  end
  for i = 1, #order do
    local part = fields[order[i]]
    local meta = module.is_module(part) and getmetatable(part)
    if meta and (meta.around or not is_tidy(meta)) then return false end
  end
  return true
end

--- Whether a call of this module leaves its arguments and results to its caller alone.
---@param object ms.Module
---@return boolean
function module.is_tidy(object) return is_tidy(state_of(object)) end

local function run(object, ...)
  local state = getmetatable(object)
  local hooks = state.hooks
  local forward = state.fields.forward
  if not forward then
    core.raise("module " .. tostring(state.class.class_name) .. " has no method forward")
  end
  if not hooks then
    local releases = tidies[forward]
    if releases and releases(object, ...) and is_tidy(state) then
      return core.tidy(forward, object, ...)
    end
    return forward(object, ...)
  end
  local inputs = table.pack(...)
  if hooks.pre_forward then inputs = run_hooks("pre_forward", hooks.pre_forward, object, inputs) end
  if hooks.backward then
    inputs = alias_inputs(inputs)
    on_gradients(object, "backward", inputs, hooks.backward)
  end
  local outputs = table.pack(forward(object, table.unpack(inputs, 1, inputs.n or #inputs)))
  if hooks.forward then outputs = run_hooks("forward", hooks.forward, object, inputs, outputs) end
  if hooks.pre_backward then on_gradients(object, "pre_backward", outputs, hooks.pre_backward) end
  return table.unpack(outputs, 1, outputs.n or #outputs)
end

-- A unit of a sharded model has its edges around what its module does, hooks included.
local function call(object, ...)
  local state = getmetatable(object)
  local around = state.around
  if not state.called then
    state.called = true
    check_tables(state)
  end
  if around then return around(object, run, ...) end
  return run(object, ...)
end

-- Values that init computes on "meta" are made later by the method reset, with the random numbers
-- that it draws in init: those from here on, or from where init calls it.
local function note_random_numbers(object)
  local state = getmetatable(object)
  state.counter = { core.random_state() }
  rawset(state.fields, "reset", function(...)
    state.counter = { core.random_state() }
    return state.class.reset(...)
  end)
end

-- How values are made in init is noted, so that nn.split and its like can make them as those of a
-- place in a larger model; and which numbers were drawn.
local function init(object, class, ...)
  local noted = class.reset and core.device() == "meta"
  if noted then note_random_numbers(object) end
  local seed, step, first = core.random_state()
  local before = core.note_initial(true)
  local scope <close> = setmetatable({}, { __close = function() -- luacheck: ignore scope
    core.note_initial(before)
  end })
  class.init(object, ...)
  local _, _, last = core.random_state()
  getmetatable(object).drawn = { seed = seed, step = step, first = first, last = last }
  if noted then rawset(getmetatable(object).fields, "reset", nil) end
end

---@param name string
---@param base? table
---@return table
function module.class(name, base)
  argument("nn.class", "name", name, "string")
  argument("nn.class", "base", base, "table?")
  local class = setmetatable({ class_name = name }, {
    __index = base or Module,
    __call = function(class, ...)
      local fields = setmetatable({}, { __index = class })
      local object = setmetatable({}, {
        module = true, class = class, fields = fields, order = {}, place = {}, unsaved = {},
        training = true,
        __index = fields, __newindex = assign, __call = call,
        __tostring = tree,
        __len = function() return #fields end,
      })
      if class.init then init(object, class, ...) end
      return object
    end,
  })
  return class
end

--- An object that represents a module: it has the module's parameters, and what is assigned to it
--- is the module's. meta: the rest of its metatable.
---@param inner ms.Module
---@param meta table
---@param kind string what the object is called in texts
---@param options table<string, any> of wrapping, by name
---@return table
function module.wrapper(inner, meta, kind, options)
  local state = getmetatable(inner)
  for _, name in ipairs { "order", "fields", "place", "unsaved", "class" } do
    meta[name] = state[name]
  end
  meta.module, meta.training = true, true
  meta.__newindex = function(_, key, value)
    if options[key] ~= nil and rawget(meta.fields, key) == nil then
      core.raise(("%s is an option of ms.%s, given when a model is wrapped: writing it changes \z
        nothing"):format(key, kind))
    end
    inner[key] = value
  end
  meta.__tostring = function() return kind .. " of " .. tostring(inner) end
  meta.__len = function() return #inner end
  return setmetatable({}, meta)
end

--- A field of the inner module, for an object of module.wrapper. Methods of every module (names,
--- state, modes) run on the inner one; what returns that returns the object.
---@param object any
---@param inner ms.Module
---@param key string
---@return any
function module.field_of_inner(object, inner, key)
  local value = inner[key]
  if type(value) ~= "function" or Module[key] == nil then return value end
  return function(given, ...)
    if given ~= object then return value(given, ...) end
    return (function(first, ...)
      if first == inner then return object, ... end
      return first, ...
    end)(value(inner, ...))
  end
end

---------------------------------------------------------------------------------------------- names

---@class ms.Tensor
local Tensor = core.tensor_methods

---@return string
function Tensor:name() return names.of(self) end

---@return integer[]
function Tensor:full_shape()
  local entry = ownership.sharded[self]
  return entry and { table.unpack(entry.shape) } or self:shape()
end

--- Whether fsdp has cut this parameter into pieces, of which this rank has one.
---@param p ms.Parameter
---@return boolean
function module.is_cut(p)
  local entry = ownership.sharded[p]
  return entry ~= nil and entry.shards:size() > 1
end

--- Whether this rank has a part of a parameter of which other ranks have other parts, or none.
---@param p ms.Parameter
---@return boolean
function module.is_part(p)
  local entry = ownership.sharded[p]
  return entry ~= nil and (entry.own or entry.shards:size() > 1)
end

local set_requires_grad = Tensor.requires_grad_

---@param yes? boolean true unless given
---@return self
function Tensor:requires_grad_(...)
  if ownership.sharded[self] then
    core.raise(("requires_grad_: '%s' belongs to an fsdp model, which has laid out its memory by \z
      what is trained: unwrap() the model, change it, and wrap it again"):format(self:name()))
  end
  if core.is_parameter(self) then names.trained() end
  return set_requires_grad(self, ...)
end

options_of.methods(Tensor, "a tensor", core.is_tensor, { "name", "full_shape", "requires_grad_" })

---@return fun(): string, ms.Module
function Module:modules()
  local found, seen = {}, {}
  local function visit(object, prefix)
    if seen[object] then return end
    seen[object] = true
    found[#found + 1] = { prefix, object }
    local state = state_of(object)
    check_tables(state)
    for _, key in ipairs(state.order) do
      local value = state.fields[key]
      if module.is_module(value) then visit(value, names.join(prefix, key)) end
    end
  end
  visit(self, "")
  local i = 0
  return function()
    i = i + 1
    if found[i] then return found[i][1], found[i][2] end
  end
end

-- Calls f(name, tensor, is_parameter, is_saved) for all tensors that are owned, each once.
local function each_tensor(self, f)
  local seen = {}
  for prefix, object in self:modules() do
    local state = state_of(object)
    for _, key in ipairs(state.order) do
      local value = state.fields[key]
      if core.is_tensor(value) and not seen[value] then
        seen[value] = true
        f(names.join(prefix, key), value, core.is_parameter(value), not state.unsaved[key])
      end
    end
  end
end

---@param filter? fun(p: ms.Parameter, name: string): boolean
---@return ms.Parameter[]
function Module:parameters(filter)
  argument("parameters", "filter", filter, "function?")
  local list, names_of, models = {}, {}, {}
  each_tensor(self, function(name, t, is_parameter)
    if not is_parameter then return end
    list[#list + 1], names_of[#names_of + 1] = t, name
    if ownership.sharded[t] then models[ownership.sharded[t].model] = true end
  end)
  if not filter then return list end
  -- A filter that asks for shapes gets the same answer whether or not the model is sharded.
  for model in pairs(models) do model.sharded:show_whole(true) end
  local scope <close> = setmetatable({}, { __close = function() -- luacheck: ignore scope
    for model in pairs(models) do model.sharded:show_whole(false) end
  end })
  local found = {}
  for i, p in ipairs(list) do if filter(p, names_of[i]) then found[#found + 1] = p end end
  return found
end

---@return { name: string, parameter: ms.Parameter }[]
function Module:named_parameters()
  local list = {}
  each_tensor(self, function(name, t, is_parameter)
    if is_parameter then list[#list + 1] = { name = name, parameter = t } end
  end)
  return list
end

---@return table<string, ms.Tensor>
function Module:buffers()
  local buffers = named.table {}
  each_tensor(self, function(name, t, is_parameter)
    if not is_parameter then buffers[name] = t end
  end)
  return buffers
end

---@return ms.Module[]
function Module:children()
  local state, list = state_of(self), {}
  for _, key in ipairs(state.order) do
    if module.is_module(state.fields[key]) then list[#list + 1] = state.fields[key] end
  end
  return list
end

---@param name string
---@param t ms.Tensor
---@param options? { save?: boolean }
function Module:add_buffer(name, t, options)
  argument("add_buffer", "name", name, "string")
  argument("add_buffer", "t", t, "tensor")
  check("add_buffer", options, { save = "boolean" })
  if core.is_parameter(t) then
    core.raise("add_buffer: '" .. name .. "' is a parameter; assign it")
  end
  self[name] = t
  if options and options.save == false then state_of(self).unsaved[name] = true end
end

---------------------------------------------------------------------------------------------- modes

---@param yes? boolean
---@return self
function Module:train(yes)
  argument("train", "yes", yes, "boolean?")
  for _, object in self:modules() do state_of(object).training = yes ~= false end
  return self
end

---@return self
function Module:eval() return self:train(false) end

---@return boolean
function Module:is_training() return state_of(self).training end

-- Puts `new` wherever a module below `root` has `old`.
local function replace(root, old, new)
  for _, object in root:modules() do
    local state = state_of(object)
    for _, key in ipairs(state.order) do
      if state.fields[key] == old then state.fields[key] = new end
    end
  end
end

-- Raises for a parameter that another tensor is about to replace, where somebody would go on with
-- the old one.
local function refuse_replacement(t, name)
  local s = ownership.reduced[t]
  if s and s.reducer then
    core.raise(("to: ddp reduces the gradient of '%s': convert the model before it is wrapped, or \z
      unwrap() it first"):format(name))
  end
  if ownership.optimizer_of(t) then
    core.raise(("to: '%s' belongs to an optimizer, which would go on with the old values: convert \z
      the model before its optimizer is made"):format(name))
  end
  if core.has_hooks(t) then
    core.raise(("to: '%s' has functions of on_grad, which would be lost: convert the model before \z
      they are given"):format(name))
  end
end

---@param what ms.DType|string
---@return self
function Module:to(what)
  argument("to", "what", what, "string")
  if integers[what] then
    core.raise(("to: parameters and float buffers are cast to f32, f16 or bf16, not %s")
      :format(what))
  end
  local tensors = {}
  each_tensor(self, function(name, t)
    if ownership.sharded[t] and t:dtype() ~= what then
      core.raise(("to: '%s' belongs to an fsdp model: convert the model before it is wrapped")
        :format(name))
    elseif module.unread[t] and floats[t:dtype()] and t:dtype() ~= what then
      core.raise(("to: '%s' is on \"meta\" and will be read from a file: convert the model after \z
        materialize"):format(name))
    end
    tensors[#tensors + 1] = t
    if core.is_parameter(t) and floats[what] and t:dtype() ~= what then
      refuse_replacement(t, name)
    end
  end)
  for _, t in ipairs(tensors) do
    module.loaded_dtype[t] = nil
    -- Codes stay; their numbers are decoded to this dtype when they become a weight again.
    if ownership.coded[t] then ownership.coded[t].dtype = what end
    local new = floats[t:dtype()] and core.no_grad(function() return t:detach():to(what) end)
    if new and new:dtype() ~= t:dtype() then
      if core.is_parameter(t) then
        local frozen = not t:requires_grad()
        new = module.Parameter(new)
        if frozen then new:requires_grad_(false) end
        names.replace(t, new)
        ownership.alone[new] = ownership.alone[t]
        ownership.declared[new] = ownership.declared[t]
      end
      replace(self, t, new:keep())
    end
  end
  return self
end

---------------------------------------------------------------------------------------------- hooks

local moments = { "pre_forward", "forward", "pre_backward", "backward" }

---@param when "pre_forward"|"forward"|"pre_backward"|"backward"
---@param f function
---@return fun() removes f
function Module:hook(when, f)
  local known = false
  for _, moment in ipairs(moments) do known = known or moment == when end
  if not known then
    core.raise(("unknown moment '%s' of a hook: did you mean '%s'?")
      :format(tostring(when), core.nearest(tostring(when), moments) or "forward"))
  end
  if type(f) ~= "function" then core.raise("hook: a function is expected, not " .. type(f)) end
  local state = state_of(self)
  state.hooks = state.hooks or {}
  local list = state.hooks[when] or {}
  state.hooks[when] = list
  list[#list + 1] = f
  return function()
    for i, other in ipairs(list) do
      if other == f then table.remove(list, i) return end
    end
  end
end

--- What a call of this module is a call of, and nothing else: the forward of the object or of its
--- class. nil: it has hooks, or is a unit of a sharded model.
---@param object ms.Module
---@return function?
function module.plain_forward(object)
  local state = state_of(object)
  if not state.around and not state.hooks then return state.fields.forward end
end
local plain_forward = module.plain_forward

--- down(gelu(up(x))). If both layers are plain ones, and neither is kept out of fp8, this is one
--- operator, which keeps less for backward and gives the same bits.
---@param up ms.Module
---@param down ms.Module
---@param forward function of linear layers
---@param operator "mlp"|"mlp_t" by the layout of their weights
---@param x ms.Tensor
---@return ms.Tensor
function module.through_gelu(up, down, forward, operator, x)
  if plain_forward(up) == forward and plain_forward(down) == forward and up.fp8 ~= false
    and down.fp8 ~= false
  then
    return x[operator](x, up.weight, down.weight, up.bias, down.bias)
  end
  return down(up(x, "gelu"))
end

local accumulating = false  -- inside a pass of accumulate that is not the last

--- Whether a pass of accumulate runs that is not the last one, so that gradients are only added up.
---@return boolean
function module.is_accumulating() return accumulating end

---@param count integer
---@param f fun(i: integer)
function Module:accumulate(count, f)
  if math.type(count) ~= "integer" or count < 1 then
    core.raise("accumulate: count must be an integer of 1 or more")
  end
  if type(f) ~= "function" then
    core.raise("accumulate: a function is expected, not " .. type(f))
  end
  local before_all = accumulating
  local scope <close> = setmetatable({}, { -- luacheck: ignore scope
    __close = function() accumulating = before_all end,
  })
  for i = 1, count do
    local before = core.backwards()
    accumulating = before_all or i < count
    f(i)
    if core.backwards() == before then
      core.raise(("accumulate: pass %d did not call backward"):format(i))
    end
  end
end

--------------------------------------------------------------------------------------------- saving

-- Whether fsdp has sharded this parameter, and it is not gathered now.
local function is_piece(t)
  local entry = ownership.sharded[t]
  if not entry then return false end
  local elements = 1
  for _, size in ipairs(entry.shape) do elements = elements * size end
  return t:dim() ~= #entry.shape or t:numel() ~= elements
end

--- The option kind of `state`: "full" unless given.
---@param what string
---@param options? { kind?: "full"|"sharded", live?: boolean }
---@return "full"|"sharded" kind
---@return boolean live
function module.kind_of_state(what, options)
  local given = check(what, options, { kind = "string", live = "boolean" })
  local kind = given.kind or "full"
  if kind ~= "full" and kind ~= "sharded" then
    core.raise(("%s: kind is full or sharded, not '%s'"):format(what, kind))
  end
  return kind, given.live == true
end

--- A state whose tensors are copies that outlive the step, so that it stays what it was when it was
--- asked for. Tensors on "meta" have no values, and are themselves.
---@param value any a tensor, an ms.Piece, or a table of them
---@param is_live? fun(t: ms.Tensor): boolean unless given, all tensors are somebody's
---@return any
function module.copied(value, is_live)
  if core.is_tensor(value) then
    if value:device() == "meta" then return value end
    if is_live and not is_live(value) then return value:keep() end
    return core.no_grad(function() return value:detach():clone():keep() end)
  end
  if piece.is(value) then
    return piece.new(module.copied(value.tensor), value.shape, value.first, value.saves,
      value.region)
  end
  if not named.is_plain(value) then return value end
  local made = named.table {}
  for key, item in pairs(value) do made[key] = module.copied(item, is_live) end
  return made
end

--- Parameters and saved buffers, in order.
---@param object ms.Module
---@return { name: string, tensor: ms.Tensor }[]
function module.saved(object)
  local list = {}
  each_tensor(object, function(name, t, _, saved)
    if saved then list[#list + 1] = { name = name, tensor = t } end
  end)
  return list
end

---@param options? { kind?: "full"|"sharded", live?: boolean }
---@return table<string, ms.Tensor>
function Module:state(options)
  local kind, live = module.kind_of_state("state", options)
  local parts = ownership.functions.whole
  if (kind == "sharded" or not live) and parts.has(self) then
    return parts.state(self, kind, live)
  end
  local state = named.table {}
  each_tensor(self, function(name, t, _, saved)
    if saved and is_piece(t) then
      core.raise(("state: this rank has a piece of '%s': call state() of the fsdp model (what \z
        ms.fsdp returned)"):format(name))
    end
    if saved then state[name] = t end
  end)
  return live and state or module.copied(state)
end

local function first_three(list)
  table.sort(list)
  local text = table.concat(list, ", ", 1, math.min(3, #list))
  return #list > 3 and ("%s and %d more"):format(text, #list - 3) or text
end

--- What of a state does not fit, as text, from lists of names; nil: all fits.
---@param wrong string[] of another shape, with both
---@param missing string[]
---@param unknown string[]
---@param partial? boolean a state may have less or more
---@return string?
function module.misfit(wrong, missing, unknown, partial)
  local problems = {}
  if #wrong > 0 then problems[1] = "wrong shape: " .. first_three(wrong) end
  if not partial and #missing > 0 then
    problems[#problems + 1] = "missing: " .. first_three(missing)
  end
  if not partial and #unknown > 0 then
    problems[#problems + 1] = "unknown: " .. first_three(unknown)
  end
  return #problems > 0 and table.concat(problems, "; ") or nil
end

---@param a ms.Tensor
---@param b ms.Tensor
---@return boolean
function module.same_shape(a, b)
  local x, y = a:shape(), b:shape()
  if #x ~= #y then return false end
  for i = 1, #x do if x[i] ~= y[i] then return false end end
  return true
end

-- A value that will be read from a file is on "meta": the copy is read from there too.
local function copy_value(t, given)
  local unread = t:dtype() == given:dtype() and module.unread[given]
  local written = unread and unread.version ~= core.tensor_version(given)
  t:copy_(given)
  if unread and t:device() == "meta" then
    module.unread[t] = {
      source = unread.source, version = written and -1 or core.tensor_version(t),
    }
  end
end

---@param state table<string, ms.Tensor>
---@param options? ms.LoadOptions
function Module:load_state(state, options)
  argument("load_state", "state", state, "table")
  local parts = ownership.functions.whole
  if parts.has(self) then return parts.load_state(parts.items(self), state, options) end
  options = check("load_state", options, { partial = "boolean" })
  local own = self:state { live = true }
  local missing, unknown, wrong = {}, {}, {}
  for name, t in pairs(own) do
    local given = state[name]
    if not given then
      missing[#missing + 1] = name
    elseif not core.is_tensor(given) or not module.same_shape(t, given) then
      wrong[#wrong + 1] = ("%s (%s here, %s given)"):format(name, tostring(t), tostring(given))
    end
  end
  for name in pairs(state) do if not own[name] then unknown[#unknown + 1] = tostring(name) end end
  local problem = module.misfit(wrong, missing, unknown, options.partial)
  if problem then core.raise("load_state: " .. problem) end
  core.no_grad(function()
    for name, t in pairs(own) do
      local given = state[name]
      if given then copy_value(t, given) end
    end
  end)
end

-- For checkpoints: f(source, first, count, region) for what load_state will read of a state of
-- sources.
function Module:_each_source(given, f)
  local parts = ownership.functions.whole
  parts.each_source(parts.items(self), given, f)
end

---@return self
function Module:materialize()
  ownership.functions.materialize("materialize", self)
  return self
end

function Module:clip_grad_norm(max, p) return ownership.functions.clip_grad_norm(self, max, p) end

function Module:clip_grad_value(max) ownership.functions.clip_grad_value(self, max) end

options_of.methods(Module, "a module", module.is_module)

return module
