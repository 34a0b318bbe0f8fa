/* errors.c: what every file of the cuda device begins and ends with: the context, and errors.
 *
 * A launch that fails, or an event that reports an error, makes its stream fail (ms_stream_fail),
 * from any thread. The core then refuses new work and reports the first cause. Kernels that the
 * driver has queued before still run. The core treats their results as never written, so no task
 * or script can read them. */
#include "exec/cuda/errors.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "exec/stream.h"

ms_cuda_device *ms_cuda_enter(const ms_engine *engine)
{
    ms_cuda_device *self = ms_cuda_of(engine);
    (void)self->cuda.context_set(self->context);
    return self;
}

ms_status ms_cuda_fail(ms_engine *engine, ms_cuda_result result, const char *what)
{
    char text[256];
    return ms_engine_fail(engine, result == MS_CUDA_OUT_OF_MEMORY ? MS_ERROR_MEMORY : MS_ERROR_IO,
                          "%s: %s", what,
                          ms_cuda_explain(&ms_cuda_of(engine)->cuda, result, text, sizeof text));
}

/* One thread at a time reports for a stream: the host's, or one of the driver. */
static void begin_failing(ms_cuda_device *self)
{
    while (atomic_flag_test_and_set_explicit(&self->failing, memory_order_acquire)) {}
}
static void end_failing(ms_cuda_device *self)
{
    atomic_flag_clear_explicit(&self->failing, memory_order_release);
}

void ms_cuda_fail_with(ms_stream *stream, uint64_t seq, uint32_t script, const ms_error *error)
{
    ms_cuda_device *self = ms_cuda_of(stream->engine);
    begin_failing(self);
    ms_stream_fail(stream, seq, error, script);
    end_failing(self);
}

void ms_cuda_fail_stream(ms_stream *stream, uint64_t seq, uint32_t script, ms_status status,
                         const char *format, ...)
{
    /* -1 represents "does not apply". */
    ms_error error = { .status = status, .rank = -1, .bucket = -1, .collective = -1 };
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error.message, sizeof error.message, format, arguments);
    va_end(arguments);
    ms_cuda_fail_with(stream, seq, script, &error);
}

void ms_cuda_fail_result(ms_stream *stream, uint64_t seq, uint32_t script, const char *name,
                         ms_cuda_result result)
{
    char text[256];
    ms_cuda_fail_stream(
        stream, seq, script, result == MS_CUDA_OUT_OF_MEMORY ? MS_ERROR_MEMORY : MS_ERROR_TASK,
        "%s: %s, in stream \"%s\"", name,
        ms_cuda_explain(&ms_cuda_of(stream->engine)->cuda, result, text, sizeof text),
        ms_stream_name(stream));
}

void ms_cuda_fail_named(ms_stream *stream, uint64_t seq, uint32_t script, const char *name,
                        ms_status status, const char *message)
{
    ms_error error = { .status = status, .rank = -1, .bucket = -1, .collective = -1 };
    snprintf(error.message, sizeof error.message, "%s", message);
    snprintf(error.operation, sizeof error.operation, "%s", name);
    ms_cuda_fail_with(stream, seq, script, &error);
}

void ms_cuda_fail_after(ms_stream *stream, uint64_t seq, const ms_stream *of, uint64_t of_seq)
{
    ms_cuda_device *self = ms_cuda_of(stream->engine);
    begin_failing(self);
    ms_stream_fail_after(stream, seq, of, of_seq);
    end_failing(self);
}
