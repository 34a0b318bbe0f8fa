-- Finds entries of the reference by what a reader calls them.
local core = require "moonshard.core"
local glossary = require "moonshard.docs.glossary"
local read = require "moonshard.docs.read"
local synonyms = require "moonshard.docs.synonyms"

local find = {}

---@class ms.ReferenceEntry               one of field, blocks, alias, word, rule has what it is
---@field name string
---@field field? ms.ReferenceField
---@field blocks? ms.ReferenceBlock[]     a class, which may be told in several parts
---@field alias? table
---@field word? string[]                  of the glossary: { word, meaning }
---@field rule? integer                   its number

---@class ms.ReferenceAnswer
---@field entries ms.ReferenceEntry[]     the best one first
---@field also ms.ReferenceEntry[]        others of this name, of which the names are enough
---@field synonym? { words: string[], names: string[], text: string, none: boolean }
---@field named? boolean                  the entries have the name that was asked for
---@field word? string[]                  what the glossary says of it, too
---@field nearest? string                 a name like the one that nothing has
---@field mentions? string[]              entries whose text has the words that nothing is called

--- Whether values of the block's class are objects: it has methods.
---@param block ms.ReferenceBlock
---@return boolean
function find.is_object(block)
  for _, field in ipairs(block.fields) do
    local first = field.parameters and field.parameters[1]
    if first and first.name == "self" then return true end
  end
  return false
end

--- Whether the block's fields are values in a table: options and the like.
---@param block ms.ReferenceBlock
---@return boolean
function find.is_table(block)
  return block.class:match "^ms%.%u" ~= nil and not find.is_object(block)
end

--- The tables of options that a function takes: blocks of their classes.
---@param field ms.ReferenceField
---@param all table of read.all
---@return ms.ReferenceBlock[]
function find.options(field, all)
  local classes, list = {}, {}
  for _, one in ipairs(field.parameters or {}) do
    for class in one.type:gmatch "ms%.%u[%w_]*" do classes[class] = true end
  end
  for _, block in ipairs(all.blocks) do
    if classes[block.class] and #block.fields > 0 and find.is_table(block) then
      list[#list + 1] = block
    end
  end
  return list
end

-- The names under which a field is found, from the longest to its bare name.
local function forms_of_field(field)
  local full = read.full_name(field)
  local list = { full, (full:gsub(":", ".")), field.name }
  list[#list + 1] = list[2]:match "^ms%.(.*)$"
  if field.class:match "^ms%.%u" then
    list[#list + 1] = "ms." .. list[2]
    list[#list + 1] = "ms." .. full
  end
  return list
end

local function forms_of_class(class) return { class, class:match "^ms%.(.*)$" } end

-- Kinds of entries, in the order in which they answer to a name in its own case.
local CLASS <const>, FUNCTION <const>, PART <const>, METHOD <const>, VALUE <const> = 1, 2, 3, 4, 5

local function kind_of(field)
  if not field.parameters then return VALUE end
  -- ms.state is a function of the module; ms.hooks.state and Module:state are members.
  return field.class == "ms" and FUNCTION or METHOD
end

--- Every class, function, member and named type, in the order of the reference.
---@param all table of read.all
---@return ms.ReferenceEntry[]
function find.entries(all)
  local list, classes = {}, {}
  for _, alias in ipairs(all.aliases) do
    list[#list + 1] = {
      name = alias.name, alias = alias, kind = CLASS, forms = forms_of_class(alias.name),
    }
  end
  for _, block in ipairs(all.blocks) do
    local class = classes[block.class]
    if not class then
      class = {
        name = block.class, blocks = {}, forms = forms_of_class(block.class),
        kind = block.class:match "^ms%.%u" and CLASS or PART,
      }
      classes[block.class] = class
      list[#list + 1] = class
    end
    table.insert(class.blocks, block)
    for _, field in ipairs(block.fields) do
      -- A part of the module, as ms.nn, is a class.
      if not (field.class == "ms" and field.type == "ms." .. field.name) then
        list[#list + 1] = {
          name = read.full_name(field), field = field, kind = kind_of(field),
          forms = forms_of_field(field),
        }
      end
    end
  end
  return list
end

-- Entries of which a form, changed by f, is the name changed by f; by kind.
local function matching(entries, name, f)
  local wanted, by_kind, count = f(name), {}, 0
  for _, entry in ipairs(entries) do
    for _, form in ipairs(entry.forms) do
      if f(form) == wanted then
        by_kind[entry.kind] = by_kind[entry.kind] or {}
        table.insert(by_kind[entry.kind], entry)
        count = count + 1
        break
      end
    end
  end
  return by_kind, count
end

-- How many functions of one name are shown whole; of more, the first one.
local WHOLE <const> = 3

-- Adds what is not there yet.
local function add(list, entries, seen)
  for _, entry in ipairs(entries or {}) do
    if not seen[entry] then
      seen[entry] = true
      list[#list + 1] = entry
    end
  end
end

-- What a name means: a class in this case, then functions; then a class in any case, then options.
local function named(entries, name)
  local exact = matching(entries, name, function(form) return form end)
  local loose, count = matching(entries, name, string.lower)
  if count == 0 then return nil end
  local ordered, seen = {}, {}
  for _, kind in ipairs { CLASS, FUNCTION, PART, METHOD } do add(ordered, exact[kind], seen) end
  add(ordered, loose[CLASS], seen)
  add(ordered, exact[VALUE], seen)
  for _, kind in ipairs { FUNCTION, PART, METHOD, VALUE } do add(ordered, loose[kind], seen) end
  local shown, also, first = {}, {}, ordered[1]
  -- Functions of one name are shown together, and so are a function and a class.
  local together = 0
  for _, entry in ipairs(ordered) do
    if entry.kind ~= VALUE then together = together + 1 end
  end
  local is_one = first.kind == CLASS or first.kind == VALUE or together > WHOLE
  for i, entry in ipairs(ordered) do
    local is_shown = i == 1 or not is_one and entry.kind ~= VALUE
    table.insert(is_shown and shown or also, entry)
  end
  return shown, also
end

-- A word without case, spaces and signs: "State Dict" is state_dict.
local function squashed(text) return (text:lower():gsub("[^%w.]", ""):gsub("^%.+", "")) end

-- What other tools put in front of the names of their parts.
local FOREIGN <const> = {
  "^torch%.nn%.functional%.", "^torch%.utils%.data%.", "^torch%.utils%.", "^torch%.distributed%.",
  "^torch%.cuda%.amp%.", "^torch%.amp%.", "^torch%.cuda%.", "^torch%.nn%.utils%.",
  "^torch%.optim%.lr_scheduler%.", "^torch%.", "^tf%.keras%.layers%.", "^tf%.keras%.", "^tf%.",
  "^keras%.layers%.", "^keras%.", "^nn%.functional%.", "^nn%.utils%.", "^F%.", "^dist%.", "^np%.",
  "^jax%.numpy%.", "^jax%.", "^jnp%.", "^transformers%.", "^optim%.lr_scheduler%.", "^self%.",
  "^nn%.",
}

-- Classes of the objects that people call so.
local OBJECTS <const> = {
  model = "Module", module = "Module", net = "Module", optimizer = "Optimizer", opt = "Optimizer",
  scaler = "Scaler", tensor = "Tensor", x = "Tensor", y = "Tensor", t = "Tensor", loss = "Tensor",
  loader = "Loader", dataset = "Dataset", group = "Group", dist = "Group", future = "Future",
}

-- "model.train" as the method of a class.
local function as_method(name)
  local object, method = name:match "^(%a+)[.:]([%w_]+)$"
  return object and OBJECTS[object:lower()] and OBJECTS[object:lower()] .. ":" .. method
end

local function without_prefix(name)
  for _, prefix in ipairs(FOREIGN) do
    local rest, count = name:gsub(prefix, "")
    if count == 1 then return rest end
  end
  return nil
end

-- The rows of the table, and the row of each word; read once.
local rows, row_of

--- The table of synonyms: words of others, names of ours, what is to be said. none: there is
--- nothing like it here, and the names are what is nearest.
---@return { words: string[], names: string[], text: string, none: boolean }[]
function find.synonyms()
  if rows then return rows end
  rows, row_of = {}, {}
  for i, row in ipairs(synonyms) do
    local words, names = {}, {}
    for word in row[1]:gmatch "[^,]+" do words[#words + 1] = word:match "^%s*(.-)%s*$" end
    for _, word in ipairs(words) do row_of[squashed(word)] = i end
    for name in row[2]:gmatch "%S+" do names[#names + 1] = name end
    rows[i] = { words = words, names = names, text = row[3] or "", none = row.none == true }
  end
  return rows
end

--- The row of the table of synonyms that has a word.
---@param name string
---@return { words: string[], names: string[], text: string, none: boolean }?
function find.synonym(name)
  local list = find.synonyms()
  return list[row_of[squashed(name)]]
end

--- The entry that has exactly this name, as a table of synonyms gives it.
---@param name string
---@param entries ms.ReferenceEntry[]
---@return ms.ReferenceEntry?
function find.exactly(name, entries)
  local number = tonumber(name:match "^rule:(%d+)$")
  if number then return { name = "rule " .. number, rule = number } end
  for _, entry in ipairs(entries) do
    if entry.name == name then return entry end
  end
  return nil
end

local function by_synonym(row, entries)
  local list = {}
  for i, name in ipairs(row.names) do list[i] = find.exactly(name, entries) end
  return list
end

--- The entry of the glossary of a word.
---@param name string
---@return string[]?
function find.word(name)
  local wanted = squashed(name)
  for _, entry in ipairs(glossary) do
    if squashed(entry[1]) == wanted then return entry end
  end
  return nil
end

-- Names of entries whose name and text have all of the words, at most `limit`.
local function mentioning(name, entries, limit)
  local list, words = {}, {}
  for word in name:lower():gmatch "[%w_]+" do words[#words + 1] = word end
  for _, entry in ipairs(entries) do
    local text = entry.name
    if entry.field then text = text .. " " .. entry.field.text end
    for _, block in ipairs(entry.blocks or {}) do text = text .. " " .. block.text end
    text = text:lower()
    local has_all = #words > 0
    for _, word in ipairs(words) do has_all = has_all and text:find(word, 1, true) ~= nil end
    if has_all then list[#list + 1] = entry.name end
    if #list == limit then break end
  end
  return list
end

local function nearest(name, entries)
  local names, wanted = {}, name:match "[^.:]*$"
  for _, entry in ipairs(entries) do
    if entry.field and entry.field.parameters then names[#names + 1] = entry.field.name end
    if entry.blocks then names[#names + 1] = entry.forms[2] end
  end
  for _, row in ipairs(find.synonyms()) do
    table.move(row.words, 1, #row.words, #names + 1, names)
  end
  return core.nearest(wanted, names)
end

--- What a reader means by a name: entries of this name, exact ones first; else what a word of
--- another tool is called here; else the nearest names.
---@param name string
---@param all table of read.all
---@return ms.ReferenceAnswer
function find.answer(name, all)
  name = name:gsub("%(.*$", ""):match "^[%s.:]*(.-)%s*$"
  local entries = find.entries(all)
  local rule = tonumber(name:match "^[Rr]ule%s*(%d+)$")
  if rule and all.rules.list[rule] then
    return { entries = { { name = "rule " .. rule, rule = rule } }, also = {} }
  end
  local row = find.synonym(name)
  local shown, also = named(entries, name)
  -- An option of this name says less than a word of the field.
  if shown and not (row and shown[1].kind == VALUE) then
    return { entries = shown, also = also, synonym = row, named = true }
  end
  local bare, word = without_prefix(name), find.word(name)
  if word and not row and word[1]:lower() == name:lower() then
    return { entries = { { name = word[1], word = word } }, also = {} }
  end
  local function loosely(text)
    local list = matching(entries, text, squashed)
    local found = {}
    for kind = CLASS, VALUE do add(found, list[kind], {}) end
    return found[1] and { found[1] }, { table.unpack(found, 2) }
  end
  if not row then
    -- Of "net.state_dict" the last part is the word.
    local last = name:match "[%w_][.:]([%a_][%w_]*)$" or name
    for _, text in ipairs { as_method(name) or name, bare or name, name, last } do
      shown, also = named(entries, text)
      if not shown then shown, also = loosely(text) end
      if shown then return { entries = shown, also = also, named = true } end
      row = find.synonym(text)
      if row then break end
    end
  end
  if row then
    return { entries = by_synonym(row, entries), also = shown or {}, synonym = row, word = word }
  end
  if word then return { entries = { { name = word[1], word = word } }, also = {} } end
  return {
    entries = {}, also = {}, nearest = nearest(name, entries),
    mentions = mentioning(name, entries, 8),
  }
end

return find
