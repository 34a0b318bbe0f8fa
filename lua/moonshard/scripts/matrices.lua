-- Groups for optimizers of a kind with `whole` (optim.define): the matrices of layers, and all else
-- as the recipe's own optimizer would step it.
local core = require "moonshard.core"
local module = require "moonshard.nn.module"
local options_of = require "moonshard.base.options"
local check = options_of.check

local matrices = {}

-- Names of parameters that have two dimensions and are no matrix of a layer: embeddings and heads.
local APART <const> = { "wte", "wpe", "embed", "lm_head" }

-- What a group of another optimizer says that this kind's second kind knows as well.
local TAKEN <const> = {
  "betas", "eps", "amsgrad", "weight_decay", "maximize", "master", "schedule",
}

local function is_apart(p)
  if #p:full_shape() ~= 2 then return true end
  for _, word in ipairs(APART) do if p:name():find(word, 1, true) then return true end end
  return false
end

local function group_of(from, params, lr)
  local group = { params = params, lr = lr }
  for _, name in ipairs(TAKEN) do group[name] = from and from[name] or nil end
  return group
end

---@param options ms.OptimizerFile
---@param own? ms.MatrixOptions
---@return ms.ParamGroup[]
function matrices.groups(options, own)
  options_of.argument("scripts.matrices", "options", options, "table")
  own = check("scripts.matrices", own, {
    lr = "number", others_lr = "number", is_apart = "function",
  })
  if not module.is_module(options.model) then
    core.raise "scripts.matrices: options.model is missing: a model, or a wrapped one"
  end
  local apart, groups = own.is_apart or is_apart, {}
  local given = options.recipe and options.recipe:groups()
    or { { params = options.model:parameters(), lr = own.others_lr or 1e-3 } }
  for _, from in ipairs(given) do
    local ours, others = {}, {}
    for _, p in ipairs(from.params) do table.insert(apart(p) and others or ours, p) end
    local settings = options.recipe and from or nil
    if #ours > 0 then groups[#groups + 1] = group_of(settings, ours, own.lr) end
    if #others > 0 then
      local group = group_of(settings, others, own.others_lr or from.lr)
      group.whole = false
      groups[#groups + 1] = group
    end
  end
  return groups
end

return matrices
