/* worker.h: the thread of one CPU stream. */
#ifndef MOONSHARD_EXEC_CPU_WORKER_H
#define MOONSHARD_EXEC_CPU_WORKER_H

#include "exec/cpu/state.h"

/* The body of a stream's thread; the argument is its ms_cpu_stream. */
void ms_worker_run(void *argument);
/* Makes all slots up to number seq visible to the worker, and wakes it if it sleeps. */
void ms_worker_publish(ms_cpu_stream *worker, uint64_t seq);
/* Ends the thread once it has finished what is published. */
void ms_worker_quit(ms_cpu_stream *worker);
/* Blocks until seq is done; spins first. On any thread. */
void ms_worker_await(ms_cpu_stream *worker, uint64_t seq, ms_spin spin);

#endif
