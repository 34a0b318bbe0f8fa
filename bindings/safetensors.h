/* safetensors.h: safetensors files for the Lua library. */
#ifndef MOONSHARD_BINDINGS_SAFETENSORS_H
#define MOONSHARD_BINDINGS_SAFETENSORS_H

#include "bindings/state.h"

void ms_open_safetensors(lua_State *L, int runtime);

#endif
