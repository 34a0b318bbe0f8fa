/* moonshard/hook.h: communication hooks: the bucket that a link sees, the native links, chains.
 *
 * Invariants
 * - A bucket's buffer holds the sum of this rank's gradients, undivided. The link that reduces it
 *   takes the mean over `divisor` ranks: native reductions multiply each rank's numbers by 1 /
 *   divisor as they read them, and add 16-bit numbers in f32, so that no sum leaves the range of
 *   its dtype.
 * - A chain is data: an array of links, of which the last one reduces. A link that encodes the
 *   buffer decodes the result. Links decode in reverse order, after the later links.
 * - A chain only enqueues, on the engine's current stream (the group's communication stream) or on
 *   streams that wait for it. No link blocks the host.
 * - A link may use its bucket from its call until the result of its chain is delivered.
 * - A link's state is kept for each parameter, not for each bucket, and so follows parameters when
 *   buckets are rebuilt. A state belongs to one link, which may serve several reducers.
 * - The kind of a bucket says what its chain returns. all_reduce: all numbers. reduce_scatter: this
 *   rank's shard, one of as many equal parts of the buffer as the shard group has ranks. hybrid:
 *   the same; each shard is reduced over a shard group, then over the ranks of all shard groups
 *   that hold the same shard.
 * - The buffer of a sharded kind has the parameters' gradients one after another, and zeros after
 *   the last one, so that its length divides by the size of the shard group. Native links leave
 *   those zeros zero.
 * - A shard is a part of the buffer as it is, or, in a bucket with `parts`, has this rank's rows of
 *   each gradient: parts[i] numbers of gradient i, one gradient after another, and zeros where a
 *   gradient has no rows left. Sums of parts by shards are the buffer's length. */
#ifndef MOONSHARD_HOOK_H
#define MOONSHARD_HOOK_H

#include "moonshard/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum ms_bucket_kind {
    MS_BUCKET_ALL_REDUCE,
    MS_BUCKET_REDUCE_SCATTER,
    MS_BUCKET_HYBRID,
    MS_BUCKET_KINDS
} ms_bucket_kind;
MS_API const char *ms_bucket_kind_name(ms_bucket_kind kind); /* "all_reduce" ... */

/* A bucket as links see it. ddp (later fsdp) fills it in and owns it. */
typedef struct ms_bucket {
    ms_engine *engine;
    ms_group *group;             /* all ranks whose gradients are summed */
    ms_group *shards, *replicas; /* hybrid: the groups of MS_LEVEL_SHARD and MS_LEVEL_REPLICATE */
    ms_bucket_kind kind;
    uint32_t index; /* in the order of launches in this pass: 0 is launched first */
    bool is_last;
    /* Which of its model's buckets it is: stays the same until buckets are made again. */
    uint32_t place;
    /* Of flat (ms_collective.fixed_address), where its memory stays from pass to pass, no script
     * reduces it and the divisor does not change; else 0. */
    uint32_t fixed_address;
    /* The result is added to gradients of earlier passes, which are not in the buffer. */
    bool continues;
    /* A parameter whose gradient a loss scaler has multiplied, where its tensor does not tell
     * (ms_tensor_grad_is_marked), or NULL. */
    const char *scaled;
    double divisor;            /* of a mean: how many ranks it is over, unless a user has set it */
    uint32_t count;            /* of parameters */
    const uint32_t *positions; /* of the parameters among all of the model */
    const char *const *names;  /* of the parameters */
    /* Gradient buffer: 1-D, contiguous, in the group's memory. The result is written here. */
    ms_tensor *flat;
    /* Views of flat in the parameters' shapes; between the reductions of a hybrid bucket, 1-D: the
     * part of each gradient that is in this rank's shard. */
    ms_tensor **gradients;
    ms_tensor **parameters;
    /* NULL: shards are cut anywhere. Otherwise by rows: how many numbers of each gradient a shard
     * has. Not of all_reduce buckets. */
    const int64_t *parts;
    /* Where a link that holds results until the pass's last bucket keeps this one, and then returns
     * it: the shard's length and a float dtype, borrowed. NULL: this rank's part of flat. */
    ms_tensor *result;
    /* Input of the next link: flat, or the tensor that a link has put in its place (retained). */
    ms_tensor *buffer;
    /* For error feedback: this rank's numbers as the other ranks receive them, f32, owned by the
     * chain; NULL: no link has reported them. */
    ms_tensor *sent;
    bool wants_sent; /* a link of this chain keeps the residual and needs `sent` */
    /* Storage and version of the buffer when it last held this rank's numbers without loss; see
     * ms_bucket_mark_lossless. */
    const ms_storage *lossless;
    uint64_t lossless_version;
    /* A cast right before the reduction: the collective rounds to this dtype as it reads and
     * writes; MS_F32: no cast. */
    ms_dtype travels;
    /* The link that runs, counted from 1 in its chain; links that ran before this bucket's chain in
     * the same array (between the reductions of a hybrid bucket). */
    uint32_t link, links_before;
    /* NULL: bytes are not counted; see ms_bucket_account. */
    ms_status (*account)(void *user, uint32_t link);
    void *account_user;
    char label[32]; /* for messages: its first parameter */
} ms_bucket;

/* all: the ranks whose gradients are summed. shard: the ranks that share one copy of the
 * parameters. replicate: the ranks that hold the same shard. A level that the kind does not have is
 * a group of this rank alone. */
typedef enum ms_bucket_level { MS_LEVEL_ALL, MS_LEVEL_SHARD, MS_LEVEL_REPLICATE } ms_bucket_level;
MS_API ms_status ms_bucket_group(ms_bucket *bucket, ms_bucket_level level, ms_group **out);
/* Tasks and bytes that are enqueued for the bucket from now on are charged to that link, counted
 * from 1 in its chain; 0: to no link. */
static inline ms_status ms_bucket_account(const ms_bucket *bucket, uint32_t link)
{
    return bucket->account ? bucket->account(bucket->account_user, link) : MS_OK;
}
/* The numbers of a tensor of any shape as one dimension, which is what links work on; in the same
 * memory where they follow each other there. Owned. Applications pass what scripts give through it.
 */
MS_API ms_status ms_bucket_row(ms_tensor *given, ms_tensor **out);
/* Later links see `tensor`, which has one dimension, as the buffer. */
MS_API void ms_bucket_set_buffer(ms_bucket *bucket, ms_tensor *tensor);

/* Error feedback: a link that keeps the residual (what this rank meant to send, less what the other
 * ranks received) sets wants_sent. Then each link that loses something of this rank's numbers
 * reports, as a tensor of the buffer's length, what the other ranks will receive of them. */
MS_API ms_status ms_bucket_set_sent(ms_bucket *bucket, ms_tensor *sent);
/* The buffer, as it is now, holds this rank's numbers without loss. Called by the link that sets
 * wants_sent, and by links that replace the buffer and lose nothing but rounding, which the
 * reduction reports. */
MS_API void ms_bucket_mark_lossless(ms_bucket *bucket);
/* Whether the residual can be computed: the buffer is still lossless, or a link has called
 * set_sent. Also true where no link wants it, and where the buffer has another length than the
 * gradients, because then the reduction cannot go on without a report. */
MS_API bool ms_bucket_loss_is_known(const ms_bucket *bucket);

/* View `index` of the present buffer in the shape of that gradient, owned; MS_ERROR_STATE if the
 * buffer has another length than the gradients. */
MS_API ms_status ms_bucket_gradient(ms_bucket *bucket, uint32_t index, ms_tensor **out);
/* How many shards the bucket has, and which of them is this rank's; for all_reduce 1 and 0. */
MS_API uint32_t ms_bucket_shards(const ms_bucket *bucket, uint32_t *own);
/* The number of elements that belong to gradients; the rest of the buffer is padding. */
MS_API int64_t ms_bucket_numbers(const ms_bucket *bucket);
/* This rank's part of a contiguous tensor with the buffer's length, 1-D, owned: a view, or a copy
 * where shards are cut by rows; for all_reduce the tensor itself. MS_ERROR_ARGUMENT for another
 * length. */
MS_API ms_status ms_bucket_shard(ms_bucket *bucket, ms_tensor *full, ms_tensor **out);
/* Checks that a chain may return the tensor: it must have the shard's length and the gradients'
 * dtype, be contiguous and belong to this engine. Otherwise MS_ERROR_ARGUMENT. hook: the name of
 * the hook for the message, or NULL. */
MS_API ms_status ms_bucket_check_result(const ms_bucket *bucket, const char *hook,
                                        const ms_tensor *result);

/* -------------------------------------------------------------------- state */

/* What a link keeps from one iteration to the next: f32 tensors by name and parameter, and a count
 * of iterations. */
typedef struct ms_link_state ms_link_state;
/* With one reference; freed with the engine at the latest. */
MS_API ms_status ms_link_state_new(ms_engine *engine, ms_link_state **out);
MS_API ms_link_state *ms_link_state_retain(ms_link_state *state); /* NULL is allowed */
MS_API void ms_link_state_release(ms_link_state *state);          /* NULL is allowed */
/* For applications with garbage collection: marks one reference for release by the next sweep, so
 * that memory does not depend on when the collector runs. */
MS_API void ms_link_state_abandon(ms_link_state *state);
MS_API void ms_link_states_sweep(ms_engine *engine);

/* One 1-D f32 tensor with lengths[i] numbers for parameter i of the bucket, one parameter after
 * another; owned. lengths NULL: as many as its gradient has, and zeros for the bucket's padding. It
 * starts with the values that the state has under this name for each parameter, from another bucket
 * or from ms_link_state_put. Values that are new, or had another length, are zero and set fresh[i]
 * (fresh may be NULL). The state keeps the tensor. On the current stream. */
MS_API ms_status ms_link_state_tensor(ms_link_state *state, const ms_bucket *bucket,
                                      const char *name, const int64_t *lengths, bool *fresh,
                                      ms_tensor **out);
/* The same for numbers that belong to no parameter. */
MS_API ms_status ms_link_state_shared(ms_link_state *state, const char *name, int64_t length,
                                      bool *fresh, ms_tensor **out);
/* How many iterations the link has run, as the link itself counts them. */
MS_API int64_t ms_link_state_iteration(const ms_link_state *state);
MS_API void ms_link_state_set_iteration(ms_link_state *state, int64_t iteration);
/* For a link that compresses: the count of numbers that it has received since it was made, and of
 * the numbers that were sent in their place. Not saved in checkpoints. */
typedef struct ms_link_compression {
    uint64_t before, after;
} ms_link_compression;
MS_API ms_link_compression ms_link_state_compression(const ms_link_state *state);

/* For saving: all tensors of the state, in a fixed order, each as a view that is owned. parameter:
 * "" for numbers that belong to none. parallel: there is one for each number of the gradient, as in
 * residuals; of a piece that was put, once a bucket has asked for it. MS_ERROR_ARGUMENT past the
 * last. */
typedef struct ms_link_piece {
    const char *name, *parameter;
    ms_tensor *tensor;
    bool parallel;
} ms_link_piece;
MS_API uint32_t ms_link_state_pieces(const ms_link_state *state);
MS_API ms_status ms_link_state_piece(ms_link_state *state, uint32_t index, ms_link_piece *out);
/* For loading: clear drops all values; put adds a copy, for the first parameter of that name that
 * asks for it. */
MS_API void ms_link_state_clear(ms_link_state *state);
MS_API ms_status ms_link_state_put(ms_link_state *state, const char *name, const char *parameter,
                                   ms_tensor *tensor);

/* -------------------------------------------------------------------- links */

typedef enum ms_int8_per { MS_INT8_TENSOR, MS_INT8_CHANNEL, MS_INT8_BLOCK } ms_int8_per;
typedef enum ms_clip_scope {
    MS_CLIP_GLOBAL,
    MS_CLIP_BUCKET,
    MS_CLIP_LAGGED /* by the norm of the step before */
} ms_clip_scope;
typedef enum ms_int8_form { MS_INT8_ALL_GATHER, MS_INT8_ALL_TO_ALL } ms_int8_form;
typedef enum ms_nan_action { MS_NAN_SKIP, MS_NAN_STOP } ms_nan_action;

typedef struct ms_link_options {
    ms_reduce_op op; /* of a reduction; MS_REDUCE_OP_AVG: the mean over the bucket's divisor */
    ms_dtype dtype;  /* cast: in which gradients are sent */
    ms_group *group; /* NULL: the bucket's; a mean is over its size */
    double decay;    /* error_feedback: factor of the residual */
    /* reduce, of a hybrid bucket: how many links follow this one in the array of its chain. They
     * are the chain that reduces the shard over the ranks that hold it; 0: the same op. */
    uint32_t between;
    struct {
        int64_t rank, start_step, seed;
        int64_t stats_every; /* iterations between two logged lines */
        double min_rate, eps;
        bool error_feedback, warm_start, batched;
    } powersgd;
    /* block: numbers of a channel, or of a block */
    struct {
        ms_int8_per per;
        ms_int8_form form;
        int64_t block;
    } int8;
    /* sends ceil(fraction * count) numbers; a decimal fraction counts as written: 0.07 of 100 are
     * 7 */
    struct {
        double fraction, momentum;
    } top_k;
    struct {
        double max_norm;
        ms_clip_scope scope;
    } clip;
    struct {
        ms_nan_action action;
    } nan_check;
    /* subgroup NULL: the bucket's group */
    struct {
        int64_t start_step;
        ms_group *subgroup;
        bool reduce_after;
    } post_local_sgd;
} ms_link_options;

/* For applications that read options by name: a field of ms_link_options. */
typedef enum ms_option_type {
    MS_OPTION_NUMBER,
    MS_OPTION_INTEGER,
    MS_OPTION_BOOLEAN,
    MS_OPTION_CHOICE, /* an enum; choices: the names of its values */
    MS_OPTION_DTYPE,
    MS_OPTION_GROUP,
    MS_OPTION_BETWEEN /* links for ms_link_options.between */
} ms_option_type;
typedef struct ms_link_option {
    const char *name;
    ms_option_type type;
    size_t offset;
    const char *const *choices; /* ends with NULL */
    const char *required; /* end of the message if the option is missing; NULL: it has a default */
} ms_link_option;

typedef struct ms_link_kind ms_link_kind;
typedef struct ms_link {
    const ms_link_kind *kind;
    ms_link_options options;
    ms_link_state *state;
} ms_link;

/* encode: changes the buffer for the later links. decode: `before` is the buffer as it was when
 * encode was called, `reduced` the result of the later links; *out is owned. reduce: the chain's
 * result, owned. */
typedef ms_status ms_link_encode(const ms_link *link, ms_bucket *bucket);
typedef ms_status ms_link_decode(const ms_link *link, ms_bucket *bucket, ms_tensor *before,
                                 ms_tensor *reduced, ms_tensor **out);
typedef ms_status ms_link_reduce(const ms_link *link, ms_bucket *bucket, ms_tensor **out);
typedef ms_status ms_link_check(ms_engine *engine, const ms_link_options *options);

/* Bits of ms_link_kind.places; between: among the links between the reductions of a hybrid bucket,
 * where the bucket is this rank's shard and looks like an all_reduce bucket. */
#define MS_PLACE(bucket_kind) (1u << (bucket_kind))
#define MS_PLACE_BETWEEN MS_PLACE(MS_BUCKET_KINDS)
#define MS_PLACE_ALL (MS_PLACE(MS_BUCKET_KINDS + 1) - 1)

/* All facts about a native link. Each kind either encodes (and decodes, unless there is nothing to
 * undo) or reduces. */
struct ms_link_kind {
    const char *name;
    ms_link_encode *encode;
    ms_link_decode *decode;
    ms_link_reduce *reduce;
    ms_link_check *check;          /* of options; NULL: all values are allowed */
    const ms_link_option *options; /* ends with a name NULL; NULL: none */
    ms_link_options defaults;
    /* Where it works, and the reason for the other places. */
    uint32_t places;
    const char *reason;
    /* If error_feedback may not come before this link: the end of the message, which says what to
     * do instead. NULL: it may. */
    const char *no_feedback;
    bool has_state;
    bool one_model;    /* its state counts passes or belongs to a whole pass: one model only */
    bool needs_floats; /* the buffer must have one float for each number of the gradients */
    bool keeps_result; /* decode returns `reduced` with the same values */
    bool is_local;     /* ranks get different gradients, so their parameters differ */
    bool can_round;    /* a reduction that rounds to bucket->travels by itself */
    bool casts, clips, checks, compresses; /* it has options.dtype, .clip, .nan_check; statistics */
};

/* Kind `index` of the table; NULL past the last. */
MS_API const ms_link_kind *ms_link_kind_get(uint32_t index);
MS_API const ms_link_kind *ms_link_find(const char *name); /* NULL if there is none */
/* Whether the link's result for a bucket is final only after the iteration's last bucket, so that
 * no step may use it before (clip with the global scope). */
MS_API bool ms_link_is_whole(const ms_link *link);
/* Whether two models that use the link would overwrite each other's state. */
MS_API bool ms_link_is_of_one_model(const ms_link *link);
/* Whether the link keeps something from one bucket of a pass to the next. It may then ask which
 * bucket is the pass's first and which the last. */
static inline bool ms_link_asks_order(const ms_link *link) { return link->kind->has_state; }
/* Whether the link's state "bad" tells optimizers, after the last bucket, to skip the step. */
MS_API bool ms_link_skips_steps(const ms_link *link);

/* ------------------------------------------------------------------- chains */

#define MS_CHAIN_LINKS 16
/* MS_ERROR_ARGUMENT unless all links work on buckets of that kind, with options that they allow,
 * and exactly the last one reduces; a reduction may be followed by its options.between links. */
MS_API ms_status ms_chain_check(ms_engine *engine, ms_bucket_kind kind, const ms_link *links,
                                uint32_t count);
/* take: checks the links and copies them. States are retained; a link whose kind has a state and
 * that brings none gets a new one. drop: releases what take took. */
MS_API ms_status ms_chain_take(ms_engine *engine, ms_bucket_kind kind, const ms_link *links,
                               uint32_t count, ms_link *taken);
MS_API void ms_chain_drop(ms_link *taken, uint32_t count);
MS_API ms_status ms_chain_run(const ms_link *links, uint32_t count, ms_bucket *bucket,
                              ms_tensor **result);

/* For applications that run a chain themselves. begin and end: what ms_chain_run does before its
 * first and after its last link; end gets the value that begin returned. The other functions run
 * one native link and check what its kind demands of the bucket; ms_link_run_decode needs a kind
 * with decode. */
MS_API ms_dtype ms_chain_begin(ms_bucket *bucket);
MS_API void ms_chain_end(ms_bucket *bucket, ms_dtype autocast);
MS_API ms_status ms_link_run_encode(const ms_link *link, ms_bucket *bucket);
MS_API ms_status ms_link_run_decode(const ms_link *link, ms_bucket *bucket, ms_tensor *before,
                                    ms_tensor *reduced, ms_tensor **out);
MS_API ms_status ms_link_run_reduce(const ms_link *link, ms_bucket *bucket, ms_tensor **out);

/* The two halves of reduce on a hybrid bucket. open reduces the buffer over the shard group;
 * between->bucket is then this rank's shard: an all_reduce bucket of the ranks that hold it, with
 * the divisor that gives the mean over all ranks. close checks the result of the chain that reduced
 * it, and reports to error feedback what that chain lost. drop frees it (NULL is allowed). */
typedef struct ms_hybrid {
    ms_bucket bucket;
    ms_bucket *of;
    ms_tensor *exact;   /* the shard in f32 before it was rounded, for error feedback, or NULL */
    double factor;      /* by which each rank's numbers were multiplied */
    const char **names; /* bucket's lists, while they are filled */
    uint32_t *positions;
} ms_hybrid;
MS_API ms_status ms_hybrid_open(const ms_link *reduce, ms_bucket *bucket, ms_hybrid **out);
MS_API ms_status ms_hybrid_close(ms_hybrid *between, ms_tensor *result);
MS_API void ms_hybrid_drop(ms_hybrid *between);

/* A chain that is not all native. *result is owned, and ready at *ready (seq 0: after what the
 * group's communication stream has by then). */
typedef ms_status (*ms_comm_hook)(void *user, ms_bucket *bucket, ms_tensor **result,
                                  ms_point *ready);

/* What whoever reduces gradients by buckets calls for optimizers that step before backward ends,
 * with the place of a bucket, or at the end of the pass. */
#define MS_REDUCED_ALL UINT32_MAX
typedef ms_status (*ms_reduced_function)(void *user, uint32_t bucket);

/* --------------------------------------------------------------- statistics */

/* Of synchronized passes. Times of the sim device are estimates (ms_rates). */
typedef struct ms_pass_stats {
    /* Number of the pass that the counts are of, and of the pass that the times are of, from 1; 0:
     * none yet. Times are of the last pass that has ended on its streams. */
    uint64_t iterations, timed;
    /* On the stream of the model; backward begins where forward ends. */
    uint64_t forward_ns, backward_ns;
    uint64_t reduce_ns;  /* sum over the buckets, hooks included */
    uint64_t exposed_ns; /* how long the model's stream waited for results after backward */
    uint64_t step_ns;    /* from then to the step's end: clipping, optimizer */
    /* Number of reductions, and what their collectives sent. */
    uint64_t calls, payload_bytes, wire_bytes, between_nodes_bytes;
} ms_pass_stats;

/* What one link of a chain costs: the reductions in which it had a part, what they sent on its
 * account, and its time. */
typedef struct ms_link_stats {
    uint64_t calls, payload_bytes, wire_bytes, between_nodes_bytes, ns;
    uint64_t exposed_ns; /* the part of ns in which the model's stream waited */
} ms_link_stats;

/* The time from the end of forward (from its beginning, if its end is not marked) to the last
 * gradient of the bucket, and the time of the bucket's reduction, links included. */
typedef struct ms_bucket_times {
    uint64_t ready_ns, reduce_ns;
} ms_bucket_times;

/* --------------------------------------------------------- gradient sources */

/* What reduces gradients by buckets: a reducer (ddp.h) or a sharded model (fsdp.h), which owns it.
 * Optimizer overlap, planners and reports ask both in the same way. A sharded model's buckets are
 * its trainable flat parameters. */
typedef struct ms_gradient_source ms_gradient_source;

MS_API uint32_t ms_gradient_source_buckets(const ms_gradient_source *source);
/* NULL past the last */
MS_API const ms_bucket *ms_gradient_source_bucket(const ms_gradient_source *source, uint32_t index);
/* The points at which the result of a bucket of the last synchronized backward is complete: on the
 * communication stream, and on another stream that its hook has used (seq 0: none). */
MS_API void ms_gradient_source_ready(const ms_gradient_source *source, uint32_t index,
                                     ms_point ready[2]);
/* Number of passes that were reduced. */
MS_API uint64_t ms_gradient_source_passes(const ms_gradient_source *source);
/* How often buckets were built; *passes: how many passes were reduced with the present ones. Both
 * are the same on all ranks between the same two passes. */
MS_API uint64_t ms_gradient_source_layout(const ms_gradient_source *source, uint64_t *passes);
/* Whether buckets were built again since the first ones. */
MS_API bool ms_gradient_source_is_rebuilt(const ms_gradient_source *source);
/* Whether a parameter is used in this pass: by any rank if *known, which is then true on all ranks;
 * otherwise by this rank so far. It is known after the pass, in static graphs after the first pass,
 * and always where all parameters must be used. False past the last parameter. */
MS_API bool ms_gradient_source_is_used(const ms_gradient_source *source, uint32_t position,
                                       bool *known);
/* The error of the last reduction that failed on this rank; NULL: none has. Later successes do not
 * clear it. */
MS_API const char *ms_gradient_source_error(const ms_gradient_source *source);

/* Never waits. Counts are of the last synchronized pass, or, where step_end is called, of the last
 * pass whose step has ended. */
MS_API ms_pass_stats ms_gradient_source_stats(ms_gradient_source *source);
/* What each link costs, in the same passes, where the chain has several; links count from 1. The
 * number of links is 0 where the chain has one link, or its hook does not call ms_bucket_account.
 */
MS_API uint32_t ms_gradient_source_links(const ms_gradient_source *source);
MS_API ms_link_stats ms_gradient_source_link_stats(const ms_gradient_source *source, uint32_t link);
/* Of the pass that has the times of the last stats. False, and zeros, while no pass with the
 * present buckets was timed. */
MS_API bool ms_gradient_source_bucket_times(const ms_gradient_source *source, uint32_t index,
                                            ms_bucket_times *out);
/* Before a forward: blocks until the pass before the last has ended on the device. Its times are
 * then available on every rank, however fast the devices are. */
MS_API ms_status ms_gradient_source_await_times(ms_gradient_source *source);
/* After the optimizer: marks the end of the step for stats. Optional; without it the time of the
 * step is 0. */
MS_API ms_status ms_gradient_source_step_end(ms_gradient_source *source);

/* For optimizers that step before backward ends. In a synchronized backward the host calls f(user,
 * index) for each bucket, in order of index, as soon as its reduction is enqueued. The gradients of
 * its parameters are then the reduced ones. They are complete at the points of ready; the current
 * stream (the model's) has not waited for them. A task on another stream that reads them waits
 * automatically; in strict mode, C code must wait for the points. f may consume a gradient
 * (ms_tensor_set_grad NULL): the next backward writes its memory, after its readers. When the
 * current stream has waited for all results, f(user, MS_REDUCED_ALL) ends the pass. f must not
 * block; its error ends the job. f NULL: no more calls. free_user (may be NULL) is called with user
 * when f is replaced, or with the source's end.
 *
 * Of a sharded model the gradients are those of its pieces, together with those of earlier passes
 * that nothing has consumed. A unit that no rank has used is not among the calls, and neither is
 * one to which backward may come again (a forward output without gradient, a recomputation; with
 * find_unused, all units). */
MS_API void ms_gradient_source_set_on_reduced(ms_gradient_source *source, ms_reduced_function f,
                                              void *user, void (*free_user)(void *user));

/* For applications with garbage collection. Abandon says that the application no longer uses the
 * reducer or the model; a finalizer may call it at any moment. Sweep frees what was abandoned: call
 * it at a moment that does not depend on when the collector runs. */
MS_API void ms_gradient_source_abandon(ms_gradient_source *source);
MS_API void ms_gradient_sources_sweep(ms_engine *engine);

#ifdef __cplusplus
}
#endif
#endif
