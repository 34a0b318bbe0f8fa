/* deferred.c: work that the host enqueues on a stream while a host task is out there (host_task.c),
 * or on a stream that waits for such a stream. The work is stored with its number, and put onto the
 * stream once the host task is over. So no function of the device's table waits for a host task,
 * except those whose purpose is to wait.
 *
 * Invariants
 * - The stored work of a stream is all that the host has enqueued there after `head`, in order.
 * - The host thread puts stored work onto the stream when it enqueues something, asks whether a
 *   number is reached, or waits for one. While it does none of these, stored work does not begin.
 */
#include "exec/cuda/deferred.h"

#include <string.h>

#include "exec/cuda/errors.h"
#include "exec/cuda/fatal.h"
#include "exec/cuda/host_task.h"
#include "exec/cuda/launch.h"
#include "exec/cuda/progress.h"
#include "exec/stream.h"

/* How often a host that waits for host tasks looks whether the GPU has stopped. */
#define MS_LATER_LOOK_NS 20000000

typedef enum later_kind { RUN, WAIT, MARK, COPY_IN, COPY_OUT, FAIL_IF, CALL } later_kind;
struct ms_cuda_deferred {
    ms_cuda_deferred *next;
    later_kind kind;
    ms_launch launch; /* its arguments, or the bytes of a small copy, follow this struct */
    ms_wait wait;
    ms_mark *mark;
    ms_host_call call;
    void *to;
    const void *from; /* NULL: the bytes follow this struct */
    size_t bytes;
    const char *message;
};

static void *bytes_of(ms_cuda_deferred *one) { return one + 1; }

static uint64_t number_of(const ms_cuda_deferred *one)
{
    return one->kind == WAIT ? one->wait.seq : one->launch.seq;
}

/* ------------------------------------------------------------------------ turns */

/* Number seq is on its stream, and so is what its task does after functions of the host. */
static bool is_put(const ms_stream *asked, uint64_t seq)
{
    ms_stream *stream = asked->engine->streams[asked->index];
    return ms_cuda_queue_of(stream)->head >= seq && ms_cuda_host_task_is_over(stream, seq);
}

/* What comes next may be put onto the stream now; wait: NULL, or what comes next. */
static bool is_free(ms_stream *stream, const ms_wait *wait)
{
    return ms_cuda_host_task_is_over(stream, UINT64_MAX)
           && (!wait || is_put(wait->of, wait->of_seq));
}

static void put(ms_stream *stream, ms_cuda_deferred *one)
{
    const void *from = one->from ? one->from : bytes_of(one);
    one->launch.arguments = bytes_of(one);
    switch (one->kind) {
    case RUN: ms_cuda_run(stream, &one->launch); break;
    case WAIT: ms_cuda_wait(stream, &one->wait); break;
    case MARK: ms_cuda_mark(stream, one->launch.seq, one->mark); break;
    case COPY_IN: ms_cuda_copy_in(stream, &one->launch, one->to, from, one->bytes); break;
    case COPY_OUT: ms_cuda_copy_out(stream, &one->launch, one->to, from, one->bytes); break;
    case FAIL_IF: ms_cuda_fail_if(stream, &one->launch, from, one->message); break;
    case CALL: ms_cuda_call(stream, &one->launch, &one->call); break;
    }
}

/* Puts what can be put of one stream; whether something was. */
static bool put_first(ms_stream *stream)
{
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    bool any = false;
    for (ms_cuda_deferred *one = queue->deferred; one; one = queue->deferred) {
        if (!is_free(stream, one->kind == WAIT ? &one->wait : NULL)) break;
        queue->deferred = one->next;
        if (!queue->deferred) queue->last_deferred = &queue->deferred;
        ms_cuda_of(stream->engine)->deferred_count--;
        put(stream, one);
        ms_release(&stream->engine->context, one);
        any = true;
    }
    return any;
}

static void put_all(ms_engine *engine)
{
    bool any = ms_cuda_of(engine)->deferred_count > 0;
    while (any) {
        any = false;
        for (uint16_t i = 0; i < engine->stream_count; i++)
            if (engine->streams[i]) any |= put_first(engine->streams[i]);
    }
}

/* Functions of the host may wait for other ranks, which wait for a rank whose GPU has stopped. The
 * failure of the streams ends the job, and so the functions. */
static void sleep_until_one_is_over(ms_stream *stream, uint32_t seen)
{
    ms_spin none = { 0 };
    ms_cuda_device *self = ms_cuda_of(stream->engine);
    ms_bell_wait_for(&self->bell, seen, none, MS_LATER_LOOK_NS);
    ms_cuda_result stopped =
        ms_stream_has_failed(stream) ? MS_CUDA_SUCCESS : ms_cuda_has_stopped(self);
    if (stopped) ms_cuda_stop(stream, NULL, stopped);
}

void ms_cuda_put_until(ms_stream *stream, uint64_t seq)
{
    ms_cuda_device *self = ms_cuda_enter(stream->engine);
    for (;;) {
        uint32_t seen = ms_bell_read(&self->bell);
        put_all(stream->engine);
        if (is_put(stream, seq)) return;
        sleep_until_one_is_over(stream, seen);
    }
}

void ms_cuda_put_rest(ms_stream *stream)
{
    const ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    const ms_cuda_deferred *last = queue->deferred;
    while (last && last->next) last = last->next;
    ms_cuda_put_until(stream, last ? number_of(last) : queue->head);
}

/* ------------------------------------------------------------------------ later */

/* NULL: it is for now. Where there is no memory to keep it, or enough is kept, the host waits. */
static ms_cuda_deferred *keep(ms_stream *stream, uint64_t seq, later_kind kind, const ms_wait *wait,
                              size_t bytes)
{
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    void *memory = NULL;
    put_all(stream->engine);
    if (!queue->deferred && is_free(stream, wait)) return NULL;
    uint64_t captured = queue->deferred ? seq - number_of(queue->deferred) : 0;
    if (captured >= MS_STREAM_DEPTH
        || ms_allocate(&stream->engine->context, sizeof(ms_cuda_deferred) + bytes, "stream",
                       &memory)) {
        ms_cuda_put_until(stream, seq - 1);
        if (wait) ms_cuda_put_until(wait->of->engine->streams[wait->of->index], wait->of_seq);
        return NULL;
    }
    ms_cuda_deferred *one = memory;
    one->kind = kind;
    one->launch.seq = seq;
    *queue->last_deferred = one;
    queue->last_deferred = &one->next;
    ms_cuda_of(stream->engine)->deferred_count++;
    return one;
}

static ms_cuda_deferred *keep_launch(ms_stream *stream, const ms_launch *launch, later_kind kind,
                                     const void *with, size_t bytes)
{
    ms_cuda_deferred *one = keep(stream, launch->seq, kind, NULL, bytes);
    if (!one) return NULL;
    one->launch = *launch;
    one->launch.accesses = NULL;
    one->launch.access_count = 0;
    if (bytes) memcpy(bytes_of(one), with, bytes);
    return one;
}

void ms_cuda_run_in_turn(ms_stream *stream, const ms_launch *launch)
{
    if (!keep_launch(stream, launch, RUN, launch->arguments, launch->task->args_bytes))
        ms_cuda_run(stream, launch);
}

void ms_cuda_wait_in_turn(ms_stream *stream, const ms_wait *wait)
{
    ms_cuda_deferred *one = keep(stream, wait->seq, WAIT, wait, 0);
    if (one) one->wait = *wait;
    else ms_cuda_wait(stream, wait);
}

void ms_cuda_mark_in_turn(ms_stream *stream, uint64_t seq, ms_mark *mark)
{
    ms_cuda_deferred *one = keep(stream, seq, MARK, NULL, 0);
    if (one) one->mark = mark;
    else ms_cuda_mark(stream, seq, mark);
}

void ms_cuda_copy_in_in_turn(ms_stream *stream, const ms_launch *launch, void *to, const void *host,
                             size_t bytes)
{
    bool is_small = bytes <= MS_COPY_INLINE;
    ms_cuda_deferred *one = keep_launch(stream, launch, COPY_IN, host, is_small ? bytes : 0);
    if (!one) {
        ms_cuda_copy_in(stream, launch, to, host, bytes);
        return;
    }
    one->to = to;
    one->from = is_small ? NULL : host;
    one->bytes = bytes;
}

void ms_cuda_copy_out_in_turn(ms_stream *stream, const ms_launch *launch, void *host,
                              const void *from, size_t bytes)
{
    ms_cuda_deferred *one = keep_launch(stream, launch, COPY_OUT, NULL, 0);
    if (!one) {
        ms_cuda_copy_out(stream, launch, host, from, bytes);
        return;
    }
    one->to = host;
    one->from = from;
    one->bytes = bytes;
}

void ms_cuda_fail_if_in_turn(ms_stream *stream, const ms_launch *launch, const float *flag,
                             const char *message)
{
    ms_cuda_deferred *one = keep_launch(stream, launch, FAIL_IF, NULL, 0);
    if (!one) {
        ms_cuda_fail_if(stream, launch, flag, message);
        return;
    }
    one->from = flag;
    one->message = message;
}

void ms_cuda_call_in_turn(ms_stream *stream, const ms_launch *launch, const ms_host_call *call)
{
    ms_cuda_deferred *one = keep_launch(stream, launch, CALL, NULL, 0);
    if (one) one->call = *call;
    else ms_cuda_call(stream, launch, call);
}

/* --------------------------------------------------------------------- questions */

bool ms_cuda_reached_in_turn(const ms_stream *stream, uint64_t seq)
{
    put_all(stream->engine);
    return is_put(stream, seq) && ms_cuda_reached(stream, seq);
}

void ms_cuda_await_in_turn(ms_stream *stream, uint64_t seq)
{
    if (!is_put(stream, seq)) ms_cuda_put_until(stream, seq);
    ms_cuda_await(stream, seq);
}
