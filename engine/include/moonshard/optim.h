/* moonshard/optim.h: functional optimizers: one fused pass over a parameter, its gradient and its
 * state; clipping; found-inf flags.
 *
 * Invariants
 * - A step is one task on the engine's current stream. It computes in f32 whatever the dtypes of
 *   parameter and gradient.
 * - The count of steps is on the device, in the state: if `only_if` is false nothing changes, not
 *   even the count.
 * - State tensors are f32 of the parameter's shape (contiguous), count is i64 []. The caller makes
 *   them, zero-filled but for those that ms_optimizer_state_start gives another value, and names
 *   them with ms_optimizer_state_name in checkpoints.
 *
 * Formulas: those of PyTorch's functional optimizers, with their defaults. t is the count including
 * this step, g the gradient (negated if maximize), wd weight decay, added to g except in adamw. */
#ifndef MOONSHARD_OPTIM_H
#define MOONSHARD_OPTIM_H

#include "moonshard/grad.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MS_OPTIMIZER_STATES 3

typedef enum ms_optimizer_kind {
    /* With momentum: b = g at t = 1, else mu b + (1 - dampening) g; g = nesterov ? g + mu b : b;
     * p -= lr g. */
    MS_SGD,
    /* m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; amsgrad: v = max(v); p -= lr / (1 - b1^t)
     * m / (sqrt(v) / sqrt(1 - b2^t) + eps) */
    MS_ADAM,
    MS_ADAMW,   /* p *= 1 - lr wd first, then as adam without wd */
    MS_ADAGRAD, /* s += g^2; p -= lr / (1 + (t - 1) lr_decay) g / (sqrt(s) + eps) */
    /* s = rho s + (1 - rho) g^2; d = sqrt(a + eps) / sqrt(s + eps) g; a = rho a + (1 - rho) d^2;
     * p -= lr d */
    MS_ADADELTA,
    /* s = alpha s + (1 - alpha) g^2; centered: a += (1 - alpha)(g - a), r = sqrt(s - a^2) else
     * sqrt(s); r += eps; momentum: b = mu b + g / r, p -= lr b */
    MS_RMSPROP,
    /* step *= eta_plus or eta_minus as g keeps or changes its sign, clamped; where it changes g
     * = 0; p -= sign(g) step. */
    MS_RPROP,
    MS_ADAMAX, /* m as adam; u = max(b2 u, |g| + eps); p -= lr / (1 - b1^t) m / u */
    MS_OPTIMIZER_KINDS
} ms_optimizer_kind;

typedef struct ms_hyperparameters {
    double lr, weight_decay;
    double beta1, beta2, eps;
    double momentum, dampening;
    double lr_decay, initial_accumulator_value;
    double rho, alpha;
    double eta_minus, eta_plus, step_min, step_max;
    bool nesterov, maximize, amsgrad, centered;
} ms_hyperparameters;

MS_API const char *ms_optimizer_name(ms_optimizer_kind kind); /* "sgd" ... */
MS_API ms_hyperparameters ms_optimizer_defaults(ms_optimizer_kind kind);
/* MS_ERROR_ARGUMENT names the hyper-parameter that is out of range. */
MS_API ms_status ms_optimizer_check(ms_engine *engine, ms_optimizer_kind kind,
                                    const ms_hyperparameters *hyper);
/* State `index` (0 .. 2) that this kind keeps with these hyper-parameters: its name, or NULL if it
 * is not needed. */
MS_API const char *ms_optimizer_state_name(ms_optimizer_kind kind, const ms_hyperparameters *hyper,
                                           uint32_t index);
MS_API double ms_optimizer_state_start(ms_optimizer_kind kind, const ms_hyperparameters *hyper,
                                       uint32_t index);

typedef struct ms_optimizer_step {
    ms_optimizer_kind kind;
    ms_hyperparameters hyper;
    ms_tensor *parameter;                   /* contiguous, f32 or 16 bits */
    ms_tensor *gradient;                    /* same shape, any float dtype */
    ms_tensor *states[MS_OPTIMIZER_STATES]; /* NULL where the kind has none */
    ms_tensor *count;                       /* i64 [] */
    /* f32 copy of a 16-bit parameter, which is then rounded from it; NULL: rounded
     * stochastically */
    ms_tensor *master;
    ms_tensor *lr;      /* one f32 element, instead of hyper.lr; may be NULL */
    ms_tensor *only_if; /* one bool; may be NULL */
    /* Without lr: one bool, the only_if of the step before, or NULL. If it is false, the rate is
     * lr_if_lost instead of hyper.lr: a schedule has not advanced. */
    ms_tensor *counted;
    double lr_if_lost;
    ms_random random; /* for stochastic rounding */
} ms_optimizer_step;

MS_API ms_status ms_optimizer_step_param(ms_engine *engine, const ms_optimizer_step *step);

/* Scales all gradients in place so that their common p-norm (p > 0 or infinity) is at most max: by
 * min(1, max / (norm + 1e-6)). *norm: a new f32 [], the norm before; *bad (may be NULL): a new i64
 * [], the position of the first gradient with inf or nan, -1 if there is none. Gradients are
 * written only if the norm is above max; max may be infinite. */
MS_API ms_status ms_clip_norm(ms_engine *engine, ms_tensor *const *gradients, uint32_t count,
                              double max, double p, ms_tensor **norm, ms_tensor **bad);
/* Multiplies all gradients by `factor` (one f32) and sets *finite (new bool []) to whether all
 * results are finite: for loss scalers. */
MS_API ms_status ms_unscale(ms_engine *engine, ms_tensor *const *gradients, uint32_t count,
                            ms_tensor *factor, ms_tensor **finite);

#ifdef __cplusplus
}
#endif
#endif
