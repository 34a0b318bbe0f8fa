-- moonshard eval: how often a model finds the right one of several endings of a text, in
-- HellaSwag's format.
--
-- An ending's score is the sum of the logarithms of its tokens' probabilities after the text; the
-- choice is the ending with the greatest score (acc), or with the greatest score divided by the
-- ending's characters (acc_norm) or by its tokens (acc_token). acc and acc_norm are those of
-- lm-evaluation-harness, acc_token that of llm.c. Of an ending that is no UTF-8, bytes
-- are counted. Of equal ones the first is chosen.
--
-- The harness prepares the lines of HellaSwag's own file, which have activity_label, ctx_a and
-- ctx_b; so does this command, unless --raw is given. Other lines are scored as they are.
local core = require "moonshard.core"
local launch = require "moonshard.base.launch"
local live = require "moonshard.base.status_line"
local model_folder = require "moonshard.cli.model_folder"
local switches = require "moonshard.cli.switches"

local eval = {}

-- Of a target that does not count.
local IGNORED <const> = -100
-- Questions after which dropped tensors are collected.
local COLLECT <const> = 16

--- The parser of its command line.
---@return table
function eval.parser()
  local parser = switches.plain("eval", "Scores a model on multiple-choice questions in \z
    HellaSwag's format: a JSON object in each line, with ctx (a text), endings (a list of texts) \z
    and label (the right one, from 0). Prints how often the right ending has the greatest \z
    probability (acc), the greatest per character (acc_norm), and per token (acc_token). Lines of \z
    HellaSwag's own file (with activity_label, ctx_a, ctx_b) are prepared as \z
    lm-evaluation-harness prepares them.")
  parser:argument("model", "a folder with config.json and .safetensors, or a run's folder"):args "?"
  parser:argument("file", "the questions, .jsonl"):args "?"
  parser:option("--limit", "only the first N questions (default: all)"):argname "N"
    :convert(switches.count)
  parser:flag("--raw", "score ctx and endings as they stand, as llm.c does")
  parser:option("--long", "what becomes of a question that is longer than the model's context: \z
    cut (only its last tokens count), skip, or stop (default: cut)")
    :choices { "cut", "skip", "stop" }:default "cut":show_default(false)
  parser:option("--tokenizer", "a tokenizer's file or folder (default: the model's folder)")
    :argname "PATH"
  parser:option("--pattern", "where ranks of tiktoken cut text: gpt2, cl100k, o200k, llama3")
  parser:flag("--json", "print the result as JSON")
  switches.add_threads(parser)
  return parser
end

------------------------------------------------------------------------------------------ questions

-- A label may be a number or, as in some copies of HellaSwag, digits.
local function label_of(value)
  if type(value) == "string" then value = math.tointeger(tonumber(value)) end
  return math.type(value) == "integer" and value or nil
end

-- A text of HellaSwag as lm-evaluation-harness prepares it: marks of the page that it was taken
-- from ("[header]", "[step]") go, and "[title]" ends a sentence.
local function prepared(text)
  text = text:match "^%s*(.-)%s*$":gsub(" %[title%]", ". ")
  return (text:gsub("%[[^\n]-%]", ""):gsub("  ", " "))
end

-- The first letter large, all others small. Letters of ASCII only, as those of the data set are.
local function capitalized(text) return text:sub(1, 1):upper() .. text:sub(2):lower() end

-- The text and endings of a line of HellaSwag's own file. A space is put before each ending, also
-- where one has been left by a mark; acc_norm does not count it.
local function prepare(told, endings)
  local joined, counted = {}, {}
  for i, ending in ipairs(endings) do
    counted[i] = prepared(ending)
    joined[i] = " " .. counted[i]
  end
  return prepared(("%s: %s %s"):format(told.activity_label, told.ctx_a, capitalized(told.ctx_b))),
    joined, counted
end

local function is_of_hellaswag(told)
  return type(told.activity_label) == "string" and type(told.ctx_a) == "string"
    and type(told.ctx_b) == "string"
end

-- A line as { ctx, endings, counted, label }; nil and what is wrong with it. counted: the endings
-- whose characters acc_norm counts.
local function question_of(line, raw)
  local told, message = core.json_decode(line)
  if type(told) ~= "table" then return nil, message or "a JSON object is expected" end
  if type(told.ctx) ~= "string" then return nil, "it has no text 'ctx'" end
  local endings = told.endings
  if type(endings) ~= "table" or #endings < 2 then
    return nil, "it has no list 'endings' of two or more texts"
  end
  for i, ending in ipairs(endings) do
    if type(ending) ~= "string" then return nil, ("endings[%d] is no text"):format(i - 1) end
    if not ending:find "%S" then return nil, ("endings[%d] is empty"):format(i - 1) end
  end
  local label = label_of(told.label)
  if not label or label < 0 or label >= #endings then
    return nil, ("its label is %s; a number from 0 to %d is expected"):format(
      type(told.label) == "table" and "a list" or tostring(told.label), #endings - 1)
  end
  local ctx, counted = told.ctx, endings
  if not raw and is_of_hellaswag(told) then
    ctx, endings, counted = prepare(told, endings)
    for i, ending in ipairs(endings) do
      if not ending:find "%S" then
        return nil, ("endings[%d] has marks in brackets only (--raw scores them)"):format(i - 1)
      end
    end
  end
  return { ctx = ctx, endings = endings, counted = counted, label = label }
end

-- The questions of a file, at most `limit`. All are checked before the first is scored.
local function read_questions(path, limit, raw)
  local text, message = core.file_read(path)
  if not text then launch.exit(3, message) end
  local list, number = {}, 0
  for line in (text:gsub("\r\n", "\n") .. "\n"):gmatch "(.-)\n" do
    number = number + 1
    if #list == limit then break end
    if line:find "%S" then
      local question, wrong = question_of(line, raw)
      if not question then launch.exit(3, ("%s:%d: %s"):format(path, number, wrong)) end
      question.line = number
      list[#list + 1] = question
    end
  end
  if #list == 0 then launch.exit(3, ("'%s' has no questions"):format(path)) end
  return list
end

------------------------------------------------------------------------------------------- scoring

-- The ids of a text and of an ending after it. Spaces at the text's end belong to the ending; if
-- there are none, one is put between. Both are encoded together, as a token may begin in the space.
local function ids_of(words, ctx, ending)
  local text, spaces = ctx:match "^(.-)(%s*)$"
  if spaces == "" and not ending:find "^%s" then spaces = " " end
  local first = words.encode(text)
  local all = words.encode(text .. spaces .. ending)
  local given = math.min(#first, #all - 1)
  -- Probabilities are those after an id: before a text that has none is what begins texts.
  if given == 0 then
    local begin = words.first or words.stop or not words.tokenizer and 10
    if not begin then return nil, "ctx is empty, and the tokenizer names no token before texts" end
    table.insert(all, 1, begin)
    given = 1
  end
  return all, given
end

-- Scores of all endings of a question, and their numbers of tokens; third, whether it was longer
-- than the context. nil: it was, and is skipped. The endings are rows of one forward; what fills
-- short rows comes after their ids and changes nothing before it. long: see the parser.
local function scores_of(model, words, question, where, long)
  local rows, longest, context, is_cut = {}, 0, model.options.context, false
  for i, ending in ipairs(question.endings) do
    local called, all, given = pcall(ids_of, words, question.ctx, ending)
    if not called or not all then
      launch.exit(3, ("%s: %s"):format(where, called and given or all))
    end
    local count = #all - given
    -- Of what is too long, the last tokens count.
    local cut = math.max(#all - 1 - context, 0)
    if cut > 0 and long == "stop" then
      launch.exit(3, ("%s: the text with endings[%d] has %d tokens, and the model a context of %d \z
        (--long cut|skip goes on)"):format(where, i - 1, #all - 1, context))
    end
    is_cut, count = is_cut or cut > 0, math.min(count, context)
    rows[i] = { all = all, cut = cut, count = count, length = #all - 1 - cut }
    longest = math.max(longest, rows[i].length)
  end
  if is_cut and long == "skip" then return nil, nil, true end
  local inputs, targets, counts = {}, {}, {}
  for i, row in ipairs(rows) do
    local x, y = {}, {}
    for k = 1, longest do
      local at = row.cut + k
      x[k] = row.all[k <= row.length and at or row.cut + row.length]
      local scored = k <= row.length and k > row.length - row.count
      y[k] = scored and row.all[at + 1] or IGNORED
    end
    inputs[i], targets[i], counts[i] = x, y, row.count
  end
  local losses = core.no_grad(function()
    local logits = model(core.tensor(inputs, "i64"))
    return logits:cross_entropy(core.tensor(targets, "i64"),
      { reduction = "none", ignore_index = IGNORED }):sum(2):to_table()
  end)
  for i, loss in ipairs(losses) do
    if loss ~= loss then
      launch.exit(4, ("%s: the probability of endings[%d] is nan: the model's weights hold nan or \z
        inf, or 16 bits overflow"):format(where, i - 1))
    end
    losses[i] = -loss
  end
  return losses, counts, is_cut
end

-- Whether the label is the position of the greatest value; the first one of equals.
local function finds(values, label)
  local best = 1
  for i, value in ipairs(values) do if value > values[best] then best = i end end
  return best == label + 1 and 1 or 0
end

local function divided(scores, by)
  local list = {}
  for i, score in ipairs(scores) do list[i] = score / by[i] end
  return list
end

local function show(right, done, total)
  if not live.is_terminal() then return end
  live.show {
    ("%d/%d"):format(done, total), ("acc %.4f"):format(right.acc / done),
    ("acc_norm %.4f"):format(right.acc_norm / done),
  }
end

-- Counts what was found for one question.
local function count(right, question, scores, tokens)
  local characters = {}
  for i, ending in ipairs(question.counted) do characters[i] = utf8.len(ending) or #ending end
  right.acc = right.acc + finds(scores, question.label)
  right.acc_norm = right.acc_norm + finds(divided(scores, characters), question.label)
  right.acc_token = right.acc_token + finds(divided(scores, tokens), question.label)
end

-- The shares of questions whose right ending was found, by name; how many were scored, and how many
-- were longer than the context.
local function run(model, words, questions, path, long)
  local right, process = { acc = 0, acc_norm = 0, acc_token = 0 }, launch.process
  local scored, longer = 0, 0
  if process then process.watch_signals() end
  model:eval()
  for number, question in ipairs(questions) do
    local scores, tokens, is_cut = scores_of(model, words, question,
      ("%s:%d"):format(path, question.line), long)
    if is_cut then longer = longer + 1 end
    if scores then
      scored = scored + 1
      count(right, question, scores, tokens)
    end
    if number % COLLECT == 0 then core.collect() end
    if scores then show(right, scored, #questions) end
    local signal = process and process.stop_requested()
    if signal then
      live.finish()
      launch.exit(128 + signal)
    end
  end
  live.finish()
  if scored == 0 then
    launch.exit(3, ("%s: all %d questions are longer than the model's context (--long cut scores \z
      their last tokens)"):format(path, #questions))
  end
  for name, found in pairs(right) do right[name] = found / scored end
  return right, scored, longer
end

function eval.main(arguments)
  local parser = eval.parser()
  local parsed = switches.parse(parser, arguments)
  if not parsed.model or not parsed.file then
    launch.exit(2, ("eval: %s must be given\n%s"):format(
      parsed.model and "FILE.jsonl, the questions," or "MODEL and FILE.jsonl", parser:get_usage()))
  end
  switches.apply(parsed)
  local questions = read_questions(parsed.file, parsed.limit or math.maxinteger, parsed.raw)
  local model, words = model_folder.read(parsed)
  local found, scored, longer = run(model, words, questions, parsed.file, parsed.long)
  if parsed.json then
    found.questions = scored
    if longer > 0 then found[parsed.long == "skip" and "skipped" or "cut"] = longer end
    print(core.json_encode(found))
  else
    print(("acc %.4f  acc_norm %.4f (per character)  acc_token %.4f (per token)  of %d question%s")
      :format(found.acc, found.acc_norm, found.acc_token, scored, scored == 1 and "" or "s"))
    if longer > 0 then
      print(("%d question%s longer than the context of %d tokens %s (--long)"):format(longer,
        longer == 1 and "" or "s", model.options.context,
        (longer == 1 and "was " or "were ") .. (parsed.long == "skip" and "skipped" or "cut")))
    end
  end
  return 0
end

return eval
