/* top_k.c: the greatest numbers of each rank travel, with their places; what is left is added to
 * the next iteration's (Lin et al. 2018: with momentum, which is cleared where a number was
 * sent). */
#include "hook/work.h"

#include <math.h>

/* How many of count numbers are sent: ceil(fraction * count). A decimal fraction may be stored a
 * little too high, and the product is rounded: 0.07 of 100 would be 8. */
static int64_t sent_of(double fraction, int64_t count)
{
    int64_t sent = (int64_t)ceil(fraction * (double)count - (double)count * 0x1p-52);
    return sent > 1 || count == 0 ? sent : 1;
}

static ms_status reduce(const ms_link *link, ms_bucket *bucket, ms_tensor **out)
{
    ms_work w = { .link = link, .bucket = bucket, .status = ms_link_check_length(link, bucket) };
    int64_t count = ms_tensor_count(bucket->buffer),
            k = sent_of(link->options.top_k.fraction, count),
            ranks = ms_group_size(ms_link_group(link, bucket));
    ms_dtype dtype = ms_tensor_dtype(bucket->buffer);
    if (!w.status && count > INT32_MAX)
        w.status = ms_engine_fail(
            bucket->engine, MS_ERROR_ARGUMENT,
            "top_k: bucket %u has %lld numbers; places travel as i32: use smaller buckets",
            bucket->index, (long long)count);
    /* top_k keeps its own residual ("left"), so error feedback has nothing to keep. */
    if (!w.status && bucket->wants_sent && !bucket->sent)
        w.status = ms_bucket_set_sent(bucket, bucket->buffer);
    ms_tensor *left = ms_work_state(&w, "left"), *fast = NULL,
              *gradient = ms_work_cast(&w, bucket->buffer, MS_F32);
    if (link->options.top_k.momentum > 0) {
        fast = ms_work_state(&w, "momentum");
        ms_work_change(&w, &ms_op_mul_scalar, link->options.top_k.momentum, fast, NULL);
        ms_work_change(&w, &ms_op_add, 1, fast, gradient);
        gradient = fast;
    }
    ms_work_change(&w, &ms_op_add, 1, left, gradient);
    ms_tensor *sizes = ms_work_apply(&w, &ms_op_abs, 0, left, NULL), *places = NULL;
    ms_work_operator(&w, &ms_op_topk, (ms_attributes){ .top = { .k = k, .largest = true } }, false,
                     &sizes, 1, &places);
    places = ms_work_cast(&w, places, MS_I32);
    ms_tensor *chosen[] = { left, places },
              *values = ms_work_operator(&w, &ms_op_index_select,
                                         (ms_attributes){ .index = { .dim = 0 } }, false, chosen, 2,
                                         NULL);
    values = ms_work_cast(&w, values, dtype);
    ms_tensor *sent = ms_work_apply(&w, &ms_op_neg, 0, ms_work_cast(&w, values, MS_F32), NULL),
              *less[] = { left, places, sent };
    ms_work_operator(&w, &ms_op_scatter_add, (ms_attributes){ .index = { .dim = 0 } }, true, less,
                     3, NULL);
    if (fast) {
        ms_work_change(&w, &ms_op_fill, 0, sent, NULL);
        ms_tensor *clear[] = { fast, places, sent };
        ms_work_operator(&w, &ms_op_scatter, (ms_attributes){ .index = { .dim = 0 } }, true, clear,
                         3, NULL);
    }
    if (!w.status) w.status = ms_link_keep_finite(left);
    if (fast && !w.status) w.status = ms_link_keep_finite(fast);
    ms_tensor *all = ms_work_view(&w, ms_work_all_gather(&w, values), 0, ranks * k, 0),
              *all_places = ms_work_view(&w, ms_work_all_gather(&w, places), 0, ranks * k, 0);
    ms_tensor *sum = ms_work_view(&w, ms_work_new(&w, MS_F32, 1, count), 0, count, 0);
    ms_work_change(&w, &ms_op_fill, 0, sum, NULL);
    ms_tensor *more[] = { sum, all_places, ms_work_cast(&w, all, MS_F32) };
    ms_work_operator(&w, &ms_op_scatter_add, (ms_attributes){ .index = { .dim = 0 } }, true, more,
                     3, NULL);
    ms_work_change(&w, &ms_op_mul_scalar, ms_link_share(link, bucket), sum, NULL);
    return ms_work_give(&w, sum, out);
}

static ms_status check(ms_engine *engine, const ms_link_options *options)
{
    double fraction = options->top_k.fraction, momentum = options->top_k.momentum;
    if (!(fraction > 0 && fraction <= 1))
        return ms_engine_fail(
            engine, MS_ERROR_ARGUMENT,
            "top_k: fraction is what part of the numbers travels, above 0 and at most 1, not %g",
            fraction);
    if (!(momentum >= 0 && momentum < 1))
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "top_k: momentum must be from 0 to below 1, not %g", momentum);
    return MS_OK;
}

const ms_link_kind ms_link_top_k = {
    .name = "top_k", .reduce = reduce, .check = check, .has_state = true
};
