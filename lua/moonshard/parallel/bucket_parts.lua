-- For links that send each rank its own part of a bucket: the parts of all ranks as rows of a
-- matrix, and back.
local core = require "moonshard.core"
local ownership = require "moonshard.base.ownership"

local bucket_parts = {}

-- Under layout = "rows" each parameter is cut by itself: how many numbers each has, and how many
-- places a part has for them. Parts of few rows end with zeros.
local function cuts_of(bucket, ranks)
  local entry = ownership.sharded[bucket:parameters()[1]]
  if bucket:kind() == "all_reduce" or not entry or entry.model.options.layout ~= "rows" then
    return nil
  end
  local cuts = {}
  for _, p in ipairs(bucket:parameters()) do
    local shape = p:full_shape()
    local rows, row = shape[1] or 1, 1
    for d = 2, #shape do row = row * shape[d] end
    local places = (rows + ranks - 1) // ranks * row
    if places > 0 then cuts[#cuts + 1] = { count = rows * row, places = places } end
  end
  return cuts[1] and cuts
end

local function check(what, bucket, t)
  if not core.is_bucket(bucket) then
    core.raise(("%s: a bucket is expected, not a %s"):format(what, type(bucket)))
  end
  if not core.is_tensor(t) then
    core.raise(("%s: a tensor is expected, not a %s"):format(what, type(t)))
  end
end

---@param bucket ms.Bucket
---@param t ms.Tensor
---@return ms.Tensor parts
---@return ms.Group group
function bucket_parts.parts(bucket, t)
  check("hooks.parts", bucket, t)
  local whole = bucket:kind() == "all_reduce"
  local group = whole and bucket:group() or bucket:group "shard"
  local ranks = group:size()
  local cuts = cuts_of(bucket, ranks)
  if not cuts then
    if whole then t = t:pad_to(ranks) end
    return t:view(ranks, t:numel() // ranks), group
  end
  local list, at = {}, 1
  for i, cut in ipairs(cuts) do
    local numbers = t:narrow(1, at, cut.count):pad_to(ranks * cut.places)
    list[i], at = numbers:view(ranks, cut.places), at + cut.count
  end
  return core.cat(list, 2), group
end

---@param bucket ms.Bucket
---@param parts ms.Tensor
---@return ms.Tensor
function bucket_parts.joined(bucket, parts)
  check("hooks.joined", bucket, parts)
  local ranks, length = parts:size(1), bucket:buffer():numel()
  local cuts = cuts_of(bucket, ranks)
  if not cuts then return parts:view(-1):narrow(1, 1, length) end
  local list, at = {}, 1
  for i, cut in ipairs(cuts) do
    local numbers = parts:narrow(2, at, cut.places):reshape(ranks * cut.places)
    list[i], at = numbers:narrow(1, 1, cut.count), at + cut.places
  end
  return core.cat(list, 1):pad_to(length)
end

return bucket_parts
