-- Reads the README.md files of engine/, bindings/ and lua/ beside their folders, and reports pages
-- that are long, folders without a page, and lists of files that are not those of the folder.
--
--     lua5.4 tests/lint/pages.lua [ROOT]
--
-- A folder's page has a section "## Files" with a link to each source. A header has a link if there
-- is no source of its name.

local root = arg[1] or "."

-- Words of a page, of a folder's page, and of a cell of a table.
local MOST_WORDS, MOST_OF_FOLDER, MOST_OF_CELL = 1200, 600, 40
-- A folder with as many files has a page.
local FILES = 8

-- Exceptions: folders without a page.
local WITHOUT = {
  ["engine/cmake"] = true,     -- the build's own files; the README.md of the root says how to build
}
-- Exceptions: pages that do not list files.
local MAPS = {
  ["engine/README.md"] = true,     -- the map of all layers
}

local problems = {}
local function report(path, message, ...)
  problems[#problems + 1] = ("%s: %s"):format(path, message:format(...))
end

local function find(arguments)
  local handle = assert(io.popen(("cd '%s' && find engine bindings lua %s 2>/dev/null")
    :format(root, arguments)))
  local found = {}
  for line in handle:lines() do found[#found + 1] = line end
  handle:close()
  table.sort(found)
  return found
end

local function read(path)
  local handle = assert(io.open(root .. "/" .. path, "rb"))
  local text = handle:read("a")
  handle:close()
  return text
end

-- folder -> the names of its files, and of its folders, in order.
local files, folders, exists = {}, {}, {}
for _, path in ipairs(find("-type d")) do
  files[path], folders[path], exists[path] = {}, {}, true
end
for _, path in ipairs(find("-mindepth 1 -type d")) do
  local folder, name = path:match("^(.*)/([^/]*)$")
  table.insert(folders[folder], name)
end
for _, path in ipairs(find("-type f")) do
  local folder, name = path:match("^(.*)/([^/]*)$")
  table.insert(files[folder], name)
  exists[path] = true
end

-- Whether a path from the root on leads to a file or a folder; what is outside of the folders that
-- were read is sought on the disk.
local function leads(path)
  if exists[path] ~= nil then return exists[path] end
  local handle = io.open(root .. "/" .. path)
  if handle then handle:close() end
  exists[path] = handle ~= nil
  return exists[path]
end

-- The path from the root on that a link in a folder's page has, without "." and "..".
local function resolved(folder, link)
  local parts = {}
  for part in (folder .. "/" .. link):gmatch("[^/]+") do
    if part == ".." then table.remove(parts) elseif part ~= "." then parts[#parts + 1] = part end
  end
  return table.concat(parts, "/")
end

-- The text without code, in which brackets are no links.
local function without_code(text)
  local lines, fenced = {}, false
  for line in (text .. "\n"):gmatch("([^\n]*)\n") do
    local fence = line:find("^%s*```")
    if fence then fenced = not fenced end
    lines[#lines + 1] = (fence or fenced) and "" or line
  end
  return (table.concat(lines, "\n"):gsub("(`+)[^`\n]-%1", ""))
end

-- The links of a text, without those to other sites and within the page.
local function links_of(text)
  local links = {}
  for link in text:gmatch("%]%(([^)%s]+)[^)]*%)") do
    link = link:gsub("#.*$", "")
    if link ~= "" and not link:find("^%a[%w+.-]*:") then links[#links + 1] = link end
  end
  return links
end

local function count_words(text) return select(2, text:gsub("%S+", "")) end

local function check_text(path, text)
  local words = count_words(text)
  local most = MAPS[path] and MOST_WORDS or MOST_OF_FOLDER
  if words > most then
    report(path, "%d words, at most %d may be: move what concerns one file into its comment",
      words, most)
  end
  local number = 0
  for line in (text .. "\n"):gmatch("([^\n]*)\n") do
    number = number + 1
    for cell in (line:match("^%s*|(.*)$") or ""):gsub("\\|", "/"):gmatch("[^|]+") do
      if count_words(cell) > MOST_OF_CELL then
        report(("%s:%d"):format(path, number),
          "a cell of %d words, at most %d may be: write it below the table",
          count_words(cell), MOST_OF_CELL)
      end
    end
  end
  local folder, seen = path:match("^(.*)/"), {}
  for _, link in ipairs(links_of(without_code(text))) do
    if not seen[link] and not leads(resolved(folder, link)) then
      report(path, "the link to %s leads nowhere: correct it", link)
    end
    seen[link] = true
  end
end

-- How often a page must have a file in its list: 1, 0, or nil if it may be there once.
local function wanted(folder, name)
  local base, extension = name:match("^(.*)%.(%w+)$")
  if extension == "c" or extension == "cpp" or extension == "lua" then return 1 end
  local function has(other) return exists[("%s/%s.%s"):format(folder, base, other)] end
  if extension == "cu" then return not has("c") and 1 or nil end
  if extension == "h" then return (has("c") or has("cu") or has("cpp")) and 0 or 1 end
  return 0
end

local function check_list(folder, path, text)
  local section = without_code(text):match("\n## Files\n(.*)$")
  if not section then return report(path, "there is no section \"## Files\": list the files") end
  section = ("\n" .. section):gsub("\n## .*$", "")
  local count = {}
  for _, link in ipairs(links_of(section)) do count[link] = (count[link] or 0) + 1 end
  for _, name in ipairs(files[folder]) do
    local want, got = wanted(folder, name), count[name] or 0
    if want == 1 and got == 0 then
      report(path, "%s is not listed: add a line that says what it is", name)
    elseif got > 1 then
      report(path, "%s is listed %d times: leave one", name, got)
    elseif want == 0 and got > 0 then
      report(path, "%s is listed: %s", name,
        name:find("%.h$") and "the source of its name is enough" or "it is no source")
    end
  end
  for _, name in ipairs(folders[folder]) do
    if not count[name .. "/"] and not count[name .. "/README.md"] then
      report(path, "%s/ is not listed: add a line that says what it has", name)
    end
  end
end

for folder, names in pairs(files) do
  local own, has_page = 0, false
  for _, name in ipairs(names) do
    has_page = has_page or name == "README.md"
    if name ~= "README.md" and name ~= "CMakeLists.txt" then own = own + 1 end
  end
  local path = folder .. "/README.md"
  if has_page then
    local text = read(path)
    check_text(path, text)
    if not MAPS[path] then check_list(folder, path, text) end
  elseif own >= FILES and not WITHOUT[folder] then
    report(folder, "%d files and no README.md: write one with the section \"## Files\"", own)
  end
end

table.sort(problems)
if next(files) == nil then problems[1] = root .. " has no engine/, bindings/ or lua/" end
for _, problem in ipairs(problems) do print(problem) end
print(("%d problem%s"):format(#problems, #problems == 1 and "" or "s"))
os.exit(#problems == 0)
