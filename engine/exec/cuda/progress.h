/* progress.h: which numbers of a stream are reached. */
#ifndef MOONSHARD_EXEC_CUDA_PROGRESS_H
#define MOONSHARD_EXEC_CUDA_PROGRESS_H

#include "exec/cuda/state.h"

ms_status ms_cuda_queue_open(ms_stream *stream, void **state);
/* Nothing is kept for later. */
void ms_cuda_queue_close(ms_stream *stream, void *state);
bool ms_cuda_reached(const ms_stream *stream, uint64_t seq);
void ms_cuda_await(ms_stream *stream, uint64_t seq);
void ms_cuda_wait(ms_stream *stream, const ms_wait *wait);
/* The host can ask for the last number that was carried out, and puts nothing onto the stream. */
void ms_cuda_cover(ms_stream *stream);
/* Number seq was carried out, the next one. */
void ms_cuda_advance(ms_stream *stream, uint64_t seq);
void ms_cuda_mark(ms_stream *stream, uint64_t seq, ms_mark *mark);
ms_status ms_cuda_mark_open(ms_engine *engine, ms_mark *mark);
void ms_cuda_mark_close(ms_engine *engine, ms_mark *mark);
uint64_t ms_cuda_mark_ns(const ms_engine *engine, const ms_mark *mark);

#endif
