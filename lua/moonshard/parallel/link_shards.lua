-- The numbers that links between the reductions of hybrid buckets keep for each parameter, in
-- checkpoints. Such a link sees this rank's shard, so ranks have them for different elements, and
-- several ranks for the same ones. Each rank saves its own. Ranks that share parameters in another
-- way get those of their elements: if results are means, the mean of the ranks that had them; if
-- they add up, equal parts of the sum.
local core = require "moonshard.core"
local piece = require "moonshard.parallel.shard_piece"
local values = require "moonshard.checkpoint.values"

local link_shards = {}

--- What a rank has: `length` numbers from `at` on in the saved tensor, of `count` elements from
--- `first` on. group: the ranks that share one copy with it.
---@class ms.LinkShard
---@field rank integer
---@field at integer
---@field length integer
---@field first? integer nil: the model was gone when it was saved
---@field count? integer
---@field group? string

---@class ms.LinkShards of one name and parameter
---@field state string
---@field flat string its name in the state
---@field parameter string
---@field parallel boolean as many numbers as elements
---@field tensor string name of the saved tensor, in which the ranks' numbers are end to end
---@field ranks ms.LinkShard[]
---@field total integer length of the saved tensor

-- This rank's pieces by parameter, and its group as text. length: with the zeros that follow rows.
local function places_of(model)
  local found = {}
  if not (model and model.sharded) then return found end
  local rows, ranks = model.options.layout == "rows", model.shards:size()
  local members = table.concat(model.shards:_members(), ",")
  for _, one in ipairs(model.sharded:pieces()) do
    local total, length = piece.elements(one.shape), one.count
    local height = one.shape[1] or 1
    if rows and total > 0 then length = (height + ranks - 1) // ranks * (total // height) end
    found[one.name] = {
      first = one.first, count = one.count, total = total, length = length,
      group = members,
    }
  end
  return found
end

--- Adds this rank's numbers to the parts of a checkpoint; what the manifest has of those of all
--- ranks. All ranks call it.
---@param world ms.Group
---@param own { state: string, model?: ms.FSDPState, pieces: table[] }[] pieces: { flat, parameter,
--- tensor, parallel }
---@param parts? { names: string[], pieces: ms.Piece[] }
---@return ms.LinkShards[]
function link_shards.save(world, own, parts)
  local told, tensors, list, by_name = core.json_list {}, {}, core.json_list {}, {}
  for _, state in ipairs(own) do
    local places = places_of(state.model)
    for _, one in ipairs(state.pieces) do
      local flat, parameter, tensor, parallel = table.unpack(one)
      local place = places[parameter] or {}
      local name = ("/links/%s/shards/%s/%s"):format(values.name_part(state.state),
        values.name_part(flat), values.name_part(parameter))
      tensors[name] = core.no_grad(function() return tensor:detach():clone():view(-1) end)
      told[#told + 1] = {
        state = state.state, flat = flat, parameter = parameter, parallel = parallel,
        tensor = name, length = tensor:numel(), first = place.first, count = place.count,
        group = place.group,
      }
    end
  end
  for rank, text in ipairs(world:_share_texts(core.json_encode(told), "states of links")) do
    for _, one in ipairs(core.json_decode(text)) do
      local entry = by_name[one.tensor]
      if not entry then
        entry = {
          state = one.state, flat = one.flat, parameter = one.parameter, parallel = one.parallel,
          tensor = one.tensor, ranks = core.json_list {}, total = 0,
        }
        by_name[one.tensor], list[#list + 1] = entry, entry
      end
      table.insert(entry.ranks, {
        rank = rank - 1, at = entry.total, length = one.length, first = one.first,
        count = one.count, group = one.group,
      })
      entry.total = entry.total + one.length
    end
  end
  for _, entry in ipairs(list) do
    local tensor = tensors[entry.tensor]
    for _, one in ipairs(entry.ranks) do
      if tensor and one.rank == world:rank() then
        if not parts then
          core.raise(("checkpoint: state '%s' of a link between reductions has numbers of shards: \z
            save it together with its sharded model"):format(entry.state))
        end
        table.insert(parts.names, entry.tensor)
        table.insert(parts.pieces, piece.new(tensor, { entry.total }, one.at, true))
      end
    end
  end
  return list
end

-- Numbers of a saved tensor. Raises where they cannot be read.
local function read(source, first, count)
  local ok, message = source:check(first, count)
  if not ok then error(message, 0) end
  return assert(source:read(first, count))
end

-- This rank's own numbers, if it has the elements that it had; else nil.
local function as_saved(entry, place, rank, source)
  for _, one in ipairs(entry.ranks) do
    if one.rank == rank and (not place or one.first == place.first and one.count == place.count
        and one.group == place.group) then
      return read(source, one.at, one.length)
    end
  end
end

-- The numbers of this rank's elements, from all ranks that had some of them.
local function from_all(entry, place, replicas, adds_up, source)
  local made, covered = core.zeros { place.length }, 0
  for _, one in ipairs(entry.ranks) do
    local from = math.max(one.first, place.first)
    local count = math.min(one.first + one.count, place.first + place.count) - from
    covered = covered + one.count
    if count > 0 then
      made:narrow(1, from - place.first + 1, count)
        :add_(read(source, one.at + from - one.first, count))
    end
  end
  return made:mul_(1 / (adds_up and replicas or covered / place.total))
end

--- This rank's numbers, or nil where it has none, or where they cannot be cut again.
---@param entry ms.LinkShards
---@param ranks integer that have saved
---@param world ms.Group
---@param model? ms.FSDPState which has the link now
---@param adds_up boolean
---@param source ms.Source
---@return ms.Tensor?
function link_shards.read(entry, ranks, world, model, adds_up, source)
  return core.no_grad(function()
    local place = places_of(model)[entry.parameter]
    local own = ranks == world:size() and as_saved(entry, place, world:rank(), source)
    if own then return own end
    if not (place and place.count > 0 and entry.parallel and entry.ranks[1].first) then return end
    local replicas = model.replicas and model.replicas:size() or 1
    return from_all(entry, place, replicas, adds_up, source)
  end)
end

return link_shards
