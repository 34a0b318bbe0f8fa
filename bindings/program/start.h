/* start.h: starts an MPI launcher for a job over several nodes, passes on requests, and returns the
 * exit code and the report that the job's first agent tells. */
#ifndef MOONSHARD_BINDINGS_PROGRAM_START_H
#define MOONSHARD_BINDINGS_PROGRAM_START_H

#include "bindings/program/state.h"

/* process.start(options): see start.c. */
int ms_start(lua_State *L);

#endif
