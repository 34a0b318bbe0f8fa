/* tensor.h: the tensor handle. */
#ifndef MOONSHARD_BINDINGS_TENSOR_H
#define MOONSHARD_BINDINGS_TENSOR_H

#include "bindings/state.h"

void ms_open_tensor(lua_State *L, int runtime);

#endif
