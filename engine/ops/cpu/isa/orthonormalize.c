/* orthonormalize.c: the modified Gram-Schmidt process: each column is divided by its norm, then its
 * share is taken out of the later columns. */
#include "ops/cpu/orthonormalize.h"

#include "ops/cpu/vector_math.h"

/* 64 partial sums, so that the order of additions is the same on every instruction set. The
 * compiler may contract a product and a sum into one instruction: then the last bits differ from
 * those of a set without that instruction. Columns of a gradient's factor are read r times each,
 * from a cache where the matrix fits one. */
MS_VECTOR float dot(const float *a, const float *b, size_t n)
{
    ms_sum64 total = { { { 0 } } };
    size_t i = 0;
    for (; i + MS_SUM_LANES <= n; i += MS_SUM_LANES)
        for (size_t k = 0; k < MS_SUMS; k++)
            total.of[k] += ms_v_load(a + i + k * MS_LANES) * ms_v_load(b + i + k * MS_LANES);
    ms_sum64 all = total; /* of a copy, so that `total` stays in registers */
    size_t k = 0;
    for (; i + MS_LANES <= n; i += MS_LANES, k++) all.of[k] += ms_v_load(a + i) * ms_v_load(b + i);
    if (i < n) all.of[k] += ms_v_load_part(a + i, n - i) * ms_v_load_part(b + i, n - i);
    return ms_v_sum64(all);
}

/* The modified process: the share is taken out of all later columns at once, which loses far less
 * orthogonality in f32 than to subtract from the original column. eps keeps a column of zeros
 * finite; with an eps of 0 it stays zero. It must be serial over columns: the dot products and
 * subtractions of one column may run on many threads, but not those of two columns at a time. */
static void columns(float *columns, int64_t n, int64_t r, float eps)
{
    size_t length = (size_t)n;
    for (int64_t c = 0; c < r; c++) {
        float *column = columns + c * n, size = __builtin_sqrtf(dot(column, column, length)) + eps,
              factor = size == 0.0f ? 0.0f : 1.0f / size;
        for (size_t i = 0; i < length; i++) column[i] *= factor;
        /* The later columns are changed now, so each of them sees the effect of this one before its
         * own turn. */
        for (int64_t other = c + 1; other < r; other++) {
            float *behind = columns + other * n, share = dot(column, behind, length);
            for (size_t i = 0; i < length; i++) behind[i] -= share * column[i];
        }
    }
}

const ms_orthonormalize_kernels MS_ISA_NAME(ms_orthonormalize_kernels) = { columns };
