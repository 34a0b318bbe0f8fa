/* link_ops.h: operators one after another, for native links: the first failure sticks, and tensors
 * that are made belong to the work until its end. */
#ifndef MOONSHARD_HOOK_LINK_OPS_H
#define MOONSHARD_HOOK_LINK_OPS_H

#include "hook/links.h"

/* The most tensors that one work may hold. Loops use an inner work for each round, so that a link's
 * need does not grow with the number of parameters or ranks. */
#define MS_WORK_TENSORS 56

/* A sequence of operators with one error path. Every function does nothing once status is set, and
 * then returns NULL; so a link is written without a check after each call, and checks status only
 * before it reads a tensor's shape itself. Tensors that are returned are borrowed: the work owns
 * them until ms_link_ops_end. group: of collectives and of the tensors for them; NULL: the link's.
 * It lives on the stack of the link's function. status is the first failure; later ones would only
 * be its consequences. */
typedef struct ms_link_ops {
    const ms_link *link;
    ms_bucket *bucket;
    ms_group *group;
    ms_status status;
    uint32_t count;
    ms_tensor *made[MS_WORK_TENSORS];
} ms_link_ops;

ms_tensor *ms_link_ops_own(ms_link_ops *work,
                           ms_tensor *owned); /* takes it over; NULL is allowed */
ms_status ms_link_ops_end(ms_link_ops *work); /* releases all, returns the status */
/* A work inside of another, for a part that is repeated: it ends before the outer one, which takes
 * its status. */
ms_link_ops ms_link_ops_inner(const ms_link_ops *work);
ms_group *ms_link_ops_group(const ms_link_ops *work);

/* An operator with a number on one tensor or two (b NULL: one): a new tensor; or written into a. */
ms_tensor *ms_link_ops_apply(ms_link_ops *work, const ms_op *op, double value, ms_tensor *a,
                             ms_tensor *b);
void ms_link_ops_change(ms_link_ops *work, const ms_op *op, double value, ms_tensor *a,
                        ms_tensor *b);
/* With attributes and any inputs; second NULL or a second output. */
ms_tensor *ms_link_ops_operator(ms_link_ops *work, const ms_op *op, ms_attributes attributes,
                                bool in_place, ms_tensor *const *inputs, uint32_t count,
                                ms_tensor **second);
ms_tensor *ms_link_ops_cast(ms_link_ops *work, ms_tensor *t,
                            ms_dtype dtype); /* t itself if it has it */
void ms_link_ops_copy(ms_link_ops *work, ms_tensor *from, ms_tensor *to);
/* A new contiguous tensor [rows, columns] in the group's memory, which a collective may work on. */
ms_tensor *ms_link_ops_new(ms_link_ops *work, ms_dtype dtype, int64_t rows, int64_t columns);
/* A new 1-D f32 tensor for this rank only; ms_link_ops_copy_of: with t's numbers. */
ms_tensor *ms_link_ops_scratch(ms_link_ops *work, int64_t count);
ms_tensor *ms_link_ops_copy_of(ms_link_ops *work, ms_tensor *t);
/* count numbers of a contiguous tensor from offset on, as [rows, columns]; columns 0: [rows]. */
ms_tensor *ms_link_ops_view(ms_link_ops *work, ms_tensor *t, int64_t offset, int64_t rows,
                            int64_t columns);
/* The transpose [columns, rows] of [rows, columns] at an offset. */
ms_tensor *ms_link_ops_transposed(ms_link_ops *work, ms_tensor *t, int64_t offset, int64_t rows,
                                  int64_t columns);
/* The link's state `name`, as long as the bucket. */
ms_tensor *ms_link_ops_state(ms_link_ops *work, const char *name);
/* A collective of in (and out) on the current stream. */
void ms_link_ops_collective(ms_link_ops *work, ms_collective_kind kind, ms_tensor *in,
                            ms_tensor *out);
/* The tensors t of all ranks, [ranks, count of t]. */
ms_tensor *ms_link_ops_all_gather(ms_link_ops *work, ms_tensor *t);
/* Corrects what this link has reported with ms_bucket_set_sent by the loss of rounding a part of
 * the result. exact: the sum of all ranks' numbers, each times factor; rounded: what all ranks
 * receive of it; both f32, 1-D, from `offset` of the bucket on, perhaps longer than the rest of the
 * bucket. For each number exactly one rank calls this, and its residual takes the whole loss. */
void ms_link_ops_report_rounding(ms_link_ops *work, int64_t offset, ms_tensor *exact,
                                 ms_tensor *rounded, double factor);
/* The same for this rank's shard: both begin with its first number. */
void ms_link_ops_report_shard(ms_link_ops *work, ms_tensor *exact, ms_tensor *rounded,
                              double factor);
/* This rank's part of the sum of a 16-bit tensor over the ranks of a group, added up in f32 with
 * each rank's numbers times factor. Parts have equal lengths; the last ones are padded with zeros.
 */
ms_tensor *ms_link_ops_sum_of_parts(ms_link_ops *work, ms_tensor *t, double factor);
/* The end of a reduction: writes this rank's shard of result (f32, of the buffer's length or
 * longer) into the buffer; the link's result is that part of the buffer. */
ms_status ms_link_ops_give(ms_link_ops *work, ms_tensor *result, ms_tensor **out);

/* For those who launch reductions: the stream waits for every task that reads or writes the memory
 * of this tensor: the tasks that wrote the gradients, and readers of the last pass's result (a step
 * on a stream of its own). Links that write a buffer by collectives or views then need no waits of
 * their own, also in strict mode. */
ms_status ms_stream_wait_users(ms_stream *stream, const ms_tensor *tensor);

#endif
