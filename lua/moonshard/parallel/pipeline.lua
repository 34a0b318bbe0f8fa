-- Pipelines: `ms.pipeline`. A model is cut into chunks, which ranks have; a batch is cut into
-- microbatches, which go through them. A schedule says in which order each rank does what: it is a
-- planner, whose table is checked, compared over the ranks, and played (pipeline/), and replayed at
-- each step. The sends and receives between ranks are made here.
--
-- Invariants. Every message has its action as a label, so two ranks that disagree about what
-- travels end with a report. Gradients of a chunk are added in the order of microbatches. What a
-- chunk gets is a leaf: a backward ends there, and its gradient is what travels back.
local core = require "moonshard.core"
local launch = require "moonshard.base.launch"
local log = require "moonshard.base.log"
local module = require "moonshard.nn.module"
local options_of = require "moonshard.base.options"
local plans = require "moonshard.parallel.pipeline.plans"
local play = require "moonshard.parallel.pipeline.play"
local weights = require "moonshard.train.weights"
require "moonshard.parallel.group"                -- methods of groups

local pipeline = {}

---@class ms.Pipeline
local Pipeline = {}
Pipeline.__index = Pipeline
Pipeline.__name = "ms.Pipeline"
function Pipeline:__tostring()
  return ("pipeline of %d chunks on %d ranks, %d microbatches, %s"):format(self.table.shape.chunks,
    self.group:size(), self.table.shape.microbatches, self.plan.schedule.name)
end

------------------------------------------------------------------------------------------- making

local CODES <const> = { "f32", "bf16", "f16", "i64", "i32", "u16", "u8", "bool" }
local MOST <const>, DIMS <const> = 4, 8             -- tensors of a message, and their dimensions

-- What chunks pass, as the option says it.
local function check_passes(passes)
  if passes == nil then return nil end
  local specs = {}
  for i, one in ipairs(passes) do
    options_of.argument("pipeline", ("passes[%d]"):format(i), one, "list")
    local known = false
    for _, dtype in ipairs(CODES) do known = known or one.dtype == dtype end
    local shape = {}
    for k, size in ipairs(one) do
      if math.type(size) ~= "integer" or size < 0 then known = false end
      shape[k] = size
    end
    if not known or #shape > DIMS then
      core.raise(("pipeline: passes[%d] is a shape with a dtype: { dtype = \"f32\", 2, 16, 768 }")
        :format(i))
    end
    specs[i] = { dtype = one.dtype, shape = shape }
  end
  if #specs == 0 or #specs > MOST then
    core.raise(("pipeline: passes has 1 to %d tensors"):format(MOST))
  end
  return specs
end

-- Raises unless all ranks of the group say the same.
local function check_same(group, what, text)
  for r, other in ipairs(group:size() > 1 and group:_share_texts(text, "pipeline") or { text }) do
    if other ~= text then
      core.raise(("pipeline: rank %d of the group has %s %s, and rank %d has %s"):format(r - 1,
        what, other, group:rank(), text), 5)
    end
  end
end

-- The table of forwards alone, in the order of microbatches.
local function forwards_of(t)
  local only = { shape = t.shape, rank_of = t.rank_of, where = t.where, lists = {}, by_text = {} }
  for r, list in ipairs(t.lists) do
    only.lists[r] = {}
    for _, action in ipairs(list) do
      if action.kind == "F" then
        table.insert(only.lists[r], action)
        only.by_text[action.text] = action
      end
    end
    table.sort(only.lists[r], function(a, b)
      if a.micro ~= b.micro then return a.micro < b.micro end
      return a.chunk < b.chunk
    end)
  end
  return only
end

---@param options ms.PipelineOptions
---@return ms.Pipeline
function pipeline.pipeline(options)
  local o = options_of.check("pipeline", options, {
    chunks = "module|list", group = "group", schedule = "any",
    microbatches = "integer", loss = "function", data = "group", max_live = "integer",
    passes = "list",
  })
  local chunks = module.is_module(o.chunks) and { o.chunks } or o.chunks
  if type(chunks) ~= "table" or #chunks == 0 then
    core.raise "pipeline: chunks is a module, or a list of this rank's modules"
  end
  for i, chunk in ipairs(chunks) do
    if not module.is_module(chunk) then
      core.raise(("pipeline: chunk %d is a %s, not a module"):format(i, type(chunk)))
    elseif #chunk:parameters() == 0 then
      core.raise(("pipeline: chunk %d of rank %d has no parameter"):format(i,
        (o.group or core.world()):rank()))
    end
  end
  local group = o.group or core.world()
  if not o.microbatches or o.microbatches < 1 then
    core.raise "pipeline: microbatches is the number of parts of a batch, 1 or more"
  end
  check_same(group, "so many chunks, microbatches:", ("%d, %d"):format(#chunks, o.microbatches))
  local schedule = plans.find(o.schedule == nil and "1f1b" or o.schedule)
  local plan = plans.begin {
    schedule = schedule, group = group, data = o.data, own = #chunks, max_live = o.max_live,
    shape = {
      ranks = group:size(), chunks = #chunks * group:size(), microbatches = o.microbatches,
    },
  }
  local t, played = plan.table, plan.played
  -- NCCL begins in a group with a call of all its members, which a message is not.
  if group:size() > 1 then group:barrier() end
  local passes = check_passes(o.passes)
  if launch.sharded then table.insert(launch.sharded, { shards = group, replicas = o.data }) end
  if launch.checking and group:rank() == 0 then
    table.insert(launch.assumptions, play.show(t, played)
      .. (schedule.every and "\na run asks this schedule again, with measured times" or ""))
  end
  -- Modules in the order of their chunks.
  local own, rank, at = {}, group:rank(), 0
  for chunk = 0, t.shape.chunks - 1 do
    if t.rank_of[chunk] == rank then
      at = at + 1
      own[chunk] = chunks[at]
    end
  end
  return setmetatable({
    chunks = own, group = group, data = o.data, loss = o.loss, plan = plan, table = t,
    played = played, forwards = play.run(forwards_of(t)).steps[rank + 1],
    steps = played.steps[rank + 1], specs = {}, passes = passes,
  }, Pipeline)
end

------------------------------------------------------------------------------------------ messages

-- The dtypes and shapes of a list of tensors as numbers of a fixed length, and back.
local function write_spec(list)
  local numbers = { #list }
  for i = 1, MOST do
    local t = list[i]
    local code = 0
    for k, dtype in ipairs(CODES) do if t and t:dtype() == dtype then code = k end end
    local shape = t and t:shape() or {}
    table.move({ code, #shape }, 1, 2, #numbers + 1, numbers)
    for d = 1, DIMS do numbers[#numbers + 1] = shape[d] or 0 end
  end
  return numbers
end

local function read_spec(numbers)
  local list = {}
  for i = 1, math.tointeger(numbers[1]) do
    local at = 1 + (i - 1) * (2 + DIMS)
    local shape = {}
    for d = 1, math.tointeger(numbers[at + 2]) do
      shape[d] = math.tointeger(numbers[at + 2 + d])
    end
    list[i] = { dtype = CODES[math.tointeger(numbers[at + 1])], shape = shape }
  end
  return list
end

local function empty_like(spec)
  return core.empty { dtype = spec.dtype, table.unpack(spec.shape) }
end

local function describe(list)
  local words = {}
  for i, one in ipairs(list) do
    words[i] = ("%s [%s]"):format(one.dtype, table.concat(one.shape, ", "))
  end
  return table.concat(words, ", ")
end

-- As the option passes takes them.
local function as_option(list)
  local words = {}
  for i, one in ipairs(list) do
    words[i] = ('{ dtype = "%s", %s }'):format(one.dtype, table.concat(one.shape, ", "))
  end
  return ("passes = { %s }"):format(table.concat(words, ", "))
end

local function specs_of(list)
  local specs = {}
  for i, t in ipairs(list) do specs[i] = { dtype = t:dtype(), shape = t:shape() } end
  return specs
end

-- Notes what goes into a chunk; raises if it is not what it was before.
local function check_spec(self, chunk, list, what)
  local now, before = describe(specs_of(list)), self.specs[chunk]
  if before and describe(before) ~= now then
    core.raise(("pipeline: %s: %s goes into chunk %d, and %s did before: shapes and dtypes stay")
      :format(what, now, chunk, describe(before)))
  end
end

-- What the chunks of nn.cut pass for a microbatch, by the sizes of the batch that this rank has.
local function derived(self, run, chunk)
  local passes_of = self.chunks[chunk]._passes
  for _, t in ipairs { run.x or false, run.y or false, run.positions or false } do
    if passes_of and core.is_tensor(t) and t:dim() == 2 then
      return passes_of(self.chunks[chunk], t:size(1) // self.table.shape.microbatches, t:size(2))
    end
  end
end

-- Compares what a chunk gives with the option passes. In a check the ranks after this one have
-- taken the option for true, or what chunks of nn.cut pass, so that what it finds of them is wrong.
local function check_option(self, run, chunk, given)
  local said = self.passes or launch.checking and derived(self, run, chunk)
  if not said or describe(said) == describe(given) then return end
  local differ = ("%s, and chunk %d gives %s"):format(describe(said), chunk, describe(given))
  if #said ~= #given then
    differ = ("%d tensor%s, and chunk %d gives %d"):format(#said, #said > 1 and "s" or "", chunk,
      #given)
  end
  local text = ("pipeline: %s %s: give %s"):format(
    self.passes and "passes has" or "without passes a check takes", differ, as_option(given))
  if launch.checking then core.raise(text) end
  log.warn("%s", text)
end

local function send(self, run, message, list)
  local group = self.group
  if not message.is_gradient then
    check_spec(self, message.chunk, list, message.label)
    if not self.specs[message.chunk] then
      if #list > MOST then
        core.raise(("pipeline: %s gives %d tensors, and %d are the most"):format(message.label,
          #list, MOST))
      end
      self.specs[message.chunk] = specs_of(list)
      check_option(self, run, message.chunk - 1, self.specs[message.chunk])
      group:send(core.tensor(write_spec(list), "i64"), message.to,
        { label = message.label .. " shapes" })
    end
  end
  for i, t in ipairs(list) do
    group:send(t:detach(), message.to, { label = ("%s.%d"):format(message.label, i - 1) })
  end
end

-- What goes into a chunk: the rank before tells it with its first message. Without the other ranks
-- it is what the option passes says, or what chunks of nn.cut pass.
local function receive_spec(self, run, message)
  local group, numbers = self.group, core.zeros { 1 + MOST * (2 + DIMS), dtype = "i64" }
  local others = group:_has_others()
  local said = not others and (self.passes or derived(self, run, message.chunk))
  if not others and not said then
    core.raise(("pipeline: without the other ranks, as in `moonshard check`, nothing tells the \z
      shapes that go into chunk %d: give passes, or run it on all ranks"):format(message.chunk))
  end
  group:recv(numbers, message.from, { label = message.label .. " shapes" }):value()
  return said or read_spec(numbers:to_table())
end

local function receive(self, run, message)
  local group, futures = self.group, {}
  -- Gradients are like what was sent.
  local chunk = message.is_gradient and message.chunk + 1 or message.chunk
  self.specs[chunk] = self.specs[chunk] or receive_spec(self, run, message)
  for i, spec in ipairs(self.specs[chunk]) do
    futures[i] = group:recv(empty_like(spec), message.from,
      { label = ("%s.%d"):format(message.label, i - 1) })
  end
  return futures
end

------------------------------------------------------------------------------------------- actions

-- Part number i, from 0, of a tensor that is cut into microbatches.
local function part_of(what, t, i, count)
  if t == nil then return nil end
  local rows = t:shape()[1]
  if not rows or rows % count ~= 0 then
    core.raise(("pipeline: %d microbatches do not divide the %s rows of %s"):format(count,
      tostring(rows), what))
  end
  return t:narrow(1, i * (rows // count) + 1, rows // count)
end

local function key_of(chunk, micro) return chunk .. " " .. micro end

-- What goes into a chunk: parts of the batch, or what has come from the chunk before, as leaves.
local function inputs_of(self, run, action)
  if action.chunk == 0 then
    local x = part_of("x", run.x, action.micro, self.table.shape.microbatches)
    if not x then core.raise "pipeline: step: the rank of chunk 0 needs x" end
    return { x }, {}
  end
  local key, leaves = key_of(action.chunk, action.micro), {}
  for i, got in ipairs(run.inputs[key]) do
    local t = core.is_tensor(got) and got or got:value()
    leaves[i] = t:detach()
    if run.backward and (t:dtype() == "f32" or t:dtype() == "bf16" or t:dtype() == "f16") then
      leaves[i]:requires_grad_()
    end
  end
  run.inputs[key] = nil
  return leaves, leaves
end

local function default_loss(logits, y) return logits:cross_entropy(y) end

-- Runs f(...), which computes what an action is about: what it waits for has been enqueued before.
-- Traces show it under the action's name, and a pass that is measured notes its time.
local function compute(run, action, inputs, f, ...)
  local first = core.tracing and core.trace_count()
  if first then core.trace_label(action.text) end
  if run.meter then
    local arguments = table.pack(...)
    plans.measured(run.meter, action, inputs, function()
      f(table.unpack(arguments, 1, arguments.n))
    end)
  else f(...) end
  if first then
    core.trace_label()
    core.trace_range(first, action.text)
  end
end

local function through_chunk(self, run, action, inputs, leaves)
  local count = self.table.shape.microbatches
  local positions = part_of("positions", run.positions, action.micro, count)
  local given = table.move(inputs, 1, #inputs, 1, {})
  if positions then given[#given + 1] = positions end
  local outputs = table.pack(self.chunks[action.chunk](table.unpack(given)))
  if action.chunk == self.table.shape.chunks - 1 then
    local loss = (self.loss or default_loss)(outputs[1],
      part_of("y", run.y, action.micro, count), positions)
    loss = run.weight(action.micro + 1, loss)
    run.total[action.micro + 1] = loss:detach()
    outputs = { loss / count }
  else
    outputs.n = nil
    for i, t in ipairs(outputs) do
      if not core.is_tensor(t) then
        core.raise(("pipeline: result %d of chunk %d is a %s, not a tensor"):format(i, action.chunk,
          type(t)))
      end
    end
    local own = run.outputs[action.text]
    run.outputs[action.text] = own or outputs
    if self.table.rank_of[action.chunk + 1] == self.group:rank() then
      run.inputs[key_of(action.chunk + 1, action.micro)] = outputs
    end
  end
  if run.backward then
    run.live[key_of(action.chunk, action.micro)] = { outputs = outputs, leaves = leaves }
  end
end

local function forward(self, run, action)
  local inputs, leaves = inputs_of(self, run, action)
  compute(run, action, inputs, through_chunk, self, run, action, inputs, leaves)
end

-- Gradients that have come for a chunk's results; nil: it is the last, and has the loss.
local function gradients_of(self, run, action)
  if action.chunk == self.table.shape.chunks - 1 then return nil end
  local list = {}
  for i, got in ipairs(run.gradients[key_of(action.chunk, action.micro)]) do
    list[i] = core.is_tensor(got) and got or got:value()
  end
  run.gradients[key_of(action.chunk, action.micro)] = nil
  return list
end

-- A tensor whose backward is that of all of these, with these gradients.
local function joined(outputs, gradients)
  if #outputs == 1 then return outputs[1], gradients and gradients[1] end
  return core.custom(function() return core.zeros {} end, function()
    return table.unpack(gradients, 1, #outputs)
  end, table.unpack(outputs))
end

-- The gradients of what went into a chunk go to the chunk before.
local function pass_on(self, run, action, leaves)
  if action.chunk == 0 then return end
  local list = {}
  for i, leaf in ipairs(leaves) do
    list[i] = leaf:grad() or core.no_grad(function() return leaf:zeros_like() end)
    leaf:set_grad(nil)
  end
  run.outputs[action.text] = list
  if self.table.rank_of[action.chunk - 1] == self.group:rank() then
    run.gradients[key_of(action.chunk - 1, action.micro)] = list
  end
end

local function whole_or_inputs(self, run, action, live, given)
  local root, gradient = joined(live.outputs, given)
  if action.kind == "B" then
    run.live[key_of(action.chunk, action.micro)] = nil
    root:backward { gradient = gradient }
  elseif #live.leaves > 0 then
    root:backward { gradient = gradient, inputs = live.leaves }
    live.started = true
  end
  live.root, live.gradient = root, gradient
  pass_on(self, run, action, live.leaves)
end

local function of_weights(live)
  live.root:backward(live.started and { rest = true } or { gradient = live.gradient })
end

local function backward(self, run, action)
  local key = key_of(action.chunk, action.micro)
  local live = run.live[key]
  if action.kind == "W" then
    run.live[key] = nil
    compute(run, action, nil, of_weights, live)
  else
    local given = gradients_of(self, run, action)
    compute(run, action, nil, whole_or_inputs, self, run, action, live, given)
  end
end

-- Runs a rank's steps: its actions, and its sides of messages.
local function replay(self, run, steps)
  for _, step in ipairs(steps) do
    local message = step.send or step.recv
    if step.send then
      send(self, run, message, run.outputs[message.label])
      run.outputs[message.label] = nil
    elseif step.recv then
      local key = key_of(message.chunk, message.micro)
      run[message.is_gradient and "gradients" or "inputs"][key] = receive(self, run, message)
    elseif step.action.kind == "F" then forward(self, run, step.action)
    else backward(self, run, step.action) end
  end
end

-- The weights of microbatches, by the targets that count in each.
local function weigh(self, run)
  local count = self.table.shape.microbatches
  if self.table.rank_of[self.table.shape.chunks - 1] ~= self.group:rank() then return end
  if run.y == nil and not self.loss then
    core.raise "pipeline: step: the rank of the last chunk needs y"
  end
  local values = {}
  for i = 1, count do
    values[i] = weights.counted(part_of("y", run.y, i - 1, count)) or 1
  end
  run.weight = weights.of_passes(values, self.data)
end

-- The mean of all ranks' microbatches by their targets, on all ranks.
local function mean_of(self, run)
  local last = self.table.rank_of[self.table.shape.chunks - 1]
  return core.no_grad(function()
    local total = core.zeros {}
    if self.group:rank() == last then
      for _, loss in ipairs(run.total) do total = total + loss:reshape():to "f32" end
      total = total / self.table.shape.microbatches
    end
    if self.group:size() > 1 then total = self.group:broadcast(total:clone(), last):value() end
    if self.data and self.data:size() > 1 then
      total = self.data:all_reduce(total, "avg"):value()
    end
    return total
  end)
end

-- What one call of step or eval has. inputs, outputs, gradients: what waits for an action or a
-- message; live: results of forwards that wait for their backward; total: the losses.
local function begin(self, what, x, y, positions)
  options_of.argument("pipeline:" .. what, "x", x, "tensor?")
  options_of.argument("pipeline:" .. what, "positions", positions, "tensor?")
  local run = {
    x = x, y = y, positions = positions, backward = what == "step", inputs = {}, outputs = {},
    gradients = {}, live = {}, total = {},
  }
  weigh(self, run)
  return run
end

-- Runs f with all chunks of this rank outside of reductions, and then reduces.
local function reduce_after(self, f)
  local list = {}
  for chunk = 0, self.table.shape.chunks - 1 do
    local meta = self.chunks[chunk] and getmetatable(self.chunks[chunk])
    if meta and (meta.ddp or meta.fsdp) then list[#list + 1] = self.chunks[chunk] end
  end
  local function inside(i)
    if not list[i] then return f() end
    return list[i]:no_sync(function() return inside(i + 1) end)
  end
  inside(1)
  for _, chunk in ipairs(list) do chunk:reduce() end
end

---@return string
function Pipeline:show() return play.show(self.table, self.played) end

---@param x? ms.Tensor
---@param y? ms.Tensor
---@param positions? ms.Tensor
---@return ms.Tensor
function Pipeline:step(x, y, positions)
  local run, plan = begin(self, "step", x, y, positions), self.plan
  local meter, is_new = plans.before(plan)
  if is_new then
    self.table, self.played = plan.table, plan.played
    self.steps = plan.played.steps[self.group:rank() + 1]
  end
  run.meter = meter
  reduce_after(self, function() replay(self, run, self.steps) end)
  if meter then plans.after(plan, meter) end
  return mean_of(self, run)
end

---@param x? ms.Tensor
---@param y? ms.Tensor
---@param positions? ms.Tensor
---@return ms.Tensor
function Pipeline:eval(x, y, positions)
  local run = begin(self, "eval", x, y, positions)
  core.no_grad(function() replay(self, run, self.forwards) end)
  return mean_of(self, run)
end

options_of.methods(Pipeline, "a pipeline", function(value)
  return getmetatable(value) == Pipeline
end)

pipeline.schedule = plans.schedule

return pipeline
