/* elementwise.c: inner loops of the elementwise kernels, compiled once for each instruction set. */
#include "ops/cpu/elementwise.h"

#include <math.h>

#include "ops/cpu/gelu.h"

/* A kernel is its formula in a, b, c (MS_LANES each), v = value and h = high. A last part of fewer
 * elements runs through the same formula, so that a result does not depend on where its element
 * is. Compilers may contract a product and a sum into one instruction here, so the last bit may
 * differ between instruction sets. Simple formulas are bound by memory; those with an exponential,
 * logarithm, sine or error function by arithmetic. */
#define LOOP(load_b, load_c, formula)                                                          \
    const ms_vf v = ms_v_splat(s->value), h = ms_v_splat(s->high);                             \
    (void)v, (void)h, (void)pb, (void)pc;                                                      \
    size_t i = 0;                                                                              \
    for (; i + MS_LANES <= n; i += MS_LANES) {                                                 \
        ms_vf a = ms_v_load(pa + i), b = load_b(pb, i, MS_LANES), c = load_c(pc, i, MS_LANES); \
        (void)b, (void)c;                                                                      \
        ms_v_store(out + i, formula);                                                          \
    }                                                                                          \
    if (i < n) {                                                                               \
        ms_vf a = ms_v_load_part(pa + i, n - i), b = load_b(pb, i, n - i),                     \
              c = load_c(pc, i, n - i);                                                        \
        (void)b, (void)c;                                                                      \
        ms_v_store_part(out + i, formula, n - i);                                              \
    }
/* How an operand is loaded: FETCH where the kernel has it, NOTHING where its pointer may be
 * NULL. */
#define FETCH(p, i, n) ((n) == MS_LANES ? ms_v_load((p) + (i)) : ms_v_load_part((p) + (i), n))
#define NOTHING(p, i, n) ms_v_splat(0.0f)

/* A function for the table, of kernels with one, two or three operands. */
#define KERNEL(name, load_b, load_c, formula)                                             \
    static void f32_##name(float *out, const float *pa, const float *pb, const float *pc, \
                           size_t n, const ms_elementwise_scalars *s)                     \
    {                                                                                     \
        LOOP(load_b, load_c, formula)                                                     \
    }
/* What a kernel does not have is loaded by NOTHING, so the pointer may be NULL. */
#define ONE(name, formula) KERNEL(name, NOTHING, NOTHING, formula)
#define TWO(name, formula) KERNEL(name, FETCH, NOTHING, formula)
#define THREE(name, formula) KERNEL(name, FETCH, FETCH, formula)

/* 1 where the mask is set, else 0; `keep` gives x in place of 1. Masks and bits replace products,
 * which would make NaN of 0 times infinity. */
MS_VECTOR ms_vf truth(ms_vi mask) { return (ms_vf)(mask & (ms_vi)ms_v_splat(1.0f)); }
MS_VECTOR ms_vf keep(ms_vi mask, ms_vf x) { return (ms_vf)(mask & (ms_vi)x); }
/* 0 for NaN, as for both zeros, so the gradient of |x| does not spread a NaN by itself. */
MS_VECTOR ms_vf sign(ms_vf x)
{
    const ms_vf zero = ms_v_splat(0.0f);
    return truth(ms_v_less(zero, x)) - truth(ms_v_less(x, zero));
}

/* gelu(x) = x * gate(x) with the normal distribution function as gate: 0.5 (1 + erf(x / sqrt
 * 2)). */
MS_VECTOR ms_vf gelu_erf_gate(ms_vf x) { return 0.5f + 0.5f * ms_v_erf(x * 0.7071067812f); }
/* gate(x) + x * density(x), where the density is exp(-x^2 / 2) / sqrt(2 pi). From |x| = 16 on the
 * slope is 0 or 1; the bound keeps x^2 finite. */
MS_VECTOR ms_vf gelu_erf_slope(ms_vf x)
{
    x = ms_v_lesser(ms_v_splat(16.0f), ms_v_greater(ms_v_splat(-16.0f), x));
    return gelu_erf_gate(x) + x * 0.3989422804f * ms_v_exp(-0.5f * x * x);
}
/* silu(x) = x * sigmoid(x), and sigmoid' = sigmoid (1 - sigmoid). */
MS_VECTOR ms_vf silu_slope(ms_vf x)
{
    ms_vf gate = ms_v_sigmoid(x);
    return gate * (1.0f + x * (1.0f - gate));
}
/* Lane by lane through the C library: powers of any base and exponent are rare, and hard to get
 * right. It costs many times what the other kernels cost; forward has other kernels for exponents 1
 * and 2 (power_rule in ops/elementwise.c). */
MS_VECTOR ms_vf power(ms_vf x, float y)
{
    ms_vf z;
    for (int i = 0; i < MS_LANES; i++) z[i] = powf(x[i], y);
    return z;
}
/* Gradient of (sum |x|^p)^(1/p) = y; 0 where x or y is 0. p = 2 needs no power. The quotient |x| /
 * y is at most 1 and is formed before the power: |x|^(p-1) alone could overflow. */
MS_VECTOR ms_vf p_norm_slope(ms_vf x, ms_vf y, float p)
{
    ms_vf z = p == 2.0f ? x / y : ms_v_copysign(ms_v_pow_positive(ms_v_abs(x) / y, p - 1.0f), x);
    return keep(ms_v_differ(x, ms_v_splat(0.0f)) & ms_v_differ(y, ms_v_splat(0.0f)), z);
}

/* One line per kernel: its name and its formula. A maximum or minimum of two equal numbers gives
 * half of the gradient to each. NaN passes through relu, clamp, maximum and minimum, and the
 * gradient passes where relu, maximum or minimum compare a NaN. The gradient of relu is 0 at 0;
 * that of clamp is 1 at both bounds and 0 for NaN. div_backward divides twice, because c^2 would
 * overflow above 1.8e19. A kernel of another device must agree in these cases. */
ONE(cast, a)
ONE(neg, -a)
ONE(exp, ms_v_exp(a))
ONE(log, ms_v_log(a))
ONE(sqrt, ms_v_sqrt(a))
ONE(rsqrt, 1.0f / ms_v_sqrt(a))
ONE(square, a *a)
ONE(abs, ms_v_abs(a))
ONE(sign, sign(a))
ONE(relu, keep(~ms_v_less(a, ms_v_splat(0.0f)), a))
ONE(gelu, a *ms_v_gelu_gate(a))
ONE(gelu_erf, a *gelu_erf_gate(a))
ONE(silu, a *ms_v_sigmoid(a))
ONE(tanh, ms_v_tanh(a))
ONE(sigmoid, ms_v_sigmoid(a))
ONE(sin, ms_v_sin(a))
ONE(cos, ms_v_cos(a))
ONE(floor, ms_v_floor(a))
ONE(ceil, -ms_v_floor(-a))
ONE(round, ms_v_round(a))
ONE(pow, power(a, s->value))
ONE(clamp, ms_v_min(ms_v_max(a, v), h))
/* Below infinity in size: false for infinities and for NaN. */
ONE(is_finite, truth(ms_v_less(ms_v_abs(a), ms_v_splat(__builtin_inff()))))
/* `value` is 1 unless a script gives a factor. */
TWO(add, a + v * b)
TWO(sub, a - v * b)
TWO(mul, a *b)
TWO(div, a / b)
TWO(scaled_mul, v *(a *b))
TWO(scaled_div, v *(a / b))
TWO(maximum, ms_v_max(a, b))
TWO(minimum, ms_v_min(a, b))
/* a is the value and b the gate, which is silu(b). The gradient of a is the same kernel with g in
 * its place. */
TWO(swiglu, a *(b *ms_v_sigmoid(b)))
/* Comparisons give 1 or 0 in f32, which the store converts to bool. With NaN all are false but
 * ne. */
TWO(eq, truth(ms_v_equal(a, b)))
TWO(ne, truth(ms_v_differ(a, b)))
TWO(lt, truth(ms_v_less(a, b)))
TWO(le, truth(ms_v_less_equal(a, b)))
TWO(gt, truth(ms_v_less(b, a)))
TWO(ge, truth(ms_v_less_equal(b, a)))
/* The factor of addcmul and addcdiv is `value`; the product or quotient is formed first. */
THREE(lerp, a + c * (b - a))
THREE(addcmul, a + v * (b * c))
THREE(addcdiv, a + v * (b / c))
/* The mask comes as f32: 0 is false and every other number true. */
THREE(where, ms_v_select(ms_v_differ(a, ms_v_splat(0.0f)), b, c))
/* Gradients: a (and b) are what forward saved, the last operand is the incoming gradient, but for
 * div_backward and lerp_backward, which take it first. backend.h lists the operands. */
TWO(sqrt_backward, 0.5f * b / a)
TWO(rsqrt_backward, -0.5f * b * (a * a * a))
TWO(relu_backward, keep(~ms_v_less_equal(a, ms_v_splat(0.0f)), b))
TWO(tanh_backward, b *(1.0f - a * a))
TWO(sigmoid_backward, b *(a *(1.0f - a)))
TWO(sin_backward, b *ms_v_cos(a))
TWO(cos_backward, -b *ms_v_sin(a))
TWO(square_backward, 2.0f * a * b)
TWO(abs_backward, sign(a) * b)
TWO(gelu_backward, b *ms_v_gelu_slope(a))
TWO(gelu_erf_backward, b *gelu_erf_slope(a))
TWO(silu_backward, b *silu_slope(a))
TWO(pow_backward, b *(v *power(a, s->value - 1.0f)))
TWO(clamp_backward, keep(ms_v_less_equal(v, a) & ms_v_less_equal(a, h), b))
THREE(div_backward, -v *a *(b / c) / c)
THREE(maximum_backward, keep(~ms_v_less_equal(a, b), c) + keep(ms_v_equal(a, b), 0.5f * c))
THREE(minimum_backward, keep(~ms_v_less_equal(b, a), c) + keep(ms_v_equal(a, b), 0.5f * c))
THREE(swiglu_backward, c *a *silu_slope(b))
TWO(lerp_backward, a - a * b)
THREE(difference_mul, c *(b - a))
THREE(p_norm_backward, c *p_norm_slope(a, b, s->value))

/* Integers: sums and products wrap, which unsigned arithmetic does in C. One operation for each
 * element is left to the compiler's vectors: integers are no bottleneck. */
#define WHOLE(name, formula)                                                                      \
    static void i64_##name(int64_t *out, const int64_t *pa, const int64_t *pb, const int64_t *pc, \
                           size_t n, const ms_elementwise_scalars *s)                             \
    {                                                                                             \
        const int64_t v = s->whole_value, h = s->whole_high;                                      \
        (void)v, (void)h, (void)pb, (void)pc;                                                     \
        for (size_t i = 0; i < n; i++) out[i] = (int64_t)(formula);                               \
    }
/* Short names for the formulas below; U computes modulo 2^64. */
#define A pa[i]
#define B pb[i]
#define C pc[i]
#define U(x) ((uint64_t)(x))

/* By repeated squaring, modulo 2^64. The exponent is not negative: the operator refuses that. */
static inline uint64_t whole_power(int64_t base, int64_t exponent)
{
    uint64_t power_of_base = (uint64_t)base, result = 1;
    for (uint64_t e = (uint64_t)exponent; e != 0; e >>= 1, power_of_base *= power_of_base)
        if (e & 1) result *= power_of_base;
    return result;
}

/* The upper bound wins where low > high, as in the f32 kernel. */
static inline int64_t clamped(int64_t value, int64_t low, int64_t high)
{
    int64_t at_least = value < low ? low : value;
    return at_least > high ? high : at_least;
}

WHOLE(cast, A)
WHOLE(neg, -U(A))
WHOLE(square, U(A) * U(A))
/* The least i64 has no positive counterpart: its absolute value wraps to itself. */
WHOLE(abs, A < 0 ? -U(A) : U(A))
WHOLE(sign, (A > 0) - (A < 0))
WHOLE(relu, A > 0 ? A : 0)
WHOLE(pow, whole_power(A, v))
WHOLE(clamp, clamped(A, v, h))
WHOLE(is_finite, A == A)
WHOLE(add, U(A) + U(v) * U(B))
WHOLE(sub, U(A) - U(v) * U(B))
WHOLE(mul, U(A) * U(B))
WHOLE(maximum, A > B ? A : B)
WHOLE(minimum, A < B ? A : B)
WHOLE(eq, A == B)
WHOLE(ne, A != B)
WHOLE(lt, A < B)
WHOLE(le, A <= B)
WHOLE(gt, A > B)
WHOLE(ge, A >= B)
WHOLE(addcmul, U(A) + U(v) * U(B) * U(C))
WHOLE(where, A != 0 ? B : C)

#define F32_ENTRY(name) [MS_KERNEL_##name] = f32_##name,
#define I64_ENTRY(name) [MS_KERNEL_##name] = i64_##name,

const ms_elementwise_kernels MS_ISA_NAME(ms_elementwise_kernels) = {
    .f32 = { MS_ELEMENTWISE_KERNELS(F32_ENTRY) },
    .i64 = { MS_WHOLE_KERNELS(I64_ENTRY) },
};
