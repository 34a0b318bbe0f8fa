/* kernels.h: the inner loops of the optimizers on the CPU.
 *
 * Each loop is compiled once for every instruction set (MS_ISA_TABLE) and is chosen when a task
 * runs. */
#ifndef MOONSHARD_OPTIM_CPU_KERNELS_H
#define MOONSHARD_OPTIM_CPU_KERNELS_H

#include "optim/tasks.h"
#include "ops/cpu/isa.h"

/* Numbers of one step, the same for all elements. They are computed in f64 once a step and rounded
 * once, so that a loop has no division or power that does not depend on the element. Which of them
 * a kind reads: see the kernels. beta1 is also rho of adadelta and alpha of rmsprop. */
typedef struct ms_optimizer_scalars {
    float lr, weight_decay, sign; /* sign: -1 for maximize */
    float beta1, beta2, eps;
    /* 1 - beta, rounded once: the difference of rounded numbers has a hundred times the error. */
    float rest1, rest2;
    float step_size, root_correction; /* adam, adamax: lr / (1 - b1^t); 1 / sqrt(1 - b2^t) */
    float momentum, damped;           /* damped: 1 - dampening, 1 at the first step */
    float eta_minus, eta_plus, step_min, step_max;
    bool nesterov, has_max, centered, has_momentum, first;
} ms_optimizer_scalars;

/* One pass over n elements, all f32, no overlap. p and the states a, b, c (in the order of
 * ms_optimizer_state_name; NULL where there is none) are updated, g is only read. */
typedef void (*ms_optimizer_kernel)(const ms_optimizer_scalars *s, float *restrict p,
                                    const float *restrict g, float *restrict a, float *restrict b,
                                    float *restrict c, size_t n);

/* The loops of one instruction set. */
typedef struct ms_optimizer_kernels {
    ms_optimizer_kernel step[MS_OPTIMIZER_KINDS];
    /* The sum of |g|^p; p infinite: the maximum. NaN stays. */
    double (*sum_of_powers)(const float *g, size_t n, double p);
    void (*scale)(float *g, size_t n, float factor);
    bool (*all_finite)(const float *g, size_t n);
} ms_optimizer_kernels;

MS_ISA_TABLE(ms_optimizer_kernels, ms_optimizer_kernels)

#endif
