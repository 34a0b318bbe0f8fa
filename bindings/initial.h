/* initial.h: values of tensors on "meta": the record of how they would have been made, memory for
 * them, and computing them. */
#ifndef MOONSHARD_BINDINGS_INITIAL_H
#define MOONSHARD_BINDINGS_INITIAL_H

#include "bindings/state.h"

void ms_open_initial(lua_State *L, int runtime);

#endif
