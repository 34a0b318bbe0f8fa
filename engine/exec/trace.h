/* trace.h: a record for each task and wait while tracing is on. */
#ifndef MOONSHARD_EXEC_TRACE_H
#define MOONSHARD_EXEC_TRACE_H

#include "exec/state.h"

ms_trace_record *ms_trace_add(ms_engine *engine); /* NULL when not tracing or out of memory */
void ms_trace_close(ms_engine *engine);

#endif
