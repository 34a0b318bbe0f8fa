/* completion.c: what work of a stream leaves for the host: events, notes of kernels, times, and the
 * list of completions, which progress.c does when their numbers are reached. */
#include "exec/cuda/completion.h"

#include "exec/cuda/errors.h"
#include "exec/cuda/host_task.h"
#include "exec/cuda/times.h"

/* ------------------------------------------------------------------- events */

ms_cuda_event ms_cuda_take_event(ms_cuda_device *self, ms_engine *engine)
{
    (void)engine;
    ms_cuda_event event = NULL;
    if (self->spare_count > 0) return self->spare[--self->spare_count];
    ms_cuda_result result = self->cuda.event_create(&event, MS_CUDA_EVENT_NO_TIMING);
    return result ? NULL : event;
}

void ms_cuda_give_event(ms_cuda_device *self, ms_engine *engine, ms_cuda_event event)
{
    if (!event) return;
    if (ms_grow(&engine->context, (void **)&self->spare, &self->spare_capacity,
                self->spare_count + 1, sizeof *self->spare)) {
        (void)self->cuda.event_destroy(event);
        return;
    }
    self->spare[self->spare_count++] = event;
}

/* -------------------------------------------------------------------- notes */

ms_cuda_note *ms_cuda_take_note(ms_cuda_device *self)
{
    void *memory = NULL;
    ms_cuda_note *note = self->notes;
    if (note) {
        self->notes = note->next;
        return note;
    }
    ms_cuda_result result = self->cuda.host_allocate(&memory, sizeof(ms_cuda_note), 0);
    return result ? NULL : memory;
}

void ms_cuda_give_note(ms_cuda_device *self, ms_cuda_note *note)
{
    if (!note) return;
    note->next = self->notes;
    self->notes = note;
}

/* ------------------------------------------------------------------- completions */

ms_cuda_completion *ms_cuda_add_completion(ms_stream *stream, uint64_t seq, uint32_t script)
{
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    void *memory = NULL;
    if (ms_allocate(&stream->engine->context, sizeof(ms_cuda_completion), "stream", &memory)) {
        ms_cuda_fail_stream(stream, seq, script, MS_ERROR_MEMORY, "no memory for a task");
        return NULL;
    }
    ms_cuda_completion *completion = memory;
    completion->stream = stream;
    completion->seq = seq;
    completion->script = script;
    *queue->last_completion = completion;
    queue->last_completion = &completion->next;
    return completion;
}

/* -------------------------------------------------------------------- times */

/* Where a trace is recorded, events with times are around the task. */
ms_cuda_completion *ms_cuda_begin_times(ms_stream *stream, const ms_launch *launch)
{
    ms_cuda_device *self = ms_cuda_of(stream->engine);
    ms_cuda_completion *completion =
        launch->record ? ms_cuda_add_completion(stream, launch->seq, launch->script) : NULL;
    if (!completion) return NULL;
    completion->record = launch->record;
    ms_cuda_drop_anchor(stream->engine);
    if (self->cuda.event_create(&completion->started, MS_CUDA_EVENT_TIMING))
        completion->started = NULL;
    if (self->cuda.event_create(&completion->finished, MS_CUDA_EVENT_TIMING))
        completion->finished = NULL;
    if (completion->started)
        (void)self->cuda.event_record(completion->started, ms_cuda_queue_of(stream)->stream);
    return completion;
}

void ms_cuda_end_times(ms_stream *stream, const ms_cuda_completion *completion)
{
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    if (!completion || !completion->finished) return;
    if (ms_cuda_host_task_is_open(queue)) ms_cuda_host_task_record(queue, completion->finished);
    else (void)ms_cuda_of(stream->engine)->cuda.event_record(completion->finished, queue->stream);
}
