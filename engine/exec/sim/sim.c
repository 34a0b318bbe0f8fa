/* sim.c: the device without values: the core makes every decision, no task runs, and all work is
 * done as soon as it is enqueued. Only its clocks know how long it would take.
 *
 * Invariants
 * - Each stream has a clock, and so has the host. Work begins when the stream, the host that
 *   enqueues it and what it waits for are ready; it ends after the time that the rates give for its
 *   cost. Clocks depend on the order of host calls and on the rates only.
 * - The host's clock moves on with each call that enqueues (ms_rates.enqueue_ns), and to the end of
 *   what it awaits: a sync, the end of a step, or room in a stream that is full.
 * - Nothing but marks, and ms_engine_simulated_ns, reads the clocks.
 * - A stream remembers when its last MS_STREAM_DEPTH numbers ended. What came before has ended by
 *   the host's clock, since the stream would have been full otherwise. */
#include "exec/sim/sim.h"

#include <string.h>

#include "exec/engine.h"

/* Addresses are numbers: no memory is ever read or written at them. */
#define MS_SIM_BASE ((uintptr_t)1 << 40)
#define MS_SIM_BYTES (UINT64_MAX >> 8)

/* The host's clock. Times are f64 nanoseconds, so that short calls do not round to nothing. */
typedef struct ms_sim {
    double host_ns;
} ms_sim;

/* A stream's clock and when its last numbers end. */
typedef struct ms_sim_stream {
    double now_ns;                /* when its last work ends */
    double ends[MS_STREAM_DEPTH]; /* of number seq: [(seq - 1) % MS_STREAM_DEPTH] */
} ms_sim_stream;

/* Rates are checked here, as a division by zero would only show as an infinite time. */
static ms_status sim_open(ms_engine *engine, void **state)
{
    const char *problem = ms_rates_problem(&engine->rates);
    if (problem) return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "rates: %s", problem);
    return ms_allocate(&engine->context, sizeof(ms_sim), "device", state);
}

/* A simulated device has nothing but its clocks. */
static void sim_close(ms_engine *engine, void *state) { ms_release(&engine->context, state); }

/* Zeroed: a new stream is ready at time 0, and the ring holds no end that could delay the host. */
static ms_status sim_stream_open(ms_stream *stream, void **state)
{
    return ms_allocate(&stream->engine->context, sizeof(ms_sim_stream), "stream", state);
}

static void sim_stream_close(ms_stream *stream, void *state)
{
    ms_release(&stream->engine->context, state);
}

/* ------------------------------------------------------------------- clocks */

static double later(double a, double b) { return a > b ? a : b; }

/* When that number of the stream ends; 0 for numbers that fell out of the ring, which ended before
 * the host's time. */
static double end_of(const ms_stream *stream, uint64_t seq)
{
    const ms_sim_stream *clock = stream->device_state;
    if (seq == 0 || seq + MS_STREAM_DEPTH <= stream->enqueued) return 0;
    return clock->ends[(seq - 1) % MS_STREAM_DEPTH];
}

/* Enqueues number seq, which cannot begin before `ready` and takes `ns`. The host's clock goes
 * first: enqueueing costs its time too. */
static void advance(ms_stream *stream, uint64_t seq, double ready, double ns)
{
    ms_sim *sim = stream->engine->device_state;
    ms_sim_stream *clock = stream->device_state;
    /* The place of number seq still holds the end of number seq - MS_STREAM_DEPTH. */
    double *end = &clock->ends[(seq - 1) % MS_STREAM_DEPTH];
    /* A full stream blocks the host until its oldest number, whose place this is, has ended. */
    sim->host_ns = later(sim->host_ns + stream->engine->rates.enqueue_ns, *end);
    /* The three things that work waits for; it takes its own time after the last of them. */
    clock->now_ns = later(later(clock->now_ns, sim->host_ns), ready) + ns;
    *end = clock->now_ns;
}

/* The task's function is never called; its cost decides how long it takes. */
static void sim_run(ms_stream *stream, const ms_launch *launch)
{
    advance(stream, launch->seq, 0,
            ms_rates_ns(&stream->engine->rates, launch->name, &launch->cost));
}

/* A wait takes no time of its own; it only delays the stream until the other number has ended. */
static void sim_wait(ms_stream *stream, const ms_wait *wait)
{
    advance(stream, wait->seq, end_of(wait->of, wait->of_seq), 0);
}

/* The time is known at once, while a real device writes it later. */
static void sim_mark(ms_stream *stream, uint64_t seq, ms_mark *mark)
{
    const ms_sim_stream *clock = stream->device_state;
    advance(stream, seq, 0, 0);
    mark->ns = (uint64_t)clock->now_ns;
}

/* Whole nanoseconds: fractions are cut off here and not in the clock. */
static uint64_t sim_mark_ns(const ms_engine *engine, const ms_mark *mark)
{
    (void)engine;
    return mark->ns;
}

/* All that is enqueued counts as done, so nothing blocks; sim_await moves the host's clock to where
 * it would be. */
static bool sim_reached(const ms_stream *stream, uint64_t seq) { return stream->enqueued >= seq; }

/* The host goes on when the number has ended; it may be later already. */
static void sim_await(ms_stream *stream, uint64_t seq)
{
    ms_sim *sim = stream->engine->device_state;
    sim->host_ns = later(sim->host_ns, end_of(stream, seq));
}

static double sim_simulated_ns(const ms_engine *engine)
{
    double ns = ((const ms_sim *)engine->device_state)->host_ns;
    for (uint32_t i = 0; i < engine->stream_count; i++)
        ns = later(ns, ((const ms_sim_stream *)engine->streams[i]->device_state)->now_ns);
    return ns;
}

/* ------------------------------------------------------------------- values */

/* Copies move no bytes, and cost the time that the rates give for them. */
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

/* Values do not exist; zeros keep a program that reads one deterministic. */
static ms_status sim_read(ms_engine *engine, void *host, const void *from, size_t bytes)
{
    (void)engine;
    (void)from;
    if (host) memset(host, 0, bytes);
    return MS_OK;
}

/* A flag has no value here, so no check ever fails. */
static void sim_fail_if(ms_stream *stream, const ms_launch *launch, const float *flag,
                        const char *message)
{
    (void)flag;
    (void)message;
    sim_run(stream, launch);
}

/* The function is not called: it works on values. */
static void sim_call(ms_stream *stream, const ms_launch *launch, const ms_host_call *call)
{
    (void)call;
    sim_run(stream, launch);
}

/* ------------------------------------------------------------------- memory */

/* The pool works with these addresses as numbers and never uses memory at them. */
static void *sim_reserve(ms_engine *engine, uint64_t bytes)
{
    (void)engine;
    /* One address serves all engines, as nothing is read or written there. */
    return bytes <= MS_SIM_BYTES ? (void *)MS_SIM_BASE : NULL;
}

/* Never refuses: only the pool's limit bounds the memory of a simulated run. */
static int sim_commit(ms_engine *engine, void *address, uint64_t bytes)
{
    (void)engine;
    (void)address;
    (void)bytes;
    return 0;
}

static bool sim_moves(const ms_engine *engine)
{
    (void)engine;
    return true;
}

/* As on the device that is simulated: of a GPU, what is offloaded keeps its addresses. */
static bool sim_moves_outside(const ms_engine *engine) { return !ms_engine_is_for_gpu(engine); }

static void sim_unreserve(ms_engine *engine, void *address, uint64_t bytes)
{
    (void)engine;
    (void)address;
    (void)bytes;
}

static ms_status sim_adopt(ms_engine *engine, void *base, uint64_t bytes)
{
    (void)engine;
    (void)base;
    (void)bytes;
    return MS_OK;
}

/* Half of the range, so that the reserve for it, which is rounded up, succeeds. */
static uint64_t sim_capacity(const ms_engine *engine)
{
    (void)engine;
    return MS_SIM_BYTES / 2;
}

/* As on the device that is simulated: of a GPU, what is offloaded is not in its memory. */
static uint64_t sim_outside(const ms_engine *engine)
{
    return ms_engine_is_for_gpu(engine) ? sim_capacity(engine) : engine->pool.limit;
}

static const ms_device_memory memory = { .capacity = sim_capacity,
                                         .reserve = sim_reserve,
                                         .commit = sim_commit,
                                         .moves = sim_moves,
                                         .decommit = sim_commit,
                                         .unreserve = sim_unreserve },
                              outside = { .capacity = sim_outside,
                                          .reserve = sim_reserve,
                                          .commit = sim_commit,
                                          .moves = sim_moves_outside,
                                          .decommit = sim_commit,
                                          .unreserve = sim_unreserve };

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
    .mark_ns = sim_mark_ns,
    .simulated_ns = sim_simulated_ns,
    .copy_in = sim_copy_in,
    .copy_out = sim_copy_out,
    .read = sim_read,
    .fail_if = sim_fail_if,
    .call = sim_call,
    .memory = &memory,
    .outside = &outside,
    .adopt = sim_adopt,
    .disown = sim_unreserve,
};
