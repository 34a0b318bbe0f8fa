-- The ids of a rendered conversation, and which of them a model learns to write.
local core = require "moonshard.core"

local HOW <const> = { special = "parse", bos = false, eos = false }

-- Where each id's text ends in the text of all. A character whose bytes are several ids ends with
-- the last of these. nil: the ids are of another text, as tokenizers give that change it.
local function ends_of(tokenizer, ids, text)
  local decoder <close> = tokenizer:decoder { special = "text" }
  local at, ends, pieces = 0, {}, {}
  for i, id in ipairs(ids) do
    pieces[i] = decoder:add(id)
    at = at + #pieces[i]
    ends[i] = at
  end
  pieces[#pieces + 1] = decoder:finish()
  return table.concat(pieces) == text and ends or nil
end

--- The ids of a text that a template has written, special tokens included, and for each whether it
--- is learned: whether some of its text is in one of the ranges. nil, message, code: the
--- tokenizer changes the text, so that nobody knows which ids are whose.
---@param tokenizer ms.Tokenizer
---@param rendered { text: string, learned: integer[][] }
---@return integer[]? ids
---@return boolean[]|string learned
---@return string? code
return function(tokenizer, rendered)
  local ids = tokenizer:encode(rendered.text, HOW):to_table()
  local ends = ends_of(tokenizer, ids, rendered.text)
  if not ends then
    return core.refuse("the tokenizer changes the text that it encodes, so that it is not known \z
      which tokens are an answer's", "unsupported")
  end
  local learned, from, range = {}, 0, 1
  for i, to in ipairs(ends) do
    -- Of a character's first ids nothing is seen yet: it begins where they are.
    local last = math.max(to, from + 1)
    while rendered.learned[range] and rendered.learned[range][2] <= from do range = range + 1 end
    local next_range = rendered.learned[range]
    learned[i] = next_range ~= nil and next_range[1] < last
    from = to
  end
  return ids, learned
end
