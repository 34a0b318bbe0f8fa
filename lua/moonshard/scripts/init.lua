-- A user's scripts on any recipe: the options hook=, overlap=, buckets=, gather=, optimizer= ... of
-- a command line. Each is the name of a ready-made link, policy or plan, or a Lua file. And shard=,
-- the strategy by which ms.fsdp shards the model. This file applies them to a model and its
-- optimizer.
local adapters = require "moonshard.scripts.adapters"
local buckets = require "moonshard.parallel.ddp.buckets"
local chat = require "moonshard.chat"
local coded = require "moonshard.nn.coded"
local core = require "moonshard.core"
local ddp = require "moonshard.parallel.ddp"
local fsdp = require "moonshard.parallel.fsdp"
local fsdp_options = require "moonshard.parallel.fsdp.options"
local gathers = require "moonshard.scripts.gathers"
local hooks = require "moonshard.hooks"
local launch = require "moonshard.base.launch"
local local_methods = require "moonshard.scripts.local_methods"
local log = require "moonshard.base.log"
local made_by = require "moonshard.scripts.made_by"
local matrices = require "moonshard.scripts.matrices"
local module = require "moonshard.nn.module"
local optimizer_files = require "moonshard.scripts.optimizer_files"
local pieces = require "moonshard.scripts.pieces"
local plans = require "moonshard.parallel.overlap.plans"
local prefetch = require "moonshard.parallel.fsdp.prefetch"
local schedules = require "moonshard.parallel.pipeline.plans"
local options_of = require "moonshard.base.options"
local own_command = require "moonshard.base.own_command"
local shipped = require "moonshard.base.shipped"
local texts = require "moonshard.scripts.texts"
local tokenizer = require "moonshard.scripts.tokenizer"
local vocab = require "moonshard.scripts.vocab"
local default_text = require "moonshard.scripts.default_text"
local check = options_of.check

---@class ms.scripts
local scripts = {}

-- For each option: its ready-made values, the folder of its scripts in recipes/, its help text, and
-- whether a file in that folder, or at hand, may be given by its name alone. own: recipes that have
-- the option declare it themselves.
local kinds = {
  hook = {
    ready = hooks._ready_made, noun = "hook", folder = "hooks", by_name = true,
    what = "how gradients are sent",
  },
  overlap = {
    ready = plans.ready_made, noun = "policy", folder = "policies",
    what = "when the optimizer steps",
  },
  buckets = {
    ready = buckets.ready_made, noun = "bucket plan", folder = "policies",
    what = "how buckets are cut",
  },
  prefetch = {
    ready = prefetch.ready_made, noun = "strategy", folder = "prefetch",
    what = "what is gathered ahead, with shard=",
  },
  gather = {
    ready = {}, noun = "gather", folder = "gathers", by_name = true,
    what = "what travels in gathers, with shard=",
  },
  ["local"] = {
    ready = {}, noun = "method", folder = "hooks", by_name = true,
    what = "how ranks meet that train weights of their own (diloco, slowmo ...)",
  },
  optimizer = {
    ready = {}, noun = "optimizer", folder = "optim", by_name = true,
    what = "the optimizer, instead of the recipe's own",
  },
  schedule = {
    ready = schedules.ready_made, noun = "schedule", folder = "parallel/schedules", own = true,
    tables = "%.csv$",
  },
}

-- What a kind offers beside files.
local function ready_made(kind)
  return #kind.ready > 0 and table.concat(kind.ready, ", ") or "none"
end

-- The Lua files in the folders where a user keeps scripts, each once, and those of the
-- installation, by the names that shipped.find takes.
local function files_at_hand(folder)
  local recipe, found, seen = launch.recipe or "", {}, {}
  local own, below = shipped.folder "recipes", folder .. "/"
  local near = recipe:match "^(.*/)[^/]*$" or ""
  if own and near == own .. "/" then near = "" end
  local function add(place, shown)
    for _, name in ipairs(core.list(place) or {}) do
      local path = shown .. name
      if name:match "%.lua$" and path ~= recipe and not seen[path] then
        found[#found + 1], seen[path] = path, true
      end
    end
  end
  add(".", "")
  for _, place in ipairs { below, near .. below, "recipes/" .. below } do add(place, place) end
  if own then add(("%s/%s"):format(own, below), "recipes/" .. below) end
  return found
end

-- The file that a value names: the value, or a script at hand by its name alone, unless that is the
-- name of something ready-made.
local function file_of(name, value)
  local kind = kinds[name]
  for _, ready in ipairs(kind.ready) do if ready == value then return value end end
  if kind.by_name and value:match "^[%w_]+$" then
    for _, path in ipairs(files_at_hand(kind.folder)) do
      if path:match "([^/]*)%.lua$" == value then return shipped.find(path) end
    end
  end
  return shipped.find(value)
end

-- The same files, each once: a recipe that was given by its path may be one of the installation,
-- whose files have a shorter name.
local function each_once(folder, files)
  local list, seen = {}, {}
  for _, path in ipairs(files) do
    local short = ("recipes/%s/%s"):format(folder, path:match "[^/]*$")
    if path:sub(-#short - 1) == "/" .. short
        and core.file_read(path) == core.file_read(shipped.find(short)) then
      path = short
    end
    if not seen[path] then list[#list + 1], seen[path] = path, true end
  end
  return list
end

-- A text that says what is wrong with the value of an option, or nil.
local function complaint(name, value)
  local kind = kinds[name]
  value = file_of(name, value)
  local is_file = value:match "%.lua$" or kind.tables and value:match(kind.tables)
  if value == "" or is_file and core.exists(value) == "file" then return nil end
  for _, ready in ipairs(kind.ready) do if ready == value then return nil end end
  local files = each_once(kind.folder, files_at_hand(kind.folder))
  local known, path_of = { table.unpack(kind.ready) }, {}
  for _, path in ipairs(files) do
    local short = path:match "([^/]*)%.lua$"
    known[#known + 1], path_of[short] = short, path
  end
  -- A file of the same name is another way to the same.
  for _, ready in ipairs(kind.ready) do path_of[ready] = nil end
  local near = core.nearest(value:match "([^/]*)%.lua$" or value, known)
  local hint = near and (": did you mean '%s'?"):format(path_of[near] or near) or ""
  return ("there is no %s '%s'%s\nready-made: %s\nfiles at hand: %s"):format(
    is_file and "file" or kind.noun, value, hint, ready_made(kind),
    #files > 0 and table.concat(files, ", ") or "none; a file's name ends in .lua")
end

-- A text that says what is wrong with the value of shard=, or nil.
local function wrong_strategy(value)
  local known = fsdp._strategies
  for _, name in ipairs(known) do if name == value then return nil end end
  if value == "" then return nil end
  if value == "zero1" then
    return "zero1 shards optimizer states only: that is shard = ms.world() among the optimizer's \z
      options, in the recipe"
  end
  return ("there is no strategy '%s': did you mean '%s'?\nstrategies: %s"):format(value,
    core.nearest(value, known) or known[1], table.concat(known, ", "))
end

-- Declares the option if the recipe has none of this name.
local function declare(options, name, declaration)
  if options[name] ~= nil then
    core.raise(("scripts.options: the option %s is declared already"):format(name))
  end
  options[name] = declaration
end

---@param options table
---@return table the same
function scripts.options(options)
  if type(options) ~= "table" then core.raise("scripts.options: a table of options is expected") end
  declare(options, "shard", {
    "", open = true, check = wrong_strategy,
    help = ("shards the model: %s; shard.NAME=VALUE are options of ms.fsdp")
      :format(table.concat(fsdp._strategies, ", ")),
  })
  for name, kind in pairs(kinds) do
    if not kind.own then
      declare(options, name, {
        "", open = true, check = function(value) return complaint(name, value) end,
        help = ("%s: %sa Lua file%s; %s.NAME=VALUE are its own options"):format(kind.what,
          #kind.ready > 0 and ready_made(kind) .. ", or " or "",
          kind.by_name and (", or the name of one in recipes/%s"):format(kind.folder) or "", name),
      })
    end
  end
  return options
end

--- Ends the program with code 2 unless the value is the name of a ready-made link, policy or plan
--- of its kind, or a Lua file.
---@param name "hook"|"overlap"|"buckets"|"gather"|"prefetch"|"local"|"optimizer"|"schedule"
---@param value string
function scripts._check(name, value)
  local wrong = complaint(name, value)
  if wrong then launch.exit(2, ("option %s: %s"):format(name, wrong)) end
end

local makers = {
  hook = hooks._from, overlap = plans.planner_of, buckets = buckets.planner_of,
  gather = gathers.from, prefetch = prefetch.planner_of, ["local"] = local_methods.from,
  optimizer = optimizer_files.from, schedule = schedules.find,
}

-- f(...), in which an error ends the program with code 2 and a message that names the option.
local function guarded(name, value, f, ...)
  local ok, result = pcall(f, ...)
  if ok then return result end
  if launch.is_exit(result) then error(result, 0) end
  local message = tostring(result)
  message = message:match "^[^\n:]*:%d+: (.*)" or message
  -- Files of hook= and of local= are in one folder.
  local hint = name == "hook" and message:find "model is missing"
    and "; a method with which each rank trains its own weights is for local=" or ""
  launch.exit(2, ("option %s=%s: %s%s"):format(name, value, message, hint))
end

-- What the option's value gives: a planner, or pieces; nil: it is not set. The arguments are for
-- local_methods.from.
local function open(cfg, name, model, refuse)
  local value, options = cfg[name] or "", cfg[name .. "_options"] or {}
  if value == "" then
    local key = next(options)
    if key then launch.exit(2, ("%s.%s is given, but no %s=..."):format(name, key, name)) end
    return nil
  end
  scripts._check(name, value)
  value = file_of(name, value)
  local is_file = value:match "%.lua$" ~= nil
  local given = is_file and made_by.noticing(name, value, options) or options
  if name == "local" then
    return guarded(name, value, local_methods.from, value, given, model, refuse)
  end
  return guarded(name, value, makers[name], value, given, is_file and next(options) ~= nil)
end

-- The piece of a file that has no other.
local function only(cfg, name, found, piece)
  for _, other in ipairs(pieces.names) do
    if other ~= piece and found[other] ~= nil then
      launch.exit(2, ("option %s=%s: it gives the piece %s, too: ms.scripts.apply uses all pieces")
        :format(name, cfg[name], other))
    end
  end
  return found[piece]
end

-- For each option whose files may give pieces: what a file of its own kind gives.
local piece_of = {
  ["local"] = "local", hook = "link", gather = "gather", optimizer = "optimizer",
}

---@param cfg table what ms.config gave
---@param name "hook"|"overlap"|"buckets"|"gather"|"prefetch"|"local"|"optimizer"|"schedule"
---@return any
function scripts.resolve(cfg, name)
  if name ~= "local" then
    local found, piece = open(cfg, name), piece_of[name]
    if not (found and piece) then return found end
    return only(cfg, name, found, piece)
  end
  if (cfg[name] or "") == "" then return open(cfg, name) end
  return function(model)
    local make = only(cfg, name, open(cfg, name, model), "local")
    return make and make(model)
  end
end

-- The options whose files may give pieces, in the order in which they are opened.
local OPENED <const> = { "local", "hook", "gather", "optimizer" }

-- Options of ms.fsdp that are given otherwise.
local not_pieces = {
  strategy = "shard=", comm_hook = "the piece link", before_gather = "the piece gather",
  after_gather = "the piece gather", prefetch = "prefetch=",
}

-- Ends the program with code 2 if what a file gives does not fit what else is given. from: for each
-- piece the option that gave it.
local function check_pieces(cfg, found, from)
  local function refuse(piece, format, ...)
    local name = from[piece]
    launch.exit(2, ("option %s=%s: %s"):format(name, cfg[name], format:format(...)))
  end
  if found["local"] then
    local_methods.refuse_others(cfg, from["local"])
    for _, other in ipairs { "link", "gather", "shard" } do
      if found[other] ~= nil then
        refuse("local", "each rank trains its own weights, so that the piece %s of %s=%s has \z
          nothing to do", other, from[other], cfg[from[other]])
      end
    end
  end
  for _, piece in ipairs { "gather", "shard" } do
    if found[piece] and (cfg.shard or "") == "" then
      refuse(piece, "its piece %s is for a sharded model: give shard=... too", piece)
    end
  end
  for key in pairs(found.shard or {}) do
    if not_pieces[key] then
      refuse("shard", "its piece shard has %s, which is given by %s", key, not_pieces[key])
    elseif not fsdp_options.known[key] then
      local names = {}
      for name in pairs(fsdp_options.known) do names[#names + 1] = name end
      table.sort(names)
      local near = core.nearest(tostring(key), names)
      refuse("shard", "its piece shard has '%s', and ms.fsdp has no such option%s", tostring(key),
        near and (": did you mean '%s'?"):format(near) or "")
    end
  end
end

-- What all files give for a model that is not wrapped yet: pieces by name, and for each the option
-- that gave it.
local function all_pieces(cfg, model)
  local found, from = {}, {}
  for _, name in ipairs(OPENED) do
    local given = open(cfg, name, model, function() local_methods.refuse_others(cfg, "local") end)
    for _, piece in ipairs(pieces.names) do
      if given and given[piece] ~= nil then
        if from[piece] then
          launch.exit(2, ("options %s=%s and %s=%s both give the piece %s: leave one of the two \z
            out"):format(from[piece], cfg[from[piece]], name, cfg[name], piece))
        end
        found[piece], from[piece] = given[piece], name
      end
    end
  end
  check_pieces(cfg, found, from)
  return found, from
end

-- The recipe's optimizer, or the one that a file makes instead of it.
local function make_optimizer(cfg, net, make, found, from)
  local own = make(net)
  if not found.optimizer then return own end
  if not optimizer_files.is_optimizer(own) then
    core.raise(("scripts.apply: make gives a %s, and optimizer= takes the place of an ms.Optimizer")
      :format(type(own)))
  end
  own:_withdraw()
  local name = from.optimizer
  local made = guarded(name, cfg[name], found.optimizer, net, own)
  if not optimizer_files.is_optimizer(made) then
    launch.exit(2, ("option %s=%s: it gives a %s, and an ms.Optimizer is expected, as \z
      ms.optim.adamw gives or a kind of ms.optim.define"):format(name, cfg[name], type(made)))
  end
  if made == own then own:_return() end
  return made
end

-- Ready-made policies that never step before all gradients are there.
local late = { [""] = true, classic = true, deferred = true }

-- Options of ms.ddp (key ddp) and of ms.fsdp (key fsdp) that a recipe passes, checked and copied.
local function own_options(extra)
  local copies = {}
  for _, kind in ipairs { "ddp", "fsdp" } do
    copies[kind] = {}
    for key, value in pairs(extra[kind] or {}) do copies[kind][key] = value end
    if copies[kind].comm_hook ~= nil or copies[kind].buckets ~= nil then
      core.raise(("scripts.apply: hook= and buckets= are comm_hook and buckets of ms.%s: use links")
        :format(kind))
    end
  end
  return copies
end

-- Ends the program with code 2 for a complaint of ms.fsdp about its options; raises other errors.
local function sharded(cfg, model, options, found)
  for key, value in pairs(found.shard or {}) do options[key] = value end
  for key, value in pairs(cfg.shard_options or {}) do options[key] = value end
  for key, value in pairs(found.gather or {}) do options[key] = value end
  local ahead = scripts.resolve(cfg, "prefetch")
  if ahead and options.prefetch ~= nil then
    launch.exit(2, "prefetch= and shard.prefetch= are one option: give one of them")
  end
  options.prefetch = ahead or options.prefetch
  options.strategy = cfg.shard
  local ok, result = pcall(fsdp.fsdp, model, options)
  if ok then return result end
  local message = not launch.is_exit(result) and tostring(result):match "fsdp: (.*)"
  if not message then error(result, 0) end
  launch.exit(2, ("option shard=%s: %s"):format(cfg.shard, message))
end

-- Whether the model is sharded; other options that do not fit end the program with code 2.
local function is_sharded(cfg)
  local wanted = (cfg.shard or "") ~= ""
  local key = next(cfg.shard_options or {})
  if key and not wanted then
    launch.exit(2, ("shard.%s is given, but no shard=..."):format(key))
  end
  for _, name in ipairs { "gather", "prefetch" } do
    if not wanted and (cfg[name] or "") ~= "" then
      launch.exit(2, ("option %s=%s: only a sharded model gathers: give shard=... too")
        :format(name, cfg[name]))
    end
  end
  if wanted and (cfg.buckets or "") ~= "" then
    launch.exit(2, ("option buckets=%s: with shard=%s gradients are reduced unit by unit, and \z
      there are no buckets to cut: leave one of the two out"):format(cfg.buckets, cfg.shard))
  end
  return wanted
end

-- What makes a model may give nil and a message, as nn.pretrained does. later: on "meta".
local function make_model(make, later)
  local model, message
  if later then model, message = core.on_device("meta", make) else model, message = make() end
  if model == nil and type(message) == "string" then
    core.raise("scripts.apply: the function that makes the model failed: " .. message)
  elseif not module.is_module(model) then
    core.raise(("scripts.apply: the function that makes the model must return a module, not %s")
      :format(core.is_tensor(model) and "a tensor" or type(model)))
  end
  return model
end

---@param cfg table what ms.config gave
---@param model ms.Module|fun(): ms.Module?, string?
---@param make fun(net: ms.Module): ms.Optimizer
---@param extra? ms.ApplyOptions
---@return ms.Module net, ms.Optimizer optimizer, number? clip
function scripts.apply(cfg, model, make, extra)
  extra = check("scripts.apply", extra, { "clip", "ddp", "fsdp", "links", "meta" })
  if type(make) ~= "function" then
    core.raise("scripts.apply: make must be a function that gives an optimizer, not a "
      .. type(make))
  end
  local clip, policy, given = extra.clip, cfg.overlap or "", own_options(extra)
  local shards = is_sharded(cfg)
  local options = shards and given.fsdp or given.ddp
  if type(model) == "function" then model = make_model(model, shards or extra.meta) end
  if not shards and extra.meta then model:materialize() end
  local found, from = all_pieces(cfg, model)
  if found["local"] then
    if extra.links then core.raise "scripts.apply: links are for gradients that ranks share" end
    guarded(from["local"], cfg[from["local"]], local_methods.give, model, found["local"])
    return model, make_optimizer(cfg, model, make, found, from), clip
  end
  local planner = scripts.resolve(cfg, "overlap")
  options.buckets = scripts.resolve(cfg, "buckets")
  local plain = not (found.link or planner or options.buckets or extra.links or shards)
  if core.world():size() == 1 and plain then
    return model, make_optimizer(cfg, model, make, found, from), clip
  end
  local links = { table.unpack(extra.links or {}) }
  if clip and not late[policy] then
    log.log("overlap=%s may step in backward: the chain clips by the last step's norm", policy)
    table.insert(links, 1, hooks.clip { max_norm = clip, scope = "lagged" })
    clip = nil
  end
  links[#links + 1] = found.link
  if #links > 0 then options.comm_hook = hooks.chain(links) end
  local net
  if shards then net = sharded(cfg, model, options, found) else net = ddp.ddp(model, options) end
  local optimizer = make_optimizer(cfg, net, make, found, from)
  if planner then optimizer:overlap(net, planner) end
  return net, optimizer, clip
end

scripts.texts, scripts.tokenizer, scripts.default_text = texts, tokenizer, default_text
scripts.vocab, scripts.adapters, scripts.matrices = vocab, adapters, matrices.groups

---@param cfg { batch: integer, accumulate?: integer, global_batch?: integer }
---@return integer
function scripts.passes(cfg)
  options_of.argument("scripts.passes", "cfg", cfg, "table")
  local whole, batch = cfg.global_batch, cfg.batch
  if not whole then return cfg.accumulate end
  if whole < batch or whole % batch ~= 0 then
    launch.exit(2, ("option global_batch=%d: a step has whole passes of batch=%d sequences: take \z
      a multiple of it"):format(whole, batch))
  end
  return whole // batch
end

-- Three commands to try with a run that is done. words: its tokenizer. has_texts: the model takes
-- and gives text.
local function show_next(run, model, words, has_texts)
  if not launch.process then return end
  local program, folder = own_command.program(), own_command.quoted(run)
  local how = words and chat.of(words) and "--chat" or "--prompt 'Once upon a time'"
  local commands = {
    has_texts and ("%s generate %s%s %s"):format(program, folder, model, how)
      or ("%s docs --html pages"):format(program),
    ("%s plot %s"):format(program, folder),
    ("%s runs"):format(program),
  }
  log.log("next:  %s", table.concat(commands, "\n       "))
end

---@param result ms.TrainResult
---@param model ms.LanguageModel
---@param has_adapters? boolean
function scripts.save(result, model, has_adapters)
  options_of.argument("scripts.save", "result", result, "table")
  -- Merging adapters ends a model, also a wrapped one, so no weights can come back after it.
  if result.ema and has_adapters then result.ema:_take()
  elseif result.ema and not result.ema.swapped then
    return result.ema:averaged(scripts.save, result, model)
  end
  local is_whole = true
  if has_adapters then
    local meta = getmetatable(model)
    local wrapper = meta.ddp or meta.fsdp
    is_whole = not coded.layers(wrapper and wrapper.wrapped or model)[1]
    assert(model:save_adapters(result.run .. "/adapter"))
    log.log("the adapters are in %s/adapter", result.run)
    if is_whole then model = model:merge_adapters() end
  end
  if is_whole then assert(model:save(result.run .. "/model")) end
  local own, bytes = model:tokenizer(), model.options.vocab == 256
  if result.valid then
    log.log("validation loss %.4f nats per %s", result.valid.loss,
      bytes and not own and "byte" or "token")
  end
  if is_whole then log.log("the model is in %s/model", result.run)
  else
    log.log("its weights have 4 bits, so they are not saved again: generate and eval read the \z
      model that it began with, and these adapters")
  end
  show_next(result.run, is_whole and "/model" or "", own, own ~= nil or bytes)
end

return options_of.closed(scripts, "ms.scripts")
