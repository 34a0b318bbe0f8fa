-- Shampoo: a gradient G is multiplied from both sides by inverse fourth roots of what its rows, and
-- its columns, have had in common so far: L^-1/4 G R^-1/4. Gupta, Koren, Singer: "Shampoo:
-- Preconditioned Stochastic Tensor Optimization", 2018; work is divided over ranks as in Shi, Lee,
-- Iwasaki, Gallego-Posada, Li, Rangadurai, Mudigere, Rabbat: "A Distributed Data-Parallel PyTorch
-- Implementation of the Distributed Shampoo Optimizer", 2023. An optimizer, for optimizer=shampoo
-- or your own loop, as muon.lua. L, R and the momentum of a matrix are on the rank that owns it.
-- Options: lr 0.02, momentum 0.9, decay 0.95 of L and R, every 10 steps new roots (in each of the
-- first steps, too), damping 1e-5 of the sum of the diagonal, largest 2048: longer sides are left
-- as they are; graft true: updates get the norm of an orthonormal matrix; others_lr; shard.
local ms = require "moonshard"

local function eye(n)
  local at = ms.arange(0, n - 1)
  return at:view(n, 1):eq(at):to "f32"
end

-- A^(-1/p) of a symmetric positive matrix, by Newton's iteration of M = H^p A and H: products only.
local function inverse_root(a, p)
  local one = eye(a:size(1))
  local z = (1 + p) / (2 * a:norm())
  local m, h = a * z, one * z ^ (1 / p)
  for _ = 1, 30 do
    local t = (one * (p + 1) - m) / p
    h = h:matmul(t)
    local power = t
    for _ = 2, p // 2 do power = power:matmul(t) end
    m = power:matmul(power):matmul(m)
  end
  return h
end

-- Adds this gradient to what its rows have had in common, and makes the root of it in some steps.
-- name: "left" or "right".
local function root_of(name, rows, owned, group, step, p)
  local sum, n = name .. "_sum", rows:size(1)
  owned[sum] = owned[sum] or ms.zeros { n, n }
  owned[sum]:lerp_(rows:matmul(rows:t()), 1 - group.decay)
  -- The first sums are of few gradients, and soon out of date.
  if step < group.every or step % group.every == 0 then
    local mean, one = owned[sum] / (1 - group.decay ^ (step + 1)), eye(n)
    local damping = (mean * one):sum() * group.damping
    owned[name] = inverse_root(mean + one * (damping + 1e-30), p)  -- also where all is 0
  end
  return owned[name]
end

local shampoo = ms.optim.define {
  name = "shampoo",
  defaults = {
    lr = 0.02, momentum = 0.9, decay = 0.95, every = 10, damping = 1e-5, largest = 2048,
    graft = true,
  },
  whole = {
    update = function(matrix, owned, group, step)
      matrix = matrix:to "f32"
      local rows, columns = matrix:size(1), matrix:size(2)
      local is_left, is_right = rows <= group.largest, columns <= group.largest
      local p = is_left and is_right and 4 or 2
      local change = matrix
      if is_left then
        change = root_of("left", matrix, owned, group, step, p):matmul(change)
      end
      if is_right then
        change = change:matmul(root_of("right", matrix:t(), owned, group, step, p))
      end
      if group.graft then
        change = change * (math.min(rows, columns) ^ 0.5 / (change:norm() + 1e-30))
      end
      owned.momentum = owned.momentum or matrix:zeros_like()
      return owned.momentum:lerp_(change, 1 - group.momentum)
    end,
  },
}

return function(options)
  assert(options and options.model, "shampoo: model is missing")
  local groups = ms.scripts.matrices(options, {
    lr = options.lr or 0.02, others_lr = options.others_lr,
  })
  local given = { shard = options.shard }
  for _, name in ipairs { "momentum", "decay", "every", "damping", "largest", "graft" } do
    given[name] = options[name]
  end
  return shampoo(groups, given)
end
