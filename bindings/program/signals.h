/* signals.h: what a process that supervises others waits for. */
#ifndef MOONSHARD_BINDINGS_PROGRAM_SIGNALS_H
#define MOONSHARD_BINDINGS_PROGRAM_SIGNALS_H

#include "bindings/program/state.h"

/* A descriptor that gives the signals that are requests, or -errno. */
int ms_open_signals(void);

/* After ended[rank] was set: ms_job_supervise looks after it. */
ms_status ms_job_watch_end(ms_job *job, uint32_t rank);

#endif
