-- Run by every rank of save_spec.lua: what rank 0 writes is there when save returns on any rank,
-- and all ranks have its result; a file is not replaced while another rank still reads it.
local ms = require "moonshard"
local cfg = ms.config { folder = "" }
local rank, size, nn = ms.rank(), ms.world_size(), ms.nn

local function plain() return nn.Sequential(nn.Linear(300, 300, { bias = false })) end
local function adapted()
  local model = nn.Sequential(nn.Linear(300, 300))
  return nn.lora(model, { rank = 200, names = { "0" } })
end
local function gpt2()
  return nn.gpt2 { vocab = 400, context = 8, layers = 1, width = 128, heads = 2 }
end

local function values_of(model)
  return model:parameters(function(p) return p:requires_grad() end)
end
local function set(model, value)
  ms.no_grad(function() for _, p in ipairs(values_of(model)) do p:fill_(value) end end)
end

local cases = {
  file = { plain, "a.safetensors", function(m, path) return m:save(path), m:load(path) and m end },
  folder = { gpt2, "b", function(m, path) return m:save(path), nn.pretrained(path) end },
  adapters = { adapted, "c", function(m, path)
    return m:save_adapters(path), m:load_adapters(path) and m
  end },
}
for name, case in ms.sorted_pairs(cases) do
  for kind, wrap in ms.sorted_pairs { plain = function(m) return m end, ddp = ms.ddp } do
    local model, path = wrap(case[1]()), cfg.folder .. "/" .. kind .. case[2]
    for round = 1, 6 do
      -- Ranks take their time at different places.
      if (round + rank) % 2 == 0 then for _ = 1, 3 do ms.ones { 1 << 18 }:sum():item() end end
      set(model, round)
      local saved, read = case[3](model, path)
      assert(saved == true)
      for _, p in ipairs(values_of(assert(read))) do
        local got = p:max():item()
        assert(got == round and p:min():item() == round,
          ("%s, %s, rank %d: round %d read %g"):format(name, kind, rank, round, got))
      end
    end
  end
end

-- Rank 0 alone can fail, and all learn of it.
local model = ms.ddp(plain())
for _, save in ipairs {
  function() return model:save(cfg.folder .. "/ddpa.safetensors/x") end,
  function() return ms.ddp(adapted()):save_adapters(cfg.folder .. "/ddpa.safetensors/x") end,
} do
  local ok, message, code = save()
  assert(ok == nil and type(message) == "string" and code, tostring(ok))
  local same = ms.world():_share_texts(message .. code, "test")
  for r = 2, size do assert(same[r] == same[1], same[r]) end
end

print(("rank %d is done"):format(rank))
