/* worker.c: the thread of one CPU stream: takes slots in order, waits for other streams, runs
 * tasks, says what is done. */
#include "exec/cpu/cpu.h"

#include <stdio.h>
#include <string.h>

/* ------------------------------------------------------------------ waiting */

/* Blocks until done >= seq. A sleeper leaves the lowest number that it waits for in wake_at; the
 * worker rings once when it gets there. */
static void await_done(ms_stream *stream, uint64_t seq, ms_spin spin)
{
    const ms_engine *engine = stream->engine;
    if (atomic_load_explicit(&stream->done, memory_order_acquire) >= seq) return;
    if (spin.nanoseconds) {
        uint64_t limit = ms_now(engine) + spin.nanoseconds;
        do {
            for (int i = 0; i < 64; i++) {
                if (atomic_load_explicit(&stream->done, memory_order_acquire) >= seq) return;
                ms_pause();
            }
        } while (ms_now(engine) < limit);
    }
    for (;;) {
        uint32_t seen = atomic_load(&stream->done_bell);
        uint64_t lowest = atomic_load(&stream->wake_at);
        while (seq < lowest && !atomic_compare_exchange_weak(&stream->wake_at, &lowest, seq)) {}
        if (atomic_load(&stream->done) >= seq) return;
        ms_futex_wait(&stream->done_bell, seen, UINT64_MAX);
    }
}

static void finish(ms_stream *stream, uint64_t seq)
{
    atomic_store(&stream->done, seq);
    if (atomic_load(&stream->wake_at) > seq) return;
    /* A waiter that registers in between sees the bell change and registers again. */
    atomic_store(&stream->wake_at, UINT64_MAX);
    atomic_fetch_add(&stream->done_bell, 1);
    ms_futex_wake(&stream->done_bell, UINT32_MAX);
}

/* Blocks until slot `seq` is published; false when the stream is to end. */
static bool await_work(ms_stream *stream, uint64_t seq, ms_spin spin)
{
    const ms_engine *engine = stream->engine;
    uint64_t limit = 0;
    for (;;) {
        for (int i = 0; i < 64; i++) {
            if (atomic_load_explicit(&stream->head, memory_order_acquire) >= seq) return true;
            ms_pause();
        }
        if (atomic_load(&stream->quit)) return false;
        if (spin.nanoseconds) {
            uint64_t now = ms_now(engine);
            if (!limit) limit = now + spin.nanoseconds;
            if (now < limit) continue;
        }
        uint32_t seen = atomic_load(&stream->bell);
        atomic_store(&stream->asleep, 1);
        if (atomic_load(&stream->head) < seq && !atomic_load(&stream->quit))
            ms_futex_wait(&stream->bell, seen, UINT64_MAX);
        atomic_store(&stream->asleep, 0);
        limit = 0;
    }
}

static void publish(ms_stream *stream)
{
    atomic_store(&stream->head, stream->enqueued);
    if (!atomic_load(&stream->asleep)) return;
    atomic_fetch_add(&stream->bell, 1);
    ms_futex_wake(&stream->bell, 1);
}

/* ------------------------------------------------------------------ running */

ms_isa ms_run_isa(const ms_run *run) { return run->engine->isa; }
ms_thread *ms_run_thread(ms_run *run) { return run->thread; }

static void stream_fail(ms_stream *stream, uint64_t seq)
{
    stream->failed_seq = seq;
    if (stream->engine->on_failure && stream->error.status != MS_ERROR_ABORTED)
        stream->engine->on_failure(stream->engine, &stream->error);
    atomic_store(&stream->failed, 1);
    atomic_store(&stream->engine->failed, 1);
}

void ms_run_fail(ms_run *run, ms_status status, const char *format, ...)
{
    if (run->told) return;
    run->told = true;
    ms_error *error = &run->stream->error;
    memset(error, 0, sizeof *error);
    error->status = status;
    error->rank = error->bucket = -1;
    error->collective = -1;
    snprintf(error->operation, sizeof error->operation, "%s", run->task->name);
    /* Only the host may read the script's text: see ms_streams_report. */
    run->stream->failed_script = run->script;
    va_list list;
    va_start(list, format);
    vsnprintf(error->message, sizeof error->message - MS_SCRIPT_BYTES, format, list);
    va_end(list);
}

ms_error *ms_run_error(ms_run *run) { return &run->stream->error; }

static void touch_canaries(const ms_slot *slot)
{
#if MS_CANARY
    for (uint32_t i = 0; i < slot->canaries; i++)
        for (uint16_t c = 0; c < slot->canary[i].count; c++) {
            volatile char *byte = slot->canary[i].byte + c;
            if (slot->canary[i].mode & MS_WRITE) *byte = 1;
            else (void)*byte;
        }
#else
    (void)slot;
#endif
}

static void run_task(ms_worker *worker, ms_slot *slot, uint64_t seq)
{
    ms_stream *stream = worker->stream;
    ms_run run = { .engine = stream->engine,
                   .stream = stream,
                   .thread = &worker->own,
                   .task = slot->task,
                   .seq = seq,
                   .script = slot->script };
    touch_canaries(slot);
    ms_task_result result;
    while ((result = slot->task->function(&run, slot->arguments)) == MS_TASK_PENDING) ms_pause();
    if (result == MS_TASK_FAILED || run.told) {
        if (!run.told) ms_run_fail(&run, MS_ERROR_TASK, "%s failed", slot->task->name);
        stream_fail(stream, seq);
    }
}

static void run_wait(ms_worker *worker, const ms_slot *slot, uint64_t seq)
{
    ms_stream *stream = worker->stream, *of = stream->engine->streams[slot->wait.stream];
    if (atomic_load_explicit(&of->done, memory_order_acquire) < slot->wait.seq) {
        atomic_store(&stream->stands_at, (uint64_t)slot->wait.stream << 48 | slot->wait.seq);
        await_done(of, slot->wait.seq, ((ms_cpu *)stream->engine->executor_state)->spin);
        atomic_store(&stream->stands_at, 0);
    }
    if (atomic_load(&stream->failed) || !atomic_load(&of->failed)
        || of->failed_seq > slot->wait.seq)
        return;
    stream->error = of->error;
    stream->failed_script = of->failed_script;
    stream->error.status = MS_ERROR_ABORTED;
    stream_fail(stream, seq);
}

static void worker_run(void *argument)
{
    ms_worker *worker = argument;
    ms_stream *stream = worker->stream;
    ms_spin spin = ((ms_cpu *)stream->engine->executor_state)->spin;
    for (uint64_t seq = 1; await_work(stream, seq, spin); seq++) {
        ms_slot *slot = &stream->ring[(seq - 1) % MS_RING_SLOTS];
        ms_trace_record *record = slot->record;
        if (record) record->started_ns = ms_now(stream->engine);
        if (!slot->task) run_wait(worker, slot, seq);
        else if (!atomic_load_explicit(&stream->failed, memory_order_relaxed))
            run_task(worker, slot, seq);
        if (record) record->finished_ns = ms_now(stream->engine);
        ms_activity_done(stream->engine->context.activity);
        finish(stream, seq);
    }
}

/* ------------------------------------------------------------- the executor */

static ms_status cpu_stream_open(ms_stream *stream)
{
    ms_engine *engine = stream->engine;
    const ms_os *os = engine->context.os;
    void *ring = NULL, *memory = NULL;
    ms_status status =
        ms_allocate(&engine->context, MS_RING_SLOTS * sizeof(ms_slot), "stream", &ring);
    if (!status) status = ms_allocate(&engine->context, sizeof(ms_worker), "stream", &memory);
    if (status) {
        ms_release(&engine->context, ring);
        return status;
    }
    ms_worker *worker = memory;
    worker->stream = stream;
    worker->own.engine = engine;
    worker->own.index = atomic_fetch_add(&((ms_cpu *)engine->executor_state)->threads, 1);
    stream->ring = ring;
    stream->executor = worker;
    char name[16];
    snprintf(name, sizeof name, "ms-%.11s", stream->name);
    int failed = os->thread_start(os->user, name, worker_run, worker, &worker->thread);
    if (failed) {
        ms_release(&engine->context, ring);
        ms_release(&engine->context, worker);
        return ms_fail_os(&engine->context, failed, "cannot start the thread of stream",
                          stream->name);
    }
    if (engine->pin && stream->index == 0) os->thread_pin(os->user, worker->thread, 0);
    return MS_OK;
}

static void cpu_stream_close(ms_stream *stream)
{
    ms_context *context = &stream->engine->context;
    ms_worker *worker = stream->executor;
    atomic_store(&stream->quit, 1);
    atomic_fetch_add(&stream->bell, 1);
    ms_futex_wake(&stream->bell, 1);
    context->os->thread_join(context->os->user, worker->thread);
    ms_thread_close(&worker->own);
    ms_release(context, worker);
    ms_release(context, stream->ring);
}

static ms_status cpu_open(ms_engine *engine)
{
    ms_status status =
        ms_allocate(&engine->context, sizeof(ms_cpu), "executor", &engine->executor_state);
    if (status) return status;
    ms_team *team = NULL;
    status = ms_team_open(engine, &team);
    if (status) {
        ms_release(&engine->context, engine->executor_state);
        engine->executor_state = NULL;
    }
    return status;
}

static void cpu_close(ms_engine *engine)
{
    ms_cpu *cpu = engine->executor_state;
    ms_team_close(cpu->team);
    ms_release(&engine->context, cpu);
    engine->executor_state = NULL;
}

/* In a forked child there are no workers, and nothing more will ever be done: waiting is an error
 * of the stream. */
static void fail_forked(ms_stream *stream)
{
    ms_error *error = &stream->error;
    memset(error, 0, sizeof *error);
    error->status = MS_ERROR_STATE;
    error->rank = error->bucket = -1;
    error->collective = -1;
    snprintf(error->message, sizeof error->message,
             "this process was forked from one with a running engine, whose threads did not come "
             "along: start another program instead, or fork before the first use");
    stream->failed_script = 0;
    stream_fail(stream, atomic_load(&stream->done) + 1);
}

/* The host mostly has nothing else to do, but shares its core with the helpers: it spins only a
 * moment. */
static void cpu_await(ms_stream *stream, uint64_t seq)
{
    const ms_engine *engine = stream->engine;
    if (atomic_load_explicit(&stream->done, memory_order_acquire) >= seq) return;
    if (engine->context.os->process_id(engine->context.os->user) != engine->process)
        fail_forked(stream);
    else {
        atomic_store(&stream->host_awaits, seq);
        await_done(stream, seq, (ms_spin){ .nanoseconds = 2000 });
        atomic_store(&stream->host_awaits, 0);
    }
}

const ms_executor ms_executor_cpu = {
    .name = "cpu",
    .data = true,
    .open = cpu_open,
    .close = cpu_close,
    .stream_open = cpu_stream_open,
    .stream_close = cpu_stream_close,
    .publish = publish,
    .await = cpu_await,
};
