-- What ranks hold differently, in checkpoints: weights of models that each rank trains by itself,
-- values of a rank's own, random numbers. What is equal is saved once, as rank 0 has it. What
-- differs is saved for every rank: tensors in the ranks' files, as /ranks/RANK/NAME, and the values
-- of a thing that are not equal as the text of each rank. As many ranks get back what each had.
-- Another number of ranks gets what `nn.alone` declared that one model of them is.
--
-- Not looked at is what has a meaning of its own: pieces of sharded tensors, states that rank 0 has
-- put together from all ranks (the other ranks have less), and states of links.
local alone = require "moonshard.nn.alone"
local core = require "moonshard.core"
local listed = require "moonshard.nn.listed"
local log = require "moonshard.base.log"
local module = require "moonshard.nn.module"
local piece = require "moonshard.parallel.shard_piece"
local values_of = require "moonshard.checkpoint.values"
local part_states = require "moonshard.nn.whole"
local sorted_pairs = require "moonshard.base.sorted_pairs"
local ownership = require "moonshard.base.ownership"
local name_part = values_of.name_part

local apart = {}

local function own_name(rank, name) return ("/ranks/%d/%s"):format(rank, name) end

------------------------------------------------------------------------------- what is looked at

local function is_optimizer(thing)
  local meta = type(thing) == "table" and getmetatable(thing)
  return type(meta) == "table" and meta.__name == "ms.Optimizer"
end

-- Whether an optimizer has parameters of which ranks have parts.
local function has_parts(optimizer)
  for _, p in ipairs(optimizer.order) do
    if ownership.sharded[p] or ownership.declared[p] then return true end
  end
  return false
end

-- How the things of a checkpoint are looked at. trees: whether values are compared, by thing.
-- skipped: names of tensors, and things, that are not looked at. merges: what one of all ranks'
-- tensors is, by name; an entry of a name that ends in "/" is for all below it. weights: those of
-- models, in order, as { name in the checkpoint, name in the model }.
local function ways_of(things)
  local trees, skipped, merges, weights = {}, {}, {}, {}
  for name, thing in sorted_pairs(things) do
    local where = name_part(name) .. "/"
    local meta = type(thing) == "table" and getmetatable(thing) or nil
    trees[name] = true
    if is_optimizer(thing) then
      if thing.shard then trees[name], skipped[where] = nil, true
      elseif has_parts(thing) then trees[name] = nil end
      local all = #thing.order > 0
      for position, p in ipairs(thing.order) do
        local merge = alone.merge_of(p)
        local own = p:name() ~= "" and p:name() or "#" .. position
        if merge then merges[("%sparameters/%s/"):format(where, name_part(own))] = merge
        else all = false end
      end
      if all then merges[where] = "rank0" end
    elseif module.is_module(thing) then
      local s = meta.ddp
      if meta.fsdp or part_states.has(thing) then trees[name] = nil end
      for _, item in ipairs(thing:named_parameters()) do
        weights[#weights + 1] = { where .. name_part(item.name), item.name }
        merges[weights[#weights][1]] = alone.merge_of(item.parameter)
      end
      -- One model has rank 0's buffers. Those that each pass copies need not be saved apart.
      local copied = s and s.reducer
        and (s.options.broadcast_buffers ~= false or s.options.buffer_hook)
      for buffer in pairs(thing:buffers()) do
        merges[where .. name_part(buffer)] = "rank0"
        if copied and not listed.has(s.options.ignored, buffer) then
          skipped[where .. name_part(buffer)] = true
        end
      end
    end
  end
  return { trees = trees, skipped = skipped, merges = merges, weights = weights }
end

local function thing_of(path) return path:match "^[^/]*/" or path .. "/" end

local function is_looked_at(ways, alike, path)
  return path:sub(1, 1) ~= "/" and not alike[path] and not ways.skipped[path]
    and not ways.skipped[thing_of(path)]
end

local function merge_of(ways, path)
  local found = ways.merges[path]
  local below = not found and path:match "^[^/]*/parameters/[^/]*/"
  return found or below and ways.merges[below] or ways.merges[thing_of(path)] or "none"
end

----------------------------------------------------------------------------------------- finding

local function random_of()
  local seed, step, draw = core.random_state()
  return { seed = seed, step = step, draw = draw }
end

local EMPTY = { ["{}"] = true, ["[]"] = true }

-- The texts of the values that are compared, by thing.
local function texts_of(ways, values)
  local texts = {}
  for name in pairs(ways.trees) do texts[name] = core.json_encode { values[name] } end
  return texts
end

local function is_empty(text) return EMPTY[text:sub(2, -2)] == true end

-- Which names and things differ, from what all ranks have told.
local function compare(ways, all)
  local tensors, things, seen, order = {}, {}, {}, {}
  for _, one in ipairs(all) do
    for name in pairs(one.tensors) do
      if not seen[name] then seen[name], order[#order + 1] = true, name end
    end
  end
  table.sort(order)
  -- What other ranks leave to rank 0 does not differ.
  local function leaves(one, name) return one.empty[name] end
  for name in pairs(ways.trees) do
    for _, one in ipairs(all) do
      if one.values[name] ~= all[1].values[name] and not leaves(one, name) then
        things[name] = true
      end
    end
  end
  for _, path in ipairs(order) do
    local thing = thing_of(path)
    for _, one in ipairs(all) do
      local here, first = one.tensors[path], all[1].tensors[path]
      local known = ways.trees[one.names[thing] or ""]
      if here ~= first and not (here == nil or first == nil) then tensors[path] = true
      elseif here ~= first and known and not leaves(one, one.names[thing]) then
        tensors[path] = true
      end
    end
  end
  return tensors, things
end

local function any(set) return next(set) ~= nil end

-- "'a', 'b' and 'c' (and 4 more)"
local function first_names(set)
  local list = {}
  for name in pairs(set) do list[#list + 1] = name end
  table.sort(list)
  local shown = table.move(list, 1, math.min(3, #list), 1, {})
  for i, name in ipairs(shown) do shown[i] = ("'%s'"):format(name) end
  local text = #shown > 1 and table.concat(shown, ", ", 1, #shown - 1) .. " and " .. shown[#shown]
    or shown[1] or ""
  return #list > 3 and ("%s and %d more"):format(text, #list - 3) or text
end

-- One line about what differs, weights before other tensors, and these before values.
local function tell(ways, tensors, things, all)
  local what, path, name
  for _, weight in ipairs(ways.weights) do
    if not path and tensors[weight[1]] then what, path, name = "weights", weight[1], weight[2] end
  end
  for _, kind in ipairs { { "tensors", tensors }, { "values", things } } do
    if not path and any(kind[2]) then
      for one in pairs(kind[2]) do path = path and path < one and path or one end
      what, name = kind[1], path
    end
  end
  local other = 1
  for r, one in ipairs(all) do
    if one.tensors[path] ~= all[1].tensors[path] or one.values[path] ~= all[1].values[path] then
      other = r - 1
      break
    end
  end
  log.log("%s of ranks 0 and %d differ (%s first): each rank's are saved", what, other, name)
end

-- The random numbers of all ranks; nil: they are equal.
local function random_apart(all)
  local list, differs = core.json_list {}, false
  for r, one in ipairs(all) do
    list[r] = one.random
    for key, number in pairs(one.random) do
      differs = differs or number ~= all[1].random[key]
    end
  end
  return differs and list or nil
end

--- Looks for what ranks hold differently. What is found goes from `whole` to `parts`. Returns what
--- the manifest has of it; nil: nothing differs. All ranks call it. Blocks for the threads of the
--- others.
---@param things table<string, any>
---@param values table<string, any> as encoded; what differs is taken out
---@param whole { names: string[], tensors: ms.Tensor[] }
---@param hashes string[] of the tensors of whole
---@param parts { names: string[], pieces: ms.Piece[] }
---@param alike table<string, boolean> names that replicas.lua compares
---@return table?
function apart.find(things, values, whole, hashes, parts, alike)
  local world = core.world()
  if world:size() == 1 or core.is_sim() then return nil end
  local ways = ways_of(things)
  local own = { tensors = {}, values = {}, empty = {}, names = {}, random = random_of() }
  local lines, texts = {}, texts_of(ways, values)
  for i, path in ipairs(whole.names) do
    if is_looked_at(ways, alike, path) then
      local t = whole.tensors[i]
      local text = ("%s %s [%s]"):format(hashes[i], t:dtype(), table.concat(t:shape(), ","))
      own.tensors[path], lines[#lines + 1] = text, path .. "\0" .. text
    end
  end
  for name in pairs(values) do own.names[name_part(name) .. "/"] = name end
  table.sort(lines)
  local all_texts = {}
  for name, text in sorted_pairs(texts) do
    own.values[name], own.empty[name] = ("%016x"):format(core.hash(text)), is_empty(text) or nil
    all_texts[#all_texts + 1] = name .. "\0" .. own.values[name]
  end
  local random = core.json_encode(own.random)
  local numbers = {
    core.hash(table.concat(lines, "\0")), core.hash(table.concat(all_texts, "\0")),
    core.hash(random),
  }
  local same = true
  for i, number in ipairs(world:_share("all_gather", "i64", numbers, "checkpoint")) do
    same = same and number == numbers[(i - 1) % #numbers + 1]
  end
  if same then return nil end
  local all = {}
  for r, text in ipairs(world:_share_texts(core.json_encode(own), "checkpoint")) do
    all[r] = core.json_decode(text)
  end
  local tensors, differing = compare(ways, all)
  local found = { ranks = world:size(), tensors = {}, values = {}, random = random_apart(all) }
  if not (any(tensors) or any(differing) or found.random) then return nil end
  if any(tensors) or any(differing) then tell(ways, tensors, differing, all) end
  for path in pairs(tensors) do found.tensors[path] = merge_of(ways, path) end
  for name in sorted_pairs(differing) do
    found.values[name] = {
      merge = ways.merges[name_part(name) .. "/"] or "none",
      texts = core.json_list(world:_share_texts(texts[name], "checkpoint")),
    }
    values[name] = nil
  end
  local kept = { names = {}, tensors = {} }
  for i, path in ipairs(whole.names) do
    local t = whole.tensors[i]
    if found.tensors[path] then
      parts.names[#parts.names + 1] = own_name(world:rank(), path)
      parts.pieces[#parts.pieces + 1] = piece.new(core.no_grad(function()
        return t:detach():contiguous():view(-1)
      end), t:shape(), 0, true)
    else
      kept.names[#kept.names + 1], kept.tensors[#kept.tensors + 1] = path, t
    end
  end
  whole.names, whole.tensors = kept.names, kept.tensors
  return found
end

----------------------------------------------------------------------------------------- reading

--- Whether the fields of a manifest are what they should be.
---@param found any
---@return boolean
function apart.is_whole(found)
  if type(found) ~= "table" or math.type(found.ranks) ~= "integer" or found.ranks < 1
      or type(found.tensors) ~= "table" or type(found.values) ~= "table" then
    return false
  end
  for _, one in pairs(found.values) do
    if type(one) ~= "table" or type(one.texts) ~= "table" or #one.texts ~= found.ranks then
      return false
    end
    for _, text in ipairs(one.texts) do if type(text) ~= "string" then return false end end
  end
  for r = 1, found.random and found.ranks or 0 do
    local random = found.random[r]
    for _, key in ipairs { "seed", "step", "draw" } do
      if type(random) ~= "table" or math.type(random[key]) ~= "integer" then return false end
    end
  end
  return true
end

local function is_of_thing(name, path) return thing_of(path) == name_part(name) .. "/" end

-- A text that says why these things cannot be had at this number of ranks; nil: they can.
local function problem_of(found, things, ranks)
  local names = {}
  for thing in pairs(things) do
    for path, merge in pairs(found.tensors) do
      if merge == "none" and is_of_thing(thing, path) then names[path] = true end
    end
    local one = found.values[thing]
    if one and one.merge == "none" then names[thing] = true end
  end
  if not any(names) then return nil end
  return ("it was saved by %d ranks that held different %s, and here there are %d: resume it on \z
    %d ranks (before saving, ms.nn.alone(module, { merge = ... }) says what one model of all is)")
    :format(found.ranks, first_names(names), ranks, found.ranks)
end

--- Gives a manifest the values of this rank. Returns a text, if these things cannot be loaded at
--- this number of ranks.
---@param manifest table
---@param things table<string, any>
---@return string? problem
function apart.take(manifest, things)
  local found = manifest.apart
  if not found then return nil end
  local world = core.world()
  local same = world:size() == found.ranks
  local problem = not same and problem_of(found, things, world:size())
  if problem then return problem end
  for name, one in pairs(found.values) do
    manifest.values[name] = core.json_decode(one.texts[same and world:rank() + 1 or 1])[1]
    if not same and one.merge == "none" then
      log.log("'%s' was not equal on the %d ranks that saved it: it is rank 0's", name, found.ranks)
    end
  end
  if found.random then manifest.random = found.random[same and world:rank() + 1 or 1] end
end

local floats = { f32 = true, f16 = true, bf16 = true }

-- The mean over the ranks that saved a tensor, in f32; of integers, and with "rank0", rank 0's.
local function merged(found, name, merge, source)
  local first = source(own_name(0, name)) or error(("'%s' is not rank 0's"):format(name))
  if merge ~= "mean" or not floats[first:dtype()] then return first end
  return core.no_grad(function()
    local sum, count = nil, 0
    for rank = 0, found.ranks - 1 do
      local one = source(own_name(rank, name))
      local t, message = nil, nil
      if one then t, message = one:whole() end
      if message then error(message, 0) end
      if t then
        sum, count = sum and sum:add_(t:to "f32") or t:to "f32":clone(), count + 1
      end
    end
    return sum:mul_(1 / count):to(first:dtype())
  end)
end

--- A tensor of a checkpoint as this rank is to have it: as a source, or already merged.
---@param manifest table
---@param name string
---@param source fun(name: string): ms.Source?
---@return ms.Source|ms.Tensor|nil
function apart.source(manifest, name, source)
  local found = manifest.apart
  local merge = found and found.tensors[name]
  if not merge then return source(name) end
  local world = core.world()
  if world:size() == found.ranks then return source(own_name(world:rank(), name)) end
  return merged(found, name, merge, source)
end

return apart
