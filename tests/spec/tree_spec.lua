-- What print(model) shows.
local ms = require "moonshard"
local nn = ms.nn

describe("a module as text", function()
  it("is its tree with parameter counts, like neighbours once", function()
    local Block = nn.class "Block"
    function Block:init(width)
      self.up = nn.Linear(width, 4, { bias = false })
      self.norm = nn.LayerNorm(4)
    end
    local Net = nn.class "Net"
    function Net:init()
      self.embed = nn.Embedding(300, 4)
      self.blocks = nn.List { Block(4), Block(4), Block(4), Block(8) }
      self.head = nn.Linear(4, 300, { bias = false })
      self.head.weight = self.embed.weight
      self.scale = nn.Parameter(ms.ones { 1 })
      self:add_buffer("seen", ms.zeros { 2 })
    end
    local net = Net()
    net.embed.weight:requires_grad_(false)
    assert.equal([[
Net: 1,313 parameters (f32, 5.1 KiB)  scale [1], seen [2] buffer
  embed: Embedding, 1,200  weight [300, 4] frozen
  blocks: List, 112
    0 to 2: 3 x Block, 24
      up: Linear, 16  weight [4, 4]
      norm: LayerNorm, 8  weight [4], bias [4]
    3: Block, 40
      up: Linear, 32  weight [4, 8]
      norm: LayerNorm, 8  weight [4], bias [4]
  head: Linear, 0  weight [300, 4] tied]], tostring(net))
  end)

  it("is shown of wrapped models, of models without parameters and of several dtypes, \z
    too", function()
    assert.equal("ddp of Linear: 6 parameters (f32, 24 bytes)  weight [2, 2], bias [2]",
      tostring(ms.ddp(nn.Linear(2, 2), {})))
    assert.equal("GELU: 0 parameters", tostring(nn.GELU()))
    local pair = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1):to "bf16")
    assert.matches("^Sequential: 5 parameters %(bf16 and f32, 16 bytes%)\n  0: Linear, 3 ",
      tostring(pair))
  end)

  it("names a class in errors, not a tree", function()
    local Bare = nn.class "Bare"
    local _, message = pcall(Bare(), 1)
    assert.matches("module Bare has no method forward$", message)
  end)
end)
