/* batch.c: tasks of one kind that come one after another and are carried out as one
 * (ms_engine_batch). Optimizers open a batch (bindings/optim.c), so that one kernel steps
 * many parameters.
 *
 * A task that may be put off is kept with its number, which counts as enqueued. Whatever else goes
 * onto the stream, or asks how far it is, comes after what is kept: it is put onto the stream
 * first. So order and points are those of a stream that keeps nothing.
 *
 * Where work repeats (replay.c), what is kept ends the run before it and is in no graph: a graph
 * would have each task by itself, with a gap of the GPU after each. Nothing is kept with
 * CUDA_LAUNCH_BLOCKING=1, where the host waits after each task (fatal.c). */
#include "exec/cuda/batch.h"

#include <string.h>

#include "exec/cuda/completion.h"
#include "exec/cuda/errors.h"
#include "exec/stream.h"

/* What a stream keeps. */
struct ms_cuda_single_graph {
    uint32_t count;
    ms_launch launches[MS_CUDA_BATCH];
    unsigned char arguments[MS_CUDA_BATCH][MS_TASK_ARGS_MAX];
};

static const ms_cuda_task *task_of(const ms_launch *launch)
{
    return (const ms_cuda_task *)(const void *)launch->task;
}

/* The arguments of all that is kept, in order. */
static void list(const struct ms_cuda_single_graph *batch, const void *arguments[MS_CUDA_BATCH])
{
    for (uint32_t i = 0; i < batch->count; i++) arguments[i] = batch->launches[i].arguments;
}

static bool fits(const struct ms_cuda_single_graph *batch, const ms_launch *launch)
{
    const void *arguments[MS_CUDA_BATCH];
    if (batch->count == 0) return true;
    if (batch->count == MS_CUDA_BATCH) return false;
    const ms_cuda_task *task = task_of(launch), *first = task_of(&batch->launches[0]);
    list(batch, arguments);
    return task->batch == first->batch && task->joins(arguments, batch->count, launch->arguments);
}

static bool can_be_kept(const ms_stream *stream, const ms_launch *launch)
{
    const ms_cuda_device *self = ms_cuda_of(stream->engine);
    return self->batches && !self->blocks && task_of(launch)->batch
           && !ms_stream_has_failed(stream);
}

bool ms_cuda_batch_begins(const ms_stream *stream, const ms_launch *launch)
{
    const struct ms_cuda_single_graph *batch = ms_cuda_queue_of(stream)->batch;
    return can_be_kept(stream, launch) && (!batch || batch->count == 0);
}

bool ms_cuda_batch_add(ms_stream *stream, const ms_launch *launch)
{
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    void *memory = NULL;
    if (!can_be_kept(stream, launch)) return false;
    /* Without memory for it, tasks are carried out one by one. */
    if (!queue->batch
        && ms_allocate(&stream->engine->context, sizeof *queue->batch, "stream", &memory))
        return false;
    if (memory) queue->batch = memory;
    struct ms_cuda_single_graph *batch = queue->batch;
    if (!fits(batch, launch)) ms_cuda_batch_put(stream);
    ms_launch *own = &batch->launches[batch->count];
    *own = *launch;
    own->accesses = NULL;
    own->arguments =
        memcpy(batch->arguments[batch->count], launch->arguments, launch->task->args_bytes);
    if (batch->count++ == 0) queue->batched_from = launch->seq;
    return true;
}

/* The first task has the times of all, and the others none of their own. */
void ms_cuda_batch_put(ms_stream *stream)
{
    struct ms_cuda_single_graph *batch = ms_cuda_queue_of(stream)->batch;
    const void *arguments[MS_CUDA_BATCH];
    if (!batch || batch->count == 0) return;
    uint32_t count = batch->count;
    list(batch, arguments);
    batch->count = 0;
    ms_cuda_queue_of(stream)->batched_from = 0;
    if (ms_stream_has_failed(stream)) return;
    const ms_launch *first = &batch->launches[0];
    ms_cuda_work work = { .stream = stream,
                          .launch = first,
                          .on = ms_cuda_queue_of(stream)->stream };
    ms_cuda_completion *completion = ms_cuda_begin_times(stream, first);
    task_of(first)->batch(&work, arguments, count);
    ms_cuda_end_times(stream, completion);
    for (uint32_t i = 1; i < count && completion; i++) {
        completion =
            ms_cuda_add_completion(stream, batch->launches[i].seq, batch->launches[i].script);
        if (completion) completion->record = batch->launches[i].record;
    }
}

void ms_cuda_batch_put_all(ms_engine *engine)
{
    for (uint16_t i = 0; i < engine->stream_count; i++)
        if (engine->streams[i]) ms_cuda_batch_put(engine->streams[i]);
}

void ms_cuda_batch_drop(ms_stream *stream)
{
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    if (queue->batch) queue->batch->count = 0;
    queue->batched_from = 0;
}

void ms_cuda_batch(ms_engine *engine, bool begins)
{
    ms_cuda_enter(engine)->batches = begins;
    if (!begins) ms_cuda_batch_put_all(engine);
}
