/* stream.c: the host side of streams: enqueueing, waiting, and what happens after a task has
 * failed. */
#include "exec/stream.h"

#include <stdio.h>
#include <string.h>

#include "exec/hazard.h"
#include "exec/trace.h"

/* ------------------------------------------------------------------- making */

/* Streams are found by name and live as long as the engine. The count is raised last, because
 * workers read it and may look at every stream below it. */
ms_status ms_engine_stream_with(ms_engine *engine, const char *name, int32_t priority,
                                ms_stream **out)
{
    for (uint16_t i = 0; i < engine->stream_count; i++)
        if (strcmp(engine->streams[i]->name, name) == 0) {
            *out = engine->streams[i];
            return MS_OK;
        }
    ms_stream *stream = NULL;
    if (!*name || strlen(name) >= sizeof stream->name)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "stream name \"%.40s\": 1 to %zu bytes are allowed", name,
                              sizeof stream->name - 1);
    if (engine->stream_count == MS_STREAMS_MAX)
        return ms_engine_fail(
            engine, MS_ERROR_STATE,
            "stream \"%s\": %d streams are in use already, which is the most; use one of them",
            name, MS_STREAMS_MAX);
    void *memory = NULL;
    ms_status status = ms_allocate(&engine->context, sizeof *stream, "stream", &memory);
    if (status) return status;
    stream = memory;
    stream->engine = engine;
    stream->index = engine->stream_count;
    stream->priority = priority;
    snprintf(stream->name, sizeof stream->name, "%s", name);
    /* Room for the first failures comes with the stream: see mark_spoiled. */
    status = ms_grow(&engine->context, (void **)&stream->spoiled, &stream->spoiled_capacity, 1,
                     sizeof *stream->spoiled);
    if (!status) status = engine->device->stream_open(stream, &stream->device_state);
    if (status) {
        ms_release(&engine->context, stream->spoiled);
        ms_release(&engine->context, memory);
        return status;
    }
    /* The entry is complete before the count covers it. */
    engine->streams[stream->index] = stream;
    engine->stream_count++;
    *out = stream;
    return MS_OK;
}

ms_status ms_engine_stream(ms_engine *engine, const char *name, ms_stream **out)
{
    return ms_engine_stream_with(engine, name, MS_PRIORITY_NORMAL, out);
}

ms_stream *ms_engine_current(const ms_engine *engine) { return engine->current; }

/* Returns the stream before, so that callers can put it back. */
ms_stream *ms_engine_set_current(ms_engine *engine, ms_stream *stream)
{
    ms_stream *before = engine->current;
    engine->current = stream;
    return before;
}

ms_stream *ms_engine_stream_at(const ms_engine *engine, uint16_t index)
{
    return index < engine->stream_count ? engine->streams[index] : NULL;
}
const char *ms_stream_name(const ms_stream *stream) { return stream->name; }
uint16_t ms_stream_index(const ms_stream *stream) { return stream->index; }
int32_t ms_stream_priority(const ms_stream *stream) { return stream->priority; }
ms_engine *ms_stream_engine(const ms_stream *stream) { return stream->engine; }
ms_point ms_stream_last(const ms_stream *stream)
{
    return (ms_point){ .stream = stream->index, .seq = stream->enqueued };
}

void ms_stream_take(ms_stream *stream, uint32_t multiprocessors)
{
    stream->taker = stream->enqueued;
    stream->taken = multiprocessors;
}
uint32_t ms_stream_taken(const ms_stream *stream)
{
    const ms_engine *engine = stream->engine;
    uint32_t taken = 0;
    for (uint16_t i = 0; i < engine->stream_count; i++) {
        const ms_stream *other = engine->streams[i];
        if (other != stream && other->taker > stream->clock[i]) taken += other->taken;
    }
    return taken;
}

/* Before any work only, as devices fix the priority of a queue when it is made or first used. */
ms_status ms_stream_set_priority(ms_stream *stream, int32_t priority)
{
    ms_engine *engine = stream->engine;
    if (!engine->device->set_priority)
        return ms_engine_fail(engine, MS_ERROR_UNSUPPORTED,
                              "stream \"%s\": device \"%s\" has no priorities of streams",
                              stream->name, engine->device->name);
    if (stream->enqueued)
        return ms_engine_fail(engine, MS_ERROR_STATE,
                              "stream \"%s\" has work already: set its priority before",
                              stream->name);
    ms_status status = engine->device->set_priority(stream, priority);
    if (!status) stream->priority = priority;
    return status;
}

/* For libraries that launch on the device's own queue, such as NCCL. */
ms_status ms_stream_native(ms_stream *stream, void **out)
{
    ms_engine *engine = stream->engine;
    if (!engine->device->native)
        return ms_engine_fail(engine, MS_ERROR_UNSUPPORTED,
                              "stream \"%s\": device \"%s\" has no object of its own for it",
                              stream->name, engine->device->name);
    *out = engine->device->native(stream);
    return MS_OK;
}

/* False where the device cannot know: the caller then reports no deadlock. */
bool ms_engine_is_blocked(const ms_engine *engine, uint32_t waiting, uint64_t *moves)
{
    return engine->device->is_still && engine->device->is_still(engine, waiting, moves);
}

void ms_engine_set_companions(ms_engine *engine, uint32_t others) { engine->companions = others; }

/* --------------------------------------------------------------- enqueueing */

/* A wait takes a number of its own. A wait that follows from the clock is left out: it would cost a
 * slot and a wakeup. The clock is merged after the device has the wait. */
ms_status ms_stream_wait_seq(ms_stream *stream, ms_stream *of, uint64_t seq)
{
    MS_ASSERT(ms_on_host(stream->engine) && seq <= of->enqueued);
    if (of == stream || seq <= stream->clock[of->index]) return MS_OK;
    ms_engine *engine = stream->engine;
    ms_trace_record *record = engine->trace.is_on ? ms_trace_add(engine) : NULL;
    if (record) {
        record->name = "wait";
        record->stream = stream->index;
        record->seq = stream->enqueued + 1;
        record->kind = MS_KIND_WAIT;
        record->of = of->index;
    }
    ms_wait wait = { .seq = ++stream->enqueued, .of = of, .of_seq = seq, .record = record };
    engine->device->wait(stream, &wait);
    ms_hazard_merge(stream, of, seq);
    return MS_OK;
}

/* A point that is not enqueued yet is refused; waiting for it could deadlock. */
ms_status ms_stream_wait(ms_stream *stream, ms_point point)
{
    ms_engine *engine = stream->engine;
    /* The point of a stream without work: it is reached. */
    if (point.seq == 0) return MS_OK;
    if (point.stream >= engine->stream_count || point.seq > engine->streams[point.stream]->enqueued)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "stream \"%s\" was told to wait for work that is not enqueued yet",
                              stream->name);
    return ms_stream_wait_seq(stream, engine->streams[point.stream], point.seq);
}

/* The order: all that can fail comes before the number is taken, so a failed enqueue leaves the
 * stream as it was, but for waits, which do no harm. Then hazards remember the task, and the device
 * gets it last. `failed` is read relaxed: it only makes the host look sooner at an error that it
 * would find at the next sync. */
ms_status ms_stream_hand_over(ms_stream *stream, ms_launch *launch, uint8_t kind, ms_hand hand,
                              const void *what, ms_point *out)
{
    ms_engine *engine = stream->engine;
    const ms_poison *poison = engine->poison ? engine->device->poison : NULL;
    const ms_access *accesses = launch->accesses;
    uint32_t count = launch->access_count;
    MS_ASSERT(ms_on_host(engine));
    if (atomic_load_explicit(&engine->failed, memory_order_relaxed)) return ms_engine_check(engine);
    ms_status status = ms_hazard_before(stream, launch->name, accesses, count);
    if (status) return status;
    void *saved = NULL;
    if (poison) status = poison->before(engine, accesses, count, &saved);
    if (status) return status;
    launch->seq = stream->enqueued + 1;
    launch->script = engine->script;
    launch->record = engine->trace.is_on ? ms_trace_add(engine) : NULL;
    if (launch->record) {
        launch->record->name = launch->name;
        launch->record->stream = stream->index;
        launch->record->seq = launch->seq;
        launch->record->kind = kind;
        launch->record->bytes = launch->cost.bytes;
        launch->record->flops = launch->cost.flops;
    }
    ms_hazard_after(stream, launch->seq, accesses, count);
    stream->enqueued = launch->seq;
    hand(stream, launch, what);
    /* Counted here and not when the work ends, so the sum does not depend on how far the device
     * is. */
    engine->flops += launch->cost.flops;
    if (out) *out = (ms_point){ .stream = stream->index, .seq = launch->seq };
    return poison ? poison->after(engine, launch->name, accesses, count, saved) : MS_OK;
}

/* A task brings its arguments in the launch, so `what` is not used. */
static void hand_task(ms_stream *stream, const ms_launch *launch, const void *what)
{
    (void)what;
    stream->engine->device->run(stream, launch);
}

/* Arguments are copied into a slot of fixed size, so an enqueue allocates nothing; the limits are
 * checked here for all devices. */
ms_status ms_stream_enqueue(ms_stream *stream, const ms_task *task, const void *arguments,
                            const ms_access *accesses, uint32_t count, ms_task_cost cost,
                            ms_point *out)
{
    if (task->args_bytes > MS_TASK_ARGS_MAX || count > MS_TASK_ACCESS_MAX)
        return ms_engine_fail(
            stream->engine, MS_ERROR_ARGUMENT,
            "task %s: %u bytes of arguments and %u storages; at most %d and %d fit", task->name,
            task->args_bytes, count, MS_TASK_ARGS_MAX, MS_TASK_ACCESS_MAX);
    ms_launch launch = { .name = task->name,
                         .task = task,
                         .arguments = arguments,
                         .accesses = accesses,
                         .access_count = count,
                         .cost = cost };
    return ms_stream_hand_over(stream, &launch, task->kind, hand_task, NULL, out);
}

double ms_engine_flops(const ms_engine *engine) { return engine->flops; }

double ms_engine_simulated_ns(const ms_engine *engine)
{
    return engine->device->simulated_ns ? engine->device->simulated_ns(engine) : 0;
}

/* ---------------------------------------------------------- errors, syncing */

/* One thread at a time reports for a stream: its worker, or the host in a forked child, where there
 * is no worker. `failed` is stored last, with sequential consistency, so a reader that sees it sees
 * the complete error. The engine's flag comes after the stream's: whoever sees it finds a failed
 * stream. on_failure hears of causes only, not of streams that failed because of another. */
void ms_stream_fail(ms_stream *stream, uint64_t seq, const ms_error *error, uint32_t script)
{
    ms_engine *engine = stream->engine;
    if (ms_stream_has_failed(stream)) return;
    stream->failed_seq = seq;
    stream->failed_script = script; /* the host reads its text: ms_streams_report */
    stream->error = *error;
    if (engine->on_failure && error->status != MS_ERROR_ABORTED)
        engine->on_failure(engine, &stream->error);
    atomic_store(&stream->failed, 1);
    atomic_store(&engine->failed, 1);
}

/* A failure after of_seq does not concern the waiting stream: what it waits for was computed. The
 * cause's message and script line are carried on, with the status MS_ERROR_ABORTED. */
void ms_stream_fail_after(ms_stream *stream, uint64_t seq, const ms_stream *of, uint64_t of_seq)
{
    if (!ms_stream_has_failed(of) || of->failed_seq > of_seq) return;
    ms_error error = of->error;
    error.status = MS_ERROR_ABORTED;
    ms_stream_fail(stream, seq, &error, of->failed_script);
}

bool ms_stream_has_failed(const ms_stream *stream) { return atomic_load(&stream->failed); }

/* Remembers the numbers that the failure skipped: what they should have written is undefined, and
 * reading it later is an error. Without memory for a new interval the last one is extended, which
 * also condemns values that were written in between: safe, and no second error. */
static void mark_spoiled(ms_stream *stream)
{
    size_t count = stream->spoiled_count;
    if (ms_grow(&stream->engine->context, (void **)&stream->spoiled, &stream->spoiled_capacity,
                count + 1, sizeof *stream->spoiled))
        stream->spoiled[count - 1].last = stream->enqueued;
    else
        stream->spoiled[stream->spoiled_count++] =
            (ms_interval){ .first = stream->failed_seq, .last = stream->enqueued };
}

/* Awaits all streams first: after that no worker runs, so errors can be read and cleared without a
 * race. The first cause in order of streams is reported. */
void ms_streams_report(ms_engine *engine)
{
    ms_streams_await(engine);
    const ms_stream *first = NULL;
    for (uint16_t i = 0; i < engine->stream_count; i++) {
        ms_stream *stream = engine->streams[i];
        if (!atomic_load_explicit(&stream->failed, memory_order_acquire)) continue;
        /* A stream that only waited for a failed one carries MS_ERROR_ABORTED: the cause is
         * elsewhere. */
        if (!first
            || (first->error.status == MS_ERROR_ABORTED
                && stream->error.status != MS_ERROR_ABORTED))
            first = stream;
        mark_spoiled(stream);
    }
    if (first) {
        ms_error *error = &engine->context.error;
        *error = first->error;
        snprintf(error->script, sizeof error->script, "%s",
                 ms_strings_get(engine->strings, first->failed_script));
        size_t used = strlen(error->message);
        if (*error->script)
            snprintf(error->message + used, sizeof error->message - used, ", enqueued at %s",
                     error->script);
    }
    /* All streams are idle, so no worker can report meanwhile. */
    for (uint16_t i = 0; i < engine->stream_count; i++)
        atomic_store(&engine->streams[i]->failed, 0);
    atomic_store(&engine->failed, 0);
}

void ms_engine_on_failure(ms_engine *engine, void (*told)(ms_engine *engine, const ms_error *error))
{
    engine->on_failure = told;
}

/* The acquire pairs with the store in ms_stream_fail. A failure is reported once; afterwards the
 * engine can be used again. */
ms_status ms_engine_check(ms_engine *engine)
{
    if (!atomic_load_explicit(&engine->failed, memory_order_acquire)) return MS_OK;
    ms_streams_report(engine);
    return engine->context.error.status;
}

bool ms_engine_set_repeating(ms_engine *engine, bool repeating)
{
    if (!engine->device->repeat) return false;
    engine->device->repeat(engine, repeating);
    engine->repeating = repeating;
    return true;
}
bool ms_engine_is_repeating(const ms_engine *engine) { return engine->repeating; }
void ms_engine_repeats(const ms_engine *engine, ms_repeats *out)
{
    *out = (ms_repeats){ .why = "", .differs = "" };
    if (engine->device->repeats) engine->device->repeats(engine, out);
}

void ms_engine_forbid_sync(ms_engine *engine, int change) { engine->sync_forbidden += change; }

void ms_engine_batch(ms_engine *engine, int change)
{
    if (change < 0 && engine->batches == 0) return;
    bool was_open = engine->batches > 0;
    engine->batches += change;
    bool is_open = engine->batches > 0;
    if (engine->device->batch && was_open != is_open) engine->device->batch(engine, is_open);
}

/* Raw waiting, without a check for errors: it may run while one is being reported. */
void ms_engine_await(ms_stream *stream, uint64_t seq)
{
    ms_engine *engine = stream->engine;
    ms_activity_begin(engine->context.activity);
    engine->device->await(stream, seq);
    ms_activity_end(engine->context.activity);
}

void ms_streams_await(ms_engine *engine)
{
    for (uint16_t i = 0; i < engine->stream_count; i++)
        ms_engine_await(engine->streams[i], engine->streams[i]->enqueued);
}

/* Hooks run inside backward on the host: a wait there would stop the host from enqueueing what the
 * device could do meanwhile. */
ms_status ms_engine_check_sync(ms_engine *engine)
{
    if (engine->sync_forbidden == 0) return MS_OK;
    return ms_engine_fail(engine, MS_ERROR_STATE,
                          "this call waits for the device, which hooks and plans may not do: use a "
                          "metric and lag(), or a future");
}

/* The error of any stream comes out here, not only of the one that was awaited. */
static ms_status await(ms_engine *engine, ms_stream *stream, uint64_t seq)
{
    ms_status status = ms_engine_check_sync(engine);
    if (status) return status;
    ms_engine_await(stream, seq);
    return ms_engine_check(engine);
}

/* Of what is enqueued by now; later work is not waited for. */
ms_status ms_stream_sync(ms_stream *stream)
{
    return await(stream->engine, stream, stream->enqueued);
}

/* The check comes after the wait, since the awaited task may be the one that fails. A point that an
 * earlier failure skipped has no value, also when that failure was reported long ago. */
ms_status ms_point_sync(ms_engine *engine, ms_point point)
{
    if (point.seq == 0) return ms_engine_check(engine);
    if (point.stream >= engine->stream_count || point.seq > engine->streams[point.stream]->enqueued)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "the host was told to wait for work that is not enqueued yet");
    ms_status status = await(engine, engine->streams[point.stream], point.seq);
    /* The failure may have been reported by an earlier call. */
    if (!status && ms_hazard_spoiled(engine, point))
        status =
            ms_engine_fail(engine, MS_ERROR_TASK,
                           "this value was never computed, because of the error reported before");
    return status;
}

/* It never blocks and reports no error. A number that a failure skipped counts as reached. */
bool ms_point_reached(const ms_engine *engine, ms_point point)
{
    return point.seq == 0 || engine->device->reached(engine->streams[point.stream], point.seq);
}

/* In the order of streams; an error ends it, after ms_streams_report has drained them all. */
ms_status ms_engine_sync(ms_engine *engine)
{
    for (uint16_t i = 0; i < engine->stream_count; i++) {
        ms_status status = ms_stream_sync(engine->streams[i]);
        if (status) return status;
    }
    return MS_OK;
}

/* Remembers where each stream is, and awaits where it was `ahead` steps ago: the host can be that
 * many steps ahead of the device and no more. The ring has room for the most, so the entry read is
 * never the one just written unless ahead is 0. */
ms_status ms_engine_step_end(ms_engine *engine, uint32_t ahead)
{
    if (ahead >= MS_STEPS_AHEAD_MAX) ahead = MS_STEPS_AHEAD_MAX - 1;
    uint64_t *marks = engine->step_marks[engine->steps % MS_STEPS_AHEAD_MAX];
    for (uint16_t i = 0; i < engine->stream_count; i++) marks[i] = engine->streams[i]->enqueued;
    uint64_t step = engine->steps++;
    if (step >= ahead) {
        const uint64_t *before = engine->step_marks[(step - ahead) % MS_STEPS_AHEAD_MAX];
        for (uint16_t i = 0; i < engine->stream_count; i++)
            if (before[i]) {
                ms_status status = await(engine, engine->streams[i], before[i]);
                if (status) return status;
            }
    }
    return ms_engine_check(engine);
}
