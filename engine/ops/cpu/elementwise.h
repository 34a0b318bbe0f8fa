/* elementwise.h: inner loops of the elementwise kernels on contiguous f32 or i64. */
#ifndef MOONSHARD_OPS_CPU_ELEMENTWISE_H
#define MOONSHARD_OPS_CPU_ELEMENTWISE_H

#include "ops/cpu/isa.h"
#include "ops/elementwise_args.h"

/* The scalar attributes of an operator in both computing types, converted once per task. */
typedef struct ms_elementwise_scalars {
    float value, high;
    int64_t whole_value, whole_high;
} ms_elementwise_scalars;

/* One kernel on n contiguous elements. Operands beyond the kernel's own number are not read. out
 * may be one of the operands. */
typedef void (*ms_elementwise_f32)(float *out, const float *a, const float *b, const float *c,
                                   size_t n, const ms_elementwise_scalars *scalars);
typedef void (*ms_elementwise_i64)(int64_t *out, const int64_t *a, const int64_t *b,
                                   const int64_t *c, size_t n,
                                   const ms_elementwise_scalars *scalars);

typedef struct ms_elementwise_kernels {
    ms_elementwise_f32 f32[MS_ELEMENTWISE_COUNT];
    ms_elementwise_i64 i64[MS_ELEMENTWISE_COUNT]; /* NULL where integers make no sense */
} ms_elementwise_kernels;

MS_ISA_TABLE(ms_elementwise_kernels, ms_elementwise_kernels)

#endif
