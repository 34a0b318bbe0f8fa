-- The options of ms.train: checked, completed, shown.
local core = require "moonshard.core"
local data_files = require "moonshard.data.files"
local launch = require "moonshard.base.launch"
local log = require "moonshard.base.log"
local module = require "moonshard.nn.module"
local vocabulary = require "moonshard.tokenizer.vocabulary"
local plans = require "moonshard.parallel.overlap.plans"
local machines = require "moonshard.base.machine"

local settings = {}

-- Options: name = type, or a list of types; a count is an integer of 1 or more.
local known = {
  model = "module", optimizer = "optimizer", data = { "loader", "function" }, steps = "count",
  valid = "held-out loader", loss = "function",
  accumulate = "count", clip = "number", dtype = "string", run = "string", resume = "string",
  eval = "table", sample = "table", save = "table",
  on_nan = "string", things = "table", before_step = "function", after_backward = "function",
  after_step = "function", on_eval = "function", log_every = "count", log = "table",
  graph = "boolean", attention = "string", check_replicas = "count",
  by_hand = "boolean",
}

local parts = {
  eval = { every = "integer", batches = "count", measure = "function" },
  sample = {
    every = "integer", prompt = "string", count = "count", temperature = "number", run = "function",
    tokenizer = "tokenizer",
  },
  log = { tensorboard = "boolean", histograms = "count" },
  save = { every = "integer", last = "count", keep_every = "count" },
}

local choices = { dtype = { "f32", "bf16", "f16" }, on_nan = { "stop", "skip", "ignore" },
  attention = { "deterministic", "fast" } }

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
  if wanted == "integer" then return math.type(value) == "integer" end
  if wanted == "count" then return math.type(value) == "integer" and value >= 1 end
  if wanted == "module" then return module.is_module(value) end
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

--- Checks the options and returns a completed copy.
---@param options ms.TrainOptions
---@return ms.TrainOptions
function settings.check(options)
  if type(options) ~= "table" then core.raise("train: a table of options is expected") end
  check_table(options, known, "")
  local o = { accumulate = 1, dtype = "f32", on_nan = "stop", resume = "never", graph = false,
    attention = "deterministic" }
  for name, value in pairs(options) do o[name] = value end
  for _, name in ipairs { "model", "optimizer", "data", "steps" } do
    if o[name] == nil then core.raise(("train: the option %s is missing"):format(name)) end
  end
  for name, types in pairs(parts) do
    if o[name] then
      check_table(o[name], types, name .. ".")
      if types.every and not o[name].every then
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
  if o.sample then check_sample(o) end
  if o.clip and not (o.clip > 0) then core.raise("train: clip must be above 0") end
  if o.log and o.log.histograms and not o.log.tensorboard then
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
  if o.eval and type(o.valid) == "userdata" then
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

--- Logs the table of settings in force.
---@param self ms.Training
function settings.show(self)
  local o, count, trained = self.o, 0, 0
  for _, p in ipairs(self.parameters) do
    local elements = 1
    for _, size in ipairs(p:full_shape()) do elements = elements * size end
    count = count + elements
    if p:requires_grad() then trained = trained + elements end
  end
  local function short(n) return n >= 1e6 and ("%.2fM"):format(n / 1e6) or tostring(n) end
  local lines = {
    { "recipe", launch.recipe or "(none)" },
    { "run", self.run .. (self.start > 0 and (" (resumed at step %d)"):format(self.start) or "") },
    {
      "model",
      ("%s, %s parameters%s"):format(tostring(o.model):match "^[^:\n]*", short(count),
        trained < count and (", of which %s are trained"):format(short(trained)) or ""),
    },
    { "machine", machines.describe() },
    { "steps", ("%d, %s"):format(o.steps, o.dtype) },
  }
  for _, line in ipairs(lines) do log.log("%-10s %s", line[1], line[2]) end
  for _, item in ipairs(launch.settings or {}) do
    log.log("  %-20s %s%s", item.name, tostring(item.value), item.changed and "  (set)" or "")
  end
end

return settings
