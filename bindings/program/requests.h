/* requests.h: signals of this process as requests to stop and to save. */
#ifndef MOONSHARD_BINDINGS_PROGRAM_REQUESTS_H
#define MOONSHARD_BINDINGS_PROGRAM_REQUESTS_H

#include <lauxlib.h>

#include "bindings/program/state.h"

/* Functions of moonshard.process: stop_requested, save_requested, watch_signals. Upvalue 1 of each:
 * whether this Lua state is that of a rank's thread. */
extern const luaL_Reg ms_request_functions[];

/* This process is a rank: its supervisor decides about a second request to stop. */
void ms_requests_of_rank(void);
/* This process has joined a job over several nodes, as a rank: its requests are requests to all.
 * The job is borrowed until ms_requests_leave. */
void ms_requests_join(ms_rendezvous *job);
void ms_requests_leave(void);

#endif
