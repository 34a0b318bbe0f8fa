/* fsdp_state.h: whole parameters, values and pieces of sharded models, in Lua. */
#ifndef MOONSHARD_BINDINGS_FSDP_STATE_H
#define MOONSHARD_BINDINGS_FSDP_STATE_H

#include "bindings/state.h"

/* Adds these methods of sharded models to the table on top. */
void ms_lua_add_fsdp_state(lua_State *L, int runtime);

#endif
