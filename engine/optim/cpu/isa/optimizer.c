/* optimizer.c: the inner loops of the optimizers: plain loops that the compiler turns into vectors.
 *
 * Each kernel is one step of one kind; moonshard/optim.h has the formulas in symbols. sign turns
 * the gradient round for maximize. `restrict` and the fixed parameters of the kernels are what lets
 * the compiler make vectors of the loops. */
#include "optim/cpu/kernels.h"

#include <math.h>

#include "ops/cpu/vector_math.h"

/* The head of a kernel: p is the parameter, g the gradient, a, b and c the states in the order of
 * ms_optimizer_state_name. */
#define MS_STEP(name)                                                                           \
    static void name(const ms_optimizer_scalars *s, float *restrict p, const float *restrict g, \
                     float *restrict a, float *restrict b, float *restrict c, size_t n)

/* b = mu b + (1 - dampening) g; p -= lr b, or lr (g + mu b) for nesterov. Without momentum there is
 * no buffer. Weight decay is part of the gradient here, so the buffer holds it, too. */
MS_STEP(sgd)
{
    (void)b, (void)c;
    if (!s->has_momentum) {
        for (size_t i = 0; i < n; i++) p[i] -= s->lr * (s->sign * g[i] + s->weight_decay * p[i]);
        return;
    }
    /* At the first step the buffer is zero and damped is 1: the buffer becomes the gradient. */
    for (size_t i = 0; i < n; i++) {
        float grad = s->sign * g[i] + s->weight_decay * p[i];
        a[i] = s->momentum * a[i] + s->damped * grad;
        p[i] -= s->lr * (s->nesterov ? grad + s->momentum * a[i] : a[i]);
    }
}

/* Adam (Kingma and Ba 2015): m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2, and p moves by lr m' /
 * (sqrt(v') + eps), where m' and v' are divided by 1 - b1^t and 1 - b2^t, since running means that
 * begin at 0 are too small at first. Both corrections are in step_size and root_correction. amsgrad
 * (Reddi et al. 2018) takes the greatest v so far. decay: 1 - lr wd for adamw, 1 for adam; coupled:
 * weight decay that is added to the gradient. Inlined into its callers, so that the constants among
 * its parameters disappear from the loop. Each element needs one root and one division; the pass is
 * bound by memory all the same. */
static inline __attribute__((always_inline)) void adam_step(
    const ms_optimizer_scalars *s, float decay, float coupled, bool amsgrad, float *restrict p,
    const float *restrict g, float *restrict m, float *restrict v, float *restrict most, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        float grad = s->sign * g[i] + coupled * p[i];
        /* Both means are kept in registers until the parameter is updated. */
        float mean = s->beta1 * m[i] + s->rest1 * grad;
        float square = s->beta2 * v[i] + s->rest2 * grad * grad;
        m[i] = mean;
        v[i] = square;
        if (amsgrad) {
            square = most[i] > square ? most[i] : square;
            most[i] = square;
        }
        p[i] = p[i] * decay - s->step_size * mean / (sqrtf(square) * s->root_correction + s->eps);
    }
}

/* Weight decay is part of the gradient, and so of both means. */
MS_STEP(adam)
{
    if (s->has_max) adam_step(s, 1, s->weight_decay, true, p, g, a, b, c, n);
    else adam_step(s, 1, s->weight_decay, false, p, g, a, b, c, n);
}

/* Weight decay is applied to the parameter, apart from the means (Loshchilov and Hutter 2019). */
MS_STEP(adamw)
{
    /* The decay depends on the learning rate of this step, not on the corrected step size. */
    float decay = 1 - s->lr * s->weight_decay;
    if (s->has_max) adam_step(s, decay, 0, true, p, g, a, b, c, n);
    else adam_step(s, decay, 0, false, p, g, a, b, c, n);
}

/* s += g^2, never decayed, so the rate of an element only falls (Duchi et al. 2011). step_size is
 * the decayed rate. */
MS_STEP(adagrad)
{
    (void)b, (void)c;
    for (size_t i = 0; i < n; i++) {
        float grad = s->sign * g[i] + s->weight_decay * p[i];
        a[i] += grad * grad;
        p[i] -= s->step_size * grad / (sqrtf(a[i]) + s->eps);
    }
}

/* The step is scaled by the running size of earlier steps over that of gradients, so that it has
 * the unit of the parameter (Zeiler 2012). beta1 is rho. eps is inside both roots, so the first
 * steps are not 0 although b begins at 0. */
MS_STEP(adadelta)
{
    (void)c;
    for (size_t i = 0; i < n; i++) {
        float grad = s->sign * g[i] + s->weight_decay * p[i];
        a[i] = s->beta1 * a[i] + s->rest1 * grad * grad;
        float change = sqrtf(b[i] + s->eps) / sqrtf(a[i] + s->eps) * grad;
        b[i] = s->beta1 * b[i] + s->rest1 * change * change;
        p[i] -= s->lr * change;
    }
}

/* a: running mean of g^2; centered: c is that of g, and the square becomes a variance. eps is added
 * after the root. beta1 is alpha. A variance may come out slightly negative by rounding, where its
 * root would be NaN; the peers compute it the same way. */
MS_STEP(rmsprop)
{
    for (size_t i = 0; i < n; i++) {
        float grad = s->sign * g[i] + s->weight_decay * p[i];
        a[i] = s->beta1 * a[i] + s->rest1 * grad * grad;
        float square = a[i];
        /* The conditions do not depend on the element, so compilers take them out of the loop. */
        if (s->centered) {
            c[i] += s->rest1 * (grad - c[i]);
            square -= c[i] * c[i];
        }
        float change = grad / (sqrtf(square) + s->eps);
        if (s->has_momentum) {
            b[i] = s->momentum * b[i] + change;
            change = b[i];
        }
        p[i] -= s->lr * change;
    }
}

/* Only the sign of the gradient counts (Riedmiller and Braun 1993); each element has a step of its
 * own, which grows while the sign stays and shrinks when it changes. After a change the gradient
 * counts as 0: the element rests for this step, and the next sign neither grows nor shrinks its
 * step. Selections instead of branches, since the compiler makes vectors of them. */
MS_STEP(rprop)
{
    (void)c;
    for (size_t i = 0; i < n; i++) {
        float grad = s->sign * g[i] + s->weight_decay * p[i], agree = grad * a[i];
        /* The learning rate is the size of the first step only. */
        float step = s->first ? s->lr : b[i];
        float factor = agree < 0 ? s->eta_minus : 1.0f;
        factor = agree > 0 ? s->eta_plus : factor;
        step *= factor;
        float at_most = step > s->step_max ? s->step_max : step;
        step = step < s->step_min ? s->step_min : at_most;
        grad = agree < 0 ? 0 : grad;
        /* A gradient of 0, or NaN, moves nothing. */
        float change = grad < 0 ? -step : 0;
        p[i] -= grad > 0 ? step : change;
        a[i] = grad;
        b[i] = step;
    }
}

/* Adam with the infinity norm in place of the root of v: u = max(b2 u, |g| + eps). u needs no bias
 * correction. An eps above 0 inside the maximum keeps u above 0, so the division is safe. */
MS_STEP(adamax)
{
    (void)c;
    for (size_t i = 0; i < n; i++) {
        float grad = s->sign * g[i] + s->weight_decay * p[i];
        a[i] = s->beta1 * a[i] + s->rest1 * grad;
        float size = fabsf(grad) + s->eps, kept = s->beta2 * b[i];
        b[i] = kept > size ? kept : size;
        p[i] -= s->step_size * a[i] / b[i];
    }
}

/* ----------------------------------------------------------------- clipping */

/* 16 lanes, in f64 halves so that long sums keep their digits. The order of additions is written
 * out, and is the same for every instruction set. */
static double sum_of_squares(const float *g, size_t n)
{
    /* Eight lanes of f64: one register with AVX-512, two or four with less. */
    typedef double v8d __attribute__((vector_size(64)));
    v8d low = { 0 }, high = { 0 };
    size_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int j = 0; j < 8; j++) {
            low[j] += (double)g[i + (size_t)j] * (double)g[i + (size_t)j];
            high[j] += (double)g[i + 8 + (size_t)j] * (double)g[i + 8 + (size_t)j];
        }
    double sum = 0;
    for (; i < n; i++) sum += (double)g[i] * (double)g[i];
    for (int j = 0; j < 8; j++) sum += low[j] + high[j];
    return sum;
}

/* The norm of 2 has a loop of its own, as nearly all clipping uses it. A NaN ends the search for a
 * maximum. */
static double sum_of_powers(const float *g, size_t n, double p)
{
    double sum = 0;
    if (p == 2) return sum_of_squares(g, n);
    if (isinf(p)) {
        for (size_t i = 0; i < n; i++) {
            double size = fabs((double)g[i]);
            if (isnan(size)) return size;
            if (size > sum) sum = size;
        }
        return sum;
    }
    for (size_t i = 0; i < n; i++) sum += p == 1 ? fabs((double)g[i]) : pow(fabs((double)g[i]), p);
    return sum;
}

/* In place: one read and one write of each element, which bounds the speed. */
static void scale(float *g, size_t n, float factor)
{
    for (size_t i = 0; i < n; i++) g[i] *= factor;
}

/* An exponent of all ones is infinity or NaN; testing bits without a branch makes vectors. It asks
 * the whole range and does not stop at the first: nearly always all is finite. */
static bool all_finite(const float *g, size_t n)
{
    uint32_t bad = 0;
    for (size_t i = 0; i < n; i++) bad |= (ms_bits_from_float(g[i]) & 0x7f800000u) == 0x7f800000u;
    return bad == 0;
}

#define STEP(kind, name) [kind] = name,
const ms_optimizer_kernels MS_ISA_NAME(ms_optimizer_kernels) = {
    .step = { MS_OPTIMIZER_LIST(STEP) },
    .sum_of_powers = sum_of_powers,
    .scale = scale,
    .all_finite = all_finite,
};
