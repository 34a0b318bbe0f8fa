/* steps.h: steps of a training loop. */
#ifndef MOONSHARD_BINDINGS_STEPS_H
#define MOONSHARD_BINDINGS_STEPS_H

#include "bindings/state.h"

/* Adds its functions to the module table on top of the stack; the runtime is at index `runtime`. */
void ms_open_steps(lua_State *L, int runtime);

#endif
