/* grad.h: gradients in Lua. */
#ifndef MOONSHARD_BINDINGS_GRAD_H
#define MOONSHARD_BINDINGS_GRAD_H

#include "bindings/state.h"

void ms_open_grad(lua_State *L, int runtime);

#endif
