/* links.h: the native links, and what they are written with. For hook/ only.
 *
 * tensors.c (operators) < bucket.c, link_state.c, bucket_rows.c < links.c < link_ops.c <
 * rounding_feedback.c < the links < link_kinds.c. A native link is its file, a row of the table in
 * link_kinds.c and its declarations here.
 *
 * To add a native link: write its functions in a file of hook/links/ (moonshard/hook.h says what
 * they must do, link_ops.h has helper functions), declare them here, add its row to the table in
 * link_kinds.c, and its annotation to lua/moonshard/meta/hooks.lua. Lua gets the link's function,
 * its options and all facts about it from the table. */
#ifndef MOONSHARD_HOOK_LINKS_H
#define MOONSHARD_HOOK_LINKS_H

#include "moonshard/hook.h"
#include "moonshard/ops.h"
#include "ops/values.h"

ms_link_reduce ms_reduce_reduce, ms_noop_reduce, ms_powersgd_reduce, ms_int8_reduce,
    ms_top_k_reduce, ms_sign_vote_reduce, ms_adasum_reduce, ms_post_local_sgd_reduce;
ms_link_encode ms_cast_encode, ms_error_feedback_encode, ms_clip_encode, ms_nan_check_encode;
ms_link_decode ms_cast_decode, ms_error_feedback_decode, ms_clip_decode, ms_nan_check_decode;
ms_link_check ms_cast_check, ms_error_feedback_check, ms_powersgd_check, ms_int8_check,
    ms_top_k_check, ms_post_local_sgd_check, ms_clip_check;

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

/* f(user, index, first, at, count) for this rank's rows of each gradient of a bucket with parts:
 * count numbers, from `first` of the buffer on, at `at` of the shard. */
typedef ms_status ms_link_rows(void *user, uint32_t index, int64_t first, int64_t at,
                               int64_t count);
#endif
