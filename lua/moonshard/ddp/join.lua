-- ddp:join: ranks with different numbers of inputs. Before each forward all ranks tell each other
-- what they are about to do, in one small all_gather; a rank that has no inputs left takes part
-- with zeros until no rank has any.
local buckets = require "moonshard.ddp.buckets"
local core = require "moonshard.core"
local log = require "moonshard.log"
local joined = require "moonshard.optim.joined"
local overlap = require "moonshard.overlap"
local check = require "moonshard.options".check

local join = {}

--- A join that runs.
---@class ms.Joining
---@field live boolean means are over the ranks that still have inputs
---@field stop? boolean all ranks raise when the first has no inputs left
---@field flags integer the bits of every word that say both
---@field answer? table the exchange of words that has not been read yet
---@field last? integer the highest rank that had inputs when ranks last compared
---@field stopped? boolean it ends because of `stop`

-- A rank's word: 0 when it has no inputs left, else 1 and what its forward does; or that a sharded
-- optimizer steps, and which.
local LIVE <const>, SYNC <const>, BUFFERS <const>, REBUILD <const> = 1, 2, 4, 8
local OF_LIVE <const>, STOP <const>, STEP <const>, NUMBER <const> = 16, 32, 64, 7
local MANY <const> = 1000  -- steps without inputs of its own that call for a remark

-- Sends this rank's word. The answer waits for the other ranks' hosts, not for computation.
local function send_word(s, word)
  s.joining.answer = s.group:_share_begin("all_gather", "i32", { word }, "join")
end

-- The words of all ranks, the number of ranks that have inputs, and the highest of these ranks
-- (nil: there is none). Blocks until the other ranks' hosts have sent theirs.
local function read_words(s)
  local j = s.joining
  local words = s.group:_share_end("all_gather", "i32", 1, j.answer)
  local live, highest = 0, nil
  for rank, word in ipairs(words) do
    if word ~= 0 then
      if (word ~ j.flags) & (OF_LIVE | STOP) ~= 0 then
        core.raise(("join: ranks %d and %d were given different options")
          :format(s.group:rank(), rank - 1))
      end
      live, highest = live + 1, rank - 1
    end
  end
  j.answer = nil
  if highest then j.last = highest end
  return words, live, highest
end

-- All ranks meet a request to stop before the step of the same number. They had different numbers
-- of steps here, so they go on from the highest one. Every rank calls this once, when it leaves.
local function align_steps(s)
  if s.group:size() == 1 then return end
  for _, count in ipairs(s.group:_share("all_gather", "i64", { core.comm_steps() }, "join")) do
    core.comm_steps(count)
  end
end

-- With stop, all ranks end as soon as one has no inputs left.
local function check_all_live(s, words, live)
  if not s.joining.stop or live == #words or live == 0 then return end
  for rank, word in ipairs(words) do
    if word == 0 then
      s.joining.stopped = true
      align_steps(s)
      core.raise(("join: rank %d has no inputs left (stop = true)"):format(rank - 1))
    end
  end
end

local function set_divisor(s, live) s.reducer:divisor(s.joining.live and live or s.group:size()) end

--- Before a recorded forward of this rank: says what it is about to do. Returns the rank whose
--- buffers all ranks take, if buffers are synchronized.
---@param s ms.DDPState
---@param buffers boolean
---@return integer?
function join.before_forward(s, buffers)
  local j = s.joining
  if j.answer then read_words(s) end
  send_word(s, LIVE | j.flags | (s.no_sync and 0 or SYNC | (s.rebuild and REBUILD or 0))
    | (buffers and BUFFERS or 0))
  -- Otherwise no rank waits here; the answer is read later.
  if not (j.live or j.stop or buffers) then return nil end
  local words, live, highest = read_words(s)
  check_all_live(s, words, live)
  set_divisor(s, live)
  return highest
end

local function check_same(words, highest)
  local word = words[highest + 1]
  for rank, other in ipairs(words) do
    if other ~= 0 and other ~= word then
      core.raise(("join: ranks %d and %d do different things: no_sync, rebuild_buckets and steps \z
        of sharded optimizers belong to the same forward on all ranks"):format(rank - 1, highest))
    end
  end
  return word
end

--- Before a step of a sharded optimizer of this rank: the ranks without inputs left, and the rank
--- that sends them what they need for the step.
---@param s ms.DDPState
---@param number integer the optimizer's
---@return integer[] absent
---@return integer? from
function join.before_step(s, number)
  if s.joining.answer then read_words(s) end
  send_word(s, LIVE | s.joining.flags | STEP | number << NUMBER)
  local words, live, highest = read_words(s)
  check_all_live(s, words, live)
  check_same(words, highest)
  local absent = {}
  for rank, word in ipairs(words) do if word == 0 then absent[#absent + 1] = rank - 1 end end
  return absent, highest
end

-- Takes part in one step of the other ranks, with zeros. Whether it was a pass that reduces.
local function take_part(s, words, live, highest, synchronize_buffers)
  local word = check_same(words, highest)
  if word & STEP ~= 0 then joined.follow(word >> NUMBER, s.group, highest) end
  if word & SYNC == 0 then return false end
  set_divisor(s, live)
  if word & REBUILD ~= 0 then
    if s.plan then buckets.again(s) else s.reducer:rebuild() end
  end
  if s.plan then buckets.begin(s) end
  overlap.await(s)
  s.reducer:forward(true)
  overlap.begin(s, true)
  if word & BUFFERS ~= 0 then synchronize_buffers(s, highest) end
  s.shadow = true
  local scope <close> = setmetatable({}, { -- luacheck: ignore scope
    __close = function() s.shadow = nil end,
  })
  s.reducer:shadow()
  overlap.finish(s)
  return true
end

-- Takes part until no rank has inputs left.
local function follow(s, synchronize_buffers)
  local steps = 0
  if s.joining.answer then read_words(s) end
  while true do
    send_word(s, 0)
    local words, live, highest = read_words(s)
    if not highest then return end
    check_all_live(s, words, live)
    if take_part(s, words, live, highest, synchronize_buffers) then steps = steps + 1 end
    if steps == MANY then
      log.warn("join: rank %d has had no inputs for %d steps while others go on: share them out \z
        more evenly", s.group:rank(), steps)
    end
  end
end

--- f runs with this rank's inputs; then this rank takes part until all have run out, and gets the
--- values of one of those that went on longest.
---@param s ms.DDPState
---@param options { divisor?: "all"|"live", stop?: boolean }
---@param f function
---@param synchronize_buffers fun(s: table, root: integer)
---@param copy fun(s: table, root: integer) values of that rank to all
---@return any ... what f returned
function join.run(s, options, f, synchronize_buffers, copy)
  local o = check("join", options, { "divisor", "stop" })
  if o.divisor ~= nil and o.divisor ~= "all" and o.divisor ~= "live" then
    local nearest = core.nearest(tostring(o.divisor), { "all", "live" })
    core.raise(("join: divisor is 'all' or 'live', not '%s'%s")
      :format(tostring(o.divisor), nearest and (": did you mean '%s'?"):format(nearest) or ""))
  end
  if o.stop ~= nil and type(o.stop) ~= "boolean" then
    core.raise("join: stop must be a boolean, not " .. type(o.stop))
  end
  if type(f) ~= "function" then core.raise("join: a function is expected, not " .. type(f)) end
  if core.in_hook() then core.raise "join cannot be used inside a hook" end
  if s.joining then core.raise "join: one is running already" end
  local j = { live = o.divisor == "live", stop = o.stop }
  j.flags = (j.live and OF_LIVE or 0) | (j.stop and STOP or 0)
  s.joining = j
  local scope <close> = setmetatable({}, { __close = function(_, failure) -- luacheck: ignore scope
    s.joining = nil
    if s.reducer then s.reducer:divisor(s.group:size()) end
    -- Without this the other ranks would wait for this one.
    if failure ~= nil and not j.stopped and s.group:size() > 1 then
      core.comm_leave("join: " .. tostring(failure))
    end
  end })
  local results = table.pack(f())
  follow(s, synchronize_buffers)
  align_steps(s)
  if j.last then copy(s, j.last) end
  return table.unpack(results, 1, results.n)
end

return join
