-- `moonshard bench generate`: how fast a GPT-2 with random weights reads a prompt and writes text,
-- beside forwards of the whole window, beside PyTorch, and beside the time to read the weights.
local core = require "moonshard.core"
local switches = require "moonshard.cli.switches"

local bench_generate = {}

local configs = {
  { name = "small", layers = 6, width = 384, heads = 6, vocab = 256, context = 512 },
  { name = "124M", layers = 12, width = 768, heads = 12, vocab = 50304, context = 1024 },
}

local function model_of(c)
  local ms = require "moonshard"
  ms.seed(1)
  local model = ms.nn.gpt2 {
    vocab = c.vocab, context = c.context, layers = c.layers, width = c.width, heads = c.heads,
  }
  return model:eval()
end

local function timed(f)
  local before = core.clock_ms()
  f()
  core.synchronize()
  return core.clock_ms() - before
end

-- Medians of some rounds of both, in turns, after one that fills pools and plans: ms of the prompt,
-- and of an id after it.
local function measure(model, prompt, count, rounds, median)
  local function run(ids)
    return timed(function()
      model:generate(prompt, { count = ids, temperature = 0, stop = false })
    end)
  end
  local prefill, decode = {}, {}
  run(2)
  for i = 1, rounds do
    prefill[i] = run(1)
    decode[i] = (run(count + 1) - prefill[i]) / count
  end
  return median(prefill), median(decode)
end

-- Bytes of memory that are read in a second.
local function bandwidth()
  local ms = require "moonshard"
  local t, best = ms.ones { 64 << 20 }, math.huge
  for _ = 1, 6 do best = math.min(best, timed(function() t:sum() end)) end
  return t:numel() * 4 / (best / 1000)
end

-- Bytes of the weights that each id reads: all but the rows of positions.
local function weight_bytes(model)
  local bytes = 0
  for _, item in ipairs(model:named_parameters()) do
    if item.name ~= "wpe.weight" then bytes = bytes + item.parameter:numel() * 4 end
  end
  return bytes
end

-- What the peer prints: its name, ms of the prompt, ms of an id. nil if the interpreter lacks it.
local function peer_of(parsed, c, prompt)
  local command = ("'%s' '%s' %d %d %d %d %d %d %d %d %d 2>/dev/null"):format(parsed.python,
    parsed.peer, c.layers, c.width, c.heads, c.vocab, c.context, prompt, parsed.count,
    parsed.rounds, core.info().threads)
  local pipe = assert(io.popen(command))
  local name, prefill, decode = pipe:read("a"):match "^(%S+) (%S+) (%S+)"
  pipe:close()
  if not name then return nil end
  return { name = name, prefill_ms = tonumber(prefill), decode_ms = tonumber(decode) }
end

local function rows_of(parsed, c, median)
  local ms = require "moonshard"
  local model = model_of(c)
  local length = math.min(parsed.prompt, c.context - parsed.count - 1)
  local prompt = ms.randint { length, low = 0, high = c.vocab, seed = 2 }
  local prefill, decode = measure(model, prompt, parsed.count, parsed.rounds, median)
  local rows = { { name = "moonshard", prefill_ms = prefill, decode_ms = decode } }
  -- Without a cache each id costs a forward of all before it.
  local class_method = model.last_logits
  model.last_logits = function(self, tokens) return class_method(self, tokens) end
  local _, whole = measure(model, prompt, math.min(parsed.count, 8), 1, median)
  rows[2] = { name = "whole windows", decode_ms = whole }
  rows[3] = { name = "floor: weights", decode_ms = weight_bytes(model) / bandwidth() * 1000 }
  model = nil -- luacheck: ignore
  core.collect()
  rows[4] = peer_of(parsed, c, length)
  return { config = c.name, prompt = length, count = parsed.count, rows = rows }
end

local function show(result)
  print(("%s, %d tokens after a prompt of %d"):format(result.config, result.count, result.prompt))
  print(("  %-18s %16s %16s"):format("", "prompt tokens/s", "new tokens/s"))
  for _, row in ipairs(result.rows) do
    print(("  %-18s %16s %16.1f"):format(row.name,
      row.prefill_ms and ("%.0f"):format(result.prompt / row.prefill_ms * 1000) or "",
      1000 / row.decode_ms))
  end
end

--- Adds the switches; returns the function that measures.
---@param parser table
---@param median fun(list: number[]): number
function bench_generate.register(parser, median)
  parser:option("--config", "small: 10.7M parameters; 124M: GPT-2's shape; or both")
    :choices { "small", "124M", "both" }:default "both"
  parser:option("--prompt", "tokens of the prompt"):argname "COUNT":convert(switches.count)
    :default "128"
  parser:option("--count", "new tokens"):argname "COUNT":convert(switches.count):default "64"
  parser:option("--rounds", "times that each is measured; the median is shown"):argname "COUNT"
    :convert(switches.count):default "5"
  parser:option("--python", "an interpreter; if it has PyTorch, that is measured, too")
    :default "python3"
  parser:option("--peer", "what the interpreter runs"):default "tests/bench/peers/generate_peer.py"
  return function(parsed)
    local results, missing = {}, false
    for _, c in ipairs(configs) do
      if parsed.config == c.name or parsed.config == "both" then
        local result = rows_of(parsed, c, median)
        results[#results + 1], missing = result, missing or not result.rows[4]
        if not parsed.json then show(result) end
      end
    end
    if parsed.json then print(core.json_encode(results))
    elseif missing then
      print(("%s does not have PyTorch, or %s is not there"):format(parsed.python, parsed.peer))
    end
    return 0
  end
end

return bench_generate
