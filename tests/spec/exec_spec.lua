-- Streams as scripts see them: the host runs ahead of the work, streams run in parallel, and
-- recorded times show both.
local ms = require "moonshard"
local core = require "moonshard.core"
local support = require "support"
local recorded, eventually = support.recorded, support.eventually

describe("streams", function()
  it("get work long before it runs", function()
    local a, big = ms.randn { 64, 64 }, ms.randn { 1024, 1024 }
    eventually(function()
      local list = recorded(function()
        big:matmul(big)
        for _ = 1, 20 do a:matmul(a) end
      end)
      assert.equal(21, #list)
      for i = 1, 21 do
        assert.is_true(list[i].enqueued_ns <= list[i].start_ns
          and list[i].start_ns <= list[i].end_ns)
      end
      for i = 2, 21 do assert.is_true(list[i].start_ns >= list[i - 1].end_ns) end
      -- The last product was enqueued before the first one was done: the host did not wait for any.
      return list[21].enqueued_ns < list[1].end_ns
    end)
  end)

  it("run side by side when their work is independent", function()
    local a, b = ms.randn { 700, 700 }, ms.randn { 700, 700 }
    local side = ms.stream "side"
    eventually(function()
      local list = recorded(function()
        for _ = 1, 10 do
          a:matmul(a)
          side:run(function() b:matmul(b) end)
        end
      end)
      local first, last = {}, {}
      for _, record in ipairs(list) do
        first[record.stream] = first[record.stream] or record.start_ns
        last[record.stream] = record.end_ns
      end
      return first.side < last.compute and first.compute < last.side
    end)
  end)

  it("wait by themselves where one uses what another makes", function()
    local side = ms.stream "side"
    local a = ms.ones { 300, 300 }
    for _ = 1, 20 do
      local b = a:matmul(a)                                  -- compute
      local c = side:run(function() return b:add(1) end)     -- side, after it
      local d = c:sum()                                      -- compute, after side
      assert.equal(300 * 300 * 301, d:item())
    end
  end)

  it("report what failed on them with the line that enqueued it, once", function()
    local weight = ms.randn { 4, 2 }
    local ids = ms.tensor { 1, 9 }
    local ok, message = pcall(function()
      local rows = ids:embedding(weight)
      return rows:sum():item()
    end)
    assert.is_false(ok)
    assert.matches("id at position 1 is 9", message, 1, true)
    assert.matches("exec_spec.lua:%d+", message)
    assert.equal(8, ms.ones { 8 }:sum():item())
  end)

  it("write traces that other tools read", function()
    local path = os.tmpname()
    assert(ms.trace.start(path))
    ms.trace.range("products", function() ms.ones { 64, 64 }:matmul(ms.ones { 64, 64 }) end)
    assert(ms.trace.stop())
    local file = assert(io.open(path))
    local events = core.json_decode(file:read "a")
    file:close()
    os.remove(path)
    local names, threads = {}, {}
    for _, event in ipairs(events) do
      names[event.name] = event
      if event.name == "thread_name" then threads[event.tid] = event.args.name end
      if event.ph == "X" then assert.is_true(event.dur >= 0 and event.pid == 0) end
    end
    assert.equal("compute", names.matmul.args.kind)
    assert.equal("compute", threads[names.matmul.tid])
    assert.is_true(names.products.dur >= names.matmul.dur)
  end)
end)
