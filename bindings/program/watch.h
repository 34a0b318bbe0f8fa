/* watch.h: the supervisor watches ranks that show no progress. */
#ifndef MOONSHARD_BINDINGS_PROGRAM_WATCH_H
#define MOONSHARD_BINDINGS_PROGRAM_WATCH_H

#include "bindings/program/state.h"

/* Ends the job with this cause unless it has one, and sets the time until which ranks may leave by
 * themselves. */
void ms_end_job(ms_job *job, ms_abort_reason reason, int32_t rank, const char *message);
/* Looks at all ranks; how long it may be until the next look. */
void ms_watch(ms_job *job, uint64_t now);
uint64_t ms_watch_tick(const ms_job *job);

#endif
