/* batch.h: tasks of one kind that come one after another and are carried out as one
 * (ms_engine_batch). */
#ifndef MOONSHARD_EXEC_CUDA_BATCH_H
#define MOONSHARD_EXEC_CUDA_BATCH_H

#include "exec/cuda/state.h"

/* Whether this task would be the first that is kept. What came before must be on the stream then.
 */
bool ms_cuda_batch_begins(const ms_stream *stream, const ms_launch *launch);
/* The task is kept for later; its number still has to be counted. False: it is for now. */
bool ms_cuda_batch_add(ms_stream *stream, const ms_launch *launch);
/* Puts onto the stream, or onto all, what was kept. */
void ms_cuda_batch_put(ms_stream *stream);
void ms_cuda_batch_put_all(ms_engine *engine);
/* It will never be carried out: the GPU has stopped. */
void ms_cuda_batch_drop(ms_stream *stream);
void ms_cuda_batch(ms_engine *engine, bool begins);

#endif
