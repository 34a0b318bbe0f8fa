-- moonshard test --golden DIR [-n N]: runs cases whose results another implementation has computed,
-- and compares.
local launch = require "moonshard.base.launch"
local switches = require "moonshard.cli.switches"
local sorted_pairs = require "moonshard.base.sorted_pairs"

local test = {}

local function read_manifest(folder)
  local core = require "moonshard.core"
  local path = folder .. "/manifest.json"
  local text, message = core.file_read(path)
  if not text then launch.exit(3, message) end
  local manifest, why = core.json_decode(text)
  if type(manifest) ~= "table" then
    launch.exit(3, ("%s: %s"):format(path, why or "an object is expected"))
  end
  return manifest
end

-- The tensors of a file of the folder, read once.
local function reader(folder)
  local files = {}
  return function(name)
    if type(name) ~= "string" or name:match "/" then
      error(("the file '%s' does not lie in this folder"):format(tostring(name)), 0)
    end
    if not files[name] then
      local tensors, message = require "moonshard.safetensors".load(folder .. "/" .. name)
      files[name] = tensors or error(message, 0)
    end
    return files[name]
  end
end

-- Runs all cases of a kind, each with the file that the case or its kind names. Returns the report
-- and the number of cases that ran.
local function run_kind(kind, section, read)
  local cases = section.cases or section
  local own, found = require("moonshard.cli.golden." .. kind),
    require "moonshard.cli.golden.report".new(kind)
  local run = 0
  for position, case in ipairs(cases) do
    found:begin(type(case) == "table" and own.name(case) or tostring(position))
    local ok, failure = pcall(function()
      if type(case) ~= "table" then error("a case is an object", 0) end
      own.run(case, read(case.file or section.file), found)
    end)
    if not ok then found:fail("as a whole", tostring(failure)) end
    run = run + 1
  end
  if run == 0 then found:fail("all", "there is no case") end
  return found, run
end

-- Prints on rank 0 a text that is the same on all ranks.
local function say(text) if require "moonshard".rank() == 0 then print(text) end end

-- Prints a line for the kind, then its failures.
local function print_kind(found, run)
  say(("%-12s %3d cases, %d failures; largest error %.2g, %.2g of its tolerance (%s)")
    :format(found.kind, run, #found.failures, found.error, found.share, found.place))
  for _, line in ipairs(found.failures) do print(line) end
end

-- Chooses the cases of communication hooks for this number of ranks; prints how many are left out,
-- and why. The third result is the set of other numbers of ranks.
local function hooks_for_this_size(list)
  local own, size = require "moonshard.cli.golden.hooks", require "moonshard".world_size()
  local chosen, failures, elsewhere, sizes = {}, 0, 0, {}
  for _, case in ipairs(list) do
    local ok, message = pcall(own.check, case)
    if not ok then
      print(("FAILED comm_hooks: %s"):format(message))
      failures = failures + 1
    elseif case.world_size ~= size then
      elsewhere = elsewhere + 1
      if math.type(case.world_size) == "integer" and case.world_size > 1 then
        sizes[case.world_size] = true
      end
    else chosen[#chosen + 1] = case end
  end
  if elsewhere > 0 then
    say(("%-12s %3d cases: %d run here, %d for other numbers of ranks")
      :format("comm_hooks", #list, #chosen, elsewhere))
  end
  return chosen, failures, sizes
end

-- Of the cases of sharded training those for as many ranks as there are; says what is left out.
-- Second: the other numbers of ranks.
local function sharded_for_this_size(list)
  local size, null = require "moonshard".world_size(), require "moonshard.core".json_null
  local chosen, elsewhere, sizes = {}, 0, {}
  for _, case in ipairs(list) do
    for key, value in pairs(case) do if value == null then case[key] = nil end end
    if case.ranks == size then chosen[#chosen + 1] = case
    else
      elsewhere = elsewhere + 1
      if math.type(case.ranks) == "integer" and case.ranks > 1 then sizes[case.ranks] = true end
    end
  end
  if elsewhere > 0 then
    say(("%-12s %3d cases: %d run here, %d for other numbers of ranks"):format("fsdp", #list,
      #chosen, elsewhere))
  end
  return chosen, sizes
end

-- The number of cases in the manifest, counted independently of the cases that run.
local function count_cases(section)
  local count = 0
  for _ in pairs(section.cases or section) do count = count + 1 end
  return count
end

--- Runs all cases of a folder for this number of ranks. Returns the number of failures, and the set
--- of other numbers of ranks that have cases.
---@param folder string
---@return integer
---@return table<integer, true>
function test.golden(folder)
  local other_sizes = {}
  local manifest, read, failures, kinds_run = read_manifest(folder), reader(folder), 0, 0
  -- Operators and optimizers do not depend on the number of ranks: they run on one rank only.
  local alone = require "moonshard".world_size() == 1
  local kinds = alone and { "optimizers", "operators", "models" } or { "models" }
  local known = {
    peer = true, seed = true, set = true, kinds = true,
    comm_hooks = true, optimizers = true, operators = true, fsdp = true,
  }
  for _, kind in ipairs(kinds) do known[kind] = true end
  for key in pairs(manifest) do
    if not known[key] then
      print(("FAILED manifest.json: unknown kind '%s'"):format(tostring(key)))
      failures = failures + 1
    end
  end
  for _, kind in ipairs(kinds) do
    if manifest[kind] then
      local found, run = run_kind(kind, manifest[kind], read)
      local expected = count_cases(manifest[kind])
      if run ~= expected then
        found:fail("all", ("%d cases ran, the manifest has %d"):format(run, expected))
      end
      print_kind(found, run)
      kinds_run = kinds_run + 1
      failures = failures + #found.failures
    end
  end
  if manifest.fsdp then
    local chosen, sizes = sharded_for_this_size(manifest.fsdp)
    for ranks in pairs(sizes) do other_sizes[ranks] = true end
    if #chosen > 0 then
      local found = run_kind("fsdp", chosen, read)
      print_kind(found, #chosen)
      kinds_run = kinds_run + 1
      failures = failures + #found.failures
    end
  end
  if manifest.comm_hooks then
    local chosen, unknown, sizes = hooks_for_this_size(manifest.comm_hooks)
    for ranks in pairs(sizes) do other_sizes[ranks] = true end
    failures = failures + unknown
    if #chosen > 0 then
      local found = run_kind("hooks", chosen, read)
      print_kind(found, #chosen)
      kinds_run = kinds_run + 1
      failures = failures + #found.failures
    end
  end
  if kinds_run == 0 and next(other_sizes) == nil then
    print "FAILED manifest.json: it has no case that can be run"
    failures = failures + 1
  end
  return failures, other_sizes
end

-- Runs this program on the same folder for each of the other numbers of ranks.
local function run_on_ranks(folder, sizes, device)
  local process, failures = launch.process, 0
  local gpus = device == "cuda" and #require "moonshard".info().gpus
  for size in sorted_pairs(sizes) do
    if gpus and gpus < size then
      print(("on %d ranks: left out, this machine has %d GPUs"):format(size, gpus))
    else
      print(("on %d ranks"):format(size))
      io.stdout:flush()
      local quoted = ("'%s'"):format(folder:gsub("'", "'\\''"))
      if not os.execute(("'%s' test --golden %s -n %d --device %s"):format(process.program, quoted,
          size, device)) then
        failures = failures + 1
      end
    end
  end
  return failures
end

--- The parser of its command line.
---@return table
function test.parser()
  local parser = switches.parser("test", "Compares results with those of another implementation.")
  parser:option("--golden", "folder with manifest.json and safetensors files"):argname "DIR"
  switches.add_ranks(parser)
  require "moonshard.cli.ranks".add_switches(parser)
  return parser
end

--- moonshard test --golden DIR [-n N]
---@param arguments string[]
---@return integer
function test.main(arguments)
  local parser = test.parser()
  local parsed = switches.parse(parser, arguments)
  if not parsed.golden then
    launch.exit(2, "give the folder to compare with: --golden DIR\n" .. parser:get_usage())
  end
  if parsed.device == "sim" then launch.exit(2, "--device sim has no data to compare") end
  -- On several ranks: models, with a part of each batch on each rank, and hooks for so many ranks.
  if parsed.ranks > 1 and not launch.process.rank then
    return require "moonshard.cli.ranks".launch(parsed)
  end
  switches.apply(parsed)
  if not require "moonshard.core".exists(parsed.golden) then
    launch.exit(3, ("there is no folder '%s'"):format(parsed.golden))
  end
  local folder = parsed.golden:gsub("/+$", "")
  local failures, other_sizes = test.golden(folder)
  if require "moonshard".world_size() == 1 then
    failures = failures + run_on_ranks(folder, other_sizes, parsed.device or "cpu")
  end
  if failures > 0 then launch.exit(1, ("%d failures"):format(failures)) end
  return 0
end

return test
