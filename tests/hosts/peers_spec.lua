-- The all-reduces of others that bench/peers measures: each reports each size, and its bytes cross
-- between the hosts.
local core = require "moonshard.core"
local hosts = require "hosts"
local support = require "support"

it("peers.sh measures what each peer sends between the hosts", function()
  local code, text
  local crossing = hosts.crossing({ "hosta", "hostb" }, function()
    code, text = support.shell(("timeout 120 '%s/tests/bench/peers/peers.sh' '%s' 4096 400000x3")
      :format(os.getenv "MOONSHARD_SOURCE", os.getenv "MOONSHARD_BUILD"))
  end)
  assert.equal(0, code, text)
  local seen, moved = {}, 0
  for line in text:gmatch "{[^\n]*}" do
    local row = core.json_decode(line)
    seen[row.peer .. " " .. math.tointeger(row.bytes)] = true
    assert.truthy(row.us_min > 0 and row.us_med >= row.us_min, line)
    moved = moved + row.moved
  end
  local peers = hosts.mpis()
  table.insert(peers, "tcp")
  for _, peer in ipairs(peers) do
    for _, bytes in ipairs { 4096, 400000 } do
      assert.truthy(seen[("%s %d"):format(peer, bytes)], text)
    end
  end
  for _, host in ipairs { "hosta", "hostb" } do
    assert.truthy(crossing[host].sent >= moved and crossing[host].received >= moved,
      ("%d were moved, %d and %d have crossed"):format(moved, crossing[host].sent,
        crossing[host].received))
  end
end)
