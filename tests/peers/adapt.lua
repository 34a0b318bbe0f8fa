-- What compare_peft.py asks of us: models with adapters that are not zero, in folder=FOLDER. For
-- each there are NAME/base, NAME/adapter, NAME/merged and NAME/results.safetensors (tokens,
-- logits).
local ms = require "moonshard"
local cfg = ms.config { folder = "" }
local nn = ms.nn

local sizes = { vocab = 64, context = 32, layers = 2, width = 32, heads = 4 }
local cases = {
  { "gpt2", nn.gpt2, {} },
  { "gpt2_all", nn.gpt2, { rank = 3, alpha = 5, names = { ".*" } } },
  { "gpt2_some", nn.gpt2, { rank = 2, names = { "attn.c_proj", "h.1.mlp.c_fc" } } },
  { "gpt2_head", nn.gpt2, { rank = 2, names = { "lm_head", "c_attn" } }, { tie = false } },
  { "llama", nn.llama, { rank = 4, alpha = 16, dropout = 0.1 } },
  { "llama_all", nn.llama, { names = { ".*_proj" } }, { kv_heads = 2, tie = true } },
}

for number, case in ipairs(cases) do
  local name, make, options, own = table.unpack(case)
  local folder, given = ("%s/%s"):format(cfg.folder, name), {}
  for key, value in pairs(sizes) do given[key] = value end
  for key, value in pairs(own or {}) do given[key] = value end
  ms.seed(number)
  assert(make(given):save(folder .. "/base"))
  local model = nn.lora(assert(nn.pretrained(folder .. "/base")), options):eval()
  ms.no_grad(function()
    for _, item in ipairs(model:named_parameters()) do
      if item.name:find "lora_B" then
        item.parameter:copy_(ms.randn { std = 0.3, table.unpack(item.parameter:shape()) })
      end
    end
    local tokens = (ms.rand { 2, 32 } * 64):to "i64"
    assert(ms.safetensors.save(folder .. "/results.safetensors",
      { tokens = tokens, logits = model(tokens) }))
  end)
  assert(model:save_adapters(folder .. "/adapter"))
  assert(model:merge_adapters():save(folder .. "/merged"))
  print(name)
end
