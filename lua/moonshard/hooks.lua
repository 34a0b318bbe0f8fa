-- Communication hooks: native links, and chains. Readable twins of the native links, in Lua, are files of hooks/.
--
-- A link is a function(bucket, next) -> future, or something callable with these. A native link is a table { kind, op, dtype, group } that is callable too:
-- a chain of native links only is handed to the engine as data, every other chain runs here.
local core = require "moonshard.core"
local future = require "moonshard.future"
local check = require "moonshard.options".check

local hooks = {}

hooks.then_optimizer = require("moonshard.overlap").then_optimizer

local Native = {}                 -- metatable of native links
local Chain = {}                  -- metatable of chains: { links... }, flat

local reductions = { reduce = true, all_reduce = true, noop = true }

-- Runs a native link inside a chain that is run here.
function Native.__call(self, bucket, next)
  if reductions[self.kind] then return future.at(bucket:_reduce(self.core)) end
  local before = bucket:buffer()
  bucket:_encode(self.core)
  return next(bucket):and_then(function(reduced) return bucket:_decode(self.core, before, reduced) end)
end
Native.__tostring = function(self) return self.name end
Chain.__tostring = function(self)
  local names = {}
  for i, link in ipairs(self) do names[i] = hooks.name(link) end
  return table.concat(names, ", ")
end

local function native(kind, options, fields)
  local link = { kind = kind, name = fields.name or kind, op = options.op, dtype = fields.dtype, group = options.group }
  link.core = core.native_link(link)
  return setmetatable(link, Native)
end

--------------------------------------------------------------------------------------------------------------------------- native links

--- The kind's own reduction. op: "avg" unless given.
---@param options? { op?: ms.Op }
---@return ms.Link
function hooks.reduce(options) return native("reduce", check("hooks.reduce", options, { "op" }), {}) end

--- all_reduce buckets only. op: "avg" unless given: each rank's numbers are divided first, then summed. group: instead of the bucket's.
---@param options? { op?: ms.Op, group?: ms.Group }
---@return ms.Link
function hooks.all_reduce(options) return native("all_reduce", check("hooks.all_reduce", options, { "op", "group" }), {}) end

--- Gradients stay local: what a step costs without communication.
---@param options? { group?: ms.Group }
---@return ms.Link
function hooks.noop(options) return native("noop", check("hooks.noop", options, { "group" }), {}) end

local floats = { f32 = true, f16 = true, bf16 = true }

--- There and back: what follows sees the buffer in dtype. Reductions of 16-bit tensors divide first and add in f32.
---@param options { dtype: ms.DType }
---@return ms.Link
function hooks.cast(options)
  options = check("hooks.cast", options, { "dtype" })
  if not floats[options.dtype] then core.raise(("hooks.cast: dtype must be f16, bf16 or f32, not %s"):format(tostring(options.dtype))) end
  return native("cast", {}, { dtype = options.dtype, name = "cast " .. options.dtype })
end

local function compress(name, dtype)
  return function(options)
    options = check("hooks." .. name, options, { "group" })
    return hooks.chain { hooks.cast { dtype = dtype }, hooks.all_reduce { group = options.group } }
  end
end

--- Casts, averages in f16, casts back.
---@param options? { group?: ms.Group }
---@return ms.Link
hooks.fp16_compress = compress("fp16_compress", "f16")

--- Casts, averages in bf16, casts back.
---@param options? { group?: ms.Group }
---@return ms.Link
hooks.bf16_compress = compress("bf16_compress", "bf16")

local by_name = { "reduce", "all_reduce", "noop", "fp16_compress", "bf16_compress" }

--------------------------------------------------------------------------------------------------------------------------------- chains

local function is_callable(value)
  local meta = getmetatable(value)
  return type(value) == "function" or type(meta) == "table" and meta.__call ~= nil
end

-- A link from what may stand for one: itself, a native one's name, a file that returns one.
local function link_of(value, what)
  if type(value) == "string" and value:match "%.lua$" then
    local load, message = loadfile(value)
    if not load then core.raise(("%s: the file of a link cannot be loaded: %s"):format(what, message)) end
    local link = load()
    if not is_callable(link) then core.raise(("%s: '%s' returned a %s, not a link"):format(what, value, type(link))) end
    return link
  elseif type(value) == "string" then
    for _, name in ipairs(by_name) do if name == value then return hooks[name]() end end
    local nearest = core.nearest(value, by_name)
    core.raise(("%s: unknown link '%s'%s; native ones are %s; a file's name ends in .lua"):format(what, value,
      nearest and (": did you mean '%s'?"):format(nearest) or "", table.concat(by_name, ", ")))
  elseif not is_callable(value) then
    core.raise(("%s: a link is a function(bucket, next), a native link or its name, not a %s"):format(what, type(value)))
  end
  return value
end

--- What messages call a link.
---@param link any
---@return string
function hooks.name(link)
  if type(link) ~= "function" then return tostring(link) end
  local info = debug.getinfo(link, "S")
  return ("link '%s:%d'"):format(info.short_src, info.linedefined)
end

local function add(list, value, what)
  local link = link_of(value, what)
  if getmetatable(link) == Chain then
    for _, inner in ipairs(link) do list[#list + 1] = inner end
  else list[#list + 1] = link end
end

local function is_reduction(link) return getmetatable(link) == Native and reductions[link.kind] == true end

-- Calls link `position` of the chain; behind the last own one what follows from outside.
local function call_link(chain, position, bucket, outer, state)
  local link = chain[position]
  if not link then return outer(bucket) end
  local called = false
  local function next(given)
    if called then error("it called next twice: a bucket is reduced once", 0) end
    called = true
    local result = call_link(chain, position + 1, given or bucket, outer, state)
    state.link = link
    return result
  end
  state.link = link
  local result = link(bucket, next)
  if core.is_tensor(result) then return future.new(result, core.stream()) end
  if not future.is_future(result) then
    error(("it returned %s: a future (what next gives) or a tensor is expected"):format(result == nil and "nothing" or "a " .. type(result)), 0)
  end
  return result
end

-- A chain inside of another.
function Chain.__call(self, bucket, next) return call_link(self, 1, bucket, next, {}) end

--- Links around the reduction at their end: hooks.reduce { op = "avg" } unless one is there. A chain is a link, too.
---@param links ms.LinkLike[]
---@return ms.Link
function hooks.chain(links)
  if type(links) ~= "table" then core.raise("hooks.chain: a list of links is expected, not " .. type(links)) end
  local list = setmetatable({}, Chain)
  for i, value in ipairs(links) do add(list, value, ("hooks.chain: link %d"):format(i)) end
  for i, link in ipairs(list) do
    if i < #list and is_reduction(link) then core.raise(("hooks.chain: link %d (%s) reduces: the links behind it would never run"):format(i, hooks.name(link))) end
  end
  return list
end

--- What a reducer runs: { links = ... } where all are native, else { hook = f(bucket) }.
---@param value ms.LinkLike
---@param what string
---@return table
function hooks.compile(value, what)
  local chain, all_native = setmetatable({}, Chain), true
  add(chain, value, what)
  if not is_reduction(chain[#chain]) then chain[#chain + 1] = hooks.reduce() end
  for _, link in ipairs(chain) do all_native = all_native and getmetatable(link) == Native end
  if all_native then return { chain = chain, links = chain, name = tostring(chain) } end
  local state = {}                                    -- link: the one that runs; hooks do not nest
  return { chain = chain, name = tostring(chain), hook = function(bucket)
    local ok, result = pcall(call_link, chain, 1, bucket, nil, state)
    if not ok then error(("%s: %s"):format(hooks.name(state.link), tostring(result)), 0) end
    return result
  end }
end

return hooks
