/* fatal.c: a GPU that has stopped, and which of its tasks may be the cause.
 *
 * After an error in a kernel every call of the driver answers with that error, and no event tells
 * any more what was done before it. So the cause is one of the tasks that were not known to be
 * done. Their names and script lines are kept for each stream when they are enqueued. The error
 * names the task if there is only one; otherwise it names the first and the last of each stream.
 * With CUDA_LAUNCH_BLOCKING=1 the host waits after each task, so that there is only one. Engines of
 * one process share the driver's context: each finds the error, whoever is the cause. */
#include "exec/cuda/fatal.h"

#include <stdio.h>
#include <string.h>

#include "exec/cuda/errors.h"
#include "exec/stream.h"

/* An event that was passed when the device opened answers with the error of a GPU that has
 * stopped, and with success on one that goes on. */
ms_cuda_result ms_cuda_has_stopped(const ms_cuda_device *self)
{
    return self->cuda.event_query(self->began);
}

void ms_cuda_remember(ms_stream *stream, const ms_launch *launch)
{
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    queue->past[launch->seq % MS_CUDA_PAST] =
        (ms_cuda_past){ .seq = launch->seq, .name = launch->name, .script = launch->script };
}

static const ms_cuda_past *past_of(const ms_cuda_queue *queue, uint64_t seq)
{
    const ms_cuda_past *past = &queue->past[seq % MS_CUDA_PAST];
    return past->seq == seq ? past : NULL;
}

/* The tasks of one stream that may be the cause. */
typedef struct suspects {
    const ms_cuda_past *first, *last;
    uint32_t count;
} suspects;

static suspects suspects_of(const ms_stream *stream)
{
    const ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    suspects s = { .count = 0 };
    for (uint64_t seq = queue->done + 1; seq <= ms_cuda_given(queue); seq++) {
        const ms_cuda_past *past = past_of(queue, seq);
        if (!past) continue;
        if (!s.first) s.first = past;
        s.last = past;
        s.count++;
    }
    return s;
}

/* Text that is cut where the message ends. */
static void add(ms_error *error, const char *format, ...) MS_PRINTF(2, 3);
static void add(ms_error *error, const char *format, ...)
{
    size_t used = strlen(error->message);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->message + used, sizeof error->message - used, format, arguments);
    va_end(arguments);
}

static void add_task(ms_error *error, const ms_engine *engine, const ms_cuda_past *task)
{
    const char *line = ms_strings_get(engine->strings, task->script);
    add(error, "%s", task->name);
    if (*line) add(error, " (%s)", line);
}

static void add_suspects(ms_error *error, const ms_stream *stream, const suspects *s)
{
    if (s->count == 0) return;
    add(error, "; %u of stream \"%s\", ", s->count, ms_stream_name(stream));
    add_task(error, stream->engine, s->first);
    if (s->count == 1) return;
    add(error, " to ");
    add_task(error, stream->engine, s->last);
}

/* One task is the cause. */
static void blame(ms_error *error, const char *why, const char *task, const ms_stream *stream)
{
    add(error, "the GPU has stopped: %s: in task %s of stream \"%s\"", why, task,
        ms_stream_name(stream));
    snprintf(error->operation, sizeof error->operation, "%s", task);
}

/* Of all streams. Returns the script line of the cause where it is known, 0 where it is not. */
static uint32_t describe(ms_engine *engine, const char *why, ms_error *error)
{
    suspects s, only = { .count = 0 };
    const ms_stream *stream = NULL; /* of `only` */
    uint32_t count = 0;
    for (uint16_t i = 0; i < engine->stream_count; i++) {
        s = suspects_of(engine->streams[i]);
        if (s.count > 0) {
            only = s;
            stream = engine->streams[i];
        }
        count += s.count;
    }
    uint32_t others = engine->companions; /* each finds the error, whoever is the cause */
    if (count == 1 && others == 0) {
        blame(error, why, only.first->name, stream);
        return only.first->script;
    }
    add(error, "the GPU has stopped: %s", why);
    if (others > 0)
        add(error,
            ": in a task of one of the %u ranks or engines that use it in this process (as "
            "processes, and with " MS_CUDA_BLOCKING "=1 in the environment, the error names it); "
            "here %u tasks were under way",
            others + 1, count);
    else if (count > 0)
        add(error,
            ": in one of the %u tasks that were under way (" MS_CUDA_BLOCKING "=1 in the "
            "environment makes the error name it)",
            count);
    for (uint16_t i = 0; i < engine->stream_count; i++) {
        s = suspects_of(engine->streams[i]);
        add_suspects(error, engine->streams[i], &s);
    }
    return 0;
}

/* The stream that found it has the cause; the others have failed because of it. */
void ms_cuda_stop(ms_stream *stream, const ms_launch *launch, ms_cuda_result result)
{
    char why[256];
    ms_engine *engine = stream->engine;
    const ms_cuda_device *self = ms_cuda_of(engine);
    ms_error error = { .status = MS_ERROR_TASK, .rank = -1, .bucket = -1, .collective = -1 };
    uint64_t seq = ms_cuda_queue_of(stream)->done + 1;
    uint32_t script = 0;
    if (ms_stream_has_failed(stream)) return;
    ms_cuda_explain(&self->cuda, result, why, sizeof why);
    if (self->blocks && launch && engine->companions == 0) {
        blame(&error, why, launch->name, stream);
        seq = launch->seq;
        script = launch->script;
    } else script = describe(engine, why, &error);
    ms_cuda_fail_with(stream, seq, script, &error);
    error.status = MS_ERROR_ABORTED;
    for (uint16_t i = 0; i < engine->stream_count; i++) {
        ms_stream *other = engine->streams[i];
        ms_cuda_fail_with(other, ms_cuda_queue_of(other)->done + 1, script, &error);
    }
}

/* A call that finds a GPU which has stopped is not the cause. */
void ms_cuda_check(ms_stream *stream, const ms_launch *launch, ms_cuda_result result)
{
    const ms_cuda_device *self = ms_cuda_of(stream->engine);
    ms_cuda_result stopped = result ? ms_cuda_has_stopped(self) : MS_CUDA_SUCCESS;
    if (stopped) ms_cuda_stop(stream, launch, stopped);
    else if (result) ms_cuda_fail_result(stream, launch->seq, launch->script, launch->name, result);
}

void ms_cuda_block(ms_stream *stream, const ms_launch *launch)
{
    const ms_cuda_device *self = ms_cuda_of(stream->engine);
    if (!self->blocks || ms_stream_has_failed(stream)) return;
    ms_cuda_result result = self->cuda.stream_synchronize(ms_cuda_queue_of(stream)->stream);
    if (result) ms_cuda_stop(stream, launch, result);
}
