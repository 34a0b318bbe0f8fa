-- Which algorithms of their library the products of a GPU use. A library has several for a product,
-- and its own estimate of which is fastest is not always right. `moonshard run --tune` times them
-- after the first steps, and keeps what it chooses in a file, which later runs use.
--
-- Choices decide about bits. So rank 0 alone reads the file and times, all ranks use what it says,
-- and a checkpoint has the choices with which it was trained.
local core = require "moonshard.core"
require "moonshard.parallel.group"                -- methods of the world
local launch = require "moonshard.base.launch"
local log = require "moonshard.base.log"

---@class ms.ProductChoices
---@field place string the GPU and the library that they are for
---@field choices table<string, string> algorithms by the keys of products
---@field timed boolean the run that chose has timed its products

local tune = {}

-- The step of a process at whose end products are timed.
local TIMED_STEP <const> = 3
local VERSION <const> = 1          -- of the file

local state = {
  ready = false,     -- the choices are known: from a checkpoint or from the file
  place = nil,       -- of rank 0
  choices = {},
  timed = false,
}

----------------------------------------------------------------------------------------------- file

--- Where the file of choices is, and whether the environment names it.
---@return string path
---@return boolean is_named
function tune.path()
  local named = os.getenv "MOONSHARD_TUNED"
  if named and named ~= "" then return named, true end
  local base = os.getenv "XDG_CACHE_HOME"
  if not base or base == "" then base = (os.getenv "HOME" or "/tmp") .. "/.cache" end
  return base .. "/moonshard/products.json", false
end

local function hash_of(places) return ("%016x"):format(core.hash(core.json_encode(places))) end

local function is_algorithm(key, value)
  return type(key) == "string" and key ~= "" and #key < 320 and type(value) == "string"
    and #value == 128 and not value:find "[^0-9a-f]"
end

local function are_choices(choices)
  if type(choices) ~= "table" then return false end
  for key, value in pairs(choices) do if not is_algorithm(key, value) then return false end end
  return true
end

-- What is wrong with the file's content; nil: nothing.
local function problem_of(found)
  if type(found) ~= "table" or type(found.places) ~= "table" then return "it has no choices" end
  if found.version ~= VERSION then
    return ("its version is %s, and %d is known"):format(tostring(found.version), VERSION)
  end
  for place, choices in pairs(found.places) do
    if type(place) ~= "string" or not are_choices(choices) then
      return "a choice in it is none"
    end
  end
  if found.hash ~= hash_of(found.places) then return "its content does not match its hash" end
end

--- The choices in the file, by place. nil: there is no file, or it cannot be used; then message
--- says why.
---@return table<string, table<string, string>>? places
---@return string? message
function tune.read()
  local path, is_named = tune.path()
  local text, message, code = core.file_read(path)
  if not text then
    if code ~= "not_found" then return nil, message end
    local is_made = launch.tune == "yes"
    return nil, is_named and not is_made and ("MOONSHARD_TUNED: there is no file '%s' \z
      (moonshard run --tune makes it)"):format(path) or nil
  end
  local found
  found, message = core.json_decode(text)
  message = found == nil and message or problem_of(found)
  if not message then return found.places end
  return nil, ("'%s' is damaged: %s; its choices of products are not used (moonshard run --tune \z
    writes it anew)"):format(path, message)
end

--- For `moonshard info`: how many choices the file has for that GPU.
---@param gpu integer from 0
---@return string
function tune.describe(gpu)
  local place, path = core.products_place(gpu), tune.path()
  local places, message = tune.read()
  if message then return message end
  local count = 0
  for _ in pairs(places and places[place] or {}) do count = count + 1 end
  if count == 0 then return "none (moonshard run --tune makes them)" end
  return ("%d in %s"):format(count, path)
end

-- Adds choices to what the file has by now.
local function write(place, choices)
  local path = tune.path()
  local places = tune.read() or {}
  places[place] = places[place] or {}
  for key, algorithm in pairs(choices) do places[place][key] = algorithm end
  local folder = path:match "^(.*)/[^/]+$"
  local ok, message = true, nil
  if folder and folder ~= "" then ok, message = core.make_directory(folder) end
  if ok then
    ok, message = core.file_write(path, core.json_encode {
      version = VERSION, hash = hash_of(places), places = places,
    })
  end
  if not ok then log.warn("--tune: the choices of products were not kept: %s", message) end
  return ok
end

-------------------------------------------------------------------------------------------- choices

-- From now on this rank uses choices that were made at `place`, if it is such a place.
local function apply(place, choices)
  state.place, state.choices = place, choices
  local own = core.products_place()
  if next(choices) and own ~= place then
    log.warn("choices of products are for %s, and this rank has %s: products use the library's \z
      first candidates", place, own or "no cuBLASLt")
    choices = {}
  end
  core.products_use(choices, core.rank() ~= 0)
end

-- All ranks use what rank 0 has.
local function apply_together(place, choices)
  local text = core.json_encode { place = place, choices = choices }
  local sent = core.json_decode(core.world():_share_text(text, 0, "choices of products"))
  apply(sent.place, sent.choices)
end

--- Before the first step: all ranks get the choices in the file, unless they have those of a
--- checkpoint.
function tune.open()
  if state.ready then return end
  state.ready = true
  if core.device() ~= "cuda" then
    if launch.tune == "yes" then
      launch.exit(2, ("--tune: products are timed on a GPU, and this run computes on device %s: \z
        add --device cuda"):format(core.device()))
    end
    return
  end
  local place, choices = core.products_place() or "", {}
  if core.rank() == 0 and launch.tune ~= "no" then
    local places, message = tune.read()
    if message then log.warn("%s", message) end
    choices = places and places[place] or {}
  end
  apply_together(place, choices)
end

--- What a checkpoint keeps; nil where products have no choices.
---@return ms.ProductChoices?
function tune.state()
  if not state.place then return nil end
  return { place = state.place, choices = state.choices, timed = state.timed }
end

--- Uses what a checkpoint has kept. nil: it was trained without a GPU.
---@param saved? ms.ProductChoices
function tune.load(saved)
  if core.device() ~= "cuda" then return end
  if type(saved) ~= "table" or type(saved.place) ~= "string" or not are_choices(saved.choices) then
    return
  end
  if saved.place ~= core.products_place() then
    if core.rank() == 0 then
      log.warn("the checkpoint's choices of products are for %s; here they are not used",
        saved.place)
    end
    return
  end
  state.ready, state.timed = true, saved.timed == true
  if state.timed and launch.tune == "yes" then
    log.log "--tune: nothing is timed: the checkpoint has the choices of products of its run"
  end
  apply(saved.place, saved.choices)
end

--------------------------------------------------------------------------------------------- timing

-- On rank 0: the choices with those that are made now.
local function time_products()
  local start, choices = core.clock_ms(), {}
  local count, none, before, after = 0, 0, 0, 0
  for key, algorithm in pairs(state.choices) do choices[key] = algorithm end
  for key, algorithm, us, first_us in core.products_time do
    if us < 0 then none = none + 1
    else
      count, choices[key] = count + 1, algorithm
      if first_us > 0 then before, after = before + first_us, after + us end
    end
  end
  local line = ("--tune: %d kinds of products timed in %.1f s"):format(count,
    (core.clock_ms() - start) / 1e3)
  if count > 0 then
    line = ("%s: one of each takes %.0f us, with the library's first candidates %.0f us")
      :format(line, after, before)
  end
  if none > 0 then line = ("%s; %d could not be timed"):format(line, none) end
  if count > 0 and write(state.place, choices) then line = line .. "; kept in " .. tune.path() end
  log.log("%s", line)
  return choices
end

--- For train/steps.lua, at the end of each step. ends: of steps so far.
---@param ends integer
function tune.at_end(ends)
  if launch.tune ~= "yes" or state.timed or not state.place or ends ~= TIMED_STEP then
    return
  end
  state.timed = true
  apply_together(state.place, core.rank() == 0 and time_products() or {})
end

--- At the end of a run with --tune that has timed nothing: says so.
function tune.close()
  if launch.tune ~= "yes" or state.timed or core.rank() ~= 0 then return end
  log.warn("--tune: nothing was timed: products are timed at the end of the third step of ms.steps")
end

return tune
