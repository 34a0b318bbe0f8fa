/* moonshard/hook.h: communication hooks: the bucket that a link sees, the native links, chains.
 *
 * Invariants
 * - A bucket's buffer holds the sum of this rank's gradients, undivided. Whoever reduces it takes the mean over `divisor` ranks: the native reductions
 *   multiply each rank's numbers by 1 / divisor as they read them, 16 bits in f32, so that no sum leaves the range of its dtype.
 * - A chain is data: links in order, the last one reduces. What a link encodes it decodes again, in reverse order, once the later links are done.
 * - All that a chain does is enqueued, on the engine's current stream (the group's communication stream) or behind it: no link blocks the host.
 * - A link sees its bucket from its call until its chain's result is delivered, not longer.
 */
#ifndef MOONSHARD_HOOK_H
#define MOONSHARD_HOOK_H

#include "moonshard/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum ms_bucket_kind { MS_BUCKET_ALL_REDUCE, MS_BUCKET_REDUCE_SCATTER, MS_BUCKET_HYBRID } ms_bucket_kind;
MS_API const char *ms_bucket_kind_name(ms_bucket_kind kind);                /* "all_reduce" ... */

/* What ddp (later fsdp) fills in and owns; links read it. */
typedef struct ms_bucket {
    ms_engine *engine;
    ms_group *group;               /* everyone whose gradients are summed */
    ms_bucket_kind kind;
    uint32_t index;                /* 0 is launched first */
    bool is_last;
    uint32_t divisor;              /* how many ranks a mean is over */
    uint32_t count;                /* of parameters */
    const uint32_t *positions;     /* of the parameters among all of the model */
    ms_tensor *flat;               /* the gradients, 1-D, contiguous, in the group's memory: where the result is to lie */
    ms_tensor **gradients;         /* views of flat in the parameters' shapes */
    ms_tensor **parameters;
    ms_tensor *buffer;             /* what the next link sees: flat, or what a link has put in its place (retained) */
    char label[32];                /* for messages: its first parameter */
} ms_bucket;

/* Later links see `tensor` as the buffer. */
MS_API void ms_bucket_set_buffer(ms_bucket *bucket, ms_tensor *tensor);
/* View `index` of the present buffer in the shape of that parameter, owned; MS_ERROR_STATE if the buffer has another length than the gradients. */
MS_API ms_status ms_bucket_gradient(ms_bucket *bucket, uint32_t index, ms_tensor **out);
/* This rank's part of a full-length tensor, owned: for all_reduce the whole. */
MS_API ms_status ms_bucket_shard(ms_bucket *bucket, ms_tensor *full, ms_tensor **out);
/* MS_ERROR_ARGUMENT unless a chain may return it: of the shard's length and the gradients' dtype, contiguous, of this engine. `who` begins the message. */
MS_API ms_status ms_bucket_check_result(const ms_bucket *bucket, const char *who, const ms_tensor *result);

/* ----------------------------------------------------------------------------------------------------------------------------- links */

typedef struct ms_link_options {
    ms_reduce_op op;               /* of a reduction; MS_REDUCE_OP_AVG: the mean over the bucket's divisor */
    ms_dtype dtype;                /* cast: what travels */
    ms_group *group;               /* NULL: the bucket's; a mean is over its size */
} ms_link_options;

/* A link either wraps what follows (encode, and decode unless nothing is to be undone) or reduces. */
typedef struct ms_link_kind {
    const char *name;
    ms_status (*encode)(const ms_link_options *options, ms_bucket *bucket);
    /* before: the buffer as it was when encode was called; reduced: what the later links made; *out: owned. */
    ms_status (*decode)(const ms_link_options *options, ms_bucket *bucket, ms_tensor *before, ms_tensor *reduced, ms_tensor **out);
    ms_status (*reduce)(const ms_link_options *options, ms_bucket *bucket, ms_tensor **out);
} ms_link_kind;

/* "reduce" (the kind's own reduction), "all_reduce" (of all_reduce buckets only), "noop" (gradients stay local), "cast" (there and back). */
MS_API const ms_link_kind *ms_link_find(const char *name);                  /* NULL if there is none */

typedef struct ms_link { const ms_link_kind *kind; ms_link_options options; } ms_link;
#define MS_CHAIN_LINKS 16
/* MS_ERROR_ARGUMENT unless all but the last wrap and the last reduces. */
MS_API ms_status ms_chain_check(ms_engine *engine, const ms_link *links, uint32_t count);
MS_API ms_status ms_chain_run(const ms_link *links, uint32_t count, ms_bucket *bucket, ms_tensor **result);

/* A chain that is not all native. What it returns is owned, and ready at *ready (seq 0: behind the group's communication stream). */
typedef ms_status (*ms_comm_hook)(void *user, ms_bucket *bucket, ms_tensor **result, ms_point *ready);

#ifdef __cplusplus
}
#endif
#endif
