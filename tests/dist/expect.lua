-- What several scripts of this folder expect of calls and of models, and how they compare tensors.
-- They load it with dofile. expect.models has the models and loops that several of them have:
-- shared/models.lua.
local ms = require "moonshard"
local core = require "moonshard.core"
local expect = { full = os.getenv "MOONSHARD_TEST_FULL" == "1" }
local rank = ms.rank()

--- Whether this job takes a combination of several choices. number: the sum of the choices'
--- numbers. In long ranges a job takes all; otherwise one of `every`, and jobs of other numbers of
--- ranks take others.
---@param number integer
---@param every integer
---@return boolean
function expect.takes(number, every)
  return expect.full or (number + ms.world_size()) % every == 0
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

-- What makes a tensor differ from t, or nil.
local function apart(own, t)
  if not own then return "is not there" end
  if own:dtype() ~= t:dtype() then return ("is %s, not %s"):format(own:dtype(), t:dtype()) end
  if own:eq(t):all():item() then return nil end
  return ("differs by %g"):format((own - t):abs():max():item())
end

--- All tensors of b are in a, with the same bits and dtypes.
---@param a table<string|integer, ms.Tensor>
---@param b table<string|integer, ms.Tensor>
---@param what string for the message
function expect.same(a, b, what)
  local count = 0
  for name, t in pairs(b) do
    count = count + 1
    local why = apart(a[name], t)
    assert(not why, why and ("rank %d: %s: '%s' %s"):format(rank, what, name, why))
  end
  assert(count > 0)
end

--- The largest difference of a tensor from the one of the same name in b, relative to the largest
--- number there; and the name. All names of b are in a.
---@param a table<string, ms.Tensor>
---@param b table<string, ms.Tensor>
---@return number
---@return string
function expect.difference(a, b)
  local most, where = 0, ""
  for name in pairs(b) do assert(a[name], name) end
  for name, t in pairs(a) do
    local other = b[name]:detach()
    local by = (t:detach() - other):abs():max():item()
    assert(by == by, name .. " is nan")
    local relative = by > 0 and by / other:abs():max():item() or 0
    if relative > most then most, where = relative, name end
  end
  return most, where
end

--- expect.difference is at most `most`.
---@param a table<string, ms.Tensor>
---@param b table<string, ms.Tensor>
---@param most number
---@param what string for the message
function expect.close(a, b, most, what)
  local by, name = expect.difference(a, b)
  assert(by <= most, ("rank %d: %s: '%s' is %g of its largest number apart, %g is allowed"):format(
    rank, what, name, by, most))
end

--- Two tensors are as close as `tolerance`, relative to the largest number of b or to 1.
---@param a ms.Tensor
---@param b ms.Tensor
---@param what? string for the message
---@param tolerance? number 0 if nil
function expect.equal(a, b, what, tolerance)
  local by, most = (a - b):abs():max():item(), b:abs():max():item()
  if not (by <= (tolerance or 0) * math.max(1, most)) then
    error(("%s: differs by %g of %g"):format(what or "values", by, most), 2)
  end
end

--- A hash of tensors by name.
---@param tensors table<string, ms.Tensor>
---@return integer
function expect.hash(tensors)
  local text = {}
  for name, t in ms.sorted_pairs(tensors) do
    text[#text + 1] = name .. core.hash(table.concat(t:reshape(-1):to_table(), " "))
  end
  return core.hash(table.concat(text, " "))
end

--- All numbers of some tensors as text, to the bit.
---@param tensors ms.Tensor[]
---@return string
function expect.bits(tensors)
  local list = {}
  for _, t in ipairs(tensors) do
    for _, x in ipairs(t:reshape(-1):to_table()) do list[#list + 1] = ("%a"):format(x) end
  end
  return table.concat(list, " ")
end

--- Copies of the gradients of all parameters, of which each has one.
---@param model ms.Module
---@return ms.Tensor[]
function expect.gradients(model)
  local list = {}
  for i, p in ipairs(model:parameters()) do list[i] = p:grad():clone() end
  return list
end

--- Removes all gradients.
---@param model ms.Module
function expect.clear(model)
  for _, p in ipairs(model:parameters()) do p:set_grad(nil) end
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

--- Copies of the whole parameters of a sharded model by name, or of their gradients. All ranks call
--- it.
---@param model ms.Module
---@param gradients? boolean
---@return table<string, ms.Tensor>
function expect.parameters(model, gradients)
  local found = {}
  model:summon({ writeback = false, grads = gradients }, function()
    for _, item in ipairs(model:named_parameters()) do
      local p = item.parameter
      assert(p:dtype() == "f32", item.name)
      found[item.name] = (gradients and p:grad() or p:detach()):clone()
    end
  end)
  return found
end

--- The records of f's collectives, in the order of enqueueing.
---@param f function
---@return table[]
function expect.records(f)
  core.comm_record(true)
  f()
  core.comm_record(false)
  return (core.comm_records())
end

--- The bytes that tensors have now, of the device and of what is offloaded.
---@return integer live
---@return integer offloaded
function expect.memory()
  core.collect()
  local m = ms.memory()
  return m.live, m.offload_live
end

--- This process: its resident memory in kB, and its threads.
---@return integer kilobytes
---@return integer threads
function expect.process()
  local file <close> = assert(io.open "/proc/self/status")
  local text = file:read "a"
  return tonumber(text:match "VmRSS:%s*(%d+)"), tonumber(text:match "Threads:%s*(%d+)")
end

--- A case of PyTorch's tests: runs f, and prints whether it went well on this rank. A failure ends
--- the job, since ranks would lose step with each other.
---@param name string
---@param f function
function expect.case(name, f)
  local ok, message = xpcall(f, debug.traceback)
  io.stdout:write(("%s %s on rank %d%s\n")
    :format(ok and "ok:" or "FAILED:", name, rank, ok and "" or ": " .. tostring(message)))
  if not ok then error(message, 0) end
end

expect.models = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "shared/models.lua")
return expect
