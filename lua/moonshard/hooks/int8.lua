-- The native link int8, in Lua: gradients are sent as 8-bit numbers, either to every rank, or each
-- part to the rank that adds it up and sends the sum to all.
local ms = require "moonshard"
local stay_local = require "moonshard.hooks.noop" ()

-- 1.5 * 2^23: adding and subtracting it rounds f32 numbers to the nearest whole one, ties to even
local ROUND = 12582912
local function round_(t) return t:add_(ROUND):sub_(ROUND) end

-- x [rows, n] as codes u8 [rows, n] and, for each row, scale and code of zero [rows, 2].
local function quantize(x)
  local low, high = x:min(2, true):minimum_(0), x:max(2, true):maximum_(0)
  local scale = high:sub_(low):div_(255):maximum_(0x1p-23)
  local zero = round_((low / scale):neg_()):clamp_(0, 255)
  return round_(x / scale):add_(zero):clamp_(0, 255):to "u8", ms.cat({ scale, zero }, 2)
end

local function numbers(codes, scales)
  return codes:to("f32"):sub_(scales:narrow(2, 2, 1)):mul_(scales:narrow(2, 1, 1))
end

-- Adds the numbers that `ranks` ranks have sent, each [rows, n], in order of ranks.
local function add_up(codes, scales, ranks, rows, n)
  local sum
  codes, scales = codes:view(ranks, rows, n), scales:view(ranks, rows, 2)
  for r = 1, ranks do
    local x = numbers(codes[r], scales[r])
    sum = sum and sum:add_(x) or x
  end
  return sum
end

return function(options)
  options = options or {}
  local per, block, split = options.per or "tensor", options.block or 512,
    options.form == "all_to_all"
  local codec = per == "block" and ms.codec("int8", { block = block })
  local function up(count, multiple) return (count + multiple - 1) // multiple * multiple end

  return function(bucket)
    local group, buffer, share = bucket:group(), bucket:buffer(), 1 / bucket:divisor()
    local count, ranks = buffer:numel(), group:size()
    if count == 0 then return stay_local(bucket) end
    local reports, sent = bucket:wants_sent(), nil
    local function report(own)
      if reports then sent = own:view(-1):narrow(1, 1, count) end
    end
    -- The loss of the second coding, of this rank's part of the mean, goes into this rank's
    -- residual.
    local function report_part(exact, coded)
      local length = exact:numel()
      local first = group:rank() * length
      length = math.min(length, count - first)
      if not reports or length <= 0 then return end
      local lost = exact:view(-1):narrow(1, 1, length) - coded:view(-1):narrow(1, 1, length)
      sent:narrow(1, first + 1, length):sub_(lost:div_(share))
    end
    local rows, n
    if per == "channel" then
      rows, n = up(count, block) // block, block
      if split then rows = up(rows, ranks) end
    else
      rows = split and ranks or 1
      n = up((count + rows - 1) // rows, codec and block or 1)
    end
    local x = buffer:to("f32"):pad_to(rows * n):view(rows, n)
    local result
    if codec then
      local payload = codec:encode(x)
      report(codec:decode(payload, n))
      if split then
        local sum = codec:decode_sum(group:all_to_all(payload):value(), n):mul_(share)
        local coded = codec:encode(sum)
        report_part(sum, codec:decode(coded, n))
        result = codec:decode(group:all_gather(coded:view(1, -1)):value(), n)
      else result = codec:decode_sum(group:all_gather(payload):value(), n):mul_(share) end
    else
      local codes, scales = quantize(x)
      report(numbers(codes, scales))
      if split then
        local sum = add_up(group:all_to_all(codes):value(), group:all_to_all(scales):value(), ranks,
          rows // ranks, n):mul_(share)
        codes, scales = quantize(sum)
        report_part(sum, numbers(codes, scales))
        result = numbers(group:all_gather(codes):value(), group:all_gather(scales):value())
      else
        result = add_up(group:all_gather(codes):value(), group:all_gather(scales):value(), ranks,
          rows, n):mul_(share)
      end
    end
    if reports then bucket:set_sent(sent) end
    return bucket:shard(buffer:copy_(result:view(-1):narrow(1, 1, count)))
  end
end
