-- Run by run.sh: the last rank is killed in the middle of a training, and the others must leave.
local ms = require "moonshard"
ms.init {}
local model = ms.ddp(ms.nn.Linear(64, 64))
local optimizer = ms.optim.sgd(model, { lr = 1e-3 })
for step in ms.steps(1000000) do
  model(ms.ones { 8, 64 }):sum():backward()
  optimizer:step()
  optimizer:zero_grad()
  if step == 5 and ms.rank() == 1 then
    ms.synchronize()
    os.execute "kill -KILL $PPID"
  end
end
