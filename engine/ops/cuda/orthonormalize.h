/* orthonormalize.h: what the kernel that makes columns orthonormal gets on a GPU. */
#ifndef MOONSHARD_OPS_CUDA_ORTHONORMALIZE_H
#define MOONSHARD_OPS_CUDA_ORTHONORMALIZE_H

#include "ops/orthonormalize.h"

/* columns: room for a matrix of f32 for each block. */
typedef struct ms_cuda_orthonormalize_call {
    ms_orthonormalize_args o;
    float *columns;
} ms_cuda_orthonormalize_call;

#endif
