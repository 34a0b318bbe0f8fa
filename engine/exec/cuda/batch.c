/* batch.c: tasks of one kind that come one after another and are carried out as one
 * (ms_engine_batch).
 *
 * A task that may be put off is kept with its number, which counts as enqueued. Whatever else goes
 * onto the stream, or asks how far it is, comes after what is kept: it is put onto the stream
 * first. So order and points are those of a stream that keeps nothing. */
#include "exec/cuda/batch.h"

#include <string.h>

#include "exec/cuda/completion.h"
#include "exec/cuda/errors.h"
#include "exec/stream.h"

/* What a stream keeps. */
struct ms_cuda_together {
    uint32_t count;
    ms_launch launches[MS_CUDA_BATCH];
    unsigned char arguments[MS_CUDA_BATCH][MS_TASK_ARGS_MAX];
};

static const ms_cuda_task *task_of(const ms_launch *launch)
{
    return (const ms_cuda_task *)(const void *)launch->task;
}

/* The arguments of all that is kept, in order. */
static void list(const struct ms_cuda_together *kept, const void *arguments[MS_CUDA_BATCH])
{
    for (uint32_t i = 0; i < kept->count; i++) arguments[i] = kept->launches[i].arguments;
}

static bool fits(const struct ms_cuda_together *kept, const ms_launch *launch)
{
    const void *arguments[MS_CUDA_BATCH];
    if (kept->count == 0) return true;
    if (kept->count == MS_CUDA_BATCH) return false;
    const ms_cuda_task *task = task_of(launch), *first = task_of(&kept->launches[0]);
    list(kept, arguments);
    return task->together == first->together
           && task->joins(arguments, kept->count, launch->arguments);
}

bool ms_cuda_keep(ms_stream *stream, const ms_launch *launch)
{
    const ms_cuda_device *self = ms_cuda_of(stream->engine);
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    void *memory = NULL;
    if (!self->batches || self->repeating || self->blocks || !task_of(launch)->together
        || ms_stream_has_failed(stream))
        return false;
    /* Without memory for it, tasks are carried out one by one. */
    if (!queue->together
        && ms_allocate(&stream->engine->context, sizeof *queue->together, "stream", &memory))
        return false;
    if (memory) queue->together = memory;
    struct ms_cuda_together *kept = queue->together;
    if (!fits(kept, launch)) ms_cuda_put_kept(stream);
    ms_launch *own = &kept->launches[kept->count];
    *own = *launch;
    own->accesses = NULL;
    own->arguments =
        memcpy(kept->arguments[kept->count], launch->arguments, launch->task->args_bytes);
    if (kept->count++ == 0) queue->kept_from = launch->seq;
    return true;
}

/* The first task has the times of all, and the others none of their own. */
void ms_cuda_put_kept(ms_stream *stream)
{
    struct ms_cuda_together *kept = ms_cuda_queue_of(stream)->together;
    const void *arguments[MS_CUDA_BATCH];
    if (!kept || kept->count == 0) return;
    uint32_t count = kept->count;
    list(kept, arguments);
    kept->count = 0;
    ms_cuda_queue_of(stream)->kept_from = 0;
    if (ms_stream_has_failed(stream)) return;
    const ms_launch *first = &kept->launches[0];
    ms_cuda_work work = { .stream = stream,
                          .launch = first,
                          .on = ms_cuda_queue_of(stream)->stream };
    ms_cuda_duty *duty = ms_cuda_begin_times(stream, first);
    task_of(first)->together(&work, arguments, count);
    ms_cuda_end_times(stream, duty);
    for (uint32_t i = 1; i < count && duty; i++) {
        duty = ms_cuda_add_duty(stream, kept->launches[i].seq, kept->launches[i].script);
        if (duty) duty->record = kept->launches[i].record;
    }
}

void ms_cuda_put_all_kept(ms_engine *engine)
{
    for (uint16_t i = 0; i < engine->stream_count; i++)
        if (engine->streams[i]) ms_cuda_put_kept(engine->streams[i]);
}

void ms_cuda_drop_kept(ms_stream *stream)
{
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    if (queue->together) queue->together->count = 0;
    queue->kept_from = 0;
}

void ms_cuda_batch(ms_engine *engine, bool begins)
{
    ms_cuda_enter(engine)->batches = begins;
    if (!begins) ms_cuda_put_all_kept(engine);
}
