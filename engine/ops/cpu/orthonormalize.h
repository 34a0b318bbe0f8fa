/* orthonormalize.h: inner loops on one matrix whose columns are stored one after the other. */
#ifndef MOONSHARD_OPS_CPU_ORTHONORMALIZE_H
#define MOONSHARD_OPS_CPU_ORTHONORMALIZE_H

#include "ops/cpu/isa.h"
#include "ops/orthonormalize.h"

/* One matrix, stored as r columns of n contiguous f32 each, made orthonormal in place. */
typedef struct ms_orthonormalize_kernels {
    /* columns: r of n numbers each. */
    void (*columns)(float *columns, int64_t n, int64_t r, float eps);
} ms_orthonormalize_kernels;

MS_ISA_TABLE(ms_orthonormalize_kernels, ms_orthonormalize_kernels)

#endif
