-- Checkpoints of sharded models: each rank writes its pieces, and any ranks load them under any
-- strategy. fsdp_checkpoint.lua holds what each rank does.
local command = require "command"
local core = require "moonshard.core"
local full = os.getenv "MOONSHARD_TEST_FULL" == "1"
local folder
before_each(function() folder = command.folder() end)
after_each(function() command.remove(folder) end)

local function run(ranks, arguments)
  local out = command.succeed(folder,
    ("run '%s/tests/dist/fsdp_checkpoint.lua' -n %d folder='%s' %s"):format(command.source, ranks,
      folder, arguments))
  for rank = 0, ranks - 1 do
    assert.truthy(out:find(("rank %d is done"):format(rank), 1, true), out)
  end
  return out
end

local function manifest_of(path)
  return command.read(path .. "/manifest.json")
end

-- Writes a manifest with another text, and the hash of that text.
local function rewrite(path, change)
  local body = manifest_of(path):match '^{"hash":"%x+","manifest":(.*)}\n$'
  local tree = assert(core.json_decode(body))
  change(tree)
  body = core.json_encode(tree)
  command.write(path .. "/manifest.json",
    ('{"hash":"%016x","manifest":%s}\n'):format(core.hash(body), body))
end

describe("fsdp's checkpoints", function()
  it("load at any number of ranks and strategy, and continue bit for bit", function()
    for ranks = 1, 4 do run(ranks, "do=save") end
    if full then
      for ranks = 1, 4 do run(ranks, "do=load from=1234 all=true") end
    else
      for _, ranks in ipairs { 1, 2, 4 } do run(ranks, "do=load from=124") end
      run(3, "do=load from=3")
    end
    run(2, "do=load from=4 --thread-ranks")
  end)

  local function residuals(ranks, arguments)
    local out = command.succeed(folder, ("run '%s/tests/dist/fsdp_residuals.lua' -n %d \z
      folder='%s' %s"):format(command.source, ranks, folder, arguments))
    assert.equal(ranks, select(2, out:gsub("is done", "")), out)
  end

  it("keep what lossy links have on each rank, and its mean on other ranks", function()
    residuals(4, "")
    for _, ranks in ipairs(full and { 4, 2, 3, 1 } or { 4, 3, 1 }) do
      residuals(ranks, "saved=4")
    end
  end)

  -- cases: arguments, ranks that save, and what loads
  local function each(cases)
    for _, case in ipairs(cases) do
      local how = "--thread-ranks " .. case[1]
      residuals(case[2], how)
      for _, other in ipairs(case[3]) do
        residuals(other[1], ("%s saved=%d %s"):format(how, case[2], other[2] or ""))
      end
      os.execute(("rm -rf '%s/run'"):format(folder))
    end
  end

  it("keep the total of what lossy links have, where results are sums", function()
    each {
      { "op=sum", 2, full and { { 1 }, { 2 }, { 3 } } or { { 1 }, { 3 } } },
      { "op=sum", 1, { { 3 } } },
      { "op=sum in_lua=true ddp=true", 2, { { 3 } } },
      { "op=sum in_lua=true ddp=true", 1, { { 2 } } }, { "divide=8", 2, { { 3 } } },
      -- The number of ranks that load it.
      { "divide=4", 2, { { 4 } } },
    }
  end)

  -- Of a link in Lua it is not known yet where it runs: it goes on where ranks have the same.
  it("cut anew what lossy links between reductions have of each shard", function()
    each {
      { "within=2", 4, { { 4, "layout=flat" }, { 6, "within=3" }, full and { 4 } or nil } },
      { "within=2 op=sum", 4, { { 6, "within=3" }, full and { 6 } or nil } },
      { "within=2 divide=8", 4, { { 6 } } }, { "within=2 in_lua=true", 4, { { 4 } } },
    }
  end)

  it("are read by each rank as far as it has them", function()
    local function reads(ranks, arguments)
      local out = command.succeed(folder, ("run '%s/tests/dist/fsdp_reads.lua' -n %d \z
        folder='%s' %s"):format(command.source, ranks, folder, arguments))
      assert.equal(ranks, select(2, out:gsub("is done", "")), out)
    end
    reads(4, "do=save")
    reads(2, "do=load")
    reads(4, "do=load strategy=hybrid_shard")
    if not full then return end
    reads(2, "do=save")
    reads(4, "do=load")
  end)

  it("are not committed where one rank cannot write", function()
    for ranks = 2, 3 do run(ranks, "do=refused") end
  end)

  it("that are damaged give one error that names file and tensor, on every rank", function()
    run(2, "do=save --thread-ranks")
    -- Of each kind of damage a copy of the checkpoint, and parts of the error. One job tries all.
    local path, copy, copies, expected = folder .. "/full-2/step-00000003", nil, {}, {}
    local function damaged(change, ...)
      copy = ("%s/copy%d"):format(folder, #copies + 1)
      os.execute(("cp -r '%s' '%s'"):format(path, copy))
      change()
      copies[#copies + 1], expected[#expected + 1] = copy, { ... }
    end
    local name = "model/embed"
    local function parts_of(tree) return tree.pieces[name].parts end
    assert.equal(2, #parts_of(core.json_decode(manifest_of(path):match '"manifest":(.*)}\n$')))
    damaged(function()
      rewrite(copy, function(tree) table.remove(parts_of(tree), 1) end)
    end, name, "rank-00001.safetensors", "elements 0 to ", "missing")
    damaged(function()
      rewrite(copy, function(tree) table.remove(parts_of(tree), 2) end)
    end, name, "rank-00000.safetensors", "to 77 are missing")
    damaged(function()
      rewrite(copy, function(tree) parts_of(tree)[2].first = 0 end)
    end, name, "is in 'rank-0000", "too")
    -- The manifest is right, and the file has no such piece.
    damaged(function()
      local file = copy .. "/rank-00001.safetensors"
      command.write(file, (command.read(file):gsub('"model/embed"', '"model/other"', 1)))
    end, "rank-00001.safetensors", "'model/embed' is missing")
    damaged(function() os.remove(copy .. "/rank-00001.safetensors") end, "rank-00001.safetensors",
      "this file is not", "it has pieces of 'model/")
    -- A flipped bit that one rank reads is an error on all.
    damaged(function()
      local file = copy .. "/rank-00001.safetensors"
      local text = command.read(file)
      command.write(file, text:sub(1, -9) .. string.char(text:byte(-8) ~ 1) .. text:sub(-7))
    end, "rank-00001.safetensors", "are not those that were saved")
    damaged(function()
      rewrite(copy, function(tree) parts_of(tree)[1].file = "../x.safetensors" end)
    end, "manifest.json", "a field is missing or of another kind")
    local out = run(2, ("do=damaged from='%s'"):format(table.concat(copies, ",")))
    for i, parts in ipairs(expected) do
      for rank = 0, 1 do
        local line = out:match(("rank %d, copy%d: corrupt: ([^\n]*)"):format(rank, i))
        assert.is_truthy(line, out)
        for _, part in ipairs(parts) do assert.truthy(line:find(part, 1, true), line) end
      end
    end
  end)
end)
