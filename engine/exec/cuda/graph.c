/* graph.c: recording work and replaying it (ms_replay), as a graph of the driver.
 *
 * Invariants
 * - A capture begins on the origin. Another stream becomes part of it when its first work comes, by
 *   waiting for an event that was recorded at the beginning. At the end the origin waits for all of
 *   them, the graph is launched once, and they wait for that.
 * - Inside the capture streams wait for each other by one event, which is recorded anew each time:
 *   a wait means the last record before it. Points of before the recording need no wait: all
 *   streams were joined before it began.
 * - What the host has a part in lies in memory of the recording: bytes that are copied to the GPU,
 *   flags and what kernels note, each with a function of the host that looks at it in stream order.
 *   A function counts its runs. The first run has the streams and the numbers of the recording, a
 *   later one the origin and the number of its replay.
 * - Scratch whose address is in the graph stays as long as the recording.
 * - Marks are set when the first run is over. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "exec/cuda/cuda.h"

/* More than the numbers of a stream that are under way. */
#define REPLAYS (2 * MS_STREAM_DEPTH)
#define BLOCK_BYTES 16384

/* One thing that a function of the host looks at or does, in each run. */
typedef struct item {
    struct item *next;
    ms_cuda_recording *of;
    uint64_t runs; /* of its function */
    /* Of the first run. */
    ms_stream *stream;
    uint64_t seq;
    uint32_t script;
    /* As in a duty. */
    ms_host_call call;
    ms_cuda_note *note;
    const char *message;
    const ms_cuda_task *task;
} item;

/* Pinned memory of the host for bytes that are copied to the GPU. */
typedef struct block {
    struct block *next;
    char *memory;
    size_t bytes, used;
} block;

typedef struct pending_mark {
    ms_stream *stream;
    ms_mark *mark;
} pending_mark;

struct ms_cuda_recording {
    ms_engine *engine;
    ms_stream *origin;
    ms_cuda_program program;
    ms_cuda_event fork, join;
    item *items, *noted; /* noted: items of notes, which one function looks at after all work */
    block *blocks;
    ms_cuda_piece **pieces;
    size_t piece_count, piece_capacity;
    pending_mark *marks;
    size_t mark_count, mark_capacity;
    uint64_t launched, looked; /* runs; looked: how often the notes were looked at */
    uint64_t replays[REPLAYS]; /* numbers of the origin, by run */
};

/* -------------------------------------------------------------------- freeing */

static void free_items(ms_cuda_recording *recording, item *first)
{
    ms_cuda_device *self = ms_cuda_of(recording->engine);
    while (first) {
        item *gone = first;
        first = gone->next;
        ms_cuda_give_note(self, gone->note);
        ms_release(&recording->engine->context, gone);
    }
}

/* The last run is over. Another recording may be open. */
void ms_cuda_forget_recording(ms_cuda_recording *recording)
{
    ms_engine *engine = recording->engine;
    ms_context *context = &engine->context;
    ms_cuda_device *self = ms_cuda_enter(engine);
    int mode = MS_CUDA_CAPTURE_RELAXED;
    ms_cuda_exchange_mode(self, &mode);
    if (recording->program) (void)self->cuda.program_destroy(recording->program);
    if (recording->fork) (void)self->cuda.event_destroy(recording->fork);
    if (recording->join) (void)self->cuda.event_destroy(recording->join);
    ms_cuda_exchange_mode(self, &mode);
    free_items(recording, recording->items);
    free_items(recording, recording->noted);
    while (recording->blocks) {
        block *gone = recording->blocks;
        recording->blocks = gone->next;
        ms_cuda_host_release(engine, gone->memory);
        ms_release(context, gone);
    }
    for (size_t i = 0; i < recording->piece_count; i++)
        ms_cuda_release_piece(engine, recording->pieces[i]);
    ms_release(context, recording->pieces);
    ms_release(context, recording->marks);
    ms_release(context, recording);
}

/* It cannot be replayed; its only run may be under way. */
static void discard(ms_cuda_recording *recording)
{
    ms_stream *origin = recording->origin;
    const ms_cuda_queue *queue = ms_cuda_queue_of(origin);
    ms_cuda_duty *duty =
        queue->done < queue->head ? ms_cuda_add_duty(origin, queue->head, 0) : NULL;
    if (duty) {
        duty->recording = recording;
        return;
    }
    ms_cuda_await(origin, queue->head);
    ms_cuda_forget_recording(recording);
}

/* ------------------------------------------------------------------ beginning */

static ms_cuda_result begin_capture(ms_cuda_device *self, ms_cuda_recording *recording)
{
    ms_cuda_graph nothing = NULL;
    ms_cuda_stream origin = ms_cuda_queue_of(recording->origin)->stream;
    ms_cuda_result result = self->cuda.event_create(&recording->fork, MS_CUDA_EVENT_NO_TIMING);
    if (!result) result = self->cuda.event_create(&recording->join, MS_CUDA_EVENT_NO_TIMING);
    if (!result) result = self->cuda.capture_begin(origin, MS_CUDA_CAPTURE_THREAD);
    if (result) return result;
    result = self->cuda.event_record(recording->fork, origin);
    if (result && !self->cuda.capture_end(origin, &nothing) && nothing)
        (void)self->cuda.graph_destroy(nothing);
    return result;
}

ms_status ms_cuda_record_begin(ms_stream *origin)
{
    ms_engine *engine = origin->engine;
    ms_cuda_device *self = ms_cuda_enter(engine);
    ms_cuda_queue *queue = ms_cuda_queue_of(origin);
    void *memory = NULL;
    for (uint16_t i = 0; i < engine->stream_count; i++) ms_cuda_cut(engine->streams[i], NULL);
    ms_status status =
        ms_allocate(&engine->context, sizeof(ms_cuda_recording), "a recording", &memory);
    if (status) return status;
    ms_cuda_recording *recording = memory;
    recording->engine = engine;
    recording->origin = origin;
    ms_cuda_result result = begin_capture(self, recording);
    if (result) {
        ms_cuda_forget_recording(recording);
        return ms_cuda_fail(engine, result, "work cannot be recorded");
    }
    self->recording = recording;
    self->spoilt = MS_OK;
    self->captures = true;
    queue->captured = true;
    queue->captured_after = queue->head;
    return MS_OK;
}

/* ----------------------------------------------------------- what is captured */

/* The stream is part of the capture from now on. */
static ms_cuda_result join_capture(ms_cuda_device *self, ms_stream *stream)
{
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    if (queue->captured) return MS_CUDA_SUCCESS;
    ms_cuda_result result = self->cuda.stream_wait(queue->stream, self->recording->fork, 0);
    if (result) return result;
    queue->captured = true;
    queue->captured_after = queue->head;
    return MS_CUDA_SUCCESS;
}

bool ms_cuda_may_work(ms_stream *stream)
{
    ms_cuda_device *self = ms_cuda_of(stream->engine);
    bool works = !ms_stream_has_failed(stream);
    if (!self->captures) return works;
    ms_cuda_result result = works ? join_capture(self, stream) : MS_CUDA_SUCCESS;
    if (!works) ms_cuda_spoil(stream->engine, MS_ERROR_ABORTED, "an earlier task failed");
    if (!result) return works;
    ms_launch launch = { .seq = ms_cuda_queue_of(stream)->head + 1, .name = "recording" };
    ms_cuda_check(stream, &launch, result);
    return false;
}

/* What `of` had before the recording is over when the recorded work begins. */
ms_cuda_result ms_cuda_capture_wait(ms_stream *stream, const ms_wait *wait)
{
    ms_cuda_device *self = ms_cuda_of(stream->engine);
    const ms_cuda_queue *of = ms_cuda_queue_of(wait->of);
    ms_cuda_event join = self->recording->join;
    if (!of->captured || wait->of_seq <= of->captured_after) return MS_CUDA_SUCCESS;
    ms_cuda_result result = join_capture(self, stream);
    if (!result) result = self->cuda.event_record(join, of->stream);
    if (!result) result = self->cuda.stream_wait(ms_cuda_queue_of(stream)->stream, join, 0);
    return result;
}

/* NULL: there is no memory. */
static item *new_item(ms_stream *stream, const ms_launch *launch, item **list)
{
    ms_cuda_recording *recording = ms_cuda_of(stream->engine)->recording;
    void *memory = NULL;
    if (ms_allocate(&stream->engine->context, sizeof(item), "a recording", &memory)) return NULL;
    item *made = memory;
    made->of = recording;
    made->stream = stream;
    made->seq = launch->seq;
    made->script = launch->script;
    made->next = *list;
    *list = made;
    return made;
}

/* On a thread of the driver: where a failure in this run belongs. */
static ms_stream *place_of(const item *one, uint64_t run, uint64_t *seq)
{
    const ms_cuda_recording *recording = one->of;
    *seq = run ? recording->replays[run % REPLAYS] : one->seq;
    return run ? recording->origin : one->stream;
}

static void run_call(void *argument)
{
    item *one = argument;
    uint64_t seq = 0;
    ms_stream *stream = place_of(one, one->runs++, &seq);
    char message[sizeof((ms_error *)0)->message] = "";
    if (ms_stream_has_failed(stream)) return;
    ms_status status = one->call.function(one->call.user, message, sizeof message);
    if (status) ms_cuda_fail_stream(stream, seq, one->script, status, "%s", message);
}

static void look_at_flag(void *argument)
{
    item *one = argument;
    uint64_t seq = 0;
    ms_stream *stream = place_of(one, one->runs++, &seq);
    if (one->note->flag != 0)
        ms_cuda_fail_stream(stream, seq, one->script, MS_ERROR_TASK, "%s", one->message);
}

/* After all work of a run: what kernels have noted. The next run begins without faults. */
static void look_at_notes(void *argument)
{
    ms_cuda_recording *recording = argument;
    uint64_t run = recording->looked++, seq = 0;
    for (item *one = recording->noted; one; one = one->next) {
        char message[sizeof((ms_error *)0)->message];
        if (!one->note || one->note->fault.at == MS_CUDA_NO_FAULT) continue;
        one->task->explain(&one->note->fault, message, sizeof message);
        ms_stream *stream = place_of(one, run, &seq);
        ms_cuda_fail_stream(stream, seq, one->script, MS_ERROR_ARGUMENT, "%s", message);
        one->note->fault = (ms_cuda_fault){ .at = MS_CUDA_NO_FAULT };
    }
}

ms_cuda_result ms_cuda_capture_call(ms_stream *stream, const ms_launch *launch,
                                    const ms_host_call *call)
{
    ms_cuda_device *self = ms_cuda_of(stream->engine);
    item *one = new_item(stream, launch, &self->recording->items);
    if (!one) return MS_CUDA_OUT_OF_MEMORY;
    one->call = *call;
    return self->cuda.launch_host(ms_cuda_queue_of(stream)->stream, run_call, one);
}

ms_cuda_result ms_cuda_capture_flag(ms_stream *stream, const ms_launch *launch, const float *flag,
                                    const char *message)
{
    ms_cuda_device *self = ms_cuda_of(stream->engine);
    ms_cuda_stream on = ms_cuda_queue_of(stream)->stream;
    item *one = new_item(stream, launch, &self->recording->items);
    if (!one) return MS_CUDA_OUT_OF_MEMORY;
    one->message = message;
    one->note = ms_cuda_take_note(self);
    if (!one->note) return MS_CUDA_OUT_OF_MEMORY;
    ms_cuda_result result =
        self->cuda.copy_out(&one->note->flag, (ms_cuda_address)(uintptr_t)flag, sizeof *flag, on);
    return result ? result : self->cuda.launch_host(on, look_at_flag, one);
}

/* The item comes before the kernels: once they are captured, their note must stay. */
bool ms_cuda_expect_note(ms_stream *stream, const ms_launch *launch, const ms_cuda_task *task)
{
    item *one = new_item(stream, launch, &ms_cuda_of(stream->engine)->recording->noted);
    if (one) one->task = task;
    return one != NULL;
}

void ms_cuda_capture_note(ms_engine *engine, ms_cuda_note *note)
{
    ms_cuda_of(engine)->recording->noted->note = note;
}

const void *ms_cuda_capture_bytes(ms_engine *engine, const void *host, size_t bytes)
{
    ms_cuda_recording *recording = ms_cuda_of(engine)->recording;
    block *last = recording->blocks;
    size_t taken = (bytes + 63) / 64 * 64;
    if (!last || last->bytes - last->used < taken) {
        void *memory = NULL;
        if (ms_allocate(&engine->context, sizeof(block), "a recording", &memory)) return NULL;
        last = memory;
        last->bytes = taken > BLOCK_BYTES ? taken : BLOCK_BYTES;
        last->memory = ms_cuda_host_allocate(engine, last->bytes);
        if (!last->memory) {
            ms_release(&engine->context, last);
            return NULL;
        }
        last->next = recording->blocks;
        recording->blocks = last;
    }
    char *place = last->memory + last->used;
    last->used += taken;
    return memcpy(place, host, bytes);
}

bool ms_cuda_capture_piece(ms_engine *engine, ms_cuda_piece *piece)
{
    ms_cuda_recording *recording = ms_cuda_of(engine)->recording;
    for (size_t i = 0; i < recording->piece_count; i++)
        if (recording->pieces[i] == piece) return true;
    if (ms_grow(&engine->context, (void **)&recording->pieces, &recording->piece_capacity,
                recording->piece_count + 1, sizeof *recording->pieces))
        return false;
    recording->pieces[recording->piece_count++] = piece;
    piece->users++;
    return true;
}

/* An event that is recorded in a capture never has a time. */
bool ms_cuda_capture_mark(ms_stream *stream, ms_mark *mark)
{
    ms_engine *engine = stream->engine;
    ms_cuda_device *self = ms_cuda_of(engine);
    ms_cuda_recording *recording = self->recording;
    if (!self->captures || !ms_cuda_queue_of(stream)->captured) return false;
    if (ms_grow(&engine->context, (void **)&recording->marks, &recording->mark_capacity,
                recording->mark_count + 1, sizeof *recording->marks)) {
        ms_cuda_stop_capture(engine, "there is no memory for a mark");
        return false;
    }
    recording->marks[recording->mark_count++] = (pending_mark){ stream, mark };
    return true;
}

/* --------------------------------------------------------------------- ending */

/* All streams of the capture but the origin: either it waits for them, or they for it. */
static ms_cuda_result join_streams(ms_cuda_device *self, ms_cuda_recording *recording,
                                   bool at_the_end)
{
    const ms_engine *engine = recording->engine;
    const ms_cuda_queue *origin = ms_cuda_queue_of(recording->origin);
    ms_cuda_result result = MS_CUDA_SUCCESS;
    if (!at_the_end) result = self->cuda.event_record(recording->fork, origin->stream);
    for (uint16_t i = 0; i < engine->stream_count && !result; i++) {
        const ms_cuda_queue *queue = ms_cuda_queue_of(engine->streams[i]);
        if (!queue->captured || queue == origin) continue;
        if (at_the_end) result = self->cuda.event_record(recording->join, queue->stream);
        if (!result)
            result = at_the_end ? self->cuda.stream_wait(origin->stream, recording->join, 0)
                                : self->cuda.stream_wait(queue->stream, recording->fork, 0);
    }
    return result;
}

/* The capture ends in any case. */
static ms_cuda_result end_capture(ms_cuda_device *self, ms_cuda_recording *recording)
{
    ms_cuda_stream origin = ms_cuda_queue_of(recording->origin)->stream;
    ms_cuda_graph graph = NULL;
    ms_cuda_result result = join_streams(self, recording, true);
    if (!result && recording->noted)
        result = self->cuda.launch_host(origin, look_at_notes, recording);
    ms_cuda_result ended = self->cuda.capture_end(origin, &graph);
    if (!result) result = ended;
    if (!result) result = self->cuda.program_make(&recording->program, graph, 0);
    if (graph) (void)self->cuda.graph_destroy(graph);
    return result;
}

/* What was captured will never be carried out. */
static void lose(ms_cuda_recording *recording, ms_cuda_result result)
{
    char text[256];
    const ms_engine *engine = recording->engine;
    ms_cuda_explain(&ms_cuda_of(engine)->cuda, result, text, sizeof text);
    for (uint16_t i = 0; i < engine->stream_count; i++) {
        const ms_cuda_queue *queue = ms_cuda_queue_of(engine->streams[i]);
        if (queue->captured && queue->head > queue->captured_after)
            ms_cuda_fail_stream(engine->streams[i], queue->captured_after + 1, 0, MS_ERROR_TASK,
                                "work of stream \"%s\" was recorded, and cannot be carried out: %s",
                                ms_stream_name(engine->streams[i]), text);
    }
    ms_cuda_device *self = ms_cuda_of(engine);
    if (self->spoilt) return;
    self->spoilt = MS_ERROR_TASK;
    snprintf(self->why_spoilt, sizeof self->why_spoilt, "it cannot be carried out: %s", text);
}

/* Ends the capture and carries out what it holds. */
static void carry_out(ms_cuda_device *self)
{
    ms_cuda_recording *recording = self->recording;
    ms_engine *engine = recording->engine;
    ms_cuda_stream origin = ms_cuda_queue_of(recording->origin)->stream;
    ms_cuda_result result = end_capture(self, recording);
    self->captures = false;
    if (!result) result = self->cuda.program_launch(recording->program, origin);
    if (!result) result = join_streams(self, recording, false);
    recording->launched = 1;
    if (result) lose(recording, result);
    for (uint16_t i = 0; i < engine->stream_count; i++)
        ms_cuda_queue_of(engine->streams[i])->captured = false;
    for (size_t i = 0; i < recording->mark_count; i++)
        (void)self->cuda.event_record(recording->marks[i].mark->own,
                                      ms_cuda_queue_of(recording->marks[i].stream)->stream);
    while (self->released_count > 0)
        ms_cuda_host_release(engine, self->released[--self->released_count]);
}

void ms_cuda_stop_capture(ms_engine *engine, const char *format, ...)
{
    ms_cuda_device *self = ms_cuda_of(engine);
    va_list arguments;
    if (!self->captures) return;
    va_start(arguments, format);
    ms_cuda_spoil_with(engine, MS_ERROR_UNSUPPORTED, format, arguments);
    va_end(arguments);
    carry_out(self);
}

ms_status ms_cuda_record_end(ms_stream *origin, void **graph)
{
    ms_engine *engine = origin->engine;
    ms_cuda_device *self = ms_cuda_enter(engine);
    ms_cuda_recording *recording = self->recording;
    if (self->captures) carry_out(self);
    self->recording = NULL;
    if (!self->spoilt) {
        *graph = recording;
        return MS_OK;
    }
    ms_status status =
        ms_engine_fail(engine, self->spoilt, "this work cannot be replayed: %s", self->why_spoilt);
    discard(recording);
    return status;
}

/* ------------------------------------------------------------------ replaying */

void ms_cuda_replay(ms_stream *origin, const ms_launch *launch, void *graph)
{
    ms_cuda_recording *recording = graph;
    ms_cuda_device *self = ms_cuda_enter(origin->engine);
    ms_cuda_stop_capture(origin->engine, "a replay cannot be part of a recording");
    ms_cuda_cut(origin, NULL);
    if (ms_cuda_may_work(origin)) {
        ms_cuda_duty *duty = ms_cuda_begin_times(origin, launch);
        recording->replays[recording->launched % REPLAYS] = launch->seq;
        ms_cuda_result result =
            self->cuda.program_launch(recording->program, ms_cuda_queue_of(origin)->stream);
        ms_cuda_check(origin, launch, result);
        if (!result) recording->launched++;
        ms_cuda_end_times(origin, duty);
    }
    ms_cuda_advance(origin, launch->seq);
}

void ms_cuda_record_free(ms_engine *engine, void *graph)
{
    (void)engine;
    ms_cuda_forget_recording(graph);
}
