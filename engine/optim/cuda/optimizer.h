/* optimizer.h: what the kernels of optimizers get on a GPU. */
#ifndef MOONSHARD_OPTIM_CUDA_OPTIMIZER_H
#define MOONSHARD_OPTIM_CUDA_OPTIMIZER_H

#include "optim/tasks.h"
#include "tensor/cuda/rows.h"

/* Numbers of one step, the same for all elements: computed in f64 once a step, and rounded once. A
 * kind reads some of them. */
typedef struct ms_cuda_optimizer_scalars {
    float lr, weight_decay, sign; /* sign: -1 for maximize */
    float beta1, beta2, eps;      /* beta1 is also rho of adadelta and alpha of rmsprop */
    float rest1, rest2;           /* 1 - beta */
    float step_size, root_correction;
    float momentum, damped; /* damped: 1 - dampening, 1 at the first step */
    float eta_minus, eta_plus, step_min, step_max;
    bool nesterov, has_max, centered, has_momentum, first;
    bool skips; /* only_if is false: nothing changes */
} ms_cuda_optimizer_scalars;

/* The first kernel writes the scalars, in memory of the GPU; the second reads them. */
typedef struct ms_cuda_optimizer_call {
    ms_optimizer_args o;
    ms_cuda_optimizer_scalars *scalars;
    bool aligned;
} ms_cuda_optimizer_call;

#endif
