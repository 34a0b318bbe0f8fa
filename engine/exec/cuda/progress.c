/* progress.c: which numbers of a stream are reached: the events that tell, waits of other streams
 * for them, and what the host does after a number. */
#include "exec/cuda/progress.h"

#include <string.h>

#include "exec/cuda/batch.h"
#include "exec/cuda/completion.h"
#include "exec/cuda/errors.h"
#include "exec/cuda/fatal.h"
#include "exec/cuda/host_task.h"
#include "exec/cuda/kernel.h"
#include "exec/cuda/replay.h"
#include "exec/cuda/times.h"

/* ------------------------------------------------------------------- completions */

/* The end is counted from the task's own beginning, as a task is shorter than the time since the
 * anchor. */
static void write_times(ms_cuda_device *self, ms_cuda_queue *queue,
                        const ms_cuda_completion *completion)
{
    int64_t ns = 0;
    ms_trace_record *record = completion->record;
    if (!record) return;
    if (!completion->started) {
        /* It was carried out with the task before it. */
        record->started_ns = record->finished_ns = queue->last_ns;
        return;
    }
    record->started_ns = ms_cuda_time_of(self, completion->started);
    if (record->started_ns && completion->finished
        && ms_cuda_find_span(self, completion->started, completion->finished, &ns))
        record->finished_ns = record->started_ns + (uint64_t)ns;
    queue->last_ns = record->finished_ns;
}

/* What the kernels of a task noted. */
static void look_at_note(ms_stream *stream, const ms_cuda_completion *completion)
{
    char message[sizeof((ms_error *)0)->message];
    if (!completion->task || completion->note->fault.at == MS_CUDA_NO_FAULT) return;
    completion->task->explain(&completion->note->fault, message, sizeof message);
    ms_cuda_fail_stream(stream, completion->seq, completion->script, MS_ERROR_ARGUMENT,
                        "%s, in stream \"%s\"", message, ms_stream_name(stream));
}

/* What a task has asked for. */
static void call_after(ms_stream *stream, const ms_cuda_completion *completion)
{
    ms_error error = { .rank = -1, .bucket = -1, .collective = -1 };
    if (completion->after && completion->after(completion->user, &error))
        ms_cuda_fail_with(stream, completion->seq, completion->script, &error);
}

static void do_duties(ms_stream *stream)
{
    ms_engine *engine = stream->engine;
    ms_cuda_device *self = ms_cuda_of(engine);
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    while (queue->completions && queue->completions->seq <= queue->done) {
        ms_cuda_completion *completion = queue->completions;
        queue->completions = completion->next;
        if (!queue->completions) queue->last_completion = &queue->completions;
        if (completion->of) {
            /* It is reached; what its kernels noted has to be looked at first. */
            (void)ms_cuda_reached(completion->of, completion->of_seq);
            ms_cuda_fail_after(stream, completion->seq, completion->of, completion->of_seq);
        }
        look_at_note(stream, completion);
        call_after(stream, completion);
        write_times(self, queue, completion);
        if (completion->started) (void)self->cuda.event_destroy(completion->started);
        if (completion->finished) (void)self->cuda.event_destroy(completion->finished);
        ms_cuda_give_note(self, completion->note);
        ms_release(&engine->context, completion);
    }
}

/* ------------------------------------------------------------------- points */

static ms_cuda_point *point_at(ms_cuda_queue *queue, uint32_t i)
{
    return &queue->points[(queue->first + i) % MS_CUDA_POINTS];
}

/* The oldest point is passed: all numbers up to it are reached. */
static void pass(ms_stream *stream)
{
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    ms_cuda_point *point = point_at(queue, 0);
    queue->done = point->seq;
    ms_cuda_give_event(ms_cuda_of(stream->engine), stream->engine, point->event);
    queue->first = (queue->first + 1) % MS_CUDA_POINTS;
    queue->count--;
    do_duties(stream);
}

/* The GPU has stopped: nothing more will be done. */
static void stop(ms_stream *stream, ms_cuda_result result)
{
    ms_cuda_device *self = ms_cuda_of(stream->engine);
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    ms_cuda_stop(stream, NULL, result);
    /* The failure has ended the job, for which a function of the host may wait. */
    ms_cuda_join(stream);
    while (queue->count > 0) {
        (void)self->cuda.event_destroy(point_at(queue, 0)->event);
        queue->first = (queue->first + 1) % MS_CUDA_POINTS;
        queue->count--;
    }
    ms_cuda_batch_drop(stream);
    queue->done = queue->head;
    do_duties(stream);
}

/* The first point that covers this number; one is made if there is none. NULL: the GPU has
 * stopped, or the number is reached. For a number before a host task there is one (ms_cuda_cover).
 */
static ms_cuda_point *point_of(ms_stream *stream, uint64_t seq)
{
    ms_cuda_device *self = ms_cuda_of(stream->engine);
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    if (seq <= queue->done) return NULL;
    ms_cuda_batch_put(stream);
    for (uint32_t i = 0; i < queue->count; i++)
        if (point_at(queue, i)->seq >= seq) return point_at(queue, i);
    ms_cuda_result result = MS_CUDA_SUCCESS;
    if (queue->count == MS_CUDA_POINTS) {
        result = self->cuda.event_synchronize(point_at(queue, 0)->event);
        if (!result) pass(stream);
    }
    ms_cuda_event event = result ? NULL : ms_cuda_take_event(self, stream->engine);
    if (!result)
        result = event ? self->cuda.event_record(event, queue->stream) : MS_CUDA_OUT_OF_MEMORY;
    if (result) {
        if (event) (void)self->cuda.event_destroy(event);
        stop(stream, result);
        return NULL;
    }
    ms_cuda_point *point = point_at(queue, queue->count++);
    *point = (ms_cuda_point){ .seq = ms_cuda_given(queue), .event = event };
    return point;
}

bool ms_cuda_reached(const ms_stream *asked, uint64_t seq)
{
    ms_stream *stream = asked->engine->streams[asked->index]; /* the same one, to be written */
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    ms_cuda_cut_at(stream, seq, "a question of the host whether a task is done");
    if (seq <= queue->done) return true;
    ms_cuda_device *self = ms_cuda_enter(stream->engine);
    (void)point_of(stream, seq);
    while (queue->count > 0) {
        ms_cuda_result result = self->cuda.event_query(point_at(queue, 0)->event);
        if (result == MS_CUDA_NOT_READY) break;
        if (result) stop(stream, result);
        else pass(stream);
    }
    return seq <= queue->done;
}

void ms_cuda_await(ms_stream *stream, uint64_t seq)
{
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    ms_cuda_cut_at(stream, seq, "the host's wait for a task");
    if (seq <= queue->done) return;
    ms_cuda_device *self = ms_cuda_enter(stream->engine);
    ms_cuda_point *point = point_of(stream, seq);
    ms_cuda_result result = point ? self->cuda.event_synchronize(point->event) : MS_CUDA_SUCCESS;
    if (result) stop(stream, result);
    while (queue->done < seq && queue->count > 0) pass(stream);
}

void ms_cuda_cover(ms_stream *stream) { (void)point_of(stream, ms_cuda_queue_of(stream)->head); }

void ms_cuda_advance(ms_stream *stream, uint64_t seq)
{
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    MS_ASSERT(queue->head == seq - 1);
    queue->head = seq;
    /* No more than a stream's depth is ever under way. */
    if (seq > MS_STREAM_DEPTH && queue->done < seq - MS_STREAM_DEPTH)
        ms_cuda_await(stream, seq - MS_STREAM_DEPTH / 2);
}

/* A number that is known to be reached needs no call of the driver. */
static ms_cuda_result put_wait(ms_cuda_device *self, ms_stream *stream, const ms_wait *wait)
{
    ms_cuda_point *point = point_of(stream->engine->streams[wait->of->index], wait->of_seq);
    return point ? self->cuda.stream_wait(ms_cuda_queue_of(stream)->stream, point->event, 0)
                 : MS_CUDA_SUCCESS;
}

void ms_cuda_wait(ms_stream *stream, const ms_wait *wait)
{
    ms_cuda_device *self = ms_cuda_enter(stream->engine);
    ms_cuda_cut(stream, NULL);
    ms_cuda_cut_at(stream->engine->streams[wait->of->index], wait->of_seq, NULL);
    ms_cuda_result result = put_wait(self, stream, wait);
    if (result) stop(stream, result);
    ms_cuda_completion *completion = ms_cuda_add_completion(stream, wait->seq, 0);
    if (completion) {
        completion->of = wait->of;
        completion->of_seq = wait->of_seq;
    }
    ms_cuda_advance(stream, wait->seq);
}

/* -------------------------------------------------------------------- marks */

ms_status ms_cuda_mark_open(ms_engine *engine, ms_mark *mark)
{
    ms_cuda_device *self = ms_cuda_enter(engine);
    ms_cuda_event event = NULL;
    ms_cuda_result result = self->cuda.event_create(&event, MS_CUDA_EVENT_TIMING);
    if (result) return ms_cuda_fail(engine, result, "cannot make an event");
    mark->own = event;
    return MS_OK;
}

void ms_cuda_mark_close(ms_engine *engine, ms_mark *mark)
{
    (void)ms_cuda_enter(engine)->cuda.event_destroy(mark->own);
}

void ms_cuda_mark(ms_stream *stream, uint64_t seq, ms_mark *mark)
{
    ms_cuda_device *self = ms_cuda_enter(stream->engine);
    ms_cuda_cut(stream, NULL);
    ms_cuda_drop_anchor(stream->engine);
    ms_cuda_result result = self->cuda.event_record(mark->own, ms_cuda_queue_of(stream)->stream);
    ms_cuda_advance(stream, seq);
    if (result) stop(stream, result);
}

uint64_t ms_cuda_mark_ns(const ms_engine *engine, const ms_mark *mark)
{
    return ms_cuda_time_of(ms_cuda_enter(engine), mark->own);
}

/* ------------------------------------------------------------------ streams */

ms_status ms_cuda_queue_open(ms_stream *stream, void **state)
{
    ms_engine *engine = stream->engine;
    ms_cuda_device *self = ms_cuda_enter(engine);
    void *memory = NULL;
    ms_status status = ms_allocate(&engine->context, sizeof(ms_cuda_queue), "stream", &memory);
    if (status) return status;
    ms_cuda_queue *queue = memory;
    queue->last_completion = &queue->completions;
    queue->last_deferred = &queue->deferred;
    ms_cuda_result result = self->cuda.stream_create(&queue->stream, MS_CUDA_STREAM_NON_BLOCKING,
                                                     ms_cuda_priority(self, stream->priority));
    if (result) {
        ms_release(&engine->context, queue);
        return ms_cuda_fail(engine, result, "cannot make a CUDA stream");
    }
    *state = queue;
    return MS_OK;
}

void ms_cuda_queue_close(ms_stream *stream, void *state)
{
    ms_cuda_queue *queue = state;
    ms_cuda_device *self = ms_cuda_enter(stream->engine);
    ms_cuda_await(stream, queue->head);
    while (queue->count > 0) pass(stream);
    ms_cuda_replays_free(stream);
    ms_cuda_release_piece(stream->engine, queue->scratch);
    ms_cuda_host_tasks_close(stream, queue);
    (void)self->cuda.stream_destroy(queue->stream);
    ms_release(&stream->engine->context, queue->batch);
    ms_release(&stream->engine->context, queue);
}
