-- Communication hooks: native links, and chains. Readable twins of the native links, in Lua, are
-- files of hooks/.
--
-- A link is a function(bucket, next) -> future, or something callable with these. A native link is
-- a table { kind, name, core, options } that is callable too: a chain of native links only is
-- handed to the engine as data, every other chain runs here.
local core = require "moonshard.core"
local future = require "moonshard.future"
local link_state = require "moonshard.link_state"
local made_by = require "moonshard.scripts.made_by"
local watch = require "moonshard.watch"
local options_of = require "moonshard.options"
local check, check_group = options_of.check, options_of.check_group

local hooks = {}

hooks.then_optimizer = require("moonshard.overlap").then_optimizer

local Native = {}  -- metatable of native links
local Stage = {}   -- metatable of stages: { name, needs, gives, encode, decode, observe, state }
local Chain = {}   -- metatable of chains: { links... }, flat

-- While a trace runs, tasks say which link they belong to.
local function label(bucket, link)
  if core.tracing then
    core.trace_label(link and ("bucket %d: %s"):format(bucket:index(), hooks._name(link)) or nil)
  end
end

-- The same around f, which runs later.
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

local reductions = {
  reduce = true, all_reduce = true, noop = true, powersgd = true, int8 = true, top_k = true,
  sign_vote = true, adasum = true, post_local_sgd = true,
}
local stateful = {
  error_feedback = true, powersgd = true, top_k = true, post_local_sgd = true, clip = true,
  nan_check = true,
}

-- Runs a native link inside a chain that is run here.
function Native.__call(self, bucket, next)
  if reductions[self.kind] then return future.at(bucket:_reduce(self.core)) end
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

-- names: the options that it has; more: what it is made with beside them.
local function native(kind, names, options, more)
  local link = { kind = kind, name = kind }
  for key, value in pairs(check("hooks." .. kind, options, names)) do link[key] = value end
  for _, name in ipairs { "group", "subgroup" } do
    check_group("hooks." .. kind, name, link[name])
  end
  for key, value in pairs(more or {}) do link[key] = value end
  if stateful[kind] then
    link.keeps = link_state.numbered(kind)
    link.state = link_state.core(link.keeps)
  end
  link.core = core.native_link(link)
  return setmetatable(link, Native)
end

--------------------------------------------------------------------------------------- native links

--- The kind's own reduction. op: "avg" unless given.
---@param options? { op?: ms.Op }
---@return ms.Link
function hooks.reduce(options) return native("reduce", { "op" }, options) end

--- all_reduce buckets only. op: "avg" unless given: each rank's numbers are divided first, then
--- summed. group: instead of the bucket's.
---@param options? { op?: ms.Op, group?: ms.Group }
---@return ms.Link
function hooks.all_reduce(options) return native("all_reduce", { "op", "group" }, options) end

--- Gradients stay local: what a step costs without communication.
---@param options? { group?: ms.Group }
---@return ms.Link
function hooks.noop(options) return native("noop", { "group" }, options) end

local floats = { f32 = true, f16 = true, bf16 = true }
local integers = { i64 = true, i32 = true, u16 = true, u8 = true, bool = true }

--- There and back: what follows sees the buffer in dtype. Reductions of 16-bit tensors divide first
--- and add in f32.
---@param options { dtype: ms.DType }
---@return ms.Link
function hooks.cast(options)
  options = check("hooks.cast", options, { "dtype" })
  if not floats[options.dtype] then
    core.raise(("hooks.cast: dtype must be f16, bf16 or f32, not %s")
      :format(tostring(options.dtype)))
  end
  return native("cast", { "dtype" }, options, { name = "cast " .. options.dtype })
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

--- What later links lose of this rank's numbers is added to its numbers of the next iteration, so
--- that the mean over many steps is right. decay: of what was left over, 1 unless given. Refused
--- before clip, adasum and sign_vote (their results are not the mean of what ranks send) and before
--- a second error_feedback.
---@param options? { decay?: number }
---@return ms.Link
function hooks.error_feedback(options) return native("error_feedback", { "decay" }, options) end

--- Low rank: each gradient matrix travels as two narrow ones; how much travels, a ddp model's stats
--- tell, and now and then the log (MOONSHARD_LOG=info).
---@param options? ms.PowerSGDOptions
---@return ms.Link
function hooks.powersgd(options)
  return native("powersgd", {
    "rank", "start_step", "min_rate", "error_feedback", "warm_start", "eps", "seed", "batched",
    "stats_every",
  }, options)
end

--- 8-bit numbers. per: one scale for the bucket ("tensor", unless given), for each `block` (512)
--- numbers ("channel"), or the int8 codec's blocks ("block"). form: "all_gather" (unless given)
--- sends every rank all numbers; "all_to_all" sends each its part, which it adds up in f32, and
--- then that.
---@param options? ms.Int8Options
---@return ms.Link
function hooks.int8(options) return native("int8", { "per", "block", "form" }, options) end

--- The greatest numbers of each rank travel, `fraction` of all; what is left is added to the next
--- ones. momentum: of what is added, 0 unless given.
---@param options { fraction: number, momentum?: number }
---@return ms.Link
function hooks.top_k(options)
  if type(options) ~= "table" or options.fraction == nil then
    core.raise "hooks.top_k: fraction is missing: what part of the numbers travels?"
  end
  return native("top_k", { "fraction", "momentum" }, options)
end

--- One bit a number: -1 or 1, as most ranks say; 0 where they are even.
---@return ms.Link
function hooks.sign_vote(options) return native("sign_vote", {}, options) end

--- Two ranks' gradients add where they are orthogonal and average where they are parallel; by
--- pairs, over all ranks. For each parameter by itself.
---@return ms.Link
function hooks.adasum(options) return native("adasum", {}, options) end

--- Means over all ranks until start_step, then over subgroup (the ranks of this host unless given);
--- reduce_after = false: gradients stay local then.
---@param options ms.PostLocalSGDOptions
---@return ms.Link
function hooks.post_local_sgd(options)
  if type(options) ~= "table" or options.start_step == nil then
    core.raise "hooks.post_local_sgd: start_step is missing: from which step on are means local?"
  end
  return native("post_local_sgd", { "start_step", "subgroup", "reduce_after" }, options)
end

--- Reduced gradients are scaled to a norm of at most max_norm: that of all buckets ("global", the
--- first link of a chain), of each ("bucket"), or that of all in the step before ("lagged", which
--- works with early steps).
---@param options { max_norm: number, scope: "global"|"bucket"|"lagged" }
---@return ms.Link
function hooks.clip(options)
  if type(options) ~= "table" or options.scope == nil then
    core.raise "hooks.clip: scope is missing: global, bucket or lagged"
  end
  if options.max_norm == nil then core.raise "hooks.clip: max_norm is missing" end
  return native("clip", { "max_norm", "scope" }, options)
end

--- Looks for infinities and NaN in what any rank brings and in what comes back. action: "skip"
--- (unless given): optimizers' next step changes nothing, on all ranks, as with only_if; "stop": an
--- error.
---@param options? { action?: "skip"|"stop" }
---@return ms.Link
function hooks.nan_check(options) return native("nan_check", { "action" }, options) end

local by_name = {
  "reduce", "all_reduce", "noop", "fp16_compress", "bf16_compress", "error_feedback", "powersgd",
  "int8", "sign_vote", "adasum", "nan_check",
}

--------------------------------------------------------------------------------------------- stages

--- State of a link, saved in checkpoints under this name.
---@param name string
---@return ms.State
hooks.state = link_state.new

local stage_options = { "name", "needs", "gives", "encode", "decode", "observe" }

--- The usual link: encode what goes in, decode what comes back, or only observe; each may be left
--- out.
---@param stage ms.Stage
---@return ms.Link
function hooks.stage(stage)
  check("hooks.stage", stage, stage_options)
  if type(stage) ~= "table" or type(stage.name) ~= "string" or stage.name == "" then
    core.raise "hooks.stage: a stage has a name, under which its state is saved"
  end
  local made = { name = stage.name }
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

-- A link from what may stand for one: itself, a native one's name, a file that returns one.
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
        and "; a list of links belongs into hooks.chain" or ""))
  end
  return value
end

-- Those that a command line may name: all that are not links of a recipe's own optimizer.
hooks._ready_made = {
  "adasum", "all_reduce", "bf16_compress", "cast", "clip", "error_feedback", "fp16_compress",
  "int8", "nan_check", "noop", "post_local_sgd", "powersgd", "reduce", "sign_vote", "top_k",
}

--- For scripts.lua: the native link of that name with these options; or what a file returns, or
--- makes from options, as scripts/made_by.lua has them.
---@param value string
---@param options table
---@param are_given boolean
---@return ms.Link
function hooks._from(value, options, are_given)
  if not value:match "%.lua$" then return hooks[value](options) end
  return watch.link(value, "hook", refuse_file, hooks._name, made_by.link(options, are_given))
end

--- What messages call a link.
---@param link any
---@return string
function hooks._name(link)
  if type(link) ~= "function" then return tostring(link) end
  local info = debug.getinfo(link, "S")
  return ("link '%s:%d'"):format(info.short_src, info.linedefined)
end

--- How many numbers a link was given, how many travelled for them, and the rate between the two (0:
--- none yet), since the start; nil for links that do not compress.
---@param link any
---@return { before: integer, after: integer, rate: number }?
function hooks._compression(link)
  if getmetatable(link) ~= Native or link.kind ~= "powersgd" then return nil end
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
  return getmetatable(link) == Native and reductions[link.kind] == true
end

-- account: whose work is counted from now on
local account, is_told, is_future = core.bucket_account, core.bucket_is_told, future.is_future
local set_author = future.set_author

-- What runs a chain: run(bucket, outer), with outer behind the last link; and a table that holds
-- the link that is at work. What links get beside their buckets is made once, for a chain runs once
-- for each bucket, and one after the other.
local function runner(chain)
  local at, called, nexts, agains = {}, {}, {}, {}
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
    -- The last two are for links that begin anew: see watch.lua.
    local result = link(bucket, nexts[position], agains[position], position == 1)
    if is_future(result) then return result end
    if core.is_tensor(result) then
      if position > 1 then return future.new(result, core.stream()) end
      -- Nobody else sees this future: the tensor need not outlive its step.
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
        error(("next takes the bucket, or nothing, not %s: what is to travel, \z
          bucket:set_buffer(t) says"):format(tostring(given)), 0)
      end
      if not is_told() then
        error("it has changed the bucket's numbers behind error_feedback, which adds up what is \z
          lost: tell with bucket:set_sent(t), where bucket:wants_sent(), what this rank's \z
          numbers still are (the new buffer itself, where it leaves some out; a cast to another \z
          float dtype needs no telling)", 0)
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
    return call(1, bucket)
  end, at
end

-- A chain inside of another.
function Chain.__call(self, bucket, next) return runner(self)(bucket, next) end

-- Clipping by the norm of all scales what all others made.
local function is_whole(link)
  return getmetatable(link) == Native and link.kind == "clip" and link.scope == "global"
end

-- What steps must wait for the last bucket for, or nil; and the states whose "bad" says that a step
-- is to be skipped.
local function facts_of(chain)
  local guards, whole = {}, is_whole(chain[1])
    and "it is clipped by the norm of all (hooks.clip with the scope lagged does not wait)" or nil
  for _, link in ipairs(chain) do
    if getmetatable(link) == Native and link.kind == "nan_check" and link.action ~= "stop" then
      guards[#guards + 1] = link.keeps
      whole = whole or "hooks.nan_check has seen all gradients"
    end
  end
  return whole, guards
end

local function check_whole(list, what)
  for i = 2, #list do
    if is_whole(list[i]) then
      core.raise(("%s: link %d (clip) clips by the norm of all: it must be the first, as it \z
        scales what all others made"):format(what, i))
    end
  end
end

-- Links whose result is not the mean of what ranks send: errors that error_feedback adds later
-- would make nothing up. The texts say what to do instead.
local not_means = {
  clip = "put clip before error_feedback, so that it scales the finished mean",
  adasum = "leave error_feedback out",
  sign_vote = "leave error_feedback out; recipes/hooks/onebit_adam.lua sends signs with feedback",
  error_feedback = "one is enough: two would add every error twice",
}

local function check_feedback(list, what)
  local first
  for i, link in ipairs(list) do
    local kind = getmetatable(link) == Native and link.kind
    if first and not_means[kind] then
      core.raise(("%s: link %d (%s) stands after error_feedback (link %d), but its result is not "
        .. "the mean of what ranks send: %s"):format(what, i, kind, first, not_means[kind]))
    end
    if kind == "error_feedback" then first = i end
  end
end

-- Whether a link certainly leaves what comes back as it is: nothing is known of links in Lua.
local passes_on = { cast = true, error_feedback = true, nan_check = true }
local function keeps_result(link)
  local kind = getmetatable(link)
  return kind == Native and passes_on[link.kind] or kind == Stage and not link.decode
    or type(link) == "table" and link.optimizer ~= nil
end

-- then_optimizer steps on what the links after it gave: what a link before it does to that result
-- would come too late.
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

-- What a stage needs must be what the link before it gives, as far as the chain tells.
local function check_dtypes(list, what)
  local dtype, giver
  for i, link in ipairs(list) do
    local kind = getmetatable(link)
    if kind == Stage and link.needs and dtype and dtype ~= link.needs then
      core.raise(("%s: link %d (%s) needs %s, but link %d (%s) gives %s")
        :format(what, i, hooks._name(link), link.needs, giver, hooks._name(list[giver]), dtype))
    end
    if kind == Native and link.kind == "cast" then dtype, giver = link.dtype, i
    elseif kind == Stage and (link.encode or link.gives) then dtype, giver = link.gives, i
    elseif kind ~= Native and kind ~= Stage then dtype = nil end
  end
end

--- Links around the reduction at their end: hooks.reduce { op = "avg" } unless one is there. A
--- chain is a link, too.
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
      core.raise(("hooks.chain: link %d (%s) reduces: the links behind it would never run")
        :format(i, hooks._name(link)))
    end
  end
  check_dtypes(list, "hooks.chain")
  check_whole(list, "hooks.chain")
  check_feedback(list, "hooks.chain")
  check_steps(list, "hooks.chain")
  return list
end

-- link -> what the ddp model holds that it serves
local serves = setmetatable({}, { __mode = "kv" })

-- Links whose state is of a pass as a whole, or counts passes: two models would write over each
-- other's. What is kept by parameter alone may be shared.
local function is_of_one_model(link)
  if getmetatable(link) ~= Native then return false end
  return link.kind == "clip" and link.scope ~= "bucket" or link.kind == "nan_check"
    or link.kind == "powersgd" or link.kind == "post_local_sgd"
end

--- For ddp: these links serve this model until hooks._release, or until the model is collected.
---@param chain ms.Link[]
---@param s table the model's state
function hooks._claim(chain, s)
  for _, link in ipairs(chain) do
    if is_of_one_model(link) and serves[link] and serves[link] ~= s then
      core.collect()
      if serves[link] then
        core.raise(("ddp: comm_hook: %s remembers what belongs to the passes of one model, and \z
          serves another one already: make one for each"):format(hooks._name(link)))
      end
    end
  end
  for _, link in ipairs(chain) do if is_of_one_model(link) then serves[link] = s end end
end

--- For ddp: when a model is unwrapped.
---@param chain ms.Link[]
function hooks._release(chain) for _, link in ipairs(chain) do serves[link] = nil end end

--- What a reducer runs: { links = ... } where all are native, else { hook = f(bucket) }. dtype:
--- what gradients travel in.
---@param value? ms.LinkLike
---@param what string
---@param dtype? ms.DType
---@return table
function hooks._compile(value, what, dtype)
  local chain, all_native = setmetatable({}, Chain), true
  if value ~= nil then add(chain, value, what) end
  if dtype then table.insert(chain, is_whole(chain[1]) and 2 or 1, hooks.cast { dtype = dtype }) end
  check_dtypes(chain, what)
  check_whole(chain, what)
  for _, link in ipairs(chain) do all_native = all_native and getmetatable(link) == Native end
  if all_native and not is_reduction(chain[#chain]) then chain[#chain + 1] = hooks.reduce() end
  local whole, guards = facts_of(chain)
  if all_native then
    return { chain = chain, links = chain, name = tostring(chain), whole = whole, guards = guards }
  end
  local reduce                                        -- behind the last link, if that calls next
  local function outer(bucket)
    reduce = reduce or hooks.reduce()
    return reduce(bucket)
  end
  local run, at = runner(chain)
  local function hook(bucket)
    local ok, result = pcall(run, bucket, outer)
    label()
    set_author(nil)
    -- error(message, 2) of a link puts a line of the library before the message; the link's own is
    -- in its name.
    local text = not ok and tostring(result):gsub("^[^\n:]*moonshard/[%w_/]+%.lua:%d+: ", "")
    if not ok then error(("%s: %s"):format(hooks._name(at.link), text), 0) end
    return result
  end
  return { chain = chain, name = tostring(chain), whole = whole, guards = guards, hook = hook }
end

future.name_authors(hooks._name)

return options_of.closed(hooks, "ms.hooks")
