/* elementwise.h: what the elementwise kernels of a GPU get. */
#ifndef MOONSHARD_OPS_CUDA_ELEMENTWISE_H
#define MOONSHARD_OPS_CUDA_ELEMENTWISE_H

#include "ops/elementwise_args.h"

/* A row is the innermost dimension of the loop. Chunks of 8 elements are taken where each operand
 * is along the row, or has one element for all of it, and all accesses of chunks are aligned. The
 * rest of each row is taken one by one. */
typedef struct ms_cuda_elementwise_call {
    ms_elementwise_args e;
    int64_t units;      /* the chunks of all rows, then the elements that are left */
    int64_t chunks;     /* of all rows */
    int64_t row_chunks; /* of a row */
    uint8_t along[4];   /* whether the result, or operand k - 1, is along the row */
} ms_cuda_elementwise_call;

#endif
