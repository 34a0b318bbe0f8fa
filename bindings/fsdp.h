/* fsdp.h: sharded models in Lua. */
#ifndef MOONSHARD_BINDINGS_FSDP_H
#define MOONSHARD_BINDINGS_FSDP_H

#include "bindings/state.h"
#include "moonshard/fsdp.h"

/* The sharded model at index 1; raises for any other value. */
ms_fsdp *ms_lua_fsdp(lua_State *L);
/* The number of one of its units at that index. */
uint32_t ms_lua_fsdp_unit(lua_State *L, int index, const ms_fsdp *fsdp);

void ms_open_fsdp(lua_State *L, int runtime);

#endif
