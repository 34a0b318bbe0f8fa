-- Whose a parameter is, and what modules ask of files that are above them.
--
-- Modules, optimizers and wrapped models know of each other through these tables alone, so that
-- none of their files needs another one that needs it.
local core = require "moonshard.core"

local ownership = {}

-- parameter of which this rank has a piece -> { model = its ms.FSDPState, shape = the whole one }
ownership.sharded = setmetatable({}, { __mode = "k" })
-- parameter -> the ms.DDPState that reduces its gradient; unwrap takes the reducer away
ownership.reduced = setmetatable({}, { __mode = "kv" })
-- parameter -> an optimizer that steps it
ownership.stepped = setmetatable({}, { __mode = "kv" })
-- parameter -> the set of optimizers that only read it (ms.optim.ema)
ownership.observed = setmetatable({}, { __mode = "k" })

-- parameter that nn.alone has declared -> how ranks' values are merged
ownership.alone = setmetatable({}, { __mode = "k" })

-- parameter -> what nn.split, nn.owned and nn.shared say of it: an ms.Declared (nn/parts.lua)
ownership.declared = setmetatable({}, { __mode = "k" })

-- parameter of u8 -> the numbers of which it has the codes: an ms.CodedWeight (nn/coded.lua)
ownership.coded = setmetatable({}, { __mode = "k" })

-- model -> the method of local= by which its ranks meet, which ms.train calls and saves
ownership.methods = setmetatable({}, { __mode = "k" })

local function find(p)
  local observers = ownership.observed[p]
  return ownership.stepped[p] or observers and next(observers) or nil
end

--- An optimizer that steps or reads a parameter, and so counts on what it is now. It is one that is
--- still in use: what the script has dropped is collected first.
---@param p ms.Tensor
---@return ms.Optimizer?
function ownership.optimizer_of(p)
  if not find(p) then return nil end
  core.collect()
  return find(p)
end

--- Functions of files that need nn/module.lua, by name. Each file puts its own here when it is
--- loaded; nn/init.lua loads all of them.
---@class ms.ModuleFunctions
---@field list fun(modules: ms.Module[]): ms.Module                    nn/layers.lua
---@field materialize fun(what: string, model: ms.Module)              nn/delayed.lua
---@field whole table                                                  nn/whole.lua
---@field items_of_shards fun(s: ms.FSDPState): table                parallel/fsdp/state.lua
---@field clip_grad_norm fun(model: ms.Module, max: number, p?: number): ms.Tensor  optim
---@field clip_grad_value fun(model: ms.Module, max: number)           optim
ownership.functions = {}

return ownership
