/* host_task.c: functions of the host that may wait, in the order of a stream, and what the same
 * task does after them.
 *
 * A driver may keep a thread in a call that takes or gives memory, or that loads a kernel, until
 * all work of the context has ended. If the GPU waited for a function of the host, which waits for
 * another rank, that thread could be the one that the other rank waits for, and all would stop. So
 * a thread of the stream waits in place of the GPU: it waits for what the stream has, calls the
 * function, and then puts the rest of the task on the stream.
 *
 * Invariants
 * - A stream has one host task at a time. Its steps are the host's until ms_cuda_host_task_go, the
 *   thread's until `begun` is 0 again, and the host's after that.
 * - While the host task is out, the host puts nothing on the stream. It can ask for numbers before
 * the host task, for which there is a point (ms_cuda_cover).
 * - The host learns that the GPU has stopped when it finds the host task over; the thread reports
 * all other errors itself, since other ranks wait meanwhile. */
#include "exec/cuda/host_task.h"

#include <stdalign.h>
#include <string.h>

#include "base/thread.h"
#include "exec/cuda/errors.h"
#include "exec/cuda/fatal.h"
#include "exec/stream.h"

#define MS_HOST_TASK_STEPS 8

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

struct ms_cuda_host_tasks {
    ms_stream *stream;
    ms_os_thread *thread;
    ms_bell bell; /* rings when one of the words becomes 1 */
    ms_word begun, quit;
    bool is_open, is_out; /* of the host: steps are added; it has not joined yet */
    uint64_t seq;
    const char *name;
    uint32_t script, count;
    step steps[MS_HOST_TASK_STEPS];
    uint64_t after[MS_STREAMS_MAX]; /* the last number of each stream that this one waits for */
    void (*finally)(void *user);    /* NULL: there is nothing to do */
    void *user;
    ms_cuda_result stopped; /* the error of a GPU that has stopped */
};

/* ------------------------------------------------------------------- the thread */

/* The host learns of it later (ms_cuda_completion.of), and other ranks must not get what has
 * failed. */
static void fail_after_others(const ms_cuda_host_tasks *host_tasks)
{
    ms_engine *engine = host_tasks->stream->engine;
    for (uint16_t i = 0; i < MS_STREAMS_MAX; i++)
        if (host_tasks->after[i])
            ms_cuda_fail_after(host_tasks->stream, host_tasks->seq, engine->streams[i],
                               host_tasks->after[i]);
}

/* What the GPU has found by then is known: a stream that has failed calls no function. */
static ms_cuda_result call(const ms_cuda_host_tasks *host_tasks, const step *now)
{
    char message[sizeof((ms_error *)0)->message] = "";
    ms_stream *stream = host_tasks->stream;
    ms_cuda_result result =
        ms_cuda_of(stream->engine)->cuda.stream_synchronize(ms_cuda_queue_of(stream)->stream);
    if (!result) fail_after_others(host_tasks);
    if (result || ms_stream_has_failed(stream)) return result;
    ms_status status = now->function(now->user, message, sizeof message);
    if (status)
        ms_cuda_fail_named(stream, host_tasks->seq, host_tasks->script, host_tasks->name, status,
                           message);
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

static ms_cuda_result carry_out(const ms_cuda_host_tasks *host_tasks, step *now)
{
    const ms_cuda *cuda = &ms_cuda_of(host_tasks->stream->engine)->cuda;
    ms_cuda_stream on = ms_cuda_queue_of(host_tasks->stream)->stream;
    switch (now->kind) {
    case CALL: return call(host_tasks, now);
    case LAUNCH: return launch(cuda, on, now);
    case COPY_IN:
        return cuda->copy_in((ms_cuda_address)(uintptr_t)now->to, now->from, now->bytes, on);
    case COPY_OUT:
        return cuda->copy_out(now->to, (ms_cuda_address)(uintptr_t)now->from, now->bytes, on);
    case RECORD: break;
    }
    return cuda->event_record(now->event, on);
}

static void run(ms_cuda_host_tasks *host_tasks)
{
    ms_cuda_result result = MS_CUDA_SUCCESS;
    const ms_cuda_device *self = ms_cuda_of(host_tasks->stream->engine);
    for (uint32_t i = 0; i < host_tasks->count && !result; i++)
        if (host_tasks->steps[i].kind == RECORD || !ms_stream_has_failed(host_tasks->stream))
            result = carry_out(host_tasks, &host_tasks->steps[i]);
    /* A failure may have come after a launch: the kernel is over when `finally` is called. */
    if (ms_stream_has_failed(host_tasks->stream))
        (void)self->cuda.stream_synchronize(ms_cuda_queue_of(host_tasks->stream)->stream);
    if (result) host_tasks->stopped = ms_cuda_has_stopped(self);
    if (result && !host_tasks->stopped)
        ms_cuda_fail_result(host_tasks->stream, host_tasks->seq, host_tasks->script,
                            host_tasks->name, result);
    if (host_tasks->finally) host_tasks->finally(host_tasks->user);
}

static void run_host_tasks(void *argument)
{
    ms_cuda_host_tasks *host_tasks = argument;
    ms_spin none = { 0 };
    ms_thread_flush_denormals(); /* as the threads of the CPU device, for the same bits */
    (void)ms_cuda_enter(host_tasks->stream->engine);
    for (;;) {
        uint32_t seen = ms_bell_read(&host_tasks->bell);
        if (atomic_load(&host_tasks->begun)) {
            run(host_tasks);
            atomic_store(&host_tasks->begun, 0);
            ms_bell_ring(&ms_cuda_of(host_tasks->stream->engine)->bell);
        } else if (atomic_load(&host_tasks->quit)) return;
        else ms_bell_wait(&host_tasks->bell, seen, none);
    }
}

/* ---------------------------------------------------------------- writing it down */

static ms_cuda_result open_host_tasks(ms_stream *stream)
{
    ms_context *context = &stream->engine->context;
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    void *memory = NULL;
    if (queue->host_tasks) return MS_CUDA_SUCCESS;
    if (ms_allocate(context, sizeof(ms_cuda_host_tasks), "stream", &memory))
        return MS_CUDA_OUT_OF_MEMORY;
    ms_cuda_host_tasks *host_tasks = memory;
    host_tasks->stream = stream;
    if (context->os->thread_start(context->os->user, "host tasks", run_host_tasks, host_tasks,
                                  &host_tasks->thread)) {
        ms_release(context, host_tasks);
        return MS_CUDA_OUT_OF_MEMORY;
    }
    queue->host_tasks = host_tasks;
    return MS_CUDA_SUCCESS;
}

static step *add(ms_cuda_queue *queue, step_kind kind)
{
    ms_cuda_host_tasks *host_tasks = queue->host_tasks;
    MS_ASSERT(host_tasks->is_open && host_tasks->count < MS_HOST_TASK_STEPS);
    step *added = &host_tasks->steps[host_tasks->count++];
    added->kind = kind;
    return added;
}

ms_cuda_result ms_cuda_host_task_call(ms_stream *stream, const ms_launch *what,
                                      ms_host_function function, void *user)
{
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    ms_cuda_result result = open_host_tasks(stream);
    if (result) return result;
    ms_cuda_host_tasks *host_tasks = queue->host_tasks;
    MS_ASSERT(!host_tasks->is_out);
    if (!host_tasks->is_open) {
        host_tasks->is_open = true;
        host_tasks->seq = what->seq;
        host_tasks->name = what->name;
        host_tasks->script = what->script;
        host_tasks->count = 0;
        host_tasks->finally = NULL;
    }
    step *added = add(queue, CALL);
    added->function = function;
    added->user = user;
    return MS_CUDA_SUCCESS;
}

bool ms_cuda_host_task_is_open(const ms_cuda_queue *queue)
{
    return queue->host_tasks && queue->host_tasks->is_open;
}

void ms_cuda_host_task_launch(ms_cuda_queue *queue, const ms_cuda_kernel_call *kernel,
                              const void *arguments, size_t bytes)
{
    step *added = add(queue, LAUNCH);
    added->kernel = *kernel;
    if (bytes) memcpy(added->arguments, arguments, bytes);
}

void ms_cuda_host_task_copy(ms_cuda_queue *queue, void *to, const void *from, size_t bytes,
                            bool to_gpu)
{
    step *added = add(queue, to_gpu ? COPY_IN : COPY_OUT);
    added->to = to;
    added->from = from;
    added->bytes = bytes;
}

void ms_cuda_host_task_record(ms_cuda_queue *queue, ms_cuda_event event)
{
    add(queue, RECORD)->event = event;
}

void ms_cuda_host_task_finally(ms_cuda_queue *queue, void (*function)(void *user), void *user)
{
    queue->host_tasks->finally = function;
    queue->host_tasks->user = user;
}

/* --------------------------------------------------------------- out, and back */

void ms_cuda_host_task_go(ms_stream *stream)
{
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    ms_cuda_host_tasks *host_tasks = queue->host_tasks;
    if (!ms_cuda_host_task_is_open(queue)) return;
    host_tasks->is_open = false;
    if (ms_stream_has_failed(stream)) {
        run(host_tasks); /* which calls no function */
        return;
    }
    memcpy(host_tasks->after, stream->clock, sizeof host_tasks->after);
    host_tasks->after[stream->index] = 0;
    host_tasks->is_out = true;
    atomic_store(&host_tasks->begun, 1);
    ms_bell_ring(&host_tasks->bell);
}

bool ms_cuda_host_task_is_over(ms_stream *stream, uint64_t seq)
{
    ms_cuda_host_tasks *host_tasks = ms_cuda_queue_of(stream)->host_tasks;
    if (!host_tasks || !host_tasks->is_out || seq < host_tasks->seq) return true;
    if (atomic_load(&host_tasks->begun)) return false;
    host_tasks->is_out = false;
    ms_cuda_result stopped = host_tasks->stopped;
    host_tasks->stopped = MS_CUDA_SUCCESS;
    ms_launch last = { .seq = host_tasks->seq,
                       .name = host_tasks->name,
                       .script = host_tasks->script };
    if (stopped) ms_cuda_stop(stream, &last, stopped);
    return true;
}

void ms_cuda_join(ms_stream *stream)
{
    ms_bell *bell = &ms_cuda_of(stream->engine)->bell;
    ms_spin none = { 0 };
    for (;;) {
        uint32_t seen = ms_bell_read(bell);
        if (ms_cuda_host_task_is_over(stream, UINT64_MAX)) return;
        ms_bell_wait(bell, seen, none);
    }
}

void ms_cuda_host_tasks_close(ms_stream *stream, ms_cuda_queue *queue)
{
    const ms_os *os = stream->engine->context.os;
    ms_cuda_host_tasks *host_tasks = queue->host_tasks;
    if (!host_tasks) return;
    atomic_store(&host_tasks->quit, 1);
    ms_bell_ring(&host_tasks->bell);
    os->thread_join(os->user, host_tasks->thread);
    ms_release(&stream->engine->context, host_tasks);
}
