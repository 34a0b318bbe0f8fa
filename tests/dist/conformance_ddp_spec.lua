-- PyTorch's own tests of its data-parallel reducer: one spec for each, named after its file and
-- test. conformance_ddp.lua has the cases; cases that end the job are here. Not covered: sparse
-- gradients, SyncBatchNorm, device placement, profilers, several joined objects at once.
local command = require "command"
local conformance = require "conformance"

local folder
before_each(function() folder = command.folder() end)
after_each(function() command.remove(folder) end)

describe("PyTorch's", function()
  conformance.each("tests/dist/conformance_ddp.lua", { { 2, " --thread-ranks" }, { 3, "" } }, 60)
end)

-- Runs a script on 3 ranks as threads; returns all its output. The job must fail.
local function told(text, ...)
  local script = command.write(folder .. "/script.lua",
    'local ms = require "moonshard"\nlocal rank = ms.rank()\n' .. text)
  local code, out, err = command.run(folder, ("run '%s' -n 3 --thread-ranks"):format(script))
  assert.not_equal(0, code)
  for _, part in ipairs { ... } do assert.truthy((out .. err):find(part, 1, true), out .. err) end
end

describe("a job ends, and says why, as in PyTorch's", function()
  it("test_c10d_gloo.py: test_ddp_invalid_comm_hook_return_type", function()
    told('local m = ms.ddp(ms.nn.Linear(2, 2), { comm_hook = function() return 1 end })\n\z
      m(ms.ones { 1, 2 }):sum():backward()', "returned a number", 'bucket 0 "weight"')
  end)
  it("distributed_test.py: test_ddp_uneven_input_exception", function()
    told([[
      local m = ms.ddp(ms.nn.Linear(2, 2))
      m:join({}, function()
        for i = 1, 3 do
          if rank == 2 then error "Rank 2 exception" end
          m(ms.ones { 1, 2 }):sum():backward()
        end
      end)]], "Rank 2 exception")
  end)
  it("distributed_test.py: test_ddp_model_diff_shape_across_ranks", function()
    told("ms.ddp(ms.nn.Linear(2, 2 + rank))", "ranks have different models", "on rank 1")
  end)
  it("distributed_test.py: test_ddp_model_diff_num_params_across_ranks", function()
    told("ms.ddp(ms.nn.Linear(2, 2, { bias = rank == 0 }))", "ranks have different models",
      "on rank 0")
  end)
  it("distributed_test.py: test_ddp_multiple_nested_unused_params_error", function()
    told([[
      local Net = ms.nn.class "Net"
      function Net:init()
        self.a, self.b = ms.nn.Linear(2, 2), ms.nn.List { ms.nn.Linear(2, 2), ms.nn.Linear(2, 2) }
      end
      function Net:forward(x) return self.a(x) end
      local m = ms.ddp(Net())
      for i = 1, 2 do m(ms.ones { 1, 2 }):sum():backward() end]],
      "'b.0.weight', 'b.0.bias', 'b.1.weight'", "find_unused")
  end)
  it("distributed_test.py: test_ddp_static_graph (the graph changes)", function()
    told([[
      local Net = ms.nn.class "Net"
      function Net:init() self.a, self.b = ms.nn.Linear(2, 2), ms.nn.Linear(2, 2) end
      function Net:forward(x, both) return both and self.b(self.a(x)) or self.a(x) end
      local m = ms.ddp(Net(), { static_graph = true })
      for i = 1, 2 do m(ms.ones { 1, 2 }, i == 2):sum():backward() end]],
      "the graph changed", "'b.")
  end)
end)
