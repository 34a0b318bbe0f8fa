-- Communication hooks: native links, and chains. The files in hooks/ are versions of the native
-- links in Lua, for reading.
--
-- A link is a function(bucket, next) -> future, or a callable table. A native link is a table {
-- kind, name, facts, core, options } that is callable too. The engine runs a chain that has only
-- native links; every other chain runs here. All facts about native links come from the engine's
-- table (core.link_kinds): a link that is added there has a function here.
local bucket_parts = require "moonshard.parallel.bucket_parts"
local core = require "moonshard.core"
local future = require "moonshard.parallel.future"
local link_state = require "moonshard.parallel.link_state"
local overlap = require "moonshard.parallel.overlap"
local made_by = require "moonshard.scripts.made_by"
local watch = require "moonshard.train.watch"
local options_of = require "moonshard.base.options"
local check, check_group = options_of.check, options_of.check_group

local hooks = {}

hooks.then_optimizer = overlap.then_optimizer

local Native = {}  -- metatable of native links
local Between = {} -- metatable of hooks.reduce with links in Lua between its reductions
local Stage = {}   -- metatable of stages: { name, needs, gives, encode, decode, observe, state }
local Chain = {}   -- metatable of chains: { links... }, flat

-- While a trace is recorded, labels tasks with the bucket and the link that enqueues them.
local function label(bucket, link)
  if core.tracing then
    core.trace_label(link and ("bucket %d: %s"):format(bucket:index(), hooks._name(link)) or nil)
  end
end

-- Wraps f, which runs later, so that its tasks have this label.
local function labelled(bucket, link, f)
  if not core.tracing then return f end
  return function(reduced)
    label(bucket, link)
    local ok, result = pcall(f, reduced)
    label()
    if not ok then error(result, 0) end
    return result
  end
end

-- name -> facts of a native link; and the names in the engine's order
local kinds, kind_names = {}, {}
for i, facts in ipairs(core.link_kinds()) do
  kinds[facts.name], kind_names[i] = facts, facts.name
end

-- Runs a native link in a chain that runs here.
function Native.__call(self, bucket, next)
  if self.facts.reduces then return future.at(bucket:_reduce(self.core)) end
  local before = bucket:buffer()
  bucket:_encode(self.core)
  return next(bucket):and_then(
    labelled(bucket, self, function(reduced) return bucket:_decode(self.core, before, reduced) end))
end
Native.__tostring = function(self) return self.name end
Chain.__tostring = function(self)
  local names = {}
  for i, link in ipairs(self) do names[i] = hooks._name(link) end
  return table.concat(names, ", ")
end

-- A native link of the kind, with these options. between: links that run between the two reductions
-- of a hybrid bucket.
local function native(kind, options, between)
  local facts = kinds[kind]
  local link = { kind = kind, name = kind, facts = facts, between = between }
  for key, value in pairs(options or {}) do link[key] = value end
  for _, name in ipairs { "group", "subgroup" } do
    check_group("hooks." .. kind, name, link[name])
  end
  if facts.casts then link.name = ("%s %s"):format(kind, link.dtype) end
  if facts.has_state then
    link.keeps = link_state.numbered(kind)
    link.state = link_state.core(link.keeps)
  end
  local cores
  for i, inner in ipairs(between or {}) do
    cores = cores or {}
    cores[i] = inner.core
  end
  link.core, link.needs = core.native_link(link, cores)
  return setmetatable(link, Native)
end

local function check_required(kind, options)
  for _, name in ipairs(kinds[kind].options) do
    local text = kinds[kind].required[name]
    if text and options[name] == nil then
      core.raise(("hooks.%s: %s is missing: %s"):format(kind, name, text))
    end
  end
end

--------------------------------------------------------------------------------------- native links

local floats = { f32 = true, f16 = true, bf16 = true }
local integers = { i64 = true, i32 = true, u16 = true, u8 = true, bool = true }

-- One function for each native link; meta.lua has their annotations. reduce is defined below,
-- because it takes links.
for _, kind in ipairs(kind_names) do
  hooks[kind] = function(options)
    options = check("hooks." .. kind, options, kinds[kind].options)
    check_required(kind, options)
    return native(kind, options)
  end
end

local function compress(name, dtype)
  return function(options)
    local group = check("hooks." .. name, options, { "group" }).group
    local reduction = group and hooks.all_reduce { group = group } or hooks.reduce()
    return hooks.chain { hooks.cast { dtype = dtype }, reduction }
  end
end

---@param options? { group?: ms.Group }
---@return ms.Link
hooks.fp16_compress = compress("fp16_compress", "f16")

---@param options? { group?: ms.Group }
---@return ms.Link
hooks.bf16_compress = compress("bf16_compress", "bf16")

-- Links that a name alone can make, because they have no required options.
local by_name = { "fp16_compress", "bf16_compress" }
for _, kind in ipairs(kind_names) do
  if next(kinds[kind].required) == nil then by_name[#by_name + 1] = kind end
end
table.sort(by_name)

--------------------------------------------------------------------------------------------- stages

---@param name string
---@return ms.State
hooks.state = link_state.new
hooks.parts, hooks.joined = bucket_parts.parts, bucket_parts.joined

local stage_options = { "name", "needs", "gives", "encode", "decode", "observe", "is_local" }

---@param stage ms.Stage
---@return ms.Link
function hooks.stage(stage)
  check("hooks.stage", stage, stage_options)
  if type(stage) ~= "table" or type(stage.name) ~= "string" or stage.name == "" then
    core.raise "hooks.stage: a stage has a name, under which its state is saved"
  end
  if stage.is_local ~= nil and type(stage.is_local) ~= "boolean" then
    core.raise(("hooks.stage '%s': is_local must be a boolean, not %s")
      :format(stage.name, type(stage.is_local)))
  end
  local made = { name = stage.name, is_local = stage.is_local }
  for _, key in ipairs { "needs", "gives" } do
    if stage[key] ~= nil and not floats[stage[key]] and not integers[stage[key]] then
      core.raise(("hooks.stage '%s': %s must be a dtype, not %s")
        :format(stage.name, key, tostring(stage[key])))
    end
    made[key] = stage[key]
  end
  for _, key in ipairs { "encode", "decode", "observe" } do
    if stage[key] ~= nil and type(stage[key]) ~= "function" then
      core.raise(("hooks.stage '%s': %s must be a function, not %s")
        :format(stage.name, key, type(stage[key])))
    end
    made[key] = stage[key]
  end
  made.state = link_state.new(stage.name)
  return setmetatable(made, Stage)
end

Stage.__tostring = function(self) return ("stage '%s'"):format(self.name) end

local function check_tensor(self, what, value)
  if core.is_tensor(value) then return value end
  error(("%s: %s returned %s; a tensor is expected")
    :format(tostring(self), what, value == nil and "nothing" or "a " .. type(value)), 0)
end

function Stage.__call(self, bucket, next)
  local buffer, state = bucket:buffer(), self.state
  if self.needs and buffer:dtype() ~= self.needs then
    error(("it needs %s, but the buffer is %s"):format(self.needs, buffer:dtype()), 0)
  end
  if self.observe then self.observe(buffer, state, bucket) end
  if self.encode then
    local made = check_tensor(self, "encode", self.encode(buffer, state, bucket))
    if self.gives and made:dtype() ~= self.gives then
      error(("it gives %s, but encode returned %s"):format(self.gives, made:dtype()), 0)
    end
    bucket:set_buffer(made)
  end
  local result = next(bucket)
  if not self.decode then return result end
  return result:and_then(labelled(bucket, self, function(reduced)
    return check_tensor(self, "decode", self.decode(reduced, state, bucket))
  end))
end

--------------------------------------------------------------------------------------------- chains

local function is_callable(value)
  local meta = getmetatable(value)
  return type(value) == "function" or type(meta) == "table" and meta.__call ~= nil
end

local function refuse_file(link)
  return not is_callable(link) and ("returned a %s, not a link"):format(type(link)) or nil
end

-- The link that a value represents: a link, the name of a native one, or a file that returns one.
local function link_of(value, what)
  if type(value) == "string" and value:match "%.lua$" then
    return watch.link(value, what, refuse_file, hooks._name)
  elseif type(value) == "string" then
    for _, name in ipairs(by_name) do if name == value then return hooks[name]() end end
    local nearest = core.nearest(value, by_name)
    core.raise(("%s: unknown link '%s'%s; native ones are %s; a file's name ends in .lua")
      :format(what, value,
        nearest and (": did you mean '%s'?"):format(nearest) or "", table.concat(by_name, ", ")))
  elseif not is_callable(value) then
    core.raise(("%s: a link is a function(bucket, next), a native link or its name, not a %s%s")
      :format(what, type(value), type(value) == "table" and #value > 0
        and "; put a list of links into hooks.chain" or ""))
  end
  return value
end

-- Links that a command line may name: all but then_optimizer, which needs the recipe's optimizer.
hooks._ready_made = { "bf16_compress", "fp16_compress", table.unpack(kind_names) }
table.sort(hooks._ready_made)

--- For moonshard.scripts: the native link of that name with these options; or the link that a file
--- returns, or makes from options as in scripts/made_by.lua. The result is a table of pieces,
--- because a file may give more than a link.
---@param value string
---@param options table
---@param are_given boolean
---@return ms.Pieces
function hooks._from(value, options, are_given)
  if not value:match "%.lua$" then return { link = hooks[value](options) } end
  local taken = {}
  local link = watch.link(value, "hook", refuse_file, hooks._name,
    made_by.link(value, options, are_given, taken))
  local found = {}
  for name, piece in pairs(taken.pieces or { link = link }) do found[name] = piece end
  if found.link then found.link = link end
  return found
end

--- The name of a link in messages.
---@param link any
---@return string
function hooks._name(link)
  if type(link) ~= "function" then return tostring(link) end
  local info = debug.getinfo(link, "S")
  return ("link '%s:%d'"):format(info.short_src, info.linedefined)
end

--- For links that compress: the numbers that the link was given since the start, the numbers that
--- were sent for them, and the ratio of the two (0: none yet). nil for other links.
---@param link any
---@return { before: integer, after: integer, rate: number }?
function hooks._compression(link)
  if getmetatable(link) ~= Native or not link.facts.compresses then return nil end
  local before, after = link.state:compression()
  return { before = before, after = after, rate = after > 0 and before / after or 0 }
end

local function add(list, value, what)
  local link = link_of(value, what)
  if getmetatable(link) == Chain then
    for _, inner in ipairs(link) do list[#list + 1] = inner end
  else list[#list + 1] = link end
end

local function is_reduction(link)
  local kind = getmetatable(link)
  return kind == Between or kind == Native and link.facts.reduces
end

local is_future = future.is_future
local set_author = future.set_author

-- A function that runs a chain: run(bucket, outer), where outer(bucket) follows the last link; and
-- a table whose field `link` is the link that runs. The other arguments of links are made once,
-- because a chain runs once for each bucket, one bucket after another.
local function runner(chain, is_between)
  local at, called, nexts, agains = {}, {}, {}, {}
  -- Links between two reductions have the numbers after that of the link that contains them, which
  -- is the current account when they begin. `at.number` is its number; nil if nothing is counted.
  local account = not is_between and core.bucket_account or function(position)
    if at.number then core.bucket_account(at.number + position) end
  end
  local function call(position, bucket)
    local link = chain[position]
    if not link then
      account(position)
      return at.outer(bucket)
    end
    called[position], at.link = false, link
    set_author(link)
    account(position)
    if core.tracing then label(bucket, link) end
    -- The last two arguments are for links that are reloaded: see watch.lua.
    local result = link(bucket, nexts[position], agains[position], position == 1)
    if is_future(result) then return result end
    if core.is_tensor(result) then
      if position > 1 then return future.new(result, core.stream()) end
      -- Only the engine reads this future, so the tensor need not outlive its step.
      return future.at(result, core.stream():_point())
    end
    return error(("it returned %s: a future (what next gives) or a tensor is expected")
      :format(result == nil and "nothing" or "a " .. type(result)), 0)
  end
  for position, link in ipairs(chain) do
    agains[position] = function() called[position] = false end
    nexts[position] = function(given)
      if called[position] then error("it called next twice: a bucket is reduced once", 0) end
      called[position] = true
      if given ~= nil and not core.is_bucket(given) then
        error(("next takes the bucket, or nothing, not %s: bucket:set_buffer(t) sets the \z
          tensor that is sent"):format(tostring(given)), 0)
      end
      if not (given or at.bucket):_loss_is_known() then
        error("it has changed the bucket's numbers after error_feedback, which keeps what is \z
          lost: if bucket:wants_sent(), report with bucket:set_sent(t) what the other ranks \z
          receive of this rank's numbers (the new buffer itself, if it leaves some out; a cast to \z
          another float dtype needs no report)", 0)
      end
      local result = call(position + 1, given or at.bucket)
      at.link = link
      set_author(link)
      account(position)
      if core.tracing then label(at.bucket, link) end
      return result
    end
  end
  return function(bucket, outer)
    at.bucket, at.outer = bucket, outer
    if not is_between then return call(1, bucket) end
    at.number = core.bucket_account()
    local result = call(1, bucket)
    account(0)
    return result
  end, at
end

-- Runs a chain that is a link of another chain.
function Chain.__call(self, bucket, next) return runner(self)(bucket, next) end

local function is_whole(link) return getmetatable(link) == Native and link.needs.whole end

-- The reason why steps must wait for the last bucket, or nil; and the link states whose value "bad"
-- tells optimizers to skip the step.
local function facts_of(chain)
  local guards, whole = {}, is_whole(chain[1])
    and "it is clipped by the norm of all (hooks.clip with the scope lagged does not wait)" or nil
  for _, link in ipairs(chain) do
    if getmetatable(link) == Native and link.needs.skips_steps then
      guards[#guards + 1] = link.keeps
      whole = whole or "hooks.nan_check has seen all gradients"
    end
  end
  return whole, guards
end

local function check_whole(list, what)
  for i = 2, #list do
    if is_whole(list[i]) then
      core.raise(("%s: link %d (clip) clips by the norm of all: it must be the first, because it \z
        scales the results of all others"):format(what, i))
    end
  end
end

-- All links of a chain, each with its place and with whether it runs between two reductions.
local function each_link(list)
  return coroutine.wrap(function()
    for i, link in ipairs(list) do
      coroutine.yield(link, i, false)
      for _, inner in ipairs(type(link) == "table" and link.between or {}) do
        coroutine.yield(inner, i, true)
      end
    end
  end)
end

-- Whether a link may leave ranks different gradients. Of links in Lua this is what they say.
local function is_local(link)
  if getmetatable(link) == Native then return link.facts.is_local end
  return type(link) == "table" and link.is_local == true
end

--- The ranks to which a chain gives equal results, for a model of this group; nil: each rank gets
--- its own.
---@param chain ms.Link[]
---@param group ms.Group
---@return ms.Group?
function hooks._equal_over(chain, group)
  for link in each_link(chain) do if is_local(link) then return nil end end
  local last = chain[#chain]
  return getmetatable(last) == Native and last.group or group
end

-- Raises if a link after error_feedback does not return the mean of what ranks send: the residual
-- would be wrong.
local function check_feedback(list, what)
  local first
  for link, i in each_link(list) do
    local facts = getmetatable(link) == Native and link.facts
    if first and facts and facts.no_feedback then
      core.raise(("%s: link %d (%s) stands after error_feedback (link %d), but its result is not "
        .. "the mean of what ranks send: %s"):format(what, i, facts.name, first,
        facts.no_feedback))
    end
    if facts and facts.name == "error_feedback" then first = i end
  end
end

-- Limits of links in Lua: link -> { places = { all_reduce = true ... }, reason }
local limits = setmetatable({}, { __mode = "k" })

--- For links in Lua that do not work on every kind of bucket: declares the kinds on which the link
--- works ("between": between the reductions of hybrid buckets). A chain for another kind is
--- refused.
---@param link ms.Link
---@param places string[]
---@param reason string
---@return ms.Link link
function hooks._limit(link, places, reason)
  local set = {}
  for _, place in ipairs(places) do set[place] = true end
  limits[link] = { places = set, reason = reason }
  return link
end

local function limits_of(link)
  if type(link) == "table" and link.optimizer then
    return { places = { all_reduce = true }, reason = "it steps on whole gradients" }
  end
  return getmetatable(link) == Native and link.facts or limits[link]
end

-- Raises unless all links work on buckets of that kind.
local function check_kind(list, kind, what)
  for link, i, is_between in each_link(list) do
    local place, facts = is_between and "between" or kind, limits_of(link)
    if facts and not facts.places[place] then
      core.raise(("%s: link %d: %s does not work %s: %s"):format(what, i, hooks._name(link),
        is_between and "between the reductions of hybrid buckets"
          or "on buckets of the kind " .. kind, facts.reason))
    end
    if not is_between and type(link) == "table" and link.between and kind ~= "hybrid" then
      core.raise(("%s: link %d (reduce): links between its reductions need hybrid buckets; these \z
        are of the kind %s, which is reduced once"):format(what, i, kind))
    end
  end
end

-- Whether a link is known not to change the result. Of links in Lua this is not known.
local function keeps_result(link)
  local kind = getmetatable(link)
  return kind == Native and link.facts.keeps_result or kind == Stage and not link.decode
    or type(link) == "table" and link.optimizer ~= nil
end

-- Raises if a link that changes the result comes before then_optimizer, which steps on the result
-- of the links after it: the change would come after the step.
local function check_steps(list, what)
  local before
  for i, link in ipairs(list) do
    if before and type(link) == "table" and link.optimizer then
      local is_clip = getmetatable(list[before]) == Native
      core.raise(("%s: link %d (%s) stands before link %d (then_optimizer), which would step on "
        .. "gradients that are not %s yet: put then_optimizer first, as in "
        .. "hooks.chain { hooks.then_optimizer { optimizer = o }, %s }"):format(what, before,
        hooks._name(list[before]), i, is_clip and "clipped" or "decoded",
        is_clip and "hooks.clip { max_norm = x, scope = 'lagged' }" or "..."))
    end
    if not before and not keeps_result(link) then before = i end
  end
end

-- Raises if a stage needs another dtype than the link before it gives, if that is declared.
local function check_dtypes(list, what)
  local dtype, giver
  for i, link in ipairs(list) do
    local kind = getmetatable(link)
    if kind == Stage and link.needs and dtype and dtype ~= link.needs then
      core.raise(("%s: link %d (%s) needs %s, but link %d (%s) gives %s")
        :format(what, i, hooks._name(link), link.needs, giver, hooks._name(list[giver]), dtype))
    end
    if kind == Native and link.facts.casts then dtype, giver = link.dtype, i
    elseif kind == Stage and (link.encode or link.gives) then dtype, giver = link.gives, i
    elseif kind ~= Native and kind ~= Stage then dtype = nil end
  end
end

---@param links ms.LinkLike[]
---@return ms.Link
function hooks.chain(links)
  if type(links) ~= "table" then
    core.raise("hooks.chain: a list of links is expected, not " .. type(links))
  end
  local list = setmetatable({}, Chain)
  for key in pairs(links) do
    if math.type(key) ~= "integer" or links[1] == nil or key > #links then
      core.raise("hooks.chain: the list of links has a gap, or a field " .. tostring(key))
    end
  end
  for i, value in ipairs(links) do add(list, value, ("hooks.chain: link %d"):format(i)) end
  for i, link in ipairs(list) do
    if i < #list and is_reduction(link) then
      core.raise(("hooks.chain: link %d (%s) reduces: the links after it would never run")
        :format(i, hooks._name(link)))
    end
  end
  check_dtypes(list, "hooks.chain")
  check_whole(list, "hooks.chain")
  check_feedback(list, "hooks.chain")
  check_steps(list, "hooks.chain")
  return list
end

-- link -> state of the ddp model that it serves
local serves = setmetatable({}, { __mode = "kv" })

-- Whether a link may serve only one model, because two models would overwrite each other's state.
-- State that is kept for each parameter may be shared.
local function is_of_one_model(link)
  return getmetatable(link) == Native and link.needs.one_model
end

--- For models: marks these links as links of this model until hooks._release, or until the model is
--- collected. Raises if one that may serve only one model has another.
---@param chain ms.Link[]
---@param s table the model's state
function hooks._claim(chain, s)
  for link in each_link(chain) do
    if is_of_one_model(link) and serves[link] and serves[link] ~= s then
      core.collect()
      if serves[link] then
        core.raise(("ddp: comm_hook: %s has state of the passes of one model, and serves another \z
          one already: make one for each"):format(hooks._name(link)))
      end
    end
  end
  s.how.model = setmetatable({ s }, { __mode = "v" })
  for link, _, is_between in each_link(chain) do
    if is_of_one_model(link) then serves[link] = s end
    local kind = getmetatable(link)
    local state = kind == Native and link.keeps or kind == Stage and link.state
    if state then link_state.serve(state, s.how, is_between) end
  end
end

--- For ddp: when a model is unwrapped.
---@param chain ms.Link[]
function hooks._release(chain) for link in each_link(chain) do serves[link] = nil end end

--- For ddp: from _watch until _unwatch, the files of these links are read again when they change,
--- under --watch.
---@param chain ms.Link[]
function hooks._watch(chain) for link in each_link(chain) do watch.use(link) end end

---@param chain ms.Link[]
function hooks._unwatch(chain) for link in each_link(chain) do watch.drop(link) end end

-- The reduction that ends a chain whose last link calls next.
local function default_reduction(op)
  local reduce
  return function(bucket)
    reduce = reduce or hooks.reduce { op = op }
    return reduce(bucket)
  end
end

---@param options? { op?: ms.Op, between?: ms.LinkLike }
---@return ms.Link
function hooks.reduce(options)
  options = check("hooks.reduce", options, kinds.reduce.options)
  if options.between == nil then return native("reduce", options) end
  local what, list, all_native = "hooks.reduce: between", setmetatable({}, Chain), true
  add(list, options.between, what)
  for _, link in ipairs(list) do
    if type(link) == "table" and link.between then
      core.raise(what .. ": a link has links between its reductions, but a shard is reduced once")
    end
    all_native = all_native and getmetatable(link) == Native
  end
  if all_native and not is_reduction(list[#list]) then
    list[#list + 1] = native("reduce", { op = options.op })
  end
  check_dtypes(list, what)
  check_feedback(list, what)
  check_kind({ { between = list } }, "hybrid", what)
  local made = native("reduce", { op = options.op }, all_native and list or nil)
  if all_native then return made end
  return setmetatable({
    name = "reduce", op = options.op, core = made.core, between = list, run = runner(list, true),
    outer = default_reduction(options.op),
  }, Between)
end

Between.__tostring = Native.__tostring
function Between.__call(self, bucket)
  local inner = bucket:_open_between(self.core)
  link_state.run_between(true)
  local ok, reduced = pcall(self.run, inner, self.outer)
  link_state.run_between(false)
  if not ok then error(reduced, 0) end
  return reduced:and_then(function(result)
    bucket:_close_between(inner, result)
    return result
  end)
end

--- Compiles a chain for a reducer: { links = ... } if all links are native, else { hook = f(bucket)
--- }; and `accounts`, the links in the order of their account numbers. dtype: in which gradients
--- are sent. kind: of the buckets, all_reduce unless given. stepping: for models that step by
--- themselves on what the chain returns: gets the links then_optimizer, which leave the chain.
---@param value? ms.LinkLike
---@param what string
---@param dtype? ms.DType
---@param kind? "all_reduce"|"reduce_scatter"|"hybrid"
---@param stepping? ms.Link[]
---@return table
function hooks._compile(value, what, dtype, kind, stepping)
  local chain, all_native = setmetatable({}, Chain), true
  if value ~= nil then add(chain, value, what) end
  for i = stepping and #chain or 0, 1, -1 do
    if type(chain[i]) == "table" and chain[i].optimizer then
      table.insert(stepping, 1, table.remove(chain, i))
    end
  end
  if dtype then table.insert(chain, is_whole(chain[1]) and 2 or 1, hooks.cast { dtype = dtype }) end
  check_dtypes(chain, what)
  check_whole(chain, what)
  check_kind(chain, kind or "all_reduce", what)
  for _, link in ipairs(chain) do all_native = all_native and getmetatable(link) == Native end
  if all_native and not is_reduction(chain[#chain]) then chain[#chain + 1] = hooks.reduce() end
  local whole, guards = facts_of(chain)
  local sums = (is_reduction(chain[#chain]) and chain[#chain].op == "sum") == true
  local compiled = {
    chain = chain, accounts = {}, name = tostring(chain), whole = whole, guards = guards,
    holds = is_whole(chain[1]) == true,                -- results are not final before the last one
    once = false,                                      -- a link clips what a bucket has
    sums = sums, adds_up = sums,                       -- see ms.LinkUse
  }
  for link in each_link(chain) do
    table.insert(compiled.accounts, link)
    compiled.once = compiled.once or getmetatable(link) == Native and link.facts.clips
  end
  if all_native then
    compiled.links = chain
    return compiled
  end
  local outer = default_reduction()                   -- if the last link calls next
  local run, at = runner(chain)
  function compiled.hook(bucket)
    link_state.run(compiled)
    local ok, result = pcall(run, bucket, outer)
    link_state.run(nil)
    label()
    set_author(nil)
    -- error(message, 2) in a link puts a line of the library before the message. It is removed: the
    -- link's own line is in its name.
    local text = not ok and tostring(result):gsub("^[^\n:]*moonshard/[%w_/]+%.lua:%d+: ", "")
    if not ok then error(("%s: %s"):format(hooks._name(at.link), text), 0) end
    return result
  end
  return compiled
end

future.name_authors(hooks._name)

return options_of.closed(hooks, "ms.hooks")
