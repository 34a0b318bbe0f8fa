/* attention.c: blocks of scores through the softmax that goes on from block to block, and back; rotation of pairs. */
#include "tensor/cpu/attention.h"
#include "tensor/cpu/row.h"

#define LEAST (-__builtin_inff())

/* How many columns of the block row i sees. */
MS_VECTOR size_t seen_of(const ms_score_block *b, int64_t row)
{
    int64_t n = b->seen + row * b->step;
    return (size_t)(n < 0 ? 0 : n > b->columns ? b->columns : n);
}

MS_VECTOR ms_v16f part(const float *row, size_t i, size_t n, float rest) { return ms_row_get_part(MS_F32, row, i, n, rest); }

/* Lanes of v before the n-th; `rest` in the others. Rows of a block end at a multiple of 16, so whole vectors can be read and written. */
MS_VECTOR ms_v16f first_lanes(ms_v16f v, size_t n, float rest)
{
    const ms_v16i lane = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 };
    return ms_v_select(lane < ms_v_splat_int((int32_t)n), v, ms_v_splat(rest));
}

/* NaN is left to the exponentials: it comes out of their sum. */
MS_VECTOR float block_row_max(const float *row, size_t n)
{
    size_t i = 0;
    ms_v16f a = ms_v_splat(LEAST), b = a;
    for (; i + 2 * MS_LANES <= n; i += 2 * MS_LANES) {
        a = ms_v_greater(ms_v_load(row + i), a);
        b = ms_v_greater(ms_v_load(row + i + MS_LANES), b);
    }
    if (i + MS_LANES <= n) {
        a = ms_v_greater(ms_v_load(row + i), a);
        i += MS_LANES;
    }
    if (i < n) b = ms_v_greater(first_lanes(ms_v_load(row + i), n - i, LEAST), b);
    return ms_v_reduce_max(ms_v_greater(a, b));
}

/* row = exp(row * scale - shift), 0 from n to the end of the row; returns the sum. */
MS_VECTOR float block_row_exp(float *row, size_t n, size_t end, float scale, float shift)
{
    size_t i = 0;
    ms_v16f a = ms_v_splat(0.0f), b = a;
    for (; i + 2 * MS_LANES <= n; i += 2 * MS_LANES) {
        ms_v16f x = ms_v_exp_normal(ms_v_load(row + i) * scale - shift), y = ms_v_exp_normal(ms_v_load(row + i + MS_LANES) * scale - shift);
        ms_v_store(row + i, x);
        ms_v_store(row + i + MS_LANES, y);
        a += x;
        b += y;
    }
    for (; i < n; i += MS_LANES) {
        ms_v16f x = first_lanes(ms_v_exp_normal(ms_v_load(row + i) * scale - shift), n - i, 0.0f);
        ms_v_store(row + i, x);
        a += x;
    }
    for (; i < end; i += MS_LANES) ms_v_store(row + i, ms_v_splat(0.0f));
    return ms_v_sum(a + b);
}

MS_VECTOR void scale_row(float *row, size_t width, float factor)
{
    size_t i = 0;
    for (; i + MS_LANES <= width; i += MS_LANES) ms_v_store(row + i, ms_v_load(row + i) * factor);
    for (; i < width; i++) row[i] *= factor;
}

static void softmax(const ms_score_block *b, float *most, float *total, bool first, float *out, int64_t width)
{
    for (int64_t row = 0; row < b->rows; row++) {
        float *scores = b->scores + row * b->row;
        size_t n = seen_of(b, row);
        float before = most[row], here = n > 0 ? block_row_max(scores, n) * b->scale : before;
        float now = here > before ? here : before;
        float sum = block_row_exp(scores, n, (size_t)b->row, b->scale, now);
        if (n == 0) continue;
        if (!first) {
            float shrink = ms_v_exp_normal(ms_v_splat(before - now))[0];
            if (shrink != 1.0f) scale_row(out + row * width, (size_t)width, shrink);
            sum += total[row] * shrink;
        }
        most[row] = now;
        total[row] = sum;
    }
}

static void finish(int64_t rows, int64_t width, const float *most, const float *total, float *out, float *log_sum)
{
    for (int64_t row = 0; row < rows; row++) {
        scale_row(out + row * width, (size_t)width, 1.0f / total[row]);
        if (log_sum != NULL) log_sum[row] = most[row] + ms_v_log(ms_v_splat(total[row]))[0];
    }
}

static void probabilities(const ms_score_block *b, const float *log_sum)
{
    for (int64_t row = 0; row < b->rows; row++) block_row_exp(b->scores + row * b->row, seen_of(b, row), (size_t)b->row, b->scale, log_sum[row]);
}

static void score_gradient(const ms_score_block *b, float *change, const float *offset)
{
    for (int64_t row = 0; row < b->rows; row++) {
        const float *p = b->scores + row * b->row;
        float *d = change + row * b->row, shift = offset[row], scale = b->scale;
        for (size_t i = 0; i < (size_t)b->columns; i += MS_LANES) ms_v_store(d + i, ms_v_load(p + i) * (ms_v_load(d + i) - shift) * scale);
    }
}

static void row_dots(int64_t rows, int64_t width, const float *a, int64_t a_row, const float *b, int64_t b_row, float *offset)
{
    for (int64_t row = 0; row < rows; row++, a += a_row, b += b_row) {
        size_t n = (size_t)width, i = 0;
        ms_v16f total = ms_v_splat(0.0f);
        for (; i + MS_LANES <= n; i += MS_LANES) total += ms_v_load(a + i) * ms_v_load(b + i);
        if (i < n) total += part(a, i, n, 0.0f) * part(b, i, n, 0.0f);
        offset[row] = ms_v_sum(total);
    }
}

/* ------------------------------------------------------------------------------------------------------------------------- rotary */

MS_VECTOR void rotate_row(const ms_dtype D, const char *x, char *y, const float *cosine, const float *sine, size_t half, bool back)
{
    size_t i = 0, item = D == MS_F32 ? 4 : 2;
    const char *x_high = x + half * item;
    char *y_high = y + half * item;
    for (; i + MS_LANES <= half; i += MS_LANES) {
        ms_v16f a = ms_row_get(D, x, i), b = ms_row_get(D, x_high, i), c = ms_v_load(cosine + i), s = ms_v_load(sine + i);
        if (back) s = -s;
        ms_row_put(D, y, i, a * c - b * s);
        ms_row_put(D, y_high, i, b * c + a * s);
    }
    if (i < half) {
        ms_v16f a = ms_row_get_part(D, x, i, half, 0.0f), b = ms_row_get_part(D, x_high, i, half, 0.0f);
        ms_v16f c = part(cosine, i, half, 0.0f), s = part(sine, i, half, 0.0f);
        if (back) s = -s;
        ms_row_put_part(D, y, i, half, a * c - b * s);
        ms_row_put_part(D, y_high, i, half, b * c + a * s);
    }
}

static void rotate(ms_dtype dtype, const void *x, void *y, const float *cosine, const float *sine, int64_t width, bool back)
{
    MS_ROW_SWITCH(dtype, rotate_row(D, x, y, cosine, sine, (size_t)width / 2, back));
}

const ms_attention_kernels MS_ISA_NAME(ms_attention_kernels) = {
    .softmax = softmax, .finish = finish, .probabilities = probabilities, .score_gradient = score_gradient, .row_dots = row_dots, .rotate = rotate,
};
