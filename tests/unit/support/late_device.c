/* late_device.c: see late_device.h.
 *
 * Work waits in a queue for each stream. Nothing runs until the host awaits a number. Then the
 * device repeatedly chooses at random a stream that can make progress and runs its first piece of
 * work, until the number is reached. It has no threads: CPU tasks run on the host.
 */
#include "../late_device.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "exec/cpu/task.h"
#include "exec/stream.h"

typedef struct piece {
    struct piece *next;
    uint64_t seq;
    /* One of these is not NULL: a task, a mark, or a wait for a number. */
    const ms_task *task;
    ms_mark *mark;
    const ms_stream *of;
    uint64_t of_seq;
    uint32_t script;
    ms_trace_record *record;
    alignas(64) unsigned char arguments[MS_TASK_ARGS_MAX];
} piece;

typedef struct late_stream {
    piece *first, **last;
    uint64_t done;
    int32_t priority;
} late_stream;

typedef struct late {
    ms_thread thread;
    uint64_t random;
} late;

static ms_status late_open(ms_engine *engine, void **state)
{
    const char *seed = strchr(getenv("MOONSHARD_TEST_DEVICE"), ':');
    void *memory = NULL;
    ms_status status = ms_allocate(&engine->context, sizeof(late), "device", &memory);
    if (status) return status;
    late *self = memory;
    self->thread.engine = engine;
    self->random = seed ? strtoull(seed + 1, NULL, 10) + 1 : 1;
    *state = self;
    return MS_OK;
}

static void late_close(ms_engine *engine, void *state)
{
    ms_thread_close(&((late *)state)->thread);
    ms_release(&engine->context, state);
}

static ms_status late_stream_open(ms_stream *stream, void **state)
{
    void *memory = NULL;
    ms_status status =
        ms_allocate(&stream->engine->context, sizeof(late_stream), "stream", &memory);
    if (status) return status;
    late_stream *queue = memory;
    queue->last = &queue->first;
    queue->priority = stream->priority;
    *state = queue;
    return MS_OK;
}

/* A piece may not fail to be enqueued, so it is made aside from the engine's memory. */
static piece *new_piece(void)
{
    piece *made = aligned_alloc(64, (sizeof(piece) + 63) / 64 * 64);
    if (!made) abort();
    memset(made, 0, sizeof *made);
    return made;
}

static piece *add(ms_stream *stream, uint64_t seq, ms_trace_record *record)
{
    late_stream *queue = stream->device_state;
    piece *made = new_piece();
    made->seq = seq;
    made->record = record;
    *queue->last = made;
    queue->last = &made->next;
    return made;
}

static void late_run(ms_stream *stream, const ms_launch *launch)
{
    piece *made = add(stream, launch->seq, launch->record);
    made->task = launch->task;
    made->script = launch->script;
    if (launch->task->args_bytes)
        memcpy(made->arguments, launch->arguments, launch->task->args_bytes);
}

/* A handle is the address: the process that imports is this one. */
static ms_status late_share(ms_engine *engine, const void *address, uint64_t bytes,
                            ms_memory_handle *out)
{
    (void)engine;
    memset(out, 0, sizeof *out);
    memcpy(out->bytes, &address, sizeof address);
    out->size = bytes;
    return MS_OK;
}

static ms_status late_import(ms_engine *engine, const ms_memory_handle *handle, void **address)
{
    (void)engine;
    memcpy(address, handle->bytes, sizeof *address);
    return MS_OK;
}

static void late_forget(ms_engine *engine, void *address)
{
    (void)engine;
    (void)address;
}

static void late_wait(ms_stream *stream, const ms_wait *wait)
{
    piece *made = add(stream, wait->seq, wait->record);
    made->of = wait->of;
    made->of_seq = wait->of_seq;
}

/* A mark has an object of its own, as a GPU's marks have events: a time and whether it is there. */
static ms_status late_mark_open(ms_engine *engine, ms_mark *mark)
{
    return ms_allocate(&engine->context, sizeof(uint64_t), "mark", &mark->own);
}

static void late_mark_close(ms_engine *engine, ms_mark *mark)
{
    ms_release(&engine->context, mark->own);
}

static void late_mark(ms_stream *stream, uint64_t seq, ms_mark *mark)
{
    add(stream, seq, NULL)->mark = mark;
}

static uint64_t late_mark_ns(const ms_engine *engine, const ms_mark *mark)
{
    (void)engine;
    return *(const uint64_t *)mark->own;
}

static bool late_reached(const ms_stream *stream, uint64_t seq)
{
    return ((const late_stream *)stream->device_state)->done >= seq;
}

/* Runs the stream's first piece of work if it can run now. */
static bool step(late *self, ms_stream *stream)
{
    late_stream *queue = stream->device_state;
    piece *now = queue->first;
    ms_error error;
    if (!now || (now->of && !late_reached(now->of, now->of_seq))) return false;
    if (now->record && !now->record->started_ns) now->record->started_ns = ms_now(stream->engine);
    if (now->mark) *(uint64_t *)now->mark->own = ms_now(stream->engine);
    else if (now->of) ms_stream_fail_after(stream, now->seq, now->of, now->of_seq);
    else if (!ms_stream_has_failed(stream)) {
        ms_task_result result = ms_cpu_call(&self->thread, NULL, now->task, now->arguments, &error);
        if (result == MS_TASK_PENDING) return false;
        if (result == MS_TASK_FAILED) ms_stream_fail(stream, now->seq, &error, now->script);
    }
    if (now->record) now->record->finished_ns = ms_now(stream->engine);
    queue->first = now->next;
    if (!queue->first) queue->last = &queue->first;
    queue->done = now->seq;
    free(now);
    return true;
}

static ms_status late_set_priority(ms_stream *stream, int32_t priority)
{
    ((late_stream *)stream->device_state)->priority = priority;
    return MS_OK;
}

/* Work of a stream with a priority, if any can run now. */
static bool step_first(late *self, const ms_engine *engine)
{
    for (uint16_t i = 0; i < engine->stream_count; i++)
        if (((late_stream *)engine->streams[i]->device_state)->priority > 0
            && step(self, engine->streams[i]))
            return true;
    return false;
}

/* Host memory that only its own release may free: the bytes before it say where it is from. */
static void *late_host_allocate(ms_engine *engine, size_t bytes)
{
    void *memory = NULL;
    if (ms_allocate(&engine->context, bytes + 64, "host memory", &memory)) return NULL;
    *(const ms_engine **)memory = engine;
    return (char *)memory + 64;
}

static void late_host_release(ms_engine *engine, void *memory)
{
    char *whole = (char *)memory - 64;
    if (*(const ms_engine **)(void *)whole != engine) abort();
    ms_release(&engine->context, whole);
}

static void late_await(ms_stream *stream, uint64_t seq)
{
    ms_engine *engine = stream->engine;
    late *self = engine->device_state;
    while (!late_reached(stream, seq)) {
        if (step_first(self, engine)) continue;
        self->random = self->random * 6364136223846793005u + 1442695040888963407u;
        step(self, engine->streams[(self->random >> 33) % engine->stream_count]);
    }
}

static void late_stream_close(ms_stream *stream, void *state)
{
    late_await(stream, stream->enqueued);
    ms_release(&stream->engine->context, state);
}

/* ------------------------------------------- C functions as tasks of the cuda device */

/* A task of a test on its way. It may never be called, as on a stream that has failed: the list
 * keeps it. */
typedef struct own_task {
    struct own_task *next;
    ms_stream *stream;
    const ms_task *task;
    uint64_t seq;
    uint32_t script;
    alignas(64) unsigned char arguments[MS_TASK_ARGS_MAX];
} own_task;

static ms_status call_own_task(void *user, char *message, size_t bytes)
{
    own_task *own = user;
    ms_thread thread = { .engine = own->stream->engine };
    ms_task_result result = MS_TASK_PENDING;
    ms_error error;
    while (result == MS_TASK_PENDING)
        result = ms_cpu_call(&thread, NULL, own->task, own->arguments, &error);
    ms_thread_close(&thread);
    if (result == MS_TASK_DONE) return MS_OK;
    ms_stream_fail(own->stream, own->seq, &error, own->script);
    snprintf(message, bytes, "%s", error.message);
    return error.status;
}

/* The memory of the stand-in is the host's, so functions of C may use it. */
static void run_on_stand_in(ms_stream *stream, const ms_launch *launch)
{
    static _Atomic(own_task *) all;
    if (!launch->task || !launch->task->function) {
        ms_device_cuda.run(stream, launch);
        return;
    }
    own_task *own = aligned_alloc(64, (sizeof *own + 63) / 64 * 64);
    if (!own) abort();
    own->stream = stream;
    own->task = launch->task;
    own->seq = launch->seq;
    own->script = launch->script;
    if (launch->task->args_bytes)
        memcpy(own->arguments, launch->arguments, launch->task->args_bytes);
    own->next = atomic_load(&all);
    while (!atomic_compare_exchange_weak(&all, &own->next, own)) {}
    ms_host_call call = {
        .name = launch->name, .function = call_own_task, .user = own, .kind = launch->task->kind
    };
    ms_device_cuda.call(stream, launch, &call);
}

/* Before main: setenv while another rank's thread reads the environment is a race, in which getenv
 * reads memory that setenv has freed. */
static ms_device on_stand_in;
__attribute__((constructor)) static void make_on_stand_in(void)
{
    const char *driver = getenv("MOONSHARD_STAND_IN");
    if (!device_is_cuda() || !driver) return;
    const char *seed = strchr(getenv("MOONSHARD_TEST_DEVICE"), ':');
    setenv("MOONSHARD_CUDA_DRIVER", driver, 1);
    if (seed) setenv("MOONSHARD_STAND_IN_SEED", seed + 1, 1);
    on_stand_in = ms_device_cuda;
    on_stand_in.run = run_on_stand_in;
}

bool device_runs_own_tasks(void) { return !device_is_cuda() || getenv("MOONSHARD_STAND_IN"); }

bool device_is_cuda(void)
{
    const char *asked = getenv("MOONSHARD_TEST_DEVICE");
    return asked && strncmp(asked, "cuda", 4) == 0;
}

const ms_device *late_device(const char *device)
{
    static ms_device table;
    const char *asked = getenv("MOONSHARD_TEST_DEVICE");
    if (device_is_cuda() && (!device || strcmp(device, "cpu") == 0)) {
        /* Over the stand-in for the driver, whose order of work the seed chooses; on a GPU
         * (tests/gpu/run.sh) there is none. */
        return getenv("MOONSHARD_STAND_IN") ? &on_stand_in : &ms_device_cuda;
    }
    if (!asked || strncmp(asked, "late", 4) != 0) return NULL;
    if (device && strcmp(device, "cpu") != 0) return NULL;
    /* Its memory is the CPU's. */
    table = ms_device_cpu;
    table.name = "late";
    table.open = late_open;
    table.close = late_close;
    table.stream_open = late_stream_open;
    table.stream_close = late_stream_close;
    table.run = late_run;
    table.wait = late_wait;
    table.reached = late_reached;
    table.await = late_await;
    table.is_still = NULL;
    table.set_priority = late_set_priority;
    table.host_allocate = late_host_allocate;
    table.host_release = late_host_release;
    table.mark_open = late_mark_open;
    table.mark_close = late_mark_close;
    table.mark = late_mark;
    table.mark_ns = late_mark_ns;
    table.share = late_share;
    table.import = late_import;
    table.forget = late_forget;
    return &table;
}
