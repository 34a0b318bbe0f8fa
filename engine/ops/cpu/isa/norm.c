/* norm.c: rows through layer norm and RMS norm, forward and backward. A row is read three times,
 * but from memory only once.
 *
 * Bits may differ between instruction sets: the sums over a row have as many parts as there are
 * lanes. */
#include "ops/cpu/norm.h"

#include "ops/cpu/row.h"

/* Clears the lanes from `lanes` on. Past the end of a row x is 0, but x - mean is not, and would
 * count in the variance. It runs once for each row and is left out where the width is a multiple of
 * the lanes. */
MS_VECTOR ms_vf inside(ms_vf v, size_t lanes)
{
    for (size_t i = lanes; i < MS_LANES; i++) v[i] = 0.0f;
    return v;
}

/* The dtypes of a call. */
typedef struct norm_dtypes {
    ms_dtype s, x, residual, y, narrow, weight;
} norm_dtypes;

static bool is_one_dtype(const ms_norm_dtypes *d)
{
    return d->s == d->x && d->s == d->residual && d->s == d->y && d->s == d->weight;
}

MS_VECTOR norm_dtypes all_of(const ms_dtype D)
{
    return (norm_dtypes){ .s = D, .x = D, .residual = D, .y = D, .narrow = D, .weight = D };
}

/* An f32 stream with rows of 16 bits for the next product, and f32 weights. */
MS_VECTOR norm_dtypes stream_of(const ms_norm_dtypes *d)
{
    return (norm_dtypes){ .s = MS_F32,
                          .x = (ms_dtype)d->x,
                          .residual = (ms_dtype)d->residual,
                          .y = MS_BF16,
                          .narrow = (ms_dtype)d->narrow,
                          .weight = MS_F32 };
}

MS_VECTOR norm_dtypes any_of(const ms_norm_dtypes *d)
{
    return (norm_dtypes){ .s = (ms_dtype)d->s,
                          .x = (ms_dtype)d->x,
                          .residual = (ms_dtype)d->residual,
                          .y = (ms_dtype)d->y,
                          .narrow = (ms_dtype)d->narrow,
                          .weight = (ms_dtype)d->weight };
}

/* function(dtypes, ...), with the dtypes as constants where training meets them. */
#define NORM_SWITCH(d, function, ...)                                                 \
    do {                                                                              \
        if (is_one_dtype(d)) MS_ROW_SWITCH((d)->s, function(all_of(D), __VA_ARGS__)); \
        else if ((d)->s == MS_F32 && (d)->y == MS_BF16 && (d)->weight == MS_F32)      \
            function(stream_of(d), __VA_ARGS__);                                      \
        else function(any_of(d), __VA_ARGS__);                                        \
    } while (0)

MS_VECTOR size_t bytes_of(ms_dtype dtype, int64_t elements)
{
    return (size_t)elements * (dtype == MS_F32 ? 4 : 2);
}

/* ------------------------------------------------------------------ forward */

/* s = x + residual, rounded to its dtype as it is stored, because the norm and its gradient see the
 * stored value. Without a residual s is x. Returns the sum of s. `sum` is a tensor of its own: x
 * and residual keep their values for other nodes. */
MS_VECTOR float row_sum(const norm_dtypes T, const ms_norm_args *a, const char *x,
                        const char *residual, char *sum)
{
    size_t width = (size_t)a->width, i = 0;
    ms_vf total = ms_v_splat(0.0f);
    for (; i + MS_LANES <= width; i += MS_LANES) {
        ms_vf v = ms_row_get(T.x, x, i);
        if (residual != NULL) {
            /* Stored and read back: with 16 bits this is the rounding, with f32 nothing. */
            ms_row_put(T.s, sum, i, v + ms_row_get(T.residual, residual, i));
            v = ms_row_get(T.s, sum, i);
        }
        total += v;
    }
    if (i < width) {
        ms_vf v = ms_row_get_part(T.x, x, i, width, 0.0f);
        if (residual != NULL) {
            v += ms_row_get_part(T.residual, residual, i, width, 0.0f);
            ms_row_put_part(T.s, sum, i, width, v);
            v = ms_row_get_part(T.s, sum, i, width, 0.0f);
        }
        total += v;
    }
    return ms_v_sum(total);
}

/* The sum of squared deviations, in a second pass over the row: E(x^2) - E(x)^2 in one pass would
 * lose all digits where the mean is large. The second read of a row comes from a cache: a row of
 * 4096 numbers in f32 is 16 KiB. */
MS_VECTOR float row_squares(const ms_dtype D, const void *s, size_t width, float mean)
{
    size_t i = 0;
    ms_vf total = ms_v_splat(0.0f);
    for (; i + MS_LANES <= width; i += MS_LANES) {
        ms_vf v = ms_row_get(D, s, i) - mean;
        total += v * v;
    }
    if (i < width) {
        /* Only here can lanes are past the end of the row. */
        ms_vf v = inside(ms_row_get_part(D, s, i, width, 0.0f) - mean, width - i);
        total += v * v;
    }
    return ms_v_sum(total);
}

/* y = (s - mean) * scale * weight + bias. The weight and the bias are read for every row and stay
 * in a cache; x and y stream through memory once, which bounds the speed of the whole pass. */
MS_VECTOR void row_write(const norm_dtypes T, const ms_norm_args *a, const void *s, void *y,
                         float mean, float scale)
{
    size_t width = (size_t)a->width, i = 0;
    for (; i + MS_LANES <= width; i += MS_LANES) {
        ms_vf v = (ms_row_get(T.s, s, i) - mean) * scale;
        /* The tests for NULL are the same for all rows; they cost little next to the loads. */
        if (a->weight != NULL) v *= ms_row_get(T.weight, a->weight, i);
        if (a->bias != NULL) v += ms_row_get(T.weight, a->bias, i);
        ms_row_put(T.y, y, i, v);
    }
    if (i < width) {
        ms_vf v = (ms_row_get_part(T.s, s, i, width, 0.0f) - mean) * scale;
        if (a->weight != NULL) v *= ms_row_get_part(T.weight, a->weight, i, width, 0.0f);
        if (a->bias != NULL) v += ms_row_get_part(T.weight, a->bias, i, width, 0.0f);
        ms_row_put_part(T.y, y, i, width, v);
    }
}

/* RMS norm is the case of a mean of 0, for which the first pass runs only if there is a residual to
 * add. */
MS_VECTOR void forward_rows(const norm_dtypes T, const ms_norm_args *a, int64_t begin, int64_t end)
{
    for (int64_t row = begin; row < end; row++) {
        int64_t at = row * a->width;
        /* Without a residual s is x itself, and nothing is copied. */
        const char *x = (const char *)a->x + bytes_of(T.x, at), *s = x, *residual = NULL;
        char *sum = NULL;
        if (a->residual != NULL) {
            residual = (const char *)a->residual + bytes_of(T.residual, at);
            s = sum = (char *)a->sum + bytes_of(T.s, at);
        }
        /* The pass also writes the sum, so it runs for RMS norm with a residual, whose total is not
         * used. */
        float total = a->centered || residual != NULL ? row_sum(T, a, x, residual, sum) : 0.0f;
        float mean = a->centered ? total / (float)a->width : 0.0f;
        float variance = row_squares(T.s, s, (size_t)a->width, mean) / (float)a->width;
        /* eps is added under the root, as the published formulas have it. */
        float scale = 1.0f / __builtin_sqrtf(variance + (float)a->eps);
        row_write(T, a, s, (char *)a->y + bytes_of(T.y, at), mean, scale);
        if (a->mean != NULL) a->mean[row] = mean;
        if (a->scale != NULL) a->scale[row] = scale;
    }
}

/* The dtypes are chosen once per call and not per row. */
static void forward(const ms_norm_args *args, int64_t begin, int64_t end)
{
    NORM_SWITCH(&args->dtypes, forward_rows, args, begin, end);
}

/* ----------------------------------------------------------------- backward */

/* With h = (s - mean) * scale and g = gradient * weight: the sums of g and of g * h over the row,
 * one per lane. They are added across lanes once, at the end of the row. */
typedef struct row_sums {
    ms_vf g, gh;
} row_sums;

/* f32 is enough here: each lane adds only width / MS_LANES terms. */
MS_VECTOR void add_sums(row_sums *sums, ms_vf gradient, ms_vf h, ms_vf weight)
{
    ms_vf g = gradient * weight;
    sums->g += g;
    sums->gh += g * h;
}

/* The first pass of backward: the two sums of the row, and what the row adds to the gradients of
 * weight and bias, which are left out where NULL. dweight and dbias are the tile's own vectors in
 * f32; a row adds to all of their elements, so they stay in a cache from row to row. */
MS_VECTOR row_sums sum_row(const norm_dtypes T, const ms_norm_backward_args *a, const void *s,
                           const void *gradient, float mean, float scale, float *dweight,
                           float *dbias)
{
    size_t width = (size_t)a->width, i = 0;
    row_sums sums = { ms_v_splat(0.0f), ms_v_splat(0.0f) };
    for (; i + MS_LANES <= width; i += MS_LANES) {
        ms_vf d = ms_row_get(T.y, gradient, i), h = (ms_row_get(T.s, s, i) - mean) * scale;
        /* Rows are added one after the other, so the order within a tile is that of the rows. */
        if (dweight != NULL) ms_v_store(dweight + i, ms_v_load(dweight + i) + d * h);
        if (dbias != NULL) ms_v_store(dbias + i, ms_v_load(dbias + i) + d);
        add_sums(&sums, d, h,
                 a->weight != NULL ? ms_row_get(T.weight, a->weight, i) : ms_v_splat(1.0f));
    }
    if (i < width) {
        ms_vf d = ms_row_get_part(T.y, gradient, i, width, 0.0f),
              h = (ms_row_get_part(T.s, s, i, width, 0.0f) - mean) * scale;
        if (dweight != NULL)
            ms_v_store_part(dweight + i, ms_v_load_part(dweight + i, width - i) + d * h, width - i);
        if (dbias != NULL)
            ms_v_store_part(dbias + i, ms_v_load_part(dbias + i, width - i) + d, width - i);
        add_sums(&sums, d, h,
                 a->weight != NULL ? ms_row_get_part(T.weight, a->weight, i, width, 0.0f)
                                   : ms_v_splat(1.0f));
    }
    return sums;
}

/* The second pass: dx = scale * (g - mean of g - h * mean of g h), which follows from
 * differentiating through mean and variance. Without centering the mean of g is 0. `add` is the
 * gradient that reaches the sum by another way. It reads the row again, from a cache: the two
 * averages are known only after the first pass. */
MS_VECTOR void write_row(const norm_dtypes T, const ms_norm_backward_args *a, const void *s,
                         const void *gradient, const void *add, void *dx, void *narrow, float mean,
                         float scale, float g_mean, float gh_mean)
{
    size_t width = (size_t)a->width, i = 0;
    for (; i + MS_LANES <= width; i += MS_LANES) {
        ms_vf g = ms_row_get(T.y, gradient, i), h = (ms_row_get(T.s, s, i) - mean) * scale;
        if (a->weight != NULL) g *= ms_row_get(T.weight, a->weight, i);
        ms_vf v = (g - g_mean - h * gh_mean) * scale;
        if (add != NULL) v += ms_row_get(T.s, add, i);
        if (dx != NULL) ms_row_put(T.s, dx, i, v);
        if (narrow != NULL) ms_row_put(T.narrow, narrow, i, v);
    }
    if (i < width) {
        ms_vf g = ms_row_get_part(T.y, gradient, i, width, 0.0f),
              h = (ms_row_get_part(T.s, s, i, width, 0.0f) - mean) * scale;
        if (a->weight != NULL) g *= ms_row_get_part(T.weight, a->weight, i, width, 0.0f);
        ms_vf v = (g - g_mean - h * gh_mean) * scale;
        if (add != NULL) v += ms_row_get_part(T.s, add, i, width, 0.0f);
        if (dx != NULL) ms_row_put_part(T.s, dx, i, width, v);
        if (narrow != NULL) ms_row_put_part(T.narrow, narrow, i, width, v);
    }
}

/* h is computed again from s, mean and scale, which costs less than to store it. Without dx (only
 * weight and bias want gradients) the second pass is left out. */
MS_VECTOR void backward_rows(const norm_dtypes T, const ms_norm_backward_args *a, int64_t begin,
                             int64_t end, float *dweight, float *dbias)
{
    for (int64_t row = begin; row < end; row++) {
        int64_t element = row * a->width;
        size_t at = bytes_of(T.s, element);
        const char *s = (const char *)a->s + at,
                   *gradient = (const char *)a->gradient + bytes_of(T.y, element);
        float mean = a->centered ? a->mean[row] : 0.0f, scale = a->scale[row];
        row_sums sums = sum_row(T, a, s, gradient, mean, scale, dweight, dbias);
        /* The two sums serve dx only. */
        if (a->dx == NULL && a->narrow == NULL) continue;
        float g_mean = a->centered ? ms_v_sum(sums.g) / (float)a->width : 0.0f,
              gh_mean = ms_v_sum(sums.gh) / (float)a->width;
        /* The sum is an output as well, and what used it sends a gradient straight to s. */
        const char *add = a->sum_gradient != NULL ? (const char *)a->sum_gradient + at : NULL;
        char *dx = a->dx != NULL ? (char *)a->dx + at : NULL,
             *narrow = a->narrow != NULL ? (char *)a->narrow + bytes_of(T.narrow, element) : NULL;
        write_row(T, a, s, gradient, add, dx, narrow, mean, scale, g_mean, gh_mean);
    }
}

static void backward(const ms_norm_backward_args *args, int64_t begin, int64_t end, float *dweight,
                     float *dbias)
{
    NORM_SWITCH(&args->dtypes, backward_rows, args, begin, end, dweight, dbias);
}

const ms_norm_kernels MS_ISA_NAME(ms_norm_kernels) = { .forward = forward, .backward = backward };
