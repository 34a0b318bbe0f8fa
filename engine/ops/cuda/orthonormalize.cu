/* orthonormalize.cu: the modified Gram-Schmidt process: each column is divided by its norm, then
 * its share is taken out of the later columns. A block for each matrix, in f32. */
#include "ops/cuda/orthonormalize.h"

#include "ops/cuda/device.h"

/* Turns a matrix of n x r into r contiguous columns of f32, or back. Matrices are narrow: their
 * lines stay in the nearest cache from column to column. */
MS_DEVICE void turn(const ms_orthonormalize_args &o, int64_t matrix, float *columns, bool back)
{
    int64_t first = matrix * o.n * o.r;
    for (int64_t c = 0; c < o.r; c++)
        for (int64_t i = THREAD_X; i < o.n; i += THREADS_X) {
            float *at = &columns[c * o.n + i];
            if (back) ms_write(o.x, first + i * o.r + c, o.dtype, *at);
            else *at = ms_read(o.x, first + i * o.r + c, o.dtype);
        }
}

/* Makes the column as long as 1; a column of zeros stays. Each thread touches elements of its own
 * rows only, in all columns, so nothing but the joining of sums needs a barrier. */
MS_DEVICE void scale(float *column, int64_t n, float eps, float *shared)
{
    float sum = 0;
    for (int64_t i = THREAD_X; i < n; i += THREADS_X) sum += column[i] * column[i];
    float size = sqrtf(ms_block_join(sum, shared, ms_plus())) + eps,
          factor = size == 0.0f ? 0.0f : 1.0f / size;
    for (int64_t i = THREAD_X; i < n; i += THREADS_X) column[i] *= factor;
}

/* Takes the share of a column out of the `count` (1 to 4) columns from `rest` on. */
MS_DEVICE void take_out(const float *column, float *rest, int count, int64_t n, float *shared)
{
    float share[4] = { 0 };
    for (int64_t i = THREAD_X; i < n; i += THREADS_X) {
        float here = column[i];
        for (int k = 0; k < 4; k++)
            if (k < count) share[k] += here * rest[k * n + i];
    }
    for (int k = 0; k < 4; k++)
        if (k < count) share[k] = ms_block_join(share[k], shared, ms_plus());
    for (int64_t i = THREAD_X; i < n; i += THREADS_X) {
        float here = column[i];
        for (int k = 0; k < 4; k++)
            if (k < count) rest[k * n + i] -= share[k] * here;
    }
}

MS_KERNEL(orthonormalize, ms_cuda_orthonormalize_call, 1024)
{
    MS_SHARED(float, shared, 32);
    const ms_orthonormalize_args &o = args.o;
    float *columns = args.columns + BLOCK_X * o.n * o.r;
    for (int64_t matrix = BLOCK_X; matrix < o.matrices; matrix += BLOCKS_X) {
        turn(o, matrix, columns, false);
        for (int64_t c = 0; c < o.r; c++) {
            float *column = columns + c * o.n;
            scale(column, o.n, o.eps, shared);
            for (int64_t other = c + 1; other < o.r; other += 4)
                take_out(column, columns + other * o.n, o.r - other < 4 ? (int)(o.r - other) : 4,
                         o.n, shared);
        }
        turn(o, matrix, columns, true);
    }
}
