-- The native link adasum, in Lua. Two ranks combine their gradients a and b of each parameter to a
-- (1 - a.b / 2 a.a) + b (1 - a.b / 2 b.b); each of the two ranks computes one half. Pairs of pairs
-- follow, until all ranks have the result.
local ms = require "moonshard"

return function()
  return function(bucket)
    local group, buffer, shapes = bucket:group(), bucket:buffer(), bucket:gradients()
    local rank, size, dtype = group:rank(), group:size(), buffer:dtype()
    if bucket:wants_sent() then
      error("adasum in Lua: error_feedback stands before it, but its result is not a mean", 0)
    end
    local mine = buffer:to("f32"):clone()

    local function send(t, to) return group:send(t:to(dtype):clone(), to) end
    local function receive(count, from)
      return group:recv(ms.zeros { count, dtype = dtype }, from):value():to "f32"
    end
    local function exchange(out, count, other)
      local sent = send(out, other)
      local theirs = receive(count, other)
      sent:value()
      return theirs
    end
    -- Calls f(position, mine, theirs) for the part of each parameter that is among the numbers
    -- first .. first + count - 1.
    local function each(first, count, theirs, f)
      local begin = 1
      for i, p in ipairs(shapes) do
        local from, to = math.max(begin, first), math.min(begin + p:numel(), first + count)
        if from < to then
          f(i, mine:narrow(1, from, to - from), theirs:narrow(1, from - first + 1, to - from))
        end
        begin = begin + p:numel()
      end
    end

    -- Combines these numbers, in `mine`. The ranks whose numbers differ from this rank's in bits up
    -- to distance have the other parts of the same vectors; the dot products of all parts are
    -- added.
    local function combine(first, count, theirs, distance)
      local products = ms.zeros { 3, #shapes }
      local own = rank & distance ~= 0 and 3 or 2            -- the rows: a.b, a.a, b.b
      each(first, count, theirs, function(i, a, b)
        products[1]:narrow(1, i, 1):copy_(a:dot(b))
        products[own]:narrow(1, i, 1):copy_(a:dot(a))
        products[5 - own]:narrow(1, i, 1):copy_(b:dot(b))
      end)
      local bit = 1
      while bit <= distance do
        local sent = group:send(products, rank ~ bit)
        local others = group:recv(ms.zeros { 3, #shapes }, rank ~ bit):value()
        sent:value()
        products:add_(others)
        bit = bit * 2
      end
      local function factors(square)
        return (1 - products[1] / (square * 2)):masked_fill(square:le(0), 1)
      end
      local of_mine, of_theirs = factors(products[own]), factors(products[5 - own])
      each(first, count, theirs, function(i, a, b)
        a:mul_(of_mine[i]):add_(b:mul_(of_theirs[i]))
      end)
    end

    local function reduce(first, count, distance, power)
      if distance == power then return end
      local lower, other = count // 2, rank ~ distance
      local kept, kept_count, given, given_count = first, lower, first + lower, count - lower
      if rank & distance ~= 0 then
        kept, kept_count, given, given_count = given, given_count, kept, kept_count
      end
      combine(kept, kept_count, exchange(mine:narrow(1, given, given_count), kept_count, other),
        distance)
      reduce(kept, kept_count, distance * 2, power)
      mine:narrow(1, given, given_count)
        :copy_(exchange(mine:narrow(1, kept, kept_count), given_count, other))
    end

    local power, count = 1, mine:numel()
    while power * 2 <= size do power = power * 2 end
    if rank >= power then
      send(mine, rank - power):value()
      return bucket:shard(buffer:copy_(receive(count, rank - power)))
    end
    if rank + power < size then combine(1, count, receive(count, rank + power), 0) end
    reduce(1, count, 1, power)
    if rank + power < size then send(mine, rank + power):value() end
    return bucket:shard(buffer:copy_(mine))
  end
end
