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

/* Some columns of a row, from element g of the gradient and `at` of the others on: the gradient
 * before the activation, which is written and added to `sum`. most: of the sizes so far, before
 * they are rounded, which keeps the order of numbers. */
template <bool has_gelu, class Size, class Dtype>
MS_DEVICE void pass_row(Size size, Dtype dtype, const ms_linear_gradient_args &l, int64_t g,
                        int64_t at, float *sum, uint32_t *most)
{
    float v[Size::N], before[Size::N];
    ms_get(size, l.g, g, dtype, v);
    if (has_gelu) ms_get(size, l.before, at, dtype, before);
    /* The sum takes the number that is written. */
    MS_UNROLL for (int k = 0; has_gelu && k < Size::N; k++) v[k] =
        ms_mul(v[k], ms_gelu_slope(before[k]));
    if (l.out != NULL) ms_put(size, l.out, at, dtype, v);
    MS_UNROLL for (int k = 0; k < Size::N; k++) sum[k] += v[k];
    if (l.most == NULL) return;
    MS_UNROLL for (int k = 0; k < Size::N; k++) *most = ms_greater_size(*most, v[k]);
}

/* The rows of part BLOCK_Y; every eighth of them belongs to one thread. */
template <bool has_gelu, class Size, class Dtype>
MS_DEVICE void pass_rows(Size size, Dtype dtype, const ms_cuda_linear_gradient_call &args,
                         int64_t column, double *totals, uint32_t *most)
{
    const ms_linear_gradient_args &l = args.l;
    int64_t end = (BLOCK_Y + 1) * args.each;
    if (end > l.rows) end = l.rows;
    int64_t row = BLOCK_Y * args.each + THREAD_Y, g = row * l.g_row + column,
            at = row * l.width + column;
    while (row < end && column < l.width) {
        /* f32 within 64 rows, then f64. */
        float sum[Size::N] = { 0 };
        for (int k = 0; k < 64 && row < end; k++, row += 8) {
            pass_row<has_gelu>(size, dtype, l, g, at, sum, most);
            g += 8 * l.g_row;
            at += 8 * l.width;
        }
        MS_UNROLL for (int k = 0; k < Size::N; k++) totals[k] += (double)sum[k];
    }
}

/* What the block's threads have found, as it is stored; numbers that no block has are 0. */
MS_DEVICE void put_most(const ms_linear_gradient_args &l, uint32_t most, uint32_t *shared)
{
    int64_t block = BLOCK_Y * BLOCKS_X + BLOCK_X, blocks = BLOCKS_X * BLOCKS_Y,
            thread = THREAD_Y * MS_WARP + THREAD_X;
    most = ms_warp_join(most, ms_greater());
    if (THREAD_X == 0) shared[THREAD_Y] = most;
    ms_barrier();
    most = 0;
    for (int y = 0; y < 8; y++) most = shared[y] > most ? shared[y] : most;
    /* What is only read has this dtype already. */
    if (l.out != NULL) most = ms_bits(ms_rounded(ms_float(most), l.dtype));
    if (thread == 0) l.most[block] = most;
    MS_ROLLED for (int64_t i = block + (thread + 1) * blocks; i < l.most_count; i += 256 * blocks)
        l.most[i] = 0;
}

template <class Size>
MS_DEVICE void pass_part(Size size, const ms_cuda_linear_gradient_call &args, double *shared,
                         uint32_t *found)
{
    const ms_linear_gradient_args &l = args.l;
    int64_t column = (BLOCK_X * MS_WARP + THREAD_X) * Size::N;
    double totals[Size::N] = { 0 };
    uint32_t most = 0;
    ms_with_dtype(l.dtype, [&](auto dtype) {
        if (l.before != NULL) pass_rows<true>(size, dtype, args, column, totals, &most);
        else pass_rows<false>(size, dtype, args, column, totals, &most);
    });
    if (l.most != NULL) put_most(l, most, found);
    if (l.bias == NULL) return;
    MS_UNROLL for (int k = 0; k < Size::N; k++)
    {
        double total = ms_join_rows(totals[k], shared);
        if (THREAD_Y == 0 && column < l.width) args.partial[BLOCK_Y * l.width + column + k] = total;
    }
}

MS_KERNEL_IN(linear_gradient, ms_cuda_linear_gradient_call, 256, 4)
{
    MS_SHARED(double, shared, 256);
    MS_SHARED(uint32_t, found, 8);
    if (args.aligned) pass_part(ms_size<8>(), args, shared, found);
    else pass_part(ms_size<1>(), args, shared, found);
}

MS_KERNEL(linear_join, ms_cuda_join_call, 256)
{
    MS_SHARED(double, shared, 256);
    ms_join_parts(args, shared);
}
