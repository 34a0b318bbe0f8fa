/* runtime.h: the runtime of one Lua state. */
#ifndef MOONSHARD_BINDINGS_RUNTIME_H
#define MOONSHARD_BINDINGS_RUNTIME_H

#include "bindings/state.h"

/* Pushes a new runtime without an engine. module.c makes one for each Lua state. */
ms_runtime *ms_lua_new_runtime(lua_State *L);
/* Registers functions with the runtime as their upvalue in the table on top. */
void ms_lua_register(lua_State *L, int runtime, const luaL_Reg *functions);
/* Makes a metatable with locked __metatable, methods under __index, and the runtime as upvalue;
 * leaves the methods table on the stack. */
void ms_lua_type(lua_State *L, int runtime, const char *name, const luaL_Reg *metamethods,
                 const luaL_Reg *methods);

#endif
