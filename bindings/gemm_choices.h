/* gemm_choices.h: in Lua, which algorithms of their library a GPU's products use. */
#ifndef MOONSHARD_BINDINGS_GEMM_CHOICES_H
#define MOONSHARD_BINDINGS_GEMM_CHOICES_H

#include "bindings/state.h"

void ms_open_products(lua_State *L, int runtime);

#endif
