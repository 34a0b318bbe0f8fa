/* optimizer.cu: the steps of parameters: one pass over each parameter, its gradient and its states.
 * Arithmetic is in f32; moonshard/optim.h has the formulas in symbols. */
#include "optim/cuda/optimizer.h"

#include "ops/cuda/device.h"

/* --------------------------------------------------------------------- scalars */

MS_DEVICE double lr_of(const ms_optimizer_args &o)
{
    bool lost = o.counted != NULL && !*o.counted;
    return o.lr != NULL ? (double)*o.lr : lost ? o.lr_if_lost : o.hyper.lr;
}

/* What depends on the step t, from 1. f32 would not do: 1 - 0.999^t would lose most of its digits
 * for small t. */
MS_DEVICE void set_corrections(const ms_optimizer_args &o, int64_t t, ms_cuda_optimizer_scalars &s)
{
    const ms_hyperparameters &h = o.hyper;
    double lr = lr_of(o);
    if (o.kind == MS_ADAGRAD) s.step_size = (float)(lr / (1 + (double)(t - 1) * h.lr_decay));
    else s.step_size = (float)(lr / (1 - pow(h.beta1, (double)t)));
    s.root_correction = (float)(1 / sqrt(1 - pow(h.beta2, (double)t)));
    s.damped = t == 1 ? 1.0f : (float)(1 - h.dampening);
    s.first = t == 1;
}

MS_DEVICE const ms_cuda_optimizer_step &step_at(const ms_cuda_optimizer_call &args, uint32_t i)
{
    return args.steps == NULL ? args.one : args.steps[i];
}

/* A thread for each step. One that is skipped leaves the count. */
MS_KERNEL_FREE(optimizer_scalars, ms_cuda_optimizer_call, 128)
{
    uint32_t i = (uint32_t)THREAD_X;
    if (i >= args.count) return;
    const ms_optimizer_args &o = step_at(args, i).o;
    const ms_hyperparameters &h = o.hyper;
    ms_cuda_optimizer_scalars s;
    s.skips = o.only_if != NULL && *o.only_if == 0;
    args.scalars[i].skips = s.skips;
    if (s.skips) return;
    int64_t t = ++*o.count;
    double first = h.beta1;
    if (o.kind == MS_RMSPROP) first = h.alpha;
    if (o.kind == MS_ADADELTA) first = h.rho;
    s.lr = (float)lr_of(o);
    s.weight_decay = (float)h.weight_decay;
    s.sign = h.maximize ? -1.0f : 1.0f;
    s.beta1 = (float)first;
    s.beta2 = (float)h.beta2;
    s.eps = (float)h.eps;
    s.rest1 = (float)(1 - first);
    s.rest2 = (float)(1 - h.beta2);
    s.momentum = (float)h.momentum;
    s.eta_minus = (float)h.eta_minus;
    s.eta_plus = (float)h.eta_plus;
    s.step_min = (float)h.step_min;
    s.step_max = (float)h.step_max;
    s.nesterov = h.nesterov;
    s.has_max = h.amsgrad;
    s.centered = h.centered;
    s.has_momentum = h.momentum != 0;
    set_corrections(o, t, s);
    args.scalars[i] = s;
}

/* ----------------------------------------------------------------------- kinds */

/* One element: p is the parameter, g the gradient, a, b and c the states in the order of
 * ms_optimizer_state_name; what a kind does not keep is 0. */
#define STEP(name)                                                                              \
    struct name##_step {                                                                        \
        MS_DEVICE_MEMBER void operator()(const ms_cuda_optimizer_scalars &s, float &p, float g, \
                                         float &a, float &b, float &c) const;                   \
    };                                                                                          \
    MS_DEVICE_MEMBER void name##_step::operator()(const ms_cuda_optimizer_scalars &s, float &p, \
                                                  float g, float &a, float &b, float &c) const

/* The gradient with weight decay in it. */
MS_DEVICE float decayed(const ms_cuda_optimizer_scalars &s, float p, float g)
{
    return s.sign * g + s.weight_decay * p;
}

/* At the first step the buffer is zero and damped is 1: the buffer becomes the gradient. */
STEP(sgd)
{
    float grad = decayed(s, p, g);
    if (s.has_momentum) {
        a = s.momentum * a + s.damped * grad;
        grad = s.nesterov ? grad + s.momentum * a : a;
    }
    p -= s.lr * grad;
}

/* Both corrections of the running means are in step_size and root_correction. decay: 1 - lr wd for
 * adamw, 1 for adam, whose weight decay is part of the gradient. */
MS_DEVICE void adam_step_of(const ms_cuda_optimizer_scalars &s, float decay, float grad, float &p,
                            float &m, float &v, float &most)
{
    m = s.beta1 * m + s.rest1 * grad;
    v = s.beta2 * v + s.rest2 * grad * grad;
    float square = v;
    if (s.has_max) {
        square = most > square ? most : square;
        most = square;
    }
    p = p * decay - s.step_size * m / (sqrtf(square) * s.root_correction + s.eps);
}
STEP(adam) { adam_step_of(s, 1.0f, decayed(s, p, g), p, a, b, c); }
STEP(adamw) { adam_step_of(s, 1.0f - s.lr * s.weight_decay, s.sign * g, p, a, b, c); }

/* step_size is the decayed rate. */
STEP(adagrad)
{
    float grad = decayed(s, p, g);
    a += grad * grad;
    p -= s.step_size * grad / (sqrtf(a) + s.eps);
}

/* beta1 is rho. */
STEP(adadelta)
{
    float grad = decayed(s, p, g);
    a = s.beta1 * a + s.rest1 * grad * grad;
    float change = sqrtf(b + s.eps) / sqrtf(a + s.eps) * grad;
    b = s.beta1 * b + s.rest1 * change * change;
    p -= s.lr * change;
}

/* a: running mean of g^2; centered: c is that of g. beta1 is alpha. */
STEP(rmsprop)
{
    float grad = decayed(s, p, g);
    a = s.beta1 * a + s.rest1 * grad * grad;
    float square = a;
    if (s.centered) {
        c += s.rest1 * (grad - c);
        square -= c * c;
    }
    float change = grad / (sqrtf(square) + s.eps);
    if (s.has_momentum) {
        b = s.momentum * b + change;
        change = b;
    }
    p -= s.lr * change;
}

/* After a change of sign the gradient counts as 0: the element rests for this step. A gradient of
 * 0, or NaN, moves nothing. The learning rate is the size of the first step only. */
STEP(rprop)
{
    float grad = decayed(s, p, g), agree = grad * a, step = s.first ? s.lr : b;
    if (agree < 0) step *= s.eta_minus;
    if (agree > 0) step *= s.eta_plus;
    float at_most = step > s.step_max ? s.step_max : step;
    step = step < s.step_min ? s.step_min : at_most;
    if (agree < 0) grad = 0;
    p -= grad > 0 ? step : grad < 0 ? -step : 0.0f;
    a = grad;
    b = step;
}

/* An eps above 0 inside the maximum keeps b above 0, so the division is safe. */
STEP(adamax)
{
    float grad = decayed(s, p, g);
    a = s.beta1 * a + s.rest1 * grad;
    float size = fabsf(grad) + s.eps, kept = s.beta2 * b;
    b = kept > size ? kept : size;
    p -= s.step_size * a / b;
}

/* -------------------------------------------------------------------- rounding */

/* To one of the two neighbours, so that the expected result is the value. Infinity and NaN are
 * converted as they are, since a carry would change them. */
MS_DEVICE uint16_t bf16_stochastic(float value, uint32_t draw)
{
    uint32_t bits = ms_bits(value);
    bool finite = (bits & 0x7f800000u) != 0x7f800000u;
    return finite ? (uint16_t)((bits + (draw & 0xffffu)) >> 16) : ms_bf16_narrow(value);
}
/* Subnormal numbers of f16 and those that would leave its range are rounded to the nearest. */
MS_DEVICE uint16_t f16_stochastic(float value, uint32_t draw)
{
    uint32_t moved = ms_bits(value) + (draw & 0x1fffu);
    bool cut = fabsf(value) >= 6.2e-5f && fabsf(ms_float(moved)) < 65504.0f;
    return ms_f16_narrow(cut ? ms_float(moved & ~0x1fffu) : value);
}
/* A 16-bit number as f32, which rounds to itself. */
MS_DEVICE float rounded_of(const ms_optimizer_args &o, float value, uint32_t draw)
{
    return o.dtype == MS_BF16 ? ms_bf16_wide(bf16_stochastic(value, draw))
                              : ms_f16_wide(f16_stochastic(value, draw));
}

/* Element i takes word i % 4 of the Philox block i / 4. */
MS_DEVICE void draw_block(const ms_optimizer_args &o, int64_t i, uint32_t draws[4])
{
    ms_philox(o.random.seed, o.random.step << 32 | o.random.draw, (uint64_t)i / 4, draws);
}
MS_DEVICE void round_all(ms_size<8>, const ms_optimizer_args &o, int64_t i, float *p)
{
    uint32_t low[4], high[4];
    draw_block(o, i, low);
    draw_block(o, i + 4, high);
    MS_UNROLL for (int k = 0; k < 4; k++)
    {
        p[k] = rounded_of(o, p[k], low[k]);
        p[k + 4] = rounded_of(o, p[k + 4], high[k]);
    }
}
MS_DEVICE void round_all(ms_size<1>, const ms_optimizer_args &o, int64_t i, float *p)
{
    uint32_t draws[4];
    draw_block(o, i, draws);
    int at = (int)(i % 4);
    uint32_t draw = at < 2 ? (at == 0 ? draws[0] : draws[1]) : (at == 2 ? draws[2] : draws[3]);
    p[0] = rounded_of(o, p[0], draw);
}

/* ------------------------------------------------------------------------ pass */

template <class Size>
MS_DEVICE void store(Size size, const ms_optimizer_args &o, int64_t i, float *p)
{
    if (o.dtype != MS_F32 && o.master != NULL) ms_put(size, o.master, i, MS_F32, p);
    if (o.dtype != MS_F32 && o.master == NULL) round_all(size, o, i, p);
    ms_put(size, o.parameter, i, (uint8_t)o.dtype, p);
    if (o.cast != NULL) ms_put(size, o.cast, i, (uint8_t)o.cast_dtype, p);
}

/* The last step whose first block is at most this one; empty parameters before it have the same. */
MS_DEVICE uint32_t find_step(const ms_cuda_optimizer_call &args)
{
    uint32_t low = 0, high = args.count;
    while (high - low > 1) {
        uint32_t middle = (low + high) / 2;
        if (args.first[middle] <= (uint32_t)BLOCK_X) low = middle;
        else high = middle;
    }
    return low;
}

/* A piece of a parameter, as a row. */
MS_DEVICE ms_row piece_of(const ms_optimizer_args &o, int64_t piece, bool aligned)
{
    ms_row row;
    int64_t rest = o.elements - piece * MS_CUDA_OPTIMIZER_PIECE;
    row.begin = piece * MS_CUDA_OPTIMIZER_PIECE;
    row.width = rest < MS_CUDA_OPTIMIZER_PIECE ? rest : (int64_t)MS_CUDA_OPTIMIZER_PIECE;
    row.skew = 0;
    row.aligned = aligned;
    return row;
}

/* A master is stepped and the parameter rounded from it: the parameter's own digits are not read.
 */
template <class Step> MS_DEVICE void run(const ms_cuda_optimizer_call &args, Step step)
{
    uint32_t at = args.steps == NULL ? 0 : find_step(args);
    int64_t first = args.steps == NULL ? 0 : (int64_t)args.first[at];
    const ms_cuda_optimizer_scalars s = args.scalars[at];
    if (s.skips) return;
    const ms_optimizer_args o = step_at(args, at).o;
    ms_walk(piece_of(o, BLOCK_X - first, step_at(args, at).aligned), [&](auto size, int64_t k) {
        float p[size.N], g[size.N], a[size.N], b[size.N], c[size.N];
        int64_t i = k + (BLOCK_X - first) * MS_CUDA_OPTIMIZER_PIECE;
        /* What has to be converted comes last, so that all loads are under way by then. */
        ms_get_or(size, o.states[0], i, MS_F32, 0.0f, a);
        ms_get_or(size, o.states[1], i, MS_F32, 0.0f, b);
        ms_get_or(size, o.states[2], i, MS_F32, 0.0f, c);
        if (o.master != NULL) ms_get(size, o.master, i, MS_F32, p);
        else ms_get(size, o.parameter, i, (uint8_t)o.dtype, p);
        ms_get(size, o.gradient, i, (uint8_t)o.gradient_dtype, g);
        MS_UNROLL for (int e = 0; e < size.N; e++) step(s, p[e], g[e], a[e], b[e], c[e]);
        if (o.states[0] != NULL) ms_put(size, o.states[0], i, MS_F32, a);
        if (o.states[1] != NULL) ms_put(size, o.states[1], i, MS_F32, b);
        if (o.states[2] != NULL) ms_put(size, o.states[2], i, MS_F32, c);
        store(size, o, i, p);
    });
}

#define KERNEL(kind, name) \
    MS_KERNEL_FREE(optimizer_##name, ms_cuda_optimizer_call, 256) { run(args, name##_step()); }
MS_OPTIMIZER_LIST(KERNEL)
