/* half.c: IEEE binary16 from and to binary32, in integer arithmetic: equal on every machine and
 * under every rounding or flush mode. */
#include "moonshard/base.h"

/* Exact: every binary16 value is a binary32 value. The exponent's bias changes from 15 to 127,
 * hence the 112. */
float ms_float_from_f16(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, exponent = (half >> 10) & 31u,
             fraction = half & 0x3ffu;
    if (exponent == 31) {
        /* A NaN becomes a quiet one, as the hardware's conversion makes it. */
        uint32_t quiet = fraction != 0 ? 0x400000u : 0;
        return ms_float_from_bits(sign | 0x7f800000u | quiet | fraction << 13);
    }
    if (exponent == 0) {
        if (fraction == 0) return ms_float_from_bits(sign);
        /* Denormal in f16, normal in f32: move the leading one to where it is implied. */
        uint32_t shift = (uint32_t)__builtin_clz(fraction) - 21u;
        return ms_float_from_bits(sign | (113u - shift) << 23
                                  | ((fraction << shift) & 0x3ffu) << 13);
    }
    return ms_float_from_bits(sign | (exponent + 112u) << 23 | fraction << 13);
}

/* value >> shift, rounded to nearest, ties to even, which is the default rounding of IEEE 754; 1 <=
 * shift <= 31. */
static uint32_t shift_to_even(uint32_t value, uint32_t shift)
{
    uint32_t half = 1u << (shift - 1), kept = value >> shift, rest = value & ((1u << shift) - 1u);
    return kept + (rest > half || (rest == half && (kept & 1u)));
}

/* Five cases by magnitude: NaN (made quiet, upper bits of its payload kept), too large, too small,
 * denormal in binary16, normal. A denormal shifts the fraction, with its leading one, by as much as
 * the exponent is below the smallest normal one. */
uint16_t ms_f16_from_float(float value)
{
    uint32_t bits = ms_bits_from_float(value), sign = (bits >> 16) & 0x8000u,
             magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
    if (magnitude >= 0x47800000u) return (uint16_t)(sign | 0x7c00u); /* from 65536 on */
    if (magnitude < 0x33000000u) return (uint16_t)sign; /* below half of the least denormal */
    uint32_t exponent = magnitude >> 23, fraction = (magnitude & 0x7fffffu) | 0x800000u;
    /* The exponent 113 is 2^-14, the smallest normal number of binary16. */
    if (exponent < 113) return (uint16_t)(sign | shift_to_even(fraction, 126u - exponent));
    /* A carry out of the fraction runs into the exponent, up to infinity: what the format
     * intends. */
    return (uint16_t)(sign | (((exponent - 113u) << 10) + shift_to_even(fraction, 13)));
}
