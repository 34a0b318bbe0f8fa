/* arithmetic.h: what the CPU and kernels of a GPU compute with the same operations: drawn numbers,
 * logarithm, sine and cosine. C that nvcc and C++ compilers read, too.
 *
 * The macros take a float or a vector of floats. So the loops over lanes (cpu/vector_math.h,
 * cpu/isa/random.c) and the functions here have the same operations in the same order. They give
 * the same bits in files that are compiled without contraction, as all files that draw are.
 * Arguments of macros are names: a macro uses them several times. */
#ifndef MOONSHARD_OPS_ARITHMETIC_H
#define MOONSHARD_OPS_ARITHMETIC_H

#include <math.h>

#include "moonshard/exec.h"

/* 1.5 * 2^23: adding it rounds a float to an integer, which the low bits then hold. The other one
 * is 1.5 * 2^52, for a double. */
#define MS_ROUNDER 12582912.0f
#define MS_ROUNDER_F64 6755399441055744.0

/* ---------------------------------------------------------------- polynomials */

/* Each macro declares its result, whose type is given. The coefficients are minimax, fitted in 40
 * digits and rounded to f32. */

/* The logarithm of 2^k (1 + m), for 1 + m in sqrt(1/2) .. sqrt 2. The logarithm of 2 has two parts,
 * of which the small one is added first: in the larger sum it would lose its digits. */
#define MS_LOGARITHM_BEGIN 0x3f3504f3u /* the bits of sqrt(1/2) */
#define MS_LOGARITHM(type, result, m, k)                        \
    type result, result##_s = m * m;                            \
    type result##_p = m * 6.746663153e-02f + -1.167564020e-01f; \
    result##_p = result##_p * m + 1.188814491e-01f;             \
    result##_p = result##_p * m + -1.240558922e-01f;            \
    result##_p = result##_p * m + 1.421955526e-01f;             \
    result##_p = result##_p * m + -1.666799635e-01f;            \
    result##_p = result##_p * m + 2.000211924e-01f;             \
    result##_p = result##_p * m + -2.500000894e-01f;            \
    result##_p = result##_p * m + 3.333331347e-01f;             \
    result = result##_p * m * result##_s + k * -2.12194440e-4f; \
    result = result - result##_s * 0.5f;                        \
    result = (m + result) + k * 0.693359375f

/* Sine p and cosine q of r turns, at most an eighth; s = r r. */
#define MS_SIN_COS_TURNS(type, p, q, r, s)             \
    type p = s * 4.146989059e+01f + -7.669777679e+01f; \
    p = p * s + 8.160520172e+01f;                      \
    p = p * s + -4.134170151e+01f;                     \
    p = (p * s + 6.283185482e+00f) * r;                \
    type q = s * -2.606452370e+01f + 6.023845673e+01f; \
    q = q * s + -8.545677185e+01f;                     \
    q = q * s + 6.493939209e+01f;                      \
    q = q * s + -1.973920822e+01f;                     \
    q = q * s + 1.0f

/* Sine p and cosine q of r within -pi/4 .. pi/4; s = r r. What rounding takes from 1 - s/2 is added
 * to the cosine's small terms. */
#define MS_SIN_COS(type, p, q, r, s)                      \
    type p = s * -1.951512095e-04f + 8.332159370e-03f;    \
    p = p * s + -1.666665524e-01f;                        \
    p = p * s * r + r;                                    \
    type q = s * 2.443297126e-05f + -1.388731413e-03f;    \
    q = q * s + 4.166664556e-02f;                         \
    type q##_half = 0.5f * s, q##_rest = 1.0f - q##_half; \
    q = q##_rest + (q * s * s + ((1.0f - q##_rest) - q##_half))

/* x - n pi/2 in f64, for x and n of type double. The first part of pi/2 has 25 digits, so that its
 * product with n is exact for |x| below MS_TURN_LIMIT. */
#define MS_TURN_LIMIT 4e8f
#define MS_QUARTERS 0.6366197723675814 /* 2 / pi */
#define MS_WITHOUT_QUARTERS(x, n) \
    ((x - n * 1.57079631090164184570) - n * 1.58932547735281966916e-08)

/* -------------------------------------------------------------- drawn numbers */

/* The upper half of a draw's counter, from the step and the number of the draw in it. The lower
 * half is the position divided by the four words of a block, so every element has a word of its
 * own. */
MS_EVERYWHERE uint64_t ms_random_high(ms_random random) { return random.step << 32 ^ random.draw; }

/* A number in [0, 1) with 24 bits, as many as an f32 holds exactly, from the upper 24 bits of a
 * word. */
#define MS_UNIT(upper) (upper * 5.9604644775390625e-08f)
MS_EVERYWHERE float ms_random_unit(uint32_t word)
{
    float upper = (float)(int32_t)(word >> 8);
    return MS_UNIT(upper);
}

/* A number in (0, 1], down to 2^-33, from the halves of a word: 0 is excluded because its logarithm
 * is taken. Both products are exact, so their sum is rounded once. The half that is added keeps it
 * above 0. */
#define MS_POSITIVE_UNIT(upper, lower) \
    (upper * 1.52587890625e-05f + (lower + 0.5f) * 2.3283064365386963e-10f)
MS_EVERYWHERE float ms_random_positive_unit(uint32_t word)
{
    float upper = (float)(int32_t)(word >> 16), lower = (float)(int32_t)(word & 0xffffu);
    return MS_POSITIVE_UNIT(upper, lower);
}

/* The natural logarithm of a normal number above 0. */
MS_EVERYWHERE float ms_random_log(float x)
{
    uint32_t bits = ms_bits_from_float(x);
    int32_t e = (int32_t)(bits - MS_LOGARITHM_BEGIN) >> 23;
    float m = ms_float_from_bits(bits - ((uint32_t)e << 23)) - 1.0f, k = (float)e;
    MS_LOGARITHM(float, y, m, k);
    return y;
}

/* cos and sin of 2 pi u for 0 <= u < 1. */
MS_EVERYWHERE void ms_random_cos_sin(float u, float *cosine, float *sine)
{
    float shifted = u * 4.0f + MS_ROUNDER; /* nearest quarter turn */
    uint32_t quarter = ms_bits_from_float(shifted) & 3u;
    float r = u - (shifted - MS_ROUNDER) * 0.25f, s = r * r;
    MS_SIN_COS_TURNS(float, p, q, r, s);
    float c = quarter & 1u ? p : q, n = quarter & 1u ? q : p;
    /* quarter 1: cos = -sin r, sin = cos r; 2: both negative; 3: cos = sin r, sin = -cos r */
    *cosine = ms_float_from_bits(ms_bits_from_float(c) ^ ((quarter + 1u) & 2u) << 30);
    *sine = ms_float_from_bits(ms_bits_from_float(n) ^ (quarter & 2u) << 30);
}

/* Box and Muller 1958: radius sqrt(-2 log u) and angle 2 pi v give two independent normal numbers
 * from two uniform ones. The radius is finite: u is never 0. */
MS_EVERYWHERE void ms_random_normal(uint32_t u, uint32_t v, float *first, float *second)
{
    float radius = sqrtf(-2.0f * ms_random_log(ms_random_positive_unit(u))), cosine, sine;
    ms_random_cos_sin(ms_random_unit(v), &cosine, &sine);
    *first = radius * cosine;
    *second = radius * sine;
}

/* An integer below `range`: the upper half of range * a draw of 64 bits, from its four partial
 * products (Lemire 2019, without the rejection, whose bias is below range / 2^64). The draw's lower
 * half is a word of the first block, its upper half the same word of a second one, whose counter
 * differs in the highest bit. */
#define MS_RANDOM_SECOND (1ull << 63)
MS_EVERYWHERE uint64_t ms_random_below(uint64_t range, uint32_t first, uint32_t second)
{
    uint64_t bits = (uint64_t)second << 32 | first;
    uint64_t ah = bits >> 32, al = bits & 0xffffffffu, bh = range >> 32, bl = range & 0xffffffffu;
    uint64_t middle = ah * bl + (al * bl >> 32), cross = (middle & 0xffffffffu) + al * bh;
    return ah * bh + (middle >> 32) + (cross >> 32);
}

#endif
