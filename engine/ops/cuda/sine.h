/* sine.h: sine and cosine for kernels. CUDA's own keep digits of large angles in local memory,
 * which no kernel here uses.
 *
 * Both reduce the angle to r = x - n pi/2 within -pi/4 .. pi/4 and use the polynomials of the CPU
 * (ops/arithmetic.h). */
#ifndef MOONSHARD_OPS_CUDA_SINE_H
#define MOONSHARD_OPS_CUDA_SINE_H

#include "ops/arithmetic.h"
#include "ops/cuda/device.h"

/* The first 224 binary digits of 2 / pi after the point. */
MS_CONSTANT uint32_t ms_two_over_pi[7] = { 0xa2f9836eu, 0x4e441529u, 0xfc2757d1u, 0xf534ddc0u,
                                           0xdb629599u, 0x3c439041u, 0xfe5163abu };

/* 32 digits from this one on. */
MS_DEVICE uint32_t ms_digits(int first)
{
    int word = first / 32, shift = first % 32;
    if (shift == 0) return ms_two_over_pi[word];
    return ms_two_over_pi[word] << shift | ms_two_over_pi[word + 1] >> (32 - shift);
}

/* For 2^28 <= |x| < infinity, where x is m 2^k with a whole m. Of m 2^k 2/pi, digits of 2/pi whose
 * place is 4 or more are left out: they add whole turns. What is left is exact up to 2^-62. */
MS_DEVICE float ms_large_turns(float x, int32_t *n)
{
    uint32_t bits = ms_bits(x);
    uint64_t m = (bits & 0x7fffffu) | 0x800000u;
    int k = (int)(bits >> 23 & 255u) - 150, first = k - 2;
    uint64_t low = m * ms_digits(first + 64), middle = m * ms_digits(first + 32),
             high = m * ms_digits(first);
    /* 96 binary digits, of which two are before the point; the lowest 32 only carry. */
    uint64_t quarters = (high << 32) + middle + (low >> 32);
    int64_t fraction = (int64_t)(quarters << 2);     /* in 2^-64, as -1/2 .. 1/2 */
    *n = (int32_t)(quarters >> 62) + (fraction < 0); /* the nearest whole number */
    float r = (float)((double)fraction * (1.5707963267948966 / 18446744073709551616.0));
    if (!(bits >> 31)) return r;
    *n = -*n;
    return -r;
}

/* sin(x + quarters pi/2), at most 1.6 ulp; keeps the sign of 0; NaN at infinities. */
MS_DEVICE float ms_sine(float x, int quarters)
{
    int32_t n;
    float r;
    if (quarters == 0 && x == 0.0f) return x;
    if (!(fabsf(x) < ms_infinity())) return x - x;
    if (fabsf(x) < MS_TURN_LIMIT) {
        double wide = (double)x, whole = wide * MS_QUARTERS + MS_ROUNDER_F64 - MS_ROUNDER_F64;
        r = (float)MS_WITHOUT_QUARTERS(wide, whole);
        n = (int32_t)whole;
    } else r = ms_large_turns(x, &n);
    float s = r * r;
    MS_SIN_COS(float, p, q, r, s);
    n += quarters;
    float y = n & 1 ? q : p;
    return n & 2 ? -y : y;
}

#endif
