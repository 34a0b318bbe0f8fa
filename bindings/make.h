/* make.h: functions of Lua that make tensors. */
#ifndef MOONSHARD_BINDINGS_MAKE_H
#define MOONSHARD_BINDINGS_MAKE_H

#include "bindings/state.h"

void ms_open_make(lua_State *L, int runtime);

#endif
