/* elementwise.cu: the elementwise kernels. */
#include "tensor/cuda/elementwise.h"

#include "tensor/cuda/device.h"
#include "tensor/cuda/gelu.h"
#include "tensor/cuda/sine.h"

/* The offsets of a position of the loop: operand 0 is the result. */
MS_DEVICE void find_place(const ms_loop &loop, int64_t position, int operands, int64_t offset[4])
{
    for (int k = 0; k < 4; k++) offset[k] = 0;
    for (uint32_t d = loop.dims; d-- > 0;) {
        int64_t at = position;
        if (d > 0) {
            at = position % loop.shape[d];
            position /= loop.shape[d];
        }
        for (int k = 0; k <= operands; k++) offset[k] += at * loop.strides[k][d];
    }
}

MS_DEVICE float read_one(const ms_elementwise_args &e, int k, int64_t at)
{
    return e.in_dtype[k] == MS_NUMBER ? (float)e.number : ms_read(e.in[k], at, e.in_dtype[k]);
}
MS_DEVICE int64_t read_whole_one(const ms_elementwise_args &e, int k, int64_t at)
{
    return e.in_dtype[k] == MS_NUMBER ? ms_whole(e.number)
                                      : ms_read_whole(e.in[k], at, e.in_dtype[k]);
}

/* Eight elements of an operand. */
MS_DEVICE void read_chunk(const ms_cuda_elementwise_call &args, int k, int64_t i, float out[8])
{
    if (args.form[k + 1] == MS_CUDA_FLAT) {
        ms_read8(args.e.in[k], i, args.e.in_dtype[k], out);
        return;
    }
    float one = read_one(args.e, k, 0);
    for (int j = 0; j < 8; j++) out[j] = one;
}

template <int operands, class F>
MS_DEVICE void run_flat(const ms_cuda_elementwise_call &args, F f, float v, float h)
{
    int64_t chunks = args.count / 8;
    for (int64_t chunk = GRID_FIRST; chunk < chunks; chunk += GRID_STEP) {
        float a[8], b[8] = { 0 }, c[8] = { 0 };
        read_chunk(args, 0, chunk * 8, a);
        if (operands > 1) read_chunk(args, 1, chunk * 8, b);
        if (operands > 2) read_chunk(args, 2, chunk * 8, c);
        for (int j = 0; j < 8; j++) a[j] = f(a[j], b[j], c[j], v, h);
        ms_write8(args.e.out, chunk * 8, args.e.out_dtype, a);
    }
    int64_t i = chunks * 8 + GRID_FIRST;
    if (i >= args.count) return;
    float a[3] = { 0, 0, 0 };
    for (int k = 0; k < operands; k++)
        a[k] = read_one(args.e, k, args.form[k + 1] == MS_CUDA_FLAT ? i : 0);
    ms_write(args.e.out, i, args.e.out_dtype, f(a[0], a[1], a[2], v, h));
}

/* Floats are computed in f32, and rounded once to the result's dtype. */
template <int operands, class F> MS_DEVICE void run(const ms_cuda_elementwise_call &args, F f)
{
    const ms_elementwise_args &e = args.e;
    float v = (float)e.value, h = (float)e.high;
    if (args.form[0] == MS_CUDA_FLAT) {
        run_flat<operands>(args, f, v, h);
        return;
    }
    for (int64_t i = GRID_FIRST; i < args.count; i += GRID_STEP) {
        int64_t at[4];
        find_place(e.loop, i, operands, at);
        float a = read_one(e, 0, at[1]), b = operands > 1 ? read_one(e, 1, at[2]) : 0,
              c = operands > 2 ? read_one(e, 2, at[3]) : 0;
        ms_write(e.out, at[0], e.out_dtype, f(a, b, c, v, h));
    }
}

/* Integers are computed in i64, modulo 2^64. */
template <int operands, class F> MS_DEVICE void run_whole(const ms_cuda_elementwise_call &args, F f)
{
    const ms_elementwise_args &e = args.e;
    int64_t v = ms_whole(e.value), h = ms_whole(e.high);
    for (int64_t i = GRID_FIRST; i < args.count; i += GRID_STEP) {
        int64_t at[4];
        find_place(e.loop, i, operands, at);
        int64_t a = read_whole_one(e, 0, at[1]), b = operands > 1 ? read_whole_one(e, 1, at[2]) : 0,
                c = operands > 2 ? read_whole_one(e, 2, at[3]) : 0;
        ms_write_whole(e.out, at[0], e.out_dtype, f(a, b, c, v, h));
    }
}

/* ------------------------------------------------------------------ functions */

MS_DEVICE float truth(bool is) { return is ? 1.0f : 0.0f; }
MS_DEVICE float greatest(float a, float b) { return b < a || ms_is_nan(a) ? a : b; }
MS_DEVICE float least(float a, float b) { return a < b || ms_is_nan(a) ? a : b; }
/* 0 for NaN, so that the gradient of |x| does not spread a NaN by itself. */
MS_DEVICE float sign_of(float x) { return truth(0 < x) - truth(x < 0); }

/* The normal distribution function. */
MS_DEVICE float gelu_erf_gate(float x) { return 0.5f + 0.5f * erff(x * 0.7071067812f); }
MS_DEVICE float gelu_erf_slope(float x)
{
    x = ms_within_16(x);
    return gelu_erf_gate(x) + x * 0.3989422804f * expf(-0.5f * x * x);
}
MS_DEVICE float silu_slope(float x)
{
    float gate = ms_sigmoid(x);
    return gate * (1.0f + x * (1.0f - gate));
}
/* Gradient of (sum |x|^p)^(1/p) = y; 0 where x or y is 0. The quotient is at most 1 and formed
 * before the power, since |x|^(p-1) alone could overflow. */
MS_DEVICE float p_norm_slope(float x, float y, float p)
{
    if (x == 0.0f || y == 0.0f) return 0.0f;
    return p == 2.0f ? x / y : copysignf(powf(fabsf(x) / y, p - 1.0f), x);
}

MS_DEVICE int64_t whole_power(int64_t base, int64_t exponent)
{
    uint64_t power_of_base = (uint64_t)base, result = 1;
    for (uint64_t e = (uint64_t)exponent; e != 0; e >>= 1, power_of_base *= power_of_base)
        if (e & 1) result *= power_of_base;
    return (int64_t)result;
}
/* The upper bound wins where low > high. */
MS_DEVICE int64_t clamped(int64_t value, int64_t low, int64_t high)
{
    int64_t at_least = value < low ? low : value;
    return at_least > high ? high : at_least;
}

/* A kernel is its formula in a, b, c, v = value and h = high. */
#define FUNCTION(name, type, formula)                                                  \
    struct name##_##type {                                                             \
        MS_DEVICE_MEMBER type operator()(type a, type b, type c, type v, type h) const \
        {                                                                              \
            (void)b, (void)c, (void)v, (void)h;                                        \
            return (type)(formula);                                                    \
        }                                                                              \
    };
#define FLOATS(operands, name, formula)                               \
    FUNCTION(name, float, formula)                                    \
    MS_KERNEL_FREE(elementwise_##name, ms_cuda_elementwise_call, 256) \
    {                                                                 \
        run<operands>(args, name##_float());                          \
    }
#define WHOLE(operands, name, formula)                          \
    FUNCTION(name, int64_t, formula)                            \
    MS_KERNEL_FREE(whole_##name, ms_cuda_elementwise_call, 256) \
    {                                                           \
        run_whole<operands>(args, name##_int64_t());            \
    }
#define U(x) ((uint64_t)(x))

/* A maximum or minimum of two equal numbers gives half of the gradient to each. NaN passes through
 * relu, clamp, maximum and minimum. The gradient of relu is 0 at 0 and for NaN; that of clamp is 1
 * at both bounds. div_backward divides twice, because c^2 would overflow above 1.8e19. */
FLOATS(1, cast, a)
FLOATS(1, neg, -a)
FLOATS(1, exp, expf(a))
FLOATS(1, log, logf(a))
FLOATS(1, sqrt, sqrtf(a))
FLOATS(1, rsqrt, 1.0f / sqrtf(a))
FLOATS(1, square, a *a)
FLOATS(1, abs, fabsf(a))
FLOATS(1, sign, sign_of(a))
FLOATS(1, relu, a < 0.0f ? 0.0f : a)
FLOATS(1, gelu, a *ms_gelu_gate(a))
FLOATS(1, gelu_erf, a *gelu_erf_gate(a))
FLOATS(1, silu, a *ms_sigmoid(a))
FLOATS(1, tanh, tanhf(a))
FLOATS(1, sigmoid, ms_sigmoid(a))
FLOATS(1, sin, ms_sine(a, 0))
FLOATS(1, cos, ms_sine(a, 1))
FLOATS(1, pow, powf(a, v))
FLOATS(1, clamp, least(greatest(a, v), h))
FLOATS(1, is_finite, truth(fabsf(a) < ms_infinity()))
FLOATS(2, add, a + v * b)
FLOATS(2, sub, a - v * b)
FLOATS(2, mul, a *b)
FLOATS(2, div, a / b)
FLOATS(2, scaled_mul, v *(a *b))
FLOATS(2, scaled_div, v *(a / b))
FLOATS(2, maximum, greatest(a, b))
FLOATS(2, minimum, least(a, b))
FLOATS(2, swiglu, a *(b *ms_sigmoid(b)))
FLOATS(2, eq, truth(a == b))
FLOATS(2, ne, truth(a != b))
FLOATS(2, lt, truth(a < b))
FLOATS(2, le, truth(a <= b))
FLOATS(2, gt, truth(a > b))
FLOATS(2, ge, truth(a >= b))
FLOATS(3, lerp, a + c * (b - a))
FLOATS(3, addcmul, a + v * (b * c))
FLOATS(3, addcdiv, a + v * (b / c))
FLOATS(3, where, a != 0.0f ? b : c)
FLOATS(2, sqrt_backward, 0.5f * b / a)
FLOATS(2, rsqrt_backward, -0.5f * b * (a * a * a))
FLOATS(2, relu_backward, 0.0f < a ? b : 0.0f)
FLOATS(2, tanh_backward, b *(1.0f - a * a))
FLOATS(2, sigmoid_backward, b *(a *(1.0f - a)))
FLOATS(2, sin_backward, b *ms_sine(a, 1))
FLOATS(2, cos_backward, -b *ms_sine(a, 0))
FLOATS(2, square_backward, 2.0f * a * b)
FLOATS(2, abs_backward, sign_of(a) * b)
FLOATS(2, gelu_backward, b *ms_gelu_slope(a))
FLOATS(2, gelu_erf_backward, b *gelu_erf_slope(a))
FLOATS(2, silu_backward, b *silu_slope(a))
FLOATS(2, pow_backward, b *(v *powf(a, v - 1.0f)))
FLOATS(2, clamp_backward, v <= a && a <= h ? b : 0.0f)
FLOATS(3, div_backward, -v *a *(b / c) / c)
FLOATS(3, maximum_backward, b < a ? c : a == b ? 0.5f * c : 0.0f)
FLOATS(3, minimum_backward, a < b ? c : a == b ? 0.5f * c : 0.0f)
FLOATS(3, swiglu_backward, c *a *silu_slope(b))
FLOATS(2, lerp_backward, a - a * b)
FLOATS(3, difference_mul, c *(b - a))
FLOATS(3, p_norm_backward, c *p_norm_slope(a, b, v))

WHOLE(1, cast, a)
WHOLE(1, neg, -U(a))
WHOLE(1, square, U(a) * U(a))
WHOLE(1, abs, a < 0 ? -U(a) : U(a))
WHOLE(1, sign, (a > 0) - (a < 0))
WHOLE(1, relu, a > 0 ? a : 0)
WHOLE(1, pow, whole_power(a, v))
WHOLE(1, clamp, clamped(a, v, h))
WHOLE(1, is_finite, 1)
WHOLE(2, add, U(a) + U(v) * U(b))
WHOLE(2, sub, U(a) - U(v) * U(b))
WHOLE(2, mul, U(a) * U(b))
WHOLE(2, maximum, a > b ? a : b)
WHOLE(2, minimum, a < b ? a : b)
WHOLE(2, eq, a == b)
WHOLE(2, ne, a != b)
WHOLE(2, lt, a < b)
WHOLE(2, le, a <= b)
WHOLE(2, gt, a > b)
WHOLE(2, ge, a >= b)
WHOLE(3, addcmul, U(a) + U(v) * U(b) * U(c))
WHOLE(3, where, a != 0 ? b : c)

/* A kernel of the lists that is missing here does not build. */
#define HAS(kernel) static_assert(sizeof(&kernel) > 0, "it is there");
#define HAS_FLOATS(name) HAS(elementwise_##name)
#define HAS_WHOLE(name) HAS(whole_##name)
MS_ELEMENTWISE_KERNELS(HAS_FLOATS)
MS_WHOLE_KERNELS(HAS_WHOLE)
