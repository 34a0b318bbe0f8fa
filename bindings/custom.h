/* custom.h: functions with a gradient of their own, in Lua. */
#ifndef MOONSHARD_BINDINGS_CUSTOM_H
#define MOONSHARD_BINDINGS_CUSTOM_H

#include "bindings/state.h"

void ms_open_custom(lua_State *L, int runtime);

#endif
