/* ddp.h: reducers in Lua. */
#ifndef MOONSHARD_BINDINGS_DDP_H
#define MOONSHARD_BINDINGS_DDP_H

#include "bindings/state.h"

void ms_open_ddp(lua_State *L, int runtime);

#endif
