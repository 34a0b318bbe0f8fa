/* linear.cu: the kernels around the product of a linear layer: its activation, and one pass over
 * its gradient. */
#include "ops/cuda/linear.h"

#include "ops/cuda/gelu.h"

/* Each element is read before it is written, so the result may be what comes in. */
MS_KERNEL_FREE(activation, ms_cuda_activation_call, 256)
{
    const ms_activation_args &a = args.a;
    ms_walk_all(a.count, args.aligned, [&](auto size, int64_t i) {
        float v[size.N];
        ms_get(size, a.before, i, a.dtype, v);
        MS_UNROLL for (int k = 0; k < size.N; k++) v[k] *= ms_gelu_gate(v[k]);
        ms_put(size, a.y, i, a.dtype, v);
    });
}

/* Some columns of a row: the gradient before the activation, which is written and added to `sum`.
 */
template <class Size>
MS_DEVICE void pass_row(Size size, const ms_linear_gradient_args &l, int64_t row, int64_t column,
                        float *sum)
{
    float v[Size::N], before[Size::N];
    ms_get(size, l.g, row * l.g_row + column, l.dtype, v);
    if (l.before != NULL) {
        ms_get(size, l.before, row * l.width + column, l.dtype, before);
        MS_UNROLL for (int k = 0; k < Size::N; k++) v[k] *= ms_gelu_slope(before[k]);
    }
    if (l.out != NULL) ms_put(size, l.out, row * l.width + column, l.dtype, v);
    MS_UNROLL for (int k = 0; k < Size::N; k++) sum[k] += v[k];
}

/* The rows of part BLOCK_Y; every eighth of them belongs to one thread. */
template <class Size>
MS_DEVICE void pass_part(Size size, const ms_cuda_linear_gradient_call &args, double *shared)
{
    const ms_linear_gradient_args &l = args.l;
    int64_t column = (BLOCK_X * MS_WARP + THREAD_X) * Size::N, end = (BLOCK_Y + 1) * args.each;
    if (end > l.rows) end = l.rows;
    double totals[Size::N] = { 0 };
    for (int64_t row = BLOCK_Y * args.each + THREAD_Y; row < end && column < l.width;) {
        /* f32 within 64 rows, then f64. */
        float sum[Size::N] = { 0 };
        for (int k = 0; k < 64 && row < end; k++, row += 8) pass_row(size, l, row, column, sum);
        MS_UNROLL for (int k = 0; k < Size::N; k++) totals[k] += (double)sum[k];
    }
    if (l.bias == NULL) return;
    MS_UNROLL for (int k = 0; k < Size::N; k++)
    {
        double total = ms_join_rows(totals[k], shared);
        if (THREAD_Y == 0 && column < l.width) args.partial[BLOCK_Y * l.width + column + k] = total;
    }
}

MS_KERNEL(linear_gradient, ms_cuda_linear_gradient_call, 256)
{
    MS_SHARED(double, shared, 256);
    if (args.aligned) pass_part(ms_size<8>(), args, shared);
    else pass_part(ms_size<1>(), args, shared);
}

MS_KERNEL_FREE(linear_join, ms_cuda_join_call, 256) { ms_join_parts(args); }
