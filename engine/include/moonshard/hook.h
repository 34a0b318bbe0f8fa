/* moonshard/hook.h: communication hooks: the bucket that a link sees, the native links, chains.
 *
 * Invariants
 * - A bucket's buffer holds the sum of this rank's gradients, undivided. Whoever reduces it takes
 *   the mean over `divisor` ranks: the native reductions multiply each rank's numbers by 1 /
 *   divisor as they read them, 16 bits in f32, so that no sum leaves the range of its dtype.
 * - A chain is data: links in order, the last one reduces. What a link encodes it decodes again, in
 *   reverse order, once the later links are done.
 * - All that a chain does is enqueued, on the engine's current stream (the group's communication
 *   stream) or behind it: no link blocks the host.
 * - A link sees its bucket from its call until its chain's result is delivered, not longer.
 * - What a link remembers is kept by parameter, not by bucket, so that it follows parameters when
 *   buckets are rebuilt. It belongs to one link, which may serve several reducers. */
#ifndef MOONSHARD_HOOK_H
#define MOONSHARD_HOOK_H

#include "moonshard/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum ms_bucket_kind {
    MS_BUCKET_ALL_REDUCE,
    MS_BUCKET_REDUCE_SCATTER,
    MS_BUCKET_HYBRID
} ms_bucket_kind;
MS_API const char *ms_bucket_kind_name(ms_bucket_kind kind); /* "all_reduce" ... */

/* What ddp (later fsdp) fills in and owns; links read it. */
typedef struct ms_bucket {
    ms_engine *engine;
    ms_group *group; /* everyone whose gradients are summed */
    ms_bucket_kind kind;
    uint32_t index; /* 0 is launched first */
    bool is_last;
    uint32_t divisor;          /* how many ranks a mean is over */
    uint32_t count;            /* of parameters */
    const uint32_t *positions; /* of the parameters among all of the model */
    const char *const *names;  /* of the parameters */
    /* Gradient buffer: 1-D, contiguous, in the group's memory. The result is written here. */
    ms_tensor *flat;
    ms_tensor **gradients; /* views of flat in the parameters' shapes */
    ms_tensor **parameters;
    /* Input of the next link: flat, or the tensor that a link has put in its place (retained). */
    ms_tensor *buffer;
    /* This rank's numbers as a lossy link sends them, f32, owned by the chain; NULL: no link has
     * set them. */
    ms_tensor *sent;
    bool wants_sent; /* a link of this chain wants to know it */
    /* Storage and version of the buffer when it last held this rank's unchanged numbers; see
     * ms_bucket_tell. */
    const ms_storage *told;
    uint64_t told_version;
    /* A cast right before the reduction: the collective rounds to this dtype as it reads and
     * writes; MS_F32: no cast. */
    ms_dtype travels;
    /* NULL: bytes are not counted; see ms_bucket_account. */
    ms_status (*account)(void *user, uint32_t link);
    void *account_user;
    char label[32]; /* for messages: its first parameter */
} ms_bucket;

/* Those who share one copy of the parameters, and those who hold the same part of it; a level that
 * the kind does not have is a group of this rank alone. */
typedef enum ms_bucket_level { MS_LEVEL_ALL, MS_LEVEL_SHARD, MS_LEVEL_REPLICATE } ms_bucket_level;
MS_API ms_status ms_bucket_group(ms_bucket *bucket, ms_bucket_level level, ms_group **out);
/* What is enqueued for the bucket from now on is that link's, counted from 1 in its chain; 0:
 * nobody's. */
static inline ms_status ms_bucket_account(const ms_bucket *bucket, uint32_t link)
{
    return bucket->account ? bucket->account(bucket->account_user, link) : MS_OK;
}
/* Later links see `tensor` as the buffer. */
MS_API void ms_bucket_set_buffer(ms_bucket *bucket, ms_tensor *tensor);
/* What this rank's numbers were behind a link that loses some of them, as a tensor of the buffer's
 * length; only where bucket->wants_sent. */
MS_API ms_status ms_bucket_set_sent(ms_bucket *bucket, ms_tensor *sent);
/* The buffer, as it is now, has this rank's numbers as they are: from links that want to know what
 * is sent, and those that change it and keep that true. Whether that still holds, or somebody has
 * told what else they were; true where no link wants to know, or the buffer's length tells by
 * itself that somebody has to. */
MS_API void ms_bucket_tell(ms_bucket *bucket);
MS_API bool ms_bucket_is_told(const ms_bucket *bucket);
/* View `index` of the present buffer in the shape of that parameter, owned; MS_ERROR_STATE if the
 * buffer has another length than the gradients. */
MS_API ms_status ms_bucket_gradient(ms_bucket *bucket, uint32_t index, ms_tensor **out);
/* This rank's part of a full-length tensor, owned: for all_reduce the whole. */
MS_API ms_status ms_bucket_shard(ms_bucket *bucket, ms_tensor *full, ms_tensor **out);
/* MS_ERROR_ARGUMENT unless a chain may return it: of the shard's length and the gradients' dtype,
 * contiguous, of this engine. hook: how its messages name what made it, or NULL. */
MS_API ms_status ms_bucket_check_result(const ms_bucket *bucket, const char *hook,
                                        const ms_tensor *result);

/* -------------------------------------------------------------------- state */

/* What a link remembers from one iteration to the next: f32 tensors by name and parameter, and a
 * count of iterations. */
typedef struct ms_link_state ms_link_state;
/* With one reference; freed with the engine at the latest. */
MS_API ms_status ms_link_state_new(ms_engine *engine, ms_link_state **out);
MS_API ms_link_state *ms_link_state_retain(ms_link_state *state); /* NULL is allowed */
MS_API void ms_link_state_release(ms_link_state *state);          /* NULL is allowed */
/* For hosts with garbage collection: a reference that is released by the next sweep, which does not
 * depend on a collector's pace. */
MS_API void ms_link_state_abandon(ms_link_state *state);
MS_API void ms_link_states_sweep(ms_engine *engine);

/* One 1-D f32 tensor with lengths[i] numbers for parameter i of the bucket, one behind the other
 * (lengths NULL: as many as it has); owned. What the name has kept for a parameter is in it, also
 * if that was in another bucket until now, or was put; what is new, or had another length, is zero
 * and fresh[i] (fresh may be NULL). The state keeps the tensor. On the current stream. */
MS_API ms_status ms_link_state_tensor(ms_link_state *state, const ms_bucket *bucket,
                                      const char *name, const int64_t *lengths, bool *fresh,
                                      ms_tensor **out);
/* The same for what belongs to no parameter. */
MS_API ms_status ms_link_state_shared(ms_link_state *state, const char *name, int64_t length,
                                      bool *fresh, ms_tensor **out);
/* How many iterations the link has seen; its own to count. */
MS_API int64_t ms_link_state_iteration(const ms_link_state *state);
MS_API void ms_link_state_set_iteration(ms_link_state *state, int64_t iteration);
/* Of a link that makes matrices smaller: how many numbers it was given, and how many travelled for
 * them, since it was made; not saved. */
typedef struct ms_link_compression {
    uint64_t before, after;
} ms_link_compression;
MS_API ms_link_compression ms_link_state_compression(const ms_link_state *state);

/* For saving: all that is kept, in a fixed order, as a view that is owned. parameter: "" for what
 * belongs to none. MS_ERROR_ARGUMENT past the last. */
typedef struct ms_link_piece {
    const char *name, *parameter;
    ms_tensor *tensor;
} ms_link_piece;
MS_API uint32_t ms_link_state_pieces(const ms_link_state *state);
MS_API ms_status ms_link_state_piece(ms_link_state *state, uint32_t index, ms_link_piece *out);
/* For loading: forgets everything; then puts copies, each for the first parameter of that name that
 * comes. */
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

typedef struct ms_link_options {
    ms_reduce_op op; /* of a reduction; MS_REDUCE_OP_AVG: the mean over the bucket's divisor */
    ms_dtype dtype;  /* cast: what travels */
    ms_group *group; /* NULL: the bucket's; a mean is over its size */
    double decay;    /* error_feedback: of what was left over */
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
    /* stop: an error; else what optimizers ask for */
    struct {
        bool stop;
    } nan_check;
    /* subgroup NULL: the bucket's group */
    struct {
        int64_t start_step;
        ms_group *subgroup;
        bool reduce_after;
    } post_local_sgd;
} ms_link_options;

typedef struct ms_link_kind ms_link_kind;
typedef struct ms_link {
    const ms_link_kind *kind;
    ms_link_options options;
    ms_link_state *state;
} ms_link;

/* A link either wraps what follows (encode, and decode unless nothing is to be undone) or reduces.
 * Its object is the ms_link: options, and state if it is of a kind that has some. */
struct ms_link_kind {
    const char *name;
    ms_status (*encode)(const ms_link *link, ms_bucket *bucket);
    /* before: the buffer as it was when encode was called; reduced: what the later links made;
     * *out: owned. */
    ms_status (*decode)(const ms_link *link, ms_bucket *bucket, ms_tensor *before,
                        ms_tensor *reduced, ms_tensor **out);
    ms_status (*reduce)(const ms_link *link, ms_bucket *bucket, ms_tensor **out);
    /* NULL: all are allowed */
    ms_status (*check)(ms_engine *engine, const ms_link_options *options);
    ms_link_options defaults;
    bool has_state;
};

/* "reduce" (the kind's own reduction), "all_reduce" (of all_reduce buckets only), "noop" (gradients
 * stay local), "cast" (there and back), "error_feedback" (adds what was lost in the iteration
 * before), "powersgd" (low rank), "int8", "top_k" (the greatest numbers, the others later),
 * "sign_vote" (one bit each), "adasum", "post_local_sgd", "clip" (of reduced gradients),
 * "nan_check". */
MS_API const ms_link_kind *ms_link_find(const char *name); /* NULL if there is none */

#define MS_CHAIN_LINKS 16
/* MS_ERROR_ARGUMENT unless all but the last wrap and the last reduces, with options that they
 * allow. */
/* A chain is whole where clip has the global scope: what it gives for a bucket is complete behind
 * the last bucket only, so nobody may use it before. */
MS_API bool ms_link_is_whole(const ms_link *link);
MS_API ms_status ms_chain_check(ms_engine *engine, const ms_link *links, uint32_t count);
/* Checks and copies; states are retained, and made where a kind has one and none is given. Drop
 * what was taken. */
MS_API ms_status ms_chain_take(ms_engine *engine, const ms_link *links, uint32_t count,
                               ms_link *taken);
MS_API void ms_chain_drop(ms_link *taken, uint32_t count);
MS_API ms_status ms_chain_run(const ms_link *links, uint32_t count, ms_bucket *bucket,
                              ms_tensor **result);
/* Around a chain that somebody else runs: what ms_chain_run does before its first and behind its
 * last link. begin returns what end is to be given. */
MS_API ms_dtype ms_chain_begin(ms_bucket *bucket);
MS_API void ms_chain_end(ms_bucket *bucket, ms_dtype autocast);

/* A chain that is not all native. What it returns is owned, and ready at *ready (seq 0: behind the
 * group's communication stream). */
typedef ms_status (*ms_comm_hook)(void *user, ms_bucket *bucket, ms_tensor **result,
                                  ms_point *ready);

/* --------------------------------------------------------------- statistics */

/* Of synchronized passes. Times are 0 on the sim executor. */
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
    uint64_t calls, payload_bytes, wire_bytes;
} ms_pass_stats;

/* What one link of a chain costs: the reductions in which it had a part, what they sent on its
 * account, and its time. */
typedef struct ms_link_stats {
    uint64_t calls, payload_bytes, wire_bytes, ns;
    uint64_t exposed_ns; /* the part of ns in which the model's stream waited */
} ms_link_stats;

/* When the last gradient of a bucket was there, since forward's end (since its begin where its end
 * is not noted), and how long its reduction took, links included. */
typedef struct ms_bucket_times {
    uint64_t ready_ns, reduce_ns;
} ms_bucket_times;

#ifdef __cplusplus
}
#endif
#endif
