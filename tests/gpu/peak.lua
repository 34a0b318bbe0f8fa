-- Run by run.sh: a recipe, and at its end the peak of tensor memory.
dofile(os.getenv "RECIPE")
local ms = require "moonshard"
io.stdout:write(("peak of rank %d: %d bytes\n"):format(ms.rank(), ms.memory().peak))
