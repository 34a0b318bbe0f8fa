/* fp8.h: inner loops over numbers in 8-bit floats. */
#ifndef MOONSHARD_OPS_CPU_FP8_H
#define MOONSHARD_OPS_CPU_FP8_H

#include "ops/cpu/isa.h"
#include "ops/fp8.h"

/* Numbers of dtype, f32 or bf16, and their codes, with one scale. */
typedef struct ms_fp8_numbers {
    const void *from;
    void *to;
    float scale;
    uint8_t dtype, format;
} ms_fp8_numbers;

/* Elements begin .. end - 1. most: the bits of the greatest |x|, of which those of a NaN are the
 * greatest; 0 of none. */
typedef struct ms_fp8_kernels {
    uint32_t (*most)(const ms_fp8_numbers *numbers, int64_t begin, int64_t end);
    void (*encode)(const ms_fp8_numbers *numbers, int64_t begin, int64_t end);
    void (*decode)(const ms_fp8_numbers *numbers, int64_t begin, int64_t end);
} ms_fp8_kernels;

MS_ISA_TABLE(ms_fp8_kernels, ms_fp8_kernels)

#endif
