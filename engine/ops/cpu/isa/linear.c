/* linear.c: gelu after a linear layer's product, and the pass over its gradient.
 *
 * Bits may differ between instruction sets, since the polynomials of gelu may be contracted; the
 * order in which rows are added is the same on all. */
#include "ops/cpu/linear.h"

#include "ops/cpu/gelu.h"
#include "ops/cpu/row.h"

/* --------------------------------------------------------------- activation */

/* gelu(x) = x * gate(x). y may be x: each vector is read before it is written. */
MS_VECTOR void activate_run(const ms_dtype D, const void *x, void *y, size_t n)
{
    size_t i = 0;
    for (; i + MS_LANES <= n; i += MS_LANES) {
        ms_vf v = ms_row_get(D, x, i);
        ms_row_put(D, y, i, v * ms_v_gelu_gate(v));
    }
    if (i < n) {
        ms_vf v = ms_row_get_part(D, x, i, n, 0.0f);
        ms_row_put_part(D, y, i, n, v * ms_v_gelu_gate(v));
    }
}

static void activate(const ms_activation_args *a, int64_t begin, int64_t end)
{
    size_t at = (size_t)begin * (a->dtype == MS_F32 ? 4 : 2), n = (size_t)(end - begin);
    const void *x = (const char *)a->before + at;
    void *y = (char *)a->y + at;
    MS_ROW_SWITCH(a->dtype, activate_run(D, x, y, n));
}

/* ----------------------------------------------------------------- gradient */

/* Up to four rows at once, so that the sums are loaded and stored a quarter as often. Rows are
 * added one after the other, so the order of additions is the same as with one row at a time. The
 * steps are in bytes; g may have gaps between its rows. before, out and sums may be NULL. */
typedef struct band {
    const char *g, *before;
    char *out;
    size_t g_step, step, rows;
    float *sums;
} band;

/* g * slope(before) where there is an activation, and the sums over rows. The end of the rows is
 * done row by row, since a partial vector needs the slow path. `out` may be `before`: both are
 * contiguous, and each vector of before is read before it is written. */
MS_VECTOR void gradient_columns(const ms_dtype D, const bool activated, const bool written,
                                const band *b, size_t width)
{
    size_t i = 0;
    for (; i + MS_LANES <= width; i += MS_LANES) {
        /* The sums stay in a register over the rows of the band. */
        ms_vf sum = b->sums != NULL ? ms_v_load(b->sums + i) : ms_v_splat(0.0f);
        for (size_t r = 0; r < b->rows; r++) {
            ms_vf v = ms_row_get(D, b->g + r * b->g_step, i);
            if (activated) v *= ms_v_gelu_slope(ms_row_get(D, b->before + r * b->step, i));
            if (written) ms_row_put(D, b->out + r * b->step, i, v);
            sum += v;
        }
        if (b->sums != NULL) ms_v_store(b->sums + i, sum);
    }
    /* The last columns of the band, fewer than MS_LANES. */
    for (size_t r = 0; r < b->rows && i < width; r++) {
        ms_vf v = ms_row_get_part(D, b->g + r * b->g_step, i, width, 0.0f);
        if (activated)
            v *= ms_v_gelu_slope(ms_row_get_part(D, b->before + r * b->step, i, width, 0.0f));
        if (written) ms_row_put_part(D, b->out + r * b->step, i, width, v);
        if (b->sums != NULL)
            ms_v_store_part(b->sums + i, ms_v_load_part(b->sums + i, width - i) + v, width - i);
    }
}

/* `sums` is added to and not cleared: a caller joins blocks of rows. */
MS_VECTOR void gradient_rows(const ms_dtype D, const bool activated, const bool written,
                             const ms_linear_gradient_args *a, int64_t begin, int64_t end,
                             float *sums)
{
    size_t width = (size_t)a->width, bytes = D == MS_F32 ? 4 : 2;
    band b = { .g_step = (size_t)a->g_row * bytes, .step = width * bytes, .sums = sums };
    for (int64_t row = begin; row < end; row += 4) {
        b.rows = (size_t)(end - row < 4 ? end - row : 4);
        b.g = (const char *)a->g + (size_t)row * b.g_step;
        if (activated) b.before = (const char *)a->before + (size_t)row * b.step;
        if (written) b.out = (char *)a->out + (size_t)row * b.step;
        gradient_columns(D, activated, written, &b, width);
    }
}

/* What training meets has loops of its own: gelu with a result, and sums alone. */
static void gradient(const ms_linear_gradient_args *a, int64_t begin, int64_t end, float *sums)
{
    bool activated = a->before != NULL, written = a->out != NULL;
    if (activated && written)
        MS_ROW_SWITCH(a->dtype, gradient_rows(D, true, true, a, begin, end, sums));
    else if (!activated && !written)
        MS_ROW_SWITCH(a->dtype, gradient_rows(D, false, false, a, begin, end, sums));
    else gradient_rows((ms_dtype)a->dtype, activated, written, a, begin, end, sums);
}

const ms_linear_kernels MS_ISA_NAME(ms_linear_kernels) = { .activate = activate,
                                                           .gradient = gradient };
