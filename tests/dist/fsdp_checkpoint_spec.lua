-- Checkpoints of sharded models: each rank writes its pieces, and any ranks load them under any
-- strategy. fsdp_checkpoint.lua holds what each rank does.
local command = require "command"
local core = require "moonshard.core"
local full = os.getenv "MOONSHARD_TEST_FULL" == "1"
local folder
before_each(function() folder = command.folder() end)
after_each(function() command.remove(folder) end)

local function run(ranks, arguments)
  return command.on_ranks("fsdp_checkpoint", tostring(ranks),
    ("folder='%s' %s"):format(folder, arguments))
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

  -- Each job takes several cases, among them those that jobs before it have saved. A case says
  -- which run it saves, or by how many ranks the run was saved that it loads.
  local function residuals(ranks, how, cases)
    local out = command.succeed(folder, ("run '%s/tests/dist/fsdp_residuals.lua' -n %d %s \z
      folder='%s' cases='%s'"):format(command.source, ranks, how, folder, table.concat(cases, ";")))
    assert.equal(ranks, select(2, out:gsub("is done", "")), out)
    assert.equal(ranks * #cases, select(2, out:gsub("has taken", "")), out)
  end
  local threads = "--thread-ranks"

  it("keep what lossy links have on each rank, and its mean or total on others", function()
    residuals(4, "", { "run=mean" })
    -- The total, where results are sums.
    residuals(2, threads, {
      "run=sum2 op=sum", "run=lua2 op=sum in_lua=true ddp=true", "run=div8 divide=8",
      "run=div4 divide=4",
    })
    residuals(1, threads, {
      "run=sum1 op=sum", "run=lua1 op=sum in_lua=true ddp=true", "run=sum2 op=sum saved=2",
      "run=mean saved=4",
    })
    residuals(3, "", {
      "run=mean saved=4", "run=sum2 op=sum saved=2", "run=sum1 op=sum saved=1",
      "run=lua2 op=sum in_lua=true ddp=true saved=2", "run=div8 divide=8 saved=2",
    })
    residuals(2, threads, { "run=lua1 op=sum in_lua=true ddp=true saved=1" })
    -- divide=4: the number of ranks that load it.
    residuals(4, "", { "run=mean saved=4", "run=div4 divide=4 saved=2" })
    if full then residuals(2, "", { "run=mean saved=4", "run=sum2 op=sum saved=2" }) end
  end)

  -- Of a link in Lua it is not known yet where it runs: it goes on where ranks have the same.
  it("cut anew what lossy links between reductions have of each shard", function()
    residuals(4, threads, {
      "run=mean within=2", "run=sum within=2 op=sum", "run=div8 within=2 divide=8",
      "run=lua within=2 in_lua=true",
    })
    residuals(4, threads, {
      "run=mean within=2 saved=4 layout=flat", "run=lua within=2 in_lua=true saved=4",
      full and "run=mean within=2 saved=4" or nil,
    })
    residuals(6, threads, {
      "run=mean within=3 saved=4", "run=sum within=3 op=sum saved=4",
      "run=div8 within=2 divide=8 saved=4", full and "run=sum within=2 op=sum saved=4" or nil,
    })
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
    for ranks = full and 2 or 3, 3 do run(ranks, "do=refused") end
  end)

  it("that are damaged give one error that names file and tensor, on every rank", function()
    run(2, "do=save only=full --thread-ranks")
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
