-- What several scripts of this folder expect of calls and of models. They load it with dofile.
local expect = { full = os.getenv "MOONSHARD_TEST_FULL" == "1" }

--- Whether this job takes a combination of several choices. number: the sum of the choices'
--- numbers. In long ranges a job takes all; otherwise one of `every`, and jobs of other numbers of
--- ranks take others.
---@param number integer
---@param every integer
---@return boolean
function expect.takes(number, every)
  return expect.full or (number + require "moonshard".world_size()) % every == 0
end

--- f raises an error that has all of these parts.
---@param f function
---@param ... string
function expect.fails(f, ...)
  local ok, message = pcall(f)
  assert(not ok, "no error")
  for _, part in ipairs { ... } do
    assert(tostring(message):find(part, 1, true), ("'%s' is not in: %s"):format(part, message))
  end
end

--- All tensors of b are in a, with the same bits and dtypes.
---@param a table<string, ms.Tensor>
---@param b table<string, ms.Tensor>
---@param what string for the message
function expect.same(a, b, what)
  local count = 0
  for name, t in pairs(b) do
    count = count + 1
    assert(a[name]:dtype() == t:dtype() and a[name]:eq(t):all():item(),
      ("%s: '%s' differs"):format(what, name))
  end
  assert(count > 0)
end

--- The largest difference of a tensor from the one of the same name in b, relative to the largest
--- number there.
---@param a table<string, ms.Tensor>
---@param b table<string, ms.Tensor>
---@return number
function expect.difference(a, b)
  local most = 0
  for name, t in pairs(a) do
    local other = b[name]:detach()
    most = math.max(most, (t:detach() - other):abs():max():item() / other:abs():max():item())
  end
  return most
end

--- Copies of the whole tensors of a model's state, on every rank. All ranks call it.
---@param model ms.Module
---@return table<string, ms.Tensor>
function expect.whole(model)
  if not getmetatable(model).fsdp then return model:state() end
  local copies = {}
  model:summon({ writeback = false }, function()
    for name, t in pairs(model.module:state()) do copies[name] = t:detach():clone() end
  end)
  return copies
end

--- The collectives of f in the order of enqueueing.
---@param f function
---@return { op: string, label: string }[]
function expect.calls(f)
  local core, list = require "moonshard.core", {}
  core.comm_record(true)
  f()
  core.comm_record(false)
  for i, record in ipairs((core.comm_records())) do
    list[i] = { op = record.op, label = record.label }
  end
  return list
end

--- This process: its resident memory in kB, and its threads.
---@return integer kilobytes
---@return integer threads
function expect.process()
  local file <close> = assert(io.open "/proc/self/status")
  local text = file:read "a"
  return tonumber(text:match "VmRSS:%s*(%d+)"), tonumber(text:match "Threads:%s*(%d+)")
end

return expect
