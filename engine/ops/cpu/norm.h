/* norm.h: inner loops of the norms. */
#ifndef MOONSHARD_OPS_CPU_NORM_H
#define MOONSHARD_OPS_CPU_NORM_H

#include "ops/cpu/isa.h"
#include "ops/norm.h"

/* Rows begin .. end - 1. backward adds what these rows contribute to the gradients of weight and
 * bias to f32 vectors, where those are not NULL; the caller clears them. */
typedef struct ms_norm_kernels {
    void (*forward)(const ms_norm_args *args, int64_t begin, int64_t end);
    void (*backward)(const ms_norm_backward_args *args, int64_t begin, int64_t end, float *dweight,
                     float *dbias);
} ms_norm_kernels;

MS_ISA_TABLE(ms_norm_kernels, ms_norm_kernels)

#endif
