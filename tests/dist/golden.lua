-- Run by every rank of ddp_spec.lua's golden cases: the cases of the folder for this number of
-- ranks.
local ms = require "moonshard"
local folder = ms.config { folder = "" }.folder
local failures = require "moonshard.cli.test".golden(folder)
if failures > 0 then error(("rank %d: %d failures"):format(ms.rank(), failures), 0) end
io.stdout:write(("rank %d agrees\n"):format(ms.rank()))
