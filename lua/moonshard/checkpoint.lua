-- Checkpoints: the part `ms.checkpoint`. A folder step-00000050 with manifest.json and
-- tensors.safetensors.
--
-- The manifest has all values as a tree, in which {"$tensor": name} stands for a tensor of the
-- other file. It also has the type and hash of each tensor, and begins with a hash of itself, so
-- that a flipped bit anywhere is detected. Nothing in a checkpoint is executed.
local core = require "moonshard.core"
local layouts = require "moonshard.ddp.layouts"
local log = require "moonshard.log"
local link_state = require "moonshard.link_state"
local options_of = require "moonshard.options"
local argument = options_of.argument
local steps = require "moonshard.steps"
local store = require "moonshard.checkpoint.store"
local values_of = require "moonshard.checkpoint.values"
local encode, decode, name_part = values_of.encode, values_of.decode, values_of.name_part

---@class ms.checkpoint
local checkpoint = {}

-- { message, code } of a background write that failed, until save or wait returns it
local late

--------------------------------------------------------------------------------------------- saving

local function is_object(value)
  local kind = type(value)
  if core.is_tensor(value) or (kind ~= "table" and kind ~= "userdata") then return false end
  -- Objects of the library raise for unknown names.
  local ok, state = pcall(function() return value.state end)
  return ok and type(state) == "function"
end

local function collect(things)
  local out, values = { names = {}, tensors = {} }, {}
  local names = {}
  for name in pairs(things) do
    if type(name) ~= "string" or name == "" or not values_of.is_text(name) then
      core.raise("checkpoint: the names of things are texts")
    end
    names[#names + 1] = name
  end
  table.sort(names)
  for _, name in ipairs(names) do
    local thing = things[name]
    if is_object(thing) then
      if type(thing.load_state) ~= "function" then
        core.raise(
          ("checkpoint: the object '%s' has state but no load_state: it could not be loaded again")
            :format(name))
      end
      thing = thing:state()
    end
    values[name] = encode(thing, name_part(name), 1, out)
  end
  -- No thing's name begins with a slash.
  local links = link_state.save(
    function(value, name, found) return encode(value, "/links/" .. name_part(name), 1, found) end,
    out)
  return values, out, links
end

-- Waits for the checkpoint that is being written in the background, if there is one.
local function join()
  local ok, message, code = core.checkpoint_wait()
  if ok then return end
  late, store.lost = late or { message, code }, message
end

--- Waits until a checkpoint that is being written in the background is on disk.
---@return true?
---@return string? message why the last one was not written
---@return string? code
function checkpoint.wait()
  join()
  if not late then return true end
  local message, code = late[1], late[2]
  late = nil
  return nil, message, code
end

-- Notes a checkpoint that was saved after a request to stop: the run then ends with the code that
-- says that it can be resumed.
local function note_saved()
  local launch = require "moonshard.launch"
  if launch.cut or launch.process and launch.process.stop_requested() then launch.saved = true end
end

-- Completes the manifest, copies the tensors, and starts writing folder/name in the background.
local function write(folder, name, out, manifest)
  local snapshot, hashes = core.snapshot(out.names, out.tensors)
  local tensors = {}
  for i, path in ipairs(out.names) do
    local t = out.tensors[i]
    tensors[path] = {
      type = store.type_text(t:dtype(), t:shape()), hash = ("%016x"):format(hashes[i][1]),
    }
  end
  local seed, random_step, draw = core.random_state()
  manifest.tensors, manifest.random = tensors, { seed = seed, step = random_step, draw = draw }
  return core.checkpoint_start(snapshot, folder, name, store.manifest_text(manifest))
end

-- The next step, which gives a checkpoint its name unless things.step is given.
local function next_step()
  local step, running = core.step()
  return (running or steps.ends > 0) and step + 1 or step
end

--- Saves things by name under folder/step-NNNNNNNN. Each thing has state() and load_state(), or is
--- a plain value. The number is that of the next step: things.step, else the one after the current
--- step. Values are copied before the call returns; the files are written while training continues.
--- If writing fails, the next save (which still writes its own checkpoint) or `wait` returns the
--- failure. All ranks call it; rank 0 writes, and only rank 0 returns failures.
---@param folder string
---@param things table<string, any>
---@return string? path
---@return string? message
---@return string? code
function checkpoint.save(folder, things)
  local ms = require "moonshard"
  argument("checkpoint.save", "folder", folder, "string")
  argument("checkpoint.save", "things", things, "table")
  local before, message, code = checkpoint.wait()
  local step = math.type(things.step) == "integer" and things.step or next_step()
  local first = ms.rank() == 0
  local ok, why, kind = true, nil, nil
  if first then ok, why, kind = core.make_directory(folder) end
  layouts.settle()
  -- All ranks collect, even if rank 0 has failed: the state of a thing may need a collective.
  local values, out, links = collect(things)
  folder = folder:gsub("/+$", "")
  local name = ("step-%08d"):format(step)
  -- The state is the same on all ranks: rank 0 writes it.
  if first and ok then
    ok, why, kind = write(folder, name, out, {
      version = store.VERSION, step = step, world_size = ms.world_size(),
      files = { "tensors.safetensors" },
      values = values, links = links, buckets = layouts.save(),
    })
  end
  store.lost = why
  if not ok then return nil, why, kind end
  note_saved()
  if not before then
    return nil, "the checkpoint before this one was not written: " .. message, code
  end
  return folder .. "/" .. name
end

-------------------------------------------------------------------------------------------- loading

local function known_names(values)
  local names = {}
  for name in pairs(values) do names[#names + 1] = name end
  table.sort(names)
  return table.concat(names, ", ")
end

-- Decodes the values that things name, and all values without tensors. Checks the hash of every
-- tensor that it reads. Changes nothing yet.
local function decode_all(path, manifest, file, things)
  local failure
  local function tensor(name)
    local saved = manifest.tensors[name]
      or error(("'%s' is no tensor of this checkpoint"):format(tostring(name)))
    local t, message, code = file:load(name, tonumber("0x" .. saved.hash))
    if not t and not failure then
      failure = {
        ("'%s/tensors.safetensors': %s"):format(path, message),
        code == "unsupported" and "corrupt" or code,
      }
    end
    return t
  end
  local result = {}
  for name, value in pairs(manifest.values) do
    local ok, decoded = true, nil
    if things[name] ~= nil or not values_of.holds_tensor(value) then
      ok, decoded = pcall(decode, value, tensor)
    end
    if failure then return nil, failure[1], failure[2] end
    if not ok then
      return store.corrupt(path .. "/manifest.json", ("'%s': %s"):format(name, tostring(decoded)))
    end
    result[name] = decoded
  end
  local ok, links = pcall(link_state.read, manifest.links, decode, tensor)
  if failure then return nil, failure[1], failure[2] end
  if not ok then
    return store.corrupt(path .. "/manifest.json", ("states of links: %s"):format(tostring(links)))
  end
  return result, links
end

--- Loads the saved state of things of these names, in place. Returns all values by name: the
--- objects, and all plain values that were saved. Damage is "corrupt"; then nothing has changed.
---@param path string a checkpoint, as save or latest returned it
---@param things? table<string, any> objects with load_state; for plain values any value
---@return table<string, any>?
---@return string? message
---@return string? code "corrupt" (file, tensor), "mismatch" (names, shapes) ...
function checkpoint.load(path, things)
  argument("checkpoint.load", "path", path, "string")
  argument("checkpoint.load", "things", things, "table?")
  things = things or {}
  join()
  local ms = require "moonshard"
  if ms.world_size() > 1 then ms.world():barrier() end     -- rank 0 may have been writing it
  local manifest, message, code = store.read_manifest(path)
  if not manifest then return nil, message, code end
  for name, thing in pairs(things) do
    if is_object(thing) and type(thing.load_state) ~= "function" then
      core.raise(("checkpoint: the object '%s' has no load_state"):format(name))
    end
    if is_object(thing) and manifest.values[name] == nil then
      return core.refuse(("'%s' holds no '%s'; it holds %s")
        :format(path, name, known_names(manifest.values)), "mismatch")
    end
  end
  local file
  file, message, code = store.open_tensors(path, manifest)
  if not file then return nil, message, code end
  local result, links
  result, links, code = decode_all(path, manifest, file, things)
  file:close()
  if not result then return nil, links, code end
  local fits, differs = pcall(layouts.load, manifest.buckets)
  if not fits then
    return core.refuse(("'%s': the buckets of a ddp model do not fit (it must be wrapped as it \z
      was when it was saved, and loaded between a backward and the next forward): %s")
      :format(path, tostring(differs):match "^[^\n]-:%d+: (.*)" or differs), "mismatch")
  end
  for name, thing in require "moonshard".sorted_pairs(things) do
    if is_object(thing) then
      local ok, why = pcall(thing.load_state, thing, result[name])
      if not ok then
        return core.refuse(("'%s', '%s': %s"):format(path, name, tostring(why)), "mismatch")
      end
      result[name] = thing
    end
  end
  link_state.load(links)
  core.set_random_state(manifest.random.seed, manifest.random.step, manifest.random.draw)
  require "moonshard.launch".seed_random(manifest.random.seed, manifest.step)
  return result
end

--- The path of the newest checkpoint of a folder that is not damaged; nil if there is none. Waits
--- for one that is being written. A warning names each damaged one that was skipped. If there are
--- checkpoints and none can be read: nil, message, code.
---@param folder string
---@return string? path
---@return string? message
---@return string? code "corrupt", "unsupported" (the newest is of a newer version), "denied" ...
function checkpoint.latest(folder)
  argument("checkpoint.latest", "folder", folder, "string")
  join()
  folder = folder:gsub("(.)/+$", "%1")
  local path, passed, message, code = store.find(folder)
  if core.rank() == 0 then
    for _, one in ipairs(passed) do log.warn("%s; it is skipped", one) end
  end
  if path then return path end
  if message then return core.refuse(message, code) end
  if #passed > 0 then
    return core.refuse(("none of the %d checkpoints in '%s' can be read"):format(#passed, folder),
      "corrupt")
  end
end

return options_of.closed(checkpoint, "ms.checkpoint")
