/* reducer.h: the inside of a reducer. For ddp/ only. */
#ifndef MOONSHARD_DDP_REDUCER_H
#define MOONSHARD_DDP_REDUCER_H

#include "moonshard/ddp.h"

typedef struct ms_slot_owner { /* one parameter; what its hook is called with */
    ms_reducer *reducer;
    ms_tensor *tensor; /* retained */
    char *name;
    uint64_t hook;
    uint32_t position, bucket;
    ms_tensor *view; /* its place in the bucket; the bucket's */
    bool ready;      /* its gradient of this iteration has come */
    bool used;       /* it got a gradient since the last reduction */
    /* absent: no gradient comes in this iteration; missed: none came after the earlier forwards */
    bool absent, missed;
    bool elsewhere; /* some rank used it in the last reduction that asked */
    /* Static graphs: number of gradients in this iteration, and in the first one. */
    uint32_t fired, expected;
    /* Gradient from before this iteration, kept until it is known whether any rank used the
     * parameter. */
    ms_tensor *kept;
} ms_slot_owner;

typedef struct ms_bucket_state {
    ms_bucket bucket;
    uint32_t *positions;
    uint32_t pending;  /* parameters whose gradient has not come yet */
    bool plain;        /* not for hooks: of delayed parameters */
    ms_point ready[2]; /* of the result: on the communication stream, and where else a hook says */
} ms_bucket_state;

typedef struct ms_bucket_list {
    ms_bucket_state *items;
    uint32_t count;
    uint32_t plain; /* number of plain buckets; they are the last ones */
} ms_bucket_list;

typedef enum ms_reducer_phase {
    MS_REDUCER_IDLE,      /* no forward yet */
    MS_REDUCER_LOCAL,     /* a forward in no_sync: gradients add up here */
    MS_REDUCER_EXPECTING, /* a forward whose backward reduces */
    MS_REDUCER_REDUCING,  /* gradients have begun to come */
    MS_REDUCER_REDUCED    /* all of them are reduced */
} ms_reducer_phase;

typedef enum ms_moment {
    MS_AT_FORWARD,
    MS_AT_BACKWARD,
    MS_AT_WAIT, /* the model's stream begins to wait for results */
    MS_AT_READY,
    MS_AT_STEP_END,
    MS_MOMENTS
} ms_moment;

typedef struct ms_pass_times { /* what the host knows of a pass whose times are being written */
    ms_point end;              /* of its last time; seq 0: not enqueued yet, or taken over */
    uint64_t iteration, layout;
    uint32_t buckets;
    bool has[MS_MOMENTS];
    bool noted; /* the arrival of each gradient was timed */
} ms_pass_times;

typedef struct ms_pass_counts {
    uint64_t iterations, calls, payload_bytes, wire_bytes;
} ms_pass_counts;

typedef struct ms_accounts ms_accounts;

struct ms_reducer {
    ms_engine *engine;
    ms_group *group;
    ms_reducer *next; /* of the engine's list */
    ms_slot_owner *owners;
    uint32_t count;   /* parameters */
    uint32_t delayed; /* number of delayed parameters; they are the last ones */
    uint32_t next_bucket, divisor, arrived, limit_count;
    uint64_t *limits, iterations;
    uint32_t *arrival; /* positions in the order in which gradients came, while it is logged */
    ms_bucket_list buckets;
    ms_link links[MS_CHAIN_LINKS];
    uint32_t link_count;
    ms_link plain[2]; /* the chain of delayed parameters */
    uint32_t plain_count;
    ms_comm_hook hook;
    void *hook_user;
    void (*hook_free)(void *user);
    ms_reduced_function on_reduced;
    void *on_reduced_user;
    void (*on_reduced_free)(void *user);
    ms_reducer_phase phase;
    bool find_unused, static_graph;
    bool known;  /* static graphs: the gradients of each parameter are counted */
    bool looked; /* the outputs of some forward were searched for unused parameters */
    bool told;   /* the outputs of this forward were searched */
    bool shadow; /* the rank has no more data and only joins the collectives */
    int32_t *uses;
    bool planned; /* buckets are rebuilt only on request */
    bool no_sync, logging, rebuilt;
    bool has_steps; /* ms_reducer_step_end is called */
    bool abandoned;
    /* moments: two sets of MS_MOMENTS times; reductions: two sets of begin and end of each
     * bucket's reduction */
    ms_storage *moments, *reductions;
    /* Two sets: the time each bucket was ready, and the time each gradient arrived. */
    ms_storage *arrivals;
    uint64_t *came_ns; /* when each gradient came, in the pass that was noted last and has ended */
    ms_bucket_times *bucket_times; /* of each bucket, in the pass that stats are of */
    uint64_t layout, timed_layout; /* how often buckets were made; of which bucket_times are */
    uint64_t made_at;              /* iterations before the present buckets */
    ms_pass_times times[2];
    ms_reducer_stats stats; /* times of the last pass that has ended on the device */
    ms_accounts *accounts;  /* of the chain's links; NULL: there is only one */
    /* Counts of the last pass, and of the last pass whose step has ended. */
    ms_pass_counts counts, step_counts;
    char error[MS_ERROR_MESSAGE_BYTES]; /* the last one that ended a job; "" if there was none */
};

ms_status ms_times_open(ms_reducer *reducer);
void ms_times_close(ms_reducer *reducer);
/* On the current stream. */
ms_status ms_times_note(ms_reducer *reducer, ms_moment moment);
/* Around the reduction of a bucket; before: the traffic at its beginning. */
ms_status ms_times_reduction(ms_reducer *reducer, uint32_t bucket, bool end, ms_traffic before);
/* The last gradient of a bucket has come; on the current stream. */
ms_status ms_times_ready(ms_reducer *reducer, uint32_t bucket);
/* One gradient has come; on the current stream. */
ms_status ms_times_came(ms_reducer *reducer, uint32_t position);
/* Writes the time into a storage, on the current stream. */
ms_status ms_times_write(ms_reducer *reducer, ms_storage *storage, size_t index, ms_point *out);
/* accounts.c: around the reduction of a bucket, at a step's end, and when the times of a set are
 * there: begins and ends of reductions, and between which moments the model waited. */
ms_status ms_accounts_open(ms_reducer *reducer, uint32_t links);
void ms_accounts_close(ms_reducer *reducer);
void ms_accounts_begin(ms_reducer *reducer, uint32_t bucket);
ms_status ms_accounts_end(ms_reducer *reducer, uint32_t bucket);
void ms_accounts_step_end(ms_reducer *reducer);
void ms_accounts_harvest(ms_reducer *reducer, uint32_t set, const uint64_t *spans, uint64_t wait,
                         uint64_t ready);
ms_traffic ms_times_traffic(const ms_reducer *reducer);

/* For all files of the folder: an error ends the job, for everyone; a gradient that a script has
 * put elsewhere comes to its place; a gradient is there (or all there will be), which launches what
 * is due; an iteration's first gradient comes; nothing has come yet. */
ms_status ms_reducer_end_job(ms_reducer *reducer, ms_status status);
ms_status ms_reducer_move_home(ms_slot_owner *owner);
ms_status ms_reducer_arrive(ms_slot_owner *owner);
ms_status ms_reducer_begin(ms_reducer *reducer);
void ms_reducer_reset(ms_reducer *reducer);

ms_status ms_unused_open(ms_reducer *reducer);
void ms_unused_close(ms_reducer *reducer);
/* This parameter gets no gradient in this iteration; and at the end of one, what becomes of
 * those. */
ms_status ms_unused_skip(ms_slot_owner *owner);
ms_status ms_unused_settle(ms_reducer *reducer);
/* A gradient came, in a static graph. */
ms_status ms_static_came(ms_slot_owner *owner);

/* Where the order of the last synchronized backward is known and the buckets do not follow it yet:
 * rebuilds them. */
ms_status ms_reducer_rebuild_now(ms_reducer *reducer);
/* Makes buckets of sizes[b] parameters each, taken from order, and those of delayed parameters
 * behind them; moves what gradients there are into them. */
ms_status ms_buckets_install(ms_reducer *reducer, const uint32_t *order, const uint32_t *sizes,
                             uint32_t buckets);
void ms_buckets_free(ms_reducer *reducer, ms_bucket_list *list);

#endif
