-- moonshard repl: an interactive session, with `ms` at hand.
local switches = require "moonshard.cli.switches"

local repl = {}

-- Values are shown as print would; tensors with their elements.
local function show(...)
  local core = require "moonshard.core"
  for i = 1, select("#", ...) do
    local value = select(i, ...)
    print(core.is_tensor(value) and value:show() or tostring(value))
  end
end

local function read_chunk()
  io.write "> "
  local text = io.read()
  while text do
    local chunk = load("return " .. text, "=stdin", "t") or nil
    if chunk then return chunk end
    local message
    chunk, message = load(text, "=stdin", "t")
    if chunk then return chunk end
    if not message:match "<eof>$" then return nil, message end
    io.write ">> "
    local more = io.read()
    if not more then return nil, message end
    text = text .. "\n" .. more
  end
  return nil
end

--- The parser of its command line.
---@return table
function repl.parser()
  return switches.parser("repl", "An interactive session; `ms` is the library.")
end

function repl.main(arguments)
  switches.apply(switches.parse(repl.parser(), arguments))
  local ms = require "moonshard"
  _G.ms = ms
  print(("Moonshard %s, %s. `ms` is the library; end with Control-D.")
    :format(ms.version, ms.info().lua))
  while true do
    local chunk, message = read_chunk()
    if chunk then
      local results = table.pack(xpcall(chunk, debug.traceback))
      if results[1] then
        local ok, why = pcall(show, table.unpack(results, 2, results.n))
        if not ok then print(why) end
      else print(results[2]) end
    elseif message then print(message)
    else
      print()
      return 0
    end
  end
end

return repl
