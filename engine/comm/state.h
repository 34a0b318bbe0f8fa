/* state.h: the inside of comm: a rank's membership, its groups, and what the task of a collective
 * carries. For comm/ only.
 *
 * Threads
 * - The host thread owns everything here, with these exceptions.
 * - The task of a collective reads its arguments, and the group's members, rank and size, which
 *   never change. It owns the fields of its channel that are marked "tasks": collectives of a
 *   channel run one after the other.
 *
 * Users of a group
 * - Handles of the application, models, links and graphs are users of a group. Each rank counts its
 *   own (ms_group_retain, ms_group_release).
 * - Code that keeps a pointer to a group after a call has returned is a user of that group. A group
 *   without users may be freed at the next split (group_split.c). */
#ifndef MOONSHARD_COMM_STATE_H
#define MOONSHARD_COMM_STATE_H

#include <stdalign.h>
#include <stdatomic.h>

#include "base/thread.h"
#include "moonshard/comm.h"
#include "moonshard/control.h"

/* "off": no call becomes a graph (ms_comm_use_graphs). "on" is the default. */
#define MS_COMM_GRAPHS_VARIABLE "MOONSHARD_COMM_GRAPHS"

typedef struct ms_comm ms_comm;
typedef struct ms_topology ms_topology;

/* A set of numbers of groups. */
typedef struct ms_ids {
    uint64_t words[MS_GROUPS_MAX / 64];
} ms_ids;

static inline bool ms_ids_has(const ms_ids *ids, uint32_t id)
{
    return ids->words[id / 64] >> id % 64 & 1;
}
static inline void ms_ids_add(ms_ids *ids, uint32_t id)
{
    ids->words[id / 64] |= (uint64_t)1 << id % 64;
}
static inline uint32_t ms_ids_count(const ms_ids *ids)
{
    uint32_t count = 0;
    for (int w = 0; w < MS_GROUPS_MAX / 64; w++)
        count += (uint32_t)__builtin_popcountll(ids->words[w]);
    return count;
}
/* Takes the lowest number out of the set; there is one. */
static inline uint32_t ms_ids_next(ms_ids *ids)
{
    uint32_t w = 0;
    while (!ids->words[w]) w++;
    uint32_t bit = (uint32_t)__builtin_ctzll(ids->words[w]);
    ids->words[w] &= ids->words[w] - 1;
    return w * 64 + bit;
}

/* Places of groups in a membership's list: the job's, and that of this rank alone. */
#define MS_GROUP_PLACES (MS_GROUPS_MAX + 1)
#define MS_GROUP_WORDS ((MS_GROUP_PLACES + 63) / 64)

/* One channel of a group: its stream, and how far its collectives are. Two channels of a group do
 * not wait for each other. */
typedef struct ms_channel {
    ms_stream *stream;
    ms_point last;   /* the collective before the next one */
    uint64_t number; /* collectives enqueued */
    uint64_t phase;  /* tasks: where this channel's phase counters are between collectives */
    uint64_t flight; /* tasks: place in the flight record */
    bool populated;  /* tasks: the staging area has pages */
} ms_channel;

typedef struct ms_control ms_control;
typedef struct ms_transport ms_transport;

/* A group as this rank sees it. Members, rank, size and name never change after ms_group_new, so
 * tasks read them without a lock. */
struct ms_group {
    ms_comm *comm;
    /* The membership's; no control and the fake transport in the group of this rank alone, in which
     * no call waits. */
    const ms_control *control;
    const ms_transport *transport;
    char *name; /* owned; no other group of this rank has it */
    uint32_t id, rank, size;
    uint32_t place;           /* in the membership's list */
    uint64_t numbers;         /* its calls are counted from here */
    uint32_t *members;        /* world ranks */
    uint32_t lowest, highest; /* of them */
    uint64_t *set;            /* the same as a bit set over the world's ranks */
    uint32_t splits;          /* made from this one, for names */
    /* The split that made it, for group_split.c: of which group, its number there, and the hash of
     * its lists. parent NULL: it is the world, or this rank alone. */
    const ms_group *parent;
    uint32_t serial;
    uint64_t lists;
    uint64_t closings; /* how often it was closed */
    bool closed;       /* the next split of its parent with these lists gives it again */
    uint32_t users;    /* who holds it on this rank: see the top of this file */
    ms_ids others;     /* numbers that go with it: without other ranks, those of the other parts */
    /* The members by nodes; NULL before the first call, and where all ranks are on one node. */
    ms_topology *topology;
    /* Bit set of the membership's groups that contain all members of this one, itself included. */
    uint64_t around[MS_GROUP_WORDS];
    bool prepared;            /* the transport's prepare was called */
    uint64_t messages[2];     /* this rank's sends and recvs: upward, downward */
    ms_point last_message[2]; /* the last of them */
    void *transport_state;    /* the transport's, which its close frees */
    ms_channel channels[MS_CHANNELS];
    ms_traffic traffic[MS_COLLECTIVES + 1];
    _Atomic uint64_t between; /* tasks: bytes that this rank has sent to other nodes */
};

/* Classes of kinds. They take a uint8_t, as kinds are stored in arguments and flight records. */
static inline bool ms_kind_reduces(uint8_t kind)
{
    return kind == MS_ALL_REDUCE || kind == MS_REDUCE || kind == MS_REDUCE_SCATTER;
}
/* Whether every rank gets a part of its own from a contributor, or all get the same. */
static inline bool ms_kind_parts(uint8_t kind)
{
    return kind == MS_REDUCE_SCATTER || kind == MS_ALL_TO_ALL || kind == MS_SCATTER;
}
static inline bool ms_kind_has_root(uint8_t kind)
{
    return kind == MS_REDUCE || kind == MS_BROADCAST || kind == MS_GATHER || kind == MS_SCATTER;
}
/* Between two ranks; numbered for each ordered pair, not for the group. */
static inline bool ms_kind_is_pair(uint8_t kind) { return kind == MS_SEND || kind == MS_RECV; }

/* Arguments of a collective's task, copied when it is enqueued. Addresses are those of this
 * process. */
typedef struct ms_comm_args {
    ms_group *group;
    uint8_t kind, op, dtype, channel; /* dtype: of what travels; channel: from 0 */
    uint8_t memory; /* dtype in memory: dtype, or f32 where numbers are rounded on their way */
    bool rooted, by_counts;   /* root counts; cut by counts, on every rank */
    bool everywhere_in_place; /* all_reduce: out is in; part of counts_hash */
    bool out_of_band;         /* in and out are host memory, and control carries the call */
    uint32_t root;
    int32_t bucket;
    uint32_t fixed_address; /* ms_collective.fixed_address */
    /* The transport launches the call as this graph of its own, counted from 1; 0: by itself. Part
     * of what must agree, as ranks that do one and the other would wait for each other. */
    uint32_t graph;
    /* number: of the call in this channel, or in this pair and direction; count: elements of the
     * longer of in and out */
    uint64_t number, count;
    uint64_t turn; /* of a send or recv: its place among this rank's in its direction, from 1 */
    uint64_t counts_hash; /* what must agree beside the call, of a pair its label; 0: nothing */
    uint64_t order; /* calls before of all groups around this one: all members have made the same */
    char *in, *out;
    const int64_t *counts, *receive_counts; /* kept by the membership until the task is done */
    uint64_t payload_bytes, wire_bytes, between_nodes_bytes, timeout_ns;
    uint64_t value; /* all_to_all by counts: the longest part */
    double factor;
    char label[32], script[64];
} ms_comm_args;

/* Whether a send or recv goes to the member with the higher number. */
static inline bool ms_pair_is_upward(const ms_comm_args *args)
{
    return (args->kind == MS_SEND) == (args->root > args->group->rank);
}

/* cpu/oob_task.c: a call of control (ms_comm_args.out_of_band) on a device whose tasks are not
 * functions of the host. */
typedef struct ms_oob_call {
    ms_stream *stream;
    const ms_task *task; /* control's */
    uint64_t seq;        /* of the call in the stream */
    uint32_t script;
    ms_comm_args args;
} ms_oob_call;
/* Host memory that a task reads, freed once the point is reached. */
typedef struct ms_held {
    ms_point point;
    void *memory;
} ms_held;

/* Numbers exchanged out of band. */
typedef struct ms_shared ms_shared;
struct ms_shared {
    ms_shared *next;
    uint64_t ticket; /* 0: the host does not read the result, or has read it */
    ms_point ready;
    size_t bytes; /* of the result */
    alignas(16) char result[];
};

/* A rank's membership in a job: one control and one transport, and the groups of this rank. The
 * engine owns it (MS_SLOT_COMM), and frees it with its groups. A group that all ranks have dropped
 * is freed, and leaves its place, its number and its streams to a later one (group_split.c). Tasks
 * that look at groups which are not their own are between ms_groups_read and ms_groups_read_end. */
struct ms_comm {
    ms_engine *engine;
    const ms_control *control;
    const ms_transport *transport;
    void *control_state, *transport_state;
    uint32_t
        multiprocessors; /* of a GPU, that a collective keeps while it runs; by the transport */
    ms_rendezvous *rendezvous; /* borrowed from control; NULL where ranks meet nowhere */
    ms_comm_options options;
    /* Control's open sets it: how long a call may wait for peers; 0: there is no limit. */
    uint64_t timeout_ns;
    /* What is known of nodes: that of each rank, and how reductions add over several. */
    bool has_nodes, sum_by_ranks;
    uint16_t node_of[MS_LOCAL_RANKS_MAX];
    /* See ms_comm_use_graphs: it was called; calls may become graphs, on all ranks. */
    bool graphs_asked, has_graphs;
    uint32_t fixed_address;            /* numbers handed out by ms_group_fixed_address */
    bool aborted;                      /* the transport's abort was called */
    int64_t process;                   /* a forked child has this record, but is no rank */
    ms_group *groups[MS_GROUP_PLACES]; /* NULL: the place is free */
    _Atomic uint32_t group_count;      /* tasks look at the places below it */
    /* Of each place, which the groups there use one after the other. */
    ms_stream *streams[MS_GROUP_PLACES][MS_CHANNELS];
    ms_word readers; /* tasks that look; MS_GROUPS_CHANGE: a group comes or goes */
    ms_ids own_ids;  /* in use, where there are no others */
    /* Numbers of calls, and phases, that no group which is gone has passed: a later group with the
     * number of such a one counts on from there, so nothing of the former is taken for its own. */
    uint64_t numbers, phases;
    bool lacks_ids;                      /* the last split has found no numbers */
    ms_traffic past[MS_COLLECTIVES + 1]; /* of groups that are gone */
    ms_point last_send, last_receive;
    ms_held *held; /* counts of collectives that are under way */
    size_t held_count, held_capacity;
    ms_shared *shared; /* numbers that are under way or that the host has not read: oob.c */
    uint64_t tickets;  /* handed out for them */
    ms_collective_record *records;
    size_t record_count, record_capacity;
    bool recording;
    ms_group *alone; /* the group of this rank by itself, made at its first use */
};

#define MS_GROUPS_CHANGE UINT32_MAX

/* Readers may nest; the host thread waits for them before a group comes or goes. */
static inline void ms_groups_read(ms_comm *comm)
{
    for (uint32_t readers = atomic_load(&comm->readers);;)
        if (readers == MS_GROUPS_CHANGE) {
            ms_yield();
            readers = atomic_load(&comm->readers);
        } else if (atomic_compare_exchange_weak(&comm->readers, &readers, readers + 1)) return;
}
static inline void ms_groups_read_end(ms_comm *comm) { atomic_fetch_sub(&comm->readers, 1); }

/* What each member brings to a split, and what all learn. Without others: this rank's. */
typedef struct ms_split_words {
    uint64_t numbers, phases; /* the greatest: of ms_comm */
    /* The union: new numbers that the first member has taken; of groups that the rank is in, those
     * that it is done with, and the others. */
    ms_ids taken, done, held;
} ms_split_words;
#define MS_SPLIT_GREATEST 2 /* words of which the greatest counts */

/* What a new membership is made of. rendezvous: where control meets the others; NULL for one that
 * has none. */
typedef struct ms_membership {
    const ms_control *control;
    const ms_transport *transport;
    ms_rendezvous *rendezvous;
    uint32_t rank, size;
    ms_comm_options options;
} ms_membership;
/* members: world ranks; NULL for 0 .. size-1. id: of control, or MS_GROUP_ALONE for the group of
 * this rank alone, whose calls go to no peer, so that it has no control even in a real job. */
#define MS_GROUP_ALONE UINT32_MAX
/* The kinds of calls that every transport has. K(kind, name, more): the tables of all transports
 * and devices are made from this list. MS_SPLIT is a call of control alone. */
#define MS_COMM_LIST(K, more)                    \
    K(MS_ALL_REDUCE, "all_reduce", more)         \
    K(MS_REDUCE, "reduce", more)                 \
    K(MS_REDUCE_SCATTER, "reduce_scatter", more) \
    K(MS_ALL_GATHER, "all_gather", more)         \
    K(MS_ALL_TO_ALL, "all_to_all", more)         \
    K(MS_BROADCAST, "broadcast", more)           \
    K(MS_GATHER, "gather", more)                 \
    K(MS_SCATTER, "scatter", more)               \
    K(MS_SEND, "send", more) K(MS_RECV, "recv", more) K(MS_BARRIER, "barrier", more)

#define MS_COMM_ONE(kind, text, more) +1
_Static_assert(0 MS_COMM_LIST(MS_COMM_ONE, ) == MS_COLLECTIVES - 1, "every kind but MS_SPLIT");
/* The tasks of a transport, and those of a control, one for each kind that it has, with one
 * function. */
#define MS_COMM_TASK(index, text, run)              \
    [index] = { .name = text,                       \
                .function = run,                    \
                .args_bytes = sizeof(ms_comm_args), \
                .kind = MS_KIND_COMMUNICATION },
#define MS_COMM_TASKS(run)              \
    {                                   \
        MS_COMM_LIST(MS_COMM_TASK, run) \
    }
#define MS_SHM_TASKS(run)                                                                 \
    {                                                                                     \
        MS_COMM_TASK(MS_ALL_REDUCE, "all_reduce", run)                                    \
        MS_COMM_TASK(MS_ALL_GATHER, "all_gather", run)                                    \
        MS_COMM_TASK(MS_BROADCAST, "broadcast", run) MS_COMM_TASK(MS_SPLIT, "split", run) \
    }

#endif
