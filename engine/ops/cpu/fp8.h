/* fp8.h: inner loops over matrices in 8-bit floats. */
#ifndef MOONSHARD_OPS_CPU_FP8_H
#define MOONSHARD_OPS_CPU_FP8_H

#include "ops/cpu/isa.h"
#include "ops/fp8.h"

/* Elements begin .. end - 1, which are multiples of 16. most: the bits of the greatest |x|, of
 * which those of a NaN are the greatest. */
typedef struct ms_fp8_kernels {
    uint32_t (*most)(const ms_fp8_encode_args *args, int64_t begin, int64_t end);
    void (*encode)(const ms_fp8_encode_args *args, int64_t begin, int64_t end);
    void (*decode)(const ms_fp8_decode_args *args, int64_t begin, int64_t end);
} ms_fp8_kernels;

MS_ISA_TABLE(ms_fp8_kernels, ms_fp8_kernels)

#endif
