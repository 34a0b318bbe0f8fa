/* sim.c: the executor without data: every decision of the host is made, nothing runs, all is done
 * as soon as it is enqueued. */
#include "exec/engine.h"

static ms_status sim_open(ms_engine *engine)
{
    (void)engine;
    return MS_OK;
}
static void sim_close(ms_engine *engine) { (void)engine; }
static ms_status sim_stream_open(ms_stream *stream)
{
    (void)stream;
    return MS_OK;
}
static void sim_stream_close(ms_stream *stream) { (void)stream; }
static void sim_publish(ms_stream *stream)
{
    atomic_store_explicit(&stream->done, stream->enqueued, memory_order_relaxed);
}
static void sim_await(ms_stream *stream, uint64_t seq)
{
    (void)stream;
    (void)seq;
}

const ms_executor ms_executor_sim = {
    .name = "sim",
    .data = false,
    .open = sim_open,
    .close = sim_close,
    .stream_open = sim_stream_open,
    .stream_close = sim_stream_close,
    .publish = sim_publish,
    .await = sim_await,
};
