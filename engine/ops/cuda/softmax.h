/* softmax.h: what the kernels of softmax.cu get on a GPU. */
#ifndef MOONSHARD_OPS_CUDA_SOFTMAX_H
#define MOONSHARD_OPS_CUDA_SOFTMAX_H

#include "exec/cuda/fault.h"
#include "ops/cuda/rows.h"
#include "ops/softmax.h"

/* aligned: all arrays of rows begin at multiples of 16 bytes. */
typedef struct ms_cuda_softmax_call {
    ms_softmax_args s;
    bool aligned;
} ms_cuda_softmax_call;

/* losses: [rows], the result itself where nothing is reduced. */
typedef struct ms_cuda_cross_entropy_call {
    ms_cross_entropy_args c;
    float *losses;
    ms_cuda_fault *fault;
    bool aligned;
} ms_cuda_cross_entropy_call;

/* One sum for each block of the first kernel; the second kernel adds them. */
typedef struct ms_cuda_mse_call {
    ms_mse_args m;
    double *partial;
    int64_t parts;
    bool aligned;
} ms_cuda_mse_call;

#endif
