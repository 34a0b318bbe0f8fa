/* reduce.c: the reductions that lose nothing but rounding, for each kind of bucket, and noop. */
#include "hook/links/reduce.h"

#include "hook/links/hybrid.h"
#include "hook/bucket_rows.h"
#include "hook/link_ops.h"

/* A mean is a sum of numbers that are multiplied by 1 / divisor as they are read, so that a sum in
 * f16 does not overflow where the mean would not. Minima, maxima and products have no factor. The
 * caller fills in the kind and the tensors. */
static ms_collective sum_of(ms_reduce_op op, double factor)
{
    bool is_mean = op == MS_REDUCE_OP_AVG;
    return (ms_collective){ .op = is_mean ? MS_REDUCE_OP_PREMUL_SUM : op, .factor = factor };
}

/* Before a reduction. A residual can be kept only of sums: minima, maxima and products are not
 * linear in what a rank sends. *reports: `sent` was set here, as if the reduction lost nothing; the
 * caller corrects it by the rounding. */
static ms_status begin(const ms_link *link, ms_bucket *bucket, ms_reduce_op op, bool *reports)
{
    *reports = ms_link_reports(bucket);
    if (op != MS_REDUCE_OP_AVG && op != MS_REDUCE_OP_SUM) {
        ms_status status = ms_link_refuse_feedback(link, bucket);
        if (status) return status;
    }
    return *reports ? ms_bucket_set_sent(bucket, bucket->buffer) : MS_OK;
}

/* Whether a sum in the tensor's dtype rounds so much that error feedback has to know of it. In f32
 * the loss is of the size of the residual's own rounding. */
static bool is_narrow(const ms_tensor *t) { return ms_dtype_bytes(ms_tensor_dtype(t)) == 2; }

/* ------------------------------------------------------------ all_reduce kind */

/* An all-reduce as an exchange of parts, a sum in f32 and an all-gather, whose rounding is
 * reported; rounding_feedback.c says why. The result has the length of all parts, and
 * ms_link_ops_give drops the padding. It takes several copies of the bucket where a plain
 * all-reduce takes none, so it runs only where the report needs it. */
static ms_status reduce_by_parts(const ms_link *link, ms_bucket *bucket, double factor,
                                 ms_tensor **out)
{
    ms_link_ops w = { .link = link, .bucket = bucket };
    ms_tensor *sum = ms_link_ops_sum_of_parts(&w, bucket->buffer, factor);
    ms_tensor *rounded =
        w.status ? NULL : ms_link_ops_cast(&w, sum, ms_tensor_dtype(bucket->buffer));
    ms_tensor *as_received = ms_link_ops_cast(&w, rounded, MS_F32);
    int64_t first = w.status ? 0 : ms_group_rank(ms_link_ops_group(&w)) * ms_tensor_count(sum);
    ms_link_ops_report_rounding(&w, first, sum, as_received, factor);
    return ms_link_ops_give(&w, ms_link_ops_all_gather(&w, rounded), out);
}

/* What a link is about to reduce is the bucket's own memory. */
static uint32_t fixed_address_of(const ms_link *link, const ms_bucket *bucket,
                                 const ms_tensor *buffer)
{
    return buffer == bucket->flat && !link->options.group ? bucket->fixed_address : 0;
}

/* In place in the buffer, unless the rounding of a 16-bit sum has to be reported. An empty bucket
 * goes through the collective as well, since all ranks must make the same calls. */
ms_status ms_link_reduce_whole(const ms_link *link, ms_bucket *bucket, ms_reduce_op op,
                               ms_tensor **out)
{
    double factor = op == MS_REDUCE_OP_AVG ? ms_link_share(link, bucket) : 1;
    ms_tensor *buffer = bucket->buffer;
    bool reports = false;
    ms_status status = begin(link, bucket, op, &reports);
    if (status) return status;
    if (reports && is_narrow(buffer) && ms_tensor_count(buffer) > 0)
        return reduce_by_parts(link, bucket, factor, out);
    ms_collective call = sum_of(op, factor);
    call.kind = MS_ALL_REDUCE;
    call.in = buffer;
    call.travels = bucket->travels;
    call.fixed_address = fixed_address_of(link, bucket, buffer);
    status = ms_link_collective(bucket, ms_link_group(link, bucket), call);
    if (!status) *out = ms_tensor_retain(buffer);
    return status;
}

/* -------------------------------------------------------------- sharded kinds */

/* A 16-bit sum whose rounding is reported is added up in f32 by this rank. buffer: the numbers with
 * shards end to end. `part` gets the rounded sum, *exact the sum before it was rounded. */
static ms_status scatter_exactly(const ms_link *link, ms_bucket *bucket, ms_group *shards,
                                 ms_tensor *buffer, double factor, ms_tensor *part,
                                 ms_tensor **exact)
{
    ms_link_ops w = { .link = link, .bucket = bucket, .group = shards };
    ms_tensor *sum = ms_link_ops_sum_of_parts(&w, buffer, factor);
    ms_link_ops_copy(&w, sum, part);
    if (!w.status) *exact = ms_tensor_retain(sum);
    return ms_link_ops_end(&w);
}

/* reduce_scatter in place: the shard is a part of the buffer that the result is written to. Where
 * shards are cut by rows, the buffer's numbers travel from a copy. On a failure both outputs are
 * NULL again. */
ms_status ms_link_scatter(const ms_link *link, ms_bucket *bucket, ms_reduce_op op, double factor,
                          ms_tensor **part, ms_tensor **exact)
{
    ms_group *shards = NULL;
    ms_tensor *buffer = NULL;
    bool reports = false;
    *part = *exact = NULL;
    ms_status status = ms_bucket_group(bucket, MS_LEVEL_SHARD, &shards);
    if (!status) status = begin(link, bucket, op, &reports);
    if (!status) status = ms_link_place(bucket, bucket->buffer, part);
    if (!status) status = ms_link_by_shards(bucket, shards, bucket->buffer, &buffer);
    if (!status && reports && is_narrow(buffer) && ms_tensor_count(buffer) > 0)
        status = scatter_exactly(link, bucket, shards, buffer, factor, *part, exact);
    else if (!status) {
        ms_collective call = sum_of(op, factor);
        call.kind = MS_REDUCE_SCATTER;
        call.in = buffer;
        call.out = *part;
        call.fixed_address = fixed_address_of(link, bucket, buffer);
        status = ms_link_collective(bucket, shards, call);
    }
    ms_tensor_release(buffer);
    if (!status) return MS_OK;
    ms_tensor_release(*part);
    ms_tensor_release(*exact);
    *part = *exact = NULL;
    return status;
}

/* The reduce_scatter kind. The rank that holds a shard is the only one that rounds it, so its
 * residual takes the whole loss. */
static ms_status reduce_to_shards(const ms_link *link, ms_bucket *bucket, ms_reduce_op op,
                                  ms_tensor **out)
{
    ms_link_ops w = { .link = link, .bucket = bucket };
    ms_tensor *part = NULL, *exact = NULL;
    double factor = op == MS_REDUCE_OP_AVG ? ms_link_share(link, bucket) : 1;
    w.status = ms_link_scatter(link, bucket, op, factor, &part, &exact);
    if (w.status) return w.status;
    ms_link_ops_own(&w, exact);
    if (exact) ms_link_ops_report_shard(&w, exact, ms_link_ops_cast(&w, part, MS_F32), factor);
    ms_status status = ms_link_ops_end(&w);
    if (status) ms_tensor_release(part);
    else *out = part;
    return status;
}

/* ---------------------------------------------------------------------- links */

/* Nothing travels, so nothing is lost: all of this rank's numbers count as sent. */
ms_status ms_link_stay_local(ms_bucket *bucket, ms_tensor **out)
{
    ms_status status = MS_OK;
    if (ms_link_reports(bucket)) status = ms_bucket_set_sent(bucket, bucket->buffer);
    return status ? status : ms_bucket_shard(bucket, bucket->buffer, out);
}

/* For measurements, and for ranks that train on their own. The result is a view of the buffer, so
 * nothing is enqueued. */
ms_status ms_noop_reduce(const ms_link *link, ms_bucket *bucket, ms_tensor **out)
{
    (void)link;
    return ms_link_stay_local(bucket, out);
}

/* The kinds differ in what a rank gets: all numbers, its shard, or its shard of what several shard
 * groups hold. */
ms_status ms_link_reduce_by(const ms_link *link, ms_bucket *bucket, ms_reduce_op op,
                            ms_tensor **out)
{
    if (bucket->kind == MS_BUCKET_ALL_REDUCE) return ms_link_reduce_whole(link, bucket, op, out);
    if (bucket->kind == MS_BUCKET_REDUCE_SCATTER) return reduce_to_shards(link, bucket, op, out);
    return ms_hybrid_reduce(link, bucket, op, out);
}

/* Of a link `all_reduce` with a group of its own, the mean is over that group: ms_link_share. */
ms_status ms_reduce_reduce(const ms_link *link, ms_bucket *bucket, ms_tensor **out)
{
    return ms_link_reduce_by(link, bucket, link->options.op, out);
}
