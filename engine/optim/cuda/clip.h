/* clip.h: what the kernels of clipping get on a GPU. */
#ifndef MOONSHARD_OPTIM_CUDA_CLIP_H
#define MOONSHARD_OPTIM_CUDA_CLIP_H

#include "optim/tasks.h"
#include "ops/cuda/rows.h"

/* Gradients are cut into pieces of so many elements, one for each block. Each gradient begins a new
 * piece, so where they are cut depends on shapes only. */
enum { MS_CUDA_CLIP_PIECE = 16384 };

/* sums: one for each piece. */
typedef struct ms_cuda_measure_call {
    ms_measure_args m;
    double *sums;
} ms_cuda_measure_call;

#endif
