/* engine.h: the engine in Lua. */
#ifndef MOONSHARD_BINDINGS_ENGINE_H
#define MOONSHARD_BINDINGS_ENGINE_H

#include "bindings/state.h"

void ms_open_engine(lua_State *L, int runtime);

#endif
