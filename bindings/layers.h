/* layers.h: selection, matrix products and layers as methods of tensors. */
#ifndef MOONSHARD_BINDINGS_LAYERS_H
#define MOONSHARD_BINDINGS_LAYERS_H

#include "bindings/operators.h"

void ms_open_layers(lua_State *L, int runtime);

#endif
