-- Adapters (LoRA) of recipes, by their options lora, adapters and adapt.
local launch = require "moonshard.base.launch"
local nn = require "moonshard.nn"
local options_of = require "moonshard.base.options"

-- Ends the program with code 2 for an option that would change nothing.
local function check(cfg)
  local o, has_folder = cfg.adapt, cfg.adapters ~= ""
  local unset = { alpha = 0.0, dropout = 0.0, names = "", base = "" }
  for _, name in ipairs { "alpha", "dropout", "names", "base" } do
    local given = o[name] ~= unset[name]
    if given and cfg.lora == 0 and not has_folder then
      launch.exit(2, ("option adapt.%s: there are no adapters: give lora=RANK, or adapters=FOLDER")
        :format(name))
    elseif given and has_folder and name ~= "base" then
      launch.exit(2, ("option adapt.%s: the folder '%s' says it: leave it out"):format(name,
        cfg.adapters))
    end
  end
  if has_folder and cfg.lora > 0 then
    launch.exit(2, ("option lora=%d: the folder '%s' says the rank: leave lora out"):format(
      cfg.lora, cfg.adapters))
  end
end

---@param cfg { lora: integer, adapters: string, adapt: table }
---@return boolean adapts
---@return fun(net: ms.Module): ms.Module adapt
return function(cfg)
  options_of.argument("scripts.adapters", "cfg", cfg, "table")
  check(cfg)
  local o, base = cfg.adapt, cfg.adapt.base ~= "" and cfg.adapt.base or nil
  local adapts = cfg.lora > 0 or cfg.adapters ~= ""
  return adapts, function(net)
    if cfg.adapters ~= "" then assert(net:load_adapters(cfg.adapters, { base = base }))
    elseif adapts then
      local names = {}
      for name in o.names:gmatch "[^,]+" do names[#names + 1] = name end
      nn.lora(net, {
        rank = cfg.lora, alpha = o.alpha > 0 and o.alpha or nil, dropout = o.dropout,
        names = names[1] and names or nil, base = base,
      })
    end
    return net
  end
end
