-- Whether a wrapped model still has the parameters that it was wrapped with. They are laid out
-- then: one that is added, replaced or trained later would be trained by each rank apart.
local core = require "moonshard.core"
local listed = require "moonshard.nn.listed"
local names = require "moonshard.nn.names"

local structure = {}

local AGAIN <const> = "unwrap() the model, change it, and wrap it again"

local function raise(what, name, why)
  core.raise(("%s: parameter '%s' %s since the model was wrapped: %s"):format(what, name, why,
    AGAIN))
end

-- Compares the parameters of a model with the wrapped ones. list: these, as { name, parameter }.
-- Returns the names of those that require no gradient any more.
local function compare(what, s, list)
  local known, by_name, found, frozen = {}, {}, {}, {}
  for _, item in ipairs(list) do known[item.parameter], by_name[item.name] = item, true end
  for _, item in ipairs(s.wrapped:named_parameters()) do
    local p = item.parameter
    if known[p] then
      found[p] = true
      if not p:requires_grad() then frozen[#frozen + 1] = item.name end
    elseif p:requires_grad() and not listed.has(s.options.ignored, item.name) then
      raise(what, item.name, by_name[item.name] and "was replaced (by an assignment)"
        or "was added (by an assignment), or requires a gradient (requires_grad_),")
    end
  end
  for _, item in ipairs(list) do
    if not found[item.parameter] then
      raise(what, item.name, "was taken out of it (by an assignment)")
    end
  end
  return frozen
end

--- Before each recorded forward of a ddp model: raises if its trained parameters are not those
--- that were wrapped. If all of them are frozen for a while, nothing is reduced; with find_unused
--- some may be.
---@param s ms.DDPState
function structure.check_ddp(s)
  local now = names.structure()
  if s.structure == now then return end
  local list = {}
  for i, p in ipairs(s.trained) do list[i] = { name = s.names[i], parameter = p } end
  local frozen = compare("ddp", s, list)
  if #frozen > 0 and #frozen < #list and not s.options.find_unused then
    raise("ddp", frozen[1], "requires no gradient any more (requires_grad_)")
  end
  s.structure = now
end

--- The same for a sharded model, of which all parameters but those of `ignored` are laid out.
---@param s ms.FSDPState
function structure.check_fsdp(s)
  local now = names.structure()
  if s.structure == now then return end
  local list = {}
  for _, unit in ipairs(s.units) do
    for i, p in ipairs(unit.parameters) do
      list[#list + 1] = { name = unit.names[i], parameter = p }
    end
  end
  compare("fsdp", s, list)
  s.structure = now
end

return structure
