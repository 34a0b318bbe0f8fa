-- DeMo: each rank has a local momentum. Only the largest coefficients of its cosine transform are
-- sent, and they are subtracted from the momentum. Peng, Quesnelle, Kingma: "DeMo: Decoupled
-- Momentum Optimization", 2024. A link; the optimizer gets the mean of the sent coefficients, or
-- its signs with sign = true (for SGD, as in the paper). Options: chunk 64, keep 8 of its
-- coefficients, decay 0.9, sign false.
local ms, hooks = require "moonshard", require "moonshard.hooks"

-- The orthonormal cosine transform of vectors of n numbers, as a matrix: one product transforms all
-- chunks.
local function cosines(n)
  local rows = {}
  for k = 0, n - 1 do
    local row, scale = {}, math.sqrt((k == 0 and 1 or 2) / n)
    for i = 0, n - 1 do row[i + 1] = scale * math.cos(math.pi * (i + 0.5) * k / n) end
    rows[k + 1] = row
  end
  return ms.tensor(rows, "f32"):keep()
end

return function(options)
  options = options or {}
  local chunk, keep, decay = options.chunk or 64, options.keep or 8, options.decay or 0.9
  local state, transform = hooks.state "demo", cosines(chunk)

  return function(bucket)
    if bucket:wants_sent() then bucket:set_sent(bucket:buffer()) end  -- unsent numbers are kept
    local flat, group = bucket:buffer():to "f32", bucket:group()
    local momentum = state:flat(bucket, "momentum")
    momentum:mul_(decay):add_(flat)

    local chunks = momentum:pad_to(chunk):view(-1, chunk)
    local coefficients = chunks:matmul(transform:t())
    local _, positions = coefficients:abs():topk(keep)
    local values = coefficients:gather(2, positions)

    -- The inverse transform of the chosen coefficients, as numbers of the flat buffer.
    local function back(at, of)
      local spread = coefficients:zeros_like():scatter_add_(2, at, of)
      return spread:matmul(transform):view(-1):narrow(1, 1, flat:numel())
    end
    momentum:sub_(back(positions, values))

    local sent = {
      group:all_gather(values:unsqueeze(1)), group:all_gather(positions:to("u8"):unsqueeze(1)),
    }
    return ms.all(sent):and_then(function(all)
      flat:zero_()
      for rank = 1, group:size() do flat:add_(back(all[2][rank]:to "i64", all[1][rank])) end
      flat:div_(bucket:divisor())
      return bucket:shard(options.sign and flat:copy_(flat:sign()) or flat):to(bucket:dtype())
    end)
  end
end
