/* device.c: the table of the CPU device: its state, its memory, and handing work to workers. */
#include "exec/cpu/poison.h"

#include <stdio.h>
#include <string.h>

#include "exec/cpu/services.h"
#include "exec/cpu/task.h"
#include "exec/cpu/team.h"
#include "exec/cpu/worker.h"
#include "exec/stream.h"

/* -------------------------------------------------------------------- opening */

/* The engine's state must be set before the helpers start, because they read it through the
 * engine. */
static ms_status cpu_open(ms_engine *engine, void **state)
{
    void *memory = NULL;
    ms_status status = ms_allocate(&engine->context, sizeof(ms_cpu), "executor", &memory);
    if (status) return status;
    /* Helpers look for it from their first moment on. */
    *state = memory;
    status = ms_team_open(engine, memory);
    if (!status) return MS_OK;
    ms_release(&engine->context, memory);
    *state = NULL;
    return status;
}

/* All streams are closed by now, so no task uses the helpers. */
static void cpu_close(ms_engine *engine, void *state)
{
    ms_team_close(((ms_cpu *)state)->team);
    ms_release(&engine->context, state);
}

/* The thread starts last and finds a complete worker. The worker reads its ring only from number 1
 * on, which the host publishes after this returns. Only the first stream is pinned, to the first
 * core, since helpers take the others; other streams are left to the scheduler. */
static ms_status cpu_stream_open(ms_stream *stream, void **state)
{
    ms_engine *engine = stream->engine;
    const ms_os *os = engine->context.os;
    void *ring = NULL, *memory = NULL;
    ms_status status =
        ms_allocate(&engine->context, MS_STREAM_DEPTH * sizeof(ms_ring_entry), "stream", &ring);
    if (!status) status = ms_allocate(&engine->context, sizeof(ms_cpu_stream), "stream", &memory);
    if (status) {
        ms_release(&engine->context, ring);
        return status;
    }
    ms_cpu_stream *worker = memory;
    worker->stream = stream;
    worker->ring = ring;
    worker->own.engine = engine;
    worker->own.index = atomic_fetch_add(&ms_cpu_of(engine)->threads, 1);
    atomic_store(&worker->wake_at, UINT64_MAX);
    char name[16];
    /* The system allows 15 bytes of a thread's name. */
    snprintf(name, sizeof name, "ms-%.11s", ms_stream_name(stream));
    int failed = os->thread_start(os->user, name, ms_worker_run, worker, &worker->thread);
    if (failed) {
        ms_release(&engine->context, ring);
        ms_release(&engine->context, worker);
        return ms_fail_os(&engine->context, failed, "cannot start the thread of stream",
                          ms_stream_name(stream));
    }
    /* A thread that cannot be pinned runs anyway, so the result is not checked. */
    if (engine->options.pin && ms_stream_index(stream) == 0)
        os->thread_pin(os->user, worker->thread, 0);
    *state = worker;
    return MS_OK;
}

/* The worker finishes what is published before it ends; the join orders its last writes before the
 * release. */
static void cpu_stream_close(ms_stream *stream, void *state)
{
    ms_context *context = &stream->engine->context;
    ms_cpu_stream *worker = state;
    ms_worker_quit(worker);
    context->os->thread_join(context->os->user, worker->thread);
    ms_thread_close(&worker->own);
    ms_release(context, worker->ring);
    ms_release(context, worker);
}

/* -------------------------------------------------------------------- working */

/* The slot of the next number. The ring has MS_STREAM_DEPTH slots; if the slot's former number is
 * not done, the host blocks until it is. The acquire orders the worker's last reads of the slot
 * before the host's writes. */
static ms_ring_entry *slot_of(ms_stream *stream, uint64_t seq)
{
    ms_cpu_stream *worker = ms_cpu_stream_of(stream);
    MS_ASSERT(atomic_load(&worker->head) == seq - 1);
    if (seq > MS_STREAM_DEPTH
        && atomic_load_explicit(&worker->done, memory_order_acquire) < seq - MS_STREAM_DEPTH)
        ms_engine_await(stream, seq - MS_STREAM_DEPTH);
    return &worker->ring[(seq - 1) % MS_STREAM_DEPTH];
}

#if MS_CANARY
/* The bytes are after the storage's own: ms_pool_take has made room for one of each cell. */
static void fill_canaries(ms_ring_entry *slot, const ms_access *accesses, uint32_t count)
{
    slot->canaries = count;
    for (uint32_t i = 0; i < count; i++) {
        const ms_storage *storage = accesses[i].storage;
        size_t body = storage->bytes;
        /* An empty storage has nothing to wait for: its memory may still be in use by the storage
         * that had it before. */
        uint16_t cells = body ? accesses[i].cells : 0;
        slot->canary[i] = (ms_canary){ .byte = storage->data + body + accesses[i].first_cell,
                                       .count = cells,
                                       .mode = accesses[i].mode };
    }
}
#endif

/* All fields are written before publishing, which hands the slot to the worker. Nothing is
 * allocated here: the host's cost of a task is one slot. */
static void cpu_run(ms_stream *stream, const ms_launch *launch)
{
    ms_ring_entry *slot = slot_of(stream, launch->seq);
    slot->task = launch->task;
    slot->mark = NULL;
    slot->wait = NULL;
    slot->record = launch->record;
    slot->script = launch->script;
    slot->canaries = 0;
    if (launch->task->args_bytes)
        memcpy(slot->arguments, launch->arguments, launch->task->args_bytes);
#if MS_CANARY
    fill_canaries(slot, launch->accesses, launch->access_count);
#endif
    ms_worker_publish(ms_cpu_stream_of(stream), launch->seq);
}

/* A wait is a slot like a task: the stream's own thread blocks in it. That thread can run nothing
 * else meanwhile, as its stream runs in order. */
static void cpu_wait(ms_stream *stream, const ms_wait *wait)
{
    ms_ring_entry *slot = slot_of(stream, wait->seq);
    slot->task = NULL;
    slot->mark = NULL;
    slot->record = wait->record;
    slot->wait = wait->of;
    slot->wait_seq = wait->of_seq;
    slot->canaries = 0;
    ms_worker_publish(ms_cpu_stream_of(stream), wait->seq);
}

/* The worker writes the time when it reaches the slot. */
static void cpu_mark(ms_stream *stream, uint64_t seq, ms_mark *mark)
{
    ms_ring_entry *slot = slot_of(stream, seq);
    slot->task = NULL;
    slot->mark = mark;
    slot->wait = NULL;
    slot->record = NULL;
    slot->canaries = 0;
    ms_worker_publish(ms_cpu_stream_of(stream), seq);
}

/* Of the monotonic clock, in which traces count, too. */
static uint64_t cpu_mark_ns(const ms_engine *engine, const ms_mark *mark)
{
    (void)engine;
    return mark->ns;
}

/* The acquire makes what the task has written visible to the caller. */
static bool cpu_reached(const ms_stream *stream, uint64_t seq)
{
    return atomic_load_explicit(&ms_cpu_stream_of(stream)->done, memory_order_acquire) >= seq;
}

/* In a forked child there are no workers, so nothing more will ever be done: a wait becomes an
 * error of the stream in place of a deadlock. The number is the first that is not done, so
 * everything after it counts as skipped. */
static void fail_forked(ms_stream *stream)
{
    /* -1 represents "does not apply". */
    ms_error error = { .status = MS_ERROR_STATE, .rank = -1, .bucket = -1, .collective = -1 };
    snprintf(error.message, sizeof error.message,
             "this process was forked from one with a running engine, whose threads did not come "
             "along: start another program instead, or fork before the first use");
    ms_stream_fail(stream, atomic_load(&ms_cpu_stream_of(stream)->done) + 1, &error, 0);
}

/* The host blocks. It has mostly nothing else to do but shares its core with the helpers, so it
 * spins for 2 us only. host_awaits tells the deadlock detection what it waits for. */
static void cpu_await(ms_stream *stream, uint64_t seq)
{
    const ms_engine *engine = stream->engine;
    const ms_os *os = engine->context.os;
    ms_cpu_stream *worker = ms_cpu_stream_of(stream);
    if (cpu_reached(stream, seq)) return;
    if (os->process_id(os->user) != engine->process) {
        fail_forked(stream);
        return;
    }
    atomic_store(&worker->host_awaits, seq);
    ms_worker_await(worker, seq, (ms_spin){ .nanoseconds = 2000 });
    atomic_store(&worker->host_awaits, 0);
}

/* Runs on any thread, while others go on; `moves` lets the caller see whether something has changed
 * between two looks. Still means: the host is blocked, every stream with work waits for another
 * stream whose number is not reached, or is among the `waiting` tasks that the caller knows to be
 * blocked. All loads are atomic, but the answer is a snapshot that may be torn: the caller looks
 * twice and compares `moves`. */
static bool cpu_is_still(const ms_engine *engine, uint32_t waiting, uint64_t *moves)
{
    bool blocked = false;
    uint32_t running = 0;
    for (uint16_t i = 0; i < atomic_load(&engine->stream_count); i++) {
        ms_cpu_stream *worker = ms_cpu_stream_of(engine->streams[i]);
        uint64_t done = atomic_load(&worker->done), head = atomic_load(&worker->head);
        /* Both only grow, so any step of any stream changes the sum. */
        *moves += done + head;
        blocked |= atomic_load(&worker->host_awaits) > done;
        if (done >= head) continue;
        uint64_t at = atomic_load(&worker->waits_at), seq = at & 0xffffffffffffu;
        /* Not in a wait, so in a task, or between two slots. */
        if (!at) running++;
        else if (cpu_reached(engine->streams[at >> 48], seq)) return false;
    }
    return blocked && running == waiting;
}

/* --------------------------------------------------------------------- memory */

/* Host and device memory are the same here; the writers were awaited by the caller. */
static ms_status cpu_read(ms_engine *engine, void *host, const void *from, size_t bytes)
{
    (void)engine;
    memcpy(host, from, bytes);
    return MS_OK;
}

/* Address space without memory: it does not count against the machine until cpu_commit. */
static void *cpu_reserve(ms_engine *engine, uint64_t bytes)
{
    return engine->context.os->reserve(engine->context.os->user, bytes);
}

/* Huge pages: tensors are large and walked in order, and fewer misses of the TLB pay. */
static int cpu_commit(ms_engine *engine, void *address, uint64_t bytes)
{
    return engine->context.os->commit(engine->context.os->user, address, bytes, true);
}

static bool cpu_moves(const ms_engine *engine)
{
    (void)engine;
    return true;
}

/* The pages go back to the system, which has others where memory is committed next. */
static int cpu_decommit(ms_engine *engine, void *address, uint64_t bytes)
{
    return engine->context.os->decommit(engine->context.os->user, address, bytes);
}

/* Gives back address space and memory together. */
static void cpu_unreserve(ms_engine *engine, void *address, uint64_t bytes)
{
    engine->context.os->unreserve(engine->context.os->user, address, bytes);
}

/* All memory of the process is the device's. */
static ms_status cpu_adopt(ms_engine *engine, void *base, uint64_t bytes)
{
    (void)engine;
    (void)base;
    (void)bytes;
    return MS_OK;
}

/* Nothing was done to adopt it. */
static void cpu_disown(ms_engine *engine, void *base, uint64_t bytes)
{
    (void)engine;
    (void)base;
    (void)bytes;
}

/* The memory of the machine, or the limit of its cgroup. */
static uint64_t cpu_capacity(const ms_engine *engine)
{
    /* Zeroed, so an error leaves a limit of 0, which refuses every storage, and no random one. */
    ms_machine machine = { 0 };
    engine->context.os->machine(engine->context.os->user, &machine);
    return machine.memory_bytes;
}

static const ms_device_memory memory = { .capacity = cpu_capacity,
                                         .reserve = cpu_reserve,
                                         .commit = cpu_commit,
                                         .moves = cpu_moves,
                                         .decommit = cpu_decommit,
                                         .unreserve = cpu_unreserve };

const ms_device ms_device_cpu = {
    .name = "cpu",
    .kernels = "cpu",
    .values = true,
    .open = cpu_open,
    .close = cpu_close,
    .stream_open = cpu_stream_open,
    .stream_close = cpu_stream_close,
    .run = cpu_run,
    .wait = cpu_wait,
    .reached = cpu_reached,
    .await = cpu_await,
    .is_still = cpu_is_still,
    .mark = cpu_mark,
    .mark_ns = cpu_mark_ns,
    .copy_in = ms_cpu_copy_in,
    .copy_out = ms_cpu_copy_out,
    .read = cpu_read,
    .fail_if = ms_cpu_fail_if,
    .call = ms_cpu_call_host,
    .poison = &ms_cpu_poison,
    .memory = &memory,
    .adopt = cpu_adopt,
    .disown = cpu_disown,
};
