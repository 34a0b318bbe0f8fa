/* processes.h: ranks as processes. */
#ifndef MOONSHARD_BINDINGS_PROGRAM_PROCESSES_H
#define MOONSHARD_BINDINGS_PROGRAM_PROCESSES_H

#include "bindings/program/state.h"

/* Start all ranks. On failure none is left. The calling thread must be the one that supervises. */
ms_status ms_start_processes(ms_job *job);

#endif
