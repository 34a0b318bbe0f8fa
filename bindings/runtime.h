/* runtime.h: the runtime of one Lua state. */
#ifndef MOONSHARD_BINDINGS_RUNTIME_H
#define MOONSHARD_BINDINGS_RUNTIME_H

#include "bindings/state.h"

/* Starts the engine if needed, collects under memory pressure, notes the script line. Raises the
 * cause of the job's end, once. First call of every function that uses the engine. */
ms_engine *ms_lua_enter(lua_State *L);
/* The same, but the script line stays what it is: for the library's calls on behalf of a line that
 * was noted already, and for what only reads facts of the engine, which planners may do as well. */
ms_engine *ms_lua_enter_inside(lua_State *L);
/* A full collection, and release of all dropped tensors: a fixed point. */
void ms_lua_collect(lua_State *L, ms_runtime *runtime);
/* Bytes of Lua's own heap: what a full collection goes through. */
uint64_t ms_lua_heap(lua_State *L);
/* The same if live memory is well above `live` bytes; whether it was. */
bool ms_lua_collect_above(lua_State *L, ms_runtime *runtime, uint64_t live);
/* The engine's next draw, and one that is this rank's own (rank 0's is the engine's): for what is
 * to differ between ranks. */
ms_random ms_lua_own_draw(lua_State *L);
/* Pushes an empty handle; fill it in phase 3 with ms_handle_fill, which takes the reference over
 * and cannot fail. */
ms_handle *ms_lua_new_handle(lua_State *L);
void ms_handle_fill(ms_handle *handle, ms_tensor *owned);
/* Marks it as kept: it outlives its step. */
void ms_handle_keep(ms_handle *handle);
/* hold: a future holds it, until the end of the step in which its value is taken (spend), unless it
 * is kept. */
void ms_handle_hold(ms_handle *handle);
void ms_handle_spend(ms_handle *handle);
void ms_handle_drop(ms_handle *handle, const char *why); /* releases now; why: static text */

/* How many handles have been made, and the end of those that were made from `begin` to `end`, but
 * for kept ones: as at a step's end. Scripts may still have the handles. why: static text. */
uint64_t ms_handle_count(const ms_runtime *runtime);
void ms_handles_drop(ms_runtime *runtime, uint64_t begin, uint64_t end, const char *why);

/* Pushes a new runtime without an engine. module.c makes one for each Lua state. */
ms_runtime *ms_lua_new_runtime(lua_State *L);
/* Each adds its functions to the module table on top of the stack; the runtime is at index
 * `runtime`. module.c lists them all. */
void ms_open_steps(lua_State *L, int runtime);
/* Registers functions with the runtime as their upvalue in the table on top. */
void ms_lua_register(lua_State *L, int runtime, const luaL_Reg *functions);
/* Makes a metatable with locked __metatable, methods under __index, and the runtime as upvalue;
 * leaves the methods table on the stack. */
void ms_lua_type(lua_State *L, int runtime, const char *name, const luaL_Reg *metamethods,
                 const luaL_Reg *methods);

#endif
