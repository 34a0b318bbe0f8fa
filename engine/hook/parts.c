/* parts.c: a sum of 16-bit numbers in which nothing is lost for good.
 *
 * An all-reduce of 16-bit numbers rounds its result, and no rank sees what that loses: with error
 * feedback, the mean of many steps would keep this error. Here each rank receives its part of the
 * bucket from all ranks, adds it up in f32, rounds it, sends it to all, and takes what rounding has
 * lost into its own error. The bytes on the wire are those of an
 * all-reduce. */
#include "hook/work.h"

void ms_work_tell_rounding(ms_work *work, int64_t offset, ms_tensor *exact, ms_tensor *rounded,
                           double factor)
{
    ms_bucket *bucket = work->bucket;
    if (work->status) return;
    int64_t length = ms_tensor_count(exact), rest = ms_tensor_count(bucket->flat) - offset;
    if (length > rest) length = rest;
    if (length <= 0) return;
    ms_tensor *from = ms_work_view(work, exact, 0, length, 0);
    ms_tensor *to = ms_work_view(work, rounded, 0, length, 0);
    ms_tensor *lost = ms_work_apply(work, &ms_op_sub, 1, from, to);
    ms_work_change(work, &ms_op_div_scalar, factor, lost, NULL);
    ms_work_change(work, &ms_op_sub, 1, ms_work_view(work, bucket->sent, offset, length, 0), lost);
}

ms_status ms_link_sum_by_parts(const ms_link *link, ms_bucket *bucket, double factor,
                               ms_tensor **out)
{
    const ms_attributes over_ranks = { .reduce = { .dim = 0 } };
    ms_work w = { .link = link, .bucket = bucket };
    const ms_group *group = ms_link_group(link, bucket);
    int64_t count = ms_tensor_count(bucket->buffer), ranks = ms_group_size(group);
    int64_t part = (count + ranks - 1) / ranks;
    ms_dtype dtype = ms_tensor_dtype(bucket->buffer);
    if (count == 0) {
        *out = ms_tensor_retain(bucket->buffer);
        return MS_OK;
    }
    ms_tensor *mine = ms_work_new(&w, dtype, ranks, part);
    ms_tensor *theirs = ms_work_new(&w, dtype, ranks, part);
    if (ranks * part > count) ms_work_change(&w, &ms_op_fill, 0, mine, NULL);
    ms_work_copy(&w, bucket->buffer, ms_work_view(&w, mine, 0, count, 0));
    ms_work_collective(&w, MS_ALL_TO_ALL, mine, theirs);
    ms_tensor *wide = ms_work_cast(&w, theirs, MS_F32);
    ms_work_change(&w, &ms_op_mul_scalar, factor, wide, NULL);
    ms_tensor *sum = ms_work_operator(&w, &ms_op_sum, over_ranks, false, &wide, 1, NULL);
    ms_tensor *rounded = ms_work_cast(&w, sum, dtype);
    ms_tensor *as_received = ms_work_cast(&w, rounded, MS_F32);
    ms_work_tell_rounding(&w, ms_group_rank(group) * part, sum, as_received, factor);
    return ms_work_give(&w, ms_work_all_gather(&w, rounded), out);
}
