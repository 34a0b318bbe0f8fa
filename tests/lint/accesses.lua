-- Compares what each GPU kernel reads and writes, by the width of an access, with the committed
-- table. A piece of 16 bytes that the compiler takes apart into words costs four instructions and
-- four writes of a part of a sector, so it must not come unseen. The PTX that the build keeps tells
-- it, without a GPU and without a disassembler.
--
--     lua5.4 tests/lint/accesses.lua BUILD [TABLE] [--write]
--
-- Another version of the compiler unrolls other loops and takes other instructions: then only a
-- kernel that stores 16 bytes at once, and has got more narrow stores but no more wide ones, is
-- refused.

local build, path, writes = arg[1], arg[2], arg[#arg] == "--write"
if not path or path == "--write" then
  path = (arg[0]:gsub("lint/[^/]*$", "")) .. "cuda/kernels/accesses.txt"
end

local wrong = {}
local function refuse(format, ...) wrong[#wrong + 1] = format:format(...) end

---@class accesses
---@field ld table<integer, integer> how many loads have so many bytes
---@field st table<integer, integer>
---@field ptx integer instructions in all

--- Counts an access to global memory, also one whose address the compiler knows nothing of.
---@param kernel accesses
---@param instruction string such as "st.global.v4.u32"
local function count(kernel, instruction)
  kernel.ptx = kernel.ptx + 1
  local kind, rest = instruction:match "^([ls][dt])%.(.*)"
  if not kind or rest:find "^param" or rest:find "shared" or rest:find "const" then return end
  local bytes = rest:match "(%d+)$" // 8 * (rest:match "%.?v(%d)%." or 1)
  kernel[kind][bytes] = (kernel[kind][bytes] or 0) + 1
end

local version, found = nil, {}
local files <close> = assert(io.popen(("ls %s/engine/*/*.fatbin.ptx"):format(build)))
for file in files:lines() do
  local kernel
  for line in io.lines(file) do
    version = version or line:match "^// Cuda compilation tools, .*V(%d+%.%d+%.%d+)"
    local name = line:match "%.entry ([%w_]+)"
    if name then
      kernel = { ld = {}, st = {}, ptx = 0 }
      found[name] = kernel
    end
    local instruction = line:gsub("^%s*@!?%%p%d+", ""):match "^%s+(%l[%w_.:]*)[%s;]"
    if kernel and instruction then count(kernel, instruction) end
    if line:find "^}" then kernel = nil end
  end
end
if not next(found) then refuse("no kernel was found in %s/engine/*/*.fatbin.ptx", build) end

local function show(widths)
  local order, shown = {}, {}
  for bytes in pairs(widths) do order[#order + 1] = bytes end
  table.sort(order, function(a, b) return a > b end)
  for i, bytes in ipairs(order) do shown[i] = (" %d:%d"):format(bytes, widths[bytes]) end
  return table.concat(shown)
end
local lines = {}
for name, kernel in pairs(found) do
  lines[#lines + 1] = ("%s ld%s st%s ptx %d"):format(name, show(kernel.ld), show(kernel.st),
    kernel.ptx)
end
table.sort(lines)

--- The stores of less than 16 bytes, and those of 16.
---@param widths table<integer, integer>
---@return integer narrow
---@return integer wide
local function stores_of(widths)
  local narrow = 0
  for bytes, times in pairs(widths) do narrow = narrow + (bytes < 16 and times or 0) end
  return narrow, widths[16] or 0
end

local HEAD = "# kernel; loads and stores of global memory, bytes:times; instructions of PTX\nnvcc "
if writes then
  local out <close> = assert(io.open(path, "w"))
  out:write(HEAD, version, "\n", table.concat(lines, "\n"), "\n")
else
  local known, of = {}, nil
  for line in io.lines(path) do
    of = of or line:match "^nvcc (.*)"
    local name, stores = line:match "^([%w_]+) ld.* st(.*) ptx %d+$"
    if name then known[name] = { line = line, st = {} } end
    for bytes, times in (stores or ""):gmatch "(%d+):(%d+)" do
      known[name].st[tonumber(bytes)] = tonumber(times)
    end
  end

  local other = {}
  for _, line in ipairs(lines) do
    local name = line:match "^[%w_]+"
    local was = known[name]
    if was then
      local narrow, wide = stores_of(found[name].st)
      local known_narrow, known_wide = stores_of(was.st)
      if known_wide > 0 and narrow > known_narrow and wide <= known_wide then
        refuse("%s: %d stores of less than 16 bytes, %d are known: is a piece of 16 bytes stored \z
          in words? Elements are converted before it, and written by ms_put", name, narrow,
          known_narrow)
      elseif of == version and was.line ~= line then
        other[#other + 1] = ("%s\n    was: %s"):format(line, was.line)
      end
    else other[#other + 1] = "new: " .. line end
    known[name] = nil
  end
  for _, was in pairs(known) do other[#other + 1] = "gone: " .. was.line end
  table.sort(other)
  if of == version and #other > 0 then
    refuse("%s differs in %d kernels:\n    %s\nIf that is right, write the table anew:\n    \z
      lua5.4 %s %s --write", path, #other,
      table.concat(other, "\n    ", 1, math.min(#other, 10)), arg[0], build)
  end
end

for _, line in ipairs(wrong) do print(line) end
print(#wrong == 1 and "1 problem" or #wrong .. " problems")
os.exit(#wrong == 0)
