-- MuLoCo: DiLoCo with Muon as the optimizer of each rank. Therien, Huang, Defazio, Rish,
-- Belilovsky: "MuLoCo: Muon is a practical inner optimizer for DiLoCo", 2025. For a model that is
-- not wrapped. Returns two functions: local(model) gives the method, whose after_step(step) is
-- called once in each step and which is saved with the checkpoint; optimizer(model, recipe) gives
-- the optimizer; recipe: the one that the training recipe would take, which may be nil. Options: of
-- diloco.lua, with period 30; muon_lr 0.02, muon_momentum 0.95, others_lr: of ../optim/muon.lua.
local here = debug.getinfo(1, "S").source:match "^@(.*/)" or ""

return function(options)
  options = options or {}
  local muloco = {}

  muloco["local"] = function(model)
    return dofile(here .. "diloco.lua") {
      model = model, period = options.period or 30, lr = options.lr, momentum = options.momentum,
      group = options.group,
    }
  end

  function muloco.optimizer(model, recipe)
    return dofile(here .. "../optim/muon.lua") {
      model = model, recipe = recipe, lr = options.muon_lr, momentum = options.muon_momentum,
      others_lr = options.others_lr,
    }
  end

  return muloco
end
