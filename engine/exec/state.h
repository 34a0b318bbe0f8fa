/* state.h: the inside of the engine, its streams, storages and pool. For exec/ only. What differs
 * between devices is in the table of device.h.
 *
 * Who touches what
 * - Host thread only: hazards (cells, clocks), the pool, reference counts, everything in ms_engine
 *   but its atomics.
 * - Any thread, through atomics: the failure of a stream and of the engine, the number of streams.
 */
#ifndef MOONSHARD_EXEC_STATE_H
#define MOONSHARD_EXEC_STATE_H

#include <stdalign.h>
#include <stdatomic.h>

#include "base/assert.h"
#include "base/thread.h"
#include "exec/device.h"
#include "moonshard/exec.h"

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define MS_CANARY 1 /* every task touches a byte of each cell that it declares: see hazard.c */
#else
#define MS_CANARY 0
#endif

#define MS_CLOCK_LOG 64     /* changes of a stream's clock that are remembered */
#define MS_SCRIPT_BYTES 160 /* of a message, kept free for ", enqueued at <line>" */
#define MS_STEPS_AHEAD_MAX 8
#define MS_POOL_BINS 192

/* ----------------------------------------------------------------- storages */

/* The hazards of a range of a storage: the last write, and the last read of each stream since.
 * `reads` comes last and is not cleared, as it is most of the cell: an entry is valid only where
 * `readers` has the stream's bit. */
typedef struct ms_cell {
    ms_point writer;                /* last write */
    uint32_t readers;               /* bit per stream that has read since the last write */
    uint64_t reads[MS_STREAMS_MAX]; /* last read by each of them */
} ms_cell;

/* What a part was restored from last: bytes of a storage, at a version. The storage is named by its
 * serial number and not by its address, since a freed struct is used again. */
typedef struct ms_source {
    uint64_t storage; /* its serial number; 0: never restored */
    size_t begin, end;
    uint64_t version;
} ms_source;

/* A part of a storage whose writes are counted together: a parameter, or the whole storage.
 * Versions serve backward, which compares them with those it has saved; cells serve ordering, and
 * there may be fewer of them. */
typedef struct ms_version_part {
    uint64_t version;  /* number of the storage's write that was the last here */
    uint64_t recorded; /* number of the last write here that the tape recorded */
    const char *task;  /* the name of the last write's task, and its script line */
    uint32_t script;
    uint32_t reads; /* see ms_storage_expect_reads */
    bool parameter; /* see ms_storage_mark_parameter */
    bool vacant;    /* not written since the refill */
    ms_source source;
    uint64_t restored; /* the version that the last restore left */
} ms_version_part;

typedef struct ms_block ms_block; /* a piece of an arena: pool.c */
typedef struct ms_pool ms_pool;

/* The address of a dropped storage: no machine has memory there, with any offset. */
#define MS_DROPPED_ADDRESS ((char *)(uintptr_t)0x5ead000000000000u)

/* A piece of a pool's memory, or the place of one: a storage is dropped while `block` is NULL.
 * `data` is then MS_DROPPED_ADDRESS, and the storage does not count in the engine's memory. Host
 * thread only; reference counted. */
struct ms_storage {
    ms_engine *engine;
    ms_storage *previous, *next; /* all live storages; next also links the free list of structs */
    ms_pool *pool;               /* where block is from */
    ms_block *block;
    char *data;
    uint64_t serial; /* unique in the engine, from 1 */
    size_t bytes;
    uint64_t writes; /* how many there were */
    uint32_t references;
    uint32_t script; /* who made it */
    uint32_t cell_count, part_count;
    bool used;                    /* some task has declared it */
    bool home;                    /* gradients are here */
    bool meta;                    /* never had memory */
    uint32_t vacant;              /* parts that are */
    uint32_t owner;               /* ms_engine_strings: who dropped it last */
    uint32_t dropped;             /* the script line of that */
    ms_storage *origin, *derived; /* see ms_storage_derive: the first of those derived from this */
    ms_storage *derived_previous, *derived_next; /* the others of the same origin */
    void *how;
    void (*free_how)(void *how);
    void *note; /* see ms_storage_set_note */
    void (*free_note)(void *note);
    ms_cell *cells;         /* &own, or an array */
    size_t *ends;           /* NULL with one cell: where each cell ends, in bytes */
    ms_version_part *parts; /* &whole, or an array */
    size_t *part_ends;      /* NULL with one part: where each part ends, in bytes */
    ms_version_part whole;
    ms_cell own; /* last: see struct_take */
};

/* ------------------------------------------------------------------ streams */

/* Arrays over streams are long enough for MS_STREAMS_MAX, but loops go over the streams in use
 * only. An entry of a later stream is 0 in an array that is kept, and undefined in one that a
 * function fills. */
_Static_assert(MS_STREAMS_MAX <= 32, "ms_cell.readers has 32 bits");
_Static_assert(MS_STEPS_AHEAD_MAX > 1, "a step may run while the next one is enqueued");

/* The clock of a stream from number seq on. */
typedef struct ms_clock_change {
    uint64_t seq;
    uint64_t clock[MS_STREAMS_MAX];
} ms_clock_change;

/* Numbers first .. last of a stream. */
typedef struct ms_interval {
    uint64_t first, last;
} ms_interval;

/* What the core knows of a stream; its threads or queues belong to the device. The failure is the
 * only part that another thread writes: `failed` is stored after `error` is complete, so whoever
 * sees it may read `error`. */
struct ms_stream {
    /* host */
    ms_engine *engine;
    uint64_t enqueued;                 /* last number handed out */
    uint64_t clock[MS_STREAMS_MAX];    /* newest number of each stream that this one is after */
    ms_clock_change log[MS_CLOCK_LOG]; /* ring: how the clock grew */
    uint32_t log_count;
    /* Sequence numbers of tasks that a failure skipped, ascending. Their outputs are undefined. */
    ms_interval *spoiled;
    size_t spoiled_count, spoiled_capacity;
    /* ms_stream_take: a number, and how many multiprocessors it keeps. */
    uint64_t taker;
    uint32_t taken;
    uint16_t index;
    int32_t priority; /* set before the device opens the stream */
    char name[32];
    void *device_state;
    /* The first failure, written by the device on any thread: see ms_stream_fail. */
    _Atomic uint32_t failed; /* set once `error` is complete */
    uint64_t failed_seq;
    uint32_t failed_script;
    ms_error error; /* without the script line, which the host adds */
};

/* --------------------------------------------------------------------- pool */

/* A range of a pool's arena, in use or free. All blocks of an arena form a list by address without
 * gaps, so that a freed one finds its neighbours. */
struct ms_block {
    ms_block *before, *after;  /* neighbours by address */
    ms_block *previous, *next; /* free list of a bin, or of unused structs */
    uint64_t offset, size;
    uint64_t freed;                /* when, as a count of frees; 0: in use */
    bool apart;                    /* free, and not joined with its neighbours: see pool.c */
    bool bare;                     /* not free, and without memory: see pool_move.c */
    ms_static_block *fixed;        /* to which it belongs, or NULL */
    uint64_t uses[MS_STREAMS_MAX]; /* of its former owners: what must be waited for */
};

/* A block that does not go back to its pool when its storage is dropped or released. */
struct ms_static_block {
    ms_pool *pool;
    ms_block *block;
    char *data;
    size_t bytes;        /* that a storage may have */
    ms_storage *storage; /* that uses it; NULL: none */
};

/* The engine's own pool, or one over memory that a layer above has brought (ms_arena). The arena
 * grows at its top; freed blocks go to bins by size, and may lose their memory to other addresses
 * (pool_move.c). All decisions are made on the host thread. */
struct ms_pool {
    ms_engine *engine;
    char *base; /* of the reserved range; in sim a number that is never used */
    /* Bytes: reserved address space; up to where there is memory, and up to where some was handed
     * out at least once; what of that has none any more. */
    uint64_t reserved, committed, top, bare;
    uint64_t limit, grain;          /* of top - bare; commit in pieces of this size */
    bool moves;                     /* see ms_device_memory */
    const ms_device_memory *memory; /* NULL: an arena's, which its maker keeps */
    ms_commit_function commit;
    void *commit_user;
    uint64_t frees;
    uint64_t steps,
        frees_before;         /* of the engine so far, and the frees before the last one's end */
    uint64_t used, used_peak; /* bytes of blocks in use */
    uint64_t live, live_peak; /* bytes that storages in this pool have asked for */
    uint64_t grown_for,
        grown_at;           /* live_peak when it last rose by much, and the steps until then */
    uint32_t growing_steps; /* in which `top` rose since then */
    bool grew;              /* top rose in this step */
    bool has_spare;         /* see add_spare */
    uint64_t largest;       /* bytes of the largest block that was asked for */
    bool has_apart;         /* some block was given back apart */
    bool is_full;           /* the machine refused memory below the limit, in the last attempt */
    ms_block *last;         /* the block at the top of the arena */
    ms_block *bins[MS_POOL_BINS];
    ms_block *unused;
    void **chunks; /* of block structs */
    size_t chunk_count, chunk_capacity;
};

/* ------------------------------------------------------------------- engine */

/* What is recorded while traces are on. */
typedef struct ms_trace {
    ms_trace_record **chunks; /* of MS_TRACE_CHUNK records; addresses stay */
    size_t chunk_count, chunk_capacity, count;
    ms_trace_range *ranges;
    size_t range_count, range_capacity;
    uint32_t label;
    uint64_t step; /* plus 1; 0: none */
    bool is_on;
} ms_trace;

/* The engine's storages, and the memory of their structs. */
typedef struct ms_storage_list {
    ms_storage *live, *unused;
    uint64_t made; /* how many there have been */
    void **chunks;
    size_t chunk_count, chunk_capacity;
} ms_storage_list;

/* One engine. Everything belongs to the host thread, except what is atomic; `owner` names that
 * thread for assertions. The pools, storages, streams and trace records that are listed here are
 * freed by ms_engine_free in an order of its own. */
struct ms_engine {
    ms_context context;
    const ms_device *device;
    void *device_state;
    /* As given, with defaults filled in; texts and rates that are the caller's are NULL. */
    ms_engine_options options;
    bool is_for_gpu;                     /* see ms_engine_is_for_gpu */
    bool is_open;                        /* the device has opened */
    const ms_kernels *kernels[MS_SLOTS]; /* see ms_engine_kernels */
    ms_strings *strings;
    uint32_t script;
    ms_isa isa;
    bool isa_is_capped;
    int64_t process;   /* that started the threads */
    const void *owner; /* the mark of the host thread: see ms_on_host */
    ms_rates rates;    /* for the sim device */
    int sync_forbidden;
    int batches;    /* see ms_engine_batch */
    bool repeating; /* see ms_engine_is_repeating */
    ms_random random;
    double flops;
    ms_stream *streams[MS_STREAMS_MAX];
    uint32_t companions;           /* see ms_engine_set_companions */
    _Atomic uint16_t stream_count; /* raised after its stream is entered */
    ms_stream *current;
    _Atomic uint32_t failed;                           /* some stream has failed */
    void (*on_failure)(ms_engine *, const ms_error *); /* set before the first task that can fail */
    ms_pool pool;
    ms_pool offload;  /* opened at its first use; its `live` and `peak` are counted apart */
    ms_memory memory; /* of all other pools together */
    uint64_t memory_threshold;
    bool (*collect)(void *user); /* see ms_engine_on_full */
    void *collect_user;
    ms_storage_list storages;
    uint64_t step_marks[MS_STEPS_AHEAD_MAX][MS_STREAMS_MAX];
    uint64_t steps;
    struct {
        void *object;
        void (*destroy)(ms_engine *, void *);
    } slots[MS_SLOTS];
    ms_trace trace;
    bool poison;        /* poison.h */
    ms_marks *given_up; /* lists of marks that may still be enqueued: mark.c */
};

/* Enqueues what is neither a wait nor a mark: inserts the waits that the accesses need, fills in
 * the launch's number, name, script line and record, and calls `hand`, which gives the launch to
 * the device together with `what`. The caller has set the launch's name, task, arguments, accesses
 * and cost. kind: as in ms_task. */
typedef void (*ms_hand)(ms_stream *stream, const ms_launch *launch, const void *what);
typedef struct ms_version_part_range {
    ms_version_part *first, *end;
} ms_version_part_range;
/* Whether this is the host thread, to which hazards, the pool and reference counts belong. */
static inline bool ms_on_host(const ms_engine *engine) { return engine->owner == ms_thread_mark(); }

static inline uint64_t ms_now(const ms_engine *engine)
{
    return engine->context.os->monotonic_ns(engine->context.os->user);
}

#endif
