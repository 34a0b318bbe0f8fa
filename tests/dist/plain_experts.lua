-- The model of recipes/parallel/experts.lua, of plain modules: every expert computes every token,
-- and masks choose. Scripts of this folder load it with dofile, and call the function that it
-- returns.
local ms = require "moonshard"
local nn = ms.nn

-- cfg: options of the recipe, and `ranks`, which says how the batch is cut for the recipe's ranks,
-- each of which has a capacity of its own.
return function(cfg)
  local WIDTH <const> = cfg.model.width

  local Layer = nn.class "Layer"
  function Layer:init()
    self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
    self.attention = nn.Attention { width = WIDTH, heads = cfg.model.heads, rotary = true }
    self.mlp = nn.List {}
    self.mlp.router, self.mlp.experts = nn.Linear(WIDTH, cfg.experts, { bias = false }), nn.List {}
    for i = 1, cfg.experts do self.mlp.experts[i] = nn.MLP(WIDTH, cfg.model.hidden) end
  end

  -- [tokens of one rank, experts]: the gate of each expert, 0 where it was not chosen or is full.
  local function gates_of(chances)
    local count, all = chances:size(1), ms.zeros { chances:size(1), cfg.experts }
    local rest, taken, sum, gates = chances:detach(), {}, 0, {}
    for c = 1, cfg.top do
      local hot = rest:argmax(2):one_hot(cfg.experts):to "f32"
      rest = rest - 2 * hot
      taken[c], gates[c] = hot, chances * hot
      sum = sum + gates[c]:sum(2, true)
    end
    local full = math.ceil(cfg.capacity * cfg.top * count / cfg.experts)
    local before = ms.zeros { cfg.experts }
    for c = 1, cfg.top do
      local place = taken[c]:cumsum(1) + before
      local fits = cfg.capacity == 0 and taken[c] or taken[c] * place:le(full):to "f32"
      before = before + taken[c]:sum(1)
      all = all + (cfg.top > 1 and gates[c] / sum or gates[c]) * fits
    end
    return all, before
  end

  function Layer:forward(x)
    x = x + self.attention(self.norm_1(x))
    local tokens = self.norm_2(x):reshape(-1, WIDTH)
    local chances = tokens:linear(self.mlp.router.weight):softmax()
    local gates, chosen = {}, 0
    for i, own in ipairs(chances:chunk(cfg.ranks, 1)) do
      local before
      gates[i], before = gates_of(own)
      chosen = chosen + before
    end
    gates = ms.cat(gates, 1)
    local y = 0
    for i = 1, cfg.experts do
      y = y + self.mlp.experts[i](tokens) * gates:narrow(2, i, 1)
    end
    local share = chosen / (tokens:size(1) * cfg.top)
    return x + y:view(table.unpack(x:shape())), (share * chances:mean(1)):sum() * cfg.experts
  end

  local Net = nn.class "Net"
  function Net:init()
    self.table, self.blocks = nn.Embedding(256, WIDTH), nn.List { Layer(), Layer() }
    self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, { bias = false })
  end
  function Net:forward(tokens, targets)
    local x, one = self.blocks[1](self.table(tokens))
    local y, two = self.blocks[2](x)
    return self.head(self.norm(y)):cross_entropy(targets), one + two
  end
  return Net()
end
