-- Run by run.sh: the last rank is killed in the middle of a training, and the others must leave.
-- With the argument "graph" its steps are graphs by then.
local graph = ... == "graph"
local ms = require "moonshard"
ms.init {}
local model = ms.ddp(ms.nn.Linear(64, 64))
local optimizer = ms.optim.sgd(model, { lr = 1e-3 })
for step in ms.steps(1000000, 0, { graph = graph }) do
  model(ms.ones { 8, 64 }):sum():backward()
  optimizer:step()
  optimizer:zero_grad()
  if step == (graph and 20 or 5) and ms.rank() == 1 then
    ms.synchronize()
    os.execute "kill -KILL $PPID"
  end
end
