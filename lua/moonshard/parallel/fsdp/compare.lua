-- What ranks agree on when a model is sharded, before anything of it travels: which ranks share
-- which parameters, and that all ranks describe the same model and options. Errors are the same on
-- every rank.
local core = require "moonshard.core"
local module = require "moonshard.nn.module"
local precision = require "moonshard.parallel.fsdp.precision"
local sorted_pairs = require "moonshard.base.sorted_pairs"

local compare = {}

-- The ranks of a group as text, by their numbers in the world.
local function ranks_of(group) return table.concat(group:_members(), ", ") end

------------------------------------------------------------------------------------------- group_of

-- Asks group_of for each parameter. A problem comes second, as text: other ranks wait for this one.
local function ask(units, group_of)
  local found, own, first = {}, nil, nil
  for _, unit in ipairs(units) do
    for i, p in ipairs(unit.parameters) do
      local name = unit.names[i]
      local called, group = pcall(group_of, name, p)
      if not called then return nil, ("fsdp: group_of('%s'): %s"):format(name, tostring(group)) end
      if group ~= nil and not core.is_group(group) then
        return nil, ("fsdp: group_of gives '%s' a %s, not a group of ranks or nil"):format(name,
          type(group))
      end
      if group ~= nil then
        own, first = own or group, first or name
        if group ~= own then
          return nil, ("fsdp: group_of gives '%s' the ranks %s and '%s' the ranks %s: these \z
            groups overlap, and a rank is in one")
            :format(first, ranks_of(own), name, ranks_of(group))
        end
        found[#found + 1] = name
      end
    end
  end
  return { group = own, names = found }
end

-- What rank r said: its group's ranks, and names.
local function parse(text)
  local failure = text:match "^!(.*)$"
  if failure then return { failure = failure } end
  local ranks, rest = text:match "^([^\n]*)\n(.*)$"
  local said = { ranks = ranks, members = {}, names = {} }
  for rank in ranks:gmatch "%d+" do said.members[tonumber(rank)] = true end
  for name in rest:gmatch "[^\n]+" do said.names[#said.names + 1] = name end
  return said
end

-- Each rank is in the group that it names, and all of a group's ranks name it.
local function check_partition(said, members)
  for r, one in ipairs(said) do
    if one.failure then core.raise(one.failure) end
    if one.ranks == "" then
      core.raise(("fsdp: group_of gives rank %d no group, and rank %d one: its groups leave no \z
        rank out"):format(members[r], members[r == 1 and 2 or 1]))
    end
  end
  for r, one in ipairs(said) do
    for other, two in ipairs(said) do
      if one.members[members[other]] and one.ranks ~= two.ranks then
        core.raise(("fsdp: group_of gives rank %d the ranks %s, and rank %d the ranks %s: these \z
          groups overlap"):format(members[r], one.ranks, members[other], two.ranks))
      end
    end
  end
end

local function check_names(said)
  local holder = {}
  for _, one in ipairs(said) do
    for _, name in ipairs(one.names) do
      local before = holder[name]
      if before and before ~= one.ranks then
        core.raise(("fsdp: group_of: '%s' is a parameter of the ranks %s and of the ranks %s: \z
          other groups hold other parameters, so their names must differ")
          :format(name, before, one.ranks))
      end
      holder[name] = one.ranks
    end
  end
end

--- The group of each parameter that not all ranks of the model share. These groups partition the
--- model's ranks.
---@param units table[]
---@param group ms.Group the model's ranks
---@param group_of? fun(name: string, parameter: ms.Parameter): ms.Group?
---@return table<string, ms.Group> by name
function compare.groups(units, group, group_of)
  if not group_of then return {} end
  local own, failure = ask(units, group_of)
  local text = failure and "!" .. failure
    or (own.group and ranks_of(own.group) or "") .. "\n" .. table.concat(own.names, "\n")
  local said, members, any = {}, {}, false
  for r, one in ipairs(group:_share_texts(text, "group_of")) do
    said[r], members[r] = parse(one), group:_world_rank(r - 1)
    any = any or said[r].failure or said[r].ranks ~= ""
  end
  -- A fake world has this rank's words only.
  if any and group:_has_others() then
    check_partition(said, members)
    check_names(said)
  elseif failure then core.raise(failure) end
  local groups = {}
  for _, name in ipairs(own.names) do groups[name] = own.group end
  return groups
end

--------------------------------------------------------------------------------------------- levels

-- Raises unless each rank is in the group that it gives, and all of a group's ranks give it.
local function check_level(name, ranks, members)
  for r, one in ipairs(ranks) do
    local found = {}
    for rank in one:gmatch "%d+" do found[tonumber(rank)] = true end
    if not found[members[r]] then
      core.raise(("fsdp: %s: rank %d gives the ranks %s, without itself"):format(name, members[r],
        one))
    end
    for other, two in ipairs(ranks) do
      if found[members[other]] and two ~= one then
        core.raise(("fsdp: %s: rank %d gives the ranks %s, and rank %d the ranks %s: groups of \z
          one kind must not overlap"):format(name, members[r], one, members[other], two))
      end
    end
  end
end

--- Checks that shard groups partition the model's ranks, that replica groups do, and that a shard
--- group and a replica group have one rank in common.
---@param group ms.Group
---@param shards ms.Group
---@param replicas ms.Group
function compare.levels(group, shards, replicas)
  if not group:_has_others() then return end
  local one, two, members, shard_of = {}, {}, {}, {}
  local text = ranks_of(shards) .. "|" .. ranks_of(replicas) .. "|" .. shards:rank()
  for r, words in ipairs(group:_share_texts(text, "fsdp")) do
    one[r], two[r], words = words:match "^(.*)|(.*)|(.*)$"
    members[r] = group:_world_rank(r - 1)
    shard_of[members[r]] = tonumber(words)
  end
  check_level("shard_group", one, members)
  check_level("replica_group", two, members)
  for r, ranks in ipairs(one) do
    local found, common = {}, 0
    for rank in ranks:gmatch "%d+" do found[rank] = true end
    for rank in two[r]:gmatch "%d+" do common = common + (found[rank] and 1 or 0) end
    if common ~= 1 then
      core.raise(("fsdp: rank %d gives the shard_group %s and the replica_group %s: they must \z
        have this rank alone in common"):format(members[r], ranks, two[r]))
    end
    for rank in two[r]:gmatch "%d+" do
      local other = tonumber(rank)
      if shard_of[other] ~= shard_of[members[r]] then
        core.raise(("fsdp: replica_group %s: rank %d has shard %d of its shard_group, and rank %d \z
          has shard %d: replicas have the same shard"):format(two[r], members[r],
          shard_of[members[r]], other, shard_of[other]))
      end
    end
  end
end

------------------------------------------------------------------------------------------- metadata

-- Options that every rank must give alike, and what represents them.
local function describe_options(o, strategy, hook, low, units, groups)
  local lines = {}
  local function add(name, value) lines[#lines + 1] = ("option %s = %s"):format(name, value) end
  add("strategy", strategy)
  for _, name in ipairs { "layout", "reshard_after_forward", "prefetch", "max_in_flight",
      "max_in_flight_bytes", "max_reductions", "accumulate", "divide_factor", "find_unused",
      "init_sync", "broadcast_buffers", "keep_low_precision_grads", "budget_bytes", "offload",
      "pin", "dtype" } do
    add(name, tostring(o[name]))
  end
  add("precision", precision.describe(low, units, groups))
  for _, name in ipairs { "shard_group", "replica_group" } do
    add("size of " .. name, o[name] and o[name]:size() or "nil")
  end
  for name, value in sorted_pairs(o.budgets or {}) do add("budgets." .. name, tostring(value)) end
  add("comm_hook", tostring(hook))
  for _, name in ipairs { "before_gather", "after_gather" } do
    add(name, o[name] and "a function" or "nil")
  end
  return lines
end

local function describe(name, p, in_fp8)
  local shape = table.concat(p:shape(), ", ")
  local where = module.unread[p] and ", in a file" or p:device() == "meta" and ", on meta" or ""
  return ("'%s' [%s] %s, %s%s%s"):format(name, shape, p:dtype(),
    p:requires_grad() and "trained" or "frozen", where, in_fp8 and ", gathered in fp8" or "")
end

-- Parameters of fewer ranks are described by their kinds only, since names and shapes differ.
local function describe_units(units, groups, low, in_fp8)
  local lines = {}
  for _, unit in ipairs(units) do
    local title = ("unit %d \"%s\""):format(unit.index, unit.index == 0 and "root" or unit.name)
    local own, kinds = {}, {}
    local shared = false
    for i, p in ipairs(unit.parameters) do
      local name = unit.names[i]
      if groups[name] then
        own[("%s, %s%s%s"):format(p:dtype(), p:requires_grad() and "trained" or "frozen",
          low and low.keeps[name] and ", kept" or "", in_fp8[name] and ", in fp8" or "")] = true
      else
        shared = true
        lines[#lines + 1] = ("%s: %s"):format(title, describe(name, p, in_fp8[name]))
      end
    end
    -- A unit of fewer ranks has another name on others.
    if not shared then title = "unit " .. unit.index end
    if low and low.by_unit then
      lines[#lines + 1] = ("%s: precision %s"):format(title, precision.describe_unit(low, unit))
    end
    for kind in pairs(own) do kinds[#kinds + 1] = kind end
    table.sort(kinds)
    local last = "no further parameter"
    if #kinds > 0 then last = "parameters of group_of: " .. table.concat(kinds, "; ") end
    lines[#lines + 1] = ("%s: %s"):format(title, last)
  end
  return lines
end

-- Of this rank's group of group_of: what its ranks share.
local function describe_own(units, groups, in_fp8)
  local lines = {}
  for _, unit in ipairs(units) do
    for i, p in ipairs(unit.parameters) do
      if groups[unit.names[i]] then
        lines[#lines + 1] = ("unit %d \"%s\": %s"):format(unit.index, unit.name,
          describe(unit.names[i], p, in_fp8[unit.names[i]]))
      end
    end
  end
  return lines
end

-- The ranks whose line is this one, as text.
local function ranks_with(all, position, line, group)
  local list = {}
  for r, lines in ipairs(all) do
    if (lines[position] or "nothing") == line then list[#list + 1] = group:_world_rank(r - 1) end
  end
  return table.concat(list, ", ")
end

-- One exchange of a number decides the usual case; at a difference all ranks see all descriptions.
local function compare_lines(group, lines)
  local text, same = table.concat(lines, "\n"), true
  local hashes = group:_share("all_gather", "i64", { core.hash(text) & math.maxinteger }, "fsdp")
  for _, hash in ipairs(hashes) do same = same and hash == hashes[1] end
  if same then return end
  local all, longest = {}, 0
  for r, one in ipairs(group:_share_texts(text, "fsdp")) do
    all[r] = {}
    for line in one:gmatch "[^\n]+" do table.insert(all[r], line) end
    longest = math.max(longest, #all[r])
  end
  for position = 1, longest do
    local here = all[1][position] or "nothing"
    for r = 2, #all do
      local there = all[r][position] or "nothing"
      if there ~= here then
        core.raise(("fsdp: ranks have different models: %s on rank %s, and %s on rank %s: every \z
          rank must build and wrap the same one")
          :format(here, ranks_with(all, position, here, group),
            there, ranks_with(all, position, there, group)))
      end
    end
  end
end

-- Raises where the files of ranks differ in one of these parameters.
local function compare_samples(group, names, sources)
  if #names == 0 or group:size() == 1 then return end
  local samples, words = {}, {}
  for i, source in ipairs(sources) do
    local part = source.parts[1]
    -- What cannot be read is reported where it is read.
    samples[i] = (part.file:sample(part.name) or 0) & math.maxinteger
    words[i] = ("%x"):format(samples[i])
  end
  local hash, same = core.hash(table.concat(words, " ")) & math.maxinteger, true
  local hashes = group:_share("all_gather", "i64", { hash }, "fsdp")
  for _, other in ipairs(hashes) do same = same and other == hashes[1] end
  if same then return end
  local all = group:_share("all_gather", "i64", samples, "fsdp")
  for i, name in ipairs(names) do
    for r = 1, group:size() - 1 do
      if all[r * #names + i] ~= all[i] then
        core.raise(("fsdp: '%s' is not the same in the files of rank %d and of rank %d: give all \z
          ranks the same files"):format(name, group:_world_rank(0), group:_world_rank(r)))
      end
    end
  end
end

--- Shards that are read from files are cut from one model only if all ranks have the same files.
--- Samples of each parameter are compared.
---@param units table[]
---@param group ms.Group
---@param groups table<string, ms.Group> of compare.groups
function compare.files(units, group, groups)
  local names, sources, own_names, own_sources = {}, {}, {}, {}
  for _, unit in ipairs(units) do
    for i, p in ipairs(unit.parameters) do
      local name, unread = unit.names[i], module.unread[p]
      local own = groups[name] ~= nil
      if unread then
        table.insert(own and own_names or names, name)
        table.insert(own and own_sources or sources, unread.source)
      end
    end
  end
  compare_samples(group, names, sources)
  local _, own = next(groups)
  if own then compare_samples(own, own_names, own_sources) end
end

--- Compares the units, their parameters and the options over the ranks.
---@param units table[]
---@param group ms.Group
---@param groups table<string, ms.Group> of compare.groups
---@param o ms.FSDPOptions
---@param strategy string
---@param hook? string
---@param low? ms.FSDPPrecision
---@param in_fp8 table<string, boolean> of fp8.of
function compare.compare(units, group, groups, o, strategy, hook, low, in_fp8)
  if group:size() == 1 then return end
  local lines = describe_options(o, strategy, hook, low, units, groups)
  for _, line in ipairs(describe_units(units, groups, low, in_fp8)) do lines[#lines + 1] = line end
  compare_lines(group, lines)
  local _, own = next(groups)
  if own and own:size() > 1 then compare_lines(own, describe_own(units, groups, in_fp8)) end
end

return compare
