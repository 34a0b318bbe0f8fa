/* link.h: native links, for the bindings that take one. */
#ifndef MOONSHARD_BINDINGS_LINK_H
#define MOONSHARD_BINDINGS_LINK_H

#include "bindings/runtime.h"
#include "moonshard/hook.h"

const ms_link *ms_lua_link(lua_State *L, int index); /* raises unless it is a native link */

#endif
