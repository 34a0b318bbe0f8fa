/* optimizer.h: what the kernels of optimizers get on a GPU. */
#ifndef MOONSHARD_OPTIM_CUDA_OPTIMIZER_H
#define MOONSHARD_OPTIM_CUDA_OPTIMIZER_H

#include "optim/tasks.h"
#include "ops/cuda/rows.h"

#include "exec/cuda/task.h"

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

/* The elements of a parameter are cut into pieces of so many, one for each block. */
enum { MS_CUDA_OPTIMIZER_PIECE = 8192 };

/* aligned: all arrays may be accessed in pieces of 16 bytes. */
typedef struct ms_cuda_optimizer_step {
    ms_optimizer_args o;
    bool aligned;
} ms_cuda_optimizer_step;

/* `count` steps of one kind. The first kernel writes the scalars of each, in memory of the GPU; the
 * second reads them. A single step is in the arguments; several are in `steps`, in memory of the
 * GPU, and block b works for the last one whose first[i] is at most b. */
typedef struct ms_cuda_optimizer_call {
    ms_cuda_optimizer_step one;
    const ms_cuda_optimizer_step *steps;
    const uint32_t *first;
    ms_cuda_optimizer_scalars *scalars;
    uint32_t count;
} ms_cuda_optimizer_call;

#endif
