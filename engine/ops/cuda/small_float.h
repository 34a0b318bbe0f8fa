/* small_float.h: floats of 8 and 4 bits, for kernels that are compiled without contraction: the
 * codes are those of the CPU (ops/cpu/small_float.h). */
#ifndef MOONSHARD_OPS_CUDA_SMALL_FLOAT_H
#define MOONSHARD_OPS_CUDA_SMALL_FLOAT_H

#include "ops/cuda/device.h"

/* 1.5 * 2^23: added and subtracted, it leaves a whole number, ties to even; its low bits are that
 * number. */
#define WHOLE 12582912.0f

MS_DEVICE float lesser(float a, float b) { return a < b ? a : b; }
MS_DEVICE float greater(float a, float b) { return b < a ? a : b; }
MS_DEVICE uint32_t whole_bits(float whole) { return ms_bits(whole + WHOLE); }
/* To nearest, or up with the probability of the fraction. */
MS_DEVICE float rounded(float x, bool draws, float u)
{
    if (!draws) return (x + WHOLE) - WHOLE;
    float up = x + u, whole = (up + WHOLE) - WHOLE;
    return up < whole ? whole - 1.0f : whole;
}

/* Bits of the mantissa, the exponent of the least normal number as f32 stores it, and the greatest
 * number; neither format has an infinity. */
template <int mantissa, int least, int greatest> struct float_code {
    static const int bits = mantissa == 1 ? 4 : 8;
    MS_DEVICE_MEMBER static float most() { return (float)greatest; }
    MS_DEVICE_MEMBER static float power(int exponent) { return ms_float((uint32_t)exponent << 23); }
    /* A number is rounded to a multiple of its step. Scaling by powers of two is exact, so this
     * rounds once; a carry goes into the exponent. */
    MS_DEVICE_MEMBER static uint32_t encode(float x, bool draws, float u)
    {
        float size = lesser(fabsf(x), most());
        int exponent = (int)(ms_bits(size) >> 23);
        if (exponent < least) exponent = least;
        float value = rounded(size * power(254 - (exponent - mantissa)), draws, u)
                      * power(exponent - mantissa);
        value = lesser(value, most());
        uint32_t normal = (ms_bits(value) >> (23 - mantissa)) - ((uint32_t)(least - 1) << mantissa);
        uint32_t subnormal = whole_bits(value * power(254 - (least - mantissa))) & 0xffu;
        uint32_t code = value < power(least) ? subnormal : normal;
        return code | ms_bits(x) >> 31 << (bits - 1);
    }
    MS_DEVICE_MEMBER static float decode(uint32_t code)
    {
        uint32_t sign = code >> (bits - 1) << 31, size = code & ((1u << (bits - 1)) - 1u);
        uint32_t normal = (size << (23 - mantissa)) + ((uint32_t)(least - 1) << 23);
        float subnormal = (float)(int32_t)size * power(least - mantissa);
        return ms_float((size < 1u << mantissa ? ms_bits(subnormal) : normal) | sign);
    }
};

#endif
