-- The native link adasum, in Lua, with f32 products: by pairs of ranks, a (1 - a.b / 2 a.a) + b (1 - a.b / 2 b.b) for each parameter.
local ms = require "moonshard"

return function()
  return function(bucket)
    local group, buffer, shapes = bucket:group(), bucket:buffer(), bucket:parameters()
    local rank, size, dtype = group:rank(), group:size(), buffer:dtype()
    if bucket:wants_sent() then bucket:set_sent(buffer) end
    local mine = buffer:to("f32"):clone()

    local function combine(theirs)
      local at = 1
      for _, p in ipairs(shapes) do
        local a, b = mine:narrow(1, at, p:numel()), theirs:narrow(1, at, p:numel())
        local ab, aa, bb = a:dot(b), a:dot(a), b:dot(b)
        local of_a = ms.where(aa:gt(0), 1 - ab / (aa * 2), 1)
        local of_b = ms.where(bb:gt(0), 1 - ab / (bb * 2), 1)
        a:copy_(a * of_a + b * of_b)
        at = at + p:numel()
      end
    end
    local function receive(from) return group:recv(mine:to(dtype):clone(), from):value():to "f32" end

    local power = 1
    while power * 2 <= size do power = power * 2 end
    if rank >= power then
      group:send(mine:to(dtype), rank - power):value()
      mine:copy_(receive(rank - power))
    else
      if rank + power < size then combine(receive(rank + power)) end
      local distance = 1
      while distance < power do
        local wire = mine:to(dtype):clone()
        mine:copy_(wire)
        local sent = group:send(wire, rank ~ distance)
        local theirs = receive(rank ~ distance)
        sent:value()
        combine(theirs)
        distance = distance * 2
      end
      if rank + power < size then group:send(mine:to(dtype), rank + power):value() end
    end
    return buffer:copy_(mine)
  end
end
