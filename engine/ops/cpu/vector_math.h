/* vector_math.h: exp, log, tanh, sin, erf and friends on MS_LANES lanes of f32, for the files of
 * isa/.
 *
 * Every function is a polynomial on a reduced range (minimax coefficients, fitted for this file in
 * 40 digits and rounded to f32) and gives the same bits on every instruction set unless the
 * compiler contracts multiply and add: a file that needs equal bits turns this off for itself (see
 * isa/random.c). Errors are against f64, with and without contraction; tests/unit/vector_math.c
 * holds them to what is stated. Threads may flush subnormal numbers to 0; what is said about them
 * holds where they do not. NaN gives NaN everywhere. C has no vector `?:` before gcc 13, hence
 * ms_v_select. */
#ifndef MOONSHARD_OPS_CPU_VECTOR_MATH_H
#define MOONSHARD_OPS_CPU_VECTOR_MATH_H

#include <math.h>
#include <string.h>

#include "ops/arithmetic.h"
#include "ops/cpu/isa.h"
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

/* All functions here are inlined, so how vectors would be passed in registers (-Wpsabi) does not
 * matter. */
#define MS_VECTOR static inline __attribute__((always_inline, unused))

MS_VECTOR ms_vf ms_v_load(const float *p) { return *(const ms_vf_any *)p; }
MS_VECTOR void ms_v_store(float *p, ms_vf v) { *(ms_vf_any *)p = v; }
/* An initializer with the same value for each lane: C has no way to write it for any number of
 * lanes. */
#if MS_LANES == 16
#define MS_EACH(x)                                     \
    {                                                  \
        x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x \
    }
#elif MS_LANES == 8
#define MS_EACH(x)             \
    {                          \
        x, x, x, x, x, x, x, x \
    }
#else
#define MS_EACH(x) \
    {              \
        x, x, x, x \
    }
#endif
/* x in every lane, bit for bit, whatever the bits mean. */
MS_VECTOR ms_vf ms_v_splat(float x) { return (ms_vf)MS_EACH(x); }
MS_VECTOR ms_vi ms_v_splat_int(int32_t x) { return (ms_vi)MS_EACH(x); }
/* 0, 1, 2 ... */
MS_VECTOR ms_vf ms_v_lane_numbers(void)
{
    ms_vf v;
    for (int i = 0; i < MS_LANES; i++) v[i] = (float)i;
    return v;
}
/* The first n lanes (n <= MS_LANES); the others are 0. Nothing past p[n - 1] is read, where the
 * memory may end. */
MS_VECTOR ms_vf ms_v_load_part(const float *p, size_t n)
{
    float lanes[MS_LANES] __attribute__((aligned(64))) = { 0 };
    for (size_t i = 0; i < n; i++) lanes[i] = p[i];
    return *(const ms_vf *)lanes;
}
/* The first n lanes; what is after them stays as it is. */
MS_VECTOR void ms_v_store_part(float *p, ms_vf v, size_t n)
{
    for (size_t i = 0; i < n; i++) p[i] = v[i];
}

/* gcc 12 takes comparisons and conversions of vectors wider than the registers apart lane by lane
 * (20 times slower), though not arithmetic. So these run on parts that fit a register. Write
 * ms_v_less(a, b), not a < b. */
#define MS_PARTS (MS_LANES / MS_PART_LANES)
typedef float ms_part_f __attribute__((vector_size(4 * MS_PART_LANES)));
typedef int32_t ms_part_i __attribute__((vector_size(4 * MS_PART_LANES)));
typedef union ms_parts_f {
    ms_vf whole;
    ms_part_f part[MS_PARTS];
} ms_parts_f;

typedef union ms_parts_i {
    ms_vi whole;
    ms_part_i part[MS_PARTS];
} ms_parts_i;

#define MS_VECTOR_COMPARE(name, operator)                                               \
    MS_VECTOR ms_vi name(ms_vf a, ms_vf b)                                              \
    {                                                                                   \
        ms_parts_f x = { .whole = a }, y = { .whole = b };                              \
        ms_parts_i mask;                                                                \
        for (int k = 0; k < MS_PARTS; k++) mask.part[k] = x.part[k] operator y.part[k]; \
        return mask.whole;                                                              \
    }
/* All ones where it is true, else 0. Comparisons with NaN are false, but for differ. */
MS_VECTOR_COMPARE(ms_v_less, <)
MS_VECTOR_COMPARE(ms_v_less_equal, <=)
MS_VECTOR_COMPARE(ms_v_equal, ==)
MS_VECTOR_COMPARE(ms_v_differ, !=)
#undef MS_VECTOR_COMPARE
MS_VECTOR ms_vi ms_v_is_nan(ms_vf x) { return ms_v_differ(x, x); }

/* Integers as floats. */
MS_VECTOR ms_vf ms_v_from_int(ms_vi x)
{
    ms_parts_i in = { .whole = x };
    ms_parts_f out;
    for (int k = 0; k < MS_PARTS; k++) out.part[k] = __builtin_convertvector(in.part[k], ms_part_f);
    return out.whole;
}

/* Lanes of a where mask is all ones, of b where it is 0. */
MS_VECTOR ms_vf ms_v_select(ms_vi mask, ms_vf a, ms_vf b)
{
    return (ms_vf)((mask & (ms_vi)a) | (~mask & (ms_vi)b));
}
/* Clears the sign bit, so it works on zeros, infinities and NaN. */
MS_VECTOR ms_vf ms_v_abs(ms_vf x) { return (ms_vf)((ms_vi)x & 0x7fffffff); }
/* The size of one and the sign of the other, bit by bit, also for NaN and infinity. */
MS_VECTOR ms_vf ms_v_copysign(ms_vf size, ms_vf sign)
{
    return (ms_vf)(((ms_vi)size & 0x7fffffff) | ((ms_vi)sign & INT32_MIN));
}
/* The greater; NaN if either is NaN. Where both are equal, b is returned, which matters for zeros
 * of different signs only. */
MS_VECTOR ms_vf ms_v_max(ms_vf a, ms_vf b)
{
    return ms_v_select(ms_v_less(b, a) | ms_v_is_nan(a), a, b);
}
/* The less; NaN if either is NaN. */
MS_VECTOR ms_vf ms_v_min(ms_vf a, ms_vf b)
{
    return ms_v_select(ms_v_less(a, b) | ms_v_is_nan(a), a, b);
}

/* The greater, the less; b where either is NaN. */
#if defined(__AVX512F__)
/* gcc 12 makes a comparison and logical operations of the other forms. */
MS_VECTOR ms_vf ms_v_greater(ms_vf a, ms_vf b)
{
    return (ms_vf)_mm512_max_ps((__m512)a, (__m512)b);
}
MS_VECTOR ms_vf ms_v_lesser(ms_vf a, ms_vf b) { return (ms_vf)_mm512_min_ps((__m512)a, (__m512)b); }
#else
MS_VECTOR ms_vf ms_v_greater(ms_vf a, ms_vf b) { return ms_v_select(ms_v_less(b, a), a, b); }
MS_VECTOR ms_vf ms_v_lesser(ms_vf a, ms_vf b) { return ms_v_select(ms_v_less(a, b), a, b); }
#endif

/* By fours: lane by lane would be a chain of as many dependent steps. */
typedef float ms_v4f __attribute__((vector_size(16)));
typedef int32_t ms_v4i __attribute__((vector_size(16)));
typedef union ms_fours {
    ms_vf whole;
    ms_v4f four[MS_LANES / 4];
} ms_fours;

/* Lanes added in a fixed order: pairs half the lanes apart, a quarter, and so on to neighbours. */
MS_VECTOR float ms_v_sum(ms_vf v)
{
    ms_fours x = { .whole = v };
    for (int n = MS_LANES / 8; n > 0; n /= 2)
        for (int i = 0; i < n; i++) x.four[i] += x.four[i + n];
    return (x.four[0][0] + x.four[0][2]) + (x.four[0][1] + x.four[0][3]);
}

/* 64 sums side by side: element i of a row goes to sum i % 64, so that the order of additions, and
 * with it the bits, is the same for any number of lanes; and so that one addition need not wait for
 * the one before. */
enum { MS_SUM_LANES = 64, MS_SUMS = MS_SUM_LANES / MS_LANES };
typedef struct ms_sum64 {
    ms_vf of[MS_SUMS];
} ms_sum64;
/* What was added 16, then 32, then 8, 4, 2 and 1 apart. */
MS_VECTOR float ms_v_sum64(ms_sum64 sums)
{
    enum { QUARTER = MS_SUMS / 4 };
    for (int i = 0; i < QUARTER; i++)
        sums.of[i] = (sums.of[i] + sums.of[i + QUARTER])
                     + (sums.of[i + 2 * QUARTER] + sums.of[i + 3 * QUARTER]);
    for (int n = QUARTER / 2; n > 0; n /= 2)
        for (int i = 0; i < n; i++) sums.of[i] += sums.of[i + n];
    return ms_v_sum(sums.of[0]);
}

/* The greatest lane; NaN if any lane is NaN. */
MS_VECTOR float ms_v_reduce_max(ms_vf v)
{
    ms_fours x = { .whole = v };
    for (int n = MS_LANES / 8; n > 0; n /= 2)
        for (int i = 0; i < n; i++) {
            ms_v4f a = x.four[i], b = x.four[i + n];
            ms_v4i upper = (b > a) | (b != b);
            x.four[i] = (ms_v4f)((upper & (ms_v4i)b) | (~upper & (ms_v4i)a));
        }
    ms_v4f four = x.four[0];
    float a = four[0] > four[1] || four[0] != four[0] ? four[0] : four[1];
    float b = four[2] > four[3] || four[2] != four[2] ? four[2] : four[3];
    return a > b || a != a ? a : b;
}

/* Correctly rounded; gcc 12 makes vector instructions of the loop. */
MS_VECTOR ms_vf ms_v_sqrt(ms_vf x)
{
    ms_vf y;
    for (int i = 0; i < MS_LANES; i++) y[i] = __builtin_sqrtf(x[i]);
    return y;
}

/* The nearest whole number, of two equally near ones the even one; a result of 0 has x's sign. From
 * 2^23 on, numbers are whole; below, the addition rounds, as the last bit of 2^23 counts ones. */
MS_VECTOR ms_vf ms_v_round(ms_vf x)
{
    const ms_vf limit = ms_v_splat(8388608.0f);
    ms_vf size = ms_v_abs(x), near = ms_v_copysign((size + limit) - limit, x);
    return ms_v_select(ms_v_less(size, limit), near, x);
}
/* The greatest whole number that is not above x. */
MS_VECTOR ms_vf ms_v_floor(ms_vf x)
{
    ms_vf near = ms_v_round(x);
    return near - (ms_vf)(ms_v_less(x, near) & (ms_vi)ms_v_splat(1.0f));
}

/* 2^n for n in -126 .. 127. */
MS_VECTOR ms_vf ms_v_power_of_two(ms_vi n) { return (ms_vf)(((ms_vu)n + 127) << 23); }

/* p 2^n for p in 0.5 .. 2, n in -160 .. 145 as `shifted` - shift: rounded once, so these forms
 * agree in every bit. */
MS_VECTOR ms_vf ms_v_scaled(ms_vf p, ms_vf shifted, float shift)
{
#if defined(__AVX512F__)
    return (ms_vf)_mm512_scalef_ps((__m512)p, (__m512)(shifted - shift));
#else
    /* Two factors: 2^n alone would overflow or underflow at the ends of the range. */
    ms_vi n = (ms_vi)((ms_vu)shifted - (ms_vu)ms_v_splat(shift)), half = n >> 1;
    return p * ms_v_power_of_two(half) * ms_v_power_of_two(n - half);
#endif
}

/* e^x, at most 1.1 ulp; 0 below -104, infinity above 88.73, subnormal results included. */
MS_VECTOR ms_vf ms_v_exp(ms_vf x)
{
    const float shift = MS_ROUNDER;
    x = ms_v_greater(ms_v_splat(-110.0f), ms_v_lesser(ms_v_splat(100.0f), x)); /* NaN passes */
    ms_vf shifted = x * 1.442695041f + shift;
    ms_vf whole = shifted - shift;
    /* ln 2 in two parts, the first so short that the product is exact. */
    ms_vf r = x - whole * 0.693359375f;
    r = r - whole * -2.12194440e-4f;
    ms_vf p = r * 1.381314127e-03f + 8.369418792e-03f;
    p = p * r + 4.166845605e-02f;
    p = p * r + 1.666651517e-01f;
    p = p * r + 4.999999404e-01f;
    p = (p * r) * r + r + 1.0f;
    return ms_v_scaled(p, shifted, shift);
}

/* e^x for x up to 88, at most 1.1 ulp; 0 below -87, where the true value is no normal number. Half
 * the price of ms_v_exp: for softmax. The same polynomial as in ms_v_exp; what it saves are the
 * clamps and the careful scaling. */
MS_VECTOR ms_vf ms_v_exp_normal(ms_vf x)
{
    const float shift = MS_ROUNDER;
    ms_vi none = ms_v_less(x, ms_v_splat(-87.0f));
    ms_vf shifted = x * 1.442695041f + shift;
    ms_vf whole = shifted - shift;
    ms_vf r = x - whole * 0.693359375f;
    r = r - whole * -2.12194440e-4f;
    ms_vf p = r * 1.381314127e-03f + 8.369418792e-03f;
    p = p * r + 4.166845605e-02f;
    p = p * r + 1.666651517e-01f;
    p = p * r + 4.999999404e-01f;
    p = (p * r) * r + r + 1.0f;
    /* The integer is in the low bits of `shifted`; what is above them leaves on the left. */
    return (ms_vf)(~none & (ms_vi)(p * (ms_vf)(((ms_vu)shifted << 23) + (127u << 23))));
}

/* Natural logarithm, at most 1 ulp; -infinity at 0, NaN below. x = m 2^e gives log x = log m + e
 * log 2. */
MS_VECTOR ms_vf ms_v_log(ms_vf x)
{
    ms_vi tiny = ms_v_less(x, ms_v_splat(1.17549435e-38f)); /* subnormals are scaled up first */
    ms_vf scaled = ms_v_select(tiny, x * 33554432.0f, x);
    ms_vu bits = (ms_vu)scaled;
    /* m in [sqrt(1/2), sqrt 2), x = m * 2^e */
    ms_vi e = (ms_vi)(bits - MS_LOGARITHM_BEGIN) >> 23;
    ms_vf m = (ms_vf)(bits - ((ms_vu)e << 23)) - 1.0f;
    e += tiny & -25;
    ms_vf k = ms_v_from_int(e);
    MS_LOGARITHM(ms_vf, y, m, k);
    const ms_vf infinity = ms_v_splat(__builtin_inff()), zero = ms_v_splat(0.0f);
    y = ms_v_select(ms_v_equal(x, infinity), infinity, y);
    y = ms_v_select(ms_v_equal(x, zero), -infinity, y);
    return ms_v_select(ms_v_less_equal(zero, x), y, ms_v_splat(__builtin_nanf("")));
}

/* At most 1.6 ulp; keeps the sign of 0. Below 0.625 an odd polynomial; above it the exponential
 * form, whose subtraction loses digits only near 0. */
MS_VECTOR ms_vf ms_v_tanh(ms_vf x)
{
    ms_vf a = ms_v_abs(x), s = x * x;
    ms_vf p = s * -5.704978015e-03f + 2.063907869e-02f;
    p = p * s + -5.373971164e-02f;
    p = p * s + 1.333144158e-01f;
    p = p * s + -3.333328068e-01f;
    ms_vf small = x + x * (s * p);
    ms_vf large = 1.0f - 2.0f / (ms_v_exp(a + a) + 1.0f);
    large = ms_v_select(ms_v_less(ms_v_splat(10.0f), a), ms_v_splat(1.0f), large);
    return ms_v_select(
        ms_v_is_nan(x), x,
        ms_v_copysign(ms_v_select(ms_v_less(a, ms_v_splat(0.625f)), small, large), x));
}

/* At most 1.5 ulp; keeps the sign of 0. Both polynomials are evaluated, as lanes cannot branch, and
 * one is selected. */
MS_VECTOR ms_vf ms_v_erf(ms_vf x)
{
    ms_vf a = ms_v_abs(x), s = x * x;
    ms_vf p = s * -5.919421674e-04f + 4.979131278e-03f;
    p = p * s + -2.675703540e-02f;
    p = p * s + 1.128155217e-01f;
    p = p * s + -3.761246800e-01f;
    p = p * s + 1.283791512e-01f;
    ms_vf small = x + x * p;
    /* 1 - exp(-q), q = -log(erfc a) as a polynomial; from 3.95 on the result is 1 */
    ms_vf t = ms_v_min(a, ms_v_splat(4.0f));
    ms_vf q = t * 1.161258479e-05f + -3.266253043e-04f;
    q = q * t + 3.658019938e-03f;
    q = q * t + -2.379502729e-02f;
    q = q * t + 1.062752157e-01f;
    q = q * t + 6.351280808e-01f;
    q = q * t + 1.128654242e+00f;
    ms_vf large = 1.0f - ms_v_exp(-(q * t));
    return ms_v_select(
        ms_v_is_nan(x), x,
        ms_v_copysign(ms_v_select(ms_v_less(a, ms_v_splat(0.9375f)), small, large), x));
}

/* 1 / (1 + e^-x), at most 2.5 ulp down to x = -87; 0 below -88.73, where the true value is
 * subnormal. For large negative x the exponential is infinite and the quotient 0, without a NaN. */
MS_VECTOR ms_vf ms_v_sigmoid(ms_vf x) { return 1.0f / (1.0f + ms_v_exp(-x)); }

/* x^y for x >= 0 as exp(y log x): for norms. Relative error about |y log x| * 6e-8. */
MS_VECTOR ms_vf ms_v_pow_positive(ms_vf x, float y) { return ms_v_exp(ms_v_log(x) * y); }

/* x - n pi/2 for the nearest integer n, within -pi/4 .. pi/4, and n in its lowest bits. In f64: the
 * result keeps its relative accuracy next to the zeros of sin and cos, too. For |x| below
 * MS_TURN_LIMIT. */
MS_VECTOR ms_vf ms_v_quarter_turns(ms_vf x, ms_vi *n)
{
    double shifted[MS_LANES] __attribute__((aligned(64)));
    uint64_t bits[MS_LANES] __attribute__((aligned(64)));
    ms_vf r;
    for (int i = 0; i < MS_LANES; i++) shifted[i] = (double)x[i] * MS_QUARTERS + MS_ROUNDER_F64;
    for (int i = 0; i < MS_LANES; i++) {
        double whole = shifted[i] - MS_ROUNDER_F64, wide = (double)x[i];
        r[i] = (float)MS_WITHOUT_QUARTERS(wide, whole);
    }
    memcpy(bits, shifted, sizeof bits);
    for (int i = 0; i < MS_LANES; i++) (*n)[i] = (int32_t)(uint32_t)bits[i];
    return r;
}

/* sin(x + quarters pi/2), at most 1.6 ulp. Larger x than MS_TURN_LIMIT are left to the C library,
 * whose function of these quarters `exact` is. A lane's result does not depend on the others. */
MS_VECTOR ms_vf ms_v_sin_of(ms_vf x, int quarters, float (*exact)(float))
{
    ms_vi n, large = ms_v_less_equal(ms_v_splat(MS_TURN_LIMIT), ms_v_abs(x));
    ms_vf r = ms_v_quarter_turns(x, &n), s = r * r;
    MS_SIN_COS(ms_vf, p, q, r, s);
    n = (ms_vi)((ms_vu)n + (uint32_t)quarters);
    ms_vf y = ms_v_select(-(n & 1), q, p);
    y = (ms_vf)((ms_vu)y ^ ((ms_vu)(n & 2) << 30));
    int32_t any = 0;
    for (int i = 0; i < MS_LANES; i++) any |= large[i];
    for (int i = 0; any && i < MS_LANES; i++)
        if (large[i]) y[i] = exact(x[i]);
    return y;
}
/* Keeps the sign of 0. NaN at infinities. */
MS_VECTOR ms_vf ms_v_sin(ms_vf x)
{
    return ms_v_select(ms_v_equal(x, ms_v_splat(0.0f)), x, ms_v_sin_of(x, 0, sinf));
}
MS_VECTOR ms_vf ms_v_cos(ms_vf x) { return ms_v_sin_of(x, 1, cosf); }

/* cos and sin of 2 pi u for 0 <= u < 1, absolute error at most 1e-7. The argument is in turns, so
 * reducing it to a quarter is exact, which it is not for an angle in radians. */
MS_VECTOR void ms_v_cos_sin_turns(ms_vf u, ms_vf *cosine, ms_vf *sine)
{
    ms_vf shifted = u * 4.0f + MS_ROUNDER; /* nearest quarter turn */
    ms_vi quarter = (ms_vi)shifted & 3;
    ms_vf r = u - (shifted - MS_ROUNDER) * 0.25f; /* exact, within an eighth of a turn */
    ms_vf s = r * r;
    MS_SIN_COS_TURNS(ms_vf, p, q, r, s);
    ms_vi swap = -(quarter & 1);
    ms_vf c = ms_v_select(swap, p, q), n = ms_v_select(swap, q, p);
    /* quarter 1: cos = -sin r, sin = cos r; 2: both negative; 3: cos = sin r, sin = -cos r */
    *cosine = (ms_vf)((ms_vu)c ^ ((ms_vu)((quarter + 1) & 2) << 30));
    *sine = (ms_vf)((ms_vu)n ^ ((ms_vu)(quarter & 2) << 30));
}

#endif
