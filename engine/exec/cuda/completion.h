/* completion.h: what work of a stream leaves for the host. */
#ifndef MOONSHARD_EXEC_CUDA_COMPLETION_H
#define MOONSHARD_EXEC_CUDA_COMPLETION_H

#include "exec/cuda/state.h"

/* An event with times or without, NULL after an error. */
ms_cuda_event ms_cuda_take_event(ms_cuda_device *self, ms_engine *engine);
void ms_cuda_give_event(ms_cuda_device *self, ms_engine *engine, ms_cuda_event event);
/* NULL: there is no memory. */
ms_cuda_note *ms_cuda_take_note(ms_cuda_device *self);
void ms_cuda_give_note(ms_cuda_device *self, ms_cuda_note *note);
/* A completion of number seq at the end of the list; NULL: no memory, and the stream has failed. */
ms_cuda_completion *ms_cuda_add_completion(ms_stream *stream, uint64_t seq, uint32_t script);
/* begin_times and end_times are around the work of one launch: when the GPU started and finished
 * it goes to launch->record. begin_times answers NULL where no trace is recorded. */
ms_cuda_completion *ms_cuda_begin_times(ms_stream *stream, const ms_launch *launch);
void ms_cuda_end_times(ms_stream *stream, const ms_cuda_completion *completion);

#endif
