/* deferred.h: work that waits on the host until a blocking host task of its stream has returned. */
#ifndef MOONSHARD_EXEC_CUDA_DEFERRED_H
#define MOONSHARD_EXEC_CUDA_DEFERRED_H

#include "exec/cuda/state.h"

/* Slots of the table, which carry out the functions above when their turn has come. */
void ms_cuda_run_in_turn(ms_stream *stream, const ms_launch *launch);
void ms_cuda_wait_in_turn(ms_stream *stream, const ms_wait *wait);
void ms_cuda_mark_in_turn(ms_stream *stream, uint64_t seq, ms_mark *mark);
void ms_cuda_copy_in_in_turn(ms_stream *stream, const ms_launch *launch, void *to, const void *host,
                             size_t bytes);
void ms_cuda_copy_out_in_turn(ms_stream *stream, const ms_launch *launch, void *host,
                              const void *from, size_t bytes);
void ms_cuda_fail_if_in_turn(ms_stream *stream, const ms_launch *launch, const float *flag,
                             const char *message);
void ms_cuda_call_in_turn(ms_stream *stream, const ms_launch *launch, const ms_host_call *call);
bool ms_cuda_reached_in_turn(const ms_stream *stream, uint64_t seq);
void ms_cuda_await_in_turn(ms_stream *stream, uint64_t seq);
/* The host waits until all up to number seq, or all that was enqueued, is on the stream, and no
 * host task is out. */
void ms_cuda_put_until(ms_stream *stream, uint64_t seq);
void ms_cuda_put_rest(ms_stream *stream);

#endif
