-- The language of chat templates: each construct gives what Jinja gives (golden/chat), or is
-- refused by its name and line.
local ms = require "moonshard"
local core = require "moonshard.core"

local FOLDER = (os.getenv "MOONSHARD_SOURCE" or ".") .. "/tests/golden/chat/"

-- What is not built, of the templates that Jinja renders: template -> a part of the message.
local REFUSED <const> = {
  ["{{ 1e22 }}"] = "a number beyond 64 bits (1e+22)",
  ["{{ {'items': 5}.items }}"] = "printing a function",
  ["{{ [1,1.0,true,2]|unique|list }}"] = "a float as a key of a dict",
  ["{{ 1_000 }}"] = "the number '1_000'", ["{{ 0x10 }}"] = "the number '0x10'",
  ["{{ 'é'.upper() }}"] = "'upper' of text that is not ASCII",
  ["{{ '<'|safe + '<' }}"] = "'+' of what the filter 'safe' made",
  ["{{ lipsum is defined }} "] = "function 'lipsum'",
}

local function render(text, names, options)
  local template, message, code = ms.chat.template(text)
  if not template then return nil, message, code end
  return template:render(names, options)
end

describe("the language of chat templates", function()
  it("gives what Jinja gives", function()
    local golden = assert(ms.chat.decode(assert(core.file_read(FOLDER .. "language.json"))))
    local rendered, failed = 0, 0
    for _, case in ipairs(golden.cases) do
      local made, message, code = render(case.template, golden.names,
        { date = "2026-03-05T14:07:09" })
      if REFUSED[case.template] then
        assert.is_nil(made, case.template)
        assert.equal("unsupported", code)
        assert.matches(REFUSED[case.template], message, 1, true)
      elseif case.fails then
        assert.is_nil(made, case.template)
        failed = failed + 1
      else
        assert.equal(case.text, made and made.text, case.template .. ": " .. tostring(message))
        rendered = rendered + 1
      end
    end
    assert.is_true(rendered > 800 and failed >= 30)
  end)

  -- What a message says after the template's line.
  local function says(text, line, message, code)
    local made, given, kind = render(text, { messages = {} })
    assert.is_nil(made, text)
    assert.equal(("chat template, line %d: %s"):format(line, message), given)
    assert.equal(code, kind, text)
  end

  it("names what is not built, and its line", function()
    for text, message in pairs {
      ["{{ 1|trimm }}"] = "filter 'trimm' is not built: did you mean 'trim'?",
      ["{{ 1 is strng }}"] = "test 'strng' is not built: did you mean 'string'?",
      ["{% iff a %}"] = "block 'iff' is not built: did you mean 'if'?",
      ["{% call f() %}{% endcall %}"] = "block 'call' is not built: known are break, continue, \z
        for, generation, if, macro, set",
      ["{% for a in b recursive %}{% endfor %}"] = "the loop 'recursive' is not built",
      ["{% macro f() %}{{ caller() }}{% endmacro %}"] = "the name 'caller' is not built",
      ["{% macro f() %}{{ varargs }}{% endmacro %}"] = "the name 'varargs' is not built",
      ["{{ f(*a) }}"] = "an argument of the form '*...' is not built",
      ["{% set x | upper %}{% endset %}"] = "a filter of the block 'set' is not built",
      ["{% set loop = 1 %}"] = "setting 'loop' is not built",
      ["{% break %}"] = "'break' outside of a loop is not built",
      ["{% for a in b %}{% generation %}{% continue %}{% endgeneration %}{% endfor %}"] =
        "'continue' outside of a loop is not built",
      ["{% macro f() %}{% generation %}{% endgeneration %}{% endmacro %}"] =
        "the block 'generation' inside of generation, set or macro is not built",
      ["{{ a is string if b }}"] = false, ["{{ a|safe|upper }}"] =
        "the filter 'upper' of what the filter 'safe' made is not built",
      ["{{ '\\N{DASH}' }}"] = "the escape '\\N' is not built",
      ["{{ [1]|tojson(1) }}"] = "tojson: an argument without a name is not built",
      ["{{ [1].append(2) }}"] =
        "of a list the method 'append' is not built: known are count, index",
      ["{{ {}.pop('a') }}"] = false, ["{{ 'a'.format(1) }}"] = false,
      ["{{ ''.__class__ }}"] = "attribute '__class__' is not built",
      ["{{ range }}"] = "printing a function is not built",
      ["{{ range(3) }}"] = "printing a range is not built",
      ["{{ [1]|map('string') }}"] = "printing a generator is not built",
      ["{{ ['\u{200b}'] }}"] = "printing a list or a dict with the character U+200B is not built: \z
        tojson writes it",
      ["{{ 9223372036854775807 + 1 }}"] = "an integer beyond 64 bits is not built",
      ["{{ -9223372036854775807 - 2 }}"] = "an integer beyond 64 bits is not built",
      ["{{ 4611686018427387904 * 2 }}"] = "an integer beyond 64 bits is not built",
      ["{{ 9223372036854775808 }}"] =
        "a number beyond 64 bits (9223372036854775808) is not built",
      ["{% set g = [1]|map('string') %}{{ g|list }}{{ g|list }}"] = "reading a result of a filter \z
        such as map or select twice is not built: put the filter 'list' behind it",
      ["{{ strftime_now('%Q') }}"] = false, ["{{ '%5d' % 3 }}"] = "in a format '%5' is not built",
      ["{% for a in [1] %}{{ loop.changed(1) }}{% endfor %}"] = false,
      ["{% for a in [1] %}{{ loop([1]) }}{% endfor %}"] = "the call of 'loop' is not built",
    } do
      if message then says("\n" .. text, 2, message, "unsupported")
      else
        local made, given = render("\n" .. text, { messages = {} })
        assert.is_nil(made, text)
        assert.matches("^chat template, line 2: .*is not built", given)
      end
    end
  end)

  it("says what is wrong with a template, and where", function()
    for text, message in pairs {
      ["{{ a"] = "'}}' is missing at the end", ["{% if a %}"] =
        "'endif' is missing for the block that begins at line 2",
      ["{{ 'a }}"] = "a string has no end", ["{# a"] = "a comment has no end",
      ["{% raw %}a"] = "raw has no end", ["{{ (a }}"] = "unexpected '}'",
      ["{{ a b }}"] = "'}}' is expected, not 'b'", ["{{ }}"] =
        "an expression is expected, not '}}'", ["{% endif %}"] = "unexpected 'endif'",
      ["{{ a ? b }}"] = "unexpected character '?'",
      ["{{ '\\ud800' }}"] = "'\\ud800' is no character",
      ["{% macro f(a=1, b) %}{% endmacro %}"] = "a parameter without a default is behind one with",
      ["{{ f(a=1, 2) }}"] = "an argument without a name is behind one with",
      ["{{ a[] }}"] = "an index is expected, not ']'",
    } do
      says("\n" .. text, 2, message, "corrupt")
    end
    assert.is_nil((ms.chat.template "\xff"))
  end)

  it("says what is wrong with a value, and where", function()
    for text, message in pairs {
      ["{{ a.b }}"] = "'a' is undefined, so it has no 'b'",
      ["{{ messages[0].content }}"] = "'0' is undefined, so it has no 'content'",
      ["{{ 'a' + 1 }}"] = "'+' of a string and a integer has no result",
      ["{{ a() }}"] = "a call of undefined ('a'), which is no function",
      ["{{ 1 < 'a' }}"] = "a integer and a string have no order",
      ["{% for a in 1 %}{% endfor %}"] = "for: a integer has no items",
      ["{% for a, b in [[1]] %}{% endfor %}"] = "2 names get 1 values",
      ["{% set d = {} %}{% set d.a = 1 %}"] =
        "'d' is a dict, and only what namespace() makes has attributes to set",
      ["{{ 1 // 0 }}"] = "a division by zero", ["{{ a|tojson }}"] =
        "tojson: a undefined ('a') has no JSON",
      ["{% macro f(a) %}{% endmacro %}{{ f(1, 2) }}"] =
        "the macro 'f' takes 1 arguments, not 2",
    } do
      says("\n" .. text, 2, message, "mismatch")
    end
  end)
end)
