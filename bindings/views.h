/* views.h: copies, conversions and views as methods of tensors. */
#ifndef MOONSHARD_BINDINGS_VIEWS_H
#define MOONSHARD_BINDINGS_VIEWS_H

#include "bindings/operators.h"

void ms_open_views(lua_State *L, int runtime);

#endif
