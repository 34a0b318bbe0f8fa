/* elementwise.h: what the elementwise kernels of a GPU get. */
#ifndef MOONSHARD_TENSOR_CUDA_ELEMENTWISE_H
#define MOONSHARD_TENSOR_CUDA_ELEMENTWISE_H

#include "tensor/elementwise.h"

/* How an operand is read where the result is written in chunks of 8 elements. */
enum {
    MS_CUDA_STRIDED, /* of the result: no chunks, every operand is read by strides */
    MS_CUDA_FLAT,    /* element i at position i, aligned for chunks */
    MS_CUDA_ONE      /* one element, or the number */
};

typedef struct ms_cuda_elementwise_call {
    ms_elementwise_args e;
    int64_t count;
    uint8_t form[4]; /* of the result, then of the operands */
} ms_cuda_elementwise_call;

#endif
