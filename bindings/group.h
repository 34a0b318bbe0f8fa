/* group.h: process groups, for the bindings that take one. */
#ifndef MOONSHARD_BINDINGS_GROUP_H
#define MOONSHARD_BINDINGS_GROUP_H

#include "moonshard/comm.h"
#include "bindings/state.h"

ms_group *ms_lua_group(lua_State *L, int index); /* raises unless it is a group */
/* Pushes a handle of the group for that channel; the engine owns the group. */
int ms_lua_push_group(lua_State *L, ms_group *group, uint32_t channel);
ms_group *ms_lua_world(lua_State *L); /* of this engine, which starts at first use */

void ms_open_group(lua_State *L, int runtime);

#endif
