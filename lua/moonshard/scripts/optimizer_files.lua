-- Files for optimizer=: a function of options, among them the wrapped model and the recipe's own
-- optimizer, that gives the optimizer of the run; or pieces of a method.
local core = require "moonshard.core"
local pieces = require "moonshard.scripts.pieces"

local optimizer_files = {}

-- Raised where a function reads what is there only when the model is wrapped.
local LATER <const> = {}
local late = { model = true, recipe = true }

---@param value any
---@return boolean
function optimizer_files.is_optimizer(value)
  local meta = type(value) == "table" and getmetatable(value)
  return type(meta) == "table" and meta.__name == "ms.Optimizer"
end

--- The pieces that a file gives; a function(options) that gives an optimizer is the piece
--- `optimizer`. The function is called before the model is wrapped, because it may give pieces that
--- wrapping needs. If it reads options.model or options.recipe, it is called again when they are
--- there.
---@param path string a Lua file
---@param options table
---@return ms.Pieces
function optimizer_files.from(path, options)
  local chunk, message = loadfile(path, "t")
  if not chunk then core.raise(message) end
  local made = chunk(path) -- as `require` calls it: a tutorial then returns what it shows
  local found = pieces.of(path, made)
  if found then return found end
  local what = type(made) == "function" and "function of two arguments" or type(made)
  if type(made) ~= "function" or debug.getinfo(made, "u").nparams > 1 then
    core.raise(("'%s' returns a %s: a function(options) that gives an ms.Optimizer from \z
      options.model and options.recipe is expected, %s"):format(path, what, pieces.expected))
  end
  local function call(model, recipe)
    return made(setmetatable({ model = model, recipe = recipe }, {
      __index = function(_, key)
        if late[key] then error(LATER, 0) end
        return options[key]
      end,
      __pairs = function() return pairs(options) end,
    }))
  end
  local ok, result = pcall(call)
  if not ok and result ~= LATER then error(result, 0) end
  found = ok and pieces.of(path, result)
  return found or { optimizer = call }
end

return optimizer_files
