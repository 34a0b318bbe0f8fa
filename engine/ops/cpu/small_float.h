/* small_float.h: floats of 8 and 4 bits, sixteen at a time, for files of isa/ that are compiled
 * without contraction and with MS_LANES 16: all instruction sets give the same codes. */
#ifndef MOONSHARD_OPS_CPU_SMALL_FLOAT_H
#define MOONSHARD_OPS_CPU_SMALL_FLOAT_H

#include "ops/cpu/row.h"

/* The floats of 8 bits (E4M3, E5M2) and of 4 bits (E2M1): bits of the mantissa, the exponent of the
 * least normal number as f32 stores it, and the greatest number. */
typedef struct small_float {
    int mantissa, least, greatest;
} small_float;
/* No format has an infinity here: larger numbers become the greatest one. */
static const small_float e4m3 __attribute__((unused)) = { 3, 121, 448 },
                              e5m2 __attribute__((unused)) = { 2, 113, 57344 },
                              fp4 __attribute__((unused)) = { 1, 127, 6 };

/* 1.5 * 2^23: added and subtracted, it leaves a whole number, ties to even; its low bits are that
 * number. For |x| < 2^22. */
#define WHOLE 12582912.0f

/* To nearest, or stochastically: floor(x + u) with u from [0, 1) rounds up with the probability of
 * the fraction, so the expected value is x. Without contraction and with 16 lanes this gives the
 * same codes on every instruction set; a device that rounds in the same way can be compared with it
 * byte by byte. */
MS_VECTOR ms_vf round_lanes(ms_vf x, const float *u)
{
    if (u == NULL) return (x + WHOLE) - WHOLE;
    ms_vf up = x + ms_v_load(u), whole = (up + WHOLE) - WHOLE;
    return whole - (ms_vf)(ms_v_less(up, whole) & (ms_vi)ms_v_splat(1.0f)); /* floor */
}

/* The low bits of a whole number, negative ones in two's complement. */
MS_VECTOR ms_vu whole_bits(ms_vf whole) { return (ms_vu)(whole + WHOLE); }

/* Codes of numbers that were divided by their scale. A number is rounded to a multiple of its step,
 * which is 2^(exponent - mantissa bits), and never below the step of subnormals. Then the exponent
 * is rebased to the small format. Rounding up may carry into the next exponent, which the bit
 * arithmetic carries along. `size` is cut to the greatest number first, so an exponent never is too
 * large for the format. `smallest` is the inverse of the step of subnormals. */
MS_VECTOR ms_vu encode_float(ms_vf x, const float *u, const small_float f)
{
    ms_vu sign = (ms_vu)x >> 31;
    ms_vf size = ms_v_lesser(ms_v_abs(x), ms_v_splat((float)f.greatest));
    ms_vi exponent = (ms_vi)((ms_vu)size >> 23), least = ms_v_splat_int(f.least);
    exponent = (ms_vi)ms_v_select((ms_vi)ms_v_less(ms_v_from_int(exponent), ms_v_from_int(least)),
                                  (ms_vf)least, (ms_vf)exponent);
    ms_vf step = (ms_vf)((ms_vu)(exponent - f.mantissa) << 23),
          inverse = (ms_vf)((ms_vu)(254 - (exponent - f.mantissa)) << 23);
    /* Scaling by powers of two is exact, so this rounds once. */
    ms_vf value = round_lanes(size * inverse, u) * step;
    value = ms_v_lesser(value, ms_v_splat((float)f.greatest));
    ms_vu normal =
        ((ms_vu)value >> (23 - f.mantissa)) - (((ms_vu)ms_v_splat_int(f.least) - 1) << f.mantissa);
    ms_vf smallest = (ms_vf)((ms_vu)ms_v_splat_int(254 - (f.least - f.mantissa)) << 23);
    /* Below the least normal number the code counts steps of the smallest size. */
    ms_vu subnormal = whole_bits(value * smallest) & 0xffu;
    ms_vu code = (ms_vu)ms_v_select(ms_v_less(value, (ms_vf)((ms_vu)least << 23)), (ms_vf)subnormal,
                                    (ms_vf)normal);
    return code | sign << (f.mantissa == 1 ? 3 : 7);
}

/* Exact: every small float is an f32. Subnormals are a count of the smallest step. The sign bit is
 * put back as a bit, so a negative zero stays one. */
MS_VECTOR ms_vf decode_float(ms_vu code, const small_float f)
{
    int width = f.mantissa == 1 ? 3 : 7;
    ms_vu sign = (code >> width) << 31, size = code & ((1u << width) - 1);
    ms_vu normal = (size << (23 - f.mantissa)) + (((ms_vu)ms_v_splat_int(f.least) - 1) << 23);
    ms_vf quantum = (ms_vf)((ms_vu)ms_v_splat_int(f.least - f.mantissa) << 23);
    ms_vf subnormal = ms_v_from_int((ms_vi)size) * quantum;
    ms_vf value =
        ms_v_select(ms_v_less(ms_v_from_int((ms_vi)size), ms_v_splat((float)(1 << f.mantissa))),
                    subnormal, (ms_vf)normal);
    return (ms_vf)((ms_vu)value | sign);
}

#endif
