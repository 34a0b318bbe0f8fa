-- A GPT on bytes whose MLPs are experts (mixture of experts): a router sends each token to the best
-- one or two of them. The experts are cut over the ranks of a group, and tokens travel to them.
--     ./moonshard run recipes/parallel/experts.lua -n 4 experts=8 data=FILE_OR_FOLDER
--     ./moonshard run recipes/parallel/experts.lua -n 4 experts_over=2 capacity=0 shard=full_shard
local ms = require "moonshard"
local nn, optim, data = ms.nn, ms.optim, ms.data

local cfg = ms.config {
  data     = { "", help = "a text file or a folder; sayings in English unless given" },
  experts  = { 8, help = "of each block" },
  experts_over = { 0, help = "consecutive ranks that have all experts together; 0: all ranks" },
  top      = { 2, help = "experts of a token" },
  capacity = { 1.25, help = "most tokens of an expert, over an even share; 0: none is dropped" },
  balance  = { 0.01, help = "weight of the loss that is least where experts get equally many" },
  shard    = {
    "", choices = { "", "full_shard", "shard_grad_op", "no_shard" },
    help = "by ms.fsdp with this strategy, each expert over the ranks that have it; else ms.ddp",
  },
  steps    = { 300, help = "optimizer steps" },
  batch    = { 16, help = "sequences of a step, over all ranks" },
  length   = { 128, help = "bytes of a sequence" },
  lr       = { 3e-3, help = "peak learning rate" },
  warmup   = { 50, help = "steps until the peak" },
  decay    = { 0.1, help = "weight decay" },
  clip     = { 1.0, help = "global norm of gradients, of the whole model" },
  dtype    = {
    "auto", choices = { "auto", "f32", "bf16", "f16" },
    help = "of matrix products; auto: bf16 where the device multiplies it, else f32",
  },
  resume   = { "never", help = "never, auto, or a checkpoint" },
  run      = { "", help = "folder of the run" },
  every    = {
    eval = { 100, help = "steps between validations; 0: none" },
    save = { 0, help = "steps between checkpoints, of which the last two stay; 0: none" },
  },
  model    = { layers = 4, width = 128, heads = 4, hidden = 256 },
}
local WIDTH <const>, EXPERTS <const>, TOP <const> = cfg.model.width, cfg.experts, cfg.top
local RANKS <const> = cfg.experts_over > 0 and cfg.experts_over or ms.world_size()

local function check(yes, text, ...) if not yes then error(text:format(...), 0) end end
check(ms.world_size() % RANKS == 0, "experts_over = %d does not divide %d ranks", RANKS,
  ms.world_size())
check(EXPERTS % RANKS == 0, "%d ranks do not divide %d experts", RANKS, EXPERTS)
check(TOP >= 1 and TOP <= EXPERTS, "top = %d: a token goes to 1 to %d experts", TOP, EXPERTS)
check(cfg.capacity >= 0, "capacity = %g: 1 is an even share, 0 drops nothing", cfg.capacity)

-- All ranks see other data. Those of `group` have all experts together; `replicas` are the ranks at
-- one place in their groups, which have the same experts.
local group, replicas = ms.world():levels(RANKS)
local EACH <const> = EXPERTS // RANKS
local FIRST <const> = group:rank() * EACH

----------------------------------------------------------------------------------- there, and back

-- Sums of each so many numbers of a list.
local function sums(list, each)
  local found = {}
  for i, number in ipairs(list) do
    local at = (i - 1) // each + 1
    found[at] = (found[at] or 0) + number
  end
  return found
end

-- How many rows go to each expert, and how many come from each rank for each expert of this one.
-- Ranks tell each other: the host waits for the numbers, as messages of this size need them.
local function counted(counts, total)
  local send, receive = {}, {}
  if ms.device() ~= "sim" then
    return counts:to_table(), group:all_to_all(counts):value():to_table()
  end
  -- `moonshard check` has no numbers: it takes even shares.
  for i = 1, EXPERTS do send[i] = i * total // EXPERTS - (i - 1) * total // EXPERTS end
  for i = 1, EXPERTS do receive[i] = send[FIRST + (i - 1) % EACH + 1] end
  return send, receive
end

-- Rows are in order of experts. They go to the ranks that have these, through the experts, and back
-- to where they were. Backward takes the same way, since all_to_all has a gradient.
local function through(experts, rows, send, receive)
  local out, back = sums(send, EACH), sums(receive, EACH)
  local pieces = group:all_to_all(rows, out, back):value():split(receive, 1)
  for i = 1, EACH do
    local own, sizes = {}, {}
    for r = 0, RANKS - 1 do
      own[r + 1], sizes[r + 1] = pieces[r * EACH + i], receive[r * EACH + i]
    end
    own = experts[FIRST + i](ms.cat(own, 1)):split(sizes, 1)
    for r = 0, RANKS - 1 do pieces[r * EACH + i] = own[r + 1] end
  end
  return group:all_to_all(ms.cat(pieces, 1), back, out):value()
end

-- Experts times the sum of (part of all choices) * (mean probability), 1 where all experts get
-- equally many. The parts are those of all ranks, so that the mean over the ranks is the loss of
-- the whole batch. They have no gradient: the probabilities have.
local function balance_of(chances, counts, total)
  local parts = ms.world():all_reduce(counts:to "f32", "avg"):value() / total
  return EXPERTS * (parts * chances:mean(1)):sum()
end

local Experts = nn.class "Experts"
function Experts:init()
  self.router = nn.Linear(WIDTH, EXPERTS, { bias = false })
  self.experts = nn.List {}
  for i = 1, EXPERTS do -- all are made, on "meta", so that each has its values of the whole model
    local one = nn.MLP(WIDTH, cfg.model.hidden)
    if i > FIRST and i <= FIRST + EACH then self.experts[i] = one end
  end
  if cfg.shard == "" then nn.owned(self.experts, group) end -- group_of says it to ms.fsdp
end

function Experts:forward(x)
  local shape = x:shape()
  x = x:reshape(-1, WIDTH)
  local count = x:size(1)
  local chances = self.router(x):softmax()
  local gates, chosen = chances:topk(TOP)
  if TOP > 1 then gates = gates / gates:sum(2, true) end
  -- All choices in order of experts; of one expert, first choices come before second ones.
  local total = TOP * count
  chosen, gates = chosen:t():reshape(-1), gates:t():reshape(-1)
  local counts, _, order = chosen:one_hot(EXPERTS):sum(1), chosen:sort()
  local send, receive, fits
  if cfg.capacity == 0 then send, receive = counted(counts, total)
  else
    -- Each expert gets so many rows of each rank, whoever chose it: no counts travel. What is
    -- beyond is dropped: the token goes on without this expert. Rows that are not used have the
    -- values of some token, and the gate 0.
    local most = math.min(count, math.ceil(cfg.capacity * total / EXPERTS))
    local place = ms.arange(0, most - 1):unsqueeze(1)
    fits = counts:unsqueeze(2):gt(place):reshape(-1)
    place = ((counts:cumsum(1) - counts):unsqueeze(2) + place):minimum(total - 1)
    order, send, receive = order:index_select(1, place:reshape(-1)), {}, {}
    for i = 1, EXPERTS do send[i], receive[i] = most, most end
  end
  local token = ms.arange(0, count - 1):unsqueeze(1):expand(TOP, count):reshape(-1)
    :index_select(1, order)
  local gate = gates:index_select(1, order)
  if fits then gate = ms.where(fits, gate, 0) end
  local y = through(self.experts, x:index_select(1, token), send, receive) * gate:unsqueeze(2)
  local index = token:unsqueeze(2):expand(y:size(1), WIDTH):contiguous()
  y = ms.zeros { count, WIDTH, dtype = y:dtype() }:scatter_add(1, index, y)
  return y:view(table.unpack(shape)), balance_of(chances, counts, total)
end

--------------------------------------------------------------------------------------------- model

local Block = nn.class "Block"
function Block:init()
  self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
  self.attention = nn.Attention { width = WIDTH, heads = cfg.model.heads, rotary = true }
  self.mlp = Experts()
end
function Block:forward(x)
  x = x + self.attention(self.norm_1(x))
  local y, balance = self.mlp(self.norm_2(x))
  return x + y, balance
end

local GPT = nn.class "GPT"
function GPT:init()
  self.table, self.blocks = nn.Embedding(256, WIDTH), nn.List {}
  for i = 1, cfg.model.layers do self.blocks[i] = Block() end
  self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, { bias = false })
end
function GPT:forward(tokens, targets)
  local x, sum = self.table(tokens), 0
  for i = 1, cfg.model.layers do
    local next_x, balance = self.blocks[i](x)
    x, sum = next_x, sum + balance
  end
  local loss = self.head(self.norm(x)):cross_entropy(targets)
  return self:is_training() and loss + cfg.balance * sum or loss
end

-- What all ranks have is averaged over all ranks. The gradients of a rank's experts come from the
-- tokens of its group. They are summed over the replicas and divided by the number of all ranks: by
-- group_of, or where ddp leaves the experts out, after each backward.
local model, reduce_experts = ms.device("meta", function() return GPT() end), nil
if cfg.shard ~= "" then
  model = ms.fsdp(model, {
    strategy = cfg.shard, wrap = { class = "Block" },
    group_of = function(name) return name:find "%.experts%." and replicas or nil end,
  })
else
  model = ms.ddp(model, { ignored = { ".*%.experts%..*" } })
  local own = model:parameters(function(_, name) return name:find "%.experts%." end)
  function reduce_experts()
    local sent, factor = {}, 1 / ms.world_size()
    for i, p in ipairs(own) do
      sent[i] = replicas:all_reduce(p:grad(), { premul_sum = factor })
    end
    ms.all(sent):value()
  end
end
ms.log("ranks that have all experts: %d, such groups: %d", RANKS, replicas:size())

local text = cfg.data ~= "" and assert(data.bytes(cfg.data)) or ms.scripts.default_text()
local train, valid = text:split(0.9)
local result = ms.train {
  model = model, steps = cfg.steps, clip = cfg.clip, dtype = cfg.dtype,
  loss = function(net, x, y) return net(x, y) end,
  after_backward = reduce_experts,
  optimizer = optim.adamw(model, {
    lr = cfg.lr, betas = { 0.9, 0.99 }, weight_decay = cfg.decay,
    schedule = optim.cosine { warmup = cfg.warmup, steps = cfg.steps, floor = 0.05 },
  }),
  data = train:loader { batch = cfg.batch, length = cfg.length, shuffle = true },
  valid = valid:loader { batch = cfg.batch, length = cfg.length },
  eval = { every = cfg.every.eval, batches = 40 },
  save = { every = cfg.every.save, last = 2 },
  resume = cfg.resume, run = cfg.run ~= "" and cfg.run or nil,
}
assert(model:save(result.run .. "/model")) -- all experts, under the names of one model
if result.valid then ms.log("validation loss %.4f nats per byte", result.valid.loss) end
ms.log("the model is in %s/model", result.run)
