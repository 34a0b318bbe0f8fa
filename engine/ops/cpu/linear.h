/* linear.h: inner loops around the product of a linear layer. */
#ifndef MOONSHARD_OPS_CPU_LINEAR_H
#define MOONSHARD_OPS_CPU_LINEAR_H

#include "ops/cpu/isa.h"
#include "ops/linear.h"

/* activate: elements begin .. end - 1. gradient: rows begin .. end - 1; their column sums are added
 * to `sums` (f32), or left out where it is NULL. Callers pass few rows at a time, so that f32 sums
 * stay accurate. */
typedef struct ms_linear_kernels {
    void (*activate)(const ms_activation_args *args, int64_t begin, int64_t end);
    void (*gradient)(const ms_linear_gradient_args *args, int64_t begin, int64_t end, float *sums);
} ms_linear_kernels;

MS_ISA_TABLE(ms_linear_kernels, ms_linear_kernels)

#endif
