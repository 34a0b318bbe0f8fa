-- Futures and streams: a value, and the point in a stream at which it is ready.
local core = require "moonshard.core"

local future = {}

---@class ms.Future
local Future = {}
Future.__index = Future
Future.__name = "ms.Future"
Future.__metatable = "locked"

local queue, running = {}, false           -- callbacks that wait for the running hook to return

local function is_future(value) return type(value) == "table" and value.__future == Future end

-- Tensors that a future holds outlive the step that made them.
local function keep(value)
  if core.is_tensor(value) then value:keep()
  elseif type(value) == "table" and not is_future(value) then for _, item in ipairs(value) do keep(item) end end
  return value
end

--- A future of value, ready behind all that is enqueued on the stream.
---@param value any
---@param stream ms.Stream
---@return ms.Future
function future.new(value, stream)
  local index, number = stream:_point()
  return setmetatable({ __future = Future, result = keep(value), stream = stream, index = index, number = number }, Future)
end

-- Takes over what another future came to.
local function resolve(self, other)
  self.result, self.stream, self.index, self.number = other.result, other.stream, other.index, other.number
  self.pending = nil
end

local function check_ready(self, what)
  if self.pending then core.raise(what .. ": the callback that makes this value has not run yet; it runs when the current hook returns") end
end

--- The current stream waits; the host does not.
---@return any
function Future:value()
  check_ready(self, "value")
  core.stream():_wait(self.index, self.number)
  return self.result
end

--- **blocks** until it is ready
---@return any
function Future:sync()
  check_ready(self, "sync")
  core.point_sync(self.index, self.number)
  return self.result
end

local function run_callback(item)
  local source, made = item.source, item.made
  source.stream:run(function()
    core.hook_enter()
    local scope <close> = setmetatable({}, { __close = core.hook_leave }) -- luacheck: ignore scope
    core.stream():_wait(source.index, source.number)
    local value = item.f(source.result)
    if value == nil then resolve(made, source)
    elseif is_future(value) then
      check_ready(value, "and_then")
      resolve(made, value)
    else resolve(made, future.new(value, core.stream())) end
  end)
end

-- Runs callbacks in order of registration; what they register comes behind.
function future.drain()
  if running then return end
  running = true
  local ok, message = true, nil
  while ok and queue[1] do ok, message = pcall(run_callback, table.remove(queue, 1)) end
  running = false
  if not ok then
    queue = {}
    error(message, 0)
  end
end

--- f(value) runs on the host with the future's stream current: at once, or after the running hook or callback has returned.
---@param f fun(value: any): any
---@return ms.Future
function Future:and_then(f)
  local made = setmetatable({ __future = Future, pending = true }, Future)
  queue[#queue + 1] = { source = self, made = made, f = f }
  if not core.in_hook() then future.drain() end
  return made
end

--- A future of the list of all values, in order; tensors count as ready on the current stream.
---@param list (ms.Future|ms.Tensor)[]
---@return ms.Future
function future.all(list)
  local values, stream = {}, core.stream()
  for i, item in ipairs(list) do values[i] = is_future(item) and item:value() or item end
  return future.new(values, stream)
end

--- Without a name: the current stream. With one: that stream, made at first use.
---@param name? string
---@return ms.Stream
function future.stream(name) return core.stream(name) end

---@class ms.Stream
local Stream = core.stream_methods

--- This stream waits for the future; the host does not.
---@param item ms.Future
function Stream:wait(item)
  check_ready(item, "wait")
  self:_wait(item.index, item.number)
end

return future
