-- A module file for Lmod: copied to moonshard/0.1.0.lua in a folder of MODULEPATH,
-- `module load moonshard` finds the program, the library for Lua 5.4 and for C.
help [[Moonshard: distributed training without Python. `moonshard --help` lists the commands.]]
whatis "Name: moonshard"
whatis "Description: an embeddable engine for distributed training, with recipes in Lua"

-- The prefix of `cmake --install build/release --prefix PREFIX`.
local prefix = "/opt/moonshard"

-- The MPI whose module the program is to take; `moonshard info` lists those that it has.
-- depends_on "openmpi"

prepend_path("PATH", prefix .. "/bin")
prepend_path("PKG_CONFIG_PATH", prefix .. "/lib/pkgconfig")
prepend_path("CMAKE_PREFIX_PATH", prefix)
-- Two semicolons at the end represent the interpreter's own paths.
local lua = prefix .. "/share/lua/5.4/?"
pushenv("LUA_PATH", ("%s.lua;%s/init.lua;%s"):format(lua, lua, os.getenv "LUA_PATH" or ";"))
pushenv("LUA_CPATH", prefix .. "/lib/lua/5.4/?.so;" .. (os.getenv "LUA_CPATH" or ";"))
