/* linear.c: gelu after a linear layer's product, and the pass over its gradient.
 *
 * Bits may differ between instruction sets, since the polynomials of gelu may be contracted; the
 * order in which rows are added is the same on all. */
#include "ops/cpu/linear.h"

#include "ops/cpu/gelu.h"
#include "ops/cpu/row.h"

#define NO_TENSOR MS_DTYPES /* in place of a dtype: there is no such operand */

/* The combinations that training meets get loops of their own, in which all dtypes are constants;
 * the others share one. A dtype that is no constant costs a branch at each vector and each
 * conversion. */
#define SPECIAL(one, two, three, call)                       \
    if (d1 == (one) && d2 == (two) && d3 == (three)) {       \
        const ms_dtype D1 = (one), D2 = (two), D3 = (three); \
        call;                                                \
        return;                                              \
    }

/* Only floats come here. For NO_TENSOR the result is multiplied but not used. */
static size_t bytes_of(ms_dtype dtype) { return dtype == MS_F32 ? 4 : 2; }

/* --------------------------------------------------------------- activation */

/* gelu(x) = x * gate(x). The cast is written in the same pass, which saves reading the result
 * again. y may be x: each vector is read before it is written. */
MS_VECTOR void activate_run(const ms_dtype X, const ms_dtype Y, const ms_dtype C, const void *x,
                            void *y, void *cast, size_t n)
{
    size_t i = 0;
    for (; i + MS_LANES <= n; i += MS_LANES) {
        ms_vf v = ms_row_get(X, x, i);
        v = v * ms_v_gelu_gate(v);
        ms_row_put(Y, y, i, v);
        if (C != NO_TENSOR) ms_row_put(C, cast, i, v);
    }
    if (i < n) {
        ms_vf v = ms_row_get_part(X, x, i, n, 0.0f);
        v = v * ms_v_gelu_gate(v);
        ms_row_put_part(Y, y, i, n, v);
        if (C != NO_TENSOR) ms_row_put_part(C, cast, i, n, v);
    }
}

/* The combinations are, in order: f32 alone; autocast to bf16 with the result kept in f32; bf16
 * alone. They choose x, y and the cast. */
static void activate(const ms_activation_args *a, int64_t begin, int64_t end)
{
    ms_dtype d1 = (ms_dtype)a->before_dtype, d2 = (ms_dtype)a->y_dtype,
             d3 = a->cast != NULL ? (ms_dtype)a->cast_dtype : NO_TENSOR;
    const void *x = (const char *)a->before + (size_t)begin * bytes_of(d1);
    /* x, y and the cast may each have another dtype, so each address is found by itself. */
    void *y = (char *)a->y + (size_t)begin * bytes_of(d2),
         *cast = a->cast != NULL ? (char *)a->cast + (size_t)begin * bytes_of(d3) : NULL;
    size_t n = (size_t)(end - begin);
    SPECIAL(MS_F32, MS_F32, NO_TENSOR, activate_run(D1, D2, D3, x, y, cast, n))
    SPECIAL(MS_BF16, MS_F32, MS_BF16, activate_run(D1, D2, D3, x, y, cast, n))
    SPECIAL(MS_BF16, MS_BF16, NO_TENSOR, activate_run(D1, D2, D3, x, y, cast, n))
    activate_run(d1, d2, d3, x, y, cast, n);
}

/* ----------------------------------------------------------------- gradient */

/* Up to four rows at once, so that the sums are loaded and stored a quarter as often. Rows are
 * added one after the other, so the order of additions is the same as with one row at a time. The
 * steps are in bytes, as each of the three tensors may have another dtype; g may have gaps between
 * its rows. */
typedef struct band {
    const char *g, *before;
    char *out;
    size_t g_step, before_step, out_step, rows;
    float *sums;
} band;

/* g * slope(before) where there is an activation, and the sums over rows. The end of the rows is
 * done row by row, since a partial vector needs the slow path. `out` may be `before`: both are
 * contiguous, and each vector of before is read before it is written. */
MS_VECTOR void gradient_columns(const ms_dtype G, const ms_dtype B, const ms_dtype O, const band *b,
                                size_t width)
{
    size_t i = 0;
    for (; i + MS_LANES <= width; i += MS_LANES) {
        /* The sums stay in a register over the rows of the band. */
        ms_vf sum = b->sums != NULL ? ms_v_load(b->sums + i) : ms_v_splat(0.0f);
        for (size_t r = 0; r < b->rows; r++) {
            ms_vf v = ms_row_get(G, b->g + r * b->g_step, i);
            if (B != NO_TENSOR)
                v *= ms_v_gelu_slope(ms_row_get(B, b->before + r * b->before_step, i));
            if (O != NO_TENSOR) ms_row_put(O, b->out + r * b->out_step, i, v);
            sum += v;
        }
        if (b->sums != NULL) ms_v_store(b->sums + i, sum);
    }
    /* The last columns of the band, fewer than MS_LANES. */
    for (size_t r = 0; r < b->rows && i < width; r++) {
        ms_vf v = ms_row_get_part(G, b->g + r * b->g_step, i, width, 0.0f);
        if (B != NO_TENSOR)
            v *=
                ms_v_gelu_slope(ms_row_get_part(B, b->before + r * b->before_step, i, width, 0.0f));
        if (O != NO_TENSOR) ms_row_put_part(O, b->out + r * b->out_step, i, width, v);
        if (b->sums != NULL)
            ms_v_store_part(b->sums + i, ms_v_load_part(b->sums + i, width - i) + v, width - i);
    }
}

/* `sums` is added to and not cleared: a caller joins blocks of rows. */
MS_VECTOR void gradient_rows(const ms_dtype G, const ms_dtype B, const ms_dtype O,
                             const ms_linear_gradient_args *a, int64_t begin, int64_t end,
                             float *sums)
{
    size_t width = (size_t)a->width;
    /* The steps of operands that are absent are computed, too, and not used. */
    band b = { .g_step = (size_t)a->g_row * bytes_of(G),
               .before_step = width * bytes_of(B),
               .out_step = width * bytes_of(O),
               .sums = sums };
    for (int64_t row = begin; row < end; row += 4) {
        b.rows = (size_t)(end - row < 4 ? end - row : 4);
        b.g = (const char *)a->g + (size_t)row * b.g_step;
        if (B != NO_TENSOR) b.before = (const char *)a->before + (size_t)row * b.before_step;
        if (O != NO_TENSOR) b.out = (char *)a->out + (size_t)row * b.out_step;
        gradient_columns(G, B, O, &b, width);
    }
}

/* Combinations: gradient, input of the activation, result. Those without a loop of their own give
 * the same numbers and take longer. */
static void gradient(const ms_linear_gradient_args *a, int64_t begin, int64_t end, float *sums)
{
    ms_dtype d1 = (ms_dtype)a->g_dtype;
    /* Without an activation there is nothing to go back through; without a result only the sums are
     * wanted. */
    ms_dtype d2 = a->before != NULL ? (ms_dtype)a->before_dtype : NO_TENSOR;
    ms_dtype d3 = a->out != NULL ? (ms_dtype)a->out_dtype : NO_TENSOR;
    /* f32 without an activation: only the bias; the same with a cast for the products; f32 with
     * gelu; autocast to bf16 with gelu. */
    SPECIAL(MS_F32, NO_TENSOR, NO_TENSOR, gradient_rows(D1, D2, D3, a, begin, end, sums))
    SPECIAL(MS_F32, NO_TENSOR, MS_BF16, gradient_rows(D1, D2, D3, a, begin, end, sums))
    SPECIAL(MS_F32, MS_F32, MS_F32, gradient_rows(D1, D2, D3, a, begin, end, sums))
    SPECIAL(MS_F32, MS_BF16, MS_BF16, gradient_rows(D1, D2, D3, a, begin, end, sums))
    gradient_rows(d1, d2, d3, a, begin, end, sums);
}

const ms_linear_kernels MS_ISA_NAME(ms_linear_kernels) = { .activate = activate,
                                                           .gradient = gradient };
