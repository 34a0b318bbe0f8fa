-- Run by every rank of shapes_spec.lua: links hand back numbers in another shape, at every place
-- where they may, under every wrapper. The numbers count, not the shape; numbers that are too few
-- or of another dtype are an error.
local ms = require "moonshard"
local expect = dofile(debug.getinfo(1, "S").source:match "^@(.*/)" .. "expect.lua")
local rank, size, nn, hooks = ms.rank(), ms.world_size(), ms.nn, ms.hooks

local shapes = {
  row = function(t) return t:reshape(1, t:numel()) end,
  column = function(t) return t:reshape(t:numel(), 1) end,
  block = function(t) return t:reshape(1, t:numel(), 1) end,
  view = function(t) return t:view(1, 1, -1) end,
  gaps = function(t)                                     -- not contiguous
    return ms.stack({ t, t:zeros_like() }, 2):narrow(2, 1, 1)
  end,
}

-- A chain that changes shapes with f at some place.
local places = {
  result = function(f)
    return function(bucket, next)
      return next(bucket):and_then(function(t) return f(t:clone()) end)
    end
  end,
  value = function(f)
    return function(bucket, next)
      local t = next(bucket):value()
      return f(t:clone())
    end
  end,
  buffer = function(f)
    return hooks.chain { function(bucket, next)
      bucket:set_buffer(f(bucket:buffer()))
      return next(bucket)
    end }
  end,
  before_native = function(f)
    return hooks.chain { hooks.cast { dtype = "f32" }, function(bucket, next)
      return next(bucket):and_then(function(t) return f(t:clone()) end)
    end }
  end,
  encode = function(f)
    return hooks.chain { hooks.stage { name = "e", encode = function(t) return f(t) end } }
  end,
  decode = function(f)
    return hooks.chain { hooks.stage { name = "d", decode = function(t) return f(t:clone()) end } }
  end,
  both = function(f)
    return hooks.chain { hooks.stage { name = "b", encode = f,
      decode = function(t) return f(t:clone()) end }, "bf16_compress" }
  end,
}
for _, native in ipairs { "bf16_compress", "int8", "error_feedback", "adasum", "sign_vote",
  "reduce" } do
  places["set_buffer, " .. native] = function(f)
    return hooks.chain { function(bucket, next)
      bucket:set_buffer(f(bucket:buffer()))
      return next(bucket)
    end, hooks[native]() }
  end
end
places["set_buffer, top_k"] = function(f)
  return hooks.chain { function(bucket, next)
    bucket:set_buffer(f(bucket:buffer()))
    return next(bucket)
  end, hooks.top_k { fraction = 0.5 } }
end
places.set_sent = function(f)
  return hooks.chain { hooks.error_feedback(), function(bucket, next)
    local half = bucket:buffer() * 1
    bucket:set_buffer(half)
    bucket:set_sent(f(half))
    return next(bucket)
  end }
end

local wraps = {
  ddp = function(m, hook) return ms.ddp(m, { comm_hook = hook, bucket_bytes = 64 }) end,
  fsdp = function(m, hook) return ms.fsdp(m, { comm_hook = hook, wrap = { class = "Linear" } }) end,
  rows = function(m, hook) return ms.fsdp(m, { comm_hook = hook, layout = "rows" }) end,
}
if size == 4 then
  wraps.between = function(m, hook)
    hook = hooks.reduce { between = hook }
    return expect.models.fsdp(m, { strategy = "hybrid_shard", comm_hook = hook })
  end
end

-- The gradients of two passes.
local function gradients(wrap, hook)
  ms.seed(1)
  local model = wrap(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)), hook)
  local found = {}
  for pass = 1, 2 do
    model(ms.full(rank + pass, { 2, 3 })):sum():backward()
    for i, p in ipairs(model:parameters()) do
      local g = p:grad()
      if g then found[pass .. "." .. i] = g:detach():clone() end
      p:zero_grad()
    end
  end
  return found
end

local taken = 0
for wrapper, wrap in ms.sorted_pairs(wraps) do
  for place, make in ms.sorted_pairs(places) do
    for shape, f in ms.sorted_pairs(shapes) do
      local skipped = place == "buffer" and wrapper ~= "ddp" and shape == "gaps"
        -- A future has its value only after the hook.
        or place == "value"
      if not skipped and expect.takes(#wrapper + #place + #shape, 3) then
        local what = ("%s, %s, %s"):format(wrapper, place, shape)
        local plain_ok, plain = pcall(gradients, wrap, make(function(t) return t end))
        local ok, got = pcall(gradients, wrap, make(f))
        assert(ok == plain_ok,
          ("%s: %s, and flat: %s"):format(what, tostring(got), tostring(plain)))
        if ok then expect.same(got, plain, what) end
        taken = taken + 1
      end
    end
  end
end
assert(taken > 20)
print(("rank %d is done"):format(rank))
