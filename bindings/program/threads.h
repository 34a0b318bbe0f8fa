/* threads.h: ranks as threads of this process, each with a Lua state and an engine of its own; the
 * same code as for processes. */
#ifndef MOONSHARD_BINDINGS_PROGRAM_THREADS_H
#define MOONSHARD_BINDINGS_PROGRAM_THREADS_H

#include "bindings/program/state.h"

ms_status ms_start_threads(ms_job *job);

#endif
