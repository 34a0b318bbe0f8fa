/* launch.h: work that goes onto a stream. */
#ifndef MOONSHARD_EXEC_CUDA_LAUNCH_H
#define MOONSHARD_EXEC_CUDA_LAUNCH_H

#include "exec/cuda/state.h"

/* Puts the work of a task on the stream. */
ms_cuda_way ms_cuda_carry_out(ms_stream *stream, const ms_launch *launch);
/* What the kernels of a task may note is looked at when the task is reached. */
void ms_cuda_keep_note(ms_stream *stream, const ms_launch *launch, ms_cuda_note *note);
void ms_cuda_run(ms_stream *stream, const ms_launch *launch);
void ms_cuda_copy_in(ms_stream *stream, const ms_launch *launch, void *to, const void *host,
                     size_t bytes);
void ms_cuda_copy_out(ms_stream *stream, const ms_launch *launch, void *host, const void *from,
                      size_t bytes);
void ms_cuda_fail_if(ms_stream *stream, const ms_launch *launch, const float *flag,
                     const char *message);
void ms_cuda_call(ms_stream *stream, const ms_launch *launch, const ms_host_call *call);

#endif
