-- Files for local=: methods with which each rank trains weights of its own, and meets the others
-- now and then. A file returns a function of options, among them the model, that gives a table with
-- after_step(step, optimizer), and with state() and load_state(t) where it has something to save;
-- or pieces of a method, of which `local` makes such a table.
local core = require "moonshard.core"
local launch = require "moonshard.base.launch"
local ownership = require "moonshard.base.ownership"
local pieces = require "moonshard.scripts.pieces"

local local_methods = {}

-- Options that need gradients or weights that ranks share.
local OTHERS <const> = { "shard", "hook", "overlap", "buckets", "gather", "prefetch" }

local function is_method(value)
  return type(value) == "table" and type(value.after_step) == "function"
end

--- The pieces that a file gives for a model. refuse: called before its function gets the model.
---@param path string a Lua file
---@param options table
---@param model ms.Module
---@param refuse? fun()
---@return ms.Pieces
function local_methods.from(path, options, model, refuse)
  local chunk, message = loadfile(path, "t")
  if not chunk then core.raise(message) end
  local made = chunk()
  if type(made) == "function" then
    made = made(setmetatable({}, {
      __index = function(_, key)
        if key ~= "model" then return options[key] end
        if refuse then refuse() end
        return model
      end,
      __pairs = function() return pairs(options) end,
    }))
    if is_method(made) then return { ["local"] = function() return made end } end
  end
  local found = pieces.of(path, made)
  if found then return found end
  core.raise(("'%s' is no method: a function(options) that gives a table with \z
    after_step(step, optimizer) is expected (a link is for hook=), %s")
    :format(path, pieces.expected))
end

--- Ends the program with code 2 if an option is given that has nothing to do where each rank trains
--- its own weights. name: the option that gives the method.
---@param cfg table
---@param name string
function local_methods.refuse_others(cfg, name)
  for _, other in ipairs(OTHERS) do
    if other ~= name and (cfg[other] or "") ~= "" then
      launch.exit(2, ("option %s=%s: each rank trains its own weights, so that %s=%s has \z
        nothing to do: leave one of the two out"):format(name, cfg[name], other, cfg[other]))
    end
  end
end

--- Makes the method of a model that is not wrapped, and lets ms.train call it.
---@param model ms.Module
---@param make fun(model: ms.Module): table the piece `local`
function local_methods.give(model, make)
  local method = make(model)
  if not is_method(method) then
    core.raise(("its piece local gives a %s: a table with after_step(step, optimizer) is expected")
      :format(type(method)))
  end
  ownership.methods[model] = method
end

return local_methods
