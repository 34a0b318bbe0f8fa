-- Scripts among the switches of a bench: --hook "FILE key=value ...".
local config = require "moonshard.base.config"
local launch = require "moonshard.base.launch"

local own_script = {}

--- The name or file and its options, in the form of a recipe's options. A wrong option ends the
--- program with code 2.
---@param name string of the switch, and of the recipe's option: "hook"
---@param text string
---@return string short name, without folder and ending
---@return table cfg
function own_script.parse(name, text)
  local words = {}
  for word in text:gmatch "%S+" do words[#words + 1] = word end
  local cfg = { [name] = words[1], [name .. "_options"] = {} }
  for i = 2, #words do
    local key, value = words[i]:match "^([%w_]+)=(.*)$"
    if not key then launch.exit(2, ("--%s: '%s' is not key=value"):format(name, words[i])) end
    cfg[name .. "_options"][key] = config.guess(value)
  end
  return words[1] and words[1]:match "([^/]*)%.lua$" or words[1] or "", cfg
end

--- The switch for another process of this program, quoted for the shell; "" without text.
---@param name string
---@param text? string
---@return string
function own_script.switch(name, text)
  return text and (" --%s '%s'"):format(name, (text:gsub("'", "'\\''"))) or ""
end

return own_script
