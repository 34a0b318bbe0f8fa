/* linear.h: what the kernels of linear.cu get on a GPU. */
#ifndef MOONSHARD_OPS_CUDA_LINEAR_H
#define MOONSHARD_OPS_CUDA_LINEAR_H

#include "ops/cuda/rows.h"
#include "ops/linear.h"

#ifndef __cplusplus
/* Functions of the tasks `activation` and `linear_backward`, for others that end with one of them.
 */
void ms_cuda_run_activation(ms_cuda_work *work, const void *arguments);
void ms_cuda_run_linear_gradient(ms_cuda_work *work, const void *arguments);
#endif

typedef struct ms_cuda_activation_call {
    ms_activation_args a;
    bool aligned;
} ms_cuda_activation_call;

/* partial: [parts][width], the sums for the bias. aligned: a thread has eight columns, and not
 * one. */
typedef struct ms_cuda_linear_gradient_call {
    ms_linear_gradient_args l;
    double *partial;
    int64_t each;
    bool aligned;
} ms_cuda_linear_gradient_call;

#endif
