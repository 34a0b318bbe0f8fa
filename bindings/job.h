/* job.h: what a rank tells its job and hears from it, in Lua. */
#ifndef MOONSHARD_BINDINGS_JOB_H
#define MOONSHARD_BINDINGS_JOB_H

#include "bindings/state.h"

void ms_open_job(lua_State *L, int runtime);

#endif
