-- Muon: the momentum of a matrix is orthonormalized by Newton-Schulz iterations before it is
-- subtracted. Jordan, Jin, Boza, You, Cesista, Newhouse, Bernstein: "Muon: An optimizer for hidden
-- layers in neural networks", 2024. An optimizer, for optimizer=muon or your own loop: dofile
-- "recipes/optim/muon.lua" { model = net }. Embeddings, heads and vectors are stepped by AdamW.
-- Where fsdp has cut a matrix, its momentum stays cut, and one rank orthonormalizes the whole of
-- it. Options: lr 0.02, momentum 0.95, nesterov true, iterations 5, others_lr (that of the recipe's
-- own optimizer, else 1e-3), shard: a group of ranks that divide the work of a model that each has.
local ms = require "moonshard"

-- The nearest matrix with orthonormal rows or columns, roughly: its singular values are 0.7 to 1.2.
local function orthonormal(matrix, iterations)
  local x = matrix / (matrix:norm() + 1e-7)
  local is_tall = x:size(1) > x:size(2)
  if is_tall then x = x:t() end
  for _ = 1, iterations do
    local a = x:matmul(x:t())
    x = x * 3.4445 + (a * -4.7750 + a:matmul(a) * 2.0315):matmul(x)
  end
  return is_tall and x:t() or x
end

local muon = ms.optim.define {
  name = "muon",
  defaults = { lr = 0.02, momentum = 0.95, nesterov = true, iterations = 5 },
  whole = {
    before = function(_, grad, state, group)
      grad = grad:to "f32"
      state.momentum = state.momentum or grad:zeros_like()
      state.momentum:mul_(group.momentum):add_(grad)
      return group.nesterov and state.momentum * group.momentum + grad or state.momentum
    end,
    update = function(matrix, _, group)
      local longer = math.max(1, matrix:size(1) / matrix:size(2))
      return orthonormal(matrix, group.iterations) * longer ^ 0.5
    end,
  },
}

return function(options)
  assert(options and options.model, "muon: model is missing")
  local groups = ms.scripts.matrices(options, {
    lr = options.lr or 0.02, others_lr = options.others_lr,
  })
  return muon(groups, {
    momentum = options.momentum or 0.95, nesterov = options.nesterov ~= false,
    iterations = options.iterations or 5, shard = options.shard,
  })
end
