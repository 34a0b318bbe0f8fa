-- The options of ms.train: checked, completed, shown.
local core = require "moonshard.core"
local data_files = require "moonshard.data.files"
local jsonl = require "moonshard.data.jsonl"
local launch = require "moonshard.base.launch"
local log = require "moonshard.base.log"
local module = require "moonshard.nn.module"
local vocabulary = require "moonshard.tokenizer.vocabulary"
local parts_of = require "moonshard.nn.parts"
local plans = require "moonshard.parallel.overlap.plans"
local stages = require "moonshard.train.stages"

local settings = {}

-- Options: name = type, or a list of types; a count is an integer of 1 or more.
local known = {
  model = "module", optimizer = "optimizer", data = { "loader", "function" }, steps = "count",
  valid = "held-out loader", loss = "function", minutes = "number",
  accumulate = "count", clip = "number", dtype = "string", emulate = "boolean",
  run = { "string", "false" },
  resume = "string",
  eval = "table", sample = "table", save = "table",
  on_nan = "string", things = "table", before_step = "function", after_backward = "function",
  after_step = "function", on_eval = "function", log_every = "count", log = "table",
  graph = "boolean", attention = "string", check_replicas = "count",
  by_hand = "boolean", quiet = "boolean", stop = { "table", "function" },
  ema = { "number", "table" }, pipeline = "pipeline",
}

local parts = {
  eval = { every = "integer", batches = "count", measure = "function" },
  sample = {
    every = "integer", seconds = "number", prompt = "string", count = "count",
    temperature = "number", run = "function", tokenizer = "tokenizer",
  },
  log = { tensorboard = "boolean", histograms = "count" },
  save = { every = "integer", last = "count", keep_every = "count", best = "string" },
}

local choices = { dtype = { "f32", "bf16", "f16", "fp8", "auto" },
  on_nan = { "stop", "skip", "ignore" }, attention = { "deterministic", "fast" } }

local function has_method(value, name)
  if type(value) ~= "table" and type(value) ~= "userdata" then return false end
  local ok, method = pcall(function() return value[name] end)
  return ok and type(method) == "function"
end

local function is(value, wanted)
  if type(wanted) == "table" then
    for _, one in ipairs(wanted) do if is(value, one) then return true end end
    return false
  end
  if wanted == "false" then return value == false end
  if wanted == "integer" then return math.type(value) == "integer" end
  if wanted == "count" then return math.type(value) == "integer" and value >= 1 end
  if wanted == "module" then return module.is_module(value) end
  if wanted == "pipeline" then
    local meta = type(value) == "table" and getmetatable(value)
    return type(meta) == "table" and meta.__name == "ms.Pipeline"
  end
  if wanted == "optimizer" then return has_method(value, "step") and has_method(value, "groups") end
  if wanted == "tokenizer" then return has_method(value, "vocab_size") end
  if wanted == "loader" then return has_method(value, "next") end
  if wanted == "held-out loader" then return has_method(value, "batches") end
  return type(value) == wanted
end

local function check_table(values, types, where)
  local names = {}
  for name in pairs(types) do names[#names + 1] = name end
  table.sort(names)
  for name, value in pairs(values) do
    if not types[name] then
      local nearest = core.nearest(tostring(name), names)
      core.raise(("train: unknown option '%s%s'%s")
        :format(where, tostring(name), nearest and (": did you mean '%s%s'?"):format(where, nearest)
          or "; it has " .. table.concat(names, ", ")))
    end
    if not is(value, types[name]) then
      local wanted = type(types[name]) == "table" and table.concat(types[name], " or ")
        or types[name]:gsub("^count$", "count (an integer of 1 or more)")
      core.raise(("train: option %s%s must be a %s, not %s")
        :format(where, name, wanted, tostring(value)))
    end
  end
end

-- Raises for a sample whose text does not become ids of the model.
local function check_sample(o)
  local how = o.sample
  if not how.tokenizer then return end
  local words = vocabulary.of(how.tokenizer)
  local misfit = o.model.options and vocabulary.misfit(words, o.model)
  if misfit then core.raise("train: sample.tokenizer: " .. misfit) end
  if not vocabulary.prompt(words, how.prompt) then
    core.raise "train: give sample.prompt: the tokenizer names no token that begins a text"
  end
end

-- Raises unless exactly one of steps and minutes says how long the run is.
local function check_length(o)
  if o.steps == nil and o.minutes == nil then
    core.raise "train: the option steps is missing (or minutes, from which the steps follow)"
  elseif o.steps ~= nil and o.minutes ~= nil then
    core.raise "train: steps and minutes are both given: one of them says how long the run is"
  elseif o.minutes and not (o.minutes > 0 and o.minutes < math.huge) then
    core.raise(("train: minutes must be above 0, not %g"):format(o.minutes))
  end
end

-- Raises unless exactly one of every and seconds says when samples come.
local function check_sample_times(how)
  if how.every and how.seconds then
    core.raise "train: sample.every and sample.seconds are both given: one of them says when \z
      samples come"
  elseif how.seconds and not (how.seconds > 0 and how.seconds < math.huge) then
    core.raise(("train: sample.seconds must be above 0, not %g"):format(how.seconds))
  end
end

--- Checks the options and returns a completed copy.
---@param options ms.TrainOptions
---@return ms.TrainOptions
function settings.check(options)
  if type(options) ~= "table" then core.raise("train: a table of options is expected") end
  check_table(options, known, "")
  local o = { accumulate = 1, dtype = "f32", on_nan = "stop", resume = "never", graph = false,
    attention = "deterministic" }
  for name, value in pairs(options) do o[name] = value end
  for _, name in ipairs { "model", "optimizer", "data" } do
    if o[name] == nil then core.raise(("train: the option %s is missing"):format(name)) end
  end
  check_length(o)
  for name, types in pairs(parts) do
    if o[name] then
      check_table(o[name], types, name .. ".")
      if types.every and not o[name].every and not (types.seconds and o[name].seconds) then
        core.raise(("train: the option %s.every is missing"):format(name))
      end
    end
  end
  for name, allowed in pairs(choices) do
    local found = false
    for _, choice in ipairs(allowed) do found = found or choice == o[name] end
    if not found then
      core.raise(("train: %s is one of %s, not '%s'")
        :format(name, table.concat(allowed, ", "), o[name]))
    end
  end
  if o.pipeline then stages.check(o) end
  if o.sample then
    check_sample_times(o.sample)
    check_sample(o)
  end
  if o.emulate and o.dtype ~= "fp8" then
    core.raise(("train: emulate belongs to dtype fp8, and dtype is %s"):format(o.dtype))
  end
  if o.clip and not (o.clip > 0) then core.raise("train: clip must be above 0") end
  if o.run == false and (o.save or o.log or o.resume ~= "never") then
    core.raise "train: run = false writes nothing, and so takes no save, log or resume"
  end
  if o.save and o.save.best and o.save.best ~= "valid" then
    core.raise(("train: save.best is \"valid\", the least validation loss, not '%s'")
      :format(o.save.best))
  end
  if type(o.ema) == "number" then o.ema = { decay = o.ema } end
  if o.ema then check_table(o.ema, { decay = "number", warmup = "boolean" }, "ema.") end
  if type(o.stop) == "table" then
    check_table(o.stop, { patience = "count" }, "stop.")
    if not o.stop.patience then core.raise "train: the option stop.patience is missing" end
  end
  for name, given in pairs { ["save.best"] = o.save and o.save.best, stop = o.stop } do
    if given and not (o.eval and o.valid) then
      core.raise(("train: %s needs eval and valid: validations decide"):format(name))
    end
  end
  if o.log and o.log.histograms and not (o.log.tensorboard or launch.tensorboard) then
    core.raise("train: log.histograms needs log.tensorboard = true, which writes them")
  end
  if o.eval and not o.valid then
    core.raise("train: eval needs valid, a loader of held-out data")
  end
  local shared = o.valid and data_files.shared(o.data, o.valid)
  if shared then
    core.raise(("train: data and valid both read '%s', and what is trained on is no validation: \z
      name other files, or split one data set"):format(shared))
  end
  -- Raises now, before the first step, if the loader does not have data for each rank.
  if o.eval and (type(o.valid) == "userdata" or jsonl.is_loader(o.valid)) then
    local ok, message = pcall(o.valid.batches, o.valid, 0)
    if not ok then
      core.raise("train: valid: " .. (message:match "^[^\n]-:%d+: (.*)" or message))
    end
  end
  return o
end

--- Raises for options that need all gradients before the first parameter is stepped.
---@param o ms.TrainOptions
---@param by string what may step in backward
function settings.check_early(o, by)
  local function refuse(what, instead)
    core.raise(("train: %s needs all gradients before the first step, but %s may step in backward: "
      .. "%s"):format(what, by, instead))
  end
  if o.log and o.log.histograms then
    refuse("log.histograms", "leave it out, or use the policy deferred")
  end
  if o.clip then
    refuse("clip", plans.instead_of_norm)
  end
  if o.dtype == "f16" then
    refuse("dtype f16 (its loss scaler)", "use bf16, or the policy deferred")
  end
  if o.on_nan == "skip" then
    refuse("on_nan = \"skip\"", "use on_nan = \"stop\", or the policy deferred")
  end
end

-- "llama, 3.29M parameters, of which 65536 are trained"
local function describe_model(self)
  local count, trained = parts_of.count(self.parameters)
  local function short(n) return n >= 1e6 and ("%.2fM"):format(n / 1e6) or tostring(n) end
  return ("%s, %s parameters%s"):format(tostring(self.o.model):match "^[^:\n]*", short(count),
    trained < count and (", of which %s are trained"):format(short(trained)) or "")
end

-- What the command line or its file has set of the recipe's options, and how many more there are;
-- nil: the recipe declares none.
local function describe_settings()
  if not launch.settings then return nil end
  local set, others = {}, 0
  for _, item in ipairs(launch.settings) do
    if item.changed then set[#set + 1] = item.name .. "=" .. tostring(item.value)
    else others = others + 1 end
  end
  return ("%s; --help lists %d more"):format(#set > 0 and table.concat(set, " ") or "no option",
    others)
end

--- Logs what the run is, in six lines. length: the text about the number of steps.
---@param self ms.Training
---@param length string
function settings.show(self, length)
  local o = self.o
  local resumed = self.start > 0 and (" (resumed at step %d)"):format(self.start) or ""
  local lines = {
    { "model", describe_model(self) },
    { "data", data_files.describe(o.data) },
    { "run", self.run and self.run .. resumed },
    { "dtype", o.dtype .. (self.dtype_why and (": %s"):format(self.dtype_why) or "") },
    { "steps", length },
    { "set", describe_settings() },
  }
  for _, line in ipairs(lines) do
    if line[2] then log.log("%-6s %s", line[1], line[2]) end
  end
end

return settings
