-- What luacheck checks our Lua against.
std = "lua54"
max_line_length = 100
cache = false
-- "not (x >= 0)" is how a NaN is refused as well.
ignore = { "581" }
exclude_files = { "build" }
-- A method that has no use for `self`, or a callback for one of its arguments, is written out all
-- the same.
self = false
unused_args = false
files["tests/**/*_spec.lua"] = { std = "+busted" }
files["tests/spec"] = { std = "+busted" }
-- Annotations: nothing runs, and a type stands on one line, however long it is.
files["lua/moonshard/meta.lua"] = { ignore = { "221", "631" } }
files["lua/moonshard/meta"] = { ignore = { "221", "631" } }
-- Lmod's functions, which a module file calls.
files["recipes/launch/modulefile.lua"] = {
  read_globals = { "help", "whatis", "prepend_path", "pushenv", "depends_on" },
}
