/* softmax.h: inner loops of softmax, cross entropy and squared error. */
#ifndef MOONSHARD_OPS_CPU_SOFTMAX_H
#define MOONSHARD_OPS_CPU_SOFTMAX_H

#include "ops/cpu/isa.h"
#include "ops/softmax.h"

/* Rows are contiguous in any float dtype; sums are f32. */
typedef struct ms_softmax_kernels {
    /* Outer positions begin .. end - 1. */
    void (*forward)(const ms_softmax_args *args, int64_t begin, int64_t end);
    void (*backward)(const ms_softmax_args *args, int64_t begin, int64_t end);
    /* log(sum(exp(x))) of a row of n. */
    float (*log_sum)(ms_dtype dtype, const void *row, int64_t n);
    /* out = exp(row - log_sum) * factor; out may be row. */
    void (*spread)(ms_dtype dtype, const void *row, int64_t n, float log_sum, float factor,
                   void *out);
    /* Sum of squared differences; and factor * (a - b), and its negative, where not NULL. */
    float (*squares)(ms_dtype dtype, const void *a, const void *b, int64_t n);
    void (*difference)(ms_dtype dtype, const void *a, const void *b, int64_t n, float factor,
                       void *da, void *db);
} ms_softmax_kernels;

MS_ISA_TABLE(ms_softmax_kernels, ms_softmax_kernels)

#endif
