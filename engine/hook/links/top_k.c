/* top_k.c: the greatest numbers of each rank travel, with their places. The rest is the residual,
 * which is added to the next iteration's numbers (Lin et al. 2018: with momentum, which is cleared
 * where a number was sent). */
#include "hook/link_ops.h"

#include <math.h>

#include "hook/links.h"
#include "hook/tensors.h"

/* How many of count numbers are sent: ceil(fraction * count). A decimal fraction may be stored a
 * little too high, and the product is rounded: 0.07 of 100 would be 8. At least one number travels,
 * since a bucket of which nothing is sent would never be trained. */
static int64_t sent_of(double fraction, int64_t count)
{
    int64_t sent = (int64_t)ceil(fraction * (double)count - (double)count * 0x1p-52);
    return sent > 1 || count == 0 ? sent : 1;
}

/* Without momentum: residual += g. With momentum m: u = m u + g, residual += u (*fast is u). The
 * momentum is taken on each rank before numbers are chosen, because numbers that stay back would
 * otherwise miss it. */
static ms_tensor *add_to_residual(ms_link_ops *w, ms_tensor **fast)
{
    double momentum = w->link->options.top_k.momentum;
    ms_tensor *residual = ms_link_ops_state(w, "left");
    ms_tensor *gradient = ms_link_ops_cast(w, w->bucket->buffer, MS_F32);
    *fast = NULL;
    if (momentum > 0) {
        *fast = ms_link_ops_state(w, "momentum");
        ms_link_ops_change(w, &ms_op_mul_scalar, momentum, *fast, NULL);
        ms_link_ops_change(w, &ms_op_add, 1, *fast, gradient);
        gradient = *fast;
    }
    ms_link_ops_change(w, &ms_op_add, 1, residual, gradient);
    return residual;
}

/* t[places] op= values: scatter or scatter_add. */
static void put(ms_link_ops *w, const ms_op *op, ms_tensor *t, ms_tensor *places, ms_tensor *values)
{
    ms_tensor *inputs[] = { t, places, values };
    ms_link_ops_operator(w, op, (ms_attributes){ .index = { .dim = 0 } }, true, inputs, 3, NULL);
}

/* The places of the k numbers of t with the greatest magnitude. Places travel as i32, half of i64.
 * topk sorts, which is not needed here; equal magnitudes are resolved by the lower place, so the
 * choice is the same in every run. */
static ms_tensor *find_greatest(ms_link_ops *w, ms_tensor *t, int64_t k)
{
    const ms_attributes greatest = { .top = { .k = k, .largest = true } };
    ms_tensor *sizes = ms_link_ops_apply(w, &ms_op_abs, 0, t, NULL), *places = NULL;
    ms_link_ops_operator(w, &ms_op_topk, greatest, false, &sizes, 1, &places);
    return ms_link_ops_cast(w, places, MS_I32);
}

/* The numbers of the residual at these places, in the buffer's dtype. What is subtracted from the
 * residual is the rounded number that travels, so that the rounding stays in it. The momentum is
 * set to 0 there, which stops it from pushing again what was just sent. */
static ms_tensor *take(ms_link_ops *w, ms_tensor *residual, ms_tensor *fast, ms_tensor *at)
{
    ms_tensor *chosen[] = { residual, at };
    ms_tensor *values = ms_link_ops_operator(
        w, &ms_op_index_select, (ms_attributes){ .index = { .dim = 0 } }, false, chosen, 2, NULL);
    if (w->status) return NULL;
    values = ms_link_ops_cast(w, values, ms_tensor_dtype(w->bucket->buffer));
    ms_tensor *sent =
        ms_link_ops_apply(w, &ms_op_neg, 0, ms_link_ops_cast(w, values, MS_F32), NULL);
    put(w, &ms_op_scatter_add, residual, at, sent);
    if (fast) {
        ms_link_ops_change(w, &ms_op_fill, 0, sent, NULL);
        put(w, &ms_op_scatter, fast, at, sent);
    }
    if (!w->status) w->status = ms_link_keep_finite(residual);
    if (fast && !w->status) w->status = ms_link_keep_finite(fast);
    return values;
}

/* The mean over the ranks, where numbers that a rank has not sent count as zero. All ranks add the
 * same gathered lists; several ranks may send the same place, so the sum needs scatter_add. */
static ms_tensor *mean(ms_link_ops *w, ms_tensor *values, ms_tensor *places, int64_t k)
{
    int64_t all = k * ms_group_size(ms_link_ops_group(w)),
            count = ms_tensor_count(w->bucket->buffer);
    ms_tensor *every = ms_link_ops_view(w, ms_link_ops_all_gather(w, values), 0, all, 0);
    ms_tensor *every_place = ms_link_ops_view(w, ms_link_ops_all_gather(w, places), 0, all, 0);
    ms_tensor *sum = ms_link_ops_scratch(w, count);
    ms_link_ops_change(w, &ms_op_fill, 0, sum, NULL);
    put(w, &ms_op_scatter_add, sum, every_place, ms_link_ops_cast(w, every, MS_F32));
    ms_link_ops_change(w, &ms_op_mul_scalar, ms_link_share(w->link, w->bucket), sum, NULL);
    return sum;
}

/* Every rank sends the same number k of values and places, so that an all-gather of equal parts
 * does it. */
ms_status ms_top_k_reduce(const ms_link *link, ms_bucket *bucket, ms_tensor **out)
{
    ms_link_ops w = { .link = link, .bucket = bucket };
    int64_t count = ms_tensor_count(bucket->buffer);
    int64_t k = sent_of(link->options.top_k.fraction, count);
    /* Refused, because wider places would double the bytes for all others. */
    if (count > INT32_MAX)
        return ms_engine_fail(
            bucket->engine, MS_ERROR_ARGUMENT,
            "top_k: bucket %u has %lld numbers; positions are sent as i32: use smaller buckets",
            bucket->index, (long long)count);
    /* top_k keeps its own residual, so nothing is left for error_feedback to keep. */
    if (ms_link_reports(bucket)) w.status = ms_bucket_set_sent(bucket, bucket->buffer);
    ms_tensor *fast = NULL, *residual = add_to_residual(&w, &fast);
    ms_tensor *places = find_greatest(&w, residual, k);
    ms_tensor *values = take(&w, residual, fast, places);
    return ms_link_ops_give(&w, mean(&w, values, places, k), out);
}

/* Comparisons are written so that NaN is refused. */
ms_status ms_top_k_check(ms_engine *engine, const ms_link_options *options)
{
    double fraction = options->top_k.fraction, momentum = options->top_k.momentum;
    if (!(fraction > 0 && fraction <= 1))
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "top_k: fraction is the part of the numbers that is sent, above 0 "
                              "and at most 1, not %g",
                              fraction);
    if (!(momentum >= 0 && momentum < 1))
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "top_k: momentum must be from 0 to below 1, not %g", momentum);
    return MS_OK;
}
