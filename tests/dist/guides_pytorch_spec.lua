-- recipes/guides/pytorch.md: its scripts run, the middle column of its table is a script whose
-- values are those of the page, and its names are those that `moonshard help` gives.
local command = require "command"
local examples = require "examples"
local find = require "moonshard.docs.find"
local guide = require "guide"
local read = require "moonshard.docs.read"

local page = guide.read "pytorch"

-- The rows below a heading of a table: cells without the outer bars.
local function rows_under(first)
  local rows, inside = {}, false
  for line in (page .. "\n"):gmatch "([^\n]*)\n" do
    if line:find("| " .. first .. " |", 1, true) == 1 then inside = true
    elseif line:sub(1, 1) ~= "|" then inside = false
    elseif inside and not line:find "^|%-" then
      local cells = {}
      for cell in line:sub(2):gmatch "%s*(.-)%s*|" do cells[#cells + 1] = cell end
      rows[#rows + 1] = cells
    end
  end
  return rows
end

-- Checks values as the examples of the reference have them.
local CHECK <const> = [==[
local core = require "moonshard.core"
local function shown(value)
  if core.is_tensor(value) then
    return shown(value:dim() == 0 and value:item() or value:to_table())
  end
  if type(value) == "string" then return ("%q"):format(value) end
  if type(value) ~= "table" then return tostring(value) end
  local parts = {}
  for i, one in ipairs(value) do parts[i] = shown(one) end
  return "{ " .. table.concat(parts, ", ") .. " }"
end
local function check(expected, value)
  if shown(value) ~= expected then error(("%s, not %s"):format(shown(value), expected), 2) end
end
]==]

describe("the guide for users of PyTorch", function()
  local folder = guide.folder()
  teardown(function() command.remove(folder) end)

  for _, block in ipairs(guide.blocks(page)) do
    if block.kind == "lua" then
      it("has a script", function() assert.truthy(guide.write_file(folder, block.text)) end)
    else
      for _, one in ipairs(guide.commands(block.text)) do
        it(one.line, function() guide.try(folder, one, {}) end)
      end
    end
  end

  local rows = rows_under "PyTorch | here"
  it("has sixty names", function() assert.is_true(#rows >= 60, #rows) end)

  -- The middle column as a program.
  local lines, checked = {}, 0
  for i, row in ipairs(rows) do
    local line = examples.checked(assert(row[2]:match "^`(.*)`$", row[2]))
    checked = checked + (line:find "^check%(" and 1 or 0)
    -- An expression whose value is not shown is no statement.
    if not load(line) and load("local _ = " .. line) then line = "local _ = " .. line end
    lines[i] = line
  end

  it("has lines that run, with these values", function()
    assert.is_true(checked >= 20, checked)
    command.write(folder .. "/rows.lua", CHECK .. table.concat(lines, "\n") .. "\n")
    command.succeed(folder, "run rows.lua")
    -- On two ranks, too, each of which has its own number.
    local text, count = command.read(folder .. "/rows.lua"):gsub('check%("0", ms%.rank%(%)%)', "")
    assert.equal(1, count)
    command.write(folder .. "/rows.lua", text)
    command.succeed(folder, "run rows.lua -n 2")
  end)

  local all = read.all()

  -- The names that help gives for a word of PyTorch.
  local function names_of(word)
    local answer, names = find.answer(word, all), {}
    for _, list in ipairs { answer.entries, answer.also } do
      for _, entry in ipairs(list) do names[#names + 1] = entry.name end
    end
    for _, name in ipairs(answer.synonym and answer.synonym.names or {}) do
      names[#names + 1] = name
    end
    return names
  end

  -- What a reader asks help for: a name, with or without a call; nil for other expressions.
  local function name_in(expression)
    local text = expression:match "^`with (.*):`$" or expression:match "^`(.*)`$"
    local name = text:match "^([%a][%w_.]*)%(.*%)$" or text:match "^[%a][%w_.]*$"
    return name ~= "forward" and name or nil
  end

  local compared = 0
  for _, row in ipairs(rows) do
    local name = name_in(row[1])
    if name and name:find "^Net" == nil and name ~= "net" then
      compared = compared + 1
      it("says what help says of " .. name, function()
        local names, found = names_of(name), false
        for _, own in ipairs(names) do
          local last = own:match "([%w_]+)$"
          found = found or row[2]:find("%f[%w_]" .. last .. "_?%f[^%w_]") ~= nil
        end
        assert.is_true(found, ("%s: %s"):format(name, table.concat(names, " ")))
      end)
    end
  end
  it("compares most rows with help", function() assert.is_true(compared >= 50, compared) end)

  it("names as missing what help names as missing", function()
    local missing = rows_under "in PyTorch | instead"
    assert.is_true(#missing >= 10)
    for _, row in ipairs(missing) do
      local word = row[1]:match "^`(.-)`"
      local synonym = find.synonym(word)
      assert.is_true(synonym ~= nil and synonym.none, word)
    end
  end)

  it("has as many rules as the reference", function()
    local section = page:match "\n## Twelve rules\n(.-)\n## "
    local count = 0
    for number in section:gmatch "\n(%d+)%. " do
      count = count + 1
      assert.equal(count, tonumber(number))
    end
    assert.equal(#all.rules.list, count)
  end)

  it("is at most 1,200 words", function()
    assert.is_true(guide.words(page) <= 1200, guide.words(page))
  end)
end)
