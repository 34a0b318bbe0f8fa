/* link.h: native links, for the bindings that take one. */
#ifndef MOONSHARD_BINDINGS_LINK_H
#define MOONSHARD_BINDINGS_LINK_H

#include "moonshard/hook.h"
#include "bindings/state.h"

/* Raises unless it is a native link. Its options.between links follow it in memory. */
const ms_link *ms_lua_link(lua_State *L, int index);
/* The native links of a list of tables { core = link }, at most MS_CHAIN_LINKS, with those that run
 * between the reductions of one of them. */
uint32_t ms_lua_chain(lua_State *L, int index, ms_link *links);

void ms_open_link(lua_State *L, int runtime);

#endif
