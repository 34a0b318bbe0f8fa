-- SparseLoCo: each rank trains alone. Every H steps it sends the largest entries of the change of
-- its weights, in few bits; what is not sent stays in a residual, which takes the place of an outer
-- momentum. Sarfi, Therien, Lidin, Belilovsky: "Communication Efficient LLM Pre-training with
-- SparseLoCo", 2025. For a model that is not wrapped; call the result's after_step(step) once in
-- each step, after the inner optimizer, and save it with the checkpoint. Options: model, period 30,
-- k 64 of each chunk of 4096 numbers, beta 0.95 (of the residual, what stays), lr 1, codec "int2"
-- with a scale for each `block` 64 values, group.
local ms = require "moonshard"

return function(options)
  assert(options and options.model, "sparseloco: model is missing")
  local period, chunk, k = options.period or 30, options.chunk or 4096, options.k or 64
  local beta, lr = options.beta or 0.95, options.lr or 1
  assert(math.type(period) == "integer" and period > 0,
    "sparseloco: period must be a positive integer")
  assert(math.type(chunk) == "integer" and chunk > 0 and chunk <= 65536,
    "sparseloco: chunk must be an integer from 1 to 65536, so that positions fit 16 bits")
  assert(math.type(k) == "integer" and k > 0 and k <= chunk,
    "sparseloco: k must be an integer from 1 to chunk")
  assert(type(beta) == "number" and beta >= 0 and beta <= 1, "sparseloco: beta must be 0 to 1")
  local codec = ms.codec(options.codec or "int2", { block = options.block or 64 })
  ms.nn.alone(options.model, { merge = "mean" })                    -- each rank trains its own
  local group, weights = options.group or ms.world(), ms.flat(options.model:parameters())
  local anchor, n = weights:clone():keep(), weights:numel()           -- the last common weights
  local residual = ms.zeros({ n }):pad_to(chunk):view(-1, chunk):keep()
  local rows, ranks = residual:size(1), group:size()
  local sparseloco = {}

  -- The first n numbers of the chunks; what follows them is zero.
  local function whole(chunks) return chunks:view(-1):narrow(1, 1, n) end

  function sparseloco.after_step(step)
    if (step + 1) % period ~= 0 then return end
    ms.no_grad(function()
      whole(residual:mul_(beta)):add_((anchor - weights):to "f32")
      local _, positions = residual:abs():topk(k, 2)
      local codes, lost = codec:encode(residual:gather(2, positions), { error = true })
      residual:scatter_(2, positions, lost)
      local sent = { group:all_gather(codes), group:all_gather(positions:to "u16") }
      -- From ranks x rows x k to rows x (ranks x k). Sums are over ranks in order, on all alike.
      local function by_rows(t) return t:view(ranks, rows, k):transpose(1, 2):reshape(rows, -1) end
      local values = by_rows(codec:decode(sent[1]:value(), k))
      local sum = residual:zeros_like():scatter_add_(2, by_rows(sent[2]:value():to "i64"), values)
      anchor:sub_(whole(sum):to(anchor:dtype()), lr / ranks)
      weights:copy_(anchor)
    end)
  end

  function sparseloco:state() return { anchor = anchor, residual = residual } end

  function sparseloco:load_state(saved)
    ms.no_grad(function()
      anchor:copy_(saved.anchor)
      residual:copy_(saved.residual)
    end)
  end

  return sparseloco
end
