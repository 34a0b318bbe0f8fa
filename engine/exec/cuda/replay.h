/* replay.h: runs of tasks that a stream gets again and again, launched as one graph of the driver
 * (ms_engine_set_repeating). */
#ifndef MOONSHARD_EXEC_CUDA_REPLAY_H
#define MOONSHARD_EXEC_CUDA_REPLAY_H

#include "exec/cuda/state.h"

/* Tasks that come again and again. */
void ms_cuda_repeat(ms_engine *engine, bool on);
void ms_cuda_repeats(const ms_engine *engine, ms_repeats *out);
/* A task has come, whose number is the next one. False: the caller carries it out now, and then
 * says how it went. */
bool ms_cuda_hold(ms_stream *stream, const ms_launch *launch);
void ms_cuda_learn(ms_stream *stream, ms_cuda_way way);
/* What is held goes to the driver. Before anything that is no task; the words say what. */
void ms_cuda_cut(ms_stream *stream, const char *what);
/* The same, if number seq is one of the log. */
void ms_cuda_cut_at(ms_stream *stream, uint64_t seq, const char *what);
void ms_cuda_replays_free(ms_stream *stream);
/* In a task whose work has a replay: what the functions of task.h do then. */
ms_cuda_result ms_cuda_replay_launch(ms_cuda_work *work, const ms_cuda_kernel_call *call);
bool ms_cuda_replay_clear(ms_cuda_work *work, ms_cuda_address address, size_t bytes);
ms_cuda_piece *ms_cuda_replay_piece(ms_cuda_work *work);

#endif
