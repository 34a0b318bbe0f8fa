-- nn.cut: a part of a language model that is a chunk of a pipeline: some of its blocks, the
-- embeddings before the first one, the last norm and the head after the last one.
--
-- A chunk has the modules of the model under the names that they have there, so states, files and
-- checkpoints see one model. What it does not have can be dropped with the model; of a model on
-- "meta" it never had values. The head of a model with tied embeddings needs the table: the first
-- and the last chunk have it both.
local core = require "moonshard.core"
local Decoder = require "moonshard.nn.decoder"
local layers = require "moonshard.nn.layers"
local module = require "moonshard.nn.module"
local options_of = require "moonshard.base.options"

-- What has the blocks in a model whose class has a module for them.
local Part = module.class "ChunkBody"

---@class ms.Chunk: ms.Module
local Chunk = module.class "Chunk"

-- Gives `to` the modules of `from` that a chunk has.
local function take(to, from, names, first, last, count, tied)
  if first == 1 or tied and last == count then to[names.embedding] = from[names.embedding] end
  if first == 1 and from[names.places] then to[names.places] = from[names.places] end
  local blocks = layers.List {}
  for i = first, last do blocks[i] = from[names.blocks][i] end
  to[names.blocks] = blocks
  if last == count then to[names.last] = from[names.last] end
end

function Chunk:init(model, first, last)
  local names, count = model.row.names, model.options.layers
  self.row, self.options, self.first, self.last = model.row, model.options, first, last
  self.is_first, self.is_last = first == 1, last == count
  local tied = model.lm_head == nil
  local body = names.body and Part() or self
  take(body, names.body and model[names.body] or model, names, first, last, count, tied)
  if names.body then self[names.body] = body end
  if last == count and not tied then self.lm_head = model.lm_head end
  -- What the model's class asks of a model in functions that are about names and config.json.
  self.facts = setmetatable({ options = model.options, lm_head = not tied or nil },
    { __index = getmetatable(model).class })
  getmetatable(self).origin = getmetatable(model).origin
end

local function holder_of(self)
  local body = self.row.names.body
  return body and self[body] or self
end

local function head(self, x)
  if self.lm_head then return self.lm_head(x) end
  local weight = holder_of(self)[self.row.names.embedding].weight
  return core.without_fp8(function() return x:linear(weight) end)
end

-- The first chunk gets tokens and positions; others get what the chunk before gives, and positions.
function Chunk:forward(x, change, positions)
  options_of.argument("Chunk", "x", x, "tensor")
  local names, holder = self.row.names, holder_of(self)
  local how = { dropout = self.options.dropout, recompute = self.options.recompute }
  if self.is_first then
    x, change, positions =
      Decoder._begin_stream(holder, names, x, change, how), nil, change
  end
  x, change = Decoder._run_blocks(holder, names, self.first, self.last, x, change, positions, how)
  if not self.is_last then return x, change end
  local _, normed = layers._norm_of_sum(holder[names.last], x, change)
  return head(self, normed)
end

--- What goes into a chunk after the first one for a microbatch of so many rows and times: the
--- stream, which has the dtype of the parameters, and its change, which a product of the last block
--- made. nil: its forward is another one.
---@param rows integer
---@param times integer
---@return { dtype: ms.DType, shape: integer[] }[]?
function Chunk:_passes(rows, times)
  if self.forward ~= Chunk.forward then return nil end
  local dtype = self:parameters()[1]:dtype()
  local product = core.no_grad(function()
    local one = core.zeros { 1, 1, dtype = dtype }
    return one:matmul(one):dtype()
  end)
  local shape = { rows, times, self.options.width }
  return { { dtype = dtype, shape = shape }, { dtype = product, shape = shape } }
end

--- The contents of config.json of the whole model.
---@return table
function Chunk:config() return self.facts:config() end

--- As of the whole model.
---@param name string
---@return string? own
---@return string? copy
function Chunk:own_name(name) return self.facts:own_name(name) end

---@param name string
---@return string
function Chunk:file_name(name)
  return self.facts.file_name and self.facts:file_name(name) or name
end

local cut = {}

---@param model ms.LanguageModel
---@param first integer
---@param last integer
---@return ms.Module
function cut.cut(model, first, last)
  if not module.is_module(model) or not model.row or not model._forward_with_targets then
    core.raise "nn.cut: a model of nn.gpt2, nn.llama, nn.decoder or nn.pretrained is expected"
  end
  local count = model.options.layers
  for _, one in ipairs { { "first", first }, { "last", last } } do
    local name, value = one[1], one[2]
    if math.type(value) ~= "integer" or value < 1 or value > count then
      core.raise(("nn.cut: %s must be a block of 1 to %d, not %s"):format(name, count,
        tostring(value)))
    end
  end
  if first > last then
    core.raise(("nn.cut: no blocks from %d to %d"):format(first, last))
  end
  return Chunk(model, first, last)
end

return cut
