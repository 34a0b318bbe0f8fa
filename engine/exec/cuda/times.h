/* times.h: when the GPU passed an event, by the host's clock. */
#ifndef MOONSHARD_EXEC_CUDA_TIMES_H
#define MOONSHARD_EXEC_CUDA_TIMES_H

#include "exec/cuda/state.h"

/* drop_anchor: before an event with times is recorded. time_of: when an event was passed; 0: it is
 * not known (event NULL, or the GPU has stopped). */
void ms_cuda_drop_anchor(ms_engine *engine);
uint64_t ms_cuda_time_of(ms_cuda_device *self, ms_cuda_event event);
bool ms_cuda_find_span(const ms_cuda_device *self, ms_cuda_event from, ms_cuda_event to,
                       int64_t *ns);

#endif
