/* links.h: the native links, and what they are written with. For hook/ only. */
#ifndef MOONSHARD_HOOK_LINKS_H
#define MOONSHARD_HOOK_LINKS_H

#include "moonshard/hook.h"
#include "moonshard/ops.h"
#include "tensor/copy.h"

extern const ms_link_kind ms_link_error_feedback, ms_link_powersgd, ms_link_int8, ms_link_top_k,
    ms_link_sign_vote, ms_link_adasum;
extern const ms_link_kind ms_link_post_local_sgd, ms_link_clip, ms_link_nan_check;

/* Tensors that are held back until the last bucket; not saved. Retained. */
ms_status ms_link_state_hold(ms_link_state *state, ms_tensor *tensor);
ms_tensor *const *ms_link_state_held(const ms_link_state *state, uint32_t *count);
void ms_link_state_let_go(ms_link_state *state);

/* Counts for ms_link_state_compression; whether a line about it is due in this iteration, the first
 * or `every` behind the last one. */
void ms_link_state_compressed(ms_link_state *state, int64_t before, int64_t after);
bool ms_link_state_is_due(ms_link_state *state, int64_t every);

/* What is not finite in a link's memory becomes 0: one bad step would spoil all that follow. */
ms_status ms_link_keep_finite(ms_tensor *memory);

/* A new tensor from an operator with a number, on one tensor or two (b NULL: one). */
ms_status ms_link_apply(const ms_op *op, double value, ms_tensor *a, ms_tensor *b, ms_tensor **out);
/* The same, written into a. */
ms_status ms_link_change(const ms_op *op, double value, ms_tensor *a, ms_tensor *b);
/* t in that dtype: itself, retained, if it is. */
ms_status ms_link_cast(ms_tensor *t, ms_dtype dtype, ms_tensor **out);
/* t as a 1-D f32 tensor of its own. */
ms_status ms_link_flat_copy(ms_tensor *t, ms_tensor **out);
/* The group of a link, and by how much each rank's numbers are multiplied for a mean. */
ms_group *ms_link_group(const ms_link *link, const ms_bucket *bucket);
double ms_link_share(const ms_link *link, const ms_bucket *bucket);
/* t's numbers in a new contiguous tensor of that dtype, in the group's memory: what a collective
 * may work on in place. */
ms_status ms_link_wire(const ms_link *link, const ms_bucket *bucket, ms_tensor *t, ms_dtype dtype,
                       ms_tensor **out);
/* The plain mean, in place. */
ms_status ms_link_mean(const ms_link *link, ms_bucket *bucket, ms_tensor **out);
/* This rank's own numbers as the result. */
ms_status ms_link_stay_local(ms_bucket *bucket, ms_tensor **out);
/* The sum of all ranks' 16-bit buffers, each number times factor, for chains with error_feedback:
 * the rank that adds up a part tells what rounding its sum to 16 bits has lost. The buffer has been
 * told as what this rank sends. */
ms_status ms_link_sum_by_parts(const ms_link *link, ms_bucket *bucket, double factor,
                               ms_tensor **out);
/* MS_ERROR_ARGUMENT if error_feedback, native or in Lua, stands before this link: for links whose
 * result is not the mean of what ranks send. */
ms_status ms_link_refuse_feedback(const ms_link *link, const ms_bucket *bucket);
/* MS_ERROR_ARGUMENT if the buffer has another length than the gradients, for links that tell
 * parameters apart. */
ms_status ms_link_check_length(const ms_link *link, const ms_bucket *bucket);
/* A collective of this bucket on the current stream. */
ms_status ms_link_collective(const ms_link *link, const ms_bucket *bucket, ms_collective call);

#endif
