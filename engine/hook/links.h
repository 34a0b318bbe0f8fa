/* links.h: the native links, and what they are written with. For hook/ only.
 *
 * tensors.c (operators) < bucket.c, state.c, rows.c < links.c < work.c < rounding_feedback.c < the
 * links < kinds.c. A native link is its file, a row of the table in kinds.c and its declarations
 * here. */
#ifndef MOONSHARD_HOOK_LINKS_H
#define MOONSHARD_HOOK_LINKS_H

#include "moonshard/hook.h"
#include "moonshard/ops.h"
#include "ops/values.h"

/* ------------------------------------------------------- functions of links */

ms_link_reduce ms_reduce_reduce, ms_noop_reduce, ms_powersgd_reduce, ms_int8_reduce,
    ms_top_k_reduce, ms_sign_vote_reduce, ms_adasum_reduce, ms_post_local_sgd_reduce;
ms_link_encode ms_cast_encode, ms_error_feedback_encode, ms_clip_encode, ms_nan_check_encode;
ms_link_decode ms_cast_decode, ms_error_feedback_decode, ms_clip_decode, ms_nan_check_decode;
ms_link_check ms_cast_check, ms_error_feedback_check, ms_powersgd_check, ms_int8_check,
    ms_top_k_check, ms_post_local_sgd_check, ms_clip_check;

/* ------------------------------------------------------------------ tensors */

/* A new tensor from an operator with a number, on one tensor or two (b NULL: one). */
ms_status ms_link_apply(const ms_op *op, double value, ms_tensor *a, ms_tensor *b, ms_tensor **out);
/* The same, written into a. */
ms_status ms_link_change(const ms_op *op, double value, ms_tensor *a, ms_tensor *b);
/* t in that dtype; t itself, retained, if it has it. */
ms_status ms_link_cast(ms_tensor *t, ms_dtype dtype, ms_tensor **out);
/* A copy of t, 1-D, f32. */
ms_status ms_link_flat_copy(ms_tensor *t, ms_tensor **out);
/* count elements of a contiguous tensor from `first` on, as a 1-D view. */
ms_status ms_link_span(ms_tensor *t, int64_t first, int64_t count, ms_tensor **out);
/* Replaces infinities and NaN in a link's state by 0: one bad step would spoil all later ones. */
ms_status ms_link_keep_finite(ms_tensor *memory);

/* -------------------------------------------------------------------- state */

/* Tensors that the link needs until the last bucket; not saved. Retained. */
ms_status ms_link_state_hold(ms_link_state *state, ms_tensor *tensor);
ms_tensor *const *ms_link_state_held(const ms_link_state *state, uint32_t *count);
void ms_link_state_let_go(ms_link_state *state);
/* Counts for ms_link_state_compression. is_due: whether to log it in this iteration, which is the
 * first, or `every` iterations after the last line. */
void ms_link_state_compressed(ms_link_state *state, int64_t before, int64_t after);
bool ms_link_state_is_due(ms_link_state *state, int64_t every);

/* ---------------------------------------------------------- link and bucket */

/* The group of a link, and by how much each rank's numbers are multiplied for a mean. */
ms_group *ms_link_group(const ms_link *link, const ms_bucket *bucket);
double ms_link_share(const ms_link *link, const ms_bucket *bucket);
/* Whether this reduction has to report what this rank sends: a link keeps the residual, and no link
 * has reported yet. */
bool ms_link_reports(const ms_bucket *bucket);
/* A collective of this bucket in that group, on the current stream. */
ms_status ms_link_collective(const ms_bucket *bucket, ms_group *group, ms_collective call);
/* A copy of t, 1-D, of that dtype, in the group's memory: a tensor that a collective may work on in
 * place. */
ms_status ms_link_wire(ms_group *group, ms_tensor *t, ms_dtype dtype, ms_tensor **out);
/* MS_ERROR_ARGUMENT if the buffer cannot be what the link's kind needs, or an earlier link keeps a
 * residual that this one would make wrong. */
ms_status ms_link_check_bucket(const ms_link *link, const ms_bucket *bucket);
ms_status ms_link_refuse_feedback(const ms_link *link, const ms_bucket *bucket);
/* Where in t the result is put: as much memory as this rank's shard of it takes. t may have another
 * length than the gradients (an encoded buffer). For all_reduce t itself. */
ms_status ms_link_place(const ms_bucket *bucket, ms_tensor *t, ms_tensor **out);

/* --------------------------------------------------------------------- rows */

/* f(user, index, first, at, count) for this rank's rows of each gradient of a bucket with parts:
 * count numbers, from `first` of the buffer on, at `at` of the shard. */
typedef ms_status ms_link_rows(void *user, uint32_t index, int64_t first, int64_t at,
                               int64_t count);
ms_status ms_link_each_rows(const ms_bucket *bucket, ms_link_rows *f, void *user);
/* MS_ERROR_ARGUMENT if t has another length than the gradients. */
ms_status ms_link_check_rows(const ms_bucket *bucket, ms_tensor *t);
/* Copies this rank's shard of a contiguous tensor, which begins with the buffer's numbers. */
ms_status ms_link_copy_shard(const ms_bucket *bucket, ms_tensor *full, ms_tensor *to);
/* t with all shards end to end, as a collective over them takes it: a copy in the group's memory if
 * they are cut by rows, else t itself, retained. */
ms_status ms_link_by_shards(const ms_bucket *bucket, ms_group *group, ms_tensor *t,
                            ms_tensor **out);

/* --------------------------------------------------------------- reductions */

/* What the chain of a bucket of this kind returns: the plain reduction, in place. */
ms_status ms_link_reduce_by(const ms_link *link, ms_bucket *bucket, ms_reduce_op op,
                            ms_tensor **out);
/* This rank's own numbers as the result. */
ms_status ms_link_stay_local(ms_bucket *bucket, ms_tensor **out);
/* Reduces the buffer in place over all ranks of the link's group: the all_reduce kind. */
ms_status ms_link_reduce_whole(const ms_link *link, ms_bucket *bucket, ms_reduce_op op,
                               ms_tensor **out);
/* All of a hybrid bucket's reduction, with link->options.between links between its halves. */
ms_status ms_between_reduce(const ms_link *link, ms_bucket *bucket, ms_reduce_op op,
                            ms_tensor **out);
/* ms_chain_run without the preparation of the bucket. */
ms_status ms_chain_run_links(const ms_link *links, uint32_t count, ms_bucket *bucket,
                             ms_tensor **result);
/* Reduces the buffer over the shard group. *part: this rank's shard, a view of the buffer. A mean
 * multiplies by factor. If the reduction has to report, `sent` is set as if nothing were rounded;
 * *exact is then the shard in f32 before it was rounded, or NULL where nothing was. */
ms_status ms_link_scatter(const ms_link *link, ms_bucket *bucket, ms_reduce_op op, double factor,
                          ms_tensor **part, ms_tensor **exact);

#endif
