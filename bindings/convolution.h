/* convolution.h: convolution and pooling as methods of tensors. */
#ifndef MOONSHARD_BINDINGS_CONVOLUTION_H
#define MOONSHARD_BINDINGS_CONVOLUTION_H

#include "bindings/operators.h"

void ms_open_convolution(lua_State *L, int runtime);

#endif
