/* norm.h: what the kernels of the norms get on a GPU. */
#ifndef MOONSHARD_OPS_CUDA_NORM_H
#define MOONSHARD_OPS_CUDA_NORM_H

#include "ops/cuda/rows.h"
#include "ops/norm.h"

/* aligned: all rows are walked in pieces of 16 bytes. */
typedef struct ms_cuda_norm_call {
    ms_norm_args n;
    bool aligned;
} ms_cuda_norm_call;

typedef struct ms_cuda_norm_backward_call {
    ms_norm_backward_args n;
    bool aligned;
} ms_cuda_norm_backward_call;

/* partial: [parts][2][width], the sums for dweight, then those for dbias; a part has `each` rows.
 * aligned: as above. */
typedef struct ms_cuda_norm_gradient_call {
    ms_norm_backward_args n;
    double *partial;
    int64_t each;
    bool aligned;
} ms_cuda_norm_gradient_call;

/* The same; aligned: a thread has eight columns, and not one. */
typedef struct ms_cuda_norm_columns_call {
    ms_norm_backward_args n;
    double *partial;
    int64_t each;
    bool aligned;
} ms_cuda_norm_columns_call;

#endif
