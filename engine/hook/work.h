/* work.h: operators one behind the other, for native links: the first failure sticks, and what is
 * made belongs to the work until its end. */
#ifndef MOONSHARD_HOOK_WORK_H
#define MOONSHARD_HOOK_WORK_H

#include "hook/links.h"

#define MS_WORK_TENSORS 56

/* Every function does nothing once status is set, and then gives NULL; what it gives is
 * borrowed. */
typedef struct ms_work {
    const ms_link *link;
    ms_bucket *bucket;
    ms_status status;
    uint32_t count;
    ms_tensor *made[MS_WORK_TENSORS];
} ms_work;

ms_tensor *ms_work_own(ms_work *work, ms_tensor *owned); /* takes it over; NULL is allowed */
ms_status ms_work_end(ms_work *work);                    /* releases all, returns the status */

/* An operator with a number on one tensor or two (b NULL: one): a new tensor; or written into a. */
ms_tensor *ms_work_apply(ms_work *work, const ms_op *op, double value, ms_tensor *a, ms_tensor *b);
void ms_work_change(ms_work *work, const ms_op *op, double value, ms_tensor *a, ms_tensor *b);
/* With attributes and any inputs; second NULL or a second output. */
ms_tensor *ms_work_operator(ms_work *work, const ms_op *op, ms_attributes attributes, bool in_place,
                            ms_tensor *const *inputs, uint32_t count, ms_tensor **second);
ms_tensor *ms_work_cast(ms_work *work, ms_tensor *t, ms_dtype dtype); /* itself if it is */
void ms_work_copy(ms_work *work, ms_tensor *from, ms_tensor *to);
/* A new contiguous tensor [rows, columns], in the group's memory: what a collective may work on. */
ms_tensor *ms_work_new(ms_work *work, ms_dtype dtype, int64_t rows, int64_t columns);
/* count numbers of a contiguous tensor from offset on, as [rows, columns]; columns 0: [rows]. */
ms_tensor *ms_work_view(ms_work *work, ms_tensor *t, int64_t offset, int64_t rows, int64_t columns);
/* The link's state `name`, as long as the bucket. */
ms_tensor *ms_work_state(ms_work *work, const char *name);
/* A collective of in (and out) on the current stream. */
void ms_work_collective(ms_work *work, ms_collective_kind kind, ms_tensor *in, ms_tensor *out);
/* What all ranks have, [ranks, numbers of t]. */
ms_tensor *ms_work_all_gather(ms_work *work, ms_tensor *t);
/* Corrects what this link has told of this rank's numbers (ms_bucket_set_sent) by what rounding a
 * part of the result has lost. exact: the sum of all ranks' numbers, each times factor; rounded:
 * what all ranks receive of it; both f32, 1-D, from `offset` of the bucket on, perhaps with padding
 * at their end. Only one rank calls this for a number: it makes up for the whole loss. */
void ms_work_tell_rounding(ms_work *work, int64_t offset, ms_tensor *exact, ms_tensor *rounded,
                           double factor);
/* The end of a reduction: result, f32 and perhaps longer, into the bucket's buffer, which is the
 * link's result. */
ms_status ms_work_give(ms_work *work, ms_tensor *result, ms_tensor **out);

#endif
