/* sim.c: the device without values: the core makes every decision, no task runs, and all work is
 * done as soon as it is enqueued. */
#include "exec/engine.h"

#include <string.h>

/* Addresses are numbers that nobody reads at. */
#define MS_SIM_BASE ((uintptr_t)1 << 40)
#define MS_SIM_BYTES (UINT64_MAX >> 8)

static ms_status sim_open(ms_engine *engine, void **state)
{
    (void)engine;
    *state = NULL;
    return MS_OK;
}

static void sim_close(ms_engine *engine, void *state)
{
    (void)engine;
    (void)state;
}

static ms_status sim_stream_open(ms_stream *stream, void **state)
{
    (void)stream;
    *state = NULL;
    return MS_OK;
}

static void sim_stream_close(ms_stream *stream, void *state)
{
    (void)stream;
    (void)state;
}

static void sim_run(ms_stream *stream, const ms_launch *launch)
{
    (void)stream;
    (void)launch;
}

static void sim_wait(ms_stream *stream, const ms_wait *wait)
{
    (void)stream;
    (void)wait;
}

static bool sim_reached(const ms_stream *stream, uint64_t seq) { return stream->enqueued >= seq; }

static void sim_await(ms_stream *stream, uint64_t seq)
{
    (void)stream;
    (void)seq;
}

static void sim_mark(ms_stream *stream, uint64_t seq, ms_mark *mark)
{
    (void)stream;
    (void)seq;
    (void)mark;
}

static void sim_copy_in(ms_stream *stream, const ms_launch *launch, void *to, const void *host,
                        size_t bytes)
{
    (void)to;
    (void)host;
    (void)bytes;
    sim_run(stream, launch);
}

static void sim_copy_out(ms_stream *stream, const ms_launch *launch, void *host, const void *from,
                         size_t bytes)
{
    (void)host;
    (void)from;
    (void)bytes;
    sim_run(stream, launch);
}

static void sim_read(ms_engine *engine, void *host, const void *from, size_t bytes)
{
    (void)engine;
    (void)from;
    if (host) memset(host, 0, bytes);
}

static void sim_fail_if(ms_stream *stream, const ms_launch *launch, const float *flag,
                        const char *message)
{
    (void)flag;
    (void)message;
    sim_run(stream, launch);
}

static void *sim_reserve(ms_engine *engine, uint64_t bytes)
{
    (void)engine;
    return bytes <= MS_SIM_BYTES ? (void *)MS_SIM_BASE : NULL;
}

static int sim_commit(ms_engine *engine, void *address, uint64_t bytes)
{
    (void)engine;
    (void)address;
    (void)bytes;
    return 0;
}

static void sim_unreserve(ms_engine *engine, void *address, uint64_t bytes)
{
    (void)engine;
    (void)address;
    (void)bytes;
}

static uint64_t sim_capacity(const ms_engine *engine)
{
    (void)engine;
    return MS_SIM_BYTES / 2;
}

const ms_device ms_device_sim = {
    .name = "sim",
    .kernels = "cpu",
    .values = false,
    .open = sim_open,
    .close = sim_close,
    .stream_open = sim_stream_open,
    .stream_close = sim_stream_close,
    .run = sim_run,
    .wait = sim_wait,
    .reached = sim_reached,
    .await = sim_await,
    .mark = sim_mark,
    .copy_in = sim_copy_in,
    .copy_out = sim_copy_out,
    .read = sim_read,
    .fail_if = sim_fail_if,
    .reserve = sim_reserve,
    .commit = sim_commit,
    .unreserve = sim_unreserve,
    .capacity = sim_capacity,
};
