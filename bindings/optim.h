/* optim.h: steps of the native optimizers, clipping and unscaling in Lua. */
#ifndef MOONSHARD_BINDINGS_OPTIM_H
#define MOONSHARD_BINDINGS_OPTIM_H

#include "bindings/state.h"

void ms_open_optim(lua_State *L, int runtime);

#endif
