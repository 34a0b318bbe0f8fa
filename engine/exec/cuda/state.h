/* state.h: the inside of the cuda device. For exec/cuda/ only.
 *
 * Invariants
 * - A stream of the engine is one CUDA stream. Number n of it is one call of the driver, or none.
 * - While a batch is open, tasks may be kept and put onto the stream later (batch.c). Whatever puts
 *   something onto it, or records an event there, puts them first.
 * - The device learns that a number is reached from an event that was recorded after it. It records
 *   an event when the host asks for a number, or when another stream waits for it. The event covers
 *   all numbers that were enqueued before. So most tasks cost one call of the driver.
 * - What the host must do after a number (release memory, look at what kernels noted, pass on the
 *   failure of a stream that was waited for, write down times) is in the stream's list of
 * completions, in the order of numbers. The host thread does it when it finds that the number is
 * reached.
 * - An error that the driver reports for work under way ends all work of the GPU in this process:
 *   every stream fails with it, and all numbers count as reached.
 * - Tasks that come again may be held (replay.c): they have numbers, and the driver has not seen
 * them. They go to the driver before anything else of their stream, and before anybody needs them.
 * - The GPU never waits for the host, so all of its work ends by itself, whatever the host does. A
 *   thread of the stream waits in its place for functions of the host that may block (host_task.c).
 *   Work that is enqueued after them is stored until they have returned (deferred.c). */
#ifndef MOONSHARD_EXEC_CUDA_STATE_H
#define MOONSHARD_EXEC_CUDA_STATE_H

#include <stdatomic.h>
#include <stdarg.h>

#include "base/thread.h"
#include "exec/cuda/api.h"
#include "exec/cuda/task.h"
#include "exec/state.h"

#define MS_CUDA_WHY 256 /* bytes of a text */

/* Points of a stream that are not known to be reached. When there are more, the host waits for the
 * oldest. */
#define MS_CUDA_POINTS 64

/* A piece of memory, and where in a range of addresses it is. */
typedef struct ms_cuda_mapped {
    ms_cuda_memory memory;
    size_t offset, bytes;
} ms_cuda_mapped;

/* A range of addresses, of which these pieces have memory, in any order. `outside` has none, and
 * its first `committed` bytes are registered. */
typedef struct ms_cuda_range {
    struct ms_cuda_range *next;
    ms_cuda_address base;
    size_t bytes, committed;
    ms_cuda_mapped *pieces;
    size_t count, capacity;
} ms_cuda_range;

/* The GPU's memory that pools have: memory.c. */
typedef struct ms_cuda_pool_memory {
    bool has_virtual; /* memory can be given addresses later */
    size_t grain;     /* of memory */
    ms_cuda_range *ranges;
    ms_cuda_mapped *parked; /* pieces that lost their addresses, and get others next */
    size_t parked_count, parked_capacity;
} ms_cuda_pool_memory;

typedef struct ms_cuda_image {
    const void *image;
    ms_cuda_module module;
} ms_cuda_image;
typedef struct ms_cuda_known {
    const ms_cuda_kernel *kernel;
    ms_cuda_function function;
} ms_cuda_known;

/* Pinned memory of the host: a flag that is copied there, or what kernels note. */
typedef union ms_cuda_note {
    float flag;
    ms_cuda_fault fault;
    union ms_cuda_note *next; /* of those that are free */
} ms_cuda_note;

/* Pinned memory that is free, in lists by size: pinned.c. */
#define MS_CUDA_PINNED_LISTS 88
typedef struct ms_cuda_pinned_block ms_cuda_pinned_block;
typedef struct ms_cuda_pinned {
    ms_cuda_pinned_block *lists[MS_CUDA_PINNED_LISTS];
    size_t bytes; /* of all */
} ms_cuda_pinned;

typedef struct ms_cuda_replay ms_cuda_replay;

/* A task of a stream's log, or of a replay. */
typedef struct ms_cuda_logged_task {
    const ms_cuda_task *task;
    uint64_t seq;
    uint32_t script;
    uint32_t at;          /* of its arguments, in the log's bytes */
    bool varies;          /* of a replay: its arguments have differed */
    uint32_t node, nodes; /* of a replay: what it has put into the graph */
    bool notes;           /* of a replay: its kernels may note something */
} ms_cuda_logged_task;
typedef struct ms_cuda_log {
    ms_cuda_logged_task *tasks;
    char *bytes;
    size_t count, capacity, used, room;
} ms_cuda_log;

/* Memory of the GPU for the tasks of a stream (ms_cuda_scratch). `users`: the stream, and graphs
 * whose tasks use it. */
typedef struct ms_cuda_piece {
    ms_cuda_address address;
    size_t bytes;
    uint32_t users;
} ms_cuda_piece;

/* The device's state in an engine. */
typedef struct ms_cuda_device {
    ms_cuda cuda;
    ms_cuda_gpu gpu;
    ms_cuda_context context;
    int least, greatest; /* priorities of streams; greater ones are smaller numbers */
    ms_cuda_pool_memory memory;
    ms_cuda_range outside; /* offload.c; no bytes: there is none */
    ms_cuda_event *spare;  /* events that are free */
    size_t spare_count, spare_capacity;
    ms_cuda_note *notes; /* that are free */
    ms_cuda_pinned pinned;
    ms_cuda_image *images;
    size_t image_count, image_capacity;
    ms_cuda_known *known; /* open addressing, by address of the kernel */
    size_t known_count, known_capacity;
    ms_cuda_stream reader; /* of ms_device.read */
    ms_cuda_event began;   /* passed when the device opened */
    /* See times.c: the event from which times are counted, and its own time by the host's clock;
     * the one that follows it, and whether it is on its way; when the host has put it there. */
    ms_cuda_event anchor, next_anchor;
    uint64_t anchor_ns, anchored_ns;
    bool has_next_anchor;
    atomic_flag failing;      /* a thread reports a failure */
    bool repeating, building; /* building: a replay is captured, on this stream */
    ms_cuda_stream builder;
    ms_repeats repeats;
    char why_ended[MS_CUDA_WHY], why_differs[MS_CUDA_WHY];
    const char *differs; /* the name of a task; NULL: none has differed */
    uint32_t differs_script;
    ms_bell bell;            /* rings when a host task is over */
    uint32_t deferred_count; /* what all streams keep for later */
    bool batches;            /* a batch is open: tasks may be put off */
    bool blocks;             /* the host waits after each task: fatal.c */
} ms_cuda_device;

/* What the host does after a number. */
typedef struct ms_cuda_completion {
    struct ms_cuda_completion *next;
    ms_stream *stream;
    uint64_t seq;
    uint32_t script;
    /* A wait, whose stream may have failed. */
    const ms_stream *of;
    uint64_t of_seq;
    /* A flag that was copied to `note`, with the name of the check and its message; or what the
     * kernels of a task noted there. */
    ms_cuda_note *note;
    const char *name, *message;
    const ms_cuda_task *task;
    /* What a task has asked for (ms_cuda_after), or NULL. */
    ms_cuda_after_function after;
    void *user;
    /* The times of a task. */
    ms_trace_record *record;
    ms_cuda_event started, finished;
} ms_cuda_completion;

/* What the host has enqueued, and whose turn has not come: deferred.c. */
typedef struct ms_cuda_deferred ms_cuda_deferred;

/* The thread of a stream that calls functions of the host, and what it is to do: host_task.c. */
typedef struct ms_cuda_host_tasks ms_cuda_host_tasks;

typedef struct ms_cuda_point {
    uint64_t seq;
    ms_cuda_event event;
} ms_cuda_point;

/* A task that was enqueued. */
#define MS_CUDA_PAST MS_STREAM_DEPTH /* no more are under way */
typedef struct ms_cuda_past {
    uint64_t seq;
    const char *name;
    uint32_t script;
} ms_cuda_past;

/* The device's state in a stream. */
typedef struct ms_cuda_queue {
    ms_cuda_stream stream;
    ms_cuda_point points[MS_CUDA_POINTS]; /* ring, ascending numbers */
    uint32_t first, count;
    uint64_t head; /* the last number that was carried out, or is a host task that has gone */
    uint64_t done; /* the last one that is known to be reached */
    ms_cuda_completion *completions, **last_completion;
    ms_cuda_piece *scratch;                      /* see ms_cuda_scratch; NULL: none */
    ms_cuda_host_tasks *host_tasks;              /* NULL: none yet */
    ms_cuda_deferred *deferred, **last_deferred; /* see deferred.c */
    uint64_t last_ns;                            /* when the last task of a trace finished */
    struct ms_cuda_single_graph *batch;          /* see batch.c; NULL until there is something */
    uint64_t batched_from;                       /* the first number that is kept there; 0: none */
    /* See replay.c. */
    ms_cuda_log log;         /* the tasks since the last cut, which end with `head` */
    ms_cuda_replay *replay;  /* the one that begins with them: they are held. NULL: they are not */
    ms_cuda_replay *replays; /* that are known */
    ms_cuda_replay *last;    /* the one that was launched last */
    size_t replay_count;
    bool is_shared;                  /* others put work on it, between tasks: nothing is held */
    ms_cuda_past past[MS_CUDA_PAST]; /* task number n is at n % MS_CUDA_PAST */
} ms_cuda_queue;

/* One execution of a task. */
struct ms_cuda_work {
    ms_stream *stream;
    const ms_launch *launch;
    ms_cuda_note *note; /* NULL: not asked for */
    bool has_failed;
    ms_cuda_stream on; /* what its work is put on */
    bool is_alone;     /* the host has a part in it: it is in no graph */
    /* While a replay is captured, or gets new arguments: it, and the next of its nodes. Then a
     * failure concerns the replay and not the stream. */
    ms_cuda_replay *replay;
    /* Work that is kept, which is captured or gets new arguments: capture.c. */
    ms_cuda_captured_work *captured;
    uint32_t node;    /* of replay or kept */
    bool captures;    /* kept */
    bool is_launched; /* as a graph of its own */
};

static inline ms_cuda_device *ms_cuda_of(const ms_engine *engine) { return engine->device_state; }
/* The last number that the driver has seen: what is held or kept comes after it. */
static inline uint64_t ms_cuda_given(const ms_cuda_queue *queue)
{
    if (queue->replay) return queue->log.tasks[0].seq - 1;
    return queue->batched_from ? queue->batched_from - 1 : queue->head;
}
static inline ms_cuda_queue *ms_cuda_queue_of(const ms_stream *stream)
{
    return stream->device_state;
}

/* How a task was carried out. ALONE: the host has a part in it, so it is in no graph; APART: so it
 * is in a graph of its own. */
typedef enum ms_cuda_way { MS_CUDA_WAY_PLAIN, MS_CUDA_WAY_ALONE, MS_CUDA_WAY_APART } ms_cuda_way;

/* The driver's own variable; "1": each task is done when the call that enqueues it returns. */
#define MS_CUDA_BLOCKING "CUDA_LAUNCH_BLOCKING"
/* The driver's word for a priority. Its default is the least one, so there is nothing below
 * normal. */
static inline int ms_cuda_priority(const ms_cuda_device *self, int32_t priority)
{
    return priority > MS_PRIORITY_NORMAL ? self->greatest : self->least;
}

#endif
