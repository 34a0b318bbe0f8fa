-- Checkpoints: what api.lua calls `ms.checkpoint`. A folder step-00000050 with manifest.json and tensors.safetensors.
--
-- The manifest holds all values as a tree in which {"$tensor": name} stands for a tensor of the other file, with type and hash of each
-- tensor, behind a hash of its own: a bit that flips anywhere is found. Nothing in a checkpoint is ever run.
local core = require "moonshard.core"
local layouts = require "moonshard.ddp.layouts"
local link_state = require "moonshard.link_state"

---@class ms.checkpoint
local checkpoint = {}

local VERSION = 1
local DEEPEST = 30               -- of nested tables; JSON needs up to three levels for each
local late                       -- { message, code }: why a checkpoint in the background was not written, until somebody was told

---------------------------------------------------------------------------------------------------------------------- values as JSON

-- A part of a tensor's name. Different keys give different parts: integers get #, and what has a meaning here or is not plain is escaped.
local function name_part(key)
  if math.type(key) == "integer" then return "#" .. key end
  return (key:gsub("[%c/%%#\127-\255]", function(c) return ("%%%02x"):format(c:byte()) end))
end

local function is_text(s) return utf8.len(s) ~= nil and not s:find("\0", 1, true) end

local encode

-- JSON objects have text as keys; tables with other keys become lists of pairs.
local function encode_table(value, path, depth, out)
  if depth > DEEPEST then
    core.raise(("checkpoint: %s: tables are nested more than %d deep, or refer to themselves"):format(path, DEEPEST))
  end
  local keys, plain, count = {}, true, 0
  for key in pairs(value) do
    local kind = math.type(key) or type(key)
    if kind ~= "string" and kind ~= "integer" then
      core.raise(("checkpoint: %s: a key is a %s; keys are strings and integers"):format(path, kind))
    end
    count = count + 1
    keys[count] = key
    plain = plain and kind == "string" and is_text(key) and key:sub(1, 1) ~= "$"
  end
  if count > 0 and #value == count then
    local list = {}
    for i = 1, count do list[i] = encode(value[i], path .. "/" .. name_part(i), depth + 1, out) end
    return list
  end
  table.sort(keys, function(a, b)
    if type(a) ~= type(b) then return type(a) < type(b) end
    return a < b
  end)
  local made = {}
  for i, key in ipairs(keys) do
    local item = encode(value[key], path .. "/" .. name_part(key), depth + 1, out)
    if plain then made[key] = item else made[i] = { encode(key, path, depth, out), item } end
  end
  return plain and made or { ["$table"] = made }
end

-- JSON's own words where they are exact. out collects the tensors.
function encode(value, path, depth, out)
  local kind = math.type(value) or type(value)
  if kind == "integer" or kind == "boolean" then return value end
  if kind == "float" then
    if value - value == 0 then return value end
    return { ["$float"] = value ~= value and "nan" or value > 0 and "inf" or "-inf" }
  end
  if kind == "string" then
    if is_text(value) then return value end
    return { ["$bytes"] = (value:gsub(".", function(c) return ("%02x"):format(c:byte()) end)) }
  end
  if kind == "table" then return encode_table(value, path, depth, out) end
  if core.is_tensor(value) then
    out.names[#out.names + 1] = path
    out.tensors[#out.tensors + 1] = value
    return { ["$tensor"] = path }
  end
  return core.raise(("checkpoint: %s is a %s; what can be saved: tensors, numbers, strings, booleans, tables"):format(path, kind))
end

local FLOATS = { nan = 0 / 0, inf = math.huge, ["-inf"] = -math.huge }

-- The value again; tensor(name) gives a tensor.
local function decode(value, tensor)
  if type(value) ~= "table" then return value end
  if value["$tensor"] then return tensor(value["$tensor"]) end
  if value["$float"] then return FLOATS[value["$float"]] end
  if value["$bytes"] then
    return (value["$bytes"]:gsub("%x%x", function(hex) return string.char(tonumber(hex, 16)) end))
  end
  local made = {}
  if value["$table"] then
    for _, pair in ipairs(value["$table"]) do made[decode(pair[1], tensor)] = decode(pair[2], tensor) end
  else
    for key, item in pairs(value) do made[key] = decode(item, tensor) end
  end
  return made
end

local function holds_tensor(value)
  if type(value) ~= "table" then return false end
  if value["$tensor"] then return true end
  for _, item in pairs(value) do
    if holds_tensor(item) then return true end
  end
  return false
end

------------------------------------------------------------------------------------------------------------------------ the manifest

local HEAD, MIDDLE, TAIL = '{"hash":"', '","manifest":', "}\n"

local function manifest_text(manifest)
  local body = core.json_encode(manifest)
  return HEAD .. ("%016x"):format(core.hash(body)) .. MIDDLE .. body .. TAIL
end

local function corrupt(path, rule) return core.refuse(("'%s' is damaged: %s"):format(path, rule), "corrupt") end

-- Its hash is no signature: whoever can write files can write one, and must not get further than to an error.
local function is_whole(manifest)
  local random = manifest.random
  if type(manifest.tensors) ~= "table" or type(manifest.values) ~= "table" or type(random) ~= "table" then return false end
  for _, key in ipairs { "seed", "step", "draw" } do
    if math.type(random[key]) ~= "integer" then return false end
  end
  for _, tensor in pairs(manifest.tensors) do
    if type(tensor) ~= "table" or type(tensor.type) ~= "string" or type(tensor.hash) ~= "string" or not tensor.hash:match "^%x+$" then
      return false
    end
  end
  return true
end

local function read_manifest(folder)
  local path = folder .. "/manifest.json"
  local text, message, code = core.file_read(path)
  if not text then
    if code == "not_found" then message = ("'%s' is no checkpoint: there is no manifest.json in it"):format(folder) end
    return core.refuse(message, code)
  end
  local start = #HEAD + 16 + #MIDDLE
  local body = text:sub(start + 1, -#TAIL - 1)
  if text:sub(1, start) ~= HEAD .. ("%016x"):format(core.hash(body)) .. MIDDLE or text:sub(-#TAIL) ~= TAIL then
    return corrupt(path, "its text does not have the hash that stands in it")
  end
  local manifest
  manifest, message = core.json_decode(body)
  if not manifest then return corrupt(path, message) end
  if type(manifest) ~= "table" or manifest.version ~= VERSION then
    local version = tostring(type(manifest) == "table" and manifest.version)
    return core.refuse(("'%s' has version %s; this Moonshard reads %d"):format(path, version, VERSION), "unsupported")
  end
  if not is_whole(manifest) then return corrupt(path, "a field is missing or of another kind") end
  return manifest
end

-- "f32 [2, 3]"
local function type_text(dtype, shape) return ("%s [%s]"):format(dtype, table.concat(shape, ", ")) end

------------------------------------------------------------------------------------------------------------------------------ saving

local function is_object(value)
  local kind = type(value)
  if core.is_tensor(value) or (kind ~= "table" and kind ~= "userdata") then return false end
  return type(value.state) == "function"
end

local function collect(things)
  local out, values = { names = {}, tensors = {} }, {}
  local names = {}
  for name in pairs(things) do
    if type(name) ~= "string" or name == "" or not is_text(name) then core.raise("checkpoint: the names of things are texts") end
    names[#names + 1] = name
  end
  table.sort(names)
  for _, name in ipairs(names) do
    local thing = things[name]
    if is_object(thing) then
      if type(thing.load_state) ~= "function" then
        core.raise(("checkpoint: the thing '%s' has state but no load_state: it could not be loaded again"):format(name))
      end
      thing = thing:state()
    end
    values[name] = encode(thing, name_part(name), 1, out)
  end
  -- No thing's name begins with a slash.
  local links = link_state.save(function(value, name, found) return encode(value, "/links/" .. name_part(name), 1, found) end, out)
  return values, out, links
end

local function remember(ok, message, code)
  if not ok and not late then late = { message, code } end
end

--- Waits until a checkpoint that is being written in the background is on disk.
---@return true?
---@return string? message why the last one was not written
---@return string? code
function checkpoint.wait()
  remember(core.checkpoint_wait())
  if not late then return true end
  local message, code = late[1], late[2]
  late = nil
  return nil, message, code
end

-- What was saved after a request to stop makes the run one that can go on.
local function note_saved()
  local launch, process = require "moonshard.launch", package.loaded["moonshard.process"]
  if launch.cut or process and process.stop_requested() then launch.saved = true end
end

--- Saves things by name under folder/step-NNNNNNNN: each has state() and load_state(), or is a plain value. The step is things.step, else
--- the current one. Values are copied before it returns; the files are written while training goes on. A failure to write them is the
--- result of the next save (which still writes its own) or of `wait`. All ranks call it; rank 0 writes, and only there a failure is the result.
---@param folder string
---@param things table<string, any>
---@return string? path
---@return string? message
---@return string? code
function checkpoint.save(folder, things)
  local ms = require "moonshard"
  if type(things) ~= "table" then core.raise("checkpoint.save: a table of what is to be saved is expected, not " .. type(things)) end
  local before, message, code = checkpoint.wait()
  local step = math.type(things.step) == "integer" and things.step or ms.step()
  local ok, why, kind = core.make_directory(folder)
  if not ok then return nil, why, kind end
  layouts.settle()
  local values, out, links = collect(things)
  folder = folder:gsub("/+$", "")
  local name = ("step-%08d"):format(step)
  if ms.rank() ~= 0 then
    -- The state is the same on all ranks: rank 0 writes it.
    note_saved()
    return folder .. "/" .. name
  end
  local snapshot, hashes = core.snapshot(out.names, out.tensors)
  local tensors = {}
  for i, tensor in ipairs(out.names) do
    tensors[tensor] = { type = type_text(out.tensors[i]:dtype(), out.tensors[i]:shape()), hash = ("%016x"):format(hashes[i]) }
  end
  local seed, random_step, draw = core.random_state()
  ok, why, kind = core.checkpoint_start(snapshot, folder, name, manifest_text {
    version = VERSION, step = step, world_size = ms.world_size(), files = { "tensors.safetensors" },
    tensors = tensors, values = values, links = links, buckets = layouts.save(), random = { seed = seed, step = random_step, draw = draw },
  })
  if not ok then return nil, why, kind end
  note_saved()
  if not before then return nil, "the checkpoint before this one was not written: " .. message, code end
  return folder .. "/" .. name
end

----------------------------------------------------------------------------------------------------------------------------- loading

-- What the tensors' file must hold is in the manifest; what its header says beyond that is damage.
local function open_tensors(folder, manifest)
  local path = folder .. "/tensors.safetensors"
  local file, message, code = core.safetensors_open(path)
  if not file then
    if code == "not_found" then return corrupt(path, "the manifest is there, but this file is not") end
    return nil, message, code
  end
  local entries = file:entries()
  for name, expected in pairs(manifest.tensors) do
    local found = entries[name]
    if not found then return corrupt(path, ("tensor '%s' is missing"):format(name)) end
    local is = type_text(found.dtype, found.shape)
    if is ~= expected.type then return corrupt(path, ("tensor '%s' is %s, saved was %s"):format(name, is, expected.type)) end
  end
  for name in pairs(entries) do
    if not manifest.tensors[name] then return corrupt(path, ("tensor '%s' was never saved"):format(name)) end
  end
  return file
end

local function known_names(values)
  local names = {}
  for name in pairs(values) do names[#names + 1] = name end
  table.sort(names)
  return table.concat(names, ", ")
end

-- Decodes what is asked for, and all else that is cheap. Every tensor's hash is checked, and nothing is changed yet.
local function decode_all(path, manifest, file, things)
  local failure
  local function tensor(name)
    local saved = manifest.tensors[name] or error(("'%s' is no tensor of this checkpoint"):format(tostring(name)))
    local t, message, code = file:load(name, tonumber("0x" .. saved.hash))
    if not t and not failure then failure = { ("'%s/tensors.safetensors': %s"):format(path, message), code } end
    return t
  end
  local result = {}
  for name, value in pairs(manifest.values) do
    local ok, decoded = true, nil
    if things[name] ~= nil or not holds_tensor(value) then ok, decoded = pcall(decode, value, tensor) end
    if failure then return nil, failure[1], failure[2] end
    if not ok then return corrupt(path .. "/manifest.json", ("'%s': %s"):format(name, tostring(decoded))) end
    result[name] = decoded
  end
  local ok, links = pcall(link_state.read, manifest.links, decode, tensor)
  if failure then return nil, failure[1], failure[2] end
  if not ok then return corrupt(path .. "/manifest.json", ("states of links: %s"):format(tostring(links))) end
  return result, links
end

--- Gives things of these names their saved state, in place, and returns all values by name: the objects, and the plain values that were
--- saved, asked for or not. What is damaged is "corrupt", and then nothing has changed.
---@param path string a checkpoint: what save or latest returned
---@param things table<string, any> objects with load_state; for plain values any value
---@return table<string, any>?
---@return string? message
---@return string? code "corrupt" (file, tensor), "mismatch" (names, shapes) ...
function checkpoint.load(path, things)
  remember(core.checkpoint_wait())
  local ms = require "moonshard"
  if ms.world_size() > 1 then ms.world():barrier() end     -- rank 0 may have been writing it
  local manifest, message, code = read_manifest(path)
  if not manifest then return nil, message, code end
  for name, thing in pairs(things) do
    if is_object(thing) and type(thing.load_state) ~= "function" then
      core.raise(("checkpoint: the thing '%s' has no load_state"):format(name))
    end
    if is_object(thing) and manifest.values[name] == nil then
      return core.refuse(("'%s' holds no '%s'; it holds %s"):format(path, name, known_names(manifest.values)), "mismatch")
    end
  end
  local file
  file, message, code = open_tensors(path, manifest)
  if not file then return nil, message, code end
  local result, links
  result, links, code = decode_all(path, manifest, file, things)
  file:close()
  if not result then return nil, links, code end
  local fits, differs = pcall(layouts.load, manifest.buckets)
  if not fits then
    return core.refuse(("'%s': the buckets of a ddp model do not fit (it must be wrapped as it was when it was saved, and loaded between a backward and the next forward): %s")
      :format(path, tostring(differs):match "^[^\n]-:%d+: (.*)" or differs), "mismatch")
  end
  for name, thing in require "moonshard".sorted_pairs(things) do
    if is_object(thing) then
      local ok, why = pcall(thing.load_state, thing, result[name])
      if not ok then return core.refuse(("'%s', '%s': %s"):format(path, name, tostring(why)), "mismatch") end
      result[name] = thing
    end
  end
  link_state.load(links)
  core.set_random_state(manifest.random.seed, manifest.random.step, manifest.random.draw)
  return result
end

-- Checkpoints of a folder, newest first; one that a crash left while it was being replaced stands behind its successor.
local function candidates(folder)
  local found = {}
  for _, name in ipairs(core.list(folder) or {}) do
    local replaced, step = name:match "^(%.?o?l?d?%-?)step%-(%d+)$"
    if step and (replaced == "" or replaced == ".old-") then
      found[#found + 1] = { name = name, step = math.tointeger(tonumber(step)) or 0, replaced = replaced ~= "" }
    end
  end
  table.sort(found, function(a, b)
    if a.step ~= b.step then return a.step > b.step end
    return not a.replaced and b.replaced
  end)
  return found
end

--- The last committed checkpoint of a folder, nil if there is none. Waits for one that is being written.
---@param folder string
---@param before? string path of a checkpoint of the folder: only those behind it in this order count
---@return string? path
function checkpoint.latest(folder, before)
  remember(core.checkpoint_wait())
  local passed = before == nil
  for _, candidate in ipairs(candidates(folder)) do
    local path = folder:gsub("/+$", "") .. "/" .. candidate.name
    if passed and read_manifest(path) then return path end
    passed = passed or path == before
  end
end

return checkpoint
