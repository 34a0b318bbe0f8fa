/* codec.c: floats to codes of 8, 4 or 1 bit and back, 16 at a time. Compiled without contraction,
 * so that all instruction sets write the same bytes. */

/* 16 codes fill whole bytes, and sums over a block have the same order on every instruction set. */
#define MS_LANES 16

#include "ops/cpu/codec.h"

#include <string.h>

#include "ops/cpu/row.h"

/* Greatest number of a block that is not taken for zeros: its reciprocal times 448 is a float. */
#define LEAST 1e-35f
#define MOST 0x1.fffffcp127f /* a scale of it times its greatest code is a float */

/* The floats of 8 bits (E4M3) and of 4 bits (E2M1): bits of the mantissa, the exponent of the least
 * normal number as f32 stores it, and the greatest number. */
typedef struct small_float {
    int mantissa, least, greatest;
} small_float;
/* Neither format has an infinity here: larger numbers become the greatest one. */
static const small_float fp8 = { 3, 121, 448 }, fp4 = { 1, 127, 6 };

/* The greatest number that a code represents; the scale maps the greatest number of a block to
 * it. */
MS_VECTOR float greatest_code(ms_codec_kind kind)
{
    if (kind == MS_CODEC_INT8) return 127.0f;
    if (kind == MS_CODEC_INT4) return 7.0f;
    return kind == MS_CODEC_FP8 ? 448.0f : 6.0f;
}

/* ---------------------------------------------------------- sixteen numbers */

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

/* Scaling and rounding up can leave the range by one code. */
MS_VECTOR ms_vf keep_within(ms_vf x, float most)
{
    return ms_v_lesser(ms_v_greater(x, ms_v_splat(-most)), ms_v_splat(most));
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
    return code | sign << (f.mantissa == 3 ? 7 : 3);
}

/* Exact: every small float is an f32. Subnormals are a count of the smallest step. The sign bit is
 * put back as a bit, so a negative zero stays one. */
MS_VECTOR ms_vf decode_float(ms_vu code, const small_float f)
{
    int width = f.mantissa == 3 ? 7 : 3;
    ms_vu sign = (code >> width) << 31, size = code & ((1u << width) - 1);
    ms_vu normal = (size << (23 - f.mantissa)) + (((ms_vu)ms_v_splat_int(f.least) - 1) << 23);
    ms_vf quantum = (ms_vf)((ms_vu)ms_v_splat_int(f.least - f.mantissa) << 23);
    ms_vf subnormal = ms_v_from_int((ms_vi)size) * quantum;
    ms_vf value =
        ms_v_select(ms_v_less(ms_v_from_int((ms_vi)size), ms_v_splat((float)(1 << f.mantissa))),
                    subnormal, (ms_vf)normal);
    return (ms_vf)((ms_vu)value | sign);
}

/* Integers are symmetric, -127 .. 127 and -7 .. 7 (stored with an offset of 8), so that negation is
 * exact. A sign is 1 where the sign bit is clear. */
MS_VECTOR ms_vu encode_lanes(const ms_codec_kind K, ms_vf x, const float *u)
{
    if (K == MS_CODEC_INT8) return whole_bits(keep_within(round_lanes(x, u), 127.0f)) & 0xffu;
    if (K == MS_CODEC_INT4) return (whole_bits(keep_within(round_lanes(x, u), 7.0f)) + 8u) & 0xfu;
    if (K == MS_CODEC_SIGN) return ~(ms_vu)x >> 31;
    return encode_float(x, u, K == MS_CODEC_FP8 ? fp8 : fp4);
}

/* The shift to the left and back extends the sign of 8 bits; an int4 has an offset of 8 instead. */
MS_VECTOR ms_vf decode_lanes(const ms_codec_kind K, ms_vu code)
{
    if (K == MS_CODEC_INT8) return ms_v_from_int((ms_vi)(code << 24) >> 24);
    if (K == MS_CODEC_INT4) return ms_v_from_int((ms_vi)code - 8);
    if (K == MS_CODEC_SIGN) return ms_v_from_int((ms_vi)(code << 1) - 1);
    return decode_float(code, K == MS_CODEC_FP8 ? fp8 : fp4);
}

/* ------------------------------------------------------------------ packing */

/* One byte for each of 16 codes, before they are packed. */
typedef uint8_t v16b __attribute__((vector_size(16)));

/* Packs count codes, 16 or the last few of a block, from the lowest bit on. Bits after them are 0,
 * so that the bytes depend on the numbers alone. */
MS_VECTOR void pack(const ms_codec_kind K, ms_vu code, size_t count, uint8_t *to)
{
    union {
        v16b whole;
        uint8_t lane[MS_LANES];
    } c = { .whole = __builtin_convertvector(code, v16b) };
    for (size_t i = count; i < MS_LANES; i++) c.lane[i] = 0;
    if (K == MS_CODEC_INT8 || K == MS_CODEC_FP8) {
        memcpy(to, c.lane, count);
    } else if (K == MS_CODEC_SIGN) {
        unsigned bits = 0;
        /* The lowest bit is the first number of a byte. */
        for (unsigned i = 0; i < MS_LANES; i++) bits |= (unsigned)c.lane[i] << i;
        to[0] = (uint8_t)bits;
        if (count > 8) to[1] = (uint8_t)(bits >> 8);
    } else {
        for (size_t i = 0; i < MS_LANES / 2; i++)
            /* The first number of a byte is its lower half. */
            c.lane[i] = (uint8_t)(c.lane[2 * i] | c.lane[2 * i + 1] << 4);
        memcpy(to, c.lane, (count + 1) / 2);
    }
}

/* The reverse of pack. It reads no byte after the last code: the payload of a row may end the
 * memory. */
MS_VECTOR ms_vu unpack(const ms_codec_kind K, const uint8_t *from, size_t count)
{
    union {
        v16b whole;
        uint8_t lane[MS_LANES];
    } c = { .lane = { 0 } };
    if (K == MS_CODEC_INT8 || K == MS_CODEC_FP8) {
        memcpy(c.lane, from, count);
    } else if (K == MS_CODEC_SIGN) {
        unsigned bits = count > 8 ? from[0] | (unsigned)from[1] << 8 : from[0];
        for (unsigned i = 0; i < MS_LANES; i++) c.lane[i] = bits >> i & 1;
    } else {
        memcpy(c.lane, from, (count + 1) / 2);
        /* From the end, as the codes are spread out in place. */
        for (size_t i = MS_LANES / 2; i-- > 0;) {
            c.lane[2 * i + 1] = c.lane[i] >> 4;
            c.lane[2 * i] = c.lane[i] & 15;
        }
    }
    return __builtin_convertvector(c.whole, ms_vu);
}

/* ------------------------------------------------------------------- blocks */

/* The greatest |x| of a block, or NaN if one is not finite: size - size is 0 for finite numbers
 * only. */
MS_VECTOR float greatest(const ms_dtype D, const void *x, size_t n)
{
    ms_vf most = ms_v_splat(0.0f);
    ms_vi bad = ms_v_splat_int(0);
    size_t i = 0;
    for (; i < n; i += MS_LANES) {
        ms_vf size =
            ms_v_abs(i + MS_LANES <= n ? ms_row_get(D, x, i) : ms_row_get_part(D, x, i, n, 0.0f));
        bad |= (ms_vi)(size - size); /* 0, or NaN */
        most = ms_v_greater(size, most);
    }
    for (int l = 0; l < MS_LANES; l++)
        if (bad[l]) return __builtin_nanf("");
    return ms_v_reduce_max(most);
}

/* The mean of |x| * factor over a block. The factor keeps the sum finite: see mean_size. */
MS_VECTOR float mean_of(const ms_dtype D, const void *x, size_t n, float factor)
{
    ms_vf total = ms_v_splat(0.0f);
    for (size_t i = 0; i < n; i += MS_LANES)
        total +=
            ms_v_abs(i + MS_LANES <= n ? ms_row_get(D, x, i) : ms_row_get_part(D, x, i, n, 0.0f))
            * factor;
    return ms_v_sum(total) / (float)n;
}

/* The mean |x| of a block, or NaN if one is not finite. Where the sum overflows, it is made once
 * more of numbers that are smaller by 2^64. */
MS_VECTOR float mean_size(const ms_dtype D, const void *x, size_t n)
{
    float mean = mean_of(D, x, n, 1.0f);
    if (mean - mean == 0.0f) return mean;
    mean = mean_of(D, x, n, 0x1p-64f);
    /* Still not finite: the block itself holds an infinity or a NaN. */
    if (mean - mean != 0.0f) return __builtin_nanf("");
    return (mean < MOST * 0x1p-64f ? mean : MOST * 0x1p-64f) * 0x1p64f;
}

/* One pass for the scale, one for the codes. A block that is not finite gets a scale of NaN, so
 * that decoding shows it; a bare codec has no scale and cannot. `error` receives what the codes
 * leave of each number, for error feedback. The codes depend on the scale as it was computed here
 * in f32, and the scale travels with them, so every rank decodes the same numbers. */
MS_VECTOR void encode_block(const ms_codec_kind K, const ms_dtype D, const ms_codec *codec,
                            const void *x, size_t n, const float *u, float *scale, uint8_t *codes,
                            void *error)
{
    /* The scale, and the factor that divides by it; both are 1 for a bare sign. */
    float size = 1.0f, inverse = 1.0f;
    if (K == MS_CODEC_SIGN) {
        if (!codec->bare) memcpy(scale, &(float){ size = mean_size(D, x, n) }, sizeof size);
    } else {
        float most = greatest(D, x, n);
        /* Bounded, so that the product of scale and greatest code is a float. */
        size = (most > MOST ? MOST : most) / greatest_code(K);
        inverse = greatest_code(K) / most;
        if (!(most >= LEAST)) { /* zeros, or not finite: all codes are that of 0 */
            inverse = 0.0f;
            size = most == most ? 0.0f : most;
        }
        memcpy(scale, &size, sizeof size);
    }
    for (size_t i = 0; i < n; i += MS_LANES) {
        size_t count = n - i < MS_LANES ? n - i : MS_LANES;
        ms_vf v = count == MS_LANES ? ms_row_get(D, x, i) : ms_row_get_part(D, x, i, n, 0.0f);
        /* A sign needs no scaling. A block that is coded as zeros is not multiplied: infinity times
         * 0 would be NaN. */
        ms_vf scaled = v;
        if (K != MS_CODEC_SIGN) scaled = inverse == 0.0f ? ms_v_splat(0.0f) : v * inverse;
        ms_vu code = encode_lanes(K, scaled, u != NULL && inverse != 0.0f ? u + i : NULL);
        pack(K, code, count, codes + i * (size_t)ms_codec_bits(K) / 8);
        if (error == NULL) continue;
        /* The error is what a receiver is missing: it decodes with the same scale. */
        v -= decode_lanes(K, code) * size;
        if (count == MS_LANES) ms_row_put(D, error, i, v);
        else ms_row_put_part(D, error, i, n, v);
    }
}

/* A block may end within a byte; only count codes are read and stored. A byte holds one to eight
 * codes, so the f32 results, which `add` reads as well, are most of the bytes that move. */
MS_VECTOR void decode_block(const ms_codec_kind K, const uint8_t *codes, size_t n, float scale,
                            bool add, float *out)
{
    for (size_t i = 0; i < n; i += MS_LANES) {
        size_t count = n - i < MS_LANES ? n - i : MS_LANES;
        ms_vf v =
            decode_lanes(K, unpack(K, codes + i * (size_t)ms_codec_bits(K) / 8, count)) * scale;
        /* In order of the callers' rows: one addition for each payload. */
        if (add) v += count == MS_LANES ? ms_v_load(out + i) : ms_v_load_part(out + i, count);
        if (count == MS_LANES) ms_v_store(out + i, v);
        else ms_v_store_part(out + i, v, count);
    }
}

/* The two functions of a kind for the table. The kind is a constant in the loops, and on encoding
 * the dtype as well. */
#define KIND(name, K)                                                                             \
    static void encode_##name(const ms_codec *codec, ms_dtype dtype, const void *x, int64_t n,    \
                              const float *u, float *scale, uint8_t *codes, void *error)          \
    {                                                                                             \
        MS_ROW_SWITCH(dtype, encode_block(K, D, codec, x, (size_t)n, u, scale, codes, error));    \
    }                                                                                             \
    static void decode_##name(const uint8_t *codes, int64_t n, float scale, bool add, float *out) \
    {                                                                                             \
        decode_block(K, codes, (size_t)n, scale, add, out);                                       \
    }
KIND(int8, MS_CODEC_INT8)
KIND(int4, MS_CODEC_INT4)
KIND(fp8, MS_CODEC_FP8)
KIND(fp4, MS_CODEC_FP4)
KIND(sign, MS_CODEC_SIGN)

const ms_codec_kernels MS_ISA_NAME(ms_codec_kernels) = {
    .encode = { encode_int8, encode_int4, encode_fp8, encode_fp4, encode_sign },
    .decode = { decode_int8, decode_int4, decode_fp8, decode_fp4, decode_sign },
};
