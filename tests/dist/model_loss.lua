-- What every rank of model_loss_spec.lua runs: models whose losses are made without logits, in ddp
-- and fsdp, have the bits that they have with logits, and train as on one rank.
local ms = require "moonshard"
local core = require "moonshard.core"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local rank, ranks = ms.rank(), ms.world_size()

local BATCH <const>, TIME <const>, VOCAB <const> = 2, 8, 37

local function make(tie, recompute)
  ms.seed(7)
  return ms.nn.gpt2 {
    vocab = VOCAB, context = TIME, layers = 2, width = 16, heads = 2, tie = tie,
    recompute = recompute,
  }
end

-- Tokens of one step: all, or this rank's rows.
local function batch(step, whole)
  local function draw(seed)
    local t = ms.randint { ranks * BATCH, TIME, low = 0, high = VOCAB, seed = seed }
    return whole and t or t:narrow(1, rank * BATCH + 1, BATCH)
  end
  return draw(2 * step), draw(2 * step + 1)
end

local function of_logits(model, x, y) return model(x):cross_entropy(y) end
local function of_model(model, x, y) return model:loss(x, y) end

-- Whether a call of f makes its loss without logits.
local function has_no_logits(f)
  core.trace_start()
  f()
  for _, record in ipairs(core.trace_stop()) do
    if record.name == "cross_entropy in place" then return true end
  end
  return false
end

-- Three steps of two passes; the losses of this rank's passes.
local function train(model, f, whole)
  local optimizer, losses = ms.optim.sgd(model, { lr = 0.5 }), {}
  for step = 1, 3 do
    model:accumulate(2, function(i)
      local x, y = batch(2 * step + i, whole)
      local loss = f(model, x, y)
      loss:div(2):backward()
      losses[#losses + 1] = loss:item()
    end)
    optimizer:step()
    optimizer:zero_grad()
  end
  return losses
end

local ways = {
  { "ddp" }, { "ddp", { find_unused = true } }, { "ddp", { bucket_bytes = 4096 } },
  { "ddp", { precision = { param = "bf16" } } },
  { "fsdp" }, { "fsdp", { strategy = "shard_grad_op" } }, { "fsdp", { find_unused = true } },
  { "fsdp", { reshard_after_forward = true, layout = "rows" } },
  { "fsdp", { precision = { param = "bf16" } } },
  { "fsdp", { offload = "cpu" } },
}
for number, way in ipairs(ways) do
  for _, tie in ipairs { true, false } do
    local title = ("way %d, tie %s"):format(number, tie)
    local states, losses = {}, {}
    for i, f in ipairs { of_logits, of_model } do
      local model = ms[way[1]](make(tie, number % 2 == 0), way[2])
      if f == of_model then
        local x, y = batch(1)
        ms.no_grad(function()
          assert(has_no_logits(function() return model:loss(x, y) end), title)
        end)
      end
      losses[i] = train(model, f)
      states[i] = expect.whole(model)
      model:unwrap()
    end
    for i, loss in ipairs(losses[1]) do
      assert(loss == losses[2][i], ("%s: loss %d is %.9g, not %.9g"):format(title, i,
        losses[2][i], loss))
    end
    expect.same(states[2], states[1], title)
    -- On one rank with all rows. In bf16 gradients of ranks are rounded on their own.
    if not (way[2] and way[2].precision) then
      local alone = make(tie)
      train(alone, of_model, true)
      -- Sums in another order, in f32.
      expect.close(states[2], alone:state(), 1e-5, title)
    end
  end
end
print(("rank %d is done"):format(rank))
