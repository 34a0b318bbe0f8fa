/* machine.h: what the machine has, and what the engine uses of it. */
#ifndef MOONSHARD_BINDINGS_MACHINE_H
#define MOONSHARD_BINDINGS_MACHINE_H

#include "bindings/state.h"

void ms_open_machine(lua_State *L, int runtime);

#endif
