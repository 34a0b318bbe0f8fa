-- moonshard plot: curves of runs, in the terminal or as a page.
local core = require "moonshard.core"
local launch = require "moonshard.base.launch"
local live = require "moonshard.base.status_line"
local read = require "moonshard.train.plots.read"
local switches = require "moonshard.cli.switches"
local terminal = require "moonshard.train.plots.terminal"

local plot = {}

local PAUSE_MS <const> = 1000

-- For argparse: keys with commas between them.
local function keys(text)
  local list = {}
  for key in text:gmatch "[^,]+" do list[#list + 1] = key end
  if #list > 0 then return list end
  return nil, "names with commas between them are expected, as in --key loss,val_loss"
end

-- For argparse: a part, below 1.
local function factor(text)
  local number = tonumber(text)
  if number and number >= 0 and number < 1 then return number end
  return nil, ("a number from 0 to below 1 is expected, not '%s'"):format(text)
end

local function read_all(paths)
  local runs = {}
  for i, path in ipairs(paths) do
    local run, message = read.run(path)
    if not run then launch.exit(3, message) end
    runs[i] = run
  end
  return runs
end

-- The keys to show: those that were asked for, of which each must be in a run; otherwise losses.
local function keys_of(runs, asked)
  local list, there = read.keys(runs)
  if #list == 0 then
    local names = {}
    for i, run in ipairs(runs) do names[i] = "'" .. read.printable(run.path) .. "'" end
    return nil, ("there are no metrics in %s yet"):format(table.concat(names, ", "))
  end
  for _, key in ipairs(asked or {}) do
    if not there[key] then
      local nearest = core.nearest(key, list)
      table.sort(list)
      launch.exit(2, read.printable(("--key %s: no run has it%s"):format(key, nearest
        and (": did you mean %s?"):format(nearest) or "; there are " .. table.concat(list, ", "))))
    end
  end
  if asked then return asked end
  local shown = {}
  for _, key in ipairs { "loss", "val_loss" } do
    if there[key] then shown[#shown + 1] = key end
  end
  return #shown > 0 and shown or { list[1] }
end

---------------------------------------------------------------------------------------------- text

local function speaks_unicode()
  local words = os.getenv "LC_ALL" or ""
  if words == "" then words = os.getenv "LC_CTYPE" or "" end
  if words == "" then words = os.getenv "LANG" or "" end
  local kind = os.getenv "TERM" or ""
  return words:lower():find "utf%-?8" ~= nil and kind ~= "dumb" and kind ~= "linux"
end

local function style_of(parsed, count)
  local is_terminal = live.is_terminal()
  return {
    width = parsed.width or launch.process and launch.process.columns() or 80,
    height = parsed.height or (count > 2 and 8 or 14), log = parsed.log,
    unicode = not parsed.ascii and speaks_unicode(),
    color = is_terminal and (os.getenv "NO_COLOR" or "") == "" and not parsed.ascii,
  }
end

local function lines_of(runs, shown, parsed)
  local style, lines = style_of(parsed, #shown), {}
  for _, key in ipairs(shown) do
    local curves = {}
    for _, run in ipairs(runs) do
      local series = run.series[key]
      if series then
        curves[#curves + 1] = {
          name = read.printable(run.path), steps = series.steps,
          values = read.smooth(series.values, parsed.smooth),
        }
      end
    end
    local title = read.printable(key)
    if parsed.smooth > 0 then title = ("%s, smoothed by %g"):format(title, parsed.smooth) end
    for _, line in ipairs(terminal.chart(title, curves, style)) do lines[#lines + 1] = line end
    lines[#lines + 1] = ""
  end
  return lines
end

---------------------------------------------------------------------------------------------- page

-- Writes the page. One that exists is replaced only where that was asked for, or by its own writer.
local function write_page(parsed, runs, own)
  if not own and not parsed.force and core.exists(parsed.html) then
    launch.exit(2, ("'%s' exists: name another page, or --force"):format(parsed.html))
  end
  local page = require "moonshard.train.plots.page"(runs,
    { smooth = parsed.smooth, log = parsed.log, keys = parsed.key, follow = parsed.follow })
  local ok, message = core.file_write(parsed.html, page)
  if not ok then launch.exit(3, message) end
end

------------------------------------------------------------------------------------------- command

local function any_runs(runs)
  for _, run in ipairs(runs) do if run.state == "running" then return true end end
  return false
end

local function show(parsed, runs, again)
  local shown, message = keys_of(runs, parsed.key)
  if not shown and not parsed.follow then launch.exit(3, message) end
  if parsed.html then return write_page(parsed, runs, again) end
  local lines = shown and lines_of(runs, shown, parsed) or { message }
  if parsed.follow then lines[#lines + 1] = "following; Ctrl-C ends it" end
  -- The picture of before is overwritten in place, which flickers less than an empty screen.
  if again or parsed.follow then
    io.stdout:write(again and "\27[H" or "\27[2J\27[H", table.concat(lines, "\27[K\n"), "\27[J\n")
    io.stdout:flush()
  else
    print(table.concat(lines, "\n"))
  end
end

--- The parser of its command line.
---@return table
function plot.parser()
  local parser = switches.plain("plot", "Shows the curves of runs: in the terminal, or as a page \z
    that needs nothing else.")
  parser:argument("runs", "folders of runs"):args "*"
  parser:option("--key", "what is shown (default: loss,val_loss): names in metrics.jsonl, such as \z
    lr,grad_norm,tok_s"):argname "KEYS":convert(keys)
  parser:option("--smooth", "weight of what came before in the moving mean, below 1 (default: 0)")
    :argname "PART":convert(factor):default "0":show_default(false)
  parser:flag("--log", "logarithmic values")
  parser:option("--html", "write a page with all curves and settings to this file"):argname "PAGE"
  parser:flag("--force", "replace the page if it exists")
  parser:flag("--follow", "go on until the runs have ended")
  parser:option("--width", "columns (default: the terminal's)"):argname "COUNT"
    :convert(switches.count)
  parser:option("--height", "rows of a chart (default: 14, or 8 for three and more)")
    :argname "COUNT":convert(switches.count)
  parser:flag("--ascii", "letters in place of dots (default: where the terminal lacks Unicode)")
  return parser
end

--- moonshard plot RUN... [--key KEYS] [--smooth PART] [--html PAGE] [--follow]
---@param arguments string[]
---@return integer
function plot.main(arguments)
  local parser = plot.parser()
  local parsed = switches.parse(parser, arguments)
  if #parsed.runs == 0 then launch.exit(2, "which runs?\n" .. parser:get_usage()) end
  if parsed.follow and not parsed.html and not live.is_terminal() then
    launch.exit(2, "--follow needs a terminal, or --html PAGE")
  end
  local runs = read_all(parsed.runs)
  show(parsed, runs, false)
  while parsed.follow and any_runs(runs) do
    launch.process.pause(PAUSE_MS)
    runs = read_all(parsed.runs)
    show(parsed, runs, true)
  end
  -- The last page does not load itself again.
  if parsed.follow and parsed.html then
    parsed.follow = nil
    write_page(parsed, runs, true)
  end
  if parsed.html then
    print(("%s shows %d run%s"):format(parsed.html, #runs, #runs > 1 and "s" or ""))
  end
  return 0
end

return plot
