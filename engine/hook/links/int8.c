/* int8.c: gradients travel as 8-bit numbers. Form all_gather: every rank receives the codes of all
 * ranks and adds them up. Form all_to_all: each rank receives its part of all ranks' codes, adds it
 * up in f32, and sends the codes of the mean to all ranks.
 *
 * per tensor, channel: a row x of numbers is coded as round(x / scale) + zero in 0 .. 255; scale
 * and zero come from the least and the greatest number of the row and 0. A tensor is one row (in
 * the form all_to_all each rank's part of it), channels are rows of `block` numbers. per block: the
 * int8 codec. */
#include "hook/link_ops.h"

#include <float.h>
#include <math.h>

#include "hook/links.h"
#include "hook/links/reduce.h"

/* 1.5 * 2^23: adding and subtracting it rounds f32 numbers below 2^22 to the nearest integer, ties
 * to even. */
#define ROUND 12582912.0

/* Rounds in place, to the nearest integer. There is no operator for it; the price is a second pass
 * over the numbers. */
static void round_into(ms_link_ops *w, ms_tensor *t)
{
    ms_link_ops_change(w, &ms_op_add_scalar, ROUND, t, NULL);
    ms_link_ops_change(w, &ms_op_add_scalar, -ROUND, t, NULL);
}

/* Codes are u8, so anything outside of 0 .. 255 would wrap around when it is converted. */
static void clamp_into(ms_link_ops *w, ms_tensor *t)
{
    ms_link_ops_operator(
        w, &ms_op_clamp,
        (ms_attributes){ .scalar = { .value = 0, .high = 255, .has_low = true, .has_high = true } },
        true, &t, 1, NULL);
}

/* scale and zero [rows, 1] of each row of x, with low = min(row, 0) and high = max(row, 0):
 *  scale = max((high - low) / 255, f32's epsilon), zero = clamp(round(-low / scale), 0, 255)
 * The range includes 0, so that 0 has a code of its own and padding stays 0. */
static ms_tensor *find_scales(ms_link_ops *w, ms_tensor *x, ms_tensor **zero)
{
    const ms_attributes over_row = { .reduce = { .dim = 1, .keep = true } };
    ms_tensor *low = ms_link_ops_operator(w, &ms_op_min, over_row, false, &x, 1, NULL),
              *high = ms_link_ops_operator(w, &ms_op_max, over_row, false, &x, 1, NULL);
    ms_link_ops_change(w, &ms_op_minimum_scalar, 0, low, NULL);
    ms_link_ops_change(w, &ms_op_maximum_scalar, 0, high, NULL);
    ms_link_ops_change(w, &ms_op_sub, 1, high, low);
    ms_link_ops_change(w, &ms_op_div_scalar, 255, high, NULL);
    /* A row of zeros has the range 0, and the division below would give NaN. */
    ms_link_ops_change(w, &ms_op_maximum_scalar, FLT_EPSILON, high, NULL);
    *zero = ms_link_ops_apply(w, &ms_op_div, 0, low, high);
    ms_link_ops_change(w, &ms_op_neg, 0, *zero, NULL);
    round_into(w, *zero);
    clamp_into(w, *zero);
    return high;
}

/* x [rows, n] as codes u8 [rows, n] and scales [rows, 2]: code = clamp(round(x / scale) + zero, 0,
 * 255). The codes are written into the group's memory, because a collective reads them. */
static ms_tensor *quantize(ms_link_ops *w, ms_tensor *x, ms_tensor **scales)
{
    *scales = NULL;
    if (w->status) return NULL;
    int64_t rows = ms_tensor_shape(x)[0], n = ms_tensor_shape(x)[1];
    ms_tensor *zero, *scale = find_scales(w, x, &zero);
    ms_tensor *pair[] = { scale, zero }, *codes = ms_link_ops_apply(w, &ms_op_div, 0, x, scale),
              *wire = ms_link_ops_new(w, MS_U8, rows, n);
    *scales = ms_link_ops_operator(w, &ms_op_cat, (ms_attributes){ .dim = { .a = 1 } }, false, pair,
                                   2, NULL);
    round_into(w, codes);
    ms_link_ops_change(w, &ms_op_add, 1, codes, zero);
    clamp_into(w, codes);
    ms_link_ops_copy(w, codes, wire);
    return wire;
}

/* What a receiver decodes, x = (code - zero) * scale, from codes [rows, n] and scales [rows, 2].
 * The zero is subtracted before the product, in this order on every rank: the results are the same
 * bits. */
static ms_tensor *numbers(ms_link_ops *w, ms_tensor *codes, ms_tensor *scales)
{
    ms_tensor *x = ms_link_ops_cast(w, codes, MS_F32), *part[2] = { NULL };
    for (int i = 0; i < 2; i++)
        part[i] = ms_link_ops_operator(
            w, &ms_op_narrow, (ms_attributes){ .dim = { .a = 1, .start = i, .length = 1 } }, false,
            &scales, 1, NULL);
    ms_link_ops_change(w, &ms_op_sub, 1, x, part[1]);
    ms_link_ops_change(w, &ms_op_mul, 0, x, part[0]);
    return x;
}

/* The mean of the ranks' codes [ranks * rows, n] with scales [ranks * rows, 2]. Ranks are added in
 * their order on every rank, so that all get the same bits. The codes of one rank are widened to
 * f32 at a time, so the f32 memory does not grow with the number of ranks. */
static ms_tensor *mean(ms_link_ops *w, ms_tensor *codes, ms_tensor *scales, int64_t ranks,
                       int64_t rows, int64_t n)
{
    ms_tensor *sum = ms_link_ops_new(w, MS_F32, rows, n);
    for (int64_t r = 0; r < ranks && !w->status; r++) {
        ms_link_ops one = ms_link_ops_inner(w);
        ms_tensor *x = numbers(&one, ms_link_ops_view(&one, codes, r * rows * n, rows, n),
                               ms_link_ops_view(&one, scales, r * rows * 2, rows, 2));
        if (r == 0) ms_link_ops_copy(&one, x, sum);
        else ms_link_ops_change(&one, &ms_op_add, 1, sum, x);
        w->status = ms_link_ops_end(&one);
    }
    ms_link_ops_change(w, &ms_op_mul_scalar, ms_link_share(w->link, w->bucket), sum, NULL);
    return sum;
}

/* For error feedback. own [rows, n]: what the other ranks decode from this rank's codes. The
 * padding at the end of the rows is cut off: `sent` has the buffer's length. */
static void report(ms_link_ops *w, ms_tensor *own)
{
    own = ms_link_ops_view(w, own, 0, ms_tensor_count(w->bucket->buffer), 0);
    if (!w->status) w->status = ms_bucket_set_sent(w->bucket, own);
}

/* The same for this rank's part of the mean: exact, and what its codes decode to. The second
 * rounding, of the mean, is done by one rank for all, so only this rank's residual may take it. */
static void report_part(ms_link_ops *w, ms_tensor *exact, ms_tensor *rounded)
{
    if (w->status) return;
    int64_t part = ms_tensor_count(exact);
    int64_t offset = ms_group_rank(ms_link_ops_group(w)) * part;
    exact = ms_link_ops_view(w, exact, 0, part, 0);
    rounded = ms_link_ops_view(w, rounded, 0, part, 0);
    ms_link_ops_report_rounding(w, offset, exact, rounded, ms_link_share(w->link, w->bucket));
}

/* Form all_gather: every rank adds up the codes of all ranks. One round of messages; each rank
 * receives (ranks - 1) times the codes and decodes all of them, so it suits few ranks or small
 * buckets. */
static ms_tensor *gather_rows(ms_link_ops *w, ms_tensor *codes, ms_tensor *scales, int64_t ranks,
                              int64_t rows, int64_t n)
{
    ms_tensor *all = ms_link_ops_all_gather(w, codes),
              *all_scales = ms_link_ops_all_gather(w, scales);
    return mean(w, all, all_scales, ranks, rows, n);
}

/* Form all_to_all: this rank adds up its part, and all gather the codes of the parts. Two rounds of
 * messages, but each rank receives about twice the codes of one bucket however many ranks there
 * are, and decodes a part of each. */
static ms_tensor *exchange_rows(ms_link_ops *w, ms_tensor *codes, ms_tensor *scales, int64_t ranks,
                                int64_t rows, int64_t n, bool reports)
{
    ms_tensor *parts = ms_link_ops_new(w, MS_U8, rows, n),
              *their = ms_link_ops_new(w, MS_F32, rows, 2);
    ms_link_ops_collective(w, MS_ALL_TO_ALL, codes, parts);
    ms_link_ops_collective(w, MS_ALL_TO_ALL, scales, their);
    ms_tensor *sum = mean(w, parts, their, ranks, rows / ranks, n);
    codes = quantize(w, sum, &scales);
    if (reports) report_part(w, sum, numbers(w, codes, scales));
    ms_tensor *all = ms_link_ops_all_gather(w, codes),
              *all_scales = ms_link_ops_all_gather(w, scales);
    return numbers(w, ms_link_ops_view(w, all, 0, rows, n),
                   ms_link_ops_view(w, all_scales, 0, rows, 2));
}

/* The mean [rows, n], coded row by row. */
static ms_tensor *reduce_rows(ms_link_ops *w, ms_tensor *x, int64_t ranks, int64_t rows, int64_t n)
{
    ms_tensor *scales, *codes = quantize(w, x, &scales);
    bool reports = ms_link_reports(w->bucket);
    if (reports) report(w, numbers(w, codes, scales));
    return w->link->options.int8.form == MS_INT8_ALL_GATHER
               ? gather_rows(w, codes, scales, ranks, rows, n)
               : exchange_rows(w, codes, scales, ranks, rows, n, reports);
}

/* n numbers of each row of a payload; op: each row's own, or the sum over the rows. */
static ms_tensor *decode(ms_link_ops *w, const ms_op *op, ms_codec blocks, ms_tensor *payload,
                         int64_t n)
{
    return ms_link_ops_operator(w, op, (ms_attributes){ .codec = { .codec = blocks, .n = n } },
                                false, &payload, 1, NULL);
}

/* The payload of the codec, one row of bytes for each row of x. */
static ms_tensor *encode(ms_link_ops *w, ms_codec blocks, ms_tensor *x)
{
    ms_attributes attributes = { .codec = { .codec = blocks } };
    return ms_link_ops_operator(w, &ms_op_codec_encode, attributes, false, &x, 1, NULL);
}

/* The mean of what the rows of the payload decode to. */
static ms_tensor *decode_mean(ms_link_ops *w, ms_codec blocks, ms_tensor *payload, int64_t n)
{
    ms_tensor *sum = decode(w, &ms_op_codec_decode_sum, blocks, payload, n);
    ms_link_ops_change(w, &ms_op_mul_scalar, ms_link_share(w->link, w->bucket), sum, NULL);
    return sum;
}

/* The mean, coded by the int8 codec. x [ranks, n] (all_to_all), or [1, n]. The same two forms as
 * above, with the codec instead of rows: its scales travel inside the payload, so there is one
 * collective where rows need two. */
static ms_tensor *reduce_blocks(ms_link_ops *w, ms_tensor *x, int64_t rows, int64_t n)
{
    const ms_codec blocks = { .kind = MS_CODEC_INT8, .block = w->link->options.int8.block };
    ms_tensor *payload = encode(w, blocks, x);
    bool reports = ms_link_reports(w->bucket);
    if (reports) report(w, decode(w, &ms_op_codec_decode, blocks, payload, n));
    if (w->link->options.int8.form == MS_INT8_ALL_GATHER)
        return decode_mean(w, blocks, ms_link_ops_all_gather(w, payload), n);
    ms_tensor *parts = ms_link_ops_new(w, MS_U8, rows, ms_codec_bytes(&blocks, n));
    ms_link_ops_collective(w, MS_ALL_TO_ALL, payload, parts);
    ms_tensor *sum = decode_mean(w, blocks, parts, n);
    payload = encode(w, blocks, sum);
    if (reports) report_part(w, sum, decode(w, &ms_op_codec_decode, blocks, payload, n));
    return decode(w, &ms_op_codec_decode, blocks, ms_link_ops_all_gather(w, payload), n);
}

/* The next multiple, as rows and blocks are padded to. Counts of numbers are far below the overflow
 * of the sum. */
static int64_t up(int64_t count, int64_t multiple)
{
    return (count + multiple - 1) / multiple * multiple;
}

/* How many rows of how many numbers the bucket is cut into; the last ones are padded. The layout
 * depends on the count, the ranks and the options only, so all ranks cut alike. */
static void lay_out(const ms_link_options *o, int64_t count, int64_t ranks, int64_t *rows,
                    int64_t *n)
{
    bool split = o->int8.form == MS_INT8_ALL_TO_ALL;
    if (o->int8.per == MS_INT8_CHANNEL) {
        *n = o->int8.block;
        *rows = up(count, *n) / *n;
        if (split) *rows = up(*rows, ranks);
    } else {
        *rows = split ? ranks : 1;
        *n = up((count + *rows - 1) / *rows, o->int8.per == MS_INT8_BLOCK ? o->int8.block : 1);
    }
}

/* The buffer is copied into a padded matrix, since rows must have equal lengths; ms_link_ops_give
 * copies the numbers back and leaves the padding out. An empty bucket has no row to code, and its
 * result is itself. */
ms_status ms_int8_reduce(const ms_link *link, ms_bucket *bucket, ms_tensor **out)
{
    ms_link_ops w = { .link = link, .bucket = bucket };
    int64_t count = ms_tensor_count(bucket->buffer), rows, n;
    int64_t ranks = ms_group_size(ms_link_ops_group(&w));
    if (count == 0) return ms_link_stay_local(bucket, out);
    lay_out(&link->options, count, ranks, &rows, &n);
    ms_tensor *x = ms_link_ops_new(&w, MS_F32, rows, n), *result;
    if (rows * n > count) ms_link_ops_change(&w, &ms_op_fill, 0, x, NULL);
    ms_link_ops_copy(&w, bucket->buffer, ms_link_ops_view(&w, x, 0, count, 0));
    if (link->options.int8.per == MS_INT8_BLOCK) result = reduce_blocks(&w, x, rows, n);
    else result = reduce_rows(&w, x, ranks, rows, n);
    return ms_link_ops_give(&w, result, out);
}

/* The codec packs blocks of 8 numbers. Per tensor there is no block. */
ms_status ms_int8_check(ms_engine *engine, const ms_link_options *options)
{
    int64_t block = options->int8.block;
    if (options->int8.per == MS_INT8_TENSOR) return MS_OK;
    if (block < 1 || (options->int8.per == MS_INT8_BLOCK && block % 8 != 0))
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "int8: block must be %s, not %lld",
                              options->int8.per == MS_INT8_BLOCK ? "a multiple of 8" : "1 or more",
                              (long long)block);
    return MS_OK;
}
