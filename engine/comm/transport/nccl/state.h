/* state.h: the transport over NCCL: a rank's side of it, its groups and their communicators. For
 * comm/transport/nccl/ only.
 *
 * Invariants
 * - A group has a communicator for each channel that moves tensors, and two for sends: one to ranks
 *   with a higher number in the group, one to lower ones. In each of these two, a rank's sends and
 *   receives run in the order of its calls.
 * - Communicators do not block (blocking = 0). After a call has returned ncclInProgress, nothing
 *   else may be asked of the communicator, and nothing of the call may be on the stream, until
 *   ncclCommGetAsyncError says ncclSuccess. Whoever has a communicator's turn makes its calls, and
 *   gives the turn back only when none is in progress, or when the job has ended.
 * - Each rank has a thread, the watchdog. It finds calls that take too long and errors of calls
 *   that had been launched, and ends the job with them. At the end, it alone closes or aborts the
 *   communicators.
 * - NCCL may hang in any of its functions, ncclCommAbort among them. No thread waits for the
 *   watchdog without a time limit. If it does not come back, the record of this rank stays and is
 *   not freed, and the process can only end. On a GPU, work that was launched may go on till then,
 *   and a host thread that waits for it waits until the supervisor kills the process.
 * - On a GPU, a task makes its calls on the host thread and returns once NCCL has put them on the
 *   stream; the first one in a communicator waits there until all members have come, as NCCL
 *   connects. Many calls may be on the stream. The GPU writes down which has started and which has
 *   ended (ms_nccl_in_flight): the time limit of a call begins when it has started. When the job
 *   ends, the watchdog aborts, the stream goes on, and the host thread makes it fail when it finds
 *   that the call is reached.
 * - NCCL adds in its own order, which depends on ranks and lengths: results repeat, but their bits
 *   are not those of other transports. In min and max of floats it may drop a NaN. A factor is
 *   rounded to the tensor's dtype before it multiplies.
 * - Memory is registered (ncclCommRegister) where each member of a group is a process. Between
 *   threads of one process NCCL, before a fix of 2026, maps only the first of the cuMemCreate
 *   handles that make up registered memory, and would read past it.
 * - Between processes registering is without effect on memory of the pool: its handles cannot be
 *   exported (requestedHandleTypes is 0). A storage may be in several pieces of the pool, of which
 *   NCCL 2.28 would import the first one only (NVIDIA/nccl#1820). The same is true of what NCCL
 *   registers by itself while a call is captured (NCCL_GRAPH_REGISTER).
 * - Limits of what NCCL takes of a GPU (CTAs) come from ms_comm_options; its own variables
 *   NCCL_MIN_CTAS and NCCL_MAX_CTAS have priority.
 * - A call that comes again with the same memory is launched as a graph (graphs.c). NCCL closes and
 *   aborts a communicator only once all of its graphs are gone. So they go before it is closed; and
 *   when it is aborted, after it was told and before it is freed, since a graph may be under way.
 * - How many multiprocessors of a GPU a call keeps cannot be asked. It is taken to be max_ctas, or
 *   16 where that is not given. Products of other streams are planned for the rest
 *   (ms_stream_taken), which follows from the order of the host's calls alone. */
#ifndef MOONSHARD_COMM_TRANSPORT_NCCL_STATE_H
#define MOONSHARD_COMM_TRANSPORT_NCCL_STATE_H

#include "base/assert.h"
#include "base/thread.h"
#include "comm/transport/nccl/api.h"
#include "comm/control_table.h"
#include "comm/rendezvous.h"
#include "comm/transport_table.h"

/* The channel of numbers exchanged out of band is control's. */
#define MS_NCCL_CHANNELS (MS_CHANNELS - 1)
enum { MS_NCCL_UPWARD = MS_NCCL_CHANNELS, MS_NCCL_DOWNWARD, MS_NCCL_COMMUNICATORS };

/* Memory to be registered. Ranges are only added, the newest first. */
typedef struct ms_nccl_range ms_nccl_range;
struct ms_nccl_range {
    const ms_nccl_range *next;
    void *memory;
    size_t bytes;
};

/* The call of a communicator that is under way, or its last one. The lock is held for copies
 * only. */
typedef struct ms_nccl_watched {
    ms_word lock;
    bool is_under_way;
    uint64_t calls; /* so far, with this one */
    ms_awaited awaited;
    ms_comm_args args;
} ms_nccl_watched;

/* A call on a GPU, from its launch until the host knows that it has ended. It is in pinned
 * memory, as the GPU writes `started` and `ended`. The lock of its communicator is for all but
 * these; the watchdog reads, the host thread makes and takes away. */
typedef struct ms_nccl_in_flight ms_nccl_in_flight;
struct ms_nccl_in_flight {
    ms_nccl_in_flight *next; /* the one launched after it, or the next of those that are free */
    struct ms_communicator *to;
    volatile uint32_t started, ended;
    bool has_entered, has_landed; /* as control knows it */
    bool is_aborted;              /* by the watchdog, before it has ended */
    uint64_t place;               /* in the flight record */
    ms_awaited awaited;
    ms_comm_args args;
};

/* A call that may come again with all of its memory: graphs.c. */
typedef struct ms_nccl_graph ms_nccl_graph;
struct ms_nccl_graph {
    ms_nccl_graph *next;
    uint32_t number, times; /* in its communicator, from 1; launched by itself so often */
    ms_comm_args call;      /* the first of them */
    /* The device's, made by comm/cuda/; NULL: not yet. With the turn. */
    void *graph;
    void (*drop)(void *graph);
    void (*free)(ms_engine *engine, void *graph);
};

typedef struct ms_communicator {
    ms_word turn;            /* 1: a thread has it; it owns the fields up to `watched` */
    _Atomic uint64_t served; /* sends and recvs that have had their turn */
    ms_nccl_handle handle;
    ms_nccl_handle aborted;          /* the watchdog's, which has taken it from `handle` */
    const ms_nccl_range *registered; /* this range and those after it are */
    ms_nccl_watched watched;         /* of the host's side of a call */
    ms_nccl_in_flight *flights;      /* on the GPU, the oldest first; under the lock of `watched` */
    _Atomic(ms_nccl_graph *) graphs; /* of the host thread, the newest first; only added to */
} ms_communicator;

/* ms_group.transport_state. */
typedef struct ms_nccl_group ms_nccl_group;
struct ms_nccl_group {
    ms_nccl_group *next;
    const ms_group *group;
    bool registers;                   /* memory; the same on all members */
    float barriers[MS_NCCL_CHANNELS]; /* what they add, where the library carries host memory */
    ms_communicator communicators[MS_NCCL_COMMUNICATORS];
};

/* Of the watchdog. From MS_NCCL_ENDING on it touches no more than this rank's ms_nccl, with its
 * communicators and their graphs. */
typedef enum ms_nccl_stage {
    MS_NCCL_WATCHING,
    MS_NCCL_ENDING,
    MS_NCCL_CLOSED,
    MS_NCCL_STUCK
} ms_nccl_stage;

/* ms_comm.transport_state. */
typedef struct ms_nccl {
    ms_comm *comm;
    const ms_os *os;
    ms_rendezvous *rendezvous; /* a reference */
    uint64_t timeout_ns;       /* the membership's */
    ms_nccl_api api;
    _Atomic(ms_nccl_group *) groups; /* the latest first */
    ms_word looking;                 /* 1: a thread has the list; held for looks and changes */
    _Atomic(const ms_nccl_range *) ranges;
    /* ended: the job; closing: this rank leaves; given_up: nobody waits for the watchdog. */
    _Atomic bool ended, closing, given_up;
    ms_os_thread *watchdog;
    ms_bell bell;
    _Atomic uint64_t looks_ns; /* when the watchdog looks next */
    ms_word stage;             /* ms_nccl_stage */
    ms_nccl_in_flight *spare;  /* of the host thread */
} ms_nccl;

static inline uint64_t ms_nccl_now(const ms_nccl *nccl)
{
    return nccl->os->monotonic_ns(nccl->os->user);
}

#endif
