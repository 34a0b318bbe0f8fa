-- `moonshard bench tokenize TOKENIZER TEXT`: how fast a text becomes ids and comes back, on one
-- thread, beside the library that the tokenizer's file is written for.
local core = require "moonshard.core"
local launch = require "moonshard.base.launch"

local bench_tokenize = {}

local function quoted(text) return "'" .. text:gsub("'", "'\\''") .. "'" end

-- The milliseconds of each of some rounds of f(), after one that fills caches.
local function rounds_of(count, f)
  local times = {}
  f()
  for i = 1, count do
    local before = core.clock_ms()
    f()
    times[i] = core.clock_ms() - before
  end
  return times
end

-- What the peer prints: its name, how many ids, and the medians of encoding and decoding in ms. nil
-- if the interpreter lacks the library.
local function peer_of(parsed)
  local command = ("%s %s %s %s %s %d 2>/dev/null"):format(quoted(parsed.python),
    quoted(parsed.peer), quoted(parsed.tokenizer), quoted(parsed.text),
    quoted(parsed.pattern or ""), parsed.rounds)
  local pipe = assert(io.popen(command))
  local name, ids, encode, decode = pipe:read("a"):match "^(%S+) (%d+) (%S+) (%S+)"
  pipe:close()
  if not name then return nil end
  return { name = name, ids = math.tointeger(ids), encode_ms = tonumber(encode),
    decode_ms = tonumber(decode) }
end

local function ours(parsed, text, median)
  local ms = require "moonshard"
  local before = core.clock_ms()
  local tokenizer, message = ms.tokenizer.load(parsed.tokenizer, { pattern = parsed.pattern })
  if not tokenizer then launch.exit(3, message) end
  local load_ms = core.clock_ms() - before
  local ids = tokenizer:encode(text, { bos = false, eos = false })
  return {
    name = "moonshard", ids = ids:numel(), load_ms = load_ms,
    encode_ms = median(rounds_of(parsed.rounds, function()
      tokenizer:encode(text, { bos = false, eos = false })
    end)),
    decode_ms = median(rounds_of(parsed.rounds, function() tokenizer:decode(ids) end)),
  }
end

local function show(rows, bytes)
  print(("%-14s %10s %14s %14s"):format("", "ids", "encode MB/s", "decode MB/s"))
  for _, row in ipairs(rows) do
    print(("%-14s %10d %14.1f %14.1f"):format(row.name, row.ids, bytes / row.encode_ms / 1000,
      bytes / row.decode_ms / 1000))
  end
  print(("loading took %.0f ms"):format(rows[1].load_ms))
end

--- Adds the switches; returns the function that measures.
---@param parser table
---@param median fun(list: number[]): number
function bench_tokenize.register(parser, median)
  parser:argument("tokenizer", "a tokenizer's file or folder"):args "?"
  parser:argument("text", "the file to encode"):args "?"
  parser:option("--pattern", "where ranks of tiktoken cut text: gpt2, cl100k, o200k, llama3")
  parser:option("--rounds", "times that each is measured; the median is shown"):argname "COUNT"
    :convert(require "moonshard.cli.switches".count):default "5"
  parser:option("--python", "an interpreter; if it has the peer's library, that is measured, too")
    :default "python3"
  parser:option("--peer", "what the interpreter runs"):default "tests/bench/peers/tokenize_peer.py"
  return function(parsed)
    if not parsed.text then
      launch.exit(2, "which tokenizer and text?\n" .. parser:get_usage())
    end
    local text, message = core.file_read(parsed.text)
    if not text then launch.exit(3, message) end
    local rows = { ours(parsed, text, median) }
    rows[2] = peer_of(parsed)
    if parsed.json then
      print(core.json_encode { bytes = #text, rows = rows })
      return 0
    end
    show(rows, #text)
    if not rows[2] then
      print(("%s does not have the peer's library (tiktoken, tokenizers, sentencepiece), or %s \z
        is not there"):format(parsed.python, parsed.peer))
    end
    return 0
  end
end

return bench_tokenize
