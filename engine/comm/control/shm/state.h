/* state.h: control among the ranks of one node, over memory files: the layout of the control file,
 * a rank's side of it, and the order ledger that transports on this node run their calls through.
 * For comm/control/, comm/job/ and comm/transport/ only.
 *
 * Invariants
 * - Every word that two ranks touch is atomic, or is written before a release store and read after
 *   the acquire load that sees it.
 * - A ledger slot of number n is written before its seq becomes n, and written again for n + 2,
 *   when all ranks have left n + 1: no rank reads it then.
 * - A phase counter only grows. All ranks of a channel advance it by the same amount in each
 *   collective; reaching a phase together is a barrier.
 * - A thread that waits sleeps on the bell of its own rank. A rank that makes progress rings the
 *   bells of the ranks that may wait for it, if they sleep; an abort rings all bells. A sleeper
 *   raises `asleep` before it looks for the last time, and the other makes its progress before it
 *   reads `asleep`, all sequentially consistent: no wake is lost. */
#ifndef MOONSHARD_COMM_CONTROL_SHM_STATE_H
#define MOONSHARD_COMM_CONTROL_SHM_STATE_H

#include <stdalign.h>
#include <stdatomic.h>

#include "base/activity.h"
#include "base/thread.h"
#include "comm/control_table.h"
#include "comm/rendezvous.h"

#define MS_CONTROL_MAGIC 0x385654435244534dull /* "MSDRCTV8" */
/* Half of a staging area: one is filled while the other is read. */
#define MS_STAGE_BYTES ((size_t)256 << 10)
/* Staging areas at the beginning of each heap; the last one is for sends. */
#define MS_STAGE_AREAS (MS_GROUPS_MAX * MS_CHANNELS + 1)
#define MS_STAGES_BYTES (MS_STAGE_AREAS * 2 * MS_STAGE_BYTES)

#define MS_NODE_NAME_BYTES 64

/* Calls of a channel whose claims are kept. A host may be further ahead, with calls enqueued on
 * several streams. */
#define MS_CALLS_AHEAD 1024
/* Bytes of numbers exchanged out of band, in one step: a record of plans or the id of a network is
 * shorter. */
#define MS_SHARED_BYTES 2048
/* Calls of a channel whose fields are kept, for reports. */
#define MS_CALLS_SHOWN 16

/* A collective as its rank entered it: what must agree (call), and what the others use. */
typedef struct ms_ledger_entry {
    _Atomic uint64_t seq;
    uint64_t counts_hash, order;
    uint64_t heap_offset;     /* of `in` in its rank's heap, plus 1; 0: not in the heap */
    uint64_t value;           /* all_to_all by counts: its longest part */
    uint64_t in, out, counts; /* addresses in its process, for ranks that are threads of it */
    double factor;            /* of a premul_sum */
    uint64_t graph;           /* see ms_comm_args */
    ms_flight call;
} ms_ledger_entry;

/* The fields of a call as its host has published them. Words are atomic, since a peer may read them
 * while they are written for a later call; then it finds another seq afterwards. */
#define MS_CALL_WORDS ((sizeof(ms_ledger_entry) + 7) / 8)
typedef struct ms_published {
    _Atomic uint64_t seq;
    _Atomic uint64_t words[MS_CALL_WORDS];
} ms_published;

/* One for each rank in each number of a group and each channel. Only that rank writes it, also when
 * the number is given again to other members: then counts go on. */
typedef struct ms_member_line {
    alignas(128) ms_ledger_entry slots[2]; /* by seq & 1 */
    alignas(128) _Atomic uint64_t phase;
    /* By the host: what must agree of call n, at n % MS_CALLS_AHEAD: a hash, and which lap of this
     * ring n is in; 0: none. */
    alignas(128) _Atomic uint64_t claims[MS_CALLS_AHEAD];
    _Atomic uint64_t issued; /* by the host: the calls enqueued */
    ms_published published[MS_CALLS_SHOWN];
    /* What this member's host shares: one half is filled while the other is read. */
    alignas(128) char shared[2][MS_SHARED_BYTES];
} ms_member_line;

/* What a host has published of its sends to, or receives from, one peer. */
#define MS_PAIR_CALLS_AHEAD 64
#define MS_PAIR_CALLS_SHOWN 4
typedef struct ms_pair_calls {
    alignas(128) _Atomic uint64_t claims[MS_PAIR_CALLS_AHEAD];
    ms_published published[MS_PAIR_CALLS_SHOWN];
} ms_pair_calls;

/* One for each ordered pair of ranks. */
typedef struct ms_pair_line {
    ms_pair_calls calls[2]; /* by the sender, by the receiver */
    alignas(128) ms_ledger_entry sent[2];
    alignas(128) ms_ledger_entry received[2];
    alignas(128) _Atomic uint64_t written; /* chunks, by the sender */
    alignas(128) _Atomic uint64_t read;    /* chunks, by the receiver */
    alignas(128) _Atomic uint64_t sends;   /* issued, by the hosts */
    _Atomic uint64_t receives;
} ms_pair_line;

/* What a peer that has waited too long for a rank reports to the supervisor: see
 * ms_rendezvous_hang_report. */
typedef struct ms_hang_report {
    ms_word state;     /* 0: none; 1: being written; 2: complete */
    uint64_t progress; /* of the rank, while its peer waited */
    char text[MS_HANG_REPORT_BYTES];
} ms_hang_report;

/* How far a rank has finished, in order. One that rests waits for MPI_Finalize, and calls nothing
 * else of MPI. */
typedef enum ms_finished { MS_UNFINISHED, MS_FINISHED, MS_RESTS } ms_finished;

/* As ms_ids, of several writers. */
typedef _Atomic uint64_t ms_id_words[MS_GROUPS_MAX / 64];

/* What one rank shows to the others and to the supervisor. Words that other ranks poll have cache
 * lines of their own. */
typedef struct ms_rank_line {
    alignas(128) ms_word bell;
    ms_word asleep; /* threads of this rank */
    /* Progress of this rank plus 1 when a peer last warned of it as a straggler. */
    _Atomic uint64_t warned;
    /* Of a job over several nodes: how many numbers of groups it asks for, those that it has been
     * given, and whether it has; those that are free again. */
    ms_word ids_wanted, ids_answered;
    ms_ids ids_given;
    ms_id_words ids_back;
    /* Its calls that use the tensors of other threads and are not over (one_gpu.c). */
    ms_word direct_calls;
    /* From here to `hang_report`: what ranks on other nodes have a copy of. */
    alignas(128) ms_word phase; /* ms_rank_phase */
    ms_word finished;           /* ms_finished: its host will issue nothing more */
    /* Set once the rank's process has claimed its number in the control file, until it ends. */
    ms_word claimed;
    _Atomic int64_t process;
    _Atomic uint64_t flights;
    _Atomic uint64_t serial; /* of the last step that its host was about to begin */
    _Atomic int64_t step;    /* its number, plus 1 */
    /* deadlock.c: number of the stall << 32 | rounds of looking in it; 0: not still. */
    _Atomic uint64_t still;
    ms_word met[MS_REQUESTS]; /* how many requests of each kind it has met */
    ms_word gone;             /* its process has ended: the tasks that it had enqueued never run */
    ms_word code;             /* with which its process is about to end, plus 1; 0: not known */
    ms_word hangs;            /* MPI_Finalize has not come back, and the user knows */
    ms_activity activity;
    ms_hang_report hang_report;
    ms_flight flight[MS_FLIGHTS];
} ms_rank_line;

/* A decision about a request holds the count of requests above these bits, and the serial number in
 * them. */
#define MS_SERIAL_BITS 40

/* A request to all ranks; see request.c. */
typedef struct ms_request_line {
    ms_word raised; /* how many there were, << 8 | value of the last */
    /* The last request decided: its count << 40 | the serial number before which all ranks meet
     * it. */
    _Atomic uint64_t decided;
    /* Of a job over several nodes: the value of one that this node's agent has not taken yet, and
     * whether ranks wait before their next step until the nodes have decided. */
    ms_word wanted, gate;
} ms_request_line;

/* The control file, which all ranks and the launcher map. MS_CONTROL_MAGIC names its layout: a rank
 * that was built with another one refuses the file. Fields up to `unsupervised` do not change once
 * ranks have joined. */
typedef struct ms_control_file {
    uint64_t magic, control_bytes, heap_bytes, link_bytes_per_second, link_latency_ns, timeout_ns;
    uint32_t ranks, threads;
    /* Of the job; 1 and 0 where all ranks are on one node. node_of: of each rank. */
    uint32_t nodes, here;
    uint16_t node_of[MS_LOCAL_RANKS_MAX];
    char node_names[MS_LOCAL_RANKS_MAX][MS_NODE_NAME_BYTES];
    bool crowded;          /* more threads of this node's ranks want to run than it has cores */
    ms_word agent_claimed; /* the place of the agent in this file is claimed while it lives */
    bool sum_by_ranks;     /* as in the options */
    bool unsupervised;     /* no launcher started the ranks: they detect each other's death */
    ms_word judged;        /* a supervisor decides about ranks that show no progress */
    ms_request_line requests[MS_REQUESTS];
    ms_word reported; /* over several nodes: the report of the job's end is written */
    ms_word folder_set;
    char folder[MS_FOLDER_BYTES];
    ms_word groups;       /* the numbers of all groups of this node's ranks so far are below */
    ms_id_words ids_used; /* now; of a job over several nodes, the first node's counts */
    /* How GPUs' tensors travel, as the first rank with one has said: see one_gpu.c of the
     * transport. */
    _Atomic uint64_t way;
    alignas(128) ms_word aborted; /* 0, 1: being written, 2: the record is complete */
    ms_abort_record record;
    /* Over several nodes, several may end the job at the same time: what they agree on, and whether
     * it is there. */
    ms_word agreed;
    ms_word unheard; /* somebody has waited for that in vain */
    ms_abort_record agreed_record;
    ms_rank_line lines[]; /* one a rank, then pairs, then members */
} ms_control_file;

/* Which node each rank of a job is on. Without node_of and names: all on the first. */
typedef struct ms_layout {
    uint32_t nodes, here;
    const uint16_t *node_of;
    const char (*names)[MS_NODE_NAME_BYTES]; /* of nodes */
} ms_layout;

/* How a process tells other nodes what it writes. Every node of a job has a control file with the
 * lines of all ranks; those of ranks on other nodes are copies. Each word of a line is written by
 * one rank only, so copies need no more than that the writes of a rank arrive in its order. */
typedef struct ms_replication ms_replication;
struct ms_replication {
    /* Sends what these bytes of the control file are now to the copies on all other nodes, which
     * wake their ranks. Four and eight aligned bytes arrive as one atomic store. From any
     * thread. */
    void (*tell)(ms_replication *replication, const void *address, size_t bytes);
    /* This node's agent looks at the control file: the job has ended, or something is asked of it.
     * Safe in signal handlers. */
    void (*stir)(ms_replication *replication);
    /* Frees it; the files' close calls it. */
    void (*close)(ms_replication *replication);
};

/* A job on this node, as a process sees it: its memory files. What every rendezvous has comes
 * first, so that a pointer to one is a pointer to the other. */
typedef struct ms_shm_files {
    ms_rendezvous base;
    ms_control_file *control;
    ms_replication *replication; /* NULL in a job of one node */
    /* The thread that calls MPI for this process' rank, whose news wake that rank; NULL in a job of
     * one node. The replication's close ends it. */
    struct ms_mpi *mpi;
    uint64_t control_bytes;
    uint64_t heap_bytes; /* of a rank on this node; others have staging areas only */
    ms_file *control_file;
    struct {
        ms_file *file;
        char *memory;
    } heaps[MS_LOCAL_RANKS_MAX];
} ms_shm_files;

static inline ms_shm_files *ms_shm_files_of(const ms_rendezvous *rendezvous)
{
    return (ms_shm_files *)(uintptr_t)rendezvous;
}

/* Whether the threads of the ranks outnumber the cores. A thread that spins on a shared core yields
 * it, since the thread that it waits for may need it. */
typedef enum ms_pressure { MS_OWN_CORE, MS_SHARED_CORE } ms_pressure;

#define MS_STEPS_TIMED 15

/* A rank's part of deadlock detection: deadlock.c. */
typedef struct ms_deadlock_watch {
    ms_word lock;
    uint32_t waiting;      /* tasks that wait for a peer */
    uint32_t looked;       /* of them, those that have looked in this round */
    uint64_t round, begun; /* rounds that have ended; waits so far */
    uint64_t moves;        /* at the end of the last round */
    uint64_t times;        /* how often the rank stalled */
    uint64_t since_ns;     /* when it last did */
    uint32_t prompts;      /* since then, how often it woke the others so that they look */
    bool watching;         /* seen is filled */
    uint64_t seen[MS_LOCAL_RANKS_MAX]; /* `still` of each rank when all were found still */
} ms_deadlock_watch;

/* A rank's side: ms_comm.control_state. */
typedef struct ms_shm_rank {
    ms_comm *comm;
    ms_shm_files *files; /* a reference */
    ms_control_file *control;
    bool joined;   /* the others may see it */
    uint32_t rank; /* in the world, as everything here */
    ms_pressure pressure;
    /* host thread: calls so far with each rank */
    uint64_t sends[MS_LOCAL_RANKS_MAX], receives[MS_LOCAL_RANKS_MAX];
    /* host thread: how long the last steps took */
    uint64_t step_ns[MS_STEPS_TIMED], steps_timed, step_began_ns;
    _Atomic uint64_t patience_ns; /* a longer wait is reported as a straggler's */
    _Atomic uint32_t yieldless;   /* so many waits to come sleep without a yield before: wait.c */
    ms_deadlock_watch deadlock;
} ms_shm_rank;

static inline uint64_t ms_shm_now(const ms_shm_rank *self)
{
    return self->files->base.os->monotonic_ns(self->files->base.os->user);
}

static inline bool ms_shm_is_here(const ms_control_file *control, uint32_t rank)
{
    return control->node_of[rank] == control->here;
}

/* In a job of one node there is no replication, and this does nothing. */
static inline void ms_shm_tell(const ms_shm_rank *self, const void *address, size_t bytes)
{
    ms_replication *replication = self->files->replication;
    if (replication) replication->tell(replication, address, bytes);
}

static inline ms_pair_line *ms_pair(const ms_shm_files *files, uint32_t from, uint32_t to)
{
    ms_control_file *control = files->control;
    return (ms_pair_line *)(void *)&control->lines[control->ranks] + (size_t)from * control->ranks
           + to;
}

static inline ms_member_line *ms_member(const ms_shm_files *files, uint32_t group, uint32_t channel,
                                        uint32_t rank)
{
    const ms_control_file *control = files->control;
    return (ms_member_line *)(void *)(ms_pair(files, control->ranks - 1, control->ranks - 1) + 1)
           + ((size_t)group * MS_CHANNELS + channel) * control->ranks + rank;
}

static inline char *ms_stage(const ms_shm_files *files, uint32_t rank, uint32_t area, uint64_t half)
{
    return files->heaps[rank].memory + (area * 2 + (half & 1)) * MS_STAGE_BYTES;
}

#endif
