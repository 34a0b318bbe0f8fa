-- Files for local=: methods with which each rank trains weights of its own, and meets the others
-- now and then. A file returns a function of options, among them the model, that gives a table with
-- after_step(step, optimizer), and with state() and load_state(t) where it has something to save.
local core = require "moonshard.core"
local launch = require "moonshard.base.launch"
local ownership = require "moonshard.base.ownership"

local local_methods = {}

-- Options that need gradients or weights that ranks share.
local OTHERS <const> = { "shard", "hook", "overlap", "buckets", "gather", "prefetch" }

--- A function that makes the method of a model.
---@param path string a Lua file
---@param options table
---@return fun(model: ms.Module): table
function local_methods.from(path, options)
  local chunk, message = loadfile(path, "t")
  if not chunk then core.raise(message) end
  return function(model)
    local make, given = chunk(), setmetatable({ model = model }, { __index = options })
    local method = type(make) == "function" and make(given)
    if type(method) ~= "table" or type(method.after_step) ~= "function" then
      core.raise(("'%s' is no method: a function(options) that gives a table with \z
        after_step(step, optimizer) is expected (a link is for hook=)"):format(path))
    end
    return method
  end
end

--- Makes the method of cfg's local= for a model that is not wrapped. Ends the program with code 2
--- if another option does not go with it, or the method refuses its options.
---@param cfg table
---@param model ms.Module
---@param make fun(model: ms.Module): table
function local_methods.give(cfg, model, make)
  local value = cfg["local"]
  for _, name in ipairs(OTHERS) do
    if (cfg[name] or "") ~= "" then
      launch.exit(2, ("option local=%s: each rank trains its own weights, so that %s=%s has \z
        nothing to do: leave one of the two out"):format(value, name, cfg[name]))
    end
  end
  local ok, method = pcall(make, model)
  if not ok then
    if launch.is_exit(method) then error(method, 0) end
    local message = tostring(method)
    launch.exit(2, ("option local=%s: %s"):format(value,
      message:match "^[^\n:]*:%d+: (.*)" or message))
  end
  ownership.methods[model] = method
end

return local_methods
