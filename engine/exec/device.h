/* device.h: what differs between a CPU, a simulation and a GPU, as one const table of functions.
 *
 * The core of exec/ decides: numbers, waits, addresses, what is live. A device carries out.
 *
 * Invariants
 * - The host thread calls every function of the table.
 * - The work of a stream has the numbers 1, 2, 3, ... `run` or `wait` is called once for each
 *   number, in order, and returns without waiting for it to finish. Where a device has no room for
 *   more work, the call blocks, and then only for work that is enqueued already.
 * - A stream finishes its work in order. A number is reached when its work has finished or was
 *   skipped, and stays reached.
 * - A task that fails makes its stream fail (ms_stream_fail). The device skips what follows on that
 *   stream, and on streams that wait for it, and counts it as reached.
 * - The core never asks what is reached in order to decide about memory or waits. */
#ifndef MOONSHARD_EXEC_DEVICE_H
#define MOONSHARD_EXEC_DEVICE_H

#include "moonshard/exec.h"

/* One task on its way to a device. All pointers but `task` and `record` are borrowed for the call;
 * the device copies task->args_bytes bytes of arguments. */
typedef struct ms_launch {
    uint64_t seq;
    const ms_task *task;
    const void *arguments;
    const ms_access *accesses;
    uint32_t access_count;
    uint32_t script; /* ms_engine_strings: the script line that enqueued it */
    ms_task_cost cost;
    ms_trace_record *record; /* NULL unless tracing: the device writes when it started and ended */
} ms_launch;

/* A wait of one stream for number of_seq of another. */
typedef struct ms_wait {
    uint64_t seq;
    const ms_stream *of;
    uint64_t of_seq;
    ms_trace_record *record; /* NULL unless tracing */
} ms_wait;

struct ms_device {
    const char *name; /* what users call it */
    /* Whose kernels it runs: each layer has a table of tasks for every family. */
    const char *kernels;
    bool values; /* tasks run, memory exists, and tensors have values */

    /* The device's state in an engine: engine->device_state. `open` comes before the first stream,
     * `close` after the last. */
    ms_status (*open)(ms_engine *engine, void **state);
    void (*close)(ms_engine *engine, void *state);
    /* The device's state in a stream: stream->device_state. `stream_close` waits for its work. */
    ms_status (*stream_open)(ms_stream *stream, void **state);
    void (*stream_close)(ms_stream *stream, void *state);

    void (*run)(ms_stream *stream, const ms_launch *launch);
    void (*wait)(ms_stream *stream, const ms_wait *wait);
    bool (*reached)(const ms_stream *stream, uint64_t seq);
    void (*await)(ms_stream *stream, uint64_t seq); /* the host blocks until seq is reached */
    /* See ms_engine_is_still. May be called on any thread. NULL: it is never known. */
    bool (*is_still)(const ms_engine *engine, uint32_t waiting, uint64_t *moves);

    /* The pool's memory: a range of addresses, of which parts become usable later. `reserve`
     * answers NULL, `commit` a negative errno where the machine has no room. */
    void *(*reserve)(ms_engine *engine, uint64_t bytes);
    int (*commit)(ms_engine *engine, void *address, uint64_t bytes);
    void (*unreserve)(ms_engine *engine, void *address, uint64_t bytes);
    /* Bytes that the pool may take where the engine's options do not say. */
    uint64_t (*capacity)(const ms_engine *engine);
};

extern const ms_device ms_device_cpu, ms_device_sim;

/* The device of the engine. */
const ms_device *ms_engine_device_of(const ms_engine *engine);
/* The kernels of one layer for one family. A layer may embed this as the first member of a table
 * with more in it. */
typedef struct ms_kernels {
    const char *family; /* as in ms_device.kernels */
    const ms_task *const *tasks;
} ms_kernels;

/* The kernels of a layer for the engine's device: one of `tables`, which end with NULL. Looked up
 * once for each engine. */
const ms_kernels *ms_engine_kernels(ms_engine *engine, ms_engine_slot layer,
                                    const ms_kernels *const *tables);

/* For a device, on any thread: number seq of the stream has failed with this error, and the script
 * line `script` had enqueued it. A stream keeps its first failure. */
void ms_stream_fail(ms_stream *stream, uint64_t seq, const ms_error *error, uint32_t script);
/* For a device, after number seq of the stream has waited for number of_seq of `of`: if that number
 * failed or was skipped, the stream fails as well (MS_ERROR_ABORTED). On any thread. */
void ms_stream_fail_after(ms_stream *stream, uint64_t seq, const ms_stream *of, uint64_t of_seq);
/* On any thread. */
bool ms_stream_has_failed(const ms_stream *stream);

#endif
