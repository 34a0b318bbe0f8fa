/* keep.h: the supervisor of one node of a job over several. */
#ifndef MOONSHARD_BINDINGS_PROGRAM_KEEP_H
#define MOONSHARD_BINDINGS_PROGRAM_KEEP_H

#include "bindings/program/state.h"

int ms_keep(lua_State *L);

#endif
