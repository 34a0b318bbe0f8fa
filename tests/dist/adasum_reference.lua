-- Adasum by its definition, in f64 on the host, for hooks.lua and hooks_spec.lua. vectors[r]: the
-- vector of rank r, from 0, as a list. Returns the result, which is the same for all ranks.
local function pair(a, b)
  local ab, aa, bb, result = 0, 0, 0, {}
  for i = 1, #a do ab, aa, bb = ab + a[i] * b[i], aa + a[i] * a[i], bb + b[i] * b[i] end
  for i = 1, #a do result[i] = a[i] * (1 - ab / (2 * aa)) + b[i] * (1 - ab / (2 * bb)) end
  return result
end

return function(vectors, size)
  local all, power, distance = {}, 1, 1
  for r = 0, size - 1 do all[r] = vectors[r] end
  while power * 2 <= size do power = power * 2 end
  for r = power, size - 1 do all[r - power] = pair(all[r - power], all[r]) end
  while distance < power do
    for r = 0, power - 1, 2 * distance do all[r] = pair(all[r], all[r + distance]) end
    distance = distance * 2
  end
  return all[0]
end
