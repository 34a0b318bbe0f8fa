/* reduce.h: inner loops of the reductions on f32. */
#ifndef MOONSHARD_OPS_CPU_REDUCE_H
#define MOONSHARD_OPS_CPU_REDUCE_H

#include "ops/cpu/isa.h"
#include "ops/reduce_args.h"

#define MS_REDUCE_BLOCK 2048 /* elements that are added in f32; blocks are added in f64 */
#define MS_REDUCE_ROWS 32    /* likewise, of a column */

/* Inner loops by kind of reduction. They work in f32 within a block; callers join blocks in f64, so
 * the error of a long sum does not grow with its length. */
typedef struct ms_reduce_kernels {
    /* All of x[0 .. n-1] to one number; n <= MS_REDUCE_BLOCK, and above 0 for the greatest and the
     * least. */
    float (*row[MS_REDUCE_KINDS])(const float *x, const float *y, size_t n, float power);
    /* totals[i] takes in x[i] of each row; rows are `stride` elements apart. None for products. */
    void (*column[MS_REDUCE_KINDS])(float *totals, const float *x, int64_t stride, size_t rows,
                                    size_t n, float power);
} ms_reduce_kernels;

MS_ISA_TABLE(ms_reduce_kernels, ms_reduce_kernels)

#endif
