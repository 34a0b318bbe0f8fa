-- Files of JSON lines as data: which records come when, on how many ranks, what is refused, and
-- training with targets that do not count.
local ms = require "moonshard"
local core = require "moonshard.core"
local command = require "command"

describe("ms.data.jsonl", function()
  local folder
  before_each(function() folder = command.folder() end)
  after_each(function() command.remove(folder) end)

  local function put(name, text) return command.write(folder .. "/" .. name, text) end

  -- A file of records { id = first } to { id = last }.
  local function numbered(name, first, last)
    local parts = {}
    for id = first, last do parts[#parts + 1] = ('{"id": %d}\n'):format(id) end
    return put(name, table.concat(parts))
  end

  -- Loaders whose batches are lists of ids.
  local function ids_of(records)
    local list = {}
    for i, record in ipairs(records) do list[i] = record.id end
    return list
  end

  local function loader(set, options)
    options.make = options.make or ids_of
    return set:loader(options)
  end

  local function refused(code, message, none, given, kind)
    assert.is_nil(none)
    assert.matches(message, given, 1, true)
    assert.equal(code, kind)
  end

  it("has the lines that are not blank, of all files in their order", function()
    local first = put("a.jsonl", '\xef\xbb\xbf{"id": 1}\r\n\n  \t\n {"id": 2}\n')
    local empty = put("empty.jsonl", "\n\n")
    local last = put("b.jsonl", '\n[3]\n{"id": 4, "text": "two\\nlines", "no": null}')
    local set = assert(ms.data.jsonl { first, empty, last })
    assert.equal(4, set:size())
    assert.equal(1, assert(set:get(1)).id)
    assert.equal(2, assert(set:get(2)).id)
    assert.same({ 3 }, { assert(set:get(3))[1] })
    assert.equal("two\nlines", assert(set:get(4)).text)
    assert.equal(core.json_null, set:get(4).no)
    assert.equal(4, assert(ms.data.jsonl(last)):get(2).id)
    assert.equal(0, assert(ms.data.jsonl(empty)):size())
    assert.error_matches(function() set:get(5) end, "there is no record 5: the data set has 4")
    assert.error_matches(function() set:get(0) end, "there is no record 0")
  end)

  it("finds each line of long files, wherever a part that is read ends", function()
    local parts, texts = {}, {}
    for i = 1, 5000 do
      texts[i] = ("é"):rep(i * 7919 % 600)
      parts[i] = ('{"id": %d, "text": "%s"}\n'):format(i, texts[i]) .. ("\n"):rep(i % 3)
    end
    parts[2500] = parts[2500] .. (" "):rep(3000000) .. "\n"
    texts[2501] = ("x"):rep(3000000)
    parts[2501] = ('{"id": 2501, "text": "%s"}\n'):format(texts[2501])
    local set = assert(ms.data.jsonl(put("long.jsonl", table.concat(parts))))
    assert.equal(5000, set:size())
    for i = 1, 5000 do
      local record = assert(set:get(i))
      assert.is_true(record.id == i and record.text == texts[i])
    end
  end)

  it("keeps eight bytes for each line in memory, and no text", function()
    local count = 200000
    local path = put("many.jsonl", ('{"text": "some words of a record"}\n'):rep(count))
    collectgarbage()
    collectgarbage()
    local before = collectgarbage "count"
    local set = assert(ms.data.jsonl(path))
    collectgarbage()
    collectgarbage()
    local bytes = (collectgarbage "count" - before) * 1024
    assert.equal(count, set:size())
    -- The strings of 1024 offsets, and what the collector counts for each of them.
    assert.is_true(bytes >= 8 * count and bytes < 8.5 * count + 20000, bytes)
    assert.equal("some words of a record", set:get(count).text)
  end)

  it("names file and line of what is no record, when it is read", function()
    local path = put("bad.jsonl", '{"id": 1}\n\n{"id": 2\n7\n{"id": 4}\n')
    local set = assert(ms.data.jsonl { numbered("good.jsonl", 1, 3), path })
    assert.equal(7, set:size())
    refused("corrupt", ("'%s', line 3: it is no JSON: column 8: "):format(path), set:get(5))
    refused("corrupt", ("'%s', line 4: it is neither an object nor a list"):format(path),
      set:get(6))
    local one = loader(set, { batch = 2 })
    one:next()
    one:next()
    local before = one:state()
    assert.error_matches(function() one:next() end, "bad.jsonl', line 3: it is no JSON")
    assert.same(before, one:state())
  end)

  it("refuses what it cannot read, and files that change", function()
    refused("not_found", ("there is no file '%s/none'"):format(folder),
      ms.data.jsonl(folder .. "/none"))
    refused("mismatch", "is a folder: name the files in it", ms.data.jsonl(folder))
    assert.error_matches(function() ms.data.jsonl {} end, "path is an empty list")
    assert.error_matches(function() ms.data.jsonl(7) end, "path must be a string or a list")
    local path = numbered("a.jsonl", 1, 9)
    local set = assert(ms.data.jsonl(path))
    numbered("a.jsonl", 1, 10)
    refused("mismatch", ("'%s' has changed since its lines were counted"):format(path), set:get(1))
    set = assert(ms.data.jsonl(path))
    assert(os.execute(("touch -d '2001-02-03' '%s'"):format(path)))
    refused("mismatch", "has changed since its lines were counted", set:get(1))
    local one = loader(assert(ms.data.jsonl(path)), { batch = 1 })
    os.remove(path)
    assert.error_matches(function() one:next() end, "there is no file '")
  end)

  it("gives every record once an epoch, in the order that a loader of images has", function()
    local count = 61
    local labels = {}
    for i = 1, count do labels[i] = string.char(i) end
    put("train-images-idx3-ubyte", "\0\0\8\3" .. (">I4I4I4"):pack(count, 1, 1) .. ("x"):rep(count))
    put("train-labels-idx1-ubyte", "\0\0\8\1" .. (">I4"):pack(count) .. table.concat(labels))
    local images = assert(ms.data.mnist(folder))
    local set = assert(ms.data.jsonl(numbered("a.jsonl", 1, count)))
    for _, seed in ipairs { 0, 7, -3, math.maxinteger } do
      local how = { batch = 10, shuffle = true, seed = seed }
      local known, one = images:loader(how), loader(set, how)
      local seen = {}
      for batch = 1, 61 do
        local ids = one:next()
        local _, y = known:next()
        assert.same(y:to_table(), ids)
        for _, id in ipairs(ids) do seen[id] = (seen[id] or 0) + 1 end
        if batch == 30 then
          local state = known:state()
          state.records = one:state().records
          assert.same(state, one:state())
        end
      end
      for id = 1, count do assert.equal(10, seen[id]) end
      local passed, other = {}, {}
      for ids in one:batches() do table.move(ids, 1, #ids, #passed + 1, passed) end
      for _, y in known:batches() do
        local list = y:to_table()
        table.move(list, 1, #list, #other + 1, other)
      end
      assert.same(other, passed)
      assert.equal(count, #passed)
    end
  end)

  it("takes the engine's seed unless another is given", function()
    local set = assert(ms.data.jsonl(numbered("a.jsonl", 1, 40)))
    local function first(seed)
      return loader(set, { batch = 40, shuffle = true, seed = seed }):next()
    end
    ms.seed(12)
    assert.same(first(12), first())
    ms.seed(13)
    assert.same(first(13), first())
    assert.not_same(first(12), first())
  end)

  it("has the order of the file without shuffle, and passes that leave next alone", function()
    local set = assert(ms.data.jsonl(numbered("a.jsonl", 1, 5)))
    local one = loader(set, { batch = 2 })
    assert.same({ 1, 2 }, one:next())
    local all = {}
    for ids in one:batches() do all[#all + 1] = ids end
    assert.same({ { 1, 2 }, { 3, 4 }, { 5 } }, all)
    all = {}
    for ids in one:batches(1) do all[#all + 1] = ids end
    assert.same({ { 1, 2 } }, all)
    assert.same({ { 3, 4 }, { 5, 1 }, { 2, 3 } }, { one:next(), one:next(), one:next() })
    local function both(_, places) return places, "more", nil end
    local x, y, z = loader(set, { batch = 3, make = both }):next()
    assert.same({ { 1, 2, 3 }, "more" }, { x, y, z })
  end)

  it("splits as other data sets do, and notes its files", function()
    local set = assert(ms.data.jsonl(numbered("a.jsonl", 1, 100)))
    local first, rest = set:split(0.29)
    assert.same({ 29, 71 }, { first:size(), rest:size() })
    assert.same({ 1, 30, 100 }, { first:get(1).id, rest:get(1).id, rest:get(71).id })
    local _, last = rest:split(0.5)
    assert.same({ 36, 65 }, { last:size(), last:get(1).id })
    assert.error_matches(function() rest:get(72) end, "there is no record 72")
    assert.error_matches(function() set:split(1.5) end, "fraction 1.5")
    assert.error_matches(function() set:split(0 / 0) end, "fraction")
    local none = set:split(0)
    assert.error_matches(function() loader(none, { batch = 1 }) end, "the data set is empty")
  end)

  it("continues from its state, and refuses that of other data", function()
    local path = numbered("a.jsonl", 1, 20)
    local set = assert(ms.data.jsonl(path))
    local how = { batch = 3, shuffle = true, seed = 5 }
    local one = loader(set, how)
    for _ = 1, 9 do one:next() end
    local state = core.json_decode(core.json_encode(one:state()))
    local expected = {}
    for i = 1, 20 do expected[i] = one:next() end
    local again = loader(assert(ms.data.jsonl(path)), { batch = 3, shuffle = true, seed = 99 })
    again:load_state(state)
    for i = 1, 20 do assert.same(expected[i], again:next()) end
    -- The same file elsewhere is the same data.
    local moved = loader(assert(ms.data.jsonl(numbered("b.jsonl", 1, 20))), how)
    moved:load_state(state)
    assert.same(expected[1], moved:next())
    local half = set:split(0.5)
    local _, rest = set:split(0.5)
    for _, other in ipairs { half, assert(ms.data.jsonl(numbered("c.jsonl", 5, 24))),
      assert(ms.data.jsonl { path, path }) } do
      local it = loader(other, how)
      local before = it:state()
      assert.error_matches(function() it:load_state(state) end,
        "the state is of other data: of 20 records")
      assert.same(before, it:state())
    end
    assert.error_matches(function() loader(rest, how):load_state(loader(half, how):state()) end,
      "the state is of other data: of 10 records, and here are 10")
    state.position = 20
    assert.error_matches(function() loader(set, how):load_state(state) end, "state is damaged")
  end)

  it("says what is wrong with options", function()
    local set = assert(ms.data.jsonl(numbered("a.jsonl", 1, 4)))
    local function fails(options, message)
      assert.error_matches(function() set:loader(options) end, message, 1, true)
    end
    fails({ batch = 2 }, "give make, a function(records)")
    fails({ make = ids_of }, "give a batch")
    fails({ batch = 0, make = ids_of }, "a batch of 0")
    fails({ batch = 2, make = ids_of, length = 3 }, "unknown option 'length'")
    fails({ batch = 2, make = 7 }, "option make must be a function")
    fails({ batch = 2, make = ids_of, group = {} }, "must be a group of ranks")
    assert.error_matches(function() set.size(7) end, "a method of a data set of JSON lines")
    assert.error_matches(function() return set.length end, "has no 'length'")
    assert.error_matches(function() return loader(set, { batch = 1 }).nxt end,
      "did you mean 'next'")
  end)

  it("gives ranks their parts, and goes on from 2 ranks to 1 and 4", function()
    numbered("a.jsonl", 1, 10)
    put("r.lua", [[
local ms = require "moonshard"
local core = require "moonshard.core"
local cfg = ms.config { steps = 1, from = "", to = "", batch = 4 }
local set = assert(ms.data.jsonl "a.jsonl")
local loader = set:loader { batch = cfg.batch, shuffle = true, seed = 3, make = function(records)
  local list = {}
  for i, record in ipairs(records) do list[i] = record.id end
  return table.concat(list, " ")
end }
if cfg.from ~= "" then loader:load_state(core.json_decode(assert(core.file_read(cfg.from)))) end
for i = 1, cfg.steps do print(("step %d of %d: %s"):format(i, ms.rank(), loader:next())) end
local count = 0
for ids in loader:batches() do
  count = count + 1
  print(("pass %d of %d: %s"):format(count, ms.rank(), ids))
end
if cfg.to ~= "" and ms.rank() == 0 then
  assert(core.file_write(cfg.to, core.json_encode(loader:state())))
end
]])
    -- The records of each batch, those of rank 0 first.
    local function run(kind, ranks, arguments)
      local out = command.succeed(folder, ("run r.lua -n %d %s"):format(ranks, arguments))
      local batches = {}
      for step, rank, ids in out:gmatch(kind .. " (%d+) of (%d+): ([%d ]*)") do
        step = math.tointeger(step)
        batches[step] = batches[step] or {}
        batches[step][rank + 1] = ids
      end
      for i, parts in ipairs(batches) do
        assert.equal(ranks, #parts)
        batches[i] = table.concat(parts, " ")
      end
      return batches, out
    end
    local whole, out = run("step", 1, "steps=10")
    local some = run("step", 2, "steps=3 to=one.json")
    for _, part in ipairs { { 1, "steps=2 from=one.json to=two.json" },
      { 4, "steps=5 from=two.json" } } do
      local more = run("step", part[1], part[2])
      table.move(more, 1, #more, #some + 1, some)
    end
    assert.same(whole, some)
    local seen = {}
    for id in table.concat(whole, " "):gmatch "%d+" do seen[id] = (seen[id] or 0) + 1 end
    for id = 1, 10 do assert.equal(4, seen[tostring(id)]) end
    -- A pass: the last batch has 2 records, one for each of 2 ranks, and none for 4.
    local passed = {}
    for ids in out:gmatch "pass %d+ of 0: ([%d ]*)" do passed[#passed + 1] = ids end
    assert.equal(3, #passed)
    assert.same(passed, (run("pass", 2, "steps=0")))
    assert.same({ passed[1], passed[2] }, (run("pass", 4, "steps=0")))
    local code, _, err = command.run(folder, "run r.lua -n 2 batch=5")
    assert.not_equal(0, code)
    assert.matches("a batch of 5 does not divide by 2 ranks", err, 1, true)
  end)
end)

describe("training on JSON lines", function()
  local folder
  before_each(function()
    folder = command.folder()
    local parts = {}
    for i = 1, 16 do
      local ids = {}
      for k = 1, 2 + i % 5 do ids[k] = (i * 5 + k * k) % 8 end
      parts[i] = core.json_encode { ids = ids, cut = i % 4 } .. "\n"
    end
    command.write(folder .. "/talk.jsonl", table.concat(parts))
    command.write(folder .. "/t.lua", [[
local ms = require "moonshard"
local cfg = ms.config { steps = 6, batch = 4, accumulate = 1, valid = "", run = "out",
  resume = "never" }
local train, valid = assert(ms.data.jsonl "talk.jsonl"):split(0.75)
if cfg.valid ~= "" then valid = assert(ms.data.jsonl(cfg.valid)) end
local LENGTH = 6
local function make(records)
  local x, y = {}, {}
  for i, record in ipairs(records) do
    x[i], y[i] = {}, {}
    for k = 1, LENGTH do
      x[i][k] = record.ids[k] or 0
      y[i][k] = k > record.cut and record.ids[k + 1] or -100
    end
  end
  return ms.tensor(x), ms.tensor(y)
end
ms.seed(1)
local net = ms.nn.Sequential(ms.nn.Embedding(8, 8), ms.nn.Linear(8, 8))
local model = ms.ddp(net)
local result = ms.train {
  model = model, optimizer = ms.optim.adamw(model, { lr = 0.05 }), steps = cfg.steps,
  data = train:loader { batch = cfg.batch, shuffle = true, seed = 2, make = make },
  valid = valid:loader { batch = 2, make = make }, eval = { every = cfg.steps },
  accumulate = cfg.accumulate, run = cfg.run, resume = cfg.resume, save = { every = cfg.steps },
}
local sum, count = 0, 0
for i = 1, valid:size() do
  local x, y = make { valid:get(i) }
  local counted = y:ne(-100):sum():item()
  if counted > 0 then
    sum, count = sum + net(x):cross_entropy(y):item() * counted, count + counted
  end
end
print(("rank %d weights %.5f valid %.5f"):format(ms.rank(),
  net:parameters()[1]:detach():sum():item(), result.valid.loss))
assert(math.abs(result.valid.loss - sum / count) < 1e-5)
]])
  end)
  after_each(function() command.remove(folder) end)

  -- What rank 0 ends with, and the losses of the steps.
  local function run(arguments)
    local out = command.succeed(folder, "run t.lua " .. arguments)
    return out:match "rank 0 (weights [^\n]*)", out
  end

  -- The mean is over all targets that count, however they are divided into ranks and passes: only
  -- the order of sums differs.
  it("gives the same weights and validation on 1 and 2 ranks and in 2 passes", function()
    local one = run "-n 1 run=one"
    assert.equal(one, (run "-n 2 run=two"))
    assert.equal(one, (run "-n 2 --thread-ranks run=threads"))
    assert.equal(one, (run "-n 1 batch=2 accumulate=2 run=passes"))
    assert.equal(one, (run "-n 2 batch=2 accumulate=2 run=both"))
  end)

  it("continues a run of 2 ranks on 1, at its place in the data", function()
    local whole = run "-n 1 steps=6 run=whole"
    run "-n 2 steps=3"
    local resumed, out = run "-n 1 steps=6 resume=auto"
    assert.matches("resumed from out/step%-00000003", out)
    assert.equal(whole, resumed)
    -- Other lines are refused.
    local path = folder .. "/talk.jsonl"
    command.write(path, command.read(path):gsub("^[^\n]*\n", ""))
    local code, _, err = command.run(folder, "run t.lua steps=9 resume=auto")
    assert.equal(3, code)
    assert.matches("the state is of other data: of 12 records, and here are 11", err, 1, true)
  end)

  it("refuses validation on the file that is trained on, and too few records", function()
    local code, _, err = command.run(folder, "run t.lua valid=./talk.jsonl")
    assert.not_equal(0, code)
    assert.matches("data and valid both read 'talk.jsonl'", err, 1, true)
    command.write(folder .. "/one.jsonl", '{"ids": [1, 2], "cut": 0}\n')
    code, _, err = command.run(folder, "run t.lua -n 2 valid=one.jsonl")
    assert.not_equal(0, code)
    assert.matches("train: valid: loader: 1 records for 2 ranks", err, 1, true)
  end)
end)
