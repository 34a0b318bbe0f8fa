/* comm.h: the inside of comm: a rank's membership, its groups, and what the task of a collective
 * carries. For comm/ only.
 *
 * Who touches what
 * - Host thread: everything here but what is said below.
 * - Task of a collective: its arguments, the group's members, rank and size (which never change),
 *   and `phase` of its channel, whose collectives run one after the other. */
#ifndef MOONSHARD_COMM_COMM_H
#define MOONSHARD_COMM_COMM_H

#include <stdatomic.h>

#include "moonshard/comm.h"

typedef struct ms_comm ms_comm;

typedef struct ms_channel {
    ms_stream *stream;
    ms_point last;   /* the collective before the next one */
    uint64_t number; /* collectives enqueued */
    uint64_t phase;  /* tasks: where this channel's phase counters stand between collectives */
    uint64_t flight; /* tasks: place in the flight record */
    bool populated;  /* tasks: the staging area has pages */
} ms_channel;

typedef struct ms_comm_backend ms_comm_backend;

struct ms_group {
    ms_comm *comm;
    /* The membership's backend; the fake one if the group has only this rank, so that no call
     * waits. */
    const ms_comm_backend *backend;
    char *name; /* owned; no other group of this rank has it */
    uint32_t id, rank, size;
    uint32_t *members; /* world ranks */
    uint32_t splits;   /* made from this one, for names */
    /* Result of the last split. Written by tasks, possibly after the caller has given up. */
    uint64_t split_id;
    /* Bit set of the membership's groups that contain all members of this one, itself included. */
    uint64_t around[MS_GROUPS_MAX / 64];
    ms_channel channels[MS_CHANNELS];
    ms_traffic traffic[MS_COLLECTIVES + 1];
};

/* Arguments of a collective's task. Addresses are this process'. */
typedef struct ms_comm_args {
    ms_group *group;
    uint8_t kind, op, dtype, channel; /* dtype: of what travels; channel: from 0 */
    uint8_t memory; /* dtype in memory: dtype, or f32 where numbers are rounded on their way */
    bool rooted, by_counts;   /* root counts; cut by counts, on every rank */
    bool everywhere_in_place; /* all_reduce: out is in; part of counts_hash */
    uint32_t root;
    int32_t bucket;
    /* number: of the call in this channel, or in this pair and direction; count: elements of the
     * longer of in and out */
    uint64_t number, count;
    uint64_t counts_hash; /* what must agree beside the call; 0: no counts */
    uint64_t order; /* calls before of all groups around this one: all members have made the same */
    char *in, *out;
    const int64_t *counts, *receive_counts; /* kept by the membership until the task is done */
    uint64_t payload_bytes, wire_bytes, timeout_ns;
    uint64_t value;   /* split: the id that this rank proposes */
    uint64_t *result; /* split: where the agreed ids go, one for each member */
    double factor;
    char label[32], script[64];
} ms_comm_args;

/* How ranks reach each other. tasks: one for each kind. */
struct ms_comm_backend {
    const ms_task *tasks;
    /* blocks; ids of the parts in order */
    ms_status (*split)(ms_group *group, uint64_t list_hash, uint32_t parts, uint32_t *first_id);
    ms_status (*join)(ms_comm *comm, uint32_t id); /* before this rank's first use of a new group */
    ms_status (*storage)(ms_comm *comm, ms_stream *stream, size_t bytes, ms_storage **out);
    ms_status (*check)(ms_comm *comm);
    uint64_t (*number)(ms_comm *comm, const ms_comm_args *args); /* of a send or recv */
    /* Called before a call is enqueued, for everything that can fail. */
    ms_status (*prepare)(ms_comm *comm, const ms_comm_args *args);
    void (*issued)(ms_comm *comm, const ms_comm_args *args); /* it is enqueued: peers may know */
    void (*leave)(ms_comm *comm, const char *message);
    void (*abort)(ms_comm *comm, const ms_error *error);
    void (*progress)(ms_comm *comm);
    /* step and set_folder may be NULL. */
    void (*step)(ms_comm *comm, uint64_t serial, int64_t step, uint8_t values[MS_REQUESTS]);
    void (*set_folder)(ms_comm *comm, const char *folder);
    void (*close)(ms_comm *comm);
};

extern const ms_comm_backend ms_comm_local, ms_comm_fake;

/* The tasks of a backend, one for each kind, with one function. */
#define MS_COMM_TASK(index, text, run)              \
    [index] = { .name = text,                       \
                .function = run,                    \
                .args_bytes = sizeof(ms_comm_args), \
                .kind = MS_KIND_COMMUNICATION,      \
                .flags = MS_TASK_PUBLISH }
#define MS_COMM_TASKS(run)                                                                        \
    {                                                                                             \
        MS_COMM_TASK(MS_ALL_REDUCE, "all_reduce", run), MS_COMM_TASK(MS_REDUCE, "reduce", run),   \
            MS_COMM_TASK(MS_REDUCE_SCATTER, "reduce_scatter", run),                               \
            MS_COMM_TASK(MS_ALL_GATHER, "all_gather", run),                                       \
            MS_COMM_TASK(MS_ALL_TO_ALL, "all_to_all", run),                                       \
            MS_COMM_TASK(MS_BROADCAST, "broadcast", run), MS_COMM_TASK(MS_GATHER, "gather", run), \
            MS_COMM_TASK(MS_SCATTER, "scatter", run), MS_COMM_TASK(MS_SEND, "send", run),         \
            MS_COMM_TASK(MS_RECV, "recv", run), MS_COMM_TASK(MS_BARRIER, "barrier", run),         \
            MS_COMM_TASK(MS_SPLIT, "split", run)                                                  \
    }

typedef struct ms_held {
    ms_point point;
    void *memory;
} ms_held;

typedef struct ms_shared ms_shared;

struct ms_comm {
    ms_engine *engine;
    const ms_comm_backend *backend;
    void *state;     /* the backend's */
    int64_t process; /* a forked child has this record, but is no rank */
    ms_group *groups[MS_GROUPS_MAX];
    _Atomic uint32_t group_count; /* tasks look at the groups below it */
    uint32_t fake_ids;            /* handed out in a fake world */
    ms_point last_send, last_receive;
    ms_held *held; /* counts of collectives that are under way */
    size_t held_count, held_capacity;
    ms_shared *shared; /* numbers that are under way or that the host has not read: share.c */
    uint64_t tickets;  /* handed out for them */
    ms_collective_record *records;
    size_t record_count, record_capacity;
    bool recording;
    ms_group *alone; /* the group of this rank by itself, once somebody has asked for it */
};

/* The membership of an engine that has none yet, and its world. */
ms_status ms_comm_new(ms_engine *engine, const ms_comm_backend *backend, void *state, uint32_t rank,
                      uint32_t size, ms_group **world);
/* members: world ranks; NULL for 0 .. size-1. */
ms_status ms_group_new(ms_comm *comm, uint32_t id, const char *name, uint32_t rank, uint32_t size,
                       const uint32_t *members, ms_group **out);
ms_comm *ms_comm_of(const ms_engine *engine);
/* The text, or its end where it is too long. */
void ms_copy_tail(char *to, size_t bytes, const char *text);
/* Frees all that hosts have shared, after the streams have ended. */
void ms_shared_free(ms_comm *comm);
/* A collective past the public checks. Without tensors (split, shared numbers), the caller has set
 * dtype, memory, in, out and payload_bytes of args. */
ms_status ms_group_issue(ms_group *group, ms_comm_args *args, const ms_collective *collective,
                         ms_point *ready);

#endif
