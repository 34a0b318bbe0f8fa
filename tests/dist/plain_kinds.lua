-- The model of kinds.lua on one rank, for the whole batch: plain modules and plain operators, which
-- know nothing of groups. Attention is products and a softmax; every expert computes every token,
-- and masks choose; the loss is taken from all logits. kinds.lua loads it with dofile, and calls
-- the function that it returns.
local ms = require "moonshard"
local nn = ms.nn

--- s: vocab, length, width, heads, hidden, blocks, experts (0: an MLP), top.
---@param s table<string, integer>
---@return ms.Module
return function(s)
  local HEAD <const> = s.width // s.heads

  local Mlp = nn.class "PlainMlp"
  function Mlp:init()
    self.up, self.down = nn.Linear(s.width, s.hidden), nn.Linear(s.hidden, s.width)
  end
  function Mlp:forward(x) return self.down(self.up(x):gelu()) end

  local Layer = nn.class "PlainLayer"
  function Layer:init()
    self.norm_1, self.norm_2 = nn.LayerNorm(s.width), nn.LayerNorm(s.width)
    self.qkv, self.joined = nn.Linear(s.width, 3 * s.width), nn.Linear(s.width, s.width)
    if s.experts == 0 then
      self.mlp = Mlp()
      return
    end
    self.router, self.experts = nn.Linear(s.width, s.experts, { bias = false }), nn.List {}
    for i = 1, s.experts do self.experts[i] = Mlp() end
  end

  function Layer:attention(x)
    local rows, time = x:size(1), x:size(2)
    local three = self.qkv(x):chunk(3, 3)
    for i = 1, 3 do three[i] = three[i]:view(rows, time, s.heads, HEAD):transpose(2, 3) end
    local scores = three[1]:matmul(three[2]:transpose(3, 4)) / math.sqrt(HEAD)
    local later = ms.ones({ time, time }):triu(1):gt(0)
    local chances = scores:masked_fill(later, -math.huge):softmax()
    return self.joined(chances:matmul(three[3]):transpose(2, 3):reshape(rows, time, s.width))
  end

  -- The sum of the best experts' results, each times its gate.
  function Layer:mixture(x)
    local chances = self.router(x):softmax()
    local rest, chosen = chances:detach(), 0
    for _ = 1, s.top do
      local hot = rest:argmax(3):one_hot(s.experts):to "f32"
      rest, chosen = rest - 2 * hot, chosen + hot
    end
    local gates = chances * chosen
    if s.top > 1 then gates = gates / gates:sum(3, true) end
    local y = 0
    for i = 1, s.experts do y = y + self.experts[i](x) * gates:narrow(3, i, 1) end
    return y
  end

  function Layer:forward(x)
    x = x + self:attention(self.norm_1(x))
    local y = self.norm_2(x)
    return x + (s.experts > 0 and self:mixture(y) or self.mlp(y))
  end

  local Net = nn.class "PlainNet"
  function Net:init()
    self.table, self.places = nn.Embedding(s.vocab, s.width), nn.Embedding(s.length, s.width)
    self.blocks = nn.List {}
    for i = 1, s.blocks do self.blocks[i] = Layer() end
    self.norm, self.head = nn.LayerNorm(s.width), nn.Linear(s.width, s.vocab, { bias = false })
  end
  -- The mean over all targets.
  function Net:forward(tokens, targets)
    local x = self.table(tokens) + self.places.weight
    for i = 1, s.blocks do x = self.blocks[i](x) end
    local logits = self.head(self.norm(x))
    logits = logits - logits:detach():max(3, true)
    local own = logits:gather(3, targets:unsqueeze(3)):squeeze(3)
    return (logits:exp():sum(3):log() - own):mean()
  end
  return Net()
end
