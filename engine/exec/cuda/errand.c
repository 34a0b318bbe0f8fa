/* errand.c: functions of the host that may wait, in the order of a stream.
 *
 * A driver may run all functions of the host on one thread, whatever their streams. One that waited
 * there for another rank would hold up those of all other streams, and ranks could wait for each
 * other for ever. So each stream that has such functions has a thread for them. The driver only
 * tells that thread to begin, and the stream waits for a word of pinned memory, which the thread
 * sets at the end. */
#include "base/thread.h"
#include "exec/cuda/cuda.h"

struct ms_cuda_errands {
    const ms_os *os;
    ms_os_thread *thread;
    ms_bell bell;                  /* rings for each change of what follows */
    _Atomic(ms_cuda_duty *) begun; /* the function that runs; NULL: none */
    ms_word quit;
    ms_word *ended; /* pinned: how many functions have ended; the stream waits for it */
    uint32_t asked; /* host thread: how many were put on the stream */
};

/* The duty may be gone once the word is set. */
static void carry_out(ms_cuda_errands *errands, const ms_cuda_duty *duty)
{
    char message[sizeof((ms_error *)0)->message] = "";
    ms_status status = ms_stream_has_failed(duty->stream)
                           ? MS_OK
                           : duty->call.function(duty->call.user, message, sizeof message);
    if (status) ms_cuda_fail_duty(duty, status, message);
    atomic_store(&errands->begun, NULL);
    atomic_fetch_add(errands->ended, 1);
    ms_bell_ring(&errands->bell);
}

static void run_errands(void *argument)
{
    ms_cuda_errands *errands = argument;
    ms_spin none = { 0 };
    ms_thread_flush_denormals(); /* as the threads of the CPU device, for the same bits */
    for (;;) {
        uint32_t seen = ms_bell_read(&errands->bell);
        const ms_cuda_duty *duty = atomic_load(&errands->begun);
        if (duty) carry_out(errands, duty);
        else if (atomic_load(&errands->quit)) return;
        else ms_bell_wait(&errands->bell, seen, none);
    }
}

/* On a thread of the driver. A stream has one function at a time under way. */
static void begin_errand(void *argument)
{
    ms_cuda_duty *duty = argument;
    ms_cuda_errands *errands = ms_cuda_queue_of(duty->stream)->errands;
    atomic_store(&errands->begun, duty);
    ms_bell_ring(&errands->bell);
}

static void end_thread(ms_cuda_errands *errands)
{
    atomic_store(&errands->quit, 1);
    ms_bell_ring(&errands->bell);
    errands->os->thread_join(errands->os->user, errands->thread);
}

/* The wait shows whether the GPU can wait for a word, before a function depends on it. */
static ms_cuda_result open_word(const ms_cuda_device *self, ms_cuda_stream on, ms_word **out)
{
    void *memory = NULL;
    ms_cuda_result result = self->cuda.host_allocate(&memory, sizeof(ms_word), 0);
    if (result) return result;
    atomic_init((ms_word *)memory, 0);
    result =
        self->cuda.wait_value(on, (ms_cuda_address)(uintptr_t)memory, 0, MS_CUDA_WAIT_AT_LEAST);
    if (result) (void)self->cuda.host_release(memory);
    else *out = memory;
    return result;
}

static ms_cuda_result open_errands(ms_stream *stream)
{
    ms_context *context = &stream->engine->context;
    const ms_cuda_device *self = ms_cuda_of(stream->engine);
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    void *memory = NULL;
    if (queue->errands) return MS_CUDA_SUCCESS;
    if (ms_allocate(context, sizeof(ms_cuda_errands), "stream", &memory))
        return MS_CUDA_OUT_OF_MEMORY;
    ms_cuda_errands *errands = memory;
    errands->os = context->os;
    if (errands->os->thread_start(errands->os->user, "errands", run_errands, errands,
                                  &errands->thread)) {
        ms_release(context, errands);
        return MS_CUDA_OUT_OF_MEMORY;
    }
    ms_cuda_result result = open_word(self, queue->stream, &errands->ended);
    if (!result) {
        queue->errands = errands;
        return result;
    }
    end_thread(errands);
    ms_release(context, errands);
    return result;
}

ms_cuda_result ms_cuda_errand(ms_stream *stream, ms_cuda_duty *duty)
{
    const ms_cuda_device *self = ms_cuda_of(stream->engine);
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    ms_cuda_result result = open_errands(stream);
    if (!result) result = self->cuda.launch_host(queue->stream, begin_errand, duty);
    if (result) return result;
    return self->cuda.wait_value(queue->stream, (ms_cuda_address)(uintptr_t)queue->errands->ended,
                                 ++queue->errands->asked, MS_CUDA_WAIT_AT_LEAST);
}

void ms_cuda_errands_settle(ms_cuda_queue *queue)
{
    ms_cuda_errands *errands = queue->errands;
    ms_spin none = { 0 };
    while (errands) {
        uint32_t seen = ms_bell_read(&errands->bell);
        if (!atomic_load(&errands->begun)) return;
        ms_bell_wait(&errands->bell, seen, none);
    }
}

void ms_cuda_errands_close(ms_stream *stream, ms_cuda_queue *queue)
{
    ms_cuda_errands *errands = queue->errands;
    if (!errands) return;
    end_thread(errands);
    (void)ms_cuda_of(stream->engine)->cuda.host_release(errands->ended);
    ms_release(&stream->engine->context, errands);
}
