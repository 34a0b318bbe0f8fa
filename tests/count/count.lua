-- For a stock interpreter with count.c, as LUA_INIT: counts the assertions of luassert, which
-- busted puts in the place of assert, and the checks of tests/spec/support.lua.
local count = package.loadlib(os.getenv "LD_PRELOAD" or "", "ms_count_of_lua")
local found, luassert = pcall(require, "luassert.assert")
if not count or not found then return end

-- Assertions by name: called by luassert, which the test has called.
local register = luassert.register
function luassert.register(self, kind, name, callback, ...)
  local own = callback
  if kind == "assertion" then
    function own(...)
      count(3)
      return callback(...)
    end
  end
  return register(self, kind, name, own, ...)
end

-- assert(value) itself
local meta = getmetatable(luassert)
local plain = meta.__call
function meta.__call(...)
  count(2)
  return plain(...)
end

package.preload.support = function(...)
  local support = assert(loadfile(assert(package.searchpath("support", package.path))))(...)
  for _, name in ipairs { "near", "fails" } do
    local check = support[name]
    support[name] = function(...)
      count(2)
      return check(...)
    end
  end
  return support
end
