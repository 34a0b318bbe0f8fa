-- The order of the layers, for the lints: which layer a file belongs to, and which layers are below
-- it.

local ranks = {}

-- A layer may use itself and the layers with lower numbers. io is beside comm, and text beside
-- optim. "moonshard" is the header that includes the whole engine, "program" is the command line,
-- bindings/program/.
ranks.of = {
  base = 1, exec = 2, tensor = 3, ops = 4, grad = 5, comm = 6, io = 6, text = 7, optim = 7,
  hook = 8, meter = 9, ddp = 10, fsdp = 11, moonshard = 12, bindings = 13, program = 14,
}

-- Installed headers that are not named after their layer.
local HEADER_LAYER = {
  control = "comm", cluster = "comm", cpu_task = "exec", moonshard_lua = "bindings",
  tokenizer = "text",
}

-- The layer of a source file, or of a header as an #include names it.
function ranks.layer_of(path)
  local public = path:match("^engine/include/moonshard/([%w_]+)%.h$")
    or path:match("^moonshard/([%w_]+)%.h$")
  if public then return HEADER_LAYER[public] or public end
  if path:find("^bindings/program/") then return "program" end
  return path:match("^engine/([%w_]+)/") or path:match("^([%w_]+)/")
end

-- Whether a file of layer `user` may not use the layer `used`.
function ranks.is_upward(user, used)
  return user ~= used and ranks.of[used] >= ranks.of[user]
end

return ranks
