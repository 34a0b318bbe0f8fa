/* rounding_feedback.c: error feedback for sums of 16-bit numbers.
 *
 * An all-reduce of 16-bit numbers rounds its result, and no rank sees what that loses, so the mean
 * of many steps would keep the error. Here each rank receives its part of the bucket from all
 * ranks, adds it up in f32, rounds it, sends it to all, and takes the loss of the rounding into its
 * own residual. The bytes on the wire are those of an all-reduce. */
#include "hook/link_ops.h"

#include "hook/bucket_rows.h"

/* With sum s, rounded sum r and the factor f of each rank's numbers: this rank's `sent` becomes
 * smaller by (s - r) / f, so its residual grows by that. The next reduction multiplies it by f and
 * so adds exactly what the rounding lost. */
void ms_link_ops_report_rounding(ms_link_ops *work, int64_t offset, ms_tensor *exact,
                                 ms_tensor *rounded, double factor)
{
    ms_bucket *bucket = work->bucket;
    if (work->status) return;
    int64_t length = ms_tensor_count(exact), rest = ms_tensor_count(bucket->flat) - offset;
    if (length > rest) length = rest;
    if (length <= 0) return;
    ms_tensor *from = ms_link_ops_view(work, exact, 0, length, 0);
    ms_tensor *to = ms_link_ops_view(work, rounded, 0, length, 0);
    ms_tensor *lost = ms_link_ops_apply(work, &ms_op_sub, 1, from, to);
    ms_link_ops_change(work, &ms_op_div_scalar, factor, lost, NULL);
    ms_link_ops_change(work, &ms_op_sub, 1, ms_link_ops_view(work, bucket->sent, offset, length, 0),
                       lost);
}

/* What is lost of this rank's shard. */
typedef struct report {
    ms_link_ops *work;
    ms_tensor *exact, *rounded;
    double factor;
} report;

static ms_status report_rows(void *user, uint32_t index, int64_t first, int64_t at, int64_t count)
{
    const report *r = user;
    (void)index;
    if (count == 0) return MS_OK;
    ms_link_ops one = ms_link_ops_inner(r->work);
    ms_link_ops_report_rounding(&one, first, ms_link_ops_view(&one, r->exact, at, count, 0),
                                ms_link_ops_view(&one, r->rounded, at, count, 0), r->factor);
    return ms_link_ops_end(&one);
}

void ms_link_ops_report_shard(ms_link_ops *work, ms_tensor *exact, ms_tensor *rounded,
                              double factor)
{
    uint32_t own;
    if (work->status) return;
    ms_bucket_shards(work->bucket, &own);
    if (!work->bucket->parts) {
        ms_link_ops_report_rounding(work, own * ms_tensor_count(exact), exact, rounded, factor);
        return;
    }
    report r = { .work = work, .exact = exact, .rounded = rounded, .factor = factor };
    work->status = ms_link_each_rows(work->bucket, report_rows, &r);
}

/* The all_to_all gives this rank the same part of every rank's tensor. Ranks are summed in their
 * order in f32, so the result does not depend on when they arrive. */
ms_tensor *ms_link_ops_sum_of_parts(ms_link_ops *work, ms_tensor *t, double factor)
{
    const ms_attributes over_ranks = { .reduce = { .dim = 0 } };
    int64_t count = ms_tensor_count(t), ranks = ms_group_size(ms_link_ops_group(work));
    int64_t part = (count + ranks - 1) / ranks;
    ms_dtype dtype = ms_tensor_dtype(t);
    ms_tensor *mine = ms_link_ops_new(work, dtype, ranks, part);
    ms_tensor *theirs = ms_link_ops_new(work, dtype, ranks, part);
    if (ranks * part > count) ms_link_ops_change(work, &ms_op_fill, 0, mine, NULL);
    ms_link_ops_copy(work, t, ms_link_ops_view(work, mine, 0, count, 0));
    ms_link_ops_collective(work, MS_ALL_TO_ALL, mine, theirs);
    ms_tensor *wide = ms_link_ops_cast(work, theirs, MS_F32);
    ms_link_ops_change(work, &ms_op_mul_scalar, factor, wide, NULL);
    return ms_link_ops_operator(work, &ms_op_sum, over_ranks, false, &wide, 1, NULL);
}
