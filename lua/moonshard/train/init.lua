-- ms.train: the training loop: step lines, metrics, validation, samples, checkpoints, stopping,
-- resuming.
local core = require "moonshard.core"
local data_files = require "moonshard.data.files"
require "moonshard.parallel.group"                -- methods of the world
local launch = require "moonshard.base.launch"
local log = require "moonshard.base.log"
local LanguageModel = require "moonshard.nn.language_model"
local module = require "moonshard.nn.module"
local replicas = require "moonshard.parallel.replicas"
local dtype_bytes = require "moonshard.base.dtype_bytes"
local dtypes = require "moonshard.train.dtype"
local length = require "moonshard.train.length"
local stages = require "moonshard.train.stages"
local steps = require "moonshard.train.steps"
local settings = require "moonshard.train.settings"
local folder = require "moonshard.train.folder"
local weights = require "moonshard.train.weights"
local vocabulary = require "moonshard.tokenizer.vocabulary"
local sorted_pairs = require "moonshard.base.sorted_pairs"
local optim = require "moonshard.optim"
local alone = require "moonshard.nn.alone"
local parts_of = require "moonshard.nn.parts"
local best = require "moonshard.train.best"
local step_owners = require "moonshard.parallel.overlap.step_owners"
local overlap = require "moonshard.parallel.overlap"
local report = require "moonshard.train.report"
local own_command = require "moonshard.base.own_command"
local ownership = require "moonshard.base.ownership"

local train = {}

local SKIPS_IN_A_ROW <const> = 25
local LOSS_WEIGHT <const> = "weight of the loss"          -- among the sums of an evaluation

---@class ms.Training                  what the parts of the loop share
---@field o ms.TrainOptions

-- Loss and outputs of one pass. If wants_outputs is false, outputs may be nil: the loss of a
-- language model is then computed without its logits.
local function default_loss(model, x, y, positions, wants_outputs)
  if not wants_outputs and LanguageModel._takes_targets(model) then
    return model(x, positions, y)
  end
  local outputs
  if positions == nil then outputs = model(x) else outputs = model(x, positions) end
  return outputs:cross_entropy(y), outputs
end

-- Raises if a function of a recipe would pass over the positions of packed documents: each document
-- would then see those before it, without a word.
local function check_packed(self, x, positions)
  local o = self.o
  if positions == nil or self.takes_positions or not core.is_tensor(x) then return end
  local f = o.loss or o.model.forward
  local info = type(f) == "function" and debug.getinfo(f, "u")
  if info and not info.isvararg and info.nparams < (o.loss and 4 or 3) then
    core.raise("train: data gives a third value, the positions of packed documents, but "
      .. (o.loss and "the function loss takes three arguments: take (model, x, y, positions)"
        or ("forward of %s takes one: take (x, positions), and give them to attention")
          :format(o.model.class_name))
      .. ", or make the loader without packed")
  end
  self.takes_positions = true
end

-- Loss and outputs of one pass, and nil or its weight. Outputs may be nil unless they are wanted.
local function pass(self, x, y, positions, wants_outputs)
  local o = self.o
  if not core.is_tensor(x) and not o.loss then
    core.raise("train: data must give tensors x and y, not " .. type(x))
  end
  if not o.loss and not core.is_tensor(y) then
    core.raise(("train: data must give two tensors, x and the targets y; its second value is %s \z
      (or give loss, a function that needs no y)"):format(y == nil and "nil" or "a " .. type(y)))
  end
  check_packed(self, x, positions)
  local function loss_of()
    if o.loss then return o.loss(o.model, x, y, positions) end
    return default_loss(o.model, x, y, positions, wants_outputs)
  end
  local loss, outputs, weight = dtypes.run(o, loss_of)
  if not core.is_tensor(loss) then
    core.raise("train: the function loss must return a tensor of one element, not " .. type(loss))
  end
  return loss, outputs, weight
end

-- After the first step: whether attention = "fast" changes anything. before: the counts before it.
local function tell_of_attention(before)
  local info = core.info()
  local counts = info.attention
  if core.is_sim() or counts and counts.fast > before.fast then return end
  local why = "device " .. info.device .. " has one way only"
  if counts and counts.cudnn > before.cudnn then why = "cuDNN has no such way for its shapes"
  elseif counts and counts.own > before.own then
    why = ("its calls do not go to cuDNN (%s)"):format(info.gpu_dnn)
  elseif counts then why = "the model calls no attention" end
  log.log("attention: \"fast\" changes nothing: %s", why)
end

-- On a GPU: the peak, which `moonshard check` predicts, and what it does not count.
local function tell_of_memory()
  local memory, beside = core.memory(), core.info().memory_beside
  if not beside then return end
  local out = memory.offload_peak / 2 ^ 20
  log.log("memory     %.0f MiB of tensors at the peak%s; beside it %.0f MiB of the GPU: \z
    libraries, the driver's context, NCCL, scratch memory, other processes", memory.peak / 2 ^ 20,
    out > 0 and (", %.0f MiB offloaded"):format(out) or "", beside / 2 ^ 20)
end

-- For `moonshard check`: the bytes of what stays from step to step. Offloaded parts are not in the
-- peak.
local function note_parts(self)
  if not launch.checking or core.memory().offload_peak > 0 then return end
  local function bytes(t) return t:numel() * dtype_bytes[t:dtype()] end
  local parameters, gradients, states = 0, 0, 0
  for _, p in ipairs(self.parameters) do
    parameters = parameters + bytes(p)
    if p:requires_grad() then gradients = gradients + bytes(p) end
  end
  for _, slot in pairs(self.o.optimizer and self.o.optimizer.slots or {}) do
    for _, state in pairs(slot.state) do
      if core.is_tensor(state) then states = states + bytes(state) end
    end
  end
  launch.parts = { parameters = parameters, gradients = gradients, ["optimizer states"] = states }
end

-- One number of each rank becomes one for all. Each use has a tensor of its own for all steps: one
-- that outlived its step would take a place in memory that the next step's tensors had before, so
-- that no step could be launched as the graph of another.
local function over_ranks(self, use, value, op)
  return core.no_grad(function()
    local own = self.numbers[use] or core.zeros { 1 }:keep()
    self.numbers[use] = own
    own:copy_(value:to "f32":reshape(1))
    return self.world:all_reduce(own, op):value():clone():reshape()
  end)
end

-- After the first forward and backward, on a GPU with cuDNN: whether attention went another way.
-- before: the counts before them.
local function tell_of_refusals(before)
  local counts = core.info().attention
  local refused = counts and counts.refused - before.refused or 0
  if refused == 0 then return end
  log.log("attention: %d of %d tasks of a step go to our own kernels, which are slower: cuDNN \z
    takes bf16 and f16, no positions of packed documents, and widths of heads that are multiples \z
    of 8 up to 256", refused, refused + counts.cudnn - before.cudnn)
end

-- The mean of one number of each rank. If one of them is inf or nan, so is the mean.
local function mean_over_ranks(self, value)
  if self.world:size() == 1 then return value end
  return over_ranks(self, "loss", value, "avg")
end

-- The flag that is true if it is true on all ranks, so that all ranks skip the same steps.
local function on_all_ranks(self, finite)
  if self.world:size() == 1 then return finite end
  return over_ranks(self, "finite", finite, "min"):gt(0)
end

-- Over whose ranks the model's gradients are averaged; nil: each rank has its own.
local function group_of_means(self)
  local meta = getmetatable(self.o.model)
  local s = meta.ddp or meta.fsdp
  return s and s.group or self.o.by_hand and self.world or nil
end

-- Whether all targets of a loader's batches count. Of other data that is not known.
local function counts_all(loader)
  return type(loader) == "userdata" and not loader:is_masked()
end

-- The batches of a step, where their targets must be counted before the first pass. A loader's
-- batches have equally many, which all count unless its shards have masks; with a function loss,
-- weights come with the losses.
local function count_targets(self, step_weights)
  local o = self.o
  if o.loss or counts_all(o.data) then return end
  local batches, counts = {}, {}
  for i = 1, o.accumulate do
    batches[i] = table.pack(self.next_batch())
    counts[i] = weights.counted(batches[i][2])
  end
  -- Otherwise the pass says what is wrong with y.
  if #counts == o.accumulate then step_weights:set(counts) end
  return batches
end

-- Gradients of the passes before the last, times `factor`.
local function scale_gradients(self, factor)
  core.no_grad(function()
    for _, p in ipairs(self.parameters) do
      local gradient = p:grad()
      if gradient then gradient:mul_(factor) end
    end
  end)
end

-- For a sharded model, whose gradients of several passes are scaled when all are there: raises for
-- what would use them before.
local function check_late(self)
  if self.early then
    core.raise(("train: loss gives weights (its third result), and those of %d passes are known \z
      with the last one only, but %s may step in backward: use the policy deferred, or \z
      accumulate = 1")
      :format(self.o.accumulate, self.early))
  end
  for _, link in ipairs(getmetatable(self.o.model).fsdp.how.chain or {}) do
    if type(link) == "table" and link.facts and link.facts.clips then
      core.raise(("train: loss gives weights (its third result), and those of %d passes are known \z
        with the last one only, but the model's chain clips before: use clip of ms.train, or \z
        accumulate = 1"):format(self.o.accumulate))
    end
  end
end

-- Tells the report the number of targets in a step: tokens of a text, or samples.
local function count_tokens(self, y)
  if self.report.tokens or not core.is_tensor(y) then return end
  local ranks = data_files.ranks[self.o.data] or self.data_ranks
  self.report.tokens = y:numel() * self.o.accumulate * ranks
end

-- The same over a pipeline.
local function through_stages(self)
  local x, y, positions = self.next_batch()
  count_tokens(self, y)
  return stages.step(self.o, x, y, positions)
end

-- Forward and backward of one step; the mean loss over its targets, on the device, and their sum of
-- weights, if there is one.
local function forward_backward(self)
  local o, total = self.o, nil
  if o.pipeline then return through_stages(self) end
  local late = getmetatable(o.model).fsdp ~= nil
  local step_weights = weights.step(o.accumulate, group_of_means(self), late)
  local batches = count_targets(self, step_weights)
  local function one_pass(i)
    local x, y, positions
    if batches then
      x, y, positions = table.unpack(batches[i], 1, 3)
      batches[i] = false                              -- so that they can be freed with the pass
    else
      x, y, positions = self.next_batch()
    end
    count_tokens(self, y)
    local loss, _, weight = pass(self, x, y, positions, false)
    loss = step_weights:of(i, loss, weight)
    if step_weights.rest then
      total = total * step_weights.rest
      if late then check_late(self) else scale_gradients(self, step_weights.rest) end
    end
    local part = o.accumulate > 1 and loss / o.accumulate or loss
    local scaled = self.scaler and self.scaler:scale(part) or part
    scaled:backward()
    local value = part:detach()
    if late and step_weights.rest then value = value * step_weights.rest end
    total = i == 1 and value or total + value
  end
  -- A ddp model reduces its gradients in the last pass only; fsdp models say when they do.
  o.model:accumulate(o.accumulate, one_pass)
  if late and step_weights.rest then scale_gradients(self, step_weights.rest) end
  return mean_over_ranks(self, total), step_weights.sum
end

-- Where ranks have pieces of gradients: the least position over the ranks, -1 if all of them are
-- finite everywhere.
local function first_on_ranks(self, bad)
  return core.no_grad(function()
    local none <const> = 0x1p24
    local first = over_ranks(self, "bad", core.where(bad:ge(0), bad:to "f32", none), "min")
    return core.where(first:lt(none), first, -1):to(bad:dtype())
  end)
end

-- Unscales, clips, steps. Returns, on the device, the norm before clipping, whether loss and
-- gradients were finite (nil if on_nan is "ignore"), and the position of the first gradient that
-- was not; and the parameters of these gradients.
local function update(self, loss)
  local o = self.o
  local finite
  if self.scaler then
    finite = on_all_ranks(self, self.scaler:unscale(o.optimizer))
    self.scaler:set_finite(o.optimizer, finite)
  end
  local every = o.log and o.log.histograms
  if every and self.step % every == 0 then self.report:histograms(self.parameters) end
  local clip = optim._clip
  local norm, parameters, bad = clip(self.parameters, o.clip or math.huge)
  if not norm then
    core.raise("train: no parameter got a gradient; does the loss depend on the model?")
  end
  if self.pieces then bad = first_on_ranks(self, bad) end
  if self.scaler then
    self.scaler:step(o.optimizer)
  elseif o.on_nan == "ignore" then
    o.optimizer:step()
  else
    finite = norm:is_finite():to "f32" * loss:is_finite():to "f32"
    finite = on_all_ranks(self, finite:gt(0))
    -- Parameters that were stepped in backward cannot be skipped. The run stops when the flag has
    -- reached the host, two steps later.
    o.optimizer:step { only_if = not self.early and finite or nil }
  end
  return norm, finite, bad, parameters
end

-- Judges a step whose flag has reached the host by now: ends the run, or warns that the step was
-- skipped.
local function judge(self, entry)
  if core.is_sim() then return end                 -- all values are zeros there
  -- Reading a probe frees its memory for the next steps, so all are read in any case.
  local finite, position = entry.finite:value() ~= 0, math.tointeger(entry.bad:value())
  local weight = entry.weight and entry.weight:value()
  if finite then
    self.skips = 0
    return
  end
  local where = position >= 0
    and (" (first bad gradient: %s)"):format(entry.parameters[position + 1]:name())
    or weight == 0 and " (no target of the step counts)"
    or " (the gradients are finite)"
  self.skips = self.skips + 1
  if self.o.on_nan == "stop" and not self.scaler then
    local applied, advice = "nothing of that step was applied", ", or choose on_nan = \"skip\""
    if self.early then
      applied, advice = ("the step was applied already, by %s: resume from the last checkpoint")
        :format(self.early), ""
    end
    launch.exit(4, ("step %d: loss or gradients are inf or nan%s; %s. Lower the learning rate, "
      .. "set clip%s"):format(entry.step, where, applied, advice))
  end
  if not self.scaler or self.skips > 1 then
    log.warn("step %d skipped: inf or nan%s", entry.step, where)
  end
  if self.skips >= SKIPS_IN_A_ROW then
    launch.exit(4, ("%d steps in a row had inf or nan%s"):format(self.skips, where))
  end
end

-- The loss of a validation batch times its weight, and the weight: what the function loss gives,
-- the targets that count, or rows.
local function weighted_loss(self, loss, y, weight)
  local o = self.o
  if weight == nil and not o.loss and not counts_all(o.valid) then
    weight = weights.counted(y)
  end
  if weight == nil then weight = #y end
  if not core.is_tensor(weight) then return loss * weight, core.full(weight, {}) end
  weight = weight:to "f32":reshape()
  return core.where(weight:ne(0), loss * weight, 0), weight
end

-- f(self), with averages as the weights where the run has some.
local function with_averages(self, f)
  if self.ema then return self.ema:averaged(f, self) end
  return f(self)
end

-- Mean loss and measures over the validation batches.
local function validate(self)
  local o = self.o
  local count, batches, sums = 0, 0, {}
  local function add(name, value) sums[name] = sums[name] and sums[name]:add_(value) or value end
  o.model:eval()
  if o.pipeline then stages.mode(o, false) end
  local most
  core.no_grad(function()
    for x, y, positions in o.valid:batches(o.eval.batches) do
      -- The last batch may have fewer rows, and stages take those of training.
      most = most or #x
      if o.pipeline and #x < most then break end
      local loss, outputs, weight
      if o.pipeline then loss = stages.eval(o, x, y, positions)
      else loss, outputs, weight = pass(self, x, y, positions, o.eval.measure ~= nil) end
      local values = o.eval.measure and o.eval.measure(outputs, y, positions) or {}
      values.loss = nil
      -- The last batch may have fewer rows, so the means of measures are over rows.
      local rows = #y
      for name, value in pairs(values) do
        if not core.is_tensor(value) then
          core.raise(("train: eval.measure gives tensors of one element, but %s is a %s")
            :format(name, type(value)))
        end
        add(name, value:to "f32" * rows)
      end
      local value, share = weighted_loss(self, loss:to "f32", y, weight)
      add("loss", value)
      add(LOSS_WEIGHT, share)
      count, batches = count + rows, batches + 1
      if batches % 8 == 0 then core.synchronize() end
    end
  end)
  o.model:train()
  if o.pipeline then stages.mode(o, true) end
  if count == 0 then core.raise "train: valid gave no batch" end
  -- The ranks have equal numbers of batches, and equal parts of each.
  local names, numbers, result = {}, { count }, {}
  for name, sum in sorted_pairs(sums) do
    names[#names + 1] = name
    numbers[#numbers + 1] = sum:item()
  end
  numbers = self.world:_sum(numbers, "evaluation")
  local totals = {}
  for i, name in ipairs(names) do totals[name] = numbers[i + 1] end
  for name, total in pairs(totals) do
    if name ~= LOSS_WEIGHT then
      result[name] = total / (name == "loss" and totals[LOSS_WEIGHT] or numbers[1])
    end
  end
  return result
end

local function show_values(values)
  local parts = {}
  for name, value in sorted_pairs(values) do
    parts[#parts + 1] = ("%s %.4f"):format(name, value)
  end
  return table.concat(parts, "  ")
end

local function sample(self)
  local how = self.o.sample
  local text
  if how.run then text = how.run(self.o.model)
  else
    local words = how.tokenizer and vocabulary.of(how.tokenizer) or vocabulary.bytes()
    local prompt = how.prompt or not how.tokenizer and "\n" or ""
    text = prompt .. vocabulary.continue(words, self.o.model, vocabulary.prompt(words, prompt),
      { count = how.count or 200, temperature = how.temperature or 0.8 })
  end
  self.report:text("sample", text)
  log.log("---- sample\n%s\n----", text)
end

local function due(every, step, last)
  return every and every > 0 and ((step + 1) % every == 0 or step == last)
end

local function validate_and_tell(self, step)
  self.valid = with_averages(self, validate)
  local values = {}
  for name, value in pairs(self.valid) do
    values[name == "loss" and "val_loss" or "val_" .. name] = value
  end
  self.report:add(values)
  log.log("valid %5d  %s", step, show_values(self.valid))
  if self.o.on_eval then self.o.on_eval(step, self.valid) end
end

-- If steps are taken in backward, a bad step was applied: it must be found before a save.
local function judge_all(self)
  for _, entry in ipairs(self.unjudged) do judge(self, entry) end
  self.unjudged = {}
end

-- Raises if what ranks must hold alike differs. A checkpoint compares it as well.
local function check_replicas(self, step)
  local found = replicas.new()
  replicas.add_things(found,
    { model = self.o.model, optimizer = self.o.optimizer, ema = self.ema })
  replicas.check(("train: after step %d"):format(step), found, self.world)
end

-- What comes after a step. A validation may stop the run, which makes this step the last one.
local function due_after(self, step)
  local o, last = self.o, (self.o.steps or math.huge) - 1
  local sampled = self.sample_steps and self.sample_steps[step]
  local what = {
    validates = o.valid and o.eval and due(o.eval.every, step, last),
    samples = o.sample and (due(o.sample.every, step, last)
      or o.sample.seconds and (step == last or sampled)),
    saves = o.save and due(o.save.every, step, last) or self.run and launch.save,
  }
  what.compares = not what.saves and due(o.check_replicas, step)
  return what
end

-- Validation, samples and checkpoints after a step; they do not count in the step's time.
local function after(self, step)
  folder.settle(self, false)
  local what, save = due_after(self, step), self.o.save
  if not (what.validates or what.samples or what.saves or what.compares) then return end
  self.report:outside(function()
    if what.compares then check_replicas(self, step) end
    if what.validates then
      validate_and_tell(self, step)
      local is_best = best.judge(self, step)
      what = due_after(self, step)
      what.saves = what.saves or is_best and save and save.best
    end
    if what.samples then with_averages(self, sample) end
    if what.saves then
      if self.early then judge_all(self) end
      folder.save(self, step + 1)
    end
  end)
end

local function run_step(self, step)
  local o = self.o
  self.step = step
  if o.before_step then o.before_step(step) end
  local lr = o.optimizer.lr and o.optimizer:lr()
  local before = step == self.start and core.info().attention
  local loss, weight = forward_backward(self)
  if before then tell_of_refusals(before) end
  if o.after_backward then o.after_backward(step) end
  local norm, finite, bad, parameters = update(self, loss)
  local meta = getmetatable(o.model)
  local stats = (meta.ddp or meta.fsdp) and o.model:stats()
  -- What the model's stream waited for: reductions, and gathers of a sharded model.
  local waited = stats and stats.exposed_ms + (stats.exposed_gather_ms or 0)
  self.report:step { loss = loss, grad_norm = norm, lr = lr, exposed_comm_ms = waited or nil }
  if meta.fsdp then
    self.report:add { gather_ms = stats.gather_ms, exposed_gather_ms = stats.exposed_gather_ms }
  end
  if stats and #stats.links > 1 then self.report:add { links = stats.links } end
  if finite then
    self.unjudged[#self.unjudged + 1] = {
      step = step, finite = core.probe(finite), bad = core.probe(bad), parameters = parameters,
      weight = weight and core.probe(weight),
    }
    -- Judged two steps later, so that the host never waits for a step that it has just enqueued.
    if #self.unjudged > 2 then judge(self, table.remove(self.unjudged, 1)) end
  end
  local method = ownership.methods[o.model]
  if method then method.after_step(step, o.optimizer) end
  if self.ema then self.ema:step() end
  if o.after_step then o.after_step(step) end
  length.after(self, step)
  after(self, step)
end

-- How the user goes on with a run that has a checkpoint; "" where the recipe's options or its
-- launcher are not known.
local function how_to_go_on(self)
  local process, resumes = launch.process, false
  for _, item in ipairs(launch.settings or {}) do resumes = resumes or item.name == "resume" end
  if not resumes or not process or process.hosts or not launch.recipe then return "" end
  return "\ngo on with: "
    .. own_command.resume(launch.recipe, launch.arguments, self.run, false)
end

-- Ends a run that was requested to stop, with an exit code of its own. The code of the recipe after
-- ms.train does not run.
local function stop(self, last, signal)
  self.report:close()
  if self.o.save and last >= self.start and self.saved ~= last + 1 then
    folder.save(self, last + 1)
  end
  local committed = folder.close(self)
  -- If this run saved nothing since it was resumed, the checkpoint that it loaded is still valid.
  if committed or not self.saved and self.start > 0 then
    launch.exit(75,
      ("stopped on request after step %d; a checkpoint is saved in %s%s"):format(last, self.run,
        how_to_go_on(self)))
  end
  launch.exit(128 + signal,
    ("stopped on request after step %d; no checkpoint is saved"):format(last))
end

-- How many ranks have batches of their own: those that reduce gradients together. Where all ranks
-- have parts of one model, one.
local function count_data_ranks(o)
  local meta, world = getmetatable(o.model), core.world()
  local s = meta.ddp or meta.fsdp
  if s then return s.group:size() end
  local parts = 1
  for _, axis in ipairs(parts_of.axes(o.model:parameters())) do parts = parts * axis:size() end
  return parts == world:size() and 1 or world:size()
end

-- On several ranks: raises for a trained parameter whose gradient is not reduced, unless the script
-- has declared it as each rank's own.
local function refuse_unreduced(model)
  local meta, own = getmetatable(model), {}
  local s = meta.ddp or meta.fsdp
  for _, p in ipairs(s and s.left_out or {}) do own[p] = true end           -- it is `ignored`
  local merge_of = alone.merge_of
  for _, item in ipairs(model:named_parameters()) do
    local p = item.parameter
    local by = ownership.reduced[p]
    if p:requires_grad() and not ownership.sharded[p] and not (by and by.reducer) and not own[p]
        and not merge_of(p) then
      core.raise(("train: nothing reduces the gradient of '%s' over the %d ranks, so each would \z
        train a model of its own: wrap the model with ms.ddp or ms.fsdp. If the ranks' models are \z
        to differ, ms.nn.alone(module, { merge = ... }) declares it; if the recipe averages by \z
        itself, by_hand = true"):format(item.name, core.world():size()))
    end
  end
end

-- Raises if the optimizer has nothing of the model, and tells what it leaves out.
local function check_optimizer(o)
  local has, left, some = {}, {}, false
  for _, group in ipairs(o.optimizer:groups()) do
    for _, p in ipairs(group.params) do has[p] = true end
  end
  local own_of = step_owners.own_of -- of optim.in_backward
  for _, item in ipairs(o.model:named_parameters()) do
    local p = item.parameter
    if has[p] then some = true
    elseif p:requires_grad() and not own_of[p] then left[#left + 1] = item.name end
  end
  if not some and #left > 0 then
    core.raise("train: the optimizer has none of the model's parameters: make it of this model, \z
      after the model was converted")
  elseif #left > 0 then
    log.log("optimizer  it leaves out %d trained parameter%s ('%s' first)", #left,
      #left > 1 and "s" or "", left[1])
  end
end

-- Before watched files are read again: a checkpoint, so that an error in one of them loses nothing.
local function save_before_reload(self, step)
  if not self.o.save or step == self.start or self.saved == step then return end
  self.report:outside(function()
    if self.early then judge_all(self) end
    folder.save(self, step)
  end)
end

-- Decides what the checkpoint has a say in. chosen: what its run had chosen; nil: there is none.
local function settle(self, chosen)
  local o = self.o
  self.chosen, self.best = chosen, chosen and chosen.best
  o.dtype, self.dtype_why = dtypes.settle(self.dtype_asked, chosen and chosen.dtype)
  if self.early then settings.check_early(o, self.early) end
  self.scaler = o.dtype == "f16" and optim.scaler() or nil
end

-- The best validation, with the path of its checkpoint where there is one.
local function best_of(self)
  local known, save = self.best, self.o.save
  if not known or known.step == 0 then return nil end
  local path = ("%s/step-%08d"):format(self.run, known.step)
  if save and save.best then
    log.log("best validation loss %.4f, after %d steps: %s", known.loss, known.step, path)
  end
  return { loss = known.loss, step = known.step, path = save and save.best and path or nil }
end

---@param options ms.TrainOptions
---@return ms.TrainResult
function train.train(options)
  local o = settings.check(options)
  local before_quiet = launch.quiet
  launch.quiet = before_quiet or o.quiet or false
  -- However it ends: a script may go on after an error.
  local scope <close> = setmetatable({}, { -- luacheck: ignore scope
    __close = function() launch.quiet, steps.before_reload = before_quiet, nil end,
  })
  local self = {
    o = o, skips = 0, unjudged = {}, numbers = {}, parameters = o.model:parameters(),
    world = core.world(), data_ranks = count_data_ranks(o), dtype_asked = o.dtype, settle = settle,
  }
  if self.data_ranks > 1 and not o.by_hand then refuse_unreduced(o.model) end
  check_optimizer(o)
  self.next_batch = type(o.data) == "function" and o.data or function() return o.data:next() end
  o.model:train()
  if o.pipeline then stages.mode(o, true) end
  self.early = overlap.early(self.parameters)
  if self.early then settings.check_early(o, self.early) end
  for _, p in ipairs(self.parameters) do self.pieces = self.pieces or module.is_cut(p) end
  self.ema = o.ema and optim.ema(o.model, o.ema) or nil
  folder.open(self)
  settings.show(self, length.begin(self))
  self.report = report.report({
    run = self.run or false, total = o.steps, every = o.log_every,
    dtype = o.dtype == "f32" and "f32" or "bf16",
    tensorboard = o.log and o.log.tensorboard or launch.tensorboard,
  }, self.lock)
  local last = self.start - 1
  steps.before_reload = function(step) save_before_reload(self, step) end
  local before = o.attention == "fast" and (core.info().attention or {})
  for step in steps.loop(function() return o.steps end, self.start, o.graph) do
    run_step(self, step)
    if before and step == self.start then tell_of_attention(before) end
    last = step
  end
  judge_all(self)
  local signal = last + 1 < (o.steps or math.huge) and launch.cut
  if signal then stop(self, last, signal) end
  if self.start >= o.steps then
    log.log("all %d steps were done already", o.steps)
    if o.valid and o.eval then self.valid = with_averages(self, validate) end
  end
  if last >= self.start and self.saved ~= last + 1 then check_replicas(self, last) end
  tell_of_memory()
  note_parts(self)
  self.report:close()
  folder.close(self)
  local final = self.report.last and self.report.last.values or {}
  return {
    step = last, loss = final.loss, valid = self.valid, tokens_per_second = final.tok_s,
    run = self.run, lost_save = self.lost, best = best_of(self), ema = self.ema,
  }
end

return train
