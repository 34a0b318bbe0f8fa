/* fsdp.h: sharded models in Lua. */
#ifndef MOONSHARD_BINDINGS_FSDP_H
#define MOONSHARD_BINDINGS_FSDP_H

#include "bindings/state.h"

void ms_open_fsdp(lua_State *L, int runtime);

#endif
