/* state.h: the inside of a reducer. For ddp/ only.
 *
 * The files call downwards in this order: reducer (making, asking), pass (a forward and its
 * gradients), layout (which parameters share a bucket), launch (buckets that are complete), unused
 * (parameters without gradient), buckets (their memory). */
#ifndef MOONSHARD_DDP_STATE_H
#define MOONSHARD_DDP_STATE_H

#include "hook/source.h"
#include "meter/pass_times.h"
#include "moonshard/ddp.h"

/* One parameter of the model. Its address is the user pointer of the parameter's gradient hook, so
 * the array of parameters never moves while hooks are installed. All fields belong to the host
 * thread. */
typedef struct ms_ddp_parameter {
    ms_reducer *reducer;
    ms_tensor *tensor; /* retained */
    char *name;
    uint64_t hook;
    /* position: its index in the model's list. bucket: the index of the bucket that holds its
     * gradient; it changes when buckets are rebuilt. */
    uint32_t position, bucket;
    ms_tensor *view;    /* the bucket's view for its gradient; the bucket owns it */
    bool ready;         /* its gradient of this pass is complete, or none will come */
    bool used;          /* it got a gradient since the last reduction */
    bool absent;        /* no gradient comes in this pass */
    bool missed;        /* the outputs of the earlier forwards of this backward do not reach it */
    bool used_anywhere; /* some rank used it in the last pass in which the ranks compared */
    /* Static graphs: number of gradients in this pass, and in the first one. */
    uint32_t fired, expected;
    /* Gradient from before this pass, kept until it is known whether any rank used the
     * parameter. */
    ms_tensor *old_gradient;
} ms_ddp_parameter;

/* A bucket, and how far it is in the present pass. The reducer owns everything in it; links see
 * only `bucket`. It is launched when pending is 0 and all buckets of lower index were launched. */
typedef struct ms_bucket_state {
    ms_bucket bucket;
    uint32_t *positions;
    uint32_t pending; /* parameters that are not ready yet */
    bool plain;       /* of delayed parameters, which pass no hook */
    uint32_t
        fixed_address; /* ms_bucket.fixed_address, where no script has a part in the reduction */
    /* Points at which the result is complete: [0] on the communication stream, [1] on another
     * stream that the hook has used (seq 0: none). */
    ms_point ready[2];
} ms_bucket_state;

/* The buckets in the order in which they are launched. Plain buckets come last, since delayed
 * parameters must not keep a bucket of other parameters from being launched. */
typedef struct ms_bucket_list {
    ms_bucket_state *items;
    uint32_t count;
    uint32_t plain; /* number of plain buckets; they are the last ones */
} ms_bucket_list;

/* Where a pass is. LOCAL and EXPECTING are entered by a forward, REDUCING by the first gradient,
 * REDUCED by the last launch. bucket_launch.c lists the legal changes. Every rank goes through the
 * same phases, or its peers would wait for collectives that it never issues. */
typedef enum ms_reducer_phase {
    MS_REDUCER_IDLE,      /* no forward yet */
    MS_REDUCER_LOCAL,     /* a forward in no_sync: gradients add up on this rank */
    MS_REDUCER_EXPECTING, /* a forward whose backward reduces */
    MS_REDUCER_REDUCING,  /* gradients have begun to come */
    MS_REDUCER_REDUCED    /* all gradients are reduced, or an error has ended the job */
} ms_reducer_phase;

/* What does not change once the reducer is made. */
typedef struct ms_reducer_settings {
    bool find_unused, static_graph;
    bool planned; /* buckets are rebuilt only on request */
} ms_reducer_settings;

/* How buckets are reduced. */
typedef struct ms_reducer_hooks {
    ms_link links[MS_CHAIN_LINKS];
    uint32_t link_count;
    ms_link plain[2]; /* the chain of delayed parameters */
    uint32_t plain_count;
    ms_comm_hook hook;
    void *hook_user;
    void (*hook_free)(void *user);
} ms_reducer_hooks;

/* The present pass. */
typedef struct ms_reducer_pass {
    uint32_t next_bucket; /* the first bucket that has not been launched */
    uint32_t *arrival;    /* positions in the order in which gradients came, while it is logged */
    uint32_t arrived;     /* their number */
    bool no_sync, logging;
    bool counted;  /* static graphs: the first synchronized pass is over, and parameter.expected
                    * holds  its counts */
    bool searched; /* the outputs of this forward were searched for unused parameters */
    bool searched_before; /* those of some forward were */
    bool shadow;          /* the rank has no more data and only joins the collectives */
    bool apart;           /* the reduction runs outside of a backward: nothing came in an order */
    bool left;            /* passes without synchronization have left gradients */
} ms_reducer_pass;

/* What the results of forwards without synchronization have in place of the reducer, which may end
 * before their graphs. One reference is the reducer's. */
typedef struct ms_local_mark {
    ms_context *context;
    ms_reducer *reducer; /* NULL: it has ended */
    uint32_t references;
    bool runs; /* the backward that runs is that of a forward without synchronization */
} ms_local_mark;

/* A reducer. The engine owns it (a list in MS_SLOT_DDP) and frees it with itself at the latest.
 * Only the host thread reads and writes it; what runs on streams sees tensors and marks alone. */
struct ms_reducer {
    ms_gradient_source source; /* first */
    ms_group *group;
    ms_local_mark *mark; /* NULL before the first forward without synchronization */
    ms_ddp_parameter *parameters;
    uint32_t count;   /* number of parameters */
    uint32_t delayed; /* number of delayed parameters; they are the last ones */
    uint32_t divisor, limit_count;
    uint64_t *limits;
    ms_bucket_list buckets;
    /* How often buckets were made. It names a layout: times that were measured with another one are
     * not given out. */
    uint64_t layout;
    /* The number of passes that were reduced before the present buckets were made. */
    uint64_t made_at;

    ms_reducer_settings settings;
    ms_reducer_hooks hooks;
    ms_reducer_phase phase; /* changed by ms_reducer_enter only */
    ms_reducer_pass pass;
    bool rebuilt;  /* the buckets were made again, by the order of a pass */
    int32_t *uses; /* of each parameter, for comparing them over the ranks */
    ms_times times;
};

#endif
