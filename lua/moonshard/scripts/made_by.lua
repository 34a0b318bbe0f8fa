-- Scripts that return a function which makes a link or a planner from options; and the check
-- whether the script has read the given options.
local core = require "moonshard.core"
local log = require "moonshard.base.log"
local pieces = require "moonshard.scripts.pieces"
local steps = require "moonshard.train.steps"

local made_by = {}

-- { name, path, options, read, asked }: of scripts that are on their first step.
local waiting = {}

--- The options of a script, in a table that notes which names are read. Given options that the
--- script has not read are reported after the first step, because it may read some only while it
--- runs.
---@param name string of the option of the command line: "hook"
---@param path string
---@param options table
---@return table
function made_by.noticing(name, path, options)
  local item = { name = name, path = path, options = options, read = {}, asked = {} }
  if next(options) ~= nil then waiting[#waiting + 1] = item end
  return setmetatable({}, {
    __index = function(_, key)
      item.read[key] = true
      if options[key] == nil and type(key) == "string" then item.asked[#item.asked + 1] = key end
      return options[key]
    end,
    __pairs = function()
      for key in pairs(options) do item.read[key] = true end
      return next, options, nil
    end,
  })
end

local function tell(item)
  for key in pairs(item.options) do
    if not item.read[key] then
      local near = core.nearest(key, item.asked)
      log.warn("%s.%s is given, but '%s' has not read it%s", item.name, key, item.path,
        near and (": did you mean %s.%s?"):format(item.name, near) or "")
    end
  end
end

steps.on_end(function()
  if #waiting == 0 then return end
  for _, item in ipairs(waiting) do if core.rank() == 0 then tell(item) end end
  waiting = {}
end)

-- Whether a function is a link: its first parameter is called bucket, or it has two parameters. Any
-- other function makes a link from options.
local function is_link(f)
  local info = debug.getinfo(f, "u")
  return info.nparams >= 2 or debug.getlocal(f, 1) == "bucket"
end

--- The link for a value that a file returned: the value itself, or, if it is a function that is not
--- a link, the link that it makes from options; of pieces of a method, the link among them.
---@param path string of the file
---@param options table
---@param are_given boolean whether the user gave some
---@param taken table gets the pieces that the file gave first
---@return fun(value: any): any
function made_by.link(path, options, are_given, taken)
  return function(value)
    if type(value) == "function" and not is_link(value) then value = value(options)
    elseif are_given then
      error(("takes no options: it returns %s, not a function(options)"):format(
        pieces.is(value) and "pieces of a method" or "a link"), 0)
    end
    local found = pieces.of(path, value)
    if not found then return value end
    taken.pieces = taken.pieces or found
    -- What a watched file gives later takes the place of the link only.
    return found.link or function(bucket, next) return next(bucket) end
  end
end

--- The planner for a value that a file returned: the value itself, or, if it is a function, the
--- planner that it makes from options.
---@param options table
---@param are_given boolean
---@return fun(value: any): any
function made_by.planner(options, are_given)
  return function(value)
    if type(value) == "function" then return value(options) end
    if are_given then error("takes no options: it returns a plan, not a function(options)", 0) end
    return value
  end
end

return made_by
