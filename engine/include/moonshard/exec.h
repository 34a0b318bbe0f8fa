/* moonshard/exec.h: the engine and its execution core: streams, tasks, storages, hazards, the
 * stream-ordered pool, events, futures.
 *
 * Invariants
 * - One host thread per engine enqueues. Hazard and pool state belong to that thread: no atomics,
 *   no locks.
 * - A point names work that is already enqueued, so waits look back and can never form a cycle.
 *   Sequence numbers of a stream start at 1 and grow by one per slot; 0 is "complete". A point is
 *   reached when its stream has finished that number.
 * - A task declares all storages that it reads or writes. Tasks hold plain addresses: memory is
 *   handed on in stream order, so a storage may be released or dropped while tasks that use it are
 *   still queued. Addresses are read when a task is enqueued and kept nowhere else: a storage that
 *   is dropped and refilled may be elsewhere.
 * - Which block an allocation gets, which waits are inserted, what is live and what is the peak
 *   depend on the order of host calls only, never on what has already happened on a stream. The sim
 *   device makes the same decisions without data.
 * - The host blocks only in *_sync, at a full ring, at an exhausted pool and in ms_engine_step_end.
 * - The first failed task of a stream makes that stream fail: later tasks on it, and tasks that
 *   wait for it, are skipped, and the next host call that looks (any *_sync, ms_engine_check,
 *   enqueue) reports the first cause, once, after all streams have come to rest; what was skipped
 *   was never written and cannot be read. */
#ifndef MOONSHARD_EXEC_H
#define MOONSHARD_EXEC_H

#include "moonshard/base.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MS_STREAMS_MAX 32     /* streams of an engine */
#define MS_STREAM_DEPTH 1024  /* tasks and waits of a stream that may be unfinished */
#define MS_TASK_ARGS_MAX 448  /* bytes of arguments, kept inside the ring */
#define MS_TASK_ACCESS_MAX 64 /* storages of one task */
#define MS_CELLS_MAX 64       /* cells of a storage */

typedef struct ms_device ms_device;
typedef struct ms_engine ms_engine;
typedef struct ms_stream ms_stream;
typedef struct ms_storage ms_storage;
typedef struct ms_event ms_event;
typedef struct ms_future ms_future;
typedef struct ms_inflight ms_inflight;
typedef struct ms_static_block ms_static_block;

/* ------------------------------------------------------------------- engine */

typedef enum ms_isa { MS_ISA_PORTABLE, MS_ISA_AVX2, MS_ISA_AVX512, MS_ISA_AVX512BF16 } ms_isa;

/* The speeds of a machine, from which the sim device estimates times. */
#define MS_LEVELS_MAX 8
typedef struct ms_level_rate {
    uint32_t ranks;     /* blocks of this many consecutive ranks are linked; 0: all ranks */
    double latency_ns;  /* of one round of messages */
    double bytes_per_s; /* that a rank sends */
} ms_level_rate;
typedef enum ms_cost_dtype {
    MS_COST_F32, /* all dtypes but the three below */
    MS_COST_F16,
    MS_COST_BF16,
    MS_COST_FP8, /* codes of 8 bits */
    MS_COST_DTYPES
} ms_cost_dtype;
/* The shares of flops_per_s and of bytes_per_s that tasks of one name reach: above 0, 1 at most. */
#define MS_KERNEL_SHARES_MAX 64
typedef struct ms_kernel_share {
    char name[32]; /* as traces show it */
    double flops, bytes;
} ms_kernel_share;
typedef struct ms_rates {
    /* Of a rank, with all its threads. Of fp8 0 is allowed: twice that of bf16. */
    double flops_per_s[MS_COST_DTYPES];
    double bytes_per_s; /* of a rank's memory */
    double enqueue_ns;  /* what enqueueing costs the host; 0 is allowed */
    double task_ns;     /* what a task takes beside its work; 0 is allowed */
    /* Of tasks that are not listed: 1. */
    uint32_t share_count;
    ms_kernel_share shares[MS_KERNEL_SHARES_MAX];
    /* Links between ranks, innermost first; the last level has 0 ranks. */
    uint32_t level_count;
    ms_level_rate levels[MS_LEVELS_MAX];
} ms_rates;
/* The rates that are used if the options give none. They were measured on one machine, see
 * sim/rates.c. */
MS_API const ms_rates *ms_rates_default(void);
/* What is wrong with these rates; NULL: nothing. The sim device refuses wrong ones. */
MS_API const char *ms_rates_problem(const ms_rates *rates);

typedef struct ms_engine_options {
    const ms_os *os; /* NULL: ms_os_posix() */
    /* "cpu" (NULL: this); "cuda": a GPU of NVIDIA; "sim": no data, same decisions */
    const char *device;
    /* A device that the application brings; NULL: the one named above. */
    const ms_device *own_device;
    uint32_t device_index; /* which one, where a machine has several of a kind; from 0 */
    /* Threads of intra-op work, the stream's own included; 0: the cores this process may use. */
    uint32_t threads;
    bool strict; /* a missing wait between streams is an error, not inserted */
    bool pin;    /* pin intra-op threads to cores */
    /* Other ranks need the cores, so a thread that waits sleeps at once; otherwise it first spins
     * for some microseconds. An engine with more threads than cores is crowded without this, too.
     */
    bool crowded;
    uint64_t seed;
    uint64_t
        memory_bytes; /* the pool's limit; 0: the device's memory, or this engine's part of it */
    /* Engines that share the device, this one included; 0: it is alone. */
    uint32_t sharers;
    /* For the sim device, copied; NULL: ms_rates_default(). They give estimates of time only; no
     * decision of the engine depends on them. */
    const ms_rates *rates;
    /* For the sim device: the host's calls are those for the cuda device. Others ignore it. */
    bool for_gpu;
    /* For the cuda device: products of f32 may take the numbers rounded to TF32, whose fraction has
     * 10 bits, which is faster. Sums stay f32. Others ignore it. */
    bool tf32;
    /* Cap on instruction sets: "portable" "avx2" "avx512" "avx512bf16"; NULL: none. */
    const char *cpu;
    /* Called by the host thread, and by a stream's thread that warns of a straggler. */
    ms_log_function log;
    void *log_user;
    ms_log_level log_level;
} ms_engine_options;

/* options NULL: all defaults. On failure *error (may be NULL) says why and *out is unchanged. The
 * engine belongs to the calling thread. */
MS_API ms_status ms_engine_new(const ms_engine_options *options, ms_error *error, ms_engine **out);
/* Waits for all streams, then frees everything; storages, futures and tensors must have been
 * released. engine may be NULL. */
MS_API void ms_engine_free(ms_engine *engine);

/* A GPU that this process may use (CUDA_VISIBLE_DEVICES counts), or a slice of one (MIG). */
typedef struct ms_gpu {
    char name[96];
    char pci[32];          /* its place on the PCI bus, "0000:18:00.0"; slices of a GPU have one */
    int32_t node;          /* the NUMA node that it is attached to; -1: not known */
    bool is_slice;         /* of a GPU that MIG divides */
    uint32_t major, minor; /* of the compute capability */
    uint32_t multiprocessors;
    uint64_t memory_bytes;
} ms_gpu;
/* Describes at most `capacity` GPUs; *count is how many there are, *driver the version of CUDA that
 * the driver is for (13000: 13.0). MS_ERROR_NOT_FOUND: there is no driver. Initializes the driver:
 * a child that this process forks afterwards cannot use it. os NULL: ms_os_posix(). */
MS_API ms_status ms_gpus(const ms_os *os, ms_gpu *out, uint32_t capacity, uint32_t *count,
                         uint32_t *driver, ms_error *error);
/* Where the host threads of a rank run. Its GPU is that of its place: `place` modulo the GPUs. */
typedef struct ms_gpu_rank {
    uint32_t place, ranks; /* its number among the ranks of its node, and their count */
    uint32_t threads;      /* that the user has asked for, or 0 */
    bool is_placed;        /* another launcher has started each rank, perhaps on cores of its own */
} ms_gpu_rank;
/* The cores of the NUMA node of a rank's GPU that the calling thread may use, of which ranks of one
 * node get equal shares in the order of their places. A rank that is placed and sees one GPU knows
 * nothing of the others' GPUs, and gets all. Answers the node. -1: the rank keeps what it has, and
 * *out is unchanged: the machine has one node, or says nothing of that GPU; the thread may use no
 * core of the node; `threads` are more than these cores; or the rank is placed and may not use all
 * cores of the machine. os NULL: ms_os_posix(). */
MS_API int32_t ms_gpu_cores(const ms_os *os, const ms_gpu *gpus, uint32_t count, ms_gpu_rank rank,
                            ms_cores *out);
/* How many slices of GPUs (MIG) a value of CUDA_VISIBLE_DEVICES names; 0: it is NULL, names
 * anything else, or a slice twice. A process can use the first one only. */
MS_API uint32_t ms_mig_slices(const char *visible);
/* The slice of this number, from 0, which is below their count. */
MS_API void ms_mig_slice(const char *visible, uint32_t index, char *text, size_t size);
/* Whether this machine has several NUMA nodes. */
MS_API bool ms_has_numa_nodes(const ms_os *os);
/* Whether the system shows a GPU of NVIDIA; looks for its files, and leaves the driver alone. */
MS_API bool ms_has_gpu(const ms_os *os);

MS_API ms_context *ms_engine_context(ms_engine *engine); /* borrowed; its error is the last one */
MS_API const ms_error *ms_engine_error(const ms_engine *engine);
/* Name of the device, as users write it: "cpu", "cuda", "sim". */
MS_API const char *ms_engine_device(const ms_engine *engine);
/* Which one, as in the options. */
MS_API uint32_t ms_engine_device_index(const ms_engine *engine);
/* Whether the device has no values: it makes all decisions, but no task runs. Code that reads or
 * writes values asks this; code that needs the device's name asks ms_engine_device. */
MS_API bool ms_engine_is_sim(const ms_engine *engine);
MS_API bool ms_engine_is_strict(const ms_engine *engine);
MS_API uint32_t ms_engine_threads(const ms_engine *engine);
MS_API ms_isa ms_engine_isa(const ms_engine *engine);
/* Whether the options set a cap; the cap holds for libraries too. */
MS_API bool ms_engine_isa_is_capped(const ms_engine *engine);
MS_API const char *ms_isa_name(ms_isa isa);

/* The error record of this engine, with the script line of the current call. */
#define ms_engine_fail(engine, status, ...) ms_fail(ms_engine_context(engine), status, __VA_ARGS__)

/* Where the current call comes from, for tasks, messages and the trace; id of ms_engine_strings. 0:
 * not from a script. While it is not 0, missing waits are inserted even in strict mode. */
MS_API void ms_engine_set_script(ms_engine *engine, uint32_t id);
MS_API uint32_t ms_engine_script(const ms_engine *engine);
MS_API ms_strings *ms_engine_strings(ms_engine *engine);

/* Random numbers are a function of (seed, step, draw, position). A draw takes the next number of
 * the current step. */
typedef struct ms_random {
    uint64_t seed, step, draw;
} ms_random;
MS_API ms_random ms_engine_random(const ms_engine *engine);
MS_API void ms_engine_set_random(ms_engine *engine, ms_random random);
/* The current state; then draw advances by one. */
MS_API ms_random ms_engine_draw(ms_engine *engine);

/* Each layer above this one keeps one object here. The objects are freed in reverse order of slots,
 * before the streams stop. */
typedef enum ms_engine_slot {
    MS_SLOT_PLANS,     /* of a kernel library */
    MS_SLOT_ATTENTION, /* of another one, for attention alone */
    MS_SLOT_TENSOR,
    MS_SLOT_GRAD,
    MS_SLOT_COMM,
    MS_SLOT_OPTIM,
    MS_SLOT_HOOK,
    MS_SLOT_DDP,
    MS_SLOT_FSDP,
    MS_SLOT_IO,
    MS_SLOT_APPLICATION,
    MS_SLOTS
} ms_engine_slot;
MS_API void *ms_engine_get(const ms_engine *engine, ms_engine_slot slot);
MS_API void ms_engine_set(ms_engine *engine, ms_engine_slot slot, void *object,
                          void (*destroy)(ms_engine *, void *));

/* ---------------------------------------------------------- streams, points */

/* a moment of a stream's timeline; seq 0: complete */
typedef struct ms_point {
    uint64_t seq;
    uint16_t stream;
} ms_point;

/* The stream of that name, made at first use; the engine owns it. "compute" exists always and is
 * current at first. MS_ERROR_STATE when MS_STREAMS_MAX are in use. */
MS_API ms_status ms_engine_stream(ms_engine *engine, const char *name, ms_stream **out);
/* Work of streams with a higher priority goes first, where a device can choose. A stream has its
 * priority from the moment when it is made: ms_engine_stream gives it the normal one,
 * ms_engine_stream_with the given one. A stream of that name that exists keeps its own. */
enum { MS_PRIORITY_LOW = -1, MS_PRIORITY_NORMAL = 0, MS_PRIORITY_HIGH = 1 };
MS_API ms_status ms_engine_stream_with(ms_engine *engine, const char *name, int32_t priority,
                                       ms_stream **out);
MS_API int32_t ms_stream_priority(const ms_stream *stream);
/* The stream of every call that names none. */
MS_API ms_stream *ms_engine_current(const ms_engine *engine);
/* Returns the one before. */
MS_API ms_stream *ms_engine_set_current(ms_engine *engine, ms_stream *stream);
/* NULL past the last */
MS_API ms_stream *ms_engine_stream_at(const ms_engine *engine, uint16_t index);
MS_API const char *ms_stream_name(const ms_stream *stream);
MS_API uint16_t ms_stream_index(const ms_stream *stream);
MS_API ms_engine *ms_stream_engine(const ms_stream *stream);
MS_API ms_point ms_stream_last(const ms_stream *stream); /* what was enqueued last */
/* The stream waits; error if not enqueued yet. */
MS_API ms_status ms_stream_wait(ms_stream *stream, ms_point point);
/* Another priority for a stream that exists. Call it before the stream's first work.
 * MS_ERROR_UNSUPPORTED where the device has no priorities. */
MS_API ms_status ms_stream_set_priority(ms_stream *stream, int32_t priority);
/* The device's own object for the stream, for libraries of that device (a cudaStream_t); borrowed.
 * Work that a library puts on it runs after all work that the engine has enqueued; the engine does
 * not know of it. MS_ERROR_UNSUPPORTED where the device has none. */
MS_API ms_status ms_stream_native(ms_stream *stream, void **out);
MS_API ms_status ms_stream_sync(ms_stream *stream); /* blocks; reports the stream's first error */
MS_API ms_status ms_point_sync(ms_engine *engine, ms_point point); /* blocks */
/* An acquire load. Never decides when memory is reused. */
MS_API bool ms_point_reached(const ms_engine *engine, ms_point point);
MS_API ms_status ms_engine_sync(ms_engine *engine); /* blocks for all streams */
/* Never blocks; an error that a stream has met. */
MS_API ms_status ms_engine_check(ms_engine *engine);
/* `told` is called as soon as a task has failed, on the thread that ran it, so that a layer with
 * peers can inform them. Set it while nothing is enqueued; NULL removes it. */
MS_API void ms_engine_on_failure(ms_engine *engine,
                                 void (*told)(ms_engine *engine, const ms_error *error));
/* For deadlock detection: a task that waits for something outside the engine asks, on any thread,
 * whether the engine can make no other progress. True if the host is blocked and each stream is
 * empty, waits for another stream, or runs one of the `waiting` tasks that wait in the same way.
 * False if in doubt. The function adds to *moves a counter that grows with everything that is
 * enqueued or done: equal sums from two calls mean that nothing happened in between. */
MS_API bool ms_engine_is_blocked(const ms_engine *engine, uint32_t waiting, uint64_t *moves);
/* So many other engines of this process compute on this engine's GPU, so that an error which the
 * GPU reports may be theirs. */
MS_API void ms_engine_set_companions(ms_engine *engine, uint32_t others);
/* Marks the end of a step; blocks until the work of `ahead` steps ago is done. */
MS_API ms_status ms_engine_step_end(ms_engine *engine, uint32_t ahead);
/* Adds `change` to the number of running host calls that may not block (hooks, plans). *_sync
 * return MS_ERROR_STATE while the number is above 0. */
MS_API void ms_engine_forbid_sync(ms_engine *engine, int change);
/* Adds `change` to the number of open batches. While it is above 0, a device may put off tasks that
 * can be carried out together with others of their kind, until the stream gets other work, somebody
 * asks for them, or the last batch ends. Order, results and errors are as ever. */
MS_API void ms_engine_batch(ms_engine *engine, int change);
/* MS_ERROR_STATE while that number is above 0. A call that enqueues work and then waits for it
 * checks this before it enqueues anything. */
MS_API ms_status ms_engine_check_sync(ms_engine *engine);

/* -------------------------------------------------------------------- tasks */

/* A write also orders as a read does. A task that updates memory, or writes only a part of it, also
 * declares it as read. Otherwise its write would make memory readable again that an earlier, failed
 * task has left unwritten. */
typedef enum ms_access_mode { MS_READ = 1, MS_WRITE = 2 } ms_access_mode;
typedef struct ms_access {
    ms_storage *storage;
    uint16_t first_cell, cells;
    uint8_t mode;
} ms_access;

typedef enum ms_task_result { MS_TASK_DONE, MS_TASK_PENDING, MS_TASK_FAILED } ms_task_result;
typedef struct ms_run ms_run; /* what a task sees of the thread that runs it */
/* PENDING: it is called again; arguments keep state */
typedef ms_task_result (*ms_task_function)(ms_run *run, void *arguments);

typedef enum ms_task_kind {
    MS_KIND_COMPUTE,
    MS_KIND_COMMUNICATION,
    MS_KIND_OPTIMIZER,
    MS_KIND_COPY,
    MS_KIND_WAIT
} ms_task_kind;

typedef struct ms_task { /* one const object per kernel */
    const char *name;
    ms_task_function function; /* the CPU's: see moonshard/cpu_task.h */
    uint16_t args_bytes;       /* at most MS_TASK_ARGS_MAX */
    uint8_t kind;
} ms_task;

#define MS_COST_ALL_REDUCE 0 /* the ms_collective_kind whose messages go two ways */
/* What one call costs, as far as it is known when it is enqueued. */
typedef struct ms_task_cost {
    double flops;        /* a multiply-add is 2 */
    uint64_t bytes;      /* read and written; of a collective: its payload */
    uint64_t wire_bytes; /* that this rank sends */
    /* Of a collective: the number of ranks (0: it is none), and the lowest and the highest of them
     * in the world, which say how far its links reach. */
    uint32_t ranks, first_rank, last_rank;
    uint8_t collective; /* ms_collective_kind */
    uint8_t dtype;      /* ms_dtype of the operands */
} ms_task_cost;

/* Appends the task to the stream, after the waits that its accesses need. arguments are copied.
 * Returns before the task runs. */
MS_API ms_status ms_stream_enqueue(ms_stream *stream, const ms_task *task, const void *arguments,
                                   const ms_access *accesses, uint32_t count, ms_task_cost cost,
                                   ms_point *out);
MS_API double ms_engine_flops(const ms_engine *engine); /* sum of the costs enqueued so far */
/* On the sim device: when all that is enqueued would end, by the rates, in nanoseconds since the
 * engine was made. 0 on others. */
MS_API double ms_engine_simulated_ns(const ms_engine *engine);

/* ------------------------------------------- values between host and device */

/* Copies `bytes` from host memory into the storage, in stream order. Up to MS_COPY_INLINE bytes are
 * read before the call returns; of more, the host memory must stay as it is until *out (which may
 * be NULL) is reached. On a device without values only the order counts, and `host` may be NULL.
 * The storage's version is the caller's to count (ms_storage_touch). */
#define MS_COPY_INLINE 384
MS_API ms_status ms_stream_copy_in(ms_stream *stream, ms_storage *to, size_t offset,
                                   const void *host, size_t bytes, ms_point *out);
/* Copies `bytes` of the storage into host memory, in stream order. The host memory must live until
 * *out is reached, and has the values from then on. On a device without values nothing is
 * written. */
MS_API ms_status ms_stream_copy_out(ms_stream *stream, ms_storage *from, size_t offset, void *host,
                                    size_t bytes, ms_point *out);
/* Blocks until bytes [offset, offset + bytes) have been written, and copies them. It waits for no
 * other work. Zeros on a device without values, where `host` may be NULL. */
MS_API ms_status ms_storage_read(ms_storage *storage, size_t offset, void *host, size_t bytes);
/* Blocks as a read does. *out: these bytes where the device's memory is the host's, for reading
 * until the next task is enqueued that writes them; else NULL, without waiting. */
MS_API ms_status ms_storage_look(ms_storage *storage, size_t offset, size_t bytes,
                                 const void **out);
/* The stream fails with MS_ERROR_TASK and the message if the f32 at `offset` is not 0 when the
 * stream gets there. name: of this check, for the error and the trace. Both texts must outlive the
 * engine. */
MS_API ms_status ms_stream_fail_if(ms_stream *stream, const char *name, ms_storage *flag,
                                   size_t offset, const char *message);

/* Host memory that the device copies to and from directly (pinned), aligned to 64 bytes;
 * plain memory where that is as good. It holds anything. what: for the error. Free it once the
 * points of its copies are reached: the next caller may get it at once. NULL is allowed. */
MS_API ms_status ms_host_memory_new(ms_engine *engine, size_t bytes, const char *what, void **out);
MS_API void ms_host_memory_free(ms_engine *engine, void *memory);

/* A host function, which runs in stream order, for libraries that work on host memory. It runs
 * on a thread of the device, may block, and calls nothing of the engine. It answers MS_OK, or the
 * error with which the stream fails and leaves its message. It is not called on a stream that has
 * failed, nor on a device without values. */
typedef ms_status (*ms_host_function)(void *user, char *message, size_t bytes);
typedef struct ms_host_call {
    const char *name; /* for errors and the trace; must outlive the engine */
    ms_host_function function;
    void *user;
    uint8_t kind; /* ms_task_kind */
} ms_host_call;
/* accesses: what the function touches, as of a task. */
MS_API ms_status ms_stream_call(ms_stream *stream, const ms_host_call *call,
                                const ms_access *accesses, uint32_t count, ms_task_cost cost,
                                ms_point *out);

/* ---------------------------------------------------------------- work that repeats */

/* While this is on, the host says that what it enqueues is mostly what it enqueued before: the
 * steps of a training. A device may then learn runs of tasks, and launch a run that comes again as
 * a whole, which costs the host less (CUDA graphs). What is carried out never differs from what is
 * enqueued: arguments that are new go into the launch, and other tasks make it another run. A task
 * may be carried out later than it would be, but before the host or another stream needs it.
 * Answers false where the device carries out each task as it comes, which changes nothing. */
MS_API bool ms_engine_set_repeating(ms_engine *engine, bool repeating);
/* Whether it is on, and the device learns runs: what keeps its memory from step to step then pays.
 */
MS_API bool ms_engine_is_repeating(const ms_engine *engine);
/* What became of the tasks of such work since the engine was made. */
typedef struct ms_repeats {
    uint64_t graphs;   /* runs that were captured, each once, and single calls of a network */
    uint64_t launches; /* of these graphs */
    uint64_t replayed; /* tasks that were launched with them */
    uint64_t alone;    /* tasks that were launched one by one, before their run was known or since
                          something came between */
    /* Texts of the engine, or "": the first thing other than tasks that ended a run; the last task
     * of a run that was none of those before, though its tasks were the same: this one has other
     * addresses or shapes. */
    const char *why, *differs;
} ms_repeats;
MS_API void ms_engine_repeats(const ms_engine *engine, ms_repeats *out);

/* -------------------------------------------------------------------- marks */

/* A list of marks. A mark says when a stream passed it, in nanoseconds of the device's clock: the
 * difference of two marks is a time; on the sim device it is an estimate. A mark takes a number of
 * its stream, as a task does, and is passed on a stream that has failed, too. */
typedef struct ms_marks ms_marks;
MS_API ms_status ms_marks_new(ms_engine *engine, uint32_t count, ms_marks **out);
/* The list may be freed while its marks are still enqueued: the engine keeps its memory until they
 * are passed. NULL is allowed. */
MS_API void ms_marks_free(ms_marks *marks);
/* Enqueues mark `index` on the stream. A mark may be set again; its time is then the last one. If
 * the new stream is another than the last one, it waits until the last one has passed the mark. */
MS_API ms_status ms_marks_set(ms_marks *marks, uint32_t index, ms_stream *stream);
/* The stream waits until marks first .. first + count - 1 are passed, as far as they are set. */
MS_API ms_status ms_marks_wait(const ms_marks *marks, uint32_t first, uint32_t count,
                               ms_stream *stream);
/* Where the mark was set last; seq 0: not yet. */
MS_API ms_point ms_marks_point(const ms_marks *marks, uint32_t index);
/* Never blocks. False, and 0, while the mark is not set or not passed, and on a device that has no
 * clock. */
MS_API bool ms_marks_time(const ms_marks *marks, uint32_t index, uint64_t *ns);

/* ----------------------------------------------------------------- storages */

/* bytes of memory, usable on `stream` at once (64-byte aligned; contents undefined), with one
 * reference. Zero bytes are allowed. */
MS_API ms_status ms_storage_new(ms_stream *stream, size_t bytes, ms_storage **out);
MS_API ms_storage *ms_storage_retain(ms_storage *storage);
/* At the last reference the memory is free for whatever is enqueued from now on. NULL is
 * allowed. */
MS_API void ms_storage_release(ms_storage *storage);
/* Splits the storage into parts (parameters), once, before its first use. ends are ascending byte
 * offsets; the last is the storage's size. Each part has a version of its own. Each has a hazard
 * cell of its own, too, up to MS_CELLS_MAX of them; of more parts, neighbours share a cell, each
 * cell with about its share of the bytes. */
MS_API ms_status ms_storage_split(ms_storage *storage, const size_t *ends, uint32_t parts);
/* The cells that bytes [begin, end) are in. */
MS_API void ms_storage_cells(const ms_storage *storage, size_t begin, size_t end, uint16_t *first,
                             uint16_t *count);
/* For tasks; in sim, and while the storage is dropped, an address that must not be used. */
MS_API void *ms_storage_data(const ms_storage *storage);
MS_API size_t ms_storage_bytes(const ms_storage *storage);
MS_API uint32_t ms_storage_references(const ms_storage *storage);
MS_API ms_engine *ms_storage_engine(const ms_storage *storage);
/* The version of bytes [begin, end) grows with each write of a part that they are in; the tape
 * compares it with what it was when a tensor was saved. */
MS_API uint64_t ms_storage_version(const ms_storage *storage, size_t begin, size_t end);
/* Counts a write of these bytes at the current script line. task: the name of the task that writes;
 * it is not copied. */
MS_API void ms_storage_touch(ms_storage *storage, size_t begin, size_t end, const char *task);
/* Which task wrote last in the parts of these bytes (NULL: none yet), and the id of its script
 * line. */
MS_API const char *ms_storage_written_by(const ms_storage *storage, size_t begin, size_t end,
                                         uint32_t *script);
/* recorded: the version after the last in-place write that the tape recorded; 0: none. record:
 * notes that the last write was such a write. */
MS_API uint64_t ms_storage_recorded(const ms_storage *storage, size_t begin, size_t end);
MS_API void ms_storage_record(ms_storage *storage, size_t begin, size_t end);
/* expect: adds `change` to the number of reads of these bytes that running backward passes still
 * have to do. expects: whether there is any such read. */
MS_API void ms_storage_expect_reads(ms_storage *storage, size_t begin, size_t end, int change);
MS_API bool ms_storage_expects_reads(const ms_storage *storage, size_t begin, size_t end);
/* Whether there is one anywhere in it, or in what is derived from it. */
MS_API bool ms_storage_expects_any(const ms_storage *storage);
/* mark: the parts of these bytes hold values of a parameter, for the rest of the storage's life.
 * is: whether any of these parts does. Optimizers write parameters. */
MS_API void ms_storage_mark_parameter(ms_storage *storage, size_t begin, size_t end);
MS_API bool ms_storage_is_parameter(const ms_storage *storage, size_t begin, size_t end);
/* Whether the storage holds a gradient's home, that is, its destination buffer (see
 * moonshard/grad.h). Once set, this stays true for the rest of the storage's life. */
MS_API bool ms_storage_is_home(const ms_storage *storage);
MS_API void ms_storage_set_home(ms_storage *storage);
/* The last write of bytes [begin, end): the points to wait for before the host reads. out has room
 * for MS_STREAMS_MAX. */
MS_API uint32_t ms_storage_writers(const ms_storage *storage, size_t begin, size_t end,
                                   ms_point *out);
/* Whether a task that should have written a part of the storage failed or was skipped, and no task
 * has written that part since. */
MS_API bool ms_storage_spoiled(const ms_storage *storage);
/* The last reads and writes of these bytes: the points to wait for before a write. */
MS_API uint32_t ms_storage_users(const ms_storage *storage, size_t begin, size_t end,
                                 ms_point *out);

/* Dropping and refilling. A storage that is dropped has no memory. It keeps its identity, its
 * division into cells and parts, and its versions, so tensors and graphs that refer to it stay
 * valid, and a saved tensor still counts as unchanged.
 * - A task or a host call that touches a dropped storage fails when it is enqueued
 *   (MS_ERROR_STATE). The error names the owner.
 * - After a refill, each part is vacant until something writes there. Reading a vacant part is the
 *   same error.
 * - A task that writes the former contents again counts its write with ms_storage_restore, which
 *   keeps the version if the source is unchanged.
 * - Memory returns to the pool or arena that it came from, in stream order: a drop waits for
 *   nothing, and tasks that are already enqueued may still use the old memory. */

/* Gives the memory back. Errors name `owner` as the one that dropped the storage: "unit
 * \"layers.3\""; it is copied. MS_ERROR_STATE if the storage is dropped already. Storages that are
 * derived from it are dropped as well. */
MS_API ms_status ms_storage_drop(ms_storage *storage, const char *owner);
/* Allocates memory again, perhaps at another address, usable on `stream` at once; a task on another
 * stream waits for the former users of that memory. MS_ERROR_STATE if the storage is not dropped;
 * after MS_ERROR_MEMORY it still is. */
MS_API ms_status ms_storage_refill(ms_storage *storage, ms_stream *stream);
MS_API bool ms_storage_is_dropped(const ms_storage *storage);
/* Whether a part that these bytes are in was not written since the refill. */
MS_API bool ms_storage_is_vacant(const ms_storage *storage, size_t begin, size_t end);
/* Static blocks: memory of a pool with a fixed address, for storages that use it one after the
 * other. The address depends on when the block was made, and on nothing that is taken or given back
 * later. It counts as live memory while a storage uses it. */
/* The memory that the storage has becomes a static block, which the storage uses until it is
 * dropped or released. Whoever makes one frees it, before the engine. */
MS_API ms_status ms_static_block_new(ms_storage *storage, ms_static_block **out);
/* Its memory goes back to the pool, once no storage uses it. */
MS_API void ms_static_block_free(ms_static_block *block);
/* The bytes that a storage may have, and the storage that uses it; NULL: none does. */
MS_API size_t ms_static_block_bytes(const ms_static_block *block);
MS_API const ms_storage *ms_static_block_storage(const ms_static_block *block);
/* Whether the storage may use the block: no storage does, it is large enough, and both are of the
 * same pool. */
MS_API bool ms_static_block_fits(const ms_static_block *block, const ms_storage *storage);
/* As ms_storage_refill, in a static block, for whose former users `stream` waits. Allocates
 * nothing. MS_ERROR_STATE if the storage has memory, or does not fit (ms_static_block_fits). */
MS_API ms_status ms_storage_refill_in(ms_storage *storage, ms_stream *stream,
                                      ms_static_block *block);
/* A storage on "meta": it has no memory until it is refilled, if it ever is. */
MS_API ms_status ms_storage_new_meta(ms_engine *engine, size_t bytes, ms_storage **out);
/* Whether it was made so and never had memory. */
MS_API bool ms_storage_is_meta(const ms_storage *storage);
/* Counts a restore of bytes [begin, end) by a task of this name, which has computed them from bytes
 * [source_begin, source_end) of `source` alone. The version of a part stays as it is if the same
 * bytes of the same source restored the whole part before, and neither they nor the part have been
 * written since. Otherwise the restore counts as a write; the error of a version check then names
 * the last write of the source. A part that is restored from several sources, or in pieces, counts
 * as written. */
MS_API void ms_storage_restore(ms_storage *storage, size_t begin, size_t end,
                               const ms_storage *source, size_t source_begin, size_t source_end,
                               const char *task);
/* Whether the host, or a task of this name, may touch bytes [begin, end): MS_ERROR_STATE if the
 * storage is dropped, or if `read` and a part is vacant. */
MS_API ms_status ms_storage_check(const ms_storage *storage, size_t begin, size_t end, bool read,
                                  const char *task);
/* For storages whose contents are computed from `origin` alone: dropping the origin drops this one
 * as well, with the same owner, unless it is dropped already. Neither retains the other; the tie
 * ends when one of them is freed. The storage takes over `how`, which tells the code that computes
 * the contents again what to do; free_how receives it when the storage is freed. The origin of a
 * storage never changes. */
MS_API void ms_storage_derive(ms_storage *storage, ms_storage *origin, void *how,
                              void (*free_how)(void *how));
/* NULL if it has none, or the origin was freed. how may be NULL. */
MS_API ms_storage *ms_storage_origin(const ms_storage *storage, void **how);
/* What the layer above knows of a storage: one note, which the storage takes over. free_note
 * receives it when another one is set or the storage is freed. NULL: none. */
MS_API void ms_storage_set_note(ms_storage *storage, void *note, void (*free_note)(void *note));
MS_API void *ms_storage_note(const ms_storage *storage);

/* What a task needs to know of a tensor's memory before it is enqueued. 0: nothing special. */
enum {
    MS_ACCESS_DROPPED = 1, /* the storage has no memory */
    MS_ACCESS_META = 2,    /* it never had any */
    MS_ACCESS_VACANT = 4   /* a part is read that was not written since the refill */
};
/* The access to bytes [begin, end) in this mode; answers a mask of the above. */
MS_API uint32_t ms_storage_access(ms_storage *storage, size_t begin, size_t end, uint8_t mode,
                                  ms_access *out);

/* For transports that move bytes between processes without a copy: memory of a storage as another
 * process can use it. The handle means something to the device only, and is sent to the other
 * process as it is. It is valid until the storage is dropped or freed. */
#define MS_MEMORY_HANDLE_BYTES 64
typedef struct ms_memory_handle {
    unsigned char bytes[MS_MEMORY_HANDLE_BYTES];
    uint64_t size; /* of the memory, in bytes */
} ms_memory_handle;
/* MS_ERROR_UNSUPPORTED where the device's memory is of this process alone. */
MS_API ms_status ms_storage_export(const ms_storage *storage, ms_memory_handle *out);
/* *address: for tasks of this engine. The caller knows when the other process writes there; the
 * engine does not. */
MS_API ms_status ms_memory_import(ms_engine *engine, const ms_memory_handle *handle,
                                  void **address);
/* After the last task that uses the address has finished. */
MS_API void ms_memory_forget(ms_engine *engine, void *address);

/* A second pool over memory of the caller: `bytes` of address space at base. commit makes a range
 * of it usable and answers 0 or -errno. ms_engine_memory counts its storages as any other. Free the
 * arena after its storages and before its memory. MS_ERROR_UNSUPPORTED where the device cannot use
 * memory of the host. */
typedef struct ms_arena ms_arena;
typedef int (*ms_commit_function)(void *user, void *address, uint64_t bytes);
MS_API ms_status ms_arena_new(ms_engine *engine, void *base, uint64_t bytes,
                              ms_commit_function commit, void *user, ms_arena **out);
MS_API ms_status ms_arena_storage(ms_arena *arena, ms_stream *stream, size_t bytes,
                                  ms_storage **out);
MS_API void ms_arena_free(ms_arena *arena); /* NULL is allowed */

/* A storage in a second pool, for what is offloaded from the device's memory. Tasks use it as any
 * other. ms_engine_memory counts it apart. On a device whose tasks run on the host, it is ordinary
 * memory, with the limit of the first pool. On a GPU it is pinned memory of the host, as much as
 * the machine has; tasks reach it over the bus. MS_ERROR_UNSUPPORTED where they cannot. */
MS_API ms_status ms_storage_new_offloaded(ms_stream *stream, size_t bytes, ms_storage **out);

/* waits: stream waits inserted for reuse. moved: bytes of free memory that got other addresses, to
 * be in one piece, as the limit was reached. offload_live, offload_peak: of the second pool; the
 * other numbers do not include it. */
typedef struct ms_memory {
    uint64_t live, peak, reserved, limit, waits, moved;
    uint64_t offload_live, offload_peak;
} ms_memory;
MS_API ms_memory ms_engine_memory(const ms_engine *engine);
/* Bytes of the device's memory that are in use and in no pool of this engine: scratch of kernels,
 * libraries, the driver's context, buffers of NCCL, other processes. 0 where the device has no
 * memory of its own. It asks the driver, so it is not for every step. */
MS_API uint64_t ms_engine_memory_beside(const ms_engine *engine);
MS_API void ms_engine_reset_peak(ms_engine *engine); /* of both pools */
/* Sets the peak back to an earlier value, so that a measurement in between does not change it;
 * never below the live bytes. */
MS_API void ms_engine_set_peak(ms_engine *engine, uint64_t bytes);
/* collect is called before a request for memory fails, on the host thread and in the middle of any
 * call that takes memory: an application with garbage collection drops its handles there, and
 * returns whether it did. NULL: there is none. */
MS_API void ms_engine_on_full(ms_engine *engine, bool (*collect)(void *user), void *user);
/* under_pressure: whether live memory has passed a mark, so that an application with garbage
 * collection should collect and drop its handles now. relieved: moves the mark to what is live then
 * and half of it, or 8 MiB, or as many bytes as the application's own heap has, whichever is the
 * most. Both depend on the order of host calls, and on these bytes, only. */
MS_API bool ms_engine_under_pressure(const ms_engine *engine);
MS_API void ms_engine_relieved(ms_engine *engine, uint64_t host_bytes);

/* ---------------------------------------------------------- events, futures */

/* The event is after everything enqueued on the stream so far. */
MS_API ms_status ms_event_record(ms_stream *stream, ms_event **out);
MS_API ms_status ms_event_wait(ms_event *event, ms_stream *stream);
MS_API ms_point ms_event_point(const ms_event *event);
MS_API void ms_event_free(ms_event *event);

/* A value of some kind and the point at which it is ready. */
typedef struct ms_value {
    void *object;
    void *(*retain)(void *object);
    void (*release)(void *object);
} ms_value;
/* Retains the object. */
MS_API ms_status ms_future_new(ms_engine *engine, ms_value value, ms_point ready, ms_future **out);
MS_API ms_future *ms_future_retain(ms_future *future);
MS_API void ms_future_release(ms_future *future);
MS_API ms_point ms_future_point(const ms_future *future);
/* The stream waits; the host does not. */
MS_API ms_status ms_future_value(ms_future *future, ms_stream *stream, void **borrowed);
MS_API ms_status ms_future_sync(ms_future *future, void **borrowed); /* blocks */

/* Limits what is in flight: at most `count` acquisitions, of `bytes` in total, between acquire and
 * the point of their release. Beyond that, acquire makes the stream wait for the oldest one. */
MS_API ms_status ms_inflight_new(ms_engine *engine, const char *name, uint32_t count,
                                 uint64_t bytes, ms_inflight **out);
MS_API void ms_inflight_free(ms_inflight *inflight);
MS_API ms_status ms_inflight_acquire(ms_inflight *inflight, ms_stream *stream, uint64_t bytes);
MS_API ms_status ms_inflight_release(ms_inflight *inflight, ms_point point, uint64_t bytes);

/* -------------------------------------------------------------------- trace */

typedef struct ms_trace_record {
    const char *name;                              /* of the task, or "wait" */
    uint64_t enqueued_ns, started_ns, finished_ns; /* monotonic; 0: not run (sim, skipped) */
    uint64_t seq, bytes;
    double flops;
    uint32_t script, label; /* ms_engine_strings; label 0: none */
    int64_t step;           /* that it was enqueued in; -1: none */
    uint16_t stream, of;    /* of: the stream that a wait waits for */
    uint8_t kind;           /* ms_task_kind */
} ms_trace_record;

MS_API ms_status ms_trace_start(ms_engine *engine); /* drops what was recorded before */
MS_API ms_status ms_trace_stop(ms_engine *engine);  /* blocks; keeps the records */
/* Records from now on belong to this step; -1: to none. */
MS_API void ms_trace_step(ms_engine *engine, int64_t step);
/* Records from now on carry this label: "bucket 3: cast". Returns the id of the former label, for
 * ms_trace_relabel. While no trace is recorded, it does nothing and formats no text. */
MS_API uint32_t ms_trace_label(ms_engine *engine, const char *format, ...) MS_PRINTF(2, 3);
MS_API void ms_trace_relabel(ms_engine *engine, uint32_t label);
MS_API size_t ms_trace_count(const ms_engine *engine);
/* A named range: the records from number `first` (ms_trace_count at its beginning) until now.
 * Without records it is left out; while no trace is recorded, nothing happens. */
typedef struct ms_trace_range {
    size_t first, end;
    uint32_t name; /* ms_engine_strings */
} ms_trace_range;
MS_API void ms_trace_add_range(ms_engine *engine, size_t first, const char *format, ...)
    MS_PRINTF(3, 4);
MS_API const ms_trace_range *ms_trace_range_get(const ms_engine *engine, size_t index);
/* Records are in order of enqueueing. */
MS_API const ms_trace_record *ms_trace_get(const ms_engine *engine, size_t index);

#ifdef __cplusplus
}
#endif
#endif
