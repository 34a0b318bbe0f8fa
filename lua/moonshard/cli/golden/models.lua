-- Golden models: losses, gradients and weights of short trainings.
local ms = require "moonshard"
local optimizers = require "moonshard.cli.golden.optimizers"
local report = require "moonshard.cli.golden.report"

-- Chosen from the differences of PyTorch between its builds and numbers of ranks.
local models = { tolerance = { loss = 2e-5, grad_norm = 1e-5, grad = 1e-5, final = 1e-4 } }
-- For weights whose exact gradient is zero, so that they depend on rounding errors only.
local NOISE_GRADIENT, NOISE_WEIGHT = 1e-8, 5e-3

-- Names in the manifest's configuration -> names of the options here.
local architectures = {
  gpt2 = { vocab = "vocab", ctx = "context", layer = "layers", head = "heads", dim = "width" },
  llama = {
    vocab = "vocab", layer = "layers", head = "heads", kv = "kv_heads", dim = "width",
    ff = "hidden",
  },
}

---@param case table
---@return string
function models.name(case) return ("%s %s"):format(tostring(case.model), tostring(case.variant)) end

local entries = {
  model = 1, variant = 1, file = 1, config = 1, batch = 1, time = 1, steps = 1, optimizer = 1,
  hyperparameters = 1, clip_grad_norm = 1,
  micro_batches = 1, losses = 1, grad_norms = 1,
}

--- The model of a case; more: options beside its configuration.
---@param case table
---@param more? table
---@return ms.Module
function models.make(case, more)
  local names = architectures[case.model]
    or error(("unknown model '%s'"):format(tostring(case.model)), 0)
  report.known_keys("configuration", case.config, names)
  local options = { context = case.time }
  for name, value in pairs(case.config) do options[names[name]] = value end
  for name, value in pairs(more or {}) do options[name] = value end
  return ms.nn[case.model](options)
end

-- The tensors of the file whose names begin with the prefix, by their names without it.
local function with_prefix(tensors, prefix)
  local found = {}
  for name, t in pairs(tensors) do
    if name:sub(1, #prefix) == prefix then found[name:sub(#prefix + 1)] = t end
  end
  return found
end

-- The consecutive rows of this rank: the first one (from 0) and their number. The numbers of the
-- ranks differ by at most one, larger ones first.
local function slice(rows)
  local rank, size = ms.rank(), ms.world_size()
  if rows < size then error(("%d rows on %d ranks"):format(rows, size), 0) end
  local least, more = rows // size, rows % size
  return rank * least + math.min(rank, more), least + (rank < more and 1 or 0)
end

-- One pass forward and backward for each part of the batch; returns the loss of the whole batch. If
-- ranks have different numbers of rows, the mean of a rank is weighted by its rows.
local function pass(model, case, tokens)
  local parts = case.micro_batches or 1
  if case.batch % parts ~= 0 then
    error(("%d rows do not divide into %d parts"):format(case.batch, parts), 0)
  end
  local rows, loss = case.batch // parts, ms.zeros {}
  local first, count = slice(rows)
  model:accumulate(parts, function(part)
    local own = tokens:narrow(1, (part - 1) * rows + first + 1, count)
    local mean = model(own:narrow(2, 1, case.time)):cross_entropy(own:narrow(2, 2, case.time))
      / parts
    if count * ms.world_size() ~= rows then mean = mean * (ms.world_size() * count / rows) end
    mean:backward()
    loss:add_(mean:detach())
  end)
  return ms.world():all_reduce(loss, "avg"):value():item()
end

-- The position of the key part of an attention bias in a tensor; nil for all other tensors. A key
-- bias adds the same number to all scores of a query, so its exact gradient is zero.
local function noise_range(case, name)
  if case.model ~= "gpt2" or not name:match "^h%.%d+%.attn%.c_attn%.bias$" then return nil end
  return case.config.dim + 1, case.config.dim
end

-- Calls f(what, ours, golden, is_noise) for the parts of a tensor that have different tolerances.
local function each_part(case, name, ours, golden, f)
  local start, length = noise_range(case, name)
  if not start or not ours or not golden or ours:numel() ~= golden:numel() then
    return f(name, ours, golden, false)
  end
  local rest = start + length
  local function but_keys(t)
    return ms.cat { t:narrow(1, 1, start - 1), t:narrow(1, rest, t:numel() - rest + 1) }
  end
  f(name, but_keys(ours), but_keys(golden), false)
  f(name .. " (keys)", ours:narrow(1, start, length), golden:narrow(1, start, length), true)
end

local function compare_gradients(case, model, tensors, found)
  local own, golden = {}, with_prefix(tensors, "grad.")
  for _, item in ipairs(model:named_parameters()) do own[item.name] = item.parameter:grad() end
  for name in pairs(own) do golden[name] = golden[name] or false end
  for name, expected in ms.sorted_pairs(golden) do
    each_part(case, name, own[name], expected, function(what, a, b, noise)
      if noise then found:absolute("grad." .. what, a, a:zeros_like(), NOISE_GRADIENT)
      else found:relative("grad." .. what, a, b, models.tolerance.grad) end
    end)
  end
end

local function compare_weights(case, model, tensors, found)
  local own, golden, start = model:state(), with_prefix(tensors, "final."),
    with_prefix(tensors, "init.")
  for name in pairs(own) do golden[name] = golden[name] or false end
  for name, expected in ms.sorted_pairs(golden) do
    each_part(case, name, own[name] and own[name]:detach(), expected, function(what, a, b, noise)
      if noise then
        local from, length = noise_range(case, name)
        found:absolute("final." .. what, a, start[name]:narrow(1, from, length), NOISE_WEIGHT)
      else found:absolute("final." .. what, a, b, models.tolerance.final) end
    end)
  end
end

--- Trains as described in the manifest and compares every step.
---@param case table
---@param tensors table<string, ms.Tensor>
---@param found ms.GoldenReport
function models.run(case, tensors, found)
  report.known_keys("entry", case, entries)
  local model = models.make(case)
  model:load_state(with_prefix(tensors, "init."))
  if ms.world_size() > 1 then model = ms.ddp(model) end
  local optimizer = optimizers.make(case.optimizer, case.hyperparameters, model)
  local tokens = tensors.tokens or error("the file has no tensor 'tokens'", 0)
  local shape = tokens:shape()
  if #shape ~= 3 or shape[1] ~= case.steps or shape[2] ~= case.batch
      or shape[3] ~= case.time + 1 then
    error(("tokens are %s; steps, batch and time + 1 of the manifest are %s, %s and %s")
      :format(tostring(tokens), case.steps, case.batch, case.time + 1), 0)
  end
  for step in ms.steps(case.steps) do
    local loss = pass(model, case, tokens[step + 1])
    local norm = model:clip_grad_norm(case.clip_grad_norm or math.huge):item()
    found:number(("losses[%d]"):format(step), loss, case.losses[step + 1], models.tolerance.loss)
    found:number(("grad_norms[%d]"):format(step), norm, case.grad_norms[step + 1],
      models.tolerance.grad_norm, true)
    if step == 0 then compare_gradients(case, model, tensors, found) end
    optimizer:step()
  end
  compare_weights(case, model, tensors, found)
end

return models
