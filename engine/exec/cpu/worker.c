/* worker.c: the thread of one CPU stream: takes slots in order, waits for other streams, runs
 * tasks, and says what is done. */
#include "exec/cpu/worker.h"

#include "exec/cpu/task.h"
#include "exec/stream.h"

/* ------------------------------------------------------------------ waiting */

/* A sleeper leaves the lowest number that it waits for in wake_at, then looks at `done` once more;
 * the worker stores `done` and then looks at wake_at. Both are sequentially consistent, so one of
 * them sees the other, and no wakeup is lost. Workers without sleepers make no system call. */
void ms_worker_await(ms_cpu_stream *worker, uint64_t seq, ms_spin spin)
{
    const ms_engine *engine = worker->own.engine;
    if (atomic_load_explicit(&worker->done, memory_order_acquire) >= seq) return;
    if (spin.nanoseconds) {
        uint64_t limit = ms_now(engine) + spin.nanoseconds;
        do {
            for (int i = 0; i < 64; i++) {
                if (atomic_load_explicit(&worker->done, memory_order_acquire) >= seq) return;
                ms_pause();
            }
        } while (ms_now(engine) < limit);
    }
    for (;;) {
        uint32_t seen = atomic_load(&worker->done_bell);
        /* Several sleepers leave the lowest of their numbers; those that are woken too early look
         * again and go back to sleep. */
        uint64_t lowest = atomic_load(&worker->wake_at);
        while (seq < lowest && !atomic_compare_exchange_weak(&worker->wake_at, &lowest, seq)) {}
        if (atomic_load(&worker->done) >= seq) return;
        ms_futex_wait(&worker->done_bell, seen, UINT64_MAX);
    }
}

/* The store of `done` publishes all that the task has written. wake_at is cleared before the bell
 * changes. */
static void finish(ms_cpu_stream *worker, uint64_t seq)
{
    atomic_store(&worker->done, seq);
    if (atomic_load(&worker->wake_at) > seq) return;
    /* A sleeper that registers in between sees the bell change, and registers again. */
    atomic_store(&worker->wake_at, UINT64_MAX);
    atomic_fetch_add(&worker->done_bell, 1);
    ms_futex_wake(&worker->done_bell, UINT32_MAX);
}

/* Blocks until slot `seq` is published; false when the stream is to end, after all that was
 * published has run. It sleeps in the same manner as a bell: `asleep` is set before `head` is read
 * again, and ms_worker_publish stores `head` before it reads `asleep`. Spinning spares a system
 * call where the next task follows soon; it ends after the time that ms_spin_choose allows. */
static bool await_work(ms_cpu_stream *worker, uint64_t seq, ms_spin spin)
{
    const ms_engine *engine = worker->own.engine;
    uint64_t limit = 0;
    for (;;) {
        for (int i = 0; i < 64; i++) {
            if (atomic_load_explicit(&worker->head, memory_order_acquire) >= seq) return true;
            ms_pause();
        }
        if (atomic_load(&worker->quit)) return false;
        if (spin.nanoseconds) {
            uint64_t now = ms_now(engine);
            if (!limit) limit = now + spin.nanoseconds;
            if (now < limit) continue;
        }
        /* The bell is read before `asleep` is set: a publish in between changes it, and the futex
         * does not sleep. */
        uint32_t seen = atomic_load(&worker->bell);
        atomic_store(&worker->asleep, 1);
        if (atomic_load(&worker->head) < seq && !atomic_load(&worker->quit))
            ms_futex_wait(&worker->bell, seen, UINT64_MAX);
        atomic_store(&worker->asleep, 0);
        limit = 0;
    }
}

/* The store of `head` publishes the slots before it. The system call is made only for a worker that
 * sleeps or is about to. */
void ms_worker_publish(ms_cpu_stream *worker, uint64_t seq)
{
    atomic_store(&worker->head, seq);
    if (!atomic_load(&worker->asleep)) return;
    atomic_fetch_add(&worker->bell, 1);
    ms_futex_wake(&worker->bell, 1);
}

/* The bell changes in any case, so that a worker that is about to sleep does not. */
void ms_worker_quit(ms_cpu_stream *worker)
{
    atomic_store(&worker->quit, 1);
    atomic_fetch_add(&worker->bell, 1);
    ms_futex_wake(&worker->bell, 1);
}

/* ------------------------------------------------------------------ running */

/* A plain access, on purpose: an ordering that is missing is then a data race, which the sanitizer
 * reports with both tasks. Without sanitizers there is nothing to touch. */
static void touch_canaries(const ms_ring_entry *slot)
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

/* A pending task is called again until it is done: it polls for something outside, such as another
 * rank. The tasks after it on this stream wait, those of other streams go on. */
static void run_task(ms_cpu_stream *worker, ms_ring_entry *slot, uint64_t seq)
{
    ms_team *team = ms_cpu_of(worker->own.engine)->team;
    touch_canaries(slot);
    ms_task_result result;
    do {
        result = ms_cpu_call(&worker->own, team, slot->task, slot->arguments, &worker->error);
        if (result == MS_TASK_PENDING) ms_pause();
    } while (result == MS_TASK_PENDING);
    if (result == MS_TASK_FAILED) ms_stream_fail(worker->stream, seq, &worker->error, slot->script);
}

/* waits_at shows the deadlock detection what this stream waits for, while it waits. A failure of
 * the other stream is carried over afterwards. */
static void run_wait(ms_cpu_stream *worker, const ms_ring_entry *slot, uint64_t seq)
{
    /* The usual case is a number that is done already: then nothing is published and no clock is
     * read. */
    ms_cpu_stream *of = ms_cpu_stream_of(slot->wait);
    if (atomic_load_explicit(&of->done, memory_order_acquire) < slot->wait_seq) {
        atomic_store(&worker->waits_at,
                     (uint64_t)ms_stream_index(slot->wait) << 48 | slot->wait_seq);
        ms_worker_await(of, slot->wait_seq, ms_cpu_of(worker->own.engine)->spin);
        atomic_store(&worker->waits_at, 0);
    }
    ms_stream_fail_after(worker->stream, seq, slot->wait, slot->wait_seq);
}

/* Waits and marks are passed on a failed stream too, and tasks are skipped: other streams and the
 * host that wait for its numbers must go on. Every number counts as done. Times are taken on this
 * thread, so a record shows waiting and running apart from enqueueing. */
void ms_worker_run(void *argument)
{
    ms_cpu_stream *worker = argument;
    const ms_engine *engine = worker->own.engine;
    ms_spin spin = ms_cpu_of(engine)->spin;
    for (uint64_t seq = 1; await_work(worker, seq, spin); seq++) {
        ms_ring_entry *slot = &worker->ring[(seq - 1) % MS_STREAM_DEPTH];
        ms_trace_record *record = slot->record;
        if (record) record->started_ns = ms_now(engine);
        /* A slot without a task and a mark is a wait. */
        if (slot->mark) slot->mark->ns = ms_now(engine);
        else if (!slot->task) run_wait(worker, slot, seq);
        else if (!ms_stream_has_failed(worker->stream)) run_task(worker, slot, seq);
        if (record) record->finished_ns = ms_now(engine);
        ms_activity_done(engine->context.activity);
        finish(worker, seq);
    }
}
