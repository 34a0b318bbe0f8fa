-- moonshard runs: the runs of a folder, their states and results, and the options that were set.
local core = require "moonshard.core"
local launch = require "moonshard.base.launch"
local read = require "moonshard.train.plots.read"
local sorted_pairs = require "moonshard.base.sorted_pairs"
local switches = require "moonshard.cli.switches"

local runs = {}

local function shown(value)
  if value == nil then return "-" end
  if math.type(value) == "float" then return ("%.6g"):format(value) end
  return value == "" and '""' or tostring(value)
end

local function last_of(series)
  return series and series.values[#series.values]
end

local function loss(value)
  return value and (math.abs(value) < 1e6 and "%.4f" or "%.4e"):format(value) or "-"
end

-- A table whose columns are as wide as their widest cell; the last one is not filled up, and cut at
-- the edge of a terminal.
local function print_table(rows)
  local widths = {}
  for _, row in ipairs(rows) do
    for i, cell in ipairs(row) do
      cell = read.printable(cell)
      row[i] = cell
      widths[i] = math.max(widths[i] or 0, utf8.len(cell) or #cell)
    end
  end
  for _, row in ipairs(rows) do
    local parts = {}
    for i, cell in ipairs(row) do
      parts[i] = cell .. (" "):rep(widths[i] - (utf8.len(cell) or #cell))
    end
    local line = table.concat(parts, "  "):gsub("%s+$", "")
    local room = launch.process and launch.process.is_terminal() and launch.process.columns()
    local length = utf8.len(line)
    if room and length and length > room then
      line = line:sub(1, utf8.offset(line, room) - 1) .. "…"
    end
    print(line)
  end
end

-- What is told of a run, as one object.
local function object_of(record, names)
  local about, settings = record.about, {}
  for _, name in ipairs(names) do settings[name] = (about.settings or {})[name] end
  local best, at
  if record.series.val_loss then best, at = read.least(record.series.val_loss) end
  return {
    run = utf8.len(record.path) and record.path or read.printable(record.path),
    state = record.state, code = about.code, message = about.message,
    step = record.last_step, steps = about.steps, loss = last_of(record.series.loss),
    best_val_loss = best, best_val_step = at, started = about.started, ended = about.ended,
    ranks = about.ranks, recipe = about.recipe, settings = settings, set = about.set,
  }
end

-- What was set on the command line of a run; of one by an older version, which did not note that,
-- what differs between the runs.
local function row_of(object, names)
  local parts = {}
  for name, value in sorted_pairs(object.set or {}) do
    if name ~= "run" then parts[#parts + 1] = name .. "=" .. shown(value) end
  end
  for _, name in ipairs(object.set and {} or names) do
    if object.settings[name] ~= nil then
      parts[#parts + 1] = name .. "=" .. shown(object.settings[name])
    end
  end
  local step = object.step and tostring(object.step + 1) or "0"
  return {
    object.run, object.state, object.steps and step .. "/" .. object.steps or step,
    loss(object.loss), object.best_val_loss
      and ("%.4f at %d"):format(object.best_val_loss, object.best_val_step) or "-",
    object.started and os.date("%Y-%m-%d %H:%M", object.started) or "-", table.concat(parts, " "),
  }
end

-- The folders to look in: those that were given, or "runs", or this one.
local function folders_of(parsed)
  if #parsed.folders > 0 then return parsed.folders end
  return { core.exists "runs" == "folder" and "runs" or "." }
end

--- The parser of its command line.
---@return table
function runs.parser()
  local parser = switches.plain("runs", "Lists the runs of a folder: running, done, stopped or \z
    failed with which exit code, or killed; steps done, the last loss, the best validation, and \z
    the options that were set.")
  parser:argument("folders", "folders with runs in them (default: runs, or else this folder)")
    :args "*"
  parser:flag("--json", "a line of JSON for each run")
  return parser
end

--- moonshard runs [FOLDER...] [--json]
---@param arguments string[]
---@return integer
function runs.main(arguments)
  local parser = runs.parser()
  local parsed = switches.parse(parser, arguments)
  local records, code = {}, 0
  for _, folder in ipairs(folders_of(parsed)) do
    local paths, message = read.find(folder)
    if not paths then launch.exit(3, message) end
    for _, path in ipairs(paths) do
      local record, why = read.run(path)
      -- The others are listed.
      if not record then
        io.stderr:write("moonshard: ", read.printable(why), "\n")
        code = 3
      end
      records[#records + 1] = record
    end
  end
  if #records == 0 and code ~= 0 then return code end
  if #records == 0 then
    launch.exit(3, ("there are no runs in %s: `moonshard run RECIPE` makes them in runs/, or \z
      where the recipe says"):format(table.concat(folders_of(parsed), ", ")))
  end
  local names = read.differing(records)
  local rows = { { "run", "state", "steps", "loss", "best val_loss", "started", "settings" } }
  for _, record in ipairs(records) do
    local object = object_of(record, names)
    if parsed.json then print(core.json_encode(object))
    else rows[#rows + 1] = row_of(object, names) end
  end
  if not parsed.json then print_table(rows) end
  return code
end

return runs
