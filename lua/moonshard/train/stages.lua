-- Training over a pipeline (ms.pipeline): its step is forward and backward of all microbatches, and
-- its loss is that of all ranks.
local core = require "moonshard.core"
local dtypes = require "moonshard.train.dtype"

local stages = {}

-- Options that a pipeline leaves no place for, and why.
local REFUSED <const> = {
  loss = "the pipeline's own option loss gives it",
  sample = "no rank has the whole model: generate from what the run saves",
}

--- Raises for options that do not go with a pipeline.
---@param o ms.TrainOptions
function stages.check(o)
  local function refuse(what, why)
    core.raise(("train: %s, and pipeline: %s"):format(what, why))
  end
  for name, why in pairs(REFUSED) do if o[name] ~= nil then refuse(name, why) end end
  if o.accumulate > 1 then
    refuse(("accumulate = %d"):format(o.accumulate), "its microbatches are the passes of a step")
  end
  if o.graph then refuse("graph = true", "ranks wait for each other in a step") end
  if o.eval and o.eval.measure then refuse("eval.measure", "outputs are on the last stage only") end
  if o.dtype == "f16" then
    refuse("dtype f16 (its loss scaler)", "it does not scale its loss: use bf16")
  end
end

--- Forward and backward of a step; the mean loss, the same on all ranks.
---@param o ms.TrainOptions
---@return ms.Tensor
function stages.step(o, x, y, positions)
  return dtypes.run(o, function() return o.pipeline:step(x, y, positions) end)
end

--- The loss of a validation batch.
---@param o ms.TrainOptions
---@return ms.Tensor
function stages.eval(o, x, y, positions)
  return dtypes.run(o, function() return o.pipeline:eval(x, y, positions) end)
end

--- Puts the chunks of this rank into the mode of training, or of evaluation.
---@param o ms.TrainOptions
---@param trains boolean
function stages.mode(o, trains)
  for _, chunk in pairs(o.pipeline.chunks) do
    if trains then chunk:train() else chunk:eval() end
  end
end

return stages
