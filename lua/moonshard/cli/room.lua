-- Where memory ends: how much the run would take in all, its largest parts, and options with which
-- it would fit. What is told is what `moonshard check` finds, in a process for each question.
local core = require "moonshard.core"
local launch = require "moonshard.base.launch"
local own_command = require "moonshard.base.own_command"
local quoted = own_command.quoted

local room = {}

-- Seconds for all questions together: a check of a recipe that has no option `steps` may take as
-- long as the recipe has steps.
local PATIENCE <const> = tonumber(os.getenv "MOONSHARD_ADVICE_SECONDS") or 60
-- Steps of a check: after three, all has been made that a step needs.
local STEPS <const> = 3
local UNLIMITED <const> = 1 << 50

---@class ms.RoomQuestion
---@field recipe string its path
---@field arguments string[] key=value
---@field config? string a file with options
---@field ranks integer
---@field is_gpu boolean
---@field few? table options, and their values, with which a check takes few steps
---@field deadline? number by core.clock_ms

local function shown(bytes)
  if bytes < 2 ^ 30 then return ("%.1f MiB"):format(bytes / 2 ^ 20) end
  return ("%.1f GiB"):format(bytes / 2 ^ 30)
end

-- What a check says of the run with other values of some options, under this limit of memory; nil:
-- it does not fit, it cannot be run so, or the time is over. With several ranks it is the first
-- one's answer. If the user interrupts a check, none follows.
local function ask(question, changes, limit)
  local left = math.ceil((question.deadline - core.clock_ms()) / 1e3)
  if left < 1 then return nil end
  local file = os.tmpname()
  local words = {
    ("timeout --foreground %d"):format(left), quoted(launch.process.program), "check",
    quoted(question.recipe), "--json --rank 0",
    ("--answer %s --memory %d -n %d"):format(quoted(file), limit, question.ranks),
  }
  local function add(text) words[#words + 1] = text end
  if question.is_gpu then add "--device cuda" end
  if question.config then add("--config " .. quoted(question.config)) end
  for _, argument in ipairs(question.arguments) do
    if changes[argument:match "^[^=]*"] == nil then add(quoted(argument)) end
  end
  for _, change in ipairs(changes) do add(quoted(change .. "=" .. changes[change])) end
  local ok, how = os.execute(table.concat(words, " ") .. " >/dev/null 2>&1 </dev/null")
  if how == "signal" then question.deadline = 0 end
  local text = ok and core.file_read(file)
  os.remove(file)
  return text and core.json_decode(text) or nil
end

-- Changes of options: their names in order, each with its value.
local function changed(base, ...)
  local changes, more = { table.unpack(base) }, { ... }
  for _, name in ipairs(base) do changes[name] = base[name] end
  for i = 1, #more, 2 do
    changes[#changes + 1], changes[more[i]] = more[i], tostring(more[i + 1])
  end
  return changes
end

local function text_of(changes)
  local words = {}
  for i, name in ipairs(changes) do words[i] = name .. "=" .. changes[name] end
  return table.concat(words, " ")
end

-- Batches that are half as large, and half of that: a step has as many sequences by more passes
-- where the recipe has an option for their number.
local function halves(base, options)
  local list, batch, passes = {}, options.batch, options.accumulate
  if math.type(batch) ~= "integer" then return list end
  if math.type(passes) ~= "integer" or options.global_batch then passes = nil end
  while batch % 2 == 0 do
    batch, passes = batch // 2, passes and 2 * passes
    list[#list + 1] = passes and changed(base, "batch", batch, "accumulate", passes)
      or changed(base, "batch", batch)
  end
  return list
end

-- Lists of changes, the best known first: of each list the first one that fits is told.
local function alternatives(options, question)
  local has_rest = options.recompute == "false"                -- as recipes with "matmul" have it
  local recompute = (has_rest or options.recompute == false) and changed({}, "recompute", true)
  local found = { halves({}, options), {} }
  if has_rest then table.insert(found[2], changed({}, "recompute", "matmul")) end
  if recompute then table.insert(found[2], recompute) end
  if options.shard == "" and question.ranks > 1 then
    found[#found + 1] = { changed({}, "shard", "full_shard") }
  end
  if options.shard == "" and question.is_gpu then
    found[#found + 1] = { changed({}, "shard", "full_shard", "shard.offload", "cpu") }
  end
  return found, recompute and halves(recompute, options) or {}
end

-- The first of these changes with which the run fits, as text.
local function first_that_fits(question, list, limit)
  for _, changes in ipairs(list) do
    local answer = ask(question, changed(changes, table.unpack(question.few)), limit)
    if answer then
      return ("%s (%s)"):format(text_of(changes), shown(answer.peak_bytes[1]))
    end
  end
end

local function what_fits(question, options, limit)
  local fits = {}
  local lists, both = alternatives(options, question)
  for _, list in ipairs(lists) do fits[#fits + 1] = first_that_fits(question, list, limit) end
  if #fits == 0 then fits[1] = first_that_fits(question, both, limit) end
  return fits
end

-- The largest parts of the peak, where the run is one of ms.train: the rest is of the steps.
local function parts_of(whole)
  local list, rest = {}, whole.peak_bytes[1]
  for name, bytes in pairs(whole.parts_bytes or {}) do
    list[#list + 1], rest = { name, bytes }, rest - bytes
  end
  if #list == 0 then return "" end
  list[#list + 1] = { "what steps make (activations)", rest }
  table.sort(list, function(a, b) return a[2] > b[2] end)
  local texts = {}
  for i = 1, math.min(3, #list) do texts[i] = ("%s %s"):format(list[i][1], shown(list[i][2])) end
  return ": " .. table.concat(texts, ", ")
end

--- Lines for the user after a message that says that memory has ended; nil: it does not say so, the
--- recipe has no options, or it cannot be checked.
---@param message string
---@param question ms.RoomQuestion|fun(): ms.RoomQuestion the function is called if it does say so
---@return string?
function room.advice(message, question)
  local limit = math.tointeger(tonumber(message:match "no memory for %d+ bytes: .-limit (%d+)"))
  if not limit or not launch.process then return nil end
  if type(question) == "function" then question = question() end
  question.few, question.deadline = { "steps", STEPS }, core.clock_ms() + PATIENCE * 1e3
  local whole = ask(question, changed({}, table.unpack(question.few)), UNLIMITED)
  if not whole then
    question.few = {}
    whole = ask(question, {}, UNLIMITED)
  end
  if not whole or not whole.options then return nil end
  local lines = {
    ("  in all it would take %s%s, and the limit is %s%s"):format(shown(whole.peak_bytes[1]),
      question.ranks > 1 and " on rank 0" or "", shown(limit), parts_of(whole)),
  }
  local fits = what_fits(question, whole.options, limit)
  lines[2] = #fits > 0 and "  what would fit, by `moonshard check`: " .. table.concat(fits, "; ")
    or "  no option was found with which it would fit: take a smaller model or shorter sequences"
  return table.concat(lines, "\n")
end

--- The question about the recipe that this process runs alone.
---@return ms.RoomQuestion
function room.own_question()
  return {
    recipe = launch.recipe, arguments = launch.arguments, config = launch.config_file, ranks = 1,
    is_gpu = launch.for_gpu or core.device() == "cuda",
  }
end

return room
