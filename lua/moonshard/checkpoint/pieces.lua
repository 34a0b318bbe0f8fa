-- Checkpoints that several ranks write: each rank has pieces of tensors, in a file of its own. They
-- are committed in two phases: all files are durable before rank 0 writes the manifest, which lists
-- the pieces, and renames the folder. So a rank that is killed at any moment loses nothing that was
-- committed.
local core = require "moonshard.core"
local piece = require "moonshard.parallel.shard_piece"
local region = require "moonshard.parallel.region"
local agree = require "moonshard.parallel.agree"
local sorted_pairs = require "moonshard.base.sorted_pairs"

local pieces = {
  DIFFERS = "differs",             -- the code where ranks hold different values of one thing
}

-- The file of a rank's pieces, and the one in which it tells rank 0 of them, until the commit.
local function file_of(rank) return ("rank-%05d.safetensors"):format(rank) end
local function list_of(folder, name, rank)
  return ("%s/.tmp-%s/rank-%05d.json"):format(folder, name, rank)
end

--- Splits what was collected: whole tensors stay in out; the second result has the pieces.
---@param out { names: string[], tensors: (ms.Tensor|ms.Piece)[] }
---@return { names: string[], tensors: ms.Tensor[] } whole
---@return { names: string[], pieces: ms.Piece[] } parts
function pieces.split(out)
  local whole, parts = { names = {}, tensors = {} }, { names = {}, pieces = {} }
  for i, value in ipairs(out.tensors) do
    if piece.is(value) then
      table.insert(parts.names, out.names[i])
      table.insert(parts.pieces, value)
    else
      table.insert(whole.names, out.names[i])
      table.insert(whole.tensors, value)
    end
  end
  return whole, parts
end

--- Hashes of a tensor as a manifest has them.
---@param hashes table of core.snapshot or core.checkpoint_part: { hash, blocks? }
---@return { hash: string, blocks?: string[] }
function pieces.hashes(hashes)
  local made = { hash = ("%016x"):format(hashes[1]) }
  if hashes.blocks then
    made.blocks = core.json_list {}
    for i, hash in ipairs(hashes.blocks) do made.blocks[i] = ("%016x"):format(hash) end
  end
  return made
end

-- Phase 1 on one rank: writes the pieces that this rank saves, and the list of them. Returns what
-- is known of them now, by name, for replicas.lua; or nil, message, code.
local function write_own(folder, name, parts, rank)
  local names, tensors, told, known = {}, {}, core.json_list {}, {}
  for i, one in ipairs(parts.pieces) do
    local t = one.tensor
    if one.saves and one.count > 0 then
      names[#names + 1], tensors[#tensors + 1] = parts.names[i], t
      told[#told + 1] = {
        name = parts.names[i], dtype = t:dtype(),
        shape = core.json_list { table.unpack(one.shape) },
        first = one.first, count = one.count, file = file_of(rank),
        region = one.region and region.written(one.region),
      }
    elseif one.saves and piece.elements(one.shape) == 0 then
      told[#told + 1] = { name = parts.names[i], dtype = t:dtype(),
        shape = core.json_list { table.unpack(one.shape) } }
    end
  end
  if #names > 0 then
    local hashes, message, code = core.checkpoint_part(names, tensors, folder, name, file_of(rank))
    if not hashes then return nil, message, code end
    local at = 0
    for _, one in ipairs(told) do
      if one.file then
        at = at + 1
        for key, value in pairs(pieces.hashes(hashes[at])) do one[key] = value end
        known[one.name] = { hash = one.hash, count = one.count }
      end
    end
  end
  local ok, message, code =
    core.file_write(list_of(folder, name, rank), core.json_encode { told = told })
  if not ok then return nil, message, code end
  return known
end

-- On rank 0, after phase 1: the lists of all ranks, whose files are then removed; or nil, message,
-- code.
local function read_lists(folder, name, ranks)
  local all = {}
  for rank = 0, ranks - 1 do
    local path = list_of(folder, name, rank)
    local text, message, code = core.file_read(path)
    if not text then return nil, message, code end
    all[rank + 1] = core.json_decode(text).told
    local ok
    ok, message, code = core.remove(path)
    if not ok then return nil, message, code end
  end
  return all
end

--- The first failure of any rank of the world: message, code; nil if none has one.
---@param message? string
---@param code? string
---@return string? message
---@return string? code
function pieces.agree(message, code)
  return agree(core.world(), message, code)
end

-- Adds what is in b and not in a, at every depth.
local function merge(a, b)
  if type(a) ~= "table" or type(b) ~= "table" then return end
  for key, value in pairs(b) do
    if a[key] == nil and type(key) == "string" then a[key] = value else merge(a[key], value) end
  end
end

-- The values of all ranks in one tree: rank 0's, and what only other ranks have (parameters of
-- group_of).
local function join_values(world, values)
  local text = core.json_encode(values)
  local hashes, same = world:_share("all_gather", "i64", { core.hash(text) }, "checkpoint"), true
  for _, hash in ipairs(hashes) do same = same and hash == hashes[1] end
  if same then return values end
  for r, other in ipairs(world:_share_texts(text, "checkpoint")) do
    if r > 1 then merge(values, core.json_decode(other)) end
  end
  return values
end

-- The list of pieces for the manifest, from what all ranks have told, the files, and whether some
-- have regions; or nil, message, code.
local function list_all(all)
  local list, files, seen, has_regions = {}, {}, {}, false
  for _, told in ipairs(all) do
    for _, one in ipairs(told) do
      local entry = list[one.name]
      if not entry then
        entry = { dtype = one.dtype, shape = one.shape, parts = core.json_list {} }
        list[one.name] = entry
      end
      if one.file then
        table.insert(entry.parts, {
          file = one.file, first = one.first, count = one.count, hash = one.hash,
          blocks = one.blocks, region = region.read(one.region, one.shape),
        })
        if not seen[one.file] then seen[one.file], files[#files + 1] = true, one.file end
      end
    end
  end
  for name, entry in sorted_pairs(list) do
    table.sort(entry.parts, function(a, b)
      if a.first ~= b.first then return a.first < b.first end
      return a.file < b.file
    end)
    local problem, file = piece.gap(entry.parts, entry.shape)
    if problem then
      return core.refuse(("'%s' in %s: %s: do models over different groups of ranks have one name \z
        in the checkpoint?"):format(name, file or "no file", problem), "mismatch")
    end
    for _, part in ipairs(entry.parts) do
      part.region = part.region and region.written(part.region)
      has_regions = has_regions or part.region ~= nil
    end
  end
  return list, files, has_regions
end

local function commit(folder, name, ranks, text)
  local all, message, code = read_lists(folder, name, ranks)
  if not all then return nil, message, code end
  local list, files, third = list_all(all)
  if not list then return nil, files, third end
  return core.checkpoint_commit(folder, name, text(list, files, third))
end

--- Saves folder/name: each rank its pieces, rank 0 also the whole tensors. text gives the manifest.
--- All ranks call it, and have the same result.
---@param folder string
---@param name string
---@param parts { names: string[], pieces: ms.Piece[] }
---@param values table as encoded
---@param write fun(folder: string, name: string, file: string): table?, string?, string? writes the
--- whole tensors; gives what the manifest has of them, or nil, message, code
---@param differs fun(own: table<string, table>): string? what ranks must hold alike and do not, by
--- what is known of this rank's pieces
---@param text fun(values: table, tensors: table, list: table, files: string[], parts: boolean)
--- the manifest; parts: some piece is one of a part of a tensor
---@return true?
---@return string? message
---@return string? code
function pieces.save(folder, name, parts, values, write, differs, text)
  local world = core.world()
  local first, ok, message, code, tensors = world:rank() == 0, true, nil, nil, nil
  if first then ok, message, code = core.checkpoint_begin(folder, name) end
  message, code = pieces.agree(not ok and message or nil, code)
  if not message then
    local written
    written, message, code = write_own(folder, name, parts, world:rank())
    if written and first then
      tensors, message, code = write(folder, name, "tensors.safetensors")
    end
    if message then message = ("rank %d: %s"):format(world:rank(), message) end
    -- A rank that has failed compares as well: the others wait for it.
    local difference = differs(written or {})
    if difference and not message then message, code = difference, pieces.DIFFERS end
    message, code = pieces.agree(message, code)
  end
  if not message then
    values = join_values(world, values)
    -- Phase 2. In a world without the others there is nothing to commit.
    if first and (world:_has_others() or world:size() == 1) then
      ok, message, code = commit(folder, name, world:size(), function(list, files, has_regions)
        return text(values, tensors, list, files, has_regions)
      end)
      if ok then message = nil end
    end
    message, code = pieces.agree(message, code)
  end
  if not message then return true end
  if first then core.checkpoint_discard(folder, name) end
  return core.refuse(message, code)
end

return pieces
