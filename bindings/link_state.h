/* link_state.h: the state of links in Lua. */
#ifndef MOONSHARD_BINDINGS_LINK_STATE_H
#define MOONSHARD_BINDINGS_LINK_STATE_H

#include "bindings/state.h"
#include "moonshard/hook.h"

/* Raises unless it is a link state; borrowed. */
ms_link_state *ms_lua_link_state(lua_State *L, int index);

void ms_open_link_state(lua_State *L, int runtime);

#endif
