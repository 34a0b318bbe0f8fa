-- nn.alone: parameters that each rank trains by itself, and what one model of them is.
local core = require "moonshard.core"
local options_of = require "moonshard.base.options"
local hooks = require "moonshard.hooks"
local ownership = require "moonshard.base.ownership"

local alone = {}

local kinds = { mean = true, rank0 = true }

-- parameter -> "mean" or "rank0"
local declared = ownership.alone

---@param object ms.Module
---@param options { merge: "mean"|"rank0" }
---@return ms.Module
function alone.alone(object, options)
  options_of.argument("nn.alone", "module", object, "module")
  local merge = options_of.check("nn.alone", options, { merge = "string" }).merge
  if not kinds[merge] then
    core.raise(("nn.alone: merge says what one model of all ranks' is: \"mean\" or \"rank0\", \z
      not %s"):format(merge == nil and "nothing" or "'" .. merge .. "'"))
  end
  for _, item in ipairs(object:named_parameters()) do
    local s = ownership.reduced[item.parameter]
    if ownership.sharded[item.parameter] then
      core.raise(("nn.alone: '%s' is sharded by fsdp: declare it before the model is wrapped, and \z
        name it in ignored"):format(item.name))
    elseif s and s.reducer
        and hooks._equal_over(s.how.chain or {}, s.group) then
      core.raise(("nn.alone: ddp reduces the gradient of '%s': declare it before the model is \z
        wrapped, and name it in ignored"):format(item.name))
    end
  end
  for _, item in ipairs(object:named_parameters()) do
    if ownership.declared[item.parameter] then
      core.raise(("nn.alone: '%s' is declared by nn.split, nn.owned or nn.shared, so that it is a \z
        part of one model"):format(item.name))
    end
  end
  for _, p in ipairs(object:parameters()) do declared[p] = merge end
  return object
end

--- "mean" or "rank0"; nil: it is not declared.
---@param p ms.Tensor
---@return string?
function alone.merge_of(p) return declared[p] end

--- For ms.ddp and ms.fsdp: raises if one of these parameters, which they are to reduce, is
--- declared.
---@param what string
---@param parameters ms.Parameter[]
---@param names string[]
function alone.refuse(what, parameters, names)
  for i, p in ipairs(parameters) do
    if declared[p] then
      core.raise(("%s: '%s' is declared by nn.alone, so that each rank trains its own: name it in \z
        ignored, or do not declare it"):format(what, names[i]))
    end
  end
end

return alone
