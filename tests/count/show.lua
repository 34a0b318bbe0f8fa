-- show.lua FILE: for each folder of tests, how many places have asserted something under count.c,
-- and how often.
-- show.lua FILE --places: each place
local path, places = ...
local SIZE <const> = 128
local file <close> = assert(io.open(path, "rb"))
local suites, names = {}, {}
for entry in function() return file:read(SIZE) end do
  local hash, count, text = ("<I8I8z"):unpack(entry)
  if hash ~= 0 then
    local folder, name = text:match "^tests/(%w+)/(.*):%d+$"
    local suite = folder or "scripts that tests write"
    if folder == "dist" then suite = name:find "_spec%.lua$" and "dist" or "programs of dist" end
    local sum = suites[suite]
    if not sum then
      sum = { places = 0, assertions = 0 }
      suites[suite], names[#names + 1] = sum, suite
    end
    sum.places, sum.assertions = sum.places + 1, sum.assertions + count
    if places then print(("%12d  %s"):format(count, text)) end
  end
end
table.sort(names)
for _, suite in ipairs(places and {} or names) do
  local sum = suites[suite]
  print(("%-26s %6d places %12d assertions"):format(suite, sum.places, sum.assertions))
end
