-- ddp:join: ranks with different numbers of inputs. Before each forward, one small all_gather tells
-- all ranks what each rank is about to do. A rank without inputs left takes part with zeros until
-- no rank has inputs.
local buckets = require "moonshard.parallel.ddp.buckets"
local core = require "moonshard.core"
local log = require "moonshard.base.log"
local joined = require "moonshard.optim.sharded_join"
local overlap = require "moonshard.parallel.overlap"
local uneven = require "moonshard.parallel.uneven"
local copied = require "moonshard.optim.copied"

local join = {}

--- A join that runs.
---@class ms.Joining
---@field live boolean means are over the ranks that still have inputs
---@field stop? boolean all ranks raise when the first has no inputs left
---@field flags integer the bits for `live` and `stop` in every word
---@field answer? table the exchange of words that has not been read yet
---@field last? integer the highest rank that had inputs when ranks last compared
---@field stopped? boolean the join ends because of `stop`
---@field uneven? boolean some ranks had inputs while others had none

-- A rank's word in the exchange: 0 if it has no inputs left; else 1 and bits for what its forward
-- does; or a step of a sharded optimizer, with the optimizer's number.
local LIVE <const>, SYNC <const>, BUFFERS <const>, REBUILD <const> = 1, 2, 4, 8
local OF_LIVE <const>, STOP <const>, STEP <const>, NUMBER <const> = 16, 32, 64, 7
local MANY <const> = 1000  -- after so many steps without own inputs, a rank logs a warning

-- Sends this rank's word. The answer waits for the other ranks' host threads, not for computation.
local function send_word(s, word)
  s.joining.answer = s.group:_share_begin("all_gather", "i32", { word }, "join")
end

-- The words of all ranks, the number of ranks that have inputs, and the highest of these ranks
-- (nil: there is none). Blocks until the other ranks have sent theirs.
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
  j.uneven = j.uneven or live > 0 and live < #words
  return words, live, highest
end

-- With stop, raises on all ranks as soon as one has no inputs left.
local function check_all_live(s, words, live)
  if not s.joining.stop or live == #words or live == 0 then return end
  for rank, word in ipairs(words) do
    if word == 0 then
      s.joining.stopped = true
      uneven.align_steps(s.group)
      core.raise(("join: rank %d has no inputs left (stop = true)"):format(rank - 1))
    end
  end
end

local function set_divisor(s, live) s.reducer:divisor(s.joining.live and live or s.group:size()) end

--- Before a recorded forward of this rank: sends the rank's word. Returns the rank whose buffers
--- all ranks get, if buffers are synchronized.
---@param s ms.DDPState
---@param buffers boolean
---@return integer?
function join.before_forward(s, buffers)
  local j = s.joining
  if j.answer then read_words(s) end
  send_word(s, LIVE | j.flags | (s.no_sync and 0 or SYNC | (s.rebuild and REBUILD or 0))
    | (buffers and BUFFERS or 0))
  -- If no rank needs the answer now, it is read later, and no rank waits here.
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

--- Before a step of a sharded optimizer of this rank: returns the ranks without inputs left, and
--- the rank that sends them what they need for the step.
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

-- Takes part in one step of the other ranks, with zeros. Returns whether it was a pass that
-- reduces.
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
      log.warn("join: rank %d has had no inputs for %d steps while other ranks have: \z
        distribute inputs more evenly", s.group:rank(), steps)
    end
  end
end

--- Runs f, with this rank's inputs. Then this rank takes part with zeros until all ranks have run
--- out of inputs, and gets the values of a rank that had inputs longest.
---@param s ms.DDPState
---@param options { divisor?: "all"|"live", stop?: boolean }
---@param f function
---@param synchronize_buffers fun(s: table, root: integer)
---@param copy fun(s: table, root: integer) values of that rank to all
---@return any ... what f returned
function join.run(s, options, f, synchronize_buffers, copy)
  local o = uneven.check(options, f)
  if s.joining then core.raise "join: one is running already" end
  local j = { live = o.divisor == "live", stop = o.stop }
  j.flags = (j.live and OF_LIVE or 0) | (j.stop and STOP or 0)
  s.joining = j
  local scope <close> = setmetatable({}, { __close = function(_, failure) -- luacheck: ignore scope
    s.joining = nil
    if s.reducer then s.reducer:divisor(s.group:size()) end
    -- If this rank left silently, the other ranks would wait for it.
    if failure ~= nil and not j.stopped and s.group:size() > 1 then
      core.comm_leave("join: " .. tostring(failure))
    end
  end })
  local results = table.pack(f())
  follow(s, synchronize_buffers)
  uneven.align_steps(s.group)
  if j.last then copy(s, j.last) end
  -- Ranks that ran out of inputs have not taken the last steps.
  if j.last and j.uneven then copied.from(s, j.last) end
  return table.unpack(results, 1, results.n)
end

return join
