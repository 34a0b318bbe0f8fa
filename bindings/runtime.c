/* runtime.c: the runtime of one Lua state, and the types of its objects. */
#include "bindings/runtime.h"

#include <string.h>

#include "bindings/arguments.h"
#include "bindings/handles.h"

/* -------------------------------------------------------- making and closing */

/* Runs when the Lua state closes. Finalizers that Lua calls later see `closed` and leave the engine
 * alone; it has freed what was theirs. Finalizers that ran before it (handles, reducers) have left
 * their tensors in the list of dropped ones. */
static int runtime_gc(lua_State *L)
{
    ms_runtime *runtime = lua_touserdata(L, 1);
    if (runtime->closed) return 0;
    runtime->closed = true;
    ms_handles_release_dropped(runtime, 0, 0, UINT64_MAX);
    ms_engine_free(runtime->engine);
    runtime->engine = NULL;
    runtime->context.activity = NULL;
    if (runtime->job.leave) runtime->job.leave(runtime);
    ms_rendezvous_release(runtime->job.rendezvous);
    ms_release(&runtime->context, runtime->alive.dropped);
    ms_release(&runtime->context, runtime->memory.shared);
    return 0;
}

/* The runtime's own __gc frees the engine. Lua calls finalizers in the reverse order of their
 * marking, so that of the runtime, marked first, comes last when the state closes. */
ms_runtime *ms_lua_new_runtime(lua_State *L)
{
    ms_runtime *runtime = lua_newuserdatauv(L, sizeof *runtime, 0);
    memset(runtime, 0, sizeof *runtime);
    runtime->owner = pthread_self();
    /* Warnings go through the main thread's state, which lives as long as the runtime. */
    lua_rawgeti(L, LUA_REGISTRYINDEX, LUA_RIDX_MAINTHREAD);
    runtime->main = lua_tothread(L, -1);
    lua_pop(L, 1);
    ms_context_init(&runtime->context, NULL);
    lua_createtable(L, 0, 1);
    lua_pushcfunction(L, runtime_gc);
    lua_setfield(L, -2, "__gc");
    lua_setmetatable(L, -2);
    ms_open_handles(L);
    return runtime;
}

/* -------------------------------------------------------------------- types */

/* The functions go into the table on top, each with the runtime as upvalue 1. */
void ms_lua_register(lua_State *L, int runtime, const luaL_Reg *functions)
{
    lua_pushvalue(L, runtime);
    luaL_setfuncs(L, functions, 1);
}

/* __index of a table of methods, which represents an object's: what is not there is a misspelled
 * name. Upvalues: runtime, name of the type. */
static int refuse_field(lua_State *L)
{
    return ms_lua_no_field(L, 2, 1, lua_tostring(L, lua_upvalueindex(2)));
}

/* Stack: the module's table stays below; the methods table is on top at the end. The metatable is
 * locked, because a script that replaced __gc would leak what the object holds. */
void ms_lua_type(lua_State *L, int runtime, const char *name, const luaL_Reg *metamethods,
                 const luaL_Reg *methods)
{
    luaL_newmetatable(L, name);
    if (metamethods) ms_lua_register(L, runtime, metamethods);
    lua_pushliteral(L, "locked");
    lua_setfield(L, -2, "__metatable");
    lua_newtable(L);
    if (methods) ms_lua_register(L, runtime, methods);
    lua_createtable(L, 0, 1);
    lua_pushvalue(L, runtime);
    lua_pushstring(L, name);
    lua_pushcclosure(L, refuse_field, 2);
    lua_setfield(L, -2, "__index");
    lua_setmetatable(L, -2);
    lua_pushvalue(L, -1);
    lua_setfield(L, -3, "__index");
    lua_remove(L, -2);
}
