/* state.h: the CPU device: one thread for each stream, a team of helpers for work inside a task,
 * and what a task sees of the thread that runs it.
 *
 * Who touches what
 * - The slots between done and head belong to the worker of their stream, all others to the host.
 *   The host writes a slot before head passes it; the worker reads it until done passes it. */
#ifndef MOONSHARD_EXEC_CPU_STATE_H
#define MOONSHARD_EXEC_CPU_STATE_H

#include "exec/state.h"

#include "moonshard/cpu_task.h"

#define MS_SCRATCH_SLOTS 4

/* ----------------------------------------------------------- what a task sees */

/* A thread that runs tasks: a stream's worker or a helper. Scratch belongs to it, grows to the
 * largest request and is kept, so tasks need no allocation in the long run. */
struct ms_thread {
    ms_engine *engine;
    uint32_t index;
    struct {
        void *memory;
        size_t bytes;
    } scratch[MS_SCRATCH_SLOTS];
};

typedef struct ms_team ms_team;

/* One execution of a task; it lives on the stack of ms_cpu_call. */
struct ms_run {
    ms_thread *thread;
    ms_team *team; /* NULL: all tiles run on this thread */
    const ms_task *task;
    ms_error *error;
    bool failed; /* ms_run_fail was called */
};

/* -------------------------------------------------------------------- helpers */

/* The helpers of one engine, for one task at a time. A task opens a job, and helpers join it while
 * tiles are left. The ticket decides who takes part: a generation, an open bit, and how many have
 * joined, changed in one atomic step. A helper that has not joined when the job closes is not
 * waited for, so a sleeping helper never delays a task. Words that different threads write often
 * are on cache lines of their own. */
struct ms_team {
    ms_engine *engine;
    uint32_t helper_count;
    ms_thread *helpers;
    ms_os_thread **threads;
    ms_spin spin;
    ms_word busy; /* a stream uses the team */
    ms_tile_function tile;
    void *context;
    uint32_t tiles;
    alignas(128) ms_word next; /* tile to be taken */
    alignas(128) _Atomic uint64_t ticket;
    alignas(128) ms_word finished; /* helpers that are done with this job */
    ms_bell idle;                  /* rings for new jobs */
    ms_bell complete;              /* rings when a helper is done */
    ms_word quit;
};

/* The device's state in an engine. */
typedef struct ms_cpu {
    ms_team *team;
    ms_spin spin;    /* of stream workers */
    ms_word threads; /* indices handed out */
} ms_cpu;

/* -------------------------------------------------------------------- streams */

/* A byte per cell that the task declares, touched by the worker so that the thread sanitizer sees a
 * missing wait as a data race. */
typedef struct ms_canary {
    volatile char *byte;
    uint16_t count;
    uint8_t mode;
} ms_canary;

/* One number of a stream's ring. Arguments are copied into it, so an enqueue allocates nothing and
 * the caller's may end with the call. */
typedef struct ms_ring_entry {
    /* One of these is not NULL: a task, a mark, or a wait for number wait_seq of `wait`. */
    const ms_task *task;
    ms_mark *mark;
    const ms_stream *wait;
    uint64_t wait_seq;
    ms_trace_record *record; /* NULL unless tracing */
    uint32_t script;
    uint32_t canaries;
    alignas(64) unsigned char arguments[MS_TASK_ARGS_MAX];
#if MS_CANARY
    ms_canary canary[MS_TASK_ACCESS_MAX];
#endif
} ms_ring_entry;

/* A stream's worker: a ring with one producer, the host, and one consumer, the worker. `head` and
 * `done` are the only words that both need for every number, and are on cache lines of their
 * own. For each task the worker reads only its own part of the stream, `own` included: the host
 * writes the first line of ms_stream with each number, and would wait for it. */
typedef struct ms_cpu_stream {
    ms_stream *stream;
    ms_os_thread *thread;
    ms_thread own;
    ms_error error;                     /* of the task that runs */
    ms_ring_entry *ring;                /* of MS_STREAM_DEPTH */
    alignas(128) _Atomic uint64_t head; /* published by the host */
    ms_word bell;                       /* changes with every reason to wake the worker */
    ms_word asleep, quit;
    alignas(128) _Atomic uint64_t done;    /* finished by the worker */
    alignas(128) _Atomic uint64_t wake_at; /* lowest number that a sleeper waits for */
    ms_word done_bell;
    _Atomic uint64_t host_awaits; /* the number that the host blocks for; 0: it does not */
    /* Written by the worker: stream << 48 | sequence number that its slot waits for; 0: not
     * waiting. */
    _Atomic uint64_t waits_at;
} ms_cpu_stream;

static inline ms_cpu *ms_cpu_of(const ms_engine *engine) { return engine->device_state; }
static inline ms_cpu_stream *ms_cpu_stream_of(const ms_stream *stream)
{
    return stream->device_state;
}

#endif
