/* norm.cu: the kernels of layer norm and RMS norm. A row is read from memory once and then from a
 * cache. */
#include "ops/cuda/norm.h"

#include "ops/cuda/device.h"

/* Calls body(s, other) with the dtype of s, and with that of x, or of y and its gradient: as
 * constants where training has them, which is one dtype for both, or f32 for s beside 16 bits. */
template <class Body> MS_DEVICE void with_dtypes(uint8_t s, uint8_t other, Body body)
{
    if (s == other) ms_with_dtype(s, [&](auto dtype) { body(dtype, dtype); });
    else if (s == MS_F32 && other == MS_BF16) body(ms_known<MS_F32>(), ms_known<MS_BF16>());
    else if (s == MS_F32 && other == MS_F16) body(ms_known<MS_F32>(), ms_known<MS_F16>());
    else body(s, other);
}

/* -------------------------------------------------------------------- forward */

template <class Dtype> MS_DEVICE float add_x(const ms_norm_args &n, const ms_row &row, Dtype x)
{
    float total = 0;
    ms_walk(row, [&](auto size, int64_t i) {
        float v[size.N];
        ms_get(size, n.x, row.begin + i, x, v);
        for (int k = 0; k < size.N; k++) total += v[k];
    });
    return total;
}
/* s = x + residual, rounded to its dtype as it is stored: the norm and its gradient see the stored
 * value. */
template <class S, class Residual, class X>
MS_DEVICE float add_residual(const ms_norm_args &n, const ms_row &row, S s, Residual residual, X x)
{
    float total = 0;
    ms_walk(row, [&](auto size, int64_t i) {
        float v[size.N], r[size.N];
        ms_get(size, n.x, row.begin + i, x, v);
        ms_get(size, n.residual, row.begin + i, residual, r);
        for (int k = 0; k < size.N; k++) v[k] = ms_rounded(v[k] + r[k], s);
        ms_put(size, n.sum, row.begin + i, s, v);
        for (int k = 0; k < size.N; k++) total += v[k];
    });
    return total;
}
/* Makes s where there is a residual. Returns the thread's sum of s. */
MS_DEVICE float add_row(const ms_norm_args &n, const ms_row &row)
{
    const ms_norm_dtypes &d = n.dtypes;
    float total = 0;
    if (n.residual == NULL) ms_with_dtype(d.x, [&](auto x) { total = add_x(n, row, x); });
    else if (d.residual != d.s) total = add_residual(n, row, d.s, d.residual, d.x);
    else with_dtypes(d.s, d.x, [&](auto s, auto x) { total = add_residual(n, row, s, s, x); });
    return total;
}

/* The mean is subtracted before the square: E(s^2) - E(s)^2 would lose all digits where the mean is
 * large. */
MS_DEVICE float add_squares(const ms_norm_args &n, const ms_row &row, const void *s, float mean)
{
    float total = 0;
    ms_with_dtype(n.dtypes.s, [&](auto dtype) {
        ms_walk(row, [&](auto size, int64_t i) {
            float v[size.N];
            ms_get(size, s, row.begin + i, dtype, v);
            for (int k = 0; k < size.N; k++) total += (v[k] - mean) * (v[k] - mean);
        });
    });
    return total;
}

/* get_affine(size, i, w, b) gets elements of weight and bias. */
template <class S, class Y, class Get>
MS_DEVICE void write_row(const ms_norm_args &n, const ms_row &row, const void *s, float mean,
                         float scale, S s_dtype, Y y_dtype, Get get_affine)
{
    ms_walk(row, [&](auto size, int64_t i) {
        float v[size.N], w[size.N], b[size.N];
        ms_get(size, s, row.begin + i, s_dtype, v);
        get_affine(size, i, w, b);
        for (int k = 0; k < size.N; k++) v[k] = (v[k] - mean) * scale * w[k] + b[k];
        ms_put(size, n.y, row.begin + i, y_dtype, v);
    });
}
MS_DEVICE void write_norm(const ms_norm_args &n, const ms_row &row, const void *s, float mean,
                          float scale)
{
    const ms_norm_dtypes &d = n.dtypes;
    if (n.weight == NULL || d.weight != d.s) {
        write_row(n, row, s, mean, scale, d.s, d.y, [&](auto size, int64_t i, float *w, float *b) {
            ms_get_or(size, n.weight, i, d.weight, 1.0f, w);
            ms_get_or(size, n.bias, i, d.weight, 0.0f, b);
        });
        return;
    }
    with_dtypes(d.s, d.y, [&](auto s_dtype, auto y_dtype) {
        write_row(n, row, s, mean, scale, s_dtype, y_dtype,
                  [&](auto size, int64_t i, float *w, float *b) {
                      ms_get(size, n.weight, i, s_dtype, w);
                      ms_get_beside(size, n.bias, n.weight, i, s_dtype, 0.0f, b);
                  });
    });
}

/* RMS norm is the case of a mean of 0; its first pass runs only where there is a residual to add.
 */
MS_KERNEL_PAIRED(norm_forward, ms_cuda_norm_call, MS_CUDA_ROW_THREADS)
{
    MS_SHARED(float, shared, MS_WARP);
    const ms_norm_args &n = args.n;
    int64_t at = BLOCK_X * THREADS_Y + THREAD_Y;
    if (at >= n.rows) return;
    ms_row row = ms_row_of(at, n.width, args.aligned);
    const void *s = n.residual != NULL ? n.sum : n.x;
    float mean = 0;
    if (n.centered || n.residual != NULL) {
        float total = ms_block_join(add_row(n, row), shared, ms_plus());
        if (n.centered) mean = total / (float)n.width;
    }
    float squares = ms_block_join(add_squares(n, row, s, mean), shared, ms_plus());
    float scale = 1.0f / sqrtf(squares / (float)n.width + (float)n.eps);
    write_norm(n, row, s, mean, scale);
    if (THREAD_X == 0 && n.mean != NULL) n.mean[at] = mean;
    if (THREAD_X == 0 && n.scale != NULL) n.scale[at] = scale;
}

/* ------------------------------------------------------------------- backward */

struct row_numbers {
    float mean, scale;
};
MS_DEVICE row_numbers numbers_of(const ms_norm_backward_args &n, int64_t at)
{
    row_numbers r;
    r.scale = n.scale[at];
    r.mean = *(n.centered ? n.mean + at : n.scale + at);
    if (!n.centered) r.mean = 0.0f;
    return r;
}

/* Calls body(s, y, get_weight): dtypes, and get_weight(size, i, w). */
template <class Body> MS_DEVICE void with_weight(const ms_norm_backward_args &n, Body body)
{
    const ms_norm_dtypes &d = n.dtypes;
    if (n.weight == NULL || d.weight != d.s) {
        body(d.s, d.y, [&](auto size, int64_t i, float *w) {
            ms_get_or(size, n.weight, i, d.weight, 1.0f, w);
        });
        return;
    }
    with_dtypes(d.s, d.y, [&](auto s, auto y) {
        body(s, y, [&](auto size, int64_t i, float *w) { ms_get(size, n.weight, i, s, w); });
    });
}

/* g = gradient * weight and h = (s - mean) * scale of some elements. */
template <class Size, class S, class Y, class Get>
MS_DEVICE void get_terms(Size size, const ms_norm_backward_args &n, const ms_row &row, int64_t i,
                         row_numbers r, S s, Y y, Get get_weight, float *g, float *h)
{
    float w[Size::N];
    ms_get(size, n.gradient, row.begin + i, y, g);
    ms_get(size, n.s, row.begin + i, s, h);
    get_weight(size, i, w);
    for (int k = 0; k < Size::N; k++) {
        h[k] = (h[k] - r.mean) * r.scale;
        g[k] *= w[k];
    }
}

/* dx = scale * (g - mean of g - h * mean of g h) + sum_gradient. */
MS_KERNEL_PAIRED(norm_backward, ms_cuda_norm_backward_call, MS_CUDA_ROW_THREADS)
{
    MS_SHARED(float, shared, MS_WARP);
    const ms_norm_backward_args &n = args.n;
    int64_t at = BLOCK_X * THREADS_Y + THREAD_Y;
    if (at >= n.rows) return;
    const ms_row row = ms_row_of(at, n.width, args.aligned);
    const row_numbers r = numbers_of(n, at);
    float g_sum = 0, gh_sum = 0;
    with_weight(n, [&](auto s, auto y, auto get_weight) {
        ms_walk(row, [&](auto size, int64_t i) {
            float g[size.N], h[size.N];
            get_terms(size, n, row, i, r, s, y, get_weight, g, h);
            for (int k = 0; k < size.N; k++) {
                g_sum += g[k];
                gh_sum += g[k] * h[k];
            }
        });
    });
    float g_mean = ms_block_join(g_sum, shared, ms_plus()) / (float)n.width,
          gh_mean = ms_block_join(gh_sum, shared, ms_plus()) / (float)n.width;
    if (!n.centered) g_mean = 0;
    with_weight(n, [&](auto s, auto y, auto get_weight) {
        ms_walk(row, [&](auto size, int64_t i) {
            float g[size.N], h[size.N], add[size.N];
            get_terms(size, n, row, i, r, s, y, get_weight, g, h);
            ms_get_beside(size, n.sum_gradient, n.s, row.begin + i, s, 0.0f, add);
            for (int k = 0; k < size.N; k++)
                g[k] = (g[k] - g_mean - h[k] * gh_mean) * r.scale + add[k];
            if (n.dx != NULL) ms_put(size, n.dx, row.begin + i, s, g);
            if (n.narrow != NULL) ms_put(size, n.narrow, row.begin + i, n.dtypes.narrow, g);
        });
    });
}

/* What a row adds to the gradients of weight and bias, in some columns. */
template <class Size, class S, class Y>
MS_DEVICE void add_to_columns(Size size, const ms_norm_backward_args &n, int64_t at, int64_t column,
                              S s_dtype, Y y_dtype, float *dweight, float *dbias)
{
    float d[Size::N], s[Size::N];
    ms_get(size, n.gradient, at * n.width + column, y_dtype, d);
    ms_get(size, n.s, at * n.width + column, s_dtype, s);
    const row_numbers r = numbers_of(n, at);
    MS_UNROLL for (int k = 0; k < Size::N; k++)
    {
        dweight[k] += d[k] * ((s[k] - r.mean) * r.scale);
        dbias[k] += d[k];
    }
}

/* The sums over the rows of part BLOCK_Y: in f32 over every eighth of them, which belong to one
 * thread, then in f64. */
template <class Size>
MS_DEVICE void add_part(Size size, const ms_cuda_norm_columns_call &args, double *shared)
{
    const ms_norm_backward_args &n = args.n;
    int64_t column = (BLOCK_X * MS_WARP + THREAD_X) * Size::N, end = (BLOCK_Y + 1) * args.each;
    if (end > n.rows) end = n.rows;
    float dweight[Size::N] = { 0 }, dbias[Size::N] = { 0 };
    int64_t first = column < n.width ? BLOCK_Y * args.each + THREAD_Y : end;
    with_dtypes(n.dtypes.s, n.dtypes.y, [&](auto s, auto y) {
        MS_ROLLED for (int64_t at = first; at < end; at += 8)
        {
            add_to_columns(size, n, at, column, s, y, dweight, dbias);
        }
    });
    double *partial = args.partial + 2 * BLOCK_Y * n.width + column;
    MS_UNROLL for (int k = 0; k < Size::N; k++)
    {
        double weight_sum = ms_join_rows((double)dweight[k], shared);
        double bias_sum = ms_join_rows((double)dbias[k], shared);
        if (THREAD_Y != 0 || column >= n.width) continue;
        partial[k] = weight_sum;
        partial[n.width + k] = bias_sum;
    }
}

MS_KERNEL_IN(norm_columns, ms_cuda_norm_columns_call, 256, 4)
{
    MS_SHARED(double, shared, 256);
    if (args.aligned) add_part(ms_size<8>(), args, shared);
    else add_part(ms_size<1>(), args, shared);
}

MS_KERNEL(norm_join, ms_cuda_join_call, 256)
{
    MS_SHARED(double, shared, 256);
    ms_join_parts(args, shared);
}
