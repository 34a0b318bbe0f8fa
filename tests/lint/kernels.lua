-- Compares what the compiler says of each GPU kernel (ptxas -v) with the committed table: registers
-- and shared memory. Local memory and spilled registers are refused whatever the table says, and so
-- is more machine code in all than a program should carry.
--
--     lua5.4 tests/lint/kernels.lua BUILD NVCC [--write]
--
-- Another version of the compiler uses other registers: then only local memory is looked at.

local build, nvcc = arg[1], arg[2]
local TABLE = (arg[0]:gsub("lint/[^/]*$", "")) .. "cuda/kernels/resources.txt"

local function output(command)
  local pipe = assert(io.popen(command))
  local text = pipe:read "a"
  pipe:close()
  return text
end

local version = output(nvcc .. " --version"):match "V(%d+%.%d+%.%d+)"
local found, wrong = {}, {}
local function refuse(format, ...) wrong[#wrong + 1] = format:format(...) end

for file in output(("ls %s/engine/*/*.fatbin.log"):format(build)):gmatch "[^\n]+" do
  local kernel, architecture
  for line in io.lines(file) do
    local name, target = line:match "Compiling entry function '([%w_]+)' for '(sm_%d+)'"
    if name then kernel, architecture = name, target end
    local frame, stores = line:match "(%d+) bytes stack frame, (%d+) bytes spill stores"
    if frame and (frame ~= "0" or stores ~= "0") then
      refuse("%s, %s: %s bytes of local memory, %s of spilled registers: none may be used",
        kernel, architecture, frame, stores)
    end
    local registers = line:match "Used (%d+) registers"
    if registers then
      found[#found + 1] = ("%s %s %s %s"):format(kernel, architecture, registers,
        line:match "(%d+) bytes smem" or 0)
    end
  end
end
table.sort(found)
if #found == 0 then refuse("no kernel was found in %s/engine/*/*.fatbin.log", build) end

-- The code that is embedded, for all architectures.
local MOST <const> = 16 * 2 ^ 20
local bytes = 0
for file in output(("ls %s/engine/*/*.fatbin"):format(build)):gmatch "[^\n]+" do
  local code <close> = assert(io.open(file, "rb"))
  bytes = bytes + code:seek "end"
end
if bytes == 0 then refuse("no code was found in %s/engine/*/*.fatbin", build) end
if bytes >= MOST then
  refuse("machine code of %d bytes: less than %d is wanted: are there kernels for more types or \z
    sizes than are used?", bytes, MOST)
end

local HEAD = "# kernel, architecture, registers of a thread, bytes of shared memory of a block\n\z
  nvcc "
if arg[3] == "--write" then
  local out = assert(io.open(TABLE, "w"))
  out:write(HEAD, version, "\n", table.concat(found, "\n"), "\n")
  out:close()
else
  local known, of = {}, nil
  for line in io.lines(TABLE) do
    of = of or line:match "^nvcc (.*)"
    if line:match "^[%w_]+ sm_" then known[line] = true end
  end
  local other = {}
  for _, line in ipairs(of == version and found or {}) do
    if not known[line] then other[#other + 1] = "new: " .. line end
    known[line] = nil
  end
  for line in pairs(of == version and known or {}) do other[#other + 1] = "gone: " .. line end
  table.sort(other)
  if #other > 0 then
    refuse("%s differs in %d lines:\n    %s\nIf that is right, write the table anew:\n    \z
      lua5.4 %s %s %s --write", TABLE, #other,
      table.concat(other, "\n    ", 1, math.min(#other, 10)), arg[0], build, nvcc)
  end
end

for _, line in ipairs(wrong) do print(line) end
print(("%d kernels, %.1f MiB of code, nvcc %s"):format(#found, bytes / 2 ^ 20, version))
os.exit(#wrong == 0)
