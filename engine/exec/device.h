/* device.h: what differs between a CPU, a simulation and a GPU, as one const table of functions.
 *
 * The core of exec/ decides: numbers, waits, addresses, what is live. A device carries out.
 *
 * Invariants
 * - The host thread calls every function of the table.
 * - The work of a stream has the numbers 1, 2, 3, ... One of the functions that take a number
 *   (`run`, `wait`, `mark`, `copy_in`, `copy_out`, `fail_if`, `call`) is called once for each
 * number, in order, and returns without waiting for it to finish. Where a device has no room for
 * more work, the call blocks, and then only for work that is enqueued already.
 * - A stream finishes its work in order. A number is reached when its work has finished or was
 *   skipped, and stays reached.
 * - A task that fails makes its stream fail (ms_stream_fail). The device skips what follows on that
 *   stream, and on streams that wait for it, and counts it as reached.
 * - The core never asks what is reached in order to decide about memory or waits. */
#ifndef MOONSHARD_EXEC_DEVICE_H
#define MOONSHARD_EXEC_DEVICE_H

#include "moonshard/exec.h"

/* One task on its way to a device. All pointers but `name`, `task` and `record` are borrowed for
 * the call; the device copies task->args_bytes bytes of arguments. */
typedef struct ms_launch {
    uint64_t seq;
    const char *name;    /* of the task or copy, for errors */
    const ms_task *task; /* NULL for what is not a kernel: copies, fail_if */
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

/* What a device keeps of a mark. The core owns the memory, which stays in place from mark_open to
 * mark_close. */
typedef struct ms_mark {
    uint64_t ns; /* for devices that write down a time */
    void *own;   /* for devices that keep an object, such as an event */
} ms_mark;

/* A check for tests that tasks touch only what they declare (poison.h), for devices whose memory
 * the host can read and write. `before` and `after` run around the enqueueing of one task, `fill`
 * when a storage gets memory or gives it back. *saved is what `before` hands to `after`. */
typedef struct ms_poison {
    ms_status (*before)(ms_engine *engine, const ms_access *accesses, uint32_t count, void **saved);
    ms_status (*after)(ms_engine *engine, const char *task, const ms_access *accesses,
                       uint32_t count, void *saved);
    void (*fill)(ms_storage *storage);
} ms_poison;

/* Memory that a pool of the engine takes: a range of addresses, of which parts become usable later,
 * and may become unusable again. `reserve` answers NULL, `commit` and `decommit` a negative errno
 * where the machine has no room; nothing has changed then. Addresses and lengths of commit and
 * decommit are multiples of 2 MiB, counted from the start of the range; a part is committed once
 * until it is decommitted. decommit: no work that is under way uses any of the range's memory. The
 * other parts keep their addresses and values. */
typedef struct ms_device_memory {
    ms_status (*check)(ms_engine *engine); /* why there cannot be any; NULL: there can */
    /* Bytes that are best committed together in a large pool; 0: a pool does not ask. */
    uint64_t piece_most;
    /* Bytes that the pool may take where the engine's options do not say. */
    uint64_t (*capacity)(const ms_engine *engine);
    void *(*reserve)(ms_engine *engine, uint64_t bytes);
    int (*commit)(ms_engine *engine, void *address, uint64_t bytes);
    /* Whether decommit works, and addresses cost nothing; NULL: they do not. */
    bool (*moves)(const ms_engine *engine);
    int (*decommit)(ms_engine *engine, void *address, uint64_t bytes);
    void (*unreserve)(ms_engine *engine, void *address, uint64_t bytes);
} ms_device_memory;

struct ms_device {
    const char *name; /* what users call it */
    /* Whose kernels it runs: each layer has a table of tasks for every family. */
    const char *kernels;
    bool values; /* tasks run, memory exists, and tensors have values */
    /* How many of the kind this machine has; engine->options.device_index is below it. NULL: one.
     */
    uint32_t (*count)(const ms_engine *engine);
    const char *variable; /* of the environment, which hides some of them; NULL: there is none */

    /* The device's state in an engine: engine->device_state. `open` comes before the first stream,
     * `close` after the last. */
    ms_status (*open)(ms_engine *engine, void **state);
    void (*close)(ms_engine *engine, void *state);
    /* The device's state in a stream: stream->device_state. `stream_open` looks at the stream's
     * priority, where the device has priorities; `stream_close` waits for its work. */
    ms_status (*stream_open)(ms_stream *stream, void **state);
    void (*stream_close)(ms_stream *stream, void *state);

    /* NULL where the device has none: see ms_stream_set_priority and ms_stream_native. */
    ms_status (*set_priority)(ms_stream *stream, int32_t priority);
    void *(*native)(ms_stream *stream);

    void (*run)(ms_stream *stream, const ms_launch *launch);
    /* See ms_engine_batch; `begins` when the first of nested batches begins, and false when it
     * ends. NULL: `run` carries tasks out one by one. */
    void (*batch)(ms_engine *engine, bool begins);
    void (*wait)(ms_stream *stream, const ms_wait *wait);
    bool (*reached)(const ms_stream *stream, uint64_t seq);
    void (*await)(ms_stream *stream, uint64_t seq); /* the host blocks until seq is reached */
    /* See ms_engine_is_blocked. May be called on any thread. NULL: it is never known. */
    bool (*is_still)(const ms_engine *engine, uint32_t waiting, uint64_t *moves);

    /* A mark is passed in stream order, also on a stream that has failed. `mark_ns` is asked only
     * for marks that are passed; NULL: the device has no clock, and `mark` only counts. `mark_open`
     * comes before a mark's first use, `mark_close` after it was passed for the last time; both
     * NULL where ms_mark is all that the device needs. */
    ms_status (*mark_open)(ms_engine *engine, ms_mark *mark);
    void (*mark_close)(ms_engine *engine, ms_mark *mark);
    void (*mark)(ms_stream *stream, uint64_t seq, ms_mark *mark);
    uint64_t (*mark_ns)(const ms_engine *engine, const ms_mark *mark);
    /* See ms_engine_simulated_ns. NULL: time is not simulated. */
    double (*simulated_ns)(const ms_engine *engine);

    /* Copies between host memory and the device's, in stream order. copy_in reads up to
     * MS_COPY_INLINE bytes before it returns; other host memory stays until number launch->seq is
     * reached. */
    void (*copy_in)(ms_stream *stream, const ms_launch *launch, void *to, const void *host,
                    size_t bytes);
    void (*copy_out)(ms_stream *stream, const ms_launch *launch, void *host, const void *from,
                     size_t bytes);
    /* At once, while the host waits: of memory whose writers are reached. It may not wait for other
     * work of the streams. A device without values gives zeros, and host may then be NULL. After a
     * failure host holds nothing that may be used. */
    ms_status (*read)(ms_engine *engine, void *host, const void *from, size_t bytes);
    /* In stream order: the stream fails (MS_ERROR_TASK) with this message if *flag is not 0. */
    void (*fail_if)(ms_stream *stream, const ms_launch *launch, const float *flag,
                    const char *message);

    /* In stream order, unless the stream has failed: see ms_stream_call. The device copies *call.
     */
    void (*call)(ms_stream *stream, const ms_launch *launch, const ms_host_call *call);

    /* See ms_engine_set_repeating. Both NULL: the device carries out each task as it comes. */
    void (*repeat)(ms_engine *engine, bool on);
    void (*repeats)(const ms_engine *engine, ms_repeats *out);

    const ms_poison *poison; /* NULL: the device cannot check what tasks touch */

    /* The device's own memory. */
    const ms_device_memory *memory;
    /* Memory of the host that tasks use as they use the device's own, for what is offloaded
     * (ms_storage_new_offloaded). NULL: `memory` is the host's, and serves for that, too. */
    const ms_device_memory *outside;
    /* Host memory for copies, aligned to 64 bytes; NULL where the machine has no room. Both NULL:
     * plain memory is as good. */
    void *(*host_allocate)(ms_engine *engine, size_t bytes);
    void (*host_release)(ms_engine *engine, void *memory);
    /* A range of host memory that tasks may use from `adopt` to `disown` (ms_arena), as far as its
     * owner has committed it. Both NULL: the device cannot use memory of the host. */
    ms_status (*adopt)(ms_engine *engine, void *base, uint64_t bytes);
    void (*disown)(ms_engine *engine, void *base, uint64_t bytes);
    /* Memory of this device's pool that other processes use, too. `share` describes a committed
     * range; `import` makes a range usable that another process has described, at an address of
     * this process, until `forget`. All NULL: the memory is of this process alone. */
    ms_status (*share)(ms_engine *engine, const void *address, uint64_t bytes,
                       ms_memory_handle *out);
    ms_status (*import)(ms_engine *engine, const ms_memory_handle *handle, void **address);
    void (*forget)(ms_engine *engine, void *address);
    /* Returns how many bytes of the device's memory are free; *total: how many it has, 0 if the
     * device does not tell. NULL: the device uses the host's memory. */
    uint64_t (*available)(const ms_engine *engine, uint64_t *total);
};

extern const ms_device ms_device_cpu, ms_device_cuda, ms_device_sim;

/* The kernels of one layer for one family. A layer may embed this as the first member of a table
 * with more in it. */
typedef struct ms_kernels {
    const char *family; /* as in ms_device.kernels */
    const ms_task *const *tasks;
} ms_kernels;

#endif
