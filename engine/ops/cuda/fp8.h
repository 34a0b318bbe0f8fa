/* fp8.h: what the kernels of 8-bit floats get on a GPU. */
#ifndef MOONSHARD_OPS_CUDA_FP8_H
#define MOONSHARD_OPS_CUDA_FP8_H

#include "ops/fp8.h"

/* partial: the greatest size that each block of the first kernel has found, as bits. found: what
 * the second kernel reads, `parts` numbers: those, or what was given. aligned: x is read in pieces
 * of 16 bytes. */
typedef struct ms_cuda_fp8_encode_call {
    ms_fp8_encode_args e;
    uint32_t *partial;
    const uint32_t *found;
    int32_t parts;
    bool aligned;
} ms_cuda_fp8_encode_call;

typedef struct ms_cuda_fp8_decode_call {
    ms_fp8_decode_args d;
} ms_cuda_fp8_decode_call;

/* partial: `parts` of each span, one span after another. */
typedef struct ms_cuda_fp8_span_call {
    ms_fp8_span_args s;
    uint32_t *partial;
    int32_t parts;
    bool aligned; /* sixteen elements from a multiple of 16 on, in both arrays */
} ms_cuda_fp8_span_call;

#endif
