/* host_task.c: functions of the host that may wait, in the order of a stream, and what the same
 * task does after them.
 *
 * A driver may keep a thread in a call that takes or gives memory, or that loads a kernel, until
 * all work of the context has ended. If the GPU waited for a function of the host, which waits for
 * another rank, that thread could be the one that the other rank waits for, and all would stand
 * still. So a thread of the stream waits in place of the GPU: it waits for what the stream has,
 * calls the function, and then puts the rest of the task on the stream.
 *
 * Invariants
 * - A stream has one errand at a time. Its steps are the host's until ms_cuda_errand_go, the
 *   thread's until `begun` is 0 again, and the host's after that.
 * - While the errand is out, the host puts nothing on the stream. It can ask for numbers before the
 *   errand, for which there is a point (ms_cuda_cover).
 * - The host learns that the GPU has stopped when it finds the errand over; the thread reports all
 *   other errors itself, since other ranks wait meanwhile. */
#include "exec/cuda/host_task.h"

#include <stdalign.h>
#include <string.h>

#include "base/thread.h"
#include "exec/cuda/errors.h"
#include "exec/cuda/fatal.h"
#include "exec/stream.h"

#define MS_ERRAND_STEPS 8

typedef enum step_kind { CALL, LAUNCH, COPY_IN, COPY_OUT, RECORD } step_kind;
typedef struct step {
    step_kind kind;
    ms_host_function function;
    void *user;
    ms_cuda_kernel_call kernel;
    void *to;
    const void *from;
    size_t bytes;
    ms_cuda_event event;
    alignas(16) unsigned char arguments[MS_TASK_ARGS_MAX]; /* of the kernel */
} step;

struct ms_cuda_errands {
    ms_stream *stream;
    ms_os_thread *thread;
    ms_bell bell; /* rings when one of the words becomes 1 */
    ms_word begun, quit;
    bool is_open, is_out; /* of the host: steps are added; it has not joined yet */
    uint64_t seq;
    const char *name;
    uint32_t script, count;
    step steps[MS_ERRAND_STEPS];
    uint64_t after[MS_STREAMS_MAX]; /* the last number of each stream that this one waits for */
    void (*finally)(void *user);    /* NULL: there is nothing to do */
    void *user;
    ms_cuda_result stopped; /* the error of a GPU that has stopped */
};

/* ------------------------------------------------------------------- the thread */

/* The host learns of it later (ms_cuda_duty.of), and other ranks must not get what has failed. */
static void fail_after_others(const ms_cuda_errands *errands)
{
    ms_engine *engine = errands->stream->engine;
    for (uint16_t i = 0; i < MS_STREAMS_MAX; i++)
        if (errands->after[i])
            ms_cuda_fail_after(errands->stream, errands->seq, engine->streams[i],
                               errands->after[i]);
}

/* What the GPU has found by then is known: a stream that has failed calls no function. */
static ms_cuda_result call(const ms_cuda_errands *errands, const step *now)
{
    char message[sizeof((ms_error *)0)->message] = "";
    ms_stream *stream = errands->stream;
    ms_cuda_result result =
        ms_cuda_of(stream->engine)->cuda.stream_synchronize(ms_cuda_queue_of(stream)->stream);
    if (!result) fail_after_others(errands);
    if (result || ms_stream_has_failed(stream)) return result;
    ms_status status = now->function(now->user, message, sizeof message);
    if (status)
        ms_cuda_fail_named(stream, errands->seq, errands->script, errands->name, status, message);
    return MS_CUDA_SUCCESS;
}

static ms_cuda_result launch(const ms_cuda *cuda, ms_cuda_stream on, step *now)
{
    void *parameters[] = { now->arguments };
    const ms_cuda_kernel_call *kernel = &now->kernel;
    return cuda->launch(kernel->function, kernel->grid[0], kernel->grid[1], kernel->grid[2],
                        kernel->block[0], kernel->block[1], kernel->block[2], kernel->shared_bytes,
                        on, parameters, NULL);
}

static ms_cuda_result carry_out(const ms_cuda_errands *errands, step *now)
{
    const ms_cuda *cuda = &ms_cuda_of(errands->stream->engine)->cuda;
    ms_cuda_stream on = ms_cuda_queue_of(errands->stream)->stream;
    switch (now->kind) {
    case CALL: return call(errands, now);
    case LAUNCH: return launch(cuda, on, now);
    case COPY_IN:
        return cuda->copy_in((ms_cuda_address)(uintptr_t)now->to, now->from, now->bytes, on);
    case COPY_OUT:
        return cuda->copy_out(now->to, (ms_cuda_address)(uintptr_t)now->from, now->bytes, on);
    case RECORD: break;
    }
    return cuda->event_record(now->event, on);
}

static void run(ms_cuda_errands *errands)
{
    ms_cuda_result result = MS_CUDA_SUCCESS;
    const ms_cuda_device *self = ms_cuda_of(errands->stream->engine);
    for (uint32_t i = 0; i < errands->count && !result; i++)
        if (errands->steps[i].kind == RECORD || !ms_stream_has_failed(errands->stream))
            result = carry_out(errands, &errands->steps[i]);
    /* A failure may have come after a launch: the kernel is over when `finally` is called. */
    if (ms_stream_has_failed(errands->stream))
        (void)self->cuda.stream_synchronize(ms_cuda_queue_of(errands->stream)->stream);
    if (result) errands->stopped = ms_cuda_has_stopped(self);
    if (result && !errands->stopped)
        ms_cuda_fail_result(errands->stream, errands->seq, errands->script, errands->name, result);
    if (errands->finally) errands->finally(errands->user);
}

static void run_errands(void *argument)
{
    ms_cuda_errands *errands = argument;
    ms_spin none = { 0 };
    ms_thread_flush_denormals(); /* as the threads of the CPU device, for the same bits */
    (void)ms_cuda_enter(errands->stream->engine);
    for (;;) {
        uint32_t seen = ms_bell_read(&errands->bell);
        if (atomic_load(&errands->begun)) {
            run(errands);
            atomic_store(&errands->begun, 0);
            ms_bell_ring(&ms_cuda_of(errands->stream->engine)->bell);
        } else if (atomic_load(&errands->quit)) return;
        else ms_bell_wait(&errands->bell, seen, none);
    }
}

/* ---------------------------------------------------------------- writing it down */

static ms_cuda_result open_errands(ms_stream *stream)
{
    ms_context *context = &stream->engine->context;
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    void *memory = NULL;
    if (queue->errands) return MS_CUDA_SUCCESS;
    if (ms_allocate(context, sizeof(ms_cuda_errands), "stream", &memory))
        return MS_CUDA_OUT_OF_MEMORY;
    ms_cuda_errands *errands = memory;
    errands->stream = stream;
    if (context->os->thread_start(context->os->user, "errands", run_errands, errands,
                                  &errands->thread)) {
        ms_release(context, errands);
        return MS_CUDA_OUT_OF_MEMORY;
    }
    queue->errands = errands;
    return MS_CUDA_SUCCESS;
}

static step *add(ms_cuda_queue *queue, step_kind kind)
{
    ms_cuda_errands *errands = queue->errands;
    MS_ASSERT(errands->is_open && errands->count < MS_ERRAND_STEPS);
    step *added = &errands->steps[errands->count++];
    added->kind = kind;
    return added;
}

ms_cuda_result ms_cuda_errand_call(ms_stream *stream, const ms_launch *what,
                                   ms_host_function function, void *user)
{
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    ms_cuda_result result = open_errands(stream);
    if (result) return result;
    ms_cuda_errands *errands = queue->errands;
    MS_ASSERT(!errands->is_out);
    if (!errands->is_open) {
        errands->is_open = true;
        errands->seq = what->seq;
        errands->name = what->name;
        errands->script = what->script;
        errands->count = 0;
        errands->finally = NULL;
    }
    step *added = add(queue, CALL);
    added->function = function;
    added->user = user;
    return MS_CUDA_SUCCESS;
}

bool ms_cuda_errand_is_open(const ms_cuda_queue *queue)
{
    return queue->errands && queue->errands->is_open;
}

void ms_cuda_errand_launch(ms_cuda_queue *queue, const ms_cuda_kernel_call *kernel,
                           const void *arguments, size_t bytes)
{
    step *added = add(queue, LAUNCH);
    added->kernel = *kernel;
    if (bytes) memcpy(added->arguments, arguments, bytes);
}

void ms_cuda_errand_copy(ms_cuda_queue *queue, void *to, const void *from, size_t bytes,
                         bool to_gpu)
{
    step *added = add(queue, to_gpu ? COPY_IN : COPY_OUT);
    added->to = to;
    added->from = from;
    added->bytes = bytes;
}

void ms_cuda_errand_record(ms_cuda_queue *queue, ms_cuda_event event)
{
    add(queue, RECORD)->event = event;
}

void ms_cuda_errand_finally(ms_cuda_queue *queue, void (*function)(void *user), void *user)
{
    queue->errands->finally = function;
    queue->errands->user = user;
}

/* --------------------------------------------------------------- out, and back */

void ms_cuda_errand_go(ms_stream *stream)
{
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    ms_cuda_errands *errands = queue->errands;
    if (!ms_cuda_errand_is_open(queue)) return;
    errands->is_open = false;
    if (ms_stream_has_failed(stream)) {
        run(errands); /* which calls no function */
        return;
    }
    memcpy(errands->after, stream->clock, sizeof errands->after);
    errands->after[stream->index] = 0;
    errands->is_out = true;
    atomic_store(&errands->begun, 1);
    ms_bell_ring(&errands->bell);
}

bool ms_cuda_errand_is_over(ms_stream *stream, uint64_t seq)
{
    ms_cuda_errands *errands = ms_cuda_queue_of(stream)->errands;
    if (!errands || !errands->is_out || seq < errands->seq) return true;
    if (atomic_load(&errands->begun)) return false;
    errands->is_out = false;
    ms_cuda_result stopped = errands->stopped;
    errands->stopped = MS_CUDA_SUCCESS;
    ms_launch last = { .seq = errands->seq, .name = errands->name, .script = errands->script };
    if (stopped) ms_cuda_stop(stream, &last, stopped);
    return true;
}

void ms_cuda_join(ms_stream *stream)
{
    ms_bell *bell = &ms_cuda_of(stream->engine)->bell;
    ms_spin none = { 0 };
    for (;;) {
        uint32_t seen = ms_bell_read(bell);
        if (ms_cuda_errand_is_over(stream, UINT64_MAX)) return;
        ms_bell_wait(bell, seen, none);
    }
}

void ms_cuda_errands_close(ms_stream *stream, ms_cuda_queue *queue)
{
    const ms_os *os = stream->engine->context.os;
    ms_cuda_errands *errands = queue->errands;
    if (!errands) return;
    atomic_store(&errands->quit, 1);
    ms_bell_ring(&errands->bell);
    os->thread_join(os->user, errands->thread);
    ms_release(&stream->engine->context, errands);
}
