/* launcher.h: supervises the ranks of a job. */
#ifndef MOONSHARD_BINDINGS_PROGRAM_LAUNCHER_H
#define MOONSHARD_BINDINGS_PROGRAM_LAUNCHER_H

#include "bindings/program/state.h"

/* What a launcher and an agent share. An empty job in a userdata, which it pushes. */
ms_job *ms_job_new(lua_State *L);
ms_status ms_job_make_room(ms_job *job, uint32_t ranks);
/* nil and the message of the job's error. */
int ms_job_refused(lua_State *L, const ms_job *job);
/* Number `name` of the options at 1; 0 if it is absent. */
double ms_job_option(lua_State *L, const char *name);
/* Calls on_start, which is at 2, with what tells of the job at 3; pushes its result. */
void ms_job_begin(lua_State *L);
ms_status ms_job_open_signals(ms_job *job);
/* The supervisor's loop: until no rank runs, or `done` (NULL: never) says that it is over. */
void ms_job_supervise(lua_State *L, ms_job *job, bool (*done)(ms_job *job));
void ms_job_push_outcome(lua_State *L, const ms_job *job);
void ms_job_warn(ms_job *job, const char *text);
/* Judges the end of a rank, which may end the job. ended[rank] is -1 if nothing has watched it. */
void ms_job_rank_ended(ms_job *job, uint32_t rank);

/* process.launch(options): see launcher.c; of an agent: see keep.c. Upvalue of the second: the
 * agent, as a light userdata. */
int ms_launch(lua_State *L);

#endif
