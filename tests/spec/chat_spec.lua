-- Chat templates: texts and learned ranges equal to those of transformers (golden/chat), ranges
-- without marks, files of tokenizers, records, limits, refusals.
local ms = require "moonshard"
local command = require "command"
local core = require "moonshard.core"

local FOLDER = (os.getenv "MOONSHARD_SOURCE" or ".") .. "/tests/golden/chat/"

local function read(name) return assert(core.file_read(FOLDER .. name)) end

-- A template of the golden folder: tokenizer_config.json has it without the last line break.
local function golden(name, options)
  return assert(ms.chat.template(read("templates/" .. name .. ".jinja"):gsub("\n$", ""), options))
end

-- The text with its learned ranges between « and ».
local function shown(made)
  local parts, at = {}, 0
  for _, range in ipairs(made.learned) do
    parts[#parts + 1] = made.text:sub(at + 1, range[1])
    parts[#parts + 1] = "«" .. made.text:sub(range[1] + 1, range[2]) .. "»"
    at = range[2]
  end
  return table.concat(parts) .. made.text:sub(at + 1)
end

local function user(content) return { role = "user", content = content } end
local function assistant(content) return { role = "assistant", content = content } end

-- Fails unless f returns nil, a message with this text, and this code.
local function refused(code, message, f, ...)
  local none, given, kind = f(...)
  assert.is_nil(none)
  assert.matches(message, given, 1, true)
  assert.equal(code, kind)
end

describe("a chat template", function()
  local TOKENS = { bos_token = "<|begin_of_text|>", eos_token = "</s>" }
  local talks = assert(ms.chat.decode(read "conversations.json"))
  local rendered = assert(core.json_decode(read "rendered.json"))

  -- Ranges of characters as ranges of bytes.
  local function in_bytes(text, ranges)
    local list = {}
    for i, range in ipairs(ranges) do
      list[i] = { utf8.offset(text, range[1] + 1) - 1, utf8.offset(text, range[2] + 1) - 1 }
    end
    return list
  end

  for name, rows in ms.sorted_pairs(rendered) do
    it("'" .. name .. "' gives transformers' texts and ranges", function()
      local template = golden(name, { tokens = TOKENS })
      assert.equal(60, #rows)
      for i, row in ipairs(rows) do
        for _, key in ipairs { "text", "with_prompt" } do
          local what = ("%s of conversation %d"):format(key, i)
          local made, message, code = template:render(talks[i], {
            add_generation_prompt = key == "with_prompt", names = { custom_date = "05 Mar 2026" } })
          if row.error then
            assert.is_nil(made, what)
            assert.equal("mismatch", code, what)
          else
            assert.equal(row[key], made and made.text, what .. ": " .. tostring(message))
            if row.learned and key == "text" then
              assert.same(in_bytes(made.text, row.learned), made.learned, what)
            end
          end
        end
      end
    end)
  end

  it("without marks learns what assistants write, to the ends of their turns", function()
    local talk = { { role = "system", content = "S" }, user "U<|im_end|>",
      assistant "A é <|im_end|>", user "V", assistant "", user "W", assistant " last \n" }
    local chatml = golden("chatml", { special = { "<|im_start|>", "<|im_end|>" } })
    assert.equal("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|><|im_end|>\n\z
      <|im_start|>assistant\n«A é <|im_end|><|im_end|>»\n<|im_start|>user\nV<|im_end|>\n\z
      <|im_start|>assistant\n«<|im_end|>»\n<|im_start|>user\nW<|im_end|>\n\z
      <|im_start|>assistant\n« last \n<|im_end|>»\n", shown(assert(chatml:render(talk))))
    local prompted = assert(chatml:render(talk, { add_generation_prompt = true }))
    assert.equal("«A é <|im_end|><|im_end|>»", shown(prompted):match "assistant\n(«.-»)\n<|im_s")
    assert.matches("last \n<|im_end|>»\n<|im_start|>assistant\n", shown(prompted), 1, true)
    local inst = golden("inst", { tokens = { bos_token = "<s>", eos_token = "</s>" } })
    assert.equal("<s>[INST] S\n\nU<|im_end|> [/INST] «A é <|im_end|></s>»[INST] V [/INST] «</s>»\z
      [INST] W [/INST] «last</s>»", shown(assert(inst:render(talk))))
  end)

  it("without marks learns thoughts and calls, and what the template puts between", function()
    local talk = assert(ms.chat.decode [[{"messages": [
      {"role": "user", "content": "U"},
      {"role": "assistant", "content": "<think>\nold\n</think>\n\nfirst"},
      {"role": "user", "content": "V"},
      {"role": "assistant", "content": "C", "reasoning_content": "\nR\n", "tool_calls": [
        {"function": {"name": "add", "arguments": {"b": 1.5, "a": "ü\n"}}}]},
      {"role": "tool", "content": "T"},
      {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {}}]}]}]])
    local thinking = golden("thinking", { special = { "<|im_start|>", "<|im_end|>" } })
    assert.equal("<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n«first<|im_end|>»\n\z
      <|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n\z
      «<think>\nR\n</think>\n\nC\n<tool_call>\n{\"name\": \"add\", \"arguments\": \z
      {\"b\": 1.5, \"a\": \"ü\\n\"}}\n</tool_call><|im_end|>»\n\z
      <|im_start|>user\n<tool_response>\nT\n</tool_response><|im_end|>\n<|im_start|>assistant\n\z
      «<think>\n\n</think>\n\n\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>\z
      <|im_end|>»\n", shown(assert(thinking:render(talk))))
  end)

  it("learns a call of which the template writes the beginning", function()
    local template = assert(ms.chat.template([[
{%- for m in messages %}<{{ m.role }}>
{%- for call in m.tool_calls or [] %}[CALL {{ call.name }}]{% endfor %}{{ m.content }}<end>
{%- endfor %}{% if add_generation_prompt %}<assistant>{% endif %}]], { special = { "<end>" } }))
    local made = assert(template:render { user "U",
      { role = "assistant", content = "", tool_calls = { { name = "f" } } } })
    assert.equal("<user>U<end><assistant>«[CALL f]<end>»", shown(made))
  end)

  it("that refuses a generation prompt learns from the first piece on", function()
    local template = assert(ms.chat.template([[
{%- if add_generation_prompt and messages[-1].role == 'assistant' %}
{{- raise_exception('no prompt') }}{% endif %}
{%- for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}]],
      { special = { "<end>" } }))
    local talk = { user "U", assistant "A" }
    assert.equal("<user>U<end><assistant>«A<end>»", shown(assert(template:render(talk))))
    refused("mismatch", "no prompt", template.render, template, talk,
      { add_generation_prompt = true })
  end)

  it("keeps the origin of strings through operations", function()
    local function range_of(expression)
      local template = assert(ms.chat.template("{% set u, a = messages[0].content, \z
        messages[1].content %}({{ " .. expression .. " }})"))
      return shown(assert(template:render { user "us er", assistant " é,b,,c " }))
    end
    for expression, expected in pairs {
      ["'x' + a ~ 'y'"] = "(x« é,b,,c »y)", ["a.strip()"] = "(«é,b,,c»)",
      ["a.split(',')[1] ~ 1"] = "(«b»1)", ["a[1:2] + u"] = "(«é»us er)",
      ["a[::-1]"] = "(« c,,b,é »)", ["a|list|first ~ a|last"] = "(«  »)",
      ["u.join(a.split(','))"] = "(« é»us er«b»us erus er«c »)",
      ["a.replace(' ', '_')"] = "(«_é,b,,c_»)", ["a|tojson"] = "(«\" é,b,,c \"»)",
      ["[a, 1]"] = "([«' é,b,,c '», 1])", ["messages[1]|tojson"] =
        "(«{\"content\": \" é,b,,c \", \"role\": \"assistant\"}»)",
      ["'%s!' % a"] = "(« é,b,,c »!)", ["a|indent"] = "(« é,b,,c »)",
      ["('<' ~ a).upper() if false else u"] = "(us er)", ["a[3:6]|upper"] = "(«B,,»)",
      ["a * 2"] = "(« é,b,,c  é,b,,c »)", ["messages[1].role"] = "(assistant)",
      ["a.partition(',')|join('-')"] = "(« é-,-b,,c »)",
      ["(u ~ a).split('r')|join"] = "(us e« é,b,,c »)",
    } do
      assert.equal(expected, range_of(expression), expression)
    end
  end)

  it("tells whether the date was asked for", function()
    local template = assert(ms.chat.template "{{ strftime_now('%d %b %Y, %A %H:%M:%S %j') }}")
    local made = assert(template:render({}, { date = "2026-03-05T14:07:09" }))
    assert.equal("05 Mar 2026, Thursday 14:07:09 064", made.text)
    assert.is_true(made.dated)
    assert.equal("01 Jan 1970, Thursday 00:00:00 001", template:render({}, { date = 0 }).text)
    assert.equal(os.date "%Y", template:render({}).text:match "%d%d%d%d")
    assert.is_false(golden("chatml"):render({ user "U" }).dated)
    assert.has_error(function() template:render({}, { date = "2026-02-30" }) end)
    assert.has_error(function() template:render({}, { date = "tomorrow" }) end)
  end)

  it("ends when it does too much", function()
    local endless = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
    refused("timeout", "line 1: it took more than 1000 steps", function()
      return assert(ms.chat.template(endless)):render({}, { steps = 1000 })
    end)
    refused("no_space", "line 2: it wrote more than 9 bytes", function()
      return assert(ms.chat.template "1234\n{{ 56789 }}"):render({}, { bytes = 9 })
    end)
    local doubling = "{% set n = namespace(x='ab') %}{% for a in range(99) %}\n\z
      {% set n.x = n.x ~ n.x %}{% endfor %}"
    refused("no_space", "line 2: a text has more than 67108864 bytes", function()
      return assert(ms.chat.template(doubling)):render {}
    end)
    for _, text in ipairs { "{{ 'ab' * 999999999999 }}", "{{ [1] * 999999999999 }}",
      "{{ 'a'|indent(999999999) }}" } do
      assert.is_nil((assert(ms.chat.template(text)):render {}), text)
    end
    refused("unsupported", "levels are nested", function()
      return assert(ms.chat.template "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"):render {}
    end)
    refused("unsupported", "levels are nested", ms.chat.template,
      "{{ " .. ("("):rep(1000) .. "1" .. (")"):rep(1000) .. " }}")
    refused("unsupported", "line 1: an expression is too long", function()
      return assert(ms.chat.template("{{ 1" .. ("+1"):rep(200000) .. " }}")):render {}
    end)
    refused("unsupported", "levels are nested", ms.chat.template,
      ("{% if a %}"):rep(1000) .. ("{% endif %}"):rep(1000))
    refused("unsupported", "levels are nested", ms.chat.template,
      "{{ " .. ("1 if 0 else "):rep(1000) .. "1 }}")
  end)

  it("names what it cannot render", function()
    local template = assert(ms.chat.template "{{ messages|length }}")
    refused("mismatch", "message 2 of the conversation must be a table", template.render, template,
      { user "U", "text" })
    refused("mismatch", "is not UTF-8", template.render, template, { user "\xff" })
    refused("mismatch", "a function has no value", template.render, template, { user(print) })
    refused("mismatch", "a list has gaps or names", template.render, template,
      { user { "a", b = 1 } })
    refused("mismatch", "no list of messages", template.render, template, { messages = "text" })
    local deep = {}
    for _ = 1, 1000 do deep = { deep } end
    refused("unsupported", "levels are nested", template.render, template, { user(deep) })
    refused("mismatch", "chat template, line 2: it refuses the conversation: no é", function()
      return assert(ms.chat.template "\n{{ raise_exception('no é') }}"):render {}
    end)
    assert.has_error(function() template:render({}, { date = true }) end)
    assert.has_error(function() template:render "text" end)
    assert.has_error(function() return template.rendr end)
    assert.has_error(function() template.render {} end)
  end)

  it("reads tables of Lua and lines of JSON", function()
    local template = assert(ms.chat.template "{{ v|tojson }}")
    local function json(v) return assert(template:render { messages = {}, v = v }).text end
    assert.equal('{"a": 1, "b": [true, 2.5], "c": {}}', json { b = { true, 2.5 }, c = {}, a = 1 })
    local line = '{"z": null, "y": [], "x": {}, "w": [{"b": 1, "a": 2}], "v": 12345678901234567}'
    local value = assert(ms.chat.decode(line))
    assert.equal(line, json(value))
    value.y, value.u, value.z = nil, "new", "old"
    assert.equal('{"z": "old", "x": {}, "w": [{"b": 1, "a": 2}], "v": 12345678901234567, \z
      "u": "new"}', json(value))
    refused("corrupt", "not JSON", ms.chat.decode, "{")
    assert.has_error(function() core.json_decode("{}", true, 1) end)
    local names = assert(ms.chat.template "{{ a }}{{ b }}{{ c }}")
    assert.equal("123", names:render({ messages = {}, a = 0, b = 2,
      chat_template_kwargs = { a = 1, c = 4 } }, { names = { c = 3 } }).text)
    refused("unsupported", "a number beyond 64 bits", template.render, template,
      { messages = {}, v = ms.chat.decode "99999999999999999999" })
  end)
end)

describe("the template of a tokenizer", function()
  local folder
  before_each(function() folder = command.folder() end)
  after_each(function() command.remove(folder) end)

  local function put(name, value)
    local text = type(value) == "string" and value or core.json_encode(value)
    assert(core.file_write(folder .. "/" .. name, text))
  end

  local function text_of(options)
    local template = assert(ms.chat.of(folder, options))
    return template:render({ user "U", assistant "A" }).text
  end

  it("comes from tokenizer_config.json", function()
    put("tokenizer_config.json", { chat_template = "{{ bos_token }}{{ messages[0].content }}{{ \z
      eos_token }}{{ pad_token is defined }}", bos_token = { content = "<s>" }, eos_token = "</s>",
      pad_token = core.json_null })
    assert.equal("<s>U</s>False", text_of())
    put("chat_template.jinja", "file {{ messages[0].role }}\n")
    assert.equal("file user", text_of())
  end)

  it("may be one of several", function()
    put("tokenizer_config.json", { chat_template = { { name = "default", template = "D" },
      { name = "tool_use", template = "T" } } })
    assert.equal("D", text_of())
    assert.equal("T", text_of { name = "tool_use" })
    refused("not_found", "no chat template 'rag': it has default, tool_use", ms.chat.of, folder,
      { name = "rag" })
  end)

  it("takes tokens from special_tokens_map.json, and special ones of any name", function()
    put("chat_template.jinja", "{% for m in messages %}<h>{{ m.content }}<end>{{ eos_token }}\z
      {% endfor %}")
    put("special_tokens_map.json", { eos_token = "</s>" })
    put("tokenizer_config.json", { added_tokens_decoder = {
      ["7"] = { content = "<end>", special = true },
      ["8"] = { content = "<x>", special = false } } })
    local made = assert(assert(ms.chat.of(folder)):render { user "U", assistant "A" })
    assert.equal("<h>U<end></s><h>«A<end>»</s>", shown(made))
  end)

  it("is found by the tokenizer itself", function()
    put("tokenizer.json", '{"model":{"type":"BPE","vocab":{"a":0,"<e>":1},"merges":[]},\z
      "added_tokens":[{"id":1,"content":"<e>","special":true}]}')
    local tokenizer = assert(ms.tokenizer.load(folder))
    refused("not_found", "has no chat template: neither chat_template.jinja", ms.chat.of, tokenizer)
    put("chat_template.jinja", "{% for m in messages %}{{ m.content }}<e>{% endfor %}")
    for _, given in ipairs { tokenizer, folder } do
      local made = assert(assert(ms.chat.of(given)):render { user "U", assistant "A" })
      assert.equal("U<e>«A<e>»", shown(made))
    end
  end)

  it("is refused where it is damaged", function()
    put("tokenizer_config.json", "{")
    refused("corrupt", "tokenizer_config.json", ms.chat.of, folder)
    put("tokenizer_config.json", { chat_template = "a\n{% wrong %}" })
    refused("unsupported", "chat template, line 2: block 'wrong' is not built", ms.chat.of, folder)
    assert.has_error(function() ms.chat.of(7) end)
  end)
end)

describe("a record", function()
  it("with prompt and completion becomes messages", function()
    local talk = assert(ms.chat.conversation { prompt = "U", completion = "A", tools = { 1 } })
    assert.same({ messages = { user "U", assistant "A" }, tools = { 1 } }, talk)
    talk = assert(ms.chat.conversation { prompt = { user "U", assistant "A", user "V" },
      completion = { assistant "B" } })
    assert.same({ user "U", assistant "A", user "V", assistant "B" }, talk.messages)
    local whole = { messages = { user "U" } }
    assert.equal(whole, ms.chat.conversation(whole))
    refused("mismatch", "prompt and completion", ms.chat.conversation, { prompt = "U" })
    refused("mismatch", "prompt and completion", ms.chat.conversation, { text = "U" })
  end)
end)
