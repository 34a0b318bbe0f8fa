/* norm.cu: the kernels of layer norm and RMS norm. A row is read from memory once and then from a
 * cache. */
#include "ops/cuda/norm.h"

#include "ops/cuda/device.h"

/* s = x + residual, rounded to its dtype as it is stored: the norm and its gradient see the stored
 * value. Each thread reads back what it has written itself. Returns the thread's sum of s. */
MS_DEVICE float add_residual(const ms_norm_args &n, const ms_row &row)
{
    float total = 0;
    ms_walk(row, [&](auto size, int64_t i) {
        float v[size.N], r[size.N];
        ms_get(size, n.x, row.begin + i, n.dtypes.x, v);
        if (n.residual != NULL) {
            ms_get(size, n.residual, row.begin + i, n.dtypes.residual, r);
            for (int k = 0; k < size.N; k++) v[k] += r[k];
            ms_put(size, n.sum, row.begin + i, n.dtypes.s, v);
            ms_get(size, n.sum, row.begin + i, n.dtypes.s, v);
        }
        for (int k = 0; k < size.N; k++) total += v[k];
    });
    return total;
}

/* The mean is subtracted before the square: E(s^2) - E(s)^2 would lose all digits where the mean is
 * large. */
MS_DEVICE float add_squares(const ms_norm_args &n, const ms_row &row, const void *s, float mean)
{
    float total = 0;
    ms_walk(row, [&](auto size, int64_t i) {
        float v[size.N];
        ms_get(size, s, row.begin + i, n.dtypes.s, v);
        for (int k = 0; k < size.N; k++) total += (v[k] - mean) * (v[k] - mean);
    });
    return total;
}

MS_DEVICE void write_norm(const ms_norm_args &n, const ms_row &row, const void *s, float mean,
                          float scale)
{
    ms_walk(row, [&](auto size, int64_t i) {
        float v[size.N], w[size.N], b[size.N];
        ms_get(size, s, row.begin + i, n.dtypes.s, v);
        ms_get_or(size, n.weight, i, n.dtypes.weight, 1.0f, w);
        ms_get_or(size, n.bias, i, n.dtypes.weight, 0.0f, b);
        for (int k = 0; k < size.N; k++) v[k] = (v[k] - mean) * scale * w[k] + b[k];
        ms_put(size, n.y, row.begin + i, n.dtypes.y, v);
    });
}

/* RMS norm is the case of a mean of 0; its first pass runs only where there is a residual to add.
 */
MS_KERNEL(norm_forward, ms_cuda_norm_call, MS_CUDA_ROW_THREADS)
{
    MS_SHARED(float, shared, MS_WARP);
    const ms_norm_args &n = args.n;
    int64_t at = BLOCK_X * THREADS_Y + THREAD_Y;
    if (at >= n.rows) return;
    ms_row row = ms_row_of(at, n.width, args.aligned);
    const void *s = n.residual != NULL ? n.sum : n.x;
    float mean = 0;
    if (n.centered || n.residual != NULL) {
        float total = ms_block_join(add_residual(n, row), shared, ms_plus());
        if (n.centered) mean = total / (float)n.width;
    }
    float squares = ms_block_join(add_squares(n, row, s, mean), shared, ms_plus());
    float scale = 1.0f / sqrtf(squares / (float)n.width + (float)n.eps);
    write_norm(n, row, s, mean, scale);
    if (THREAD_X == 0 && n.mean != NULL) n.mean[at] = mean;
    if (THREAD_X == 0 && n.scale != NULL) n.scale[at] = scale;
}

/* ------------------------------------------------------------------- backward */

/* g = gradient * weight and h = (s - mean) * scale of some elements. */
template <class Size>
MS_DEVICE void read_terms(Size size, const ms_norm_backward_args &n, const ms_row &row, int64_t i,
                          float mean, float scale, float *g, float *h)
{
    float w[Size::N];
    ms_get(size, n.gradient, row.begin + i, n.dtypes.y, g);
    ms_get(size, n.s, row.begin + i, n.dtypes.s, h);
    ms_get_or(size, n.weight, i, n.dtypes.weight, 1.0f, w);
    for (int k = 0; k < Size::N; k++) {
        h[k] = (h[k] - mean) * scale;
        g[k] *= w[k];
    }
}

/* dx = scale * (g - mean of g - h * mean of g h) + sum_gradient. */
MS_KERNEL(norm_backward, ms_cuda_norm_backward_call, MS_CUDA_ROW_THREADS)
{
    MS_SHARED(float, shared, MS_WARP);
    const ms_norm_backward_args &n = args.n;
    int64_t at = BLOCK_X * THREADS_Y + THREAD_Y;
    if (at >= n.rows) return;
    ms_row row = ms_row_of(at, n.width, args.aligned);
    float mean = n.centered ? n.mean[at] : 0.0f, scale = n.scale[at], g_sum = 0, gh_sum = 0;
    ms_walk(row, [&](auto size, int64_t i) {
        float g[size.N], h[size.N];
        read_terms(size, n, row, i, mean, scale, g, h);
        for (int k = 0; k < size.N; k++) {
            g_sum += g[k];
            gh_sum += g[k] * h[k];
        }
    });
    float g_mean = ms_block_join(g_sum, shared, ms_plus()) / (float)n.width,
          gh_mean = ms_block_join(gh_sum, shared, ms_plus()) / (float)n.width;
    if (!n.centered) g_mean = 0;
    ms_walk(row, [&](auto size, int64_t i) {
        float g[size.N], h[size.N], add[size.N];
        read_terms(size, n, row, i, mean, scale, g, h);
        ms_get_or(size, n.sum_gradient, row.begin + i, n.dtypes.s, 0.0f, add);
        for (int k = 0; k < size.N; k++) g[k] = (g[k] - g_mean - h[k] * gh_mean) * scale + add[k];
        if (n.dx != NULL) ms_put(size, n.dx, row.begin + i, n.dtypes.s, g);
        if (n.narrow != NULL) ms_put(size, n.narrow, row.begin + i, n.dtypes.narrow, g);
    });
}

/* What a row adds to the gradients of weight and bias, in some columns. */
template <class Size>
MS_DEVICE void add_row(Size size, const ms_norm_backward_args &n, int64_t at, int64_t column,
                       float *dweight, float *dbias)
{
    float mean = n.centered ? n.mean[at] : 0.0f, scale = n.scale[at];
    float d[Size::N], s[Size::N];
    ms_get(size, n.gradient, at * n.width + column, n.dtypes.y, d);
    ms_get(size, n.s, at * n.width + column, n.dtypes.s, s);
    MS_UNROLL for (int k = 0; k < Size::N; k++)
    {
        dweight[k] += d[k] * ((s[k] - mean) * scale);
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
    for (int64_t at = BLOCK_Y * args.each + THREAD_Y; at < end && column < n.width; at += 8)
        add_row(size, n, at, column, dweight, dbias);
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

MS_KERNEL(norm_columns, ms_cuda_norm_columns_call, 256)
{
    MS_SHARED(double, shared, 256);
    if (args.aligned) add_part(ms_size<8>(), args, shared);
    else add_part(ms_size<1>(), args, shared);
}

MS_KERNEL_FREE(norm_join, ms_cuda_join_call, 256) { ms_join_parts(args); }
