-- Futures and streams: a value, and the point in a stream at which it is ready.
local core = require "moonshard.core"
local options_of = require "moonshard.base.options"
local check = options_of.check

local future = {}

---@class ms.Future
local Future = {}
Future.__index = Future
Future.__name = "ms.Future"
Future.__metatable = "locked"

-- Callbacks that have not run yet, in order of registration: { sources, stream, made, f }. The next
-- one to run is the first whose sources all have values. A callback never runs inside a hook or
-- another callback.
local queue, running = {}, false

-- The link that runs now: messages name it for the callbacks that it registers. ms.hooks sets the
-- link, and the function that gives a link's name.
local author, name_of = nil, tostring

--- For ms.hooks.
---@param link any the link that runs from now on, or nil
function future.set_author(link) author = link end

--- For ms.hooks.
---@param f fun(link: any): string
function future.name_authors(f) name_of = f end

local function is_future(value)
  return type(value) == "table" and rawget(value, "__future") == Future
end

--- Whether the value is one.
---@param value any
---@return boolean
future.is_future = is_future

-- f(t) for each tensor of a future's value.
local function each(f, value)
  if core.is_tensor(value) then
    f(value)
  elseif type(value) == "table" and not is_future(value) then
    for _, item in ipairs(value) do each(f, item) end
  end
  return value
end

-- Tensors that a future holds outlive the step that made them. They end with the step in which the
-- value is taken, unless the script keeps them: by value(), by sync(), by a callback, or by the
-- engine, which takes what a link returns. A tensor that a callback hands on, in the value that it
-- returns, is the new future's. So memory does not depend on when Lua collects its
-- garbage, and tensors have the same addresses in each step.
local function keep(value) return each(core.hold, value) end

--- A future of value, which is ready after all work that is enqueued on the stream so far.
---@param value any
---@param stream ms.Stream
---@return ms.Future
function future.new(value, stream)
  local index, number = stream:_point()
  return setmetatable(
    { __future = Future, result = keep(value), stream = stream, index = index, number = number },
    Future)
end

--- A future of a value that is ready at a known point and need not outlive the step: the result of
--- a bucket's reduction.
---@param value any
---@param index integer of the stream
---@param number integer
---@return ms.Future
function future.at(value, index, number)
  return setmetatable({ __future = Future, result = value, index = index, number = number }, Future)
end

-- The stream that a future's callbacks run on.
local function stream_of(self)
  self.stream = self.stream or core.stream_at(self.index)
  return self.stream
end

-- Takes a future, or a tensor, which becomes a future that is ready on the current stream.
local function check_future(value, what)
  if is_future(value) then return value end
  if core.is_tensor(value) then return future.new(value, core.stream()) end
  core.raise(("%s: a future or a tensor is expected, not %s"):format(what, type(value)))
end

-- Takes over the value and the point of another future.
local function resolve(self, other)
  self.result, self.stream, self.index, self.number = other.result, other.stream, other.index,
    other.number
  self.pending = nil
end

local function check_ready(self, what)
  if self.failed then
    core.raise(("%s: the callback that was to make this value failed: %s")
      :format(what, tostring(self.failed)))
  end
  if self.pending then
    core.raise(what .. ": the callback that makes this value has not run yet; it runs when the \z
      current hook returns")
  end
end

---@return any
function Future:value()
  check_ready(self, "value")
  core.stream():_wait(self.index, self.number)
  return each(core.spend, self.result)
end

---@return any
function Future:sync()
  if core.in_hook() then
    core.raise "sync cannot be used inside a hook: use value(), which lets the stream wait, or \z
      and_then"
  end
  check_ready(self, "sync")
  core.point_sync(self.index, self.number)
  return each(core.spend, self.result)
end

local function enqueue(item)
  item.made = setmetatable({ __future = Future, pending = true }, Future)
  item.account, item.author = core.bucket_account(), author
  queue[#queue + 1] = item
  if core.in_hook() then core.request_drain() else future.drain() end
  return item.made
end

-- made gets the value of the future `value`, as soon as that has one.
local function follow(made, value)
  if not value.pending and not value.failed then resolve(made, value)
  else queue[#queue + 1] = { sources = { value }, made = made } end
end

-- Puts the callback's line before a message for which Lua gives no line.
local function at_line(item, message)
  local info = debug.getinfo(item.f, "S")
  return ("%s:%d: and_then: %s"):format(info.short_src, info.linedefined, message)
end

-- Adds to a callback's error the name of the link that registered it. Without a link, the error
-- value stays unchanged.
local function with_author(item, message)
  if type(message) ~= "string" then return message end
  if message:find "^attempt to yield" then message = at_line(item, message) end
  if item.author == nil then return message end
  local name = name_of(item.author)
  return message:find(name, 1, true) and message or ("%s: %s"):format(name, message)
end

local function call_back(item, value)
  local outer = author
  author = item.author
  local ok, result = pcall(item.f, value)
  author = outer
  if ok and result ~= nil and rawequal(result, item.made) then
    ok, result = false, at_line(item, "the callback returned the future that waits for it")
  end
  if ok then return result end
  error(with_author(item, result), 0)
end

local function run_item(item)
  for _, source in ipairs(item.sources) do if source.failed then error(source.failed, 0) end end
  local first = item.sources[1]
  if not item.f then
    resolve(item.made, first)
    return
  end
  (item.stream or stream_of(first)):run(function()
    core.hook_enter()
    local scope <close> = setmetatable({}, { __close = core.hook_leave }) -- luacheck: ignore scope
    for _, source in ipairs(item.sources) do core.stream():_wait(source.index, source.number) end
    if item.account then core.bucket_account(item.account) end
    for _, source in ipairs(item.sources) do each(core.spend, source.result) end
    local value = call_back(item, first and first.result)
    if value == nil then resolve(item.made, first)
    elseif is_future(value) then follow(item.made, value)
    else resolve(item.made, future.new(value, core.stream())) end
  end)
end

-- The position of the first item that can run.
local function first_ready()
  for position, item in ipairs(queue) do
    local ready = true
    for _, source in ipairs(item.sources) do ready = ready and not source.pending end
    if ready then return position end
  end
end

-- Marks the futures of all queued callbacks as failed, so that a wait for one raises the reason.
local function give_up(message)
  for _, item in ipairs(queue) do item.made.failed, item.made.pending = message, nil end
  queue = {}
end

-- Runs callbacks until none is left; callbacks that they register are appended. After an error the
-- remaining callbacks are dropped, because the error ends their step.
function future.drain()
  if running then return end
  running = true
  local ok, message = true, nil
  while ok and queue[1] do
    local position = first_ready()
    if position then
      local item = table.remove(queue, position)
      ok, message = pcall(run_item, item)
      if not ok then item.made.failed, item.made.pending = message, nil end
    else
      ok, message = pcall(core.raise, "and_then: futures wait for each other in a circle")
      message = with_author(queue[1], message)
    end
  end
  running = false
  if ok then return end
  give_up(message)
  error(message, 0)
end

-- The engine calls this when the outermost hook has returned, or failed.
core.set_drain(function(failed)
  if failed then give_up "the hook that registered it failed" else future.drain() end
end)

---@param f fun(value: any): any
---@return ms.Future
function Future:and_then(f)
  if type(f) ~= "function" then core.raise("and_then: a function is expected, not " .. type(f)) end
  if self.failed then check_ready(self, "and_then") end
  return enqueue { sources = { self }, f = f }
end

---@param list (ms.Future|ms.Tensor)[]
---@return ms.Future
function future.all(list)
  if type(list) ~= "table" or is_future(list) then
    core.raise("all: a list of futures and tensors is expected, not " .. type(list))
  end
  local sources, ready = {}, true
  for i, item in ipairs(list) do
    sources[i] = check_future(item, ("all: item %d"):format(i))
    ready = ready and not sources[i].pending
  end
  local function values()
    local result = {}
    for i, source in ipairs(sources) do result[i] = ready and source:value() or source.result end
    return result
  end
  if ready then return future.new(values(), core.stream()) end
  return enqueue { sources = sources, stream = core.stream(), f = values }
end

-- The numbers of exec.h.
local PRIORITIES = { low = -1, normal = 0, high = 1 }

---@param name? string
---@param options? { priority?: "low"|"normal"|"high" }
---@return ms.Stream
function future.stream(name, options)
  options_of.argument("stream", "name", name, "string?")
  local priority = check("stream", options, { "priority" }).priority
  if priority ~= nil and not PRIORITIES[priority] then
    core.raise(("stream: unknown priority '%s': known are low, normal, high")
      :format(tostring(priority)))
  end
  return core.stream(name, PRIORITIES[priority])
end

options_of.methods(Future, "a future", is_future, { "value", "sync", "and_then" })

---@class ms.Stream
local Stream = core.stream_methods

---@param item ms.Future|ms.Tensor
function Stream:wait(item)
  item = check_future(item, "wait")
  check_ready(item, "wait")
  self:_wait(item.index, item.number)
end

return future
