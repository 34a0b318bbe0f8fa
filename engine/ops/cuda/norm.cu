/* norm.cu: the kernels of layer norm and RMS norm. A row is read from memory once, and then from a
 * cache; norm_gradient keeps it in registers. */
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

/* The greater of `most` and the sizes of n numbers. */
MS_DEVICE uint32_t greater_size(uint32_t most, const float *v, int n)
{
    for (int k = 0; k < n; k++) most = ms_greater_size(most, v[k]);
    return most;
}

/* get_affine(size, i, w, b) gets elements of weight and bias. Returns the greatest size that the
 * thread has written, before it is rounded: rounding keeps the order of numbers. */
template <class S, class Y, class Get>
MS_DEVICE uint32_t write_row(const ms_norm_args &n, const ms_row &row, const void *s, float mean,
                             float scale, S s_dtype, Y y_dtype, Get get_affine)
{
    uint32_t most = 0;
    ms_walk(row, [&](auto size, int64_t i) {
        float v[size.N], w[size.N], b[size.N];
        ms_get(size, s, row.begin + i, s_dtype, v);
        get_affine(size, i, w, b);
        for (int k = 0; k < size.N; k++) v[k] = (v[k] - mean) * scale * w[k] + b[k];
        ms_put(size, n.y, row.begin + i, y_dtype, v);
        if (n.most != NULL) most = greater_size(most, v, size.N);
    });
    return most;
}
MS_DEVICE uint32_t write_norm(const ms_norm_args &n, const ms_row &row, const void *s, float mean,
                              float scale)
{
    const ms_norm_dtypes &d = n.dtypes;
    uint32_t most = 0;
    if (n.weight == NULL || d.weight != d.s)
        return write_row(n, row, s, mean, scale, d.s, d.y,
                         [&](auto size, int64_t i, float *w, float *b) {
                             ms_get_or(size, n.weight, i, d.weight, 1.0f, w);
                             ms_get_or(size, n.bias, i, d.weight, 0.0f, b);
                         });
    with_dtypes(d.s, d.y, [&](auto s_dtype, auto y_dtype) {
        most = write_row(n, row, s, mean, scale, s_dtype, y_dtype,
                         [&](auto size, int64_t i, float *w, float *b) {
                             ms_get(size, n.weight, i, s_dtype, w);
                             ms_get_beside(size, n.bias, n.weight, i, s_dtype, 0.0f, b);
                         });
    });
    return most;
}

/* What the threads of a row have found, as it is stored. */
MS_DEVICE void put_most(uint32_t *to, uint32_t most, uint8_t dtype, uint32_t *shared MS_CALLED)
{
    most = ms_block_join(most, shared, ms_greater() MS_CALLER);
    if (THREAD_X == 0) *to = ms_bits(ms_rounded(ms_float(most), dtype));
}

/* RMS norm is the case of a mean of 0; its first pass runs only where there is a residual to add.
 */
MS_KERNEL_PAIRED(norm_forward, ms_cuda_norm_call, MS_CUDA_ROW_THREADS)
{
    MS_SHARED(float, shared, MS_WARP);
    MS_SHARED(uint32_t, found, MS_WARP);
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
    uint32_t most = write_norm(n, row, s, mean, scale);
    if (n.most != NULL) put_most(n.most + at, most, n.dtypes.y, found);
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

/* The dtype of the result whose greatest size is given. */
MS_DEVICE uint8_t dtype_of_most(const ms_norm_backward_args &n)
{
    return n.narrow != NULL ? n.dtypes.narrow : n.dtypes.s;
}

/* dx = scale * (g - mean of g - h * mean of g h) + sum_gradient. */
MS_KERNEL_PAIRED(norm_backward, ms_cuda_norm_backward_call, MS_CUDA_ROW_THREADS)
{
    MS_SHARED(float, shared, MS_WARP);
    MS_SHARED(uint32_t, found, MS_WARP);
    const ms_norm_backward_args &n = args.n;
    uint32_t most = 0;
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
            if (n.most != NULL) most = greater_size(most, g, size.N);
        });
    });
    if (n.most != NULL) put_most(n.most + at, most, dtype_of_most(n), found);
}

/* ------------------------------------------- backward: all gradients at once */

/* dx and the gradients of weight and bias, from one read of s and of the gradient. A row of threads
 * has one row of s at a time, and each thread eight columns of it in registers. Block BLOCK_X has
 * part BLOCK_X of the rows, THREADS_Y of them at a time. */
/* Of eight columns. */
struct terms {
    float g[8], h[8]; /* as of get_terms; both are 0 after the row's end */
};

/* The eight columns of a thread: elements from i on, of which the row has `left`; others are 0. */
struct columns {
    int64_t i;
    int32_t left;
    bool aligned;
};
template <class Dtype>
MS_DEVICE void get_columns(const void *from, const columns &c, Dtype dtype, float *out)
{
    if (c.aligned) ms_get(ms_size<8>(), from, c.i, dtype, out);
    else MS_UNROLL for (int k = 0; k < 8; k++)
        {
            out[k] = 0;
            if (k < c.left) ms_get(ms_size<1>(), from, c.i + k, dtype, out + k);
        }
}
template <class Dtype>
MS_DEVICE void put_columns(void *to, const columns &c, Dtype dtype, const float *x)
{
    if (c.aligned) ms_put(ms_size<8>(), to, c.i, dtype, x);
    else MS_UNROLL for (int k = 0; k < 8; k++)
        {
            if (k < c.left) ms_put(ms_size<1>(), to, c.i + k, dtype, x + k);
        }
}

/* g is not multiplied by the weight yet. */
MS_DEVICE void get_row(const ms_norm_backward_args &n, int64_t at, const columns &c, terms *out)
{
    const row_numbers r = numbers_of(n, at);
    with_dtypes(n.dtypes.s, n.dtypes.y, [&](auto s, auto y) {
        get_columns(n.gradient, c, y, out->g);
        get_columns(n.s, c, s, out->h);
    });
    MS_UNROLL for (int k = 0; k < 8; k++) out->h[k] =
        k < c.left ? (out->h[k] - r.mean) * r.scale : 0.0f;
}

/* The row's two sums, which all of its threads get. `shared` has two places for each warp; it may
 * be written again after the next barrier. */
MS_DEVICE void join_row(float *g_sum, float *gh_sum, float *shared MS_CALLED)
{
    int warps = THREADS_X / MS_WARP;
    *g_sum = ms_warp_join(*g_sum, ms_plus() MS_CALLER);
    *gh_sum = ms_warp_join(*gh_sum, ms_plus() MS_CALLER);
    float *row = shared + 2 * warps * THREAD_Y;
    if (LANE == 0) {
        row[2 * WARP] = *g_sum;
        row[2 * WARP + 1] = *gh_sum;
    }
    ms_barrier_of_caller();
    *g_sum = *gh_sum = 0;
    for (int warp = 0; warp < warps; warp++) {
        *g_sum += row[2 * warp];
        *gh_sum += row[2 * warp + 1];
    }
}

/* Returns the greatest size that the thread has written, before it is rounded. */
MS_DEVICE uint32_t put_dx(const ms_norm_backward_args &n, int64_t at, const columns &c,
                          float g_mean, float gh_mean, const terms &row)
{
    uint32_t most = 0;
    const float scale = n.scale[at];
    ms_with_dtype(n.dtypes.s, [&](auto s) {
        float x[8] = { 0 };
        if (n.sum_gradient != NULL) get_columns(n.sum_gradient, c, s, x);
        MS_UNROLL for (int k = 0; k < 8; k++) x[k] +=
            (row.g[k] - g_mean - row.h[k] * gh_mean) * scale;
        if (n.dx != NULL) put_columns(n.dx, c, s, x);
        if (n.narrow != NULL) put_columns(n.narrow, c, n.dtypes.narrow, x);
        for (int k = 0; k < 8 && n.most != NULL; k++)
            if (k < c.left) most = greater_size(most, x + k, 1);
    });
    return most;
}

/* What the threads have found in the block's rows: the first one's number, and 0 for the others. */
MS_DEVICE void put_mosts(const ms_norm_backward_args &n, int64_t first, int64_t end, uint32_t most,
                         uint32_t *found)
{
    int32_t thread = THREAD_Y * THREADS_X + THREAD_X, threads = THREADS_Y * THREADS_X;
    most = ms_warp_join(most, ms_greater());
    if (LANE == 0) found[thread / MS_WARP] = most;
    ms_barrier();
    most = 0;
    for (int32_t i = 0; i < threads / MS_WARP; i++) most = found[i] > most ? found[i] : most;
    most = ms_bits(ms_rounded(ms_float(most), dtype_of_most(n)));
    MS_ROLLED for (int64_t row = first + thread; row < end; row += threads) n.most[row] =
        row > first ? 0 : most;
}

/* Adds what the rows of threads hold for these columns, in their order, in f64. */
MS_DEVICE void put_sums(const ms_norm_backward_args &n, int64_t column, const float *sums,
                        double *partial, double *shared)
{
    MS_UNROLL for (int k = 0; k < 8; k++)
    {
        ms_barrier();
        shared[THREAD_Y * THREADS_X + THREAD_X] = (double)sums[k];
        ms_barrier();
        double total = 0;
        for (int y = 0; y < THREADS_Y; y++) total += shared[y * THREADS_X + THREAD_X];
        if (THREAD_Y == 0 && column + k < n.width) partial[column + k] = total;
    }
}

MS_KERNEL_PAIRED(norm_gradient, ms_cuda_norm_gradient_call, MS_CUDA_ROW_THREADS)
{
    /* Sums of rows take turns in two halves, so that one barrier does for each. */
    MS_SHARED(float, halves, 2 * MS_WARP);
    MS_SHARED(double, shared, MS_CUDA_ROW_THREADS);
    MS_SHARED(float, weights, 8 * MS_CUDA_ROW_THREADS);
    MS_SHARED(uint32_t, found, MS_WARP);
    const ms_norm_backward_args &n = args.n;
    int64_t first = BLOCK_X * args.each, end = first + args.each;
    if (end > n.rows) end = n.rows;
    columns c = { 0, (int32_t)n.width - THREAD_X * 8, args.aligned };
    uint32_t most = 0;
    float dweight[8] = { 0 }, dbias[8] = { 0 }, *w = weights + THREAD_X * 8;
    for (int k = 0; k < 8 && THREAD_Y == 0; k++)
        w[k] = n.weight != NULL && k < c.left
                   ? ms_get_one(n.weight, THREAD_X * 8 + k, n.dtypes.weight)
                   : 1.0f;
    ms_barrier();
    int turn = 0;
    MS_ROLLED for (; first < end; first += THREADS_Y, turn ^= MS_WARP)
    {
        int64_t at = first + THREAD_Y;
        bool is_mine = at < end && c.left > 0;
        terms row = { { 0 }, { 0 } };
        float g_sum = 0, gh_sum = 0;
        c.i = at * n.width + THREAD_X * 8;
        if (is_mine) get_row(n, at, c, &row);
        MS_UNROLL for (int k = 0; k < 8; k++)
        {
            dweight[k] += row.g[k] * row.h[k];
            dbias[k] += row.g[k];
            row.g[k] *= w[k];
            g_sum += row.g[k];
            gh_sum += row.g[k] * row.h[k];
        }
        join_row(&g_sum, &gh_sum, halves + turn);
        float g_mean = n.centered ? g_sum / (float)n.width : 0.0f;
        if (!is_mine) continue;
        uint32_t size = put_dx(n, at, c, g_mean, gh_sum / (float)n.width, row);
        most = size > most ? size : most;
    }
    if (n.most != NULL) put_mosts(n, BLOCK_X * args.each, end, most, found);
    double *partial = args.partial + 2 * BLOCK_X * n.width;
    put_sums(n, THREAD_X * 8, dweight, partial, shared);
    put_sums(n, THREAD_X * 8, dbias, partial + n.width, shared);
}

/* -------------------------- backward: columns of wide rows, or without a dx */

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
