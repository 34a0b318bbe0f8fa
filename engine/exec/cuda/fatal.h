/* fatal.h: a GPU that has stopped, and which of its tasks may be the cause. */
#ifndef MOONSHARD_EXEC_CUDA_FATAL_H
#define MOONSHARD_EXEC_CUDA_FATAL_H

#include "exec/cuda/state.h"

/* Success: the GPU goes on, and an error is that of the call which reported it. */
ms_cuda_result ms_cuda_has_stopped(const ms_cuda_device *self);
/* For ms_cuda_stop, before the task is carried out. */
void ms_cuda_remember(ms_stream *stream, const ms_launch *launch);
/* The result of a call for this launch; unless it is success the stream fails. */
void ms_cuda_check(ms_stream *stream, const ms_launch *launch, ms_cuda_result result);
/* Every stream fails with the driver's error. launch: what was carried out, NULL: nothing. */
void ms_cuda_stop(ms_stream *stream, const ms_launch *launch, ms_cuda_result result);
/* With CUDA_LAUNCH_BLOCKING=1: waits until the stream has carried out what is on it. */
void ms_cuda_block(ms_stream *stream, const ms_launch *launch);

#endif
