-- Encodes texts with a tokenizer of ours, for compare_tokenizers.py: prints nothing, writes ids.
--
--     lua5.4 tests/peers/encode.lua JOB
--
-- JOB is a JSON file: tokenizer, pattern, special (what becomes of special tokens' names), text (a
-- file), lengths (of the texts in it, in bytes), out (a safetensors file: ids, counts). With
-- decode, each text must come back from its ids.
local ms = require "moonshard"
local core = require "moonshard.core"

local job = assert(core.json_decode(assert(core.file_read(arg[1]))))
local tokenizer = assert(ms.tokenizer.load(job.tokenizer, { pattern = job.pattern }))
local all = assert(core.file_read(job.text))
local ids, counts, at = {}, {}, 1
for i, length in ipairs(job.lengths) do
  local text = all:sub(at, at + length - 1)
  at = at + length
  local encoded = tokenizer:encode(text, { special = job.special, bos = false, eos = false })
  ids[i] = encoded
  counts[i] = encoded:shape()[1]
  if job.decode and tokenizer:decode(encoded, { special = "text" }) ~= text then
    error(("text %d does not come back from its ids"):format(i))
  end
end
assert(ms.safetensors.save(job.out, { ids = ms.cat(ids), counts = ms.tensor(counts):to "i64" }))
