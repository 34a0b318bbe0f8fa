/* job_join.h: a process of an MPI launcher becomes a rank of a job over several nodes. */
#ifndef MOONSHARD_BINDINGS_JOB_JOIN_H
#define MOONSHARD_BINDINGS_JOB_JOIN_H

#include "bindings/state.h"

void ms_open_job_join(lua_State *L, int runtime);
/* Pushes the names of the modules for MPIs beside the engine, as text, or false. */
void ms_lua_push_modules(lua_State *L);

#endif
