-- Modules from and to safetensors files, with the names of other tools, and config.json.
local core = require "moonshard.core"
local delayed = require "moonshard.nn.delayed"
local options_of = require "moonshard.base.options"
local check = options_of.check
local lora = require "moonshard.nn.lora"
local module = require "moonshard.nn.module"
local piece = require "moonshard.parallel.shard_piece"
local sorted_pairs = require "moonshard.base.sorted_pairs"
local log = require "moonshard.base.log"
local layouts = require "moonshard.parallel.ddp.layouts"
local alone = require "moonshard.nn.alone"
local agree = require "moonshard.parallel.agree"
local whole = require "moonshard.nn.whole"
local Module = module.base

local files = {}

local INDEX = "model.safetensors.index.json"

-------------------------------------------------------------------------------------------- loading

-- Reads the index of a folder: a list of { path, names }. Files that it does not name are not read;
-- a log line says so.
local function by_index(folder, where)
  local text, message, code = core.file_read(where)
  if not text then return nil, message, code end
  local index, why = core.json_decode(text)
  local map = type(index) == "table" and index.weight_map
  if type(map) ~= "table" then
    return core.refuse(("'%s': %s"):format(where, why or "it has no weight_map"), "corrupt")
  end
  local names, list = {}, {}
  for name, file in pairs(map) do
    if type(name) ~= "string" or type(file) ~= "string" or file:find "/" then
      return core.refuse(("'%s': %s is in %s: files of this folder are expected")
        :format(where, tostring(name), tostring(file)), "corrupt")
    end
    names[file] = names[file] or {}
    table.insert(names[file], name)
  end
  for file, wanted in pairs(names) do
    table.sort(wanted)
    list[#list + 1] = { path = folder .. "/" .. file, names = wanted, index = where }
  end
  table.sort(list, function(a, b) return a.path < b.path end)
  for _, file in ipairs(core.list(folder) or {}) do
    if file:match "%.safetensors$" and not names[file] then
      log.log("%s/%s is not read: %s does not name it", folder, file, INDEX)
    end
  end
  return list
end

-- The files to read, as a list of { path, names }. Of a folder, these are the files of its index,
-- or without an index all files whose names end in .safetensors.
local function files_of(path)
  local list = {}
  if type(path) == "table" then
    for i, file in ipairs(path) do list[i] = { path = file } end
    return list
  end
  local entries = core.exists(path) == "folder" and core.list(path)
  if not entries then return { { path = path } } end
  local folder = path:gsub("(.)/+$", "%1")
  for _, name in ipairs(entries) do
    if name == INDEX then return by_index(folder, folder .. "/" .. name) end
    if name:match "%.safetensors$" then list[#list + 1] = { path = folder .. "/" .. name } end
  end
  if #list == 0 then
    return core.refuse(path .. ": the folder holds no .safetensors file", "not_found")
  end
  return list
end

-- Adds the tensors of an open file to `found`: sources, by this library's names, and for each name
-- the name in the file and the file.
local function take(self, found, file, reader)
  local entries, list = reader:entries(), file.names
  if not list then
    list = {}
    for name in pairs(entries) do list[#list + 1] = name end
    table.sort(list)
  end
  for _, name in ipairs(list) do
    local entry = entries[name]
    if not entry then
      local why = ("%s: the file has no tensor '%s'"):format(file.path, name)
      return core.refuse(file.index and ("'%s' names it: %s"):format(file.index, why) or why,
        "not_found")
    end
    local source = piece.source(entry.dtype, entry.shape, {
      {
        file = reader, path = file.path, name = name, first = 0,
        count = piece.elements(entry.shape),
      },
    })
    local own, copy = name, nil
    if self.own_name then own, copy = self:own_name(name) end
    local other = own and found.origin[own]
    if other then
      return core.refuse(("the weight '%s' occurs twice: as '%s' in '%s' and as '%s' in '%s'")
        :format(own, other.name, other.path, name, file.path), "mismatch")
    end
    if own then
      found.state[own] = source
      found.origin[own] = { name = name, path = file.path, index = file.index }
    elseif copy then
      found.copies[name] = { of = copy, tensor = source, path = file.path, index = file.index }
    end
  end
  return true
end

--- Closes the files of `find`.
---@param found table
function files.close(found)
  for _, reader in ipairs(found.readers) do reader:close() end
end

--- Opens files, and tells which of their tensors is which of the module's. Nothing is read yet but
--- headers. Close it.
---@param self ms.Module
---@param path string|string[]
---@return { state: table<string, ms.Source>, origin: table, copies: table, metadata: table }?
---@return string? message
---@return string? code
function files.find(self, path)
  local list, message, code = files_of(path)
  if not list then return nil, message, code end
  local found = { state = {}, origin = {}, copies = {}, metadata = {}, readers = {} }
  for _, file in ipairs(list) do
    local reader, why, kind = core.safetensors_open(file.path)
    if reader then
      found.readers[#found.readers + 1] = reader
      local ok
      ok, why, kind = take(self, found, file, reader)
      if ok then
        for key, value in pairs(reader:metadata()) do found.metadata[key] = value end
      end
      reader = ok
    elseif file.index then why = ("'%s' names it: %s"):format(file.index, why) end
    if not reader then
      files.close(found)
      return core.refuse(why, kind)
    end
  end
  return found
end

--- The text of an error about a repeated tied weight.
---@param name string
---@param of string
---@return string
function files.differs(name, of)
  return ("'%s' differs from '%s', which config.json ties it to: tie_word_embeddings must be false")
    :format(name, of)
end

-- Elements of two tensors in files that are compared at once.
local AT_ONCE <const> = 1 << 20

-- Whether two sources, or tensors, have the same numbers.
local function are_equal(a, b)
  if not piece.same_shape(a:shape(), b:shape()) then return false end
  local count = piece.elements(a:shape())
  return core.no_grad(function()
    for first = 0, count - 1, AT_ONCE do
      local number = math.min(AT_ONCE, count - first)
      local x, y = piece.cut(a, first, number), piece.cut(b, first, number)
      if not x:to("f32"):eq(y:to "f32"):all():item() then return false end
    end
    return true
  end)
end

-- Files may repeat a tied weight. If the copy differs, it is a separate weight, for which the model
-- has no parameter.
local function check_copies(found)
  for name, copy in pairs(found.copies) do
    local own = found.state[copy.of]
    if own and not core.is_sim() then
      local read, equal = pcall(are_equal, own, copy.tensor)
      if not read then return core.refuse(tostring(equal), "io") end
      if not equal then return core.refuse(files.differs(name, copy.of), "mismatch") end
    end
  end
  return true
end

-- Reads the tensor of a source as a whole.
local function read_whole(source, where)
  local part = source.parts[1]
  local t, why, code = part.file:load(part.name)
  if t then return t end
  why = ("%s: %s"):format(where.path, why)
  return core.refuse(where.index and ("'%s' names it: %s"):format(where.index, why) or why, code)
end

-- The values of a module's tensors, by name. For tensors on "meta", which will be read when their
-- values are made, they are on "meta".
local function values_of(found, own)
  local names, values = {}, {}
  for name in pairs(found.state) do names[#names + 1] = name end
  table.sort(names)
  for _, name in ipairs(names) do
    local source = found.state[name]
    if own[name] and own[name]:device() == "meta" then
      values[name] =
        core.empty { dtype = source:dtype(), device = "meta", table.unpack(source:shape()) }
    else
      local t, message, code = read_whole(source, found.origin[name])
      if not t then return nil, message, code end
      values[name] = t
    end
  end
  return values
end

--- A path, or the first of a list, for messages.
---@param path string|string[]
---@return string
function files.first_of(path) return type(path) == "table" and path[1] or path end

-- Reads what this rank has of a model of which ranks have parts. All ranks call it.
local function load_parts(self, found, path, options)
  local _, message, code = check_copies(found)
  message, code = agree(core.world(), message, code, "all ranks call load")
  if message then return nil, message, code end
  local ok, why = pcall(whole.load_state, whole.items(self), found.state, options)
  if not ok then
    return core.refuse(("%s: %s"):format(files.first_of(path),
      tostring(why):match "load_state: (.*)" or tostring(why)), "mismatch")
  end
  for _, item in ipairs(whole.items(self)) do
    if found.state[item.name] and item.tensor:device() == "meta" then return true, true end
  end
  return true, false
end

-- Copies what is found into a module. Second: whether the files are to stay open.
local function load_into(self, found, path, options)
  if whole.has(self) then return load_parts(self, found, path, options) end
  local ok, message, code = check_copies(found)
  if not ok then return nil, message, code end
  local own, values
  ok, own = pcall(self.state, self)
  if not ok then return core.refuse(tostring(own), "mismatch") end
  values, message, code = values_of(found, own)
  if not values then return nil, message, code end
  local loaded, failure = pcall(self.load_state, self, values, options)
  if not loaded then
    return core.refuse(("%s: %s"):format(files.first_of(path),
      tostring(failure):match "load_state: (.*)" or tostring(failure)), "mismatch")
  end
  local stays = false
  for name, t in pairs(own) do
    if values[name] and t:device() == "meta" then
      delayed.read_later(t, found.state[name])
      stays = true
    end
  end
  return true, stays
end

--- Reads files and copies their tensors into a module; tensors on "meta" are read when their values
--- are made. Returns what `find` found.
---@param self ms.Module
---@param path string|string[]
---@param options? ms.LoadOptions
---@return { origin: table, state: table, metadata: table }? found
---@return string? message
---@return string? code
function files.read(self, path, options)
  local found, message, code = files.find(self, path)
  if not found then return nil, message, code end
  local ok, stays, kind = core.on_device("cpu", function()
    return load_into(self, found, path, options)
  end)
  if not ok or not stays then files.close(found) end
  if not ok then return nil, stays, kind end
  return found
end

---@param path string|string[]
---@param options? ms.LoadOptions
---@return true?, string?, string?
function Module:load(path, options)
  options_of.argument("load", "path", path, "string|list")
  if type(path) == "table" then options_of.items("load", "path", path, "string") end
  local found, message, code = files.read(self, path,
    check("load", options, { partial = "boolean" }))
  if not found then return nil, message, code end
  return true
end

--------------------------------------------------------------------------------------------- saving

local bytes_of = { f32 = 4, f16 = 2, bf16 = 2 }
local names_elsewhere = { f32 = "float32", f16 = "float16", bf16 = "bfloat16" }

-- A list of what to write for each item (its name in the file, dtype, shape); how many of them are
-- rounded, and to which dtypes; and the dtype for config.json if it changed.
local function plan(self, origin, items, dtype)
  local list, rounded, changed, words = {}, { count = 0 }, false, {}
  for i, item in ipairs(items) do
    local own = item.dtype
    local loaded = origin.names and item.tensor and module.loaded_dtype[item.tensor]
    local written = bytes_of[own] and (dtype or loaded) or own
    if written ~= own and bytes_of[written] == 2 then
      rounded.count, rounded[written] = rounded.count + 1, true
    end
    if bytes_of[written] then words[names_elsewhere[written]] = true end
    changed = changed or bytes_of[written] and origin.dtypes and origin.dtypes[item.name] ~= written
    list[i] = {
      dtype = written, shape = item.shape,
      name = origin.names and origin.names[item.name]
        or self.file_name and self:file_name(item.name) or item.name,
    }
  end
  local word = next(words)
  return list, rounded, changed and next(words, word) == nil and word or nil
end

-- The text of config.json: as it was read, but with a new dtype if the weights are written in
-- another dtype. A new one names the ids of the model's tokenizer, if there is one.
local function config_text(self, origin, word)
  if not origin.config then
    local config = self:config()
    for name, id in pairs(origin.ends or {}) do config[name] = id end
    return core.json_encode(config, true) .. "\n"
  end
  if not word then return origin.config end
  local config = core.json_decode(origin.config, true)
  for _, key in ipairs { "dtype", "torch_dtype" } do
    if config[key] ~= nil then config[key] = word end
  end
  return core.json_encode(config, true) .. "\n"
end

--- Raises for what save cannot take; the option dtype.
---@param model ms.Module
---@param path string
---@param options? ms.SaveOptions
---@return ms.DType?
function files.check_save(model, path, options)
  if type(path) ~= "string" then core.raise("save: a path is expected, not " .. type(path)) end
  lora.refuse("save", model)
  local dtype = check("save", options, { dtype = "string" }).dtype
  if dtype ~= nil and not bytes_of[dtype] then
    core.raise(("save: dtype is f32, f16 or bf16, not %s"):format(tostring(dtype)))
  end
  return dtype
end

-- The file to write; makes the folder.
local function file_of(path)
  if path:match "%.safetensors$" then return path end
  local folder = path:gsub("(.)/+$", "%1")
  -- The index would still name the old weights, so readers of the folder would not read the new
  -- ones.
  if core.exists(folder .. "/" .. INDEX) then
    return core.refuse(
      ("'%s' holds a model in several files (%s): save to another folder, or remove that model")
        :format(folder, INDEX), "exists")
  end
  local ok, message, code = core.make_directory(folder)
  if not ok then return nil, message, code end
  return folder .. "/model.safetensors"
end

-- Says on rank 0 that numbers are rounded.
local function tell_rounded(file, rounded, dtype)
  if rounded.count == 0 then return end
  local to = rounded.bf16 and rounded.f16 and "bf16 and f16" or rounded.bf16 and "bf16" or "f16"
  log.log("%s: %d tensors are rounded to %s%s", file, rounded.count, to, dtype
    and "" or ', as in the file that they were loaded from; save(path, { dtype = "f32" }) keeps \z
      all bits')
end

-- The metadata of the file as a list of keys and values, in order.
local function metadata_of(origin)
  local keys, list = {}, {}
  local metadata = origin.metadata or { format = "pt" }
  for key in pairs(metadata) do keys[#keys + 1] = key end
  table.sort(keys)
  for _, key in ipairs(keys) do
    list[#list + 1] = key
    list[#list + 1] = metadata[key]
  end
  return list
end

-- What `begin` returns.
local Writer = {}
Writer.__index = Writer

--- Makes one of a file that safetensors_create has begun. list: dtype of each item; texts: content
--- by name of the files beside it, which the commit writes.
---@param begun { file: any, list: table[], texts: table<string, string>, folder: string }
---@return table
function files.writer(begun) return setmetatable(begun, Writer) end

-- From here on, finite numbers are rounded to inf: half a unit above the greatest number.
local TOO_LARGE <const> = { f16 = 65520.0, bf16 = 0x1.ffp127 }

-- The greatest finite number of t, without its sign, if this dtype has no room for it. Two
-- reductions, unless there is one, or an inf or nan, which stays what it is.
local function overflowing(t, dtype)
  local limit = TOO_LARGE[dtype]
  if not limit or t:numel() == 0 or core.is_sim() then return nil end
  return core.no_grad(function()
    local most, least = t:max():item(), t:min():item()
    if most < limit and least > -limit then return nil end
    local greatest = core.where(t:is_finite(), t, 0):abs():max():item()
    return greatest >= limit and greatest or nil
  end)
end

--- Writes item number i. t: its values, in its dtype, of any shape. Blocks until they are there.
--- "unsupported": a finite number would become inf.
---@param i integer
---@param t ms.Tensor
---@return true?, string?, string?
function Writer:write(i, t)
  local written = self.list[i].dtype
  if t:dtype() ~= written then
    local number = overflowing(t, written)
    if number then
      return core.refuse(("save: '%s' has the number %g, which %s has no room for: choose another \z
        dtype, as in save(path, { dtype = %q }); nothing is written"):format(self.list[i].name,
        number, written, t:dtype()), "unsupported")
    end
    t = core.no_grad(function() return t:detach():to(written) end)
  end
  return self.file:write(i, t)
end

--- The file gets its name, and the texts beside it are written.
---@return true?, string?, string?
function Writer:commit()
  local ok, message, code = self.file:commit()
  for name, text in pairs(self.texts) do
    if ok then ok, message, code = core.file_write(self.folder .. "/" .. name, text) end
  end
  return ok, message, code
end

--- Writes all items, and commits. The arguments after the first are what `begin` has returned.
---@param items table[]
---@param writer? table
---@param message? string
---@param code? string
---@return true?, string?, string?
function files.write_all(items, writer, message, code)
  local ok = writer ~= nil
  for i, item in ipairs(items) do
    if ok then ok, message, code = writer:write(i, item.tensor) end
  end
  if ok then ok, message, code = writer:commit() end
  if not ok then return nil, message, code end
  return true
end

--- Begins to write a model's file, or folder: an object with write and commit; without commit
--- nothing of the file is left. items: { name, dtype, shape, tensor? } each, where tensor is the
--- model's handle.
---@param self ms.Module
---@param path string
---@param items table[]
---@param dtype? ms.DType
---@return table?
---@return string? message
---@return string? code
function files.begin(self, path, items, dtype)
  local file, message, code = file_of(path)
  if not file then return nil, message, code end
  local origin = getmetatable(self).origin or {}
  local list, rounded, word = plan(self, origin, items, dtype)
  tell_rounded(file, rounded, dtype)
  local names, dtypes, shapes = {}, {}, {}
  for i, one in ipairs(list) do
    names[i], dtypes[i], shapes[i] = one.name, one.dtype, { table.unpack(one.shape) }
  end
  local made
  made, message, code = core.safetensors_create(file, names, dtypes, shapes, metadata_of(origin))
  if not made then return nil, message, code end
  local texts = { ["config.json"] = self.config and config_text(self, origin, word) }
  for name, text in pairs(origin.files or {}) do texts[name] = text end
  return files.writer {
    file = made, list = list, texts = texts, folder = file:match "^(.*)/[^/]*$" or ".",
  }
end

-- The mean over the ranks of a tensor, computed in f32.
local function mean_of(world, t)
  return core.no_grad(function()
    local sum = t:detach():to "f32":clone()
    return world:all_reduce(sum, "avg"):value():to(t:dtype())
  end)
end

--- What one model of all ranks' has instead of rank 0's: tensors by name, empty if ranks hold the
--- same. nn.alone says what it is of parameters that each rank trains by itself; of buffers it is
--- rank 0's. Raises on all ranks if others differ. All ranks call it.
---@param what string the call's name, for messages
---@param saved table<string, ms.Tensor>
---@return table<string, ms.Tensor>
function files.one_of_all(what, saved)
  layouts.check()
  local world, instead = core.world(), {}
  if world:size() == 1 or core.is_sim() or next(saved) == nil then return instead end
  local label, names, tensors = ("all ranks call %s"):format(what), {}, {}
  for name, t in sorted_pairs(saved) do
    names[#names + 1], tensors[#tensors + 1] = name, t
  end
  local told = {}
  for i, hash in ipairs(core.hashes(tensors)) do
    local t = tensors[i]
    told[names[i]] = ("%016x %s [%s]"):format(hash, t:dtype(), table.concat(t:shape(), ","))
  end
  local text = core.json_encode(told)
  local number, same = core.hash(text), true
  for _, other in ipairs(world:_share("all_gather", "i64", { number }, label)) do
    same = same and other == number
  end
  if same then return instead end
  local all, merge_of = world:_share_texts(text, label), alone.merge_of
  for r = 1, #all do all[r] = core.json_decode(all[r]) end
  for i, name in ipairs(names) do
    for r, other in ipairs(all) do
      local merge = not core.is_parameter(tensors[i]) and "rank0" or merge_of(tensors[i])
      if other[name] ~= all[1][name] and not merge then
        core.raise(("%s: '%s' of rank %d differs from that of rank 0, and one model is saved: \z
          wrap the model with ms.ddp or ms.fsdp, or say what one model of all ranks' is: \z
          ms.nn.alone(module, { merge = \"mean\" })"):format(what, name, r - 1), 5)
      end
      if other[name] ~= all[1][name] and merge == "mean" then
        instead[name] = mean_of(world, tensors[i])
        break
      end
    end
  end
  return instead
end

--- Runs f on rank 0, and returns its result on all ranks when it is done. All ranks call it, and
--- meet before as well: no rank still reads the file that f replaces.
---@param what string the call's name, for messages
---@param f fun(): true?, string?, string?
---@return true?, string?, string?
function files.on_rank_0(what, f)
  local world = core.world()
  if world:size() == 1 then return f() end
  local label = ("all ranks call %s"):format(what)
  local ok, message, code = true, nil, nil
  agree(world, nil, nil, label)
  if world:rank() == 0 then ok, message, code = f() end
  message, code = agree(world, not ok and message or nil, code, label)
  if message then return core.refuse(message, code) end
  return true
end

---@param path string
---@param options? ms.SaveOptions
---@return true?, string?, string?
function Module:save(path, options)
  local dtype = files.check_save(self, path, options)
  if whole.has(self) then
    return whole.write("save", whole.items(self), function(list)
      return files.begin(self, path, list, dtype)
    end)
  end
  local state = self:state { live = true }
  local instead = files.one_of_all("save", state)
  return files.on_rank_0("save", function()
    local items = {}
    for name, t in sorted_pairs(state) do
      items[#items + 1] = {
        name = name, dtype = t:dtype(), shape = t:shape(), tensor = instead[name] or t,
      }
    end
    return files.write_all(items, files.begin(self, path, items, dtype))
  end)
end

options_of.methods(Module, "a module", module.is_module, { "load", "save" })

return files
