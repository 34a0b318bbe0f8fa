/* stream.h: streams, as the host thread uses them. */
#ifndef MOONSHARD_EXEC_STREAM_H
#define MOONSHARD_EXEC_STREAM_H

#include "exec/state.h"
#include "exec/device.h"

ms_status ms_stream_hand_over(ms_stream *stream, ms_launch *launch, uint8_t kind, ms_hand hand,
                              const void *what, ms_point *out);
/* Drains all, puts the first failure into the context, clears, marks spoiled. */
void ms_streams_report(ms_engine *engine);
/* Blocks the host until the stream has reached seq; the host's activity shows the wait. */
void ms_engine_await(ms_stream *stream, uint64_t seq);
/* The same, for all that is enqueued on any stream. */
void ms_streams_await(ms_engine *engine);
ms_status ms_stream_wait_seq(ms_stream *stream, ms_stream *of, uint64_t seq);

/* While it runs, the stream's last number keeps so many multiprocessors of a GPU from other
 * streams. */
void ms_stream_take(ms_stream *stream, uint32_t multiprocessors);
/* How many of them the work of other streams keeps that this stream is not after. That follows from
 * the order of the host's calls alone, never from what has run. */
uint32_t ms_stream_taken(const ms_stream *stream);

/* For a device, on any thread: number seq of the stream has failed with this error, and the script
 * line `script` had enqueued it. A stream keeps its first failure. */
void ms_stream_fail(ms_stream *stream, uint64_t seq, const ms_error *error, uint32_t script);
/* For a device, after number seq of the stream has waited for number of_seq of `of`: if that number
 * failed or was skipped, the stream fails as well (MS_ERROR_ABORTED). On any thread. */
void ms_stream_fail_after(ms_stream *stream, uint64_t seq, const ms_stream *of, uint64_t of_seq);
/* On any thread. */
bool ms_stream_has_failed(const ms_stream *stream);

#endif
