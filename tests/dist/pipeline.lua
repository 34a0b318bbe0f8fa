-- Run by every rank of pipeline_spec.lua: a model in chunks, by each schedule, against the same
-- model on one rank with the whole batch: plain modules and a plain loop.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local cfg = ms.config {
  what = "train", schedule = "1f1b", each = 1, microbatches = 4, tables = 12,
  wrap = "none", stages = 0, folder = "",
}
local nn, world, rank = ms.nn, ms.world(), ms.rank()
local WIDTH <const>, VOCAB <const>, ROWS <const>, TIME <const> = 6, 11, 2, 5
-- The ranks of a pipeline follow each other; ranks of one stage have other data.
local stage, data = world:levels(cfg.stages > 0 and cfg.stages or world:size())
local chunks_in_all = stage:size() * cfg.each

-- Takes and gives a stream and a change of it, as blocks of GPT-2 do.
local Block = nn.class "Block"
function Block:init()
  self.norm = nn.LayerNorm(WIDTH)
  self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
end
function Block:forward(stream, change)
  if change then stream = stream + change end
  return stream, self.down(self.up(self.norm(stream)):gelu())
end

-- The part of a model that a chunk is; the first one has the table, the last one the head.
local Chunk = nn.class "Chunk"
function Chunk:init(index)
  if index == 0 then self.table = nn.Embedding(VOCAB, WIDTH) end
  self.block = Block()
  if index == chunks_in_all - 1 then self.head = nn.Linear(WIDTH, VOCAB) end
end
function Chunk:forward(x, change)
  if self.table then x = self.table(x) end
  local stream
  stream, change = self.block(x, change)
  if self.head then return self.head(stream + change) end
  return stream, change
end

local function chunks_of_model()
  ms.seed(3)
  local list = {}
  for i = 0, chunks_in_all - 1 do list[i] = Chunk(i) end
  return list
end

local function reference(list, x)
  local change
  for i = 0, chunks_in_all - 1 do x, change = list[i](x, change) end
  return x
end

-- Different numbers of targets that count in each microbatch, and on each data rank.
local function batch(step, number)
  local seed = 50 + 7 * step + (number or data:rank())
  local x = ms.randint { ROWS * cfg.microbatches, TIME, high = VOCAB, seed = seed }
  local y = ms.randint { ROWS * cfg.microbatches, TIME, high = VOCAB, seed = seed + 1000 }
  return x, ms.where(x:eq(1), -100, y)
end

-- The batches of all data ranks.
local function whole_batch(step)
  local xs, ys = {}, {}
  for d = 1, data:size() do xs[d], ys[d] = batch(step, d - 1) end
  return ms.cat(xs, 1), ms.cat(ys, 1)
end

-- Numbers of this rank's chunks.
local function own_order()
  local at = stage:rank()
  if cfg.schedule == "zbv" then return { at, chunks_in_all - 1 - at } end
  local order = {}
  for v = 0, cfg.each - 1 do order[v + 1] = v * stage:size() + at end
  return order
end

local function pipe_of(list, options)
  local own, order = {}, own_order()
  for i, chunk in ipairs(order) do
    own[i] = list[chunk]
    if cfg.wrap == "ddp" then own[i] = ms.ddp(own[i], { group = data })
    elseif cfg.wrap == "fsdp" then
      own[i] = ms.fsdp(own[i], { group = data, wrap = { class = "Linear" }, accumulate = "local" })
    end
  end
  options.group, options.data = stage, data
  options.chunks, options.microbatches = own, cfg.microbatches
  options.schedule = options.schedule or cfg.schedule
  return ms.pipeline(options), own, order
end

local what = {}

function what.train()
  local whole, list = chunks_of_model(), chunks_of_model()
  local pipe, own, order = pipe_of(list, {})
  local all = nn.List {}
  for i = 0, chunks_in_all - 1 do all[i + 1] = whole[i] end
  local a = ms.optim.sgd(all, { lr = 0.3 })
  local b = {}
  for i, chunk in ipairs(own) do b[i] = ms.optim.sgd(chunk, { lr = 0.3 }) end
  for step in ms.steps(3) do
    local x, y = batch(step)
    local all_x, all_y = whole_batch(step)
    local loss = reference(whole, all_x):cross_entropy(all_y)
    loss:backward()
    local before = ms.no_grad(function() return pipe:eval(x, y) end)
    local got = pipe:step(x, y)
    assert(math.abs(got:item() / loss:item() - 1) < 1e-6, ("%.9g %.9g"):format(got:item(),
      loss:item()))
    assert(math.abs(before:item() / loss:item() - 1) < 1e-6)
    for i, chunk in ipairs(cfg.wrap ~= "fsdp" and own or {}) do
      local names = whole[order[i]]:named_parameters()
      for k, item in ipairs(chunk:named_parameters()) do
        local mine, other = item.parameter:grad(), names[k].parameter:grad()
        local far = (mine - other):norm():item() / (other:norm():item() + 1e-12)
        assert(far < 2e-6, ("step %d, chunk %d, %s: %g"):format(step, order[i], item.name, far))
      end
    end
    a:step()
    for _, optimizer in ipairs(b) do optimizer:step() end
  end
  for i, chunk in ipairs(own) do
    local state, other = chunk:state(), whole[order[i]]:state { live = true }
    for name, t in pairs(state) do
      local far = (t - other[name]):norm():item() / (other[name]:norm():item() + 1e-12)
      assert(far < 2e-6, ("chunk %d, %s: %g"):format(order[i], name, far))
    end
  end
end

-- A module that has some chunks, by their numbers in the whole model.
local Parts = nn.class "Parts"
function Parts:init(list, order)
  for _, number in ipairs(order) do self["chunk" .. number] = list[number] end
end

local function adamw(model) return ms.optim.adamw(model, { lr = 0.01 }) end

-- A module above wrapped chunks: norms, states, files and checkpoints are those of one model.
local function parts_of_pipe()
  local list = chunks_of_model()
  local model = nn.owned(Parts(list, own_order()), stage)
  return model, (pipe_of(list, {})), adamw(model)
end

local function momenta(optimizer)
  local found = {}
  for name, state in pairs(optimizer:state().parameters or {}) do
    found[name .. "/exp_avg"], found[name .. "/exp_avg_sq"] = state.exp_avg, state.exp_avg_sq
  end
  return found
end

local function load(things)
  assert(ms.checkpoint.load(ms.checkpoint.latest(cfg.folder .. "/saved"), things))
end

local function steps(from, to, model, pipe, optimizer)
  local norms = {}
  for step = from, to do
    pipe:step(batch(step))
    norms[#norms + 1] = model:clip_grad_norm(0.5):item()
    optimizer:step()
    optimizer:zero_grad()
  end
  return norms
end

local function forget(model)
  for _, p in ipairs(model:parameters()) do ms.no_grad(function() p:zero_() end) end
end

function what.saved()
  local numbers = {}
  for i = 0, chunks_in_all - 1 do numbers[i + 1] = i end
  local list = chunks_of_model()
  local whole = Parts(list, numbers)
  local its = adamw(whole)
  local model, pipe, optimizer = parts_of_pipe()
  for step, norm in ipairs(steps(1, 3, model, pipe, optimizer)) do
    local x, y = whole_batch(step)
    reference(list, x):cross_entropy(y):backward()
    local own = whole:clip_grad_norm(0.5):item()
    assert(math.abs(norm / own - 1) < 2e-6, ("step %d: norm %.9g, %.9g"):format(step, norm, own))
    its:step()
    its:zero_grad()
  end
  local state, count = model:state(), 0
  for name, t in pairs(state) do
    local other = whole:state { live = true }[name]
    -- Adam divides by roots: rounding of small gradients counts.
    local far = (t - other):norm():item() / (other:norm():item() + 1e-12)
    assert(far < 1e-4, ("%s: %g"):format(name, far))
    count = count + 1
  end
  assert(count == (rank == 0 and #whole:parameters() or 0))
  assert(model:save(cfg.folder .. "/model.safetensors"))
  local of_optimizer = momenta(optimizer)
  if rank == 0 then
    assert(ms.safetensors.save(cfg.folder .. "/momenta.safetensors", of_optimizer))
  end
  assert(ms.checkpoint.save(cfg.folder .. "/saved", { model = model, optimizer = optimizer }))
  ms.checkpoint.wait()
  local norms = steps(4, 5, model, pipe, optimizer)
  local later = model:state { kind = "sharded" }
  -- Another model of the same ranks, from the checkpoint.
  model, pipe, optimizer = parts_of_pipe()
  forget(model)
  load { model = model, optimizer = optimizer }
  for i, norm in ipairs(steps(4, 5, model, pipe, optimizer)) do assert(norm == norms[i]) end
  for name, one in pairs(model:state { kind = "sharded" }) do
    assert(one.tensor:eq(later[name].tensor):all():item(), name)
  end
  -- And from the file, by rank 0 alone.
  local loss, after = pipe:eval(batch(1)):item(), nil
  for _, again in ipairs {
    function() assert(model:load(cfg.folder .. "/model.safetensors")) end,
    function() model:load_state(state) end,
  } do
    forget(model)
    again()
    local loaded = model:state()
    if rank == 0 then expect.same(loaded, state) end
    -- Sharded chunks gather the new values.
    local own = pipe:eval(batch(1)):item()
    assert(own ~= loss and own == (after or own), own)
    after = own
  end
end

-- What a sharded chunk keeps and a module above it does not have, so that nothing is left out.
function what.unsaved()
  local function model_of(options)
    local list = chunks_of_model()
    local chunk = list[stage:rank()]
    chunk:add_buffer("scale", ms.ones { 3 })
    local model = nn.owned(Parts(list, own_order()), stage)
    options.group = data
    return model, ms.fsdp(chunk, options)
  end
  local function keep(shard, _, part)
    part.state:flat "sum":add_(shard)
    return shard
  end
  for text, options in ms.sorted_pairs {
    ["before_gather keeps a state"] = { before_gather = keep },
    ["buffers of another dtype"] = { precision = { buffer = "bf16" } },
  } do
    local model, sharded = model_of(options)
    if stage:rank() == 0 then sharded((batch(1)))
    else sharded(ms.ones { 2, 3, WIDTH }, ms.ones { 2, 3, WIDTH }) end
    expect.fails(function() model:state() end, text, "call what ms.fsdp returned")
    expect.fails(function() model:save(cfg.folder .. "/model") end, text)
  end
  -- Other precisions keep nothing.
  local model = model_of { precision = { param = "bf16" } }
  local state = model:state()
  if rank == 0 then assert(state["chunk1.scale"]:dtype() == "f32") end
end

-- What another job of the same chunks has saved.
function what.loaded()
  local model, _, optimizer = parts_of_pipe()
  load { model = model, optimizer = optimizer }
  local state, of_optimizer = model:state(), momenta(optimizer)
  if rank == 0 then
    expect.same(state, assert(ms.safetensors.load(cfg.folder .. "/model.safetensors")))
    expect.same(of_optimizer, assert(ms.safetensors.load(cfg.folder .. "/momenta.safetensors")))
  end
end

-- Bits do not depend on the schedule.
function what.same()
  local function gradients(schedule)
    local list = chunks_of_model()
    local pipe, own = pipe_of(list, { schedule = schedule })
    local x, y = batch(1)
    local loss = pipe:step(x, y)
    local found = { loss = loss }
    for i, chunk in ipairs(own) do
      for _, item in ipairs(chunk:named_parameters()) do
        found[i .. item.name] = item.parameter:grad():clone()
      end
    end
    return found
  end
  local first = gradients "gpipe"
  for _, other in ipairs { "1f1b", "zb_h1" } do
    expect.same(gradients(other), first, other)
  end
end

function what.memory()
  local list = chunks_of_model()
  local pipe = pipe_of(list, { max_live = stage:size() })
  for r, live in ipairs(pipe.played.live) do assert(live == math.min(stage:size() - r + 1,
    cfg.microbatches)) end
  expect.fails(function() pipe_of(list, { schedule = "gpipe", max_live = 1 }) end,
    "gpipe: rank 0 holds", "max_live is 1")
end

function what.refused()
  local list = chunks_of_model()
  local function plan(lists, placement)
    return function(view)
      local spread = {}
      for r = 1, view.ranks do spread[r] = { r - 1 } end
      return { placement = placement or spread, actions = lists }
    end
  end
  local function fails(lists, ...)
    local parts = { ... }
    expect.fails(function() pipe_of(list, { schedule = plan(lists) }) end, "pipeline: ",
      table.unpack(parts))
  end
  cfg.microbatches = 1
  local function two() return { { "0F0", "0B0" }, { "1F0", "1B0" } } end
  local function changed(r, i, text)
    local lists = two()
    lists[r][i] = text
    return lists
  end
  fails(changed(1, 1, "0F1"), "rank 0: '0F1': there are microbatches 0 to 0", "pipeline.lua:")
  fails(changed(2, 1, "2F0"), "rank 1: '2F0': there are chunks 0 to 1")
  fails(changed(2, 1, "0F0"), "rank 1: '0F0': chunk 0 is on rank 0")
  fails(changed(1, 2, "0F0"), "rank 0: '0F0' comes twice")
  fails(changed(1, 2, "0X0"), "rank 0: '0X0' is no action")
  fails({ { "0F0", "0B0" }, { "1F0" } }, "rank 1: '1B0' is missing")
  fails({ { "0F0", "0B0" }, { "1F0", "1I0" } }, "rank 1: '1W0' is missing")
  fails({ { "0F0", "0B0" }, { "1F0", "1B0", "1W0" } }, "'1B0' and '1W0': B is I and W in one")
  fails({ { "0B0", "0F0" }, { "1F0", "1B0" } }, "the ranks wait for each other",
    "rank 0 waits at '0B0' for '0F0' of rank 0")
  fails({ { "0F0", "0B0" } }, "actions has a list for each of the 2 ranks")
  expect.fails(function() pipe_of(list, { schedule = plan(two(), { { 0 }, { 0 } }) }) end,
    "rank 1: placement: chunk 0 is on rank 0, too")
  expect.fails(function() pipe_of(list, { schedule = plan(two(), { { 0 }, {} }) }) end,
    "placement leaves out chunk 1")
  expect.fails(function() pipe_of(list, { schedule = "1f1" }) end, "there is no schedule '1f1'",
    "1f1b")
  cfg.microbatches = 2
  fails({ { "0F0", "0F1", "0B1", "0B0" }, { "1F0", "1F1", "1B0", "1B1" } },
    "rank 0: '0B1' comes before the gradients of microbatch 0")
  cfg.microbatches = 3
  local pipe = pipe_of(list, {})
  local x = ms.randint { 4, TIME, high = VOCAB }
  if stage:rank() == 0 or stage:rank() == stage:size() - 1 then
    expect.fails(function() pipe:step(x, x) end, "3 microbatches do not divide the 4 rows")
  end
  expect.fails(function() pipe_of(list, { passes = { { 2, 3 } } }) end,
    "passes[1] is a shape with a dtype")
  expect.fails(function() pipe_of(list, { passes = {} }) end, "passes has 1 to 4 tensors")
  cfg.microbatches = 2
  local other = pipe_of(list, { passes = { { dtype = "f16", 1, 1 } } })     -- the run knows better
  assert(other:step(batch(1)):item() > 0)
  expect.fails(function() ms.pipeline { chunks = nn.GELU(), microbatches = 1 } end,
    "chunk 1 of rank", "has no parameter")
end

-- Tables that are made by chance, but valid: all give the bits of gpipe.
function what.random()
  local ranks, state = stage:size(), 7919 * stage:size()
  local function draw(n)
    state = (state * 6364136223846793005 + 1442695040888963407) & math.maxinteger
    return (state >> 20) % n + 1
  end
  local function table_of(view)
    local lists, done, placement = {}, {}, {}
    for r = 1, ranks do lists[r], placement[r] = {}, { r - 1 } end
    local next_of, left = {}, 0
    for c = 0, ranks - 1 do
      next_of[c] = { F = 0, B = 0 }
      left = left + 2 * view.microbatches
    end
    while left > 0 do
      local c = draw(ranks) - 1
      local kind = draw(2) == 1 and "F" or "B"
      local i = next_of[c][kind]
      local function ready(chunk, k) return done[chunk .. k .. i] end
      local ok = i < view.microbatches and (kind == "F" and (c == 0 or ready(c - 1, "F"))
        or kind == "B" and ready(c, "F") and (c == ranks - 1 or ready(c + 1, "B")))
      if ok then
        local text = c .. kind .. i
        done[text], next_of[c][kind], left = true, i + 1, left - 1
        table.insert(lists[c + 1], text)
      end
    end
    return { placement = placement, actions = lists }
  end
  local list = chunks_of_model()
  local x, y = batch(2)
  local function gradients(schedule)
    local pipe, own = pipe_of(list, { schedule = schedule })
    local found = { loss = pipe:step(x, y):clone() }
    for _, item in ipairs(own[1]:named_parameters()) do
      found[item.name] = item.parameter:grad():clone()
      item.parameter:set_grad(nil)
    end
    return found
  end
  local first = gradients "gpipe"
  for number = 1, cfg.tables do expect.same(gradients(table_of), first, "table " .. number) end
end

-- The view's numbers in a text, in order.
local function numbers_of(view)
  local words = {}
  for chunk = 0, view.chunks - 1 do
    for _, kind in ipairs { "F", "B", "I", "W" } do
      words[#words + 1] = ("%.17g"):format(view.times[chunk][kind])
    end
    words[#words + 1] = ("%d %d"):format(view.bytes[chunk].input, view.bytes[chunk].kept)
  end
  return table.concat(words, " ")
end

-- Asked again with times, a schedule answers by them: the bits are those of gpipe.
function what.measured()
  local schedules = require "moonshard.parallel.pipeline.schedules"
  local views, names = {}, { "1f1b", "zb_h1", "gpipe" }
  local changing = ms.schedule { name = "changing", every = 2, plan = function(view)
    views[#views + 1] = view
    if not view.times then return schedules.gpipe(view) end
    local number = math.floor(view.times[0].F * 1e6) + #views
    return schedules[names[number % 3 + 1]](view)
  end }
  local one, other = chunks_of_model(), chunks_of_model()
  local a, own_a = pipe_of(one, { schedule = "gpipe" })
  local b, own_b = pipe_of(other, { schedule = changing })
  local function optimizers(own)
    local list = {}
    for i, chunk in ipairs(own) do list[i] = ms.optim.sgd(chunk, { lr = 0.3 }) end
    return list
  end
  local of = { [own_a] = optimizers(own_a), [own_b] = optimizers(own_b) }
  local function train(pipe, own, step)
    local loss = pipe:step(batch(step))
    local found = { loss = loss }
    for i, chunk in ipairs(own) do
      for _, item in ipairs(cfg.wrap ~= "fsdp" and chunk:named_parameters() or {}) do
        found[i .. item.name] = item.parameter:grad():clone()
      end
      of[own][i]:step()
    end
    return found
  end
  for step in ms.steps(9) do
    expect.same(train(b, own_b, step), train(a, own_a, step), "step " .. step)
  end
  -- Before passes 1, 3, 5, 7 and 9.
  assert(#views == 5, #views)
  assert(views[1].times == nil and views[1].bytes == nil)
  for i = 2, 5 do
    for chunk = 0, chunks_in_all - 1 do
      local times, bytes = views[i].times[chunk], views[i].bytes[chunk]
      for _, kind in ipairs { "F", "B", "I", "W" } do assert(times[kind] > 0) end
      assert(math.abs(times.B - times.I - times.W) < 1e-9)
      local input = ROWS * TIME * (chunk == 0 and 8 or 2 * 4 * WIDTH)
      assert(bytes.input == input, bytes.input)
      assert(bytes.kept > 0)
    end
    for _, text in ipairs(world:_share_texts(numbers_of(views[i]), "test")) do
      assert(text == numbers_of(views[i]))
    end
  end
  -- Schedules that do not ask are asked once, and their passes are not measured.
  local count = 0
  local pipe = pipe_of(chunks_of_model(), { schedule = function(view)
    count = count + 1
    return schedules.gpipe(view)
  end })
  for step = 1, 4 do
    pipe:step(batch(step))
    assert(pipe.plan.meter == nil)
  end
  assert(count == 1)
end

-- What a schedule must not answer later, and what one rank alone answers.
function what.disagreed()
  local schedules = require "moonshard.parallel.pipeline.schedules"
  local function asked_again(answer)
    return ms.schedule { name = "later", every = 1, plan = function(view)
      return view.times and answer(view) or schedules["1f1b"](view)
    end }
  end
  local function fails_later(answer, ...)
    local pipe = pipe_of(chunks_of_model(), { schedule = asked_again(answer) })
    pipe:step(batch(1))
    pipe:step(batch(2))
    local parts = { ... }
    expect.fails(function() pipe:step(batch(3)) end, table.unpack(parts))
  end
  fails_later(function(view)
    local swapped = { placement = {}, actions = {} }
    for r = 1, view.ranks do
      local chunk = view.ranks - r
      swapped.placement[r], swapped.actions[r] = { chunk }, {}
      for _, kind in ipairs { "F", "B" } do
        for i = 0, view.microbatches - 1 do
          table.insert(swapped.actions[r], ("%d%s%d"):format(chunk, kind, i))
        end
      end
    end
    return swapped
  end, "later (", "rank 1: chunk 0 is on rank 0: placement never changes in a run")
  fails_later(function(view)
    if rank == 1 then error "only here" end
    return schedules.gpipe(view)
  end, "only here")
  fails_later(function(view) return schedules[rank == 1 and "gpipe" or "1f1b"](view) end,
    "rank 0 of the group has a table with the hash", "and rank 1 has")
  fails_later(function() return ms.ones { 2 } end, "a planner uses numbers only")
  expect.fails(function()
    pipe_of(chunks_of_model(), { schedule = function(view)
      return schedules[rank == 1 and "gpipe" or "1f1b"](view)
    end })
  end, "rank 0 of the group has a table with the hash")
end

what[cfg.what]()
print(("rank %d is done"):format(rank))
