-- Checkpoints: the part `ms.checkpoint`. A folder step-00000050 with manifest.json and
-- tensors.safetensors; where ranks have pieces of sharded tensors, also a file of each rank.
--
-- The manifest has all values as a tree, in which {"$tensor": name} represents a tensor of the
-- other files. It also has the type and hash of each tensor, or of each of its pieces with the file
-- and the elements, and begins with a hash of itself, so
-- that a flipped bit anywhere is detected. Nothing in a checkpoint is executed.
local apart = require "moonshard.checkpoint.apart"
local core = require "moonshard.core"
local named = require "moonshard.base.named"
local layouts = require "moonshard.parallel.ddp.layouts"
local lock = require "moonshard.checkpoint.lock"
local log = require "moonshard.base.log"
local link_state = require "moonshard.parallel.link_state"
local pieces = require "moonshard.checkpoint.pieces"
local replicas = require "moonshard.parallel.replicas"
local options_of = require "moonshard.base.options"
local argument = options_of.argument
local shared = require "moonshard.checkpoint.shared"
local steps = require "moonshard.train.steps"
local store = require "moonshard.checkpoint.store"
local values_of = require "moonshard.checkpoint.values"
local part_states = require "moonshard.nn.whole"
local sorted_pairs = require "moonshard.base.sorted_pairs"
local ms = require "moonshard"
local launch = require "moonshard.base.launch"
local tune = require "moonshard.train.tune"
local encode, decode, name_part = values_of.encode, values_of.decode, values_of.name_part

---@class ms.checkpoint
local checkpoint = {}

-- { message, code } of a background write that failed, until save or wait returns it
local late

-- The lock of the folder in which a checkpoint is being written: { folder, lock }. nil: none is
-- written, or the run has locked its folder itself.
local writing

local function end_writing()
  if writing then lock.give(writing[1], writing[2]) end
  writing = nil
end
steps.on_end(function() if writing and core.checkpoint_is_done() then end_writing() end end)

--------------------------------------------------------------------------------------------- saving

local function is_object(value)
  local kind = type(value)
  if core.is_tensor(value) or (kind ~= "table" and kind ~= "userdata") then return false end
  -- Objects of the library raise for unknown names.
  local ok, state = pcall(function() return value.state end)
  return ok and type(state) == "function"
end

-- The state of an object, of sharded ones what this rank has. It is copied, or written, before the
-- script goes on.
local function state_of(thing)
  local meta = getmetatable(thing)
  if type(meta) == "table" and (meta.fsdp or meta.__name == "ms.Optimizer") then
    return thing:state { kind = "sharded", live = true }
  elseif type(meta) == "table" and meta.module then
    return thing:state { kind = part_states.has(thing) and "sharded" or nil, live = true }
  end
  return thing:state()
end

-- Values of things, their tensors and pieces, and the states of links. Last: whether some rank has
-- pieces.
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
      thing = state_of(thing)
    end
    values[name] = encode(thing, name_part(name), 1, out)
  end
  local whole, parts = pieces.split(out)
  local world, count = core.world(), #parts.names
  if world:size() > 1 then
    count = world:_share("sum", "i64", { count }, "checkpoint")[1]
  end
  -- No thing's name begins with a slash.
  local links = link_state.save(
    function(value, name, found) return encode(value, "/links/" .. name_part(name), 1, found) end,
    whole, count > 0 and parts or nil)
  return values, whole, parts, links, count > 0
end

-- Waits for the checkpoint that is being written in the background, if there is one.
local function join()
  local ok, message, code = core.checkpoint_wait()
  end_writing()
  if ok then return end
  late, store.lost = late or { message, code }, message
end

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
  if launch.cut or launch.process and launch.process.stop_requested() then launch.saved = true end
end

-- What the manifest has of tensors with these hashes.
local function listed(out, hashes)
  local tensors = {}
  for i, path in ipairs(out.names) do
    local t = out.tensors[i]
    tensors[path] = pieces.hashes(hashes[i])
    tensors[path].type = store.type_text(t:dtype(), t:shape())
  end
  return tensors
end

local function random_numbers()
  local seed, random_step, draw = core.random_state()
  return { seed = seed, step = random_step, draw = draw }
end

-- Copies of the tensors, and their hashes; of a rank that does not write them, the hashes.
local function read_all(out, writes)
  local snapshot, hashes
  if writes then snapshot, hashes = core.snapshot(out.names, out.tensors)
  elseif core.is_sim() or core.world():size() == 1 or #out.tensors == 0 then hashes = {}
  else
    hashes = core.hashes(out.tensors)
    for i, hash in ipairs(hashes) do hashes[i] = { hash } end
  end
  return snapshot, hashes
end

-- What is known of tensors whose hashes were taken, by name, for replicas.lua; and the hashes.
local function known_of(out, hashes)
  local found, list = {}, {}
  for i, one in ipairs(hashes) do
    list[i] = ("%016x"):format(one[1])
    found[out.names[i]] = { hash = list[i], count = out.tensors[i]:numel() }
  end
  return found, list
end

-- Where all ranks have the same state, rank 0 writes it: completes the manifest, and starts writing
-- folder/name in the background.
local function write(folder, name, out, manifest, snapshot, hashes)
  manifest.tensors = listed(out, hashes)
  manifest.random = random_numbers()
  return core.checkpoint_start(snapshot, folder, name, store.manifest_text(manifest))
end

-- Where ranks have pieces, or hold different values, all ranks write, and the call returns when it
-- is committed.
local function write_together(folder, name, out, parts, manifest, alike, known)
  local function write_whole(in_folder, of, file)
    local hashes, message, code =
      core.checkpoint_part(out.names, out.tensors, in_folder, of, file)
    if not hashes then return nil, message, code end
    return listed(out, hashes)
  end
  local function differs(own)
    for path, one in pairs(own) do known[path] = one end
    return replicas.problem(alike, known)
  end
  local ok, message, code = pieces.save(folder, name, parts, manifest.values, write_whole, differs,
    function(values, tensors, list, files, has_regions)
      manifest.version = has_regions and 4 or manifest.apart and 3 or 2
      manifest.values = values
      manifest.tensors, manifest.pieces = tensors, list
      table.insert(files, 1, "tensors.safetensors")
      manifest.files, manifest.random = files, random_numbers()
      return store.manifest_text(manifest)
    end)
  if code == pieces.DIFFERS then replicas.raise("checkpoint.save", message) end
  return ok, message, code
end

-- The next step, which gives a checkpoint its name unless things.step is given.
local function next_step()
  local step, running = core.step()
  return (running or steps.ends > 0) and step + 1 or step
end

---@param folder string
---@param things table<string, any>
---@return string? path
---@return string? message
---@return string? code
function checkpoint.save(folder, things)
  argument("checkpoint.save", "folder", folder, "string")
  argument("checkpoint.save", "things", things, "table")
  local before, message, code = checkpoint.wait()
  local step = math.type(things.step) == "integer" and things.step or next_step()
  local first = ms.rank() == 0
  local ok, why, kind = true, nil, nil
  if first then ok, why, kind = core.make_directory(folder) end
  folder = folder:gsub("/+$", "")
  local problem, problem_kind = shared.problem(folder)
  if problem and ok then ok, why, kind = false, problem, problem_kind end
  layouts.settle()
  -- All ranks collect and compare, even if rank 0 has failed.
  local values, out, parts, links, together = collect(things)
  local alike = replicas.new()
  replicas.add_things(alike, things)
  local name = ("step-%08d"):format(step)
  local manifest = {
    version = 1, step = step, world_size = ms.world_size(), files = { "tensors.safetensors" },
    values = values, links = links, buckets = layouts.save(),
    products = tune.state(),
  }
  if first and ok and not lock.is_held(folder) then
    local taken
    taken, why, kind = lock.take(folder)
    ok, writing = taken ~= nil, taken and { folder, taken }
  end
  local snapshot, hashes = read_all(out, first and ok and not together)
  local held <close> = not core.is_sim() and snapshot or nil -- luacheck: ignore held
  local known, list = known_of(out, hashes)
  if not together then replicas.check("checkpoint.save", alike, ms.world(), known) end
  manifest.apart = apart.find(things, values, out, list, parts, replicas.names(alike))
  if together or manifest.apart then
    why, kind = pieces.agree(why, kind)
    ok = not why
    if ok then ok, why, kind = write_together(folder, name, out, parts, manifest, alike, known) end
  elseif first and ok then
    ok, why, kind = write(folder, name, out, manifest, snapshot, hashes)
  end
  store.lost = why
  if not ok or together or manifest.apart then end_writing() end
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

-- Whether an object reads what it needs of tensors: a sharded model, one that has parts, or an
-- optimizer.
local function takes_parts(thing)
  local meta = type(thing) == "table" and getmetatable(thing)
  return type(meta) == "table" and (meta.fsdp ~= nil or meta.__name == "ms.Optimizer"
    or meta.module == true and part_states.has(thing))
end

-- A reader of one checkpoint: functions that give a tensor by its name, as a whole or as a source.
-- `failure` is then the first problem: { message, code }.
local function reader_of(path, manifest, files)
  local self = {}
  local function fail(message, code)
    self.failure = self.failure
      or { message, code == "unsupported" and "corrupt" or code or "corrupt" }
  end
  function self.source(name)
    local function saved(own) return store.source(path, manifest, files, own) end
    return apart.source(manifest, name, saved)
      or error(("'%s' is no tensor of this checkpoint"):format(tostring(name)))
  end
  function self.whole(name)
    local found = self.source(name)
    if core.is_tensor(found) then return found end
    local t, message, code = found:whole()
    if not t then fail(message, code) end
    return t
  end
  function self.check(source, first, count, r)
    local ok, message, code = source:check(first, count, r)
    if not ok then fail(message, code) end
  end
  return self
end

-- Decodes one value. What loads parts gets sources, of which the parts that it will read are
-- checked now.
local function decode_one(reader, value, thing)
  if not takes_parts(thing) then return decode(value, reader.whole) end
  local given = decode(value, function(name)
    -- Hyper-parameters of an optimizer's groups may be tensors, too.
    return (name:find "^[^/]*/groups/" and reader.whole or reader.source)(name)
  end)
  if type(given) == "table" then thing:_each_source(given, reader.check) end
  return given
end

-- Decodes the values that things name, and all values without tensors. Checks the hash of all that
-- it reads, and of all that things will read. Changes nothing yet.
local function decode_all(path, manifest, files, things)
  local reader, result = reader_of(path, manifest, files), named.table {}
  for name, value in sorted_pairs(manifest.values) do
    local ok, decoded = true, nil
    if things[name] ~= nil or not values_of.holds_tensor(value) then
      ok, decoded = pcall(decode_one, reader, value, things[name])
    end
    if reader.failure then return nil, table.unpack(reader.failure) end
    if not ok then
      return store.corrupt(path .. "/manifest.json", ("'%s': %s"):format(name, tostring(decoded)))
    end
    result[name] = decoded
  end
  local ok, links = pcall(link_state.read, manifest.links, decode, reader.source)
  if not ok then
    return store.corrupt(path .. "/manifest.json", ("states of links: %s"):format(tostring(links)))
  end
  return result, links
end

-- Reads a checkpoint: the decoded values, the links' states, the manifest and the open files; or
-- nil, message, code, the same on all ranks.
local function read(path, things)
  local manifest, message, code = store.read_manifest(path)
  local files, result, links
  local problem = manifest and apart.take(manifest, things)
  if problem then
    message, code, manifest = ("'%s': %s"):format(path, problem), "mismatch", nil
  end
  for name, thing in pairs(manifest and things or {}) do
    if is_object(thing) and manifest.values[name] == nil then
      message = ("'%s' holds no '%s'; it holds %s")
        :format(path, name, known_names(manifest.values))
      code, manifest = "mismatch", nil
      break
    end
  end
  if manifest then files, message, code = store.open_tensors(path, manifest) end
  if files then
    result, links, code = decode_all(path, manifest, files, things)
    message = not result and links or nil
  end
  message, code = pieces.agree(message, code)
  if not message then return result, links, manifest, files end
  if files then store.close(files) end
  return core.refuse(message, code)
end

-- Gives the decoded values to the things; what does not fit is "mismatch", the same on all ranks.
local function apply(path, result, things)
  for name, thing in sorted_pairs(things) do
    if is_object(thing) then
      local ok, why = pcall(thing.load_state, thing, result[name])
      local message = pieces.agree(not ok and ("'%s', '%s': %s"):format(path, name, tostring(why))
        or nil, "mismatch")
      if message then return core.refuse(message, "mismatch") end
      result[name] = thing
    end
  end
  return result
end

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
  if ms.world_size() > 1 then ms.world():barrier() end     -- rank 0 may have been writing it
  for name, thing in pairs(things) do
    if is_object(thing) and type(thing.load_state) ~= "function" then
      core.raise(("checkpoint: the object '%s' has no load_state"):format(name))
    end
  end
  local result, links, manifest, files = read(path, things)
  if not result then return nil, links, manifest end
  local fits, differs = pcall(layouts.load, manifest.buckets)
  if not fits then
    store.close(files)
    return core.refuse(("'%s': the buckets of a ddp model do not fit (it must be wrapped as it \z
      was when it was saved, and loaded between a backward and the next forward): %s")
      :format(path, tostring(differs):match "^[^\n]-:%d+: (.*)" or differs), "mismatch")
  end
  local message, code
  result, message, code = apply(path, result, things)
  store.close(files)
  if not result then return nil, message, code end
  link_state.load(links)
  tune.load(manifest.products)
  core.set_random_state(manifest.random.seed, manifest.random.step, manifest.random.draw)
  launch.seed_random(manifest.random.seed, manifest.step)
  return result
end

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
