/* softmax.c: rows through softmax, log-softmax, cross entropy and squared error.
 *
 * Bits may differ between instruction sets: sums depend on the number of lanes, and products and
 * sums may be contracted. */
#include "ops/cpu/softmax.h"

#include "ops/cpu/row.h"

#define LEAST (-__builtin_inff())

/* ----------------------------------------------------------- parts of a row */

/* The greatest element, which is subtracted before the exponentials so that they cannot overflow.
 * NaN is passed over: it comes out of the sum of exponentials. The last part is padded with
 * -infinity, which never is the greatest. */
MS_VECTOR float row_max(const ms_dtype D, const void *row, size_t n)
{
    size_t i = 0;
    ms_vf most = ms_v_splat(LEAST);
    for (; i + MS_LANES <= n; i += MS_LANES) most = ms_v_greater(ms_row_get(D, row, i), most);
    if (i < n) most = ms_v_greater(ms_row_get_part(D, row, i, n, LEAST), most);
    return ms_v_reduce_max(most);
}

/* The sum of exp(x - most). The end of a row is added to the first two sums, so that all sums stay
 * in registers; bits may differ between instruction sets. Padding of -infinity adds 0. x - most is
 * 0 or below, the range of ms_v_exp_normal. A row of -infinity alone gives NaN here (infinity minus
 * infinity), as the quotient 0 / 0 does. */
MS_VECTOR float row_exp_sum(const ms_dtype D, const void *row, size_t n, float most)
{
    size_t i = 0;
    ms_sum64 total = { { { 0 } } };
    for (; i + MS_SUM_LANES <= n; i += MS_SUM_LANES)
        for (size_t k = 0; k < MS_SUMS; k++)
            total.of[k] += ms_v_exp_normal(ms_row_get(D, row, i + k * MS_LANES) - most);
    for (; i + MS_LANES <= n; i += MS_LANES)
        total.of[0] += ms_v_exp_normal(ms_row_get(D, row, i) - most);
    if (i < n) total.of[1] += ms_v_exp_normal(ms_row_get_part(D, row, i, n, LEAST) - most);
    return ms_v_sum64(total);
}

/* The vector function for one number, so that rows and columns use the same logarithm. */
MS_VECTOR float one_log(float x) { return ms_v_log(ms_v_splat(x))[0]; }

/* exp(v - shift) * factor, or v - shift for the logarithm. `logarithm` is the same for a whole
 * call; the compiler takes the test out of the loops. */
MS_VECTOR ms_vf spread_lanes(ms_vf v, float shift, float factor, bool logarithm)
{
    return logarithm ? v - shift : ms_v_exp_normal(v - shift) * factor;
}

/* The pass that writes: the exponentials are computed a second time, which costs less than to store
 * them in f32 between the passes. Each vector is read before its place is written, so out may be
 * the row. */
MS_VECTOR void row_spread(const ms_dtype D, const ms_dtype Y, const void *row, size_t n,
                          float shift, float factor, bool logarithm, void *out)
{
    size_t i = 0;
    for (; i + MS_LANES <= n; i += MS_LANES)
        ms_row_put(Y, out, i, spread_lanes(ms_row_get(D, row, i), shift, factor, logarithm));
    if (i < n)
        ms_row_put_part(
            Y, out, i, n,
            spread_lanes(ms_row_get_part(D, row, i, n, LEAST), shift, factor, logarithm));
}

/* -------------------------------------------------- softmax, last dimension */

/* Three passes over a row that is in cache after the first. The log-softmax subtracts the logarithm
 * of the sum and never takes the logarithm of a rounded quotient, which could be 0. An element
 * costs two exponentials and one read from memory. */
MS_VECTOR void forward_row(const ms_dtype D, const ms_dtype Y, const ms_softmax_args *a,
                           const void *x, void *y)
{
    size_t n = (size_t)a->n;
    /* The order of the passes is fixed: each needs the result of the one before. */
    float most = row_max(D, x, n);
    float total = row_exp_sum(D, x, n, most);
    /* The logarithm of the sum joins the shift, so both cases are one pass over the row. */
    if (a->logarithm) row_spread(D, Y, x, n, most + one_log(total), 1.0f, true, y);
    else row_spread(D, Y, x, n, most, 1.0f / total, false, y);
}

/* Sum over the row of gradient (log-softmax) or gradient * y (softmax). In f32 and in an order that
 * depends on MS_LANES: the last bits may differ between instruction sets. */
MS_VECTOR float backward_sum(const ms_dtype Y, const void *y, const void *g, size_t n,
                             bool logarithm)
{
    size_t i = 0;
    ms_vf total = ms_v_splat(0.0f);
    for (; i + MS_LANES <= n; i += MS_LANES)
        total += logarithm ? ms_row_get(Y, g, i) : ms_row_get(Y, g, i) * ms_row_get(Y, y, i);
    if (i < n) {
        ms_vf v = ms_row_get_part(Y, g, i, n, 0.0f);
        total += logarithm ? v : v * ms_row_get_part(Y, y, i, n, 0.0f);
    }
    return ms_v_sum(total);
}

/* The gradient: softmax y (g - sum), log-softmax g - exp(y) sum. Both need only the output y, so
 * the input is not kept. y of a log-softmax is 0 or below, so ms_v_exp_normal is in its range. */
MS_VECTOR ms_vf backward_lanes(ms_vf y, ms_vf g, ms_vf total, bool logarithm)
{
    return logarithm ? g - ms_v_exp_normal(y) * total : y * (g - total);
}

/* Two passes over y and g: the sum must be complete before the first gradient can be written. The
 * second pass finds the row in a cache. */
MS_VECTOR void backward_row(const ms_dtype D, const ms_dtype Y, const ms_softmax_args *a,
                            const void *y, const void *g, void *dx)
{
    size_t n = (size_t)a->n, i = 0;
    /* The sum must be known before the first gradient is, hence the pass of its own. */
    ms_vf total = ms_v_splat(backward_sum(Y, y, g, n, a->logarithm));
    for (; i + MS_LANES <= n; i += MS_LANES)
        ms_row_put(D, dx, i,
                   backward_lanes(ms_row_get(Y, y, i), ms_row_get(Y, g, i), total, a->logarithm));
    if (i < n)
        ms_row_put_part(D, dx, i, n,
                        backward_lanes(ms_row_get_part(Y, y, i, n, 0.0f),
                                       ms_row_get_part(Y, g, i, n, 0.0f), total, a->logarithm));
}

/* ------------------------------------------------ softmax, other dimensions */

/* Neighbouring columns at once, each lane a softmax of its own. At the end of a row fewer lanes are
 * read; the unused ones hold zeros and are not stored. A row of `inner` elements is contiguous, so
 * a vector of lanes is one load, and with 16 lanes of f32 it uses a whole cache line. */
MS_VECTOR ms_vf column_get(const ms_dtype D, const void *at, size_t row, size_t lane, size_t inner)
{
    size_t i = row * inner + lane;
    return lane + MS_LANES <= inner ? ms_row_get(D, at, i)
                                    : ms_row_get_part(D, at, i, row * inner + inner, 0.0f);
}
MS_VECTOR void column_put(const ms_dtype D, void *at, size_t row, size_t lane, size_t inner,
                          ms_vf v)
{
    size_t i = row * inner + lane;
    if (lane + MS_LANES <= inner) ms_row_put(D, at, i, v);
    else ms_row_put_part(D, at, i, row * inner + inner, v);
}

/* Each lane computes the softmax of its column, so nothing is added across lanes. Its three passes
 * walk n rows at a distance of `inner` elements; if those lines do not stay in a cache, each pass
 * reads them from memory again. */
MS_VECTOR void forward_columns(const ms_dtype D, const ms_dtype Y, const ms_softmax_args *a,
                               const void *x, void *y, size_t lane)
{
    size_t n = (size_t)a->n, inner = (size_t)a->inner;
    ms_vf most = ms_v_splat(LEAST), total = ms_v_splat(0.0f);
    for (size_t i = 0; i < n; i++) most = ms_v_greater(column_get(D, x, i, lane, inner), most);
    for (size_t i = 0; i < n; i++)
        total += ms_v_exp_normal(column_get(D, x, i, lane, inner) - most);
    /* Each lane has a shift and a factor of its own. */
    ms_vf shift = a->logarithm ? most + ms_v_log(total) : most, factor = 1.0f / total;
    for (size_t i = 0; i < n; i++) {
        ms_vf v = column_get(D, x, i, lane, inner) - shift;
        column_put(Y, y, i, lane, inner, a->logarithm ? v : ms_v_exp_normal(v) * factor);
    }
}

/* The same formulas as backward_row, with a sum for each lane. */
MS_VECTOR void backward_columns(const ms_dtype D, const ms_dtype Y, const ms_softmax_args *a,
                                const void *y, const void *g, void *dx, size_t lane)
{
    size_t n = (size_t)a->n, inner = (size_t)a->inner;
    ms_vf total = ms_v_splat(0.0f);
    for (size_t i = 0; i < n; i++) {
        ms_vf v = column_get(Y, g, i, lane, inner);
        total += a->logarithm ? v : v * column_get(Y, y, i, lane, inner);
    }
    for (size_t i = 0; i < n; i++)
        column_put(D, dx, i, lane, inner,
                   backward_lanes(column_get(Y, y, i, lane, inner),
                                  column_get(Y, g, i, lane, inner), total, a->logarithm));
}

MS_VECTOR size_t bytes_of(const ms_dtype D, const ms_softmax_args *a, int64_t outer)
{
    return (size_t)outer * (size_t)a->n * (size_t)a->inner * (D == MS_F32 ? 4 : 2);
}

/* A softmax over the last dimension (inner is 1) runs along memory and takes the kernel for rows;
 * all others take neighbouring columns. */
MS_VECTOR void forward_all(const ms_dtype D, const ms_dtype Y, const ms_softmax_args *a,
                           int64_t begin, int64_t end)
{
    for (int64_t outer = begin; outer < end; outer++) {
        const char *x = (const char *)a->x + bytes_of(D, a, outer);
        char *y = (char *)a->y + bytes_of(Y, a, outer);
        /* The last block of lanes may be partly empty; column_get fills it with zeros. */
        if (a->inner == 1) forward_row(D, Y, a, x, y);
        else
            for (size_t lane = 0; lane < (size_t)a->inner; lane += MS_LANES)
                forward_columns(D, Y, a, x, y, lane);
    }
}

/* args->x is the result of forward here, and args->y the gradient that is written. */
MS_VECTOR void backward_all(const ms_dtype D, const ms_dtype Y, const ms_softmax_args *a,
                            int64_t begin, int64_t end)
{
    for (int64_t outer = begin; outer < end; outer++) {
        size_t at = bytes_of(Y, a, outer);
        const char *y = (const char *)a->x + at, *g = (const char *)a->gradient + at;
        char *dx = (char *)a->y + bytes_of(D, a, outer);
        if (a->inner == 1) backward_row(D, Y, a, y, g, dx);
        else
            for (size_t lane = 0; lane < (size_t)a->inner; lane += MS_LANES)
                backward_columns(D, Y, a, y, g, dx, lane);
    }
}

/* The dtypes are chosen once for all rows of a tile; they are constants in the loops. */
static void forward(const ms_softmax_args *args, int64_t begin, int64_t end)
{
    if (args->y_dtype == MS_F32)
        MS_ROW_SWITCH(args->dtype, forward_all(D, MS_F32, args, begin, end));
    else MS_ROW_SWITCH(args->dtype, forward_all(D, D, args, begin, end));
}

static void backward(const ms_softmax_args *args, int64_t begin, int64_t end)
{
    if (args->y_dtype == MS_F32)
        MS_ROW_SWITCH(args->dtype, backward_all(D, MS_F32, args, begin, end));
    else MS_ROW_SWITCH(args->dtype, backward_all(D, D, args, begin, end));
}

/* ------------------------------------------------------------ cross entropy */

/* most + log(sum(exp(x - most))), which is finite wherever x is. This is all that cross entropy
 * needs of the probabilities of a row; they are never stored. */
MS_VECTOR float log_sum_row(const ms_dtype D, const void *row, size_t n)
{
    float most = row_max(D, row, n);
    return most + one_log(row_exp_sum(D, row, n, most));
}

/* The result leaves the switch over dtypes through a variable, as the switch is no expression. */
static float log_sum(ms_dtype dtype, const void *row, int64_t n)
{
    float result = 0.0f;
    MS_ROW_SWITCH(dtype, result = log_sum_row(D, row, (size_t)n));
    return result;
}

/* May write in place: each vector is read before it is written. */
static void spread(ms_dtype dtype, const void *row, int64_t n, float shift, float factor, void *out)
{
    MS_ROW_SWITCH(dtype, row_spread(D, D, row, (size_t)n, shift, factor, false, out));
}

/* ------------------------------------------------------------ squared error */

/* Callers limit n, which bounds the error of the f32 sum. The order of additions depends on
 * MS_LANES, so the last bits may differ between instruction sets. */
MS_VECTOR float squares_row(const ms_dtype D, const void *a, const void *b, size_t n)
{
    size_t i = 0;
    ms_vf total = ms_v_splat(0.0f);
    for (; i + MS_LANES <= n; i += MS_LANES) {
        ms_vf v = ms_row_get(D, a, i) - ms_row_get(D, b, i);
        total += v * v;
    }
    if (i < n) {
        ms_vf v = ms_row_get_part(D, a, i, n, 0.0f) - ms_row_get_part(D, b, i, n, 0.0f);
        total += v * v;
    }
    return ms_v_sum(total);
}

/* A block's sum, which the caller adds to an f64 total. */
static float squares(ms_dtype dtype, const void *a, const void *b, int64_t n)
{
    float result = 0.0f;
    MS_ROW_SWITCH(dtype, result = squares_row(D, a, b, (size_t)n));
    return result;
}

/* One pass for both gradients, as they differ in sign only; the speed is that of memory. */
MS_VECTOR void difference_row(const ms_dtype D, const void *a, const void *b, size_t n,
                              float factor, void *da, void *db)
{
    size_t i = 0;
    for (; i + MS_LANES <= n; i += MS_LANES) {
        ms_vf v = (ms_row_get(D, a, i) - ms_row_get(D, b, i)) * factor;
        if (da != NULL) ms_row_put(D, da, i, v);
        if (db != NULL) ms_row_put(D, db, i, -v);
    }
    if (i < n) {
        ms_vf v = (ms_row_get_part(D, a, i, n, 0.0f) - ms_row_get_part(D, b, i, n, 0.0f)) * factor;
        if (da != NULL) ms_row_put_part(D, da, i, n, v);
        if (db != NULL) ms_row_put_part(D, db, i, n, -v);
    }
}

static void difference(ms_dtype dtype, const void *a, const void *b, int64_t n, float factor,
                       void *da, void *db)
{
    MS_ROW_SWITCH(dtype, difference_row(D, a, b, (size_t)n, factor, da, db));
}

const ms_softmax_kernels MS_ISA_NAME(ms_softmax_kernels) = {
    .forward = forward,
    .backward = backward,
    .log_sum = log_sum,
    .spread = spread,
    .squares = squares,
    .difference = difference,
};
