-- Files of JSON lines as a data set, and loaders that give a function of the user its records. The
-- order of records is a function of the seed, the epoch and the place in it alone.
local conversation = require "moonshard.chat.conversation"
local core = require "moonshard.core"
local data_files = require "moonshard.data.files"
local lines = require "moonshard.data.lines"
local options_of = require "moonshard.base.options"
local order = require "moonshard.data.order"
local ms = require "moonshard"
local check, argument = options_of.check, options_of.argument

local jsonl = {}

---@class ms.JsonLines
---@field lines ms.Lines
---@field first integer                lines before those of this part
---@field count integer
local JsonLines = {}
JsonLines.__name = "ms.JsonLines"

---@class ms.JsonLoader
---@field set ms.JsonLines
---@field make fun(records: table[], places: integer[]): any ...
---@field batch integer
---@field rank integer
---@field ranks integer
---@field shuffle boolean
---@field seed integer
---@field epoch integer
---@field position integer             of the next batch in the order of its epoch
local JsonLoader = {}
JsonLoader.__name = "ms.JsonLoader"

-- A part of the lines.
local function part_of(self, first, count)
  return setmetatable({ lines = self.lines, first = first, count = count }, JsonLines)
end

---@param path string|string[]
---@return ms.JsonLines?
---@return string? message
---@return string? code
function jsonl.open(path)
  argument("data.jsonl", "path", path, "string|list")
  if type(path) == "table" then options_of.items("data.jsonl", "path", path, "string") end
  local paths = type(path) == "table" and table.move(path, 1, #path, 1, {}) or { path }
  if #paths == 0 then core.raise "data.jsonl: path is an empty list: name a file" end
  local found, message, code = lines.open(paths)
  if not found then return nil, message, code end
  local set = part_of({ lines = found }, 0, found.count)
  data_files.note(set, paths)
  return set
end

---@return integer
function JsonLines:size() return self.count end

-- What a line has, or nil, message, code.
local function decoded(self, i)
  local text, message, code = self.lines:read(self.first + i)
  if not text then return nil, message, code end
  local record, why = conversation.decode(text)
  if type(record) == "table" then return record end
  why = why and "it is no JSON: " .. why:gsub("^not JSON at line %d+, ", "")
    or "it is neither an object nor a list"
  return core.refuse(("%s: %s"):format(self.lines:name(self.first + i), why), "corrupt")
end

---@param i integer
---@return table?
---@return string? message
---@return string? code
function JsonLines:get(i)
  argument("get", "i", i, "integer")
  if i < 1 or i > self.count then
    core.raise(("get: there is no record %d: the data set has %d"):format(i, self.count))
  end
  return decoded(self, i)
end

---@param fraction number
---@return ms.JsonLines
---@return ms.JsonLines
function JsonLines:split(fraction)
  argument("split", "fraction", fraction, "number")
  if not (fraction >= 0 and fraction <= 1) then
    core.raise(("split: the fraction %g is not within 0 and 1"):format(fraction))
  end
  -- As ms_dataset_split: a decimal fraction is stored a little too low, and 0.29 of 100 is 29.
  local count = self.count * fraction + self.count * 0x1p-52
  count = math.min(math.floor(count), self.count)
  local parts = { part_of(self, self.first, count),
    part_of(self, self.first + count, self.count - count) }
  for _, part in ipairs(parts) do data_files.inherit(part, self) end
  return parts[1], parts[2]
end

-- Raises for a batch that the ranks cannot share.
local function check_batch(batch, ranks)
  if batch == nil then
    core.raise "loader: give a batch, the samples of one pass over all ranks"
  elseif batch < 1 then
    core.raise(("loader: a batch of %d: it takes at least one sample for each rank (%d)"):format(
      batch, ranks))
  elseif batch % ranks ~= 0 then
    core.raise(("loader: a batch of %d does not divide by %d ranks, which share it: take a \z
      multiple of %d"):format(batch, ranks, ranks))
  end
end

---@param options ms.JsonLoaderOptions
---@return ms.JsonLoader
function JsonLines:loader(options)
  local o = check("loader", options, { batch = "integer", shuffle = "boolean", seed = "integer",
    group = "any", make = "function" })
  options_of.check_group("loader", "group", o.group)
  if not o.make then
    core.raise "loader: give make, a function(records) that returns x and y of a batch"
  end
  local rank = o.group and o.group:rank() or ms.rank()
  local ranks = o.group and o.group:size() or ms.world_size()
  check_batch(o.batch, ranks)
  if self.count == 0 then core.raise "loader: the data set is empty" end
  local loader = setmetatable({
    set = self, make = o.make, batch = o.batch, rank = rank, ranks = ranks,
    shuffle = o.shuffle or false, seed = o.seed or (core.random_state()), epoch = 0, position = 0,
  }, JsonLoader)
  data_files.inherit(loader, self)
  return loader
end

------------------------------------------------------------------------------------- loaders

-- What make gives of `rows` records from a position of an epoch on, which may go into the next one.
local function made(self, epoch, position, rows)
  local records, places, count = {}, {}, self.set.count
  for i = 1, rows do
    local at = position + i - 1
    local place = at % count
    if self.shuffle then place = order.permute(self.seed, epoch + at // count, count, place) end
    local record, message = decoded(self.set, place + 1)
    if not record then core.raise("loader: " .. message) end
    records[i], places[i] = record, place + 1
  end
  return self.make(records, places)
end

---@return any ...
function JsonLoader:next()
  local rows = self.batch // self.ranks
  local results = table.pack(made(self, self.epoch, self.position + self.rank * rows, rows))
  -- An error leaves the loader at this batch.
  local at = self.position + self.batch
  self.epoch, self.position = self.epoch + at // self.set.count, at % self.set.count
  return table.unpack(results, 1, results.n)
end

---@param count? integer
---@return fun(): any ...
function JsonLoader:batches(count)
  argument("batches", "count", count, "integer?")
  if count and count < 0 then core.raise(("batches: count is %d"):format(count)) end
  if self.set.count < self.ranks then
    core.raise(("loader: %d records for %d ranks; each rank needs at least one"):format(
      self.set.count, self.ranks))
  end
  local index = 0
  return function()
    local at = index * self.batch
    -- Every rank gets as many as the others: up to ranks - 1 records of the last batch are left
    -- out.
    local rows = math.min(self.set.count - at, self.batch) // self.ranks
    if rows < 1 or count and index >= count then return nil end
    index = index + 1
    return made(self, 0, at + self.rank * rows, rows)
  end
end

-- What other records do not have in common with these.
local function identity(set) return ("%s %d %d"):format(set.lines:hash(), set.first, set.count) end

---@return table
function JsonLoader:state()
  return { seed = self.seed, epoch = self.epoch, position = self.position,
    samples = self.set.count, records = identity(self.set) }
end

---@param state table
function JsonLoader:load_state(state)
  argument("load_state", "state", state, "table")
  local s = check("load_state", state, { seed = "integer", epoch = "integer",
    position = "integer", samples = "integer", records = "string" })
  if s.records ~= identity(self.set) then
    core.raise(("loader: the state is of other data: of %s records, and here are %d; or the lines \z
      of the files have changed"):format(tostring(s.samples), self.set.count))
  end
  local epoch, position = s.epoch or 0, s.position or 0
  if epoch < 0 or position < 0 or position >= self.set.count or not s.seed then
    core.raise "loader: the state is damaged"
  end
  self.seed, self.epoch, self.position = s.seed, epoch, position
end

-- Closes a class: its methods check their object, and an unknown name raises.
local function close(class, what)
  options_of.methods(class, what)
  class.__index = function(_, name)
    local method = rawget(class, name)
    if method ~= nil then return method end
    return options_of.no_field(what, name, class)
  end
end
close(JsonLines, "a data set of JSON lines")
close(JsonLoader, "a loader of JSON lines")

---@param value any
---@return boolean
function jsonl.is_loader(value) return getmetatable(value) == JsonLoader end

return jsonl
