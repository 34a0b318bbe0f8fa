/* enter.h: how a bound function enters the engine. */
#ifndef MOONSHARD_BINDINGS_ENTER_H
#define MOONSHARD_BINDINGS_ENTER_H

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
/* The engine's next draw, as rank `rank` has it. */
ms_random ms_lua_draw_of(lua_State *L, uint32_t rank);

#endif
