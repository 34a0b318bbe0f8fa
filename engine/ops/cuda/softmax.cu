/* softmax.cu: the kernels of softmax, log-softmax, cross entropy and squared error. */
#include "ops/cuda/softmax.h"

#include "ops/cuda/device.h"

/* ------------------------------------------------------- sums of exponentials */

/* The greatest element so far, and the sum of exp(x - most). One pass over a row suffices: the sum
 * is scaled when a greater element comes. NaN is passed over in `most` and stays in `total`. */
struct exp_sum {
    float most, total;
};
MS_DEVICE exp_sum no_exp_sum(void)
{
    exp_sum s;
    s.most = -ms_infinity();
    s.total = 0;
    return s;
}
/* What is subtracted before an exponential. Infinity minus infinity would be NaN where a thread has
 * met nothing but -infinity. */
MS_DEVICE float shift_of(float most) { return most == -ms_infinity() ? 0.0f : most; }

/* The greatest of some elements is found before their exponentials are added. */
MS_DEVICE float raise_most(exp_sum &s, float most)
{
    float shift = shift_of(most);
    if (most > s.most) s.total *= expf(s.most - shift);
    s.most = most;
    return shift;
}
MS_DEVICE void add_exp(exp_sum &s, float v)
{
    float shift = raise_most(s, v > s.most ? v : s.most);
    s.total += expf(v - shift);
}
MS_DEVICE void add_chunk(exp_sum &s, const void *x, int64_t i, uint8_t dtype)
{
    float v[8], most = s.most;
    ms_read8(x, i, dtype, v);
    for (int k = 0; k < 8; k++) most = fmaxf(v[k], most);
    float shift = raise_most(s, most);
    for (int k = 0; k < 8; k++) s.total += expf(v[k] - shift);
}
MS_DEVICE void add_part(exp_sum &s, const void *x, int64_t i, int64_t end, uint8_t dtype)
{
    float most = s.most;
    MS_ROLLED for (int64_t k = i; k < end; k++)
    {
        float v = ms_get_one(x, k, dtype);
        most = v > most ? v : most;
    }
    float shift = raise_most(s, most);
    MS_ROLLED for (int64_t k = i; k < end; k++) s.total += expf(ms_get_one(x, k, dtype) - shift);
}

/* Of all threads of the row. A row of -infinity alone gives NaN, as the quotient 0 / 0 does. */
MS_DEVICE exp_sum join_exps(exp_sum s, float *shared)
{
    float most = ms_block_join(s.most, shared, ms_greater());
    float part = s.total * expf(s.most - most);
    s.total = ms_block_join(part, shared, ms_plus());
    s.most = most;
    return s;
}

MS_DEVICE exp_sum sum_row(const ms_row &row, const void *x, uint8_t dtype, float *shared)
{
    exp_sum s = no_exp_sum();
    ms_with_dtype(dtype, [&](auto known) {
        ms_walk_chunks(
            row, [&](int64_t i) { add_chunk(s, x, row.begin + i, known); },
            [&](int64_t i, int64_t end) { add_part(s, x, row.begin + i, row.begin + end, known); });
    });
    return join_exps(s, shared);
}

/* ------------------------------------------------------- softmax, last dimension */

/* exp(x - shift) * factor, or x - shift for the logarithm: the logarithm of the sum is part of the
 * shift then. */
MS_DEVICE float spread(float x, float shift, float factor, bool logarithm)
{
    return logarithm ? x - shift : expf(x - shift) * factor;
}
/* y (g - total), or g - exp(y) total for the logarithm. */
MS_DEVICE float slope(float y, float g, float total, bool logarithm)
{
    return logarithm ? g - expf(y) * total : y * (g - total);
}

MS_KERNEL_IN(softmax_rows, ms_cuda_softmax_call, MS_CUDA_ROW_THREADS, 4)
{
    MS_SHARED(float, shared, MS_WARP);
    const ms_softmax_args &a = args.s;
    int64_t at = BLOCK_X * THREADS_Y + THREAD_Y;
    if (at >= a.outer) return;
    /* Chunks of the 16-bit array are chunks of the f32 one. */
    ms_row row = ms_skewed_row_of(at, a.n, a.dtype, args.aligned);
    exp_sum s = sum_row(row, a.x, a.dtype, shared);
    float shift = a.logarithm ? s.most + logf(s.total) : s.most, factor = 1.0f / s.total;
    ms_with_dtypes(a.dtype, a.y_dtype, [&](auto dtype, auto y_dtype) {
        ms_walk(row, [&](auto size, int64_t i) {
            float v[size.N];
            ms_get(size, a.x, row.begin + i, dtype, v);
            for (int k = 0; k < size.N; k++) v[k] = spread(v[k], shift, factor, a.logarithm);
            ms_put(size, a.y, row.begin + i, y_dtype, v);
        });
    });
}

MS_KERNEL_IN(softmax_backward_rows, ms_cuda_softmax_call, MS_CUDA_ROW_THREADS, 4)
{
    MS_SHARED(float, shared, MS_WARP);
    const ms_softmax_args &a = args.s;
    int64_t at = BLOCK_X * THREADS_Y + THREAD_Y;
    if (at >= a.outer) return;
    ms_row row = ms_skewed_row_of(at, a.n, a.dtype, args.aligned);
    float total = 0;
    ms_with_dtype(a.y_dtype, [&](auto y_dtype) {
        if (a.logarithm)
            ms_walk(row, [&](auto size, int64_t i) {
                float g[size.N];
                ms_get(size, a.gradient, row.begin + i, y_dtype, g);
                for (int k = 0; k < size.N; k++) total += g[k];
            });
        else
            ms_walk(row, [&](auto size, int64_t i) {
                float y[size.N], g[size.N];
                ms_get(size, a.x, row.begin + i, y_dtype, y);
                ms_get(size, a.gradient, row.begin + i, y_dtype, g);
                for (int k = 0; k < size.N; k++) total += g[k] * y[k];
            });
    });
    total = ms_block_join(total, shared, ms_plus());
    ms_with_dtypes(a.dtype, a.y_dtype, [&](auto dtype, auto y_dtype) {
        ms_walk(row, [&](auto size, int64_t i) {
            float y[size.N], g[size.N];
            ms_get(size, a.x, row.begin + i, y_dtype, y);
            ms_get(size, a.gradient, row.begin + i, y_dtype, g);
            for (int k = 0; k < size.N; k++) y[k] = slope(y[k], g[k], total, a.logarithm);
            ms_put(size, a.y, row.begin + i, dtype, y);
        });
    });
}

/* ----------------------------------------------------- softmax, other dimensions */

MS_KERNEL_FREE(softmax_columns, ms_cuda_softmax_call, 256)
{
    const ms_softmax_args &a = args.s;
    for (int64_t at = GRID_FIRST; at < a.outer * a.inner; at += GRID_STEP) {
        int64_t begin = at / a.inner * a.n * a.inner + at % a.inner, end = begin + a.n * a.inner;
        exp_sum s = no_exp_sum();
        for (int64_t i = begin; i < end; i += a.inner) add_exp(s, ms_get_one(a.x, i, a.dtype));
        float shift = a.logarithm ? s.most + logf(s.total) : s.most, factor = 1.0f / s.total;
        for (int64_t i = begin; i < end; i += a.inner) {
            float v = spread(ms_get_one(a.x, i, a.dtype), shift, factor, a.logarithm);
            ms_put(ms_size<1>(), a.y, i, a.y_dtype, &v);
        }
    }
}

MS_KERNEL_FREE(softmax_backward_columns, ms_cuda_softmax_call, 256)
{
    const ms_softmax_args &a = args.s;
    for (int64_t at = GRID_FIRST; at < a.outer * a.inner; at += GRID_STEP) {
        int64_t begin = at / a.inner * a.n * a.inner + at % a.inner, end = begin + a.n * a.inner;
        float total = 0;
        for (int64_t i = begin; i < end; i += a.inner) {
            float g = ms_get_one(a.gradient, i, a.y_dtype);
            total += a.logarithm ? g : g * ms_get_one(a.x, i, a.y_dtype);
        }
        for (int64_t i = begin; i < end; i += a.inner) {
            float y = ms_get_one(a.x, i, a.y_dtype), g = ms_get_one(a.gradient, i, a.y_dtype);
            float v = slope(y, g, total, a.logarithm);
            ms_put(ms_size<1>(), a.y, i, a.dtype, &v);
        }
    }
}

/* --------------------------------------------------------------- cross entropy */

/* loss = log(sum of exp(x)) - x[target]. An ignored row has a loss and a log_sum of 0. */
MS_KERNEL_IN(cross_entropy_rows, ms_cuda_cross_entropy_call, MS_CUDA_ROW_THREADS, 4)
{
    MS_SHARED(float, shared, MS_WARP);
    const ms_cross_entropy_args &c = args.c;
    int64_t at = BLOCK_X * THREADS_Y + THREAD_Y;
    if (at >= c.rows) return;
    int64_t target = ms_read_whole(c.target, at, c.target_dtype);
    bool is_class = target >= 0 && target < c.classes;
    float loss = 0, log_sum = 0;
    if (target != c.ignore_index && is_class) {
        ms_row row = ms_skewed_row_of(at, c.classes, c.dtype, args.aligned);
        exp_sum s = sum_row(row, c.logits, c.dtype, shared);
        log_sum = s.most + logf(s.total);
        loss = log_sum - ms_get_one(c.logits, row.begin + target, c.dtype);
    }
    if (THREAD_X != 0) return;
    args.losses[at] = loss;
    if (c.log_sum != NULL) c.log_sum[at] = log_sum;
    if (target != c.ignore_index && !is_class)
        ms_note_fault(args.fault, at, target, c.classes, c.ignore_index);
}

/* One block adds the losses, in f64. The mean is over the rows that are not ignored: NaN where
 * there are none. */
MS_KERNEL(cross_entropy_loss, ms_cuda_cross_entropy_call, MS_CUDA_ROW_THREADS)
{
    MS_SHARED(double, shared, MS_WARP);
    const ms_cross_entropy_args &c = args.c;
    double sum = 0, counted = 0;
    for (int64_t at = THREAD_X; at < c.rows; at += THREADS_X) {
        sum += (double)args.losses[at];
        counted += ms_read_whole(c.target, at, c.target_dtype) != c.ignore_index ? 1.0 : 0.0;
    }
    sum = ms_block_join(sum, shared, ms_plus());
    counted = ms_block_join(counted, shared, ms_plus());
    if (THREAD_X != 0) return;
    bool mean = c.reduction == MS_REDUCE_MEAN;
    if (c.share != NULL) *c.share = mean ? (float)(1.0 / counted) : 1.0f;
    if (c.reduction != MS_REDUCE_NONE) *c.loss = (float)(mean ? sum / counted : sum);
}

/* (softmax - one at the target) * factor. Each element is read before it is written, so the result
 * may be the logits. */
MS_KERNEL_IN(cross_entropy_gradient, ms_cuda_cross_entropy_call, MS_CUDA_ROW_THREADS, 4)
{
    const ms_cross_entropy_args &c = args.c;
    int64_t at = BLOCK_X * THREADS_Y + THREAD_Y;
    if (at >= c.rows) return;
    int64_t target = ms_read_whole(c.target, at, c.target_dtype);
    bool ignored = target == c.ignore_index;
    ms_row row = ms_skewed_row_of(at, c.classes, c.dtype, args.aligned);
    float log_sum = c.log_sum[at];
    float factor = c.gradient[c.reduction == MS_REDUCE_NONE ? at : 0] * *c.share;
    ms_with_dtype(c.dtype, [&](auto dtype) {
        ms_walk(row, [&](auto size, int64_t i) {
            float v[size.N];
            ms_get(size, c.logits, row.begin + i, dtype, v);
            int hit = target >= i && target < i + size.N ? (int)(target - i) : -1;
            for (int k = 0; k < size.N; k++) {
                float x = expf(v[k] - log_sum);
                v[k] = ignored ? 0.0f : (k == hit ? x - 1.0f : x) * factor;
            }
            ms_put(size, c.dlogits, row.begin + i, dtype, v);
        });
    });
}

/* --------------------------------------------------------------- squared error */

MS_KERNEL(mse_parts, ms_cuda_mse_call, 256)
{
    MS_SHARED(double, shared, MS_WARP);
    const ms_mse_args &m = args.m;
    double total = 0;
    ms_walk_all(m.count, args.aligned, [&](auto size, int64_t i) {
        float a[size.N], b[size.N];
        ms_get(size, m.a, i, m.dtype, a);
        ms_get(size, m.b, i, m.dtype, b);
        for (int k = 0; k < size.N; k++) total += (double)((a[k] - b[k]) * (a[k] - b[k]));
    });
    total = ms_block_join(total, shared, ms_plus());
    if (THREAD_X == 0) args.partial[BLOCK_X] = total;
}

/* One warp. 0 / 0 is NaN where there are no elements. */
MS_KERNEL(mse_loss, ms_cuda_mse_call, MS_WARP)
{
    double sum = 0;
    for (int64_t part = THREAD_X; part < args.parts; part += MS_WARP) sum += args.partial[part];
    sum = ms_warp_join(sum, ms_plus());
    float loss = (float)(sum / (double)args.m.count);
    if (THREAD_X == 0) ms_put(ms_size<1>(), args.m.loss, 0, args.m.loss_dtype, &loss);
}

MS_KERNEL_FREE(mse_gradient, ms_cuda_mse_call, 256)
{
    const ms_mse_args &m = args.m;
    float factor = (float)(2.0 * (double)ms_get_one(m.gradient, 0, m.loss_dtype) / (double)m.count);
    ms_walk_all(m.count, args.aligned, [&](auto size, int64_t i) {
        float a[size.N], b[size.N];
        ms_get(size, m.a, i, m.dtype, a);
        ms_get(size, m.b, i, m.dtype, b);
        for (int k = 0; k < size.N; k++) {
            a[k] = (a[k] - b[k]) * factor;
            b[k] = -a[k];
        }
        if (m.da != NULL) ms_put(size, m.da, i, m.dtype, a);
        if (m.db != NULL) ms_put(size, m.db, i, m.dtype, b);
    });
}

/* ------------------------------------- loss and gradient of logits in place */

/* One block. In f16 a row's slope times 1 / counted could be too small, so it is multiplied by a
 * power of two of at least `counted` as well. */
MS_KERNEL(cross_entropy_shares, ms_cuda_cross_entropy_call, MS_CUDA_ROW_THREADS)
{
    MS_SHARED(double, shared, MS_WARP);
    const ms_cross_entropy_args &c = args.c;
    double counted = 0, power = 1;
    for (int64_t at = THREAD_X; at < c.rows; at += THREADS_X) {
        int64_t target = ms_read_whole(c.target, at, c.target_dtype);
        if (target == c.ignore_index) continue;
        counted += 1.0;
        if (target < 0 || target >= c.classes)
            ms_note_fault(args.fault, at, target, c.classes, c.ignore_index);
    }
    counted = ms_block_join(counted, shared, ms_plus());
    if (THREAD_X != 0) return;
    double share = c.reduction == MS_REDUCE_MEAN ? 1.0 / counted : 1.0;
    while (c.dtype == MS_F16 && power * share < 1.0) power *= 2.0;
    c.share[0] = (float)(power * share);
    c.share[1] = (float)(1.0 / power);
}

/* The thread that meets the target's logit writes the loss: others may have written over their part
 * of the row by then. */
MS_KERNEL_IN(cross_entropy_over_logits, ms_cuda_cross_entropy_call, MS_CUDA_ROW_THREADS, 4)
{
    MS_SHARED(float, shared, MS_WARP);
    const ms_cross_entropy_args &c = args.c;
    int64_t at = BLOCK_X * THREADS_Y + THREAD_Y;
    if (at >= c.rows) return;
    int64_t target = ms_read_whole(c.target, at, c.target_dtype);
    bool ignored = target == c.ignore_index || target < 0 || target >= c.classes;
    ms_row row = ms_skewed_row_of(at, c.classes, c.dtype, args.aligned);
    exp_sum s = no_exp_sum();
    if (!ignored) s = sum_row(row, c.logits, c.dtype, shared);
    float log_sum = s.most + logf(s.total), factor = *c.share;
    if (ignored && THREAD_X == 0) c.loss[at] = 0;
    if (c.dlogits == NULL) {
        if (!ignored && THREAD_X == 0)
            c.loss[at] = log_sum - ms_get_one(c.logits, row.begin + target, c.dtype);
        return;
    }
    ms_with_dtype(c.dtype, [&](auto dtype) {
        ms_walk(row, [&](auto size, int64_t i) {
            float v[size.N];
            ms_get(size, c.dlogits, row.begin + i, dtype, v);
            int hit = !ignored && target >= i && target < i + size.N ? (int)(target - i) : -1;
            MS_UNROLL for (int k = 0; k < size.N; k++)
            {
                float x = expf(v[k] - log_sum);
                if (k == hit) {
                    c.loss[at] = log_sum - v[k];
                    x -= 1.0f;
                }
                v[k] = ignored ? 0.0f : x * factor;
            }
            ms_put(size, c.dlogits, row.begin + i, dtype, v);
        });
    });
}
