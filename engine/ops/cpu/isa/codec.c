/* codec.c: floats to codes of 8, 4, 2 or 1 bits and back, 16 at a time. Compiled without
 * contraction, so that all instruction sets write the same bytes. */

/* 16 codes fill whole bytes, and sums over a block have the same order on every instruction set. */
#define MS_LANES 16

#include "ops/cpu/codec.h"

#include <string.h>

#include "ops/cpu/small_float.h"

/* Greatest number of a block that is not taken for zeros: its reciprocal times 448 is a float. */
#define LEAST 1e-35f
#define MOST 0x1.fffffcp127f /* a scale of it times its greatest code is a float */

/* The greatest number that a code represents; the scale maps the greatest number of a block to
 * it. */
MS_VECTOR float greatest_code(ms_codec_kind kind)
{
    if (kind == MS_CODEC_INT8) return 127.0f;
    if (kind == MS_CODEC_INT4) return 7.0f;
    if (kind == MS_CODEC_INT2) return 3.0f;
    return kind == MS_CODEC_FP8 ? 448.0f : 6.0f;
}

/* By what numbers are multiplied before they are divided by the scale: the reciprocal of a scale of
 * 2^128 / 3 would be no normal float, and might count as 0. */
MS_VECTOR float shrinkage(ms_codec_kind kind) { return kind == MS_CODEC_INT2 ? 0.25f : 1.0f; }

/* ---------------------------------------------------------- sixteen numbers */

/* Scaling and rounding up can leave the range by one code. */
MS_VECTOR ms_vf keep_within(ms_vf x, float most)
{
    return ms_v_lesser(ms_v_greater(x, ms_v_splat(-most)), ms_v_splat(most));
}

/* The codes 0 .. 3 of -3, -1, 1 and 3. To nearest: by size and sign, so that negation is exact. By
 * draws: the code is a whole number on a line. */
MS_VECTOR ms_vu encode_two_bits(ms_vf x, const float *u)
{
    if (u != NULL) {
        ms_vf code = round_lanes((x + 3.0f) * 0.5f, u);
        return whole_bits(ms_v_lesser(ms_v_greater(code, ms_v_splat(0.0f)), ms_v_splat(3.0f))) & 3u;
    }
    ms_vu is_small = (ms_vu)ms_v_less(ms_v_abs(x), ms_v_splat(2.0f)) & 1u,
          negative = (ms_vu)x >> 31;
    return (3u - is_small) ^ negative * 3u;
}

/* Integers are symmetric, -127 .. 127 and -7 .. 7 (stored with an offset of 8), so that negation is
 * exact. A sign is 1 where the sign bit is clear. */
MS_VECTOR ms_vu encode_lanes(const ms_codec_kind K, ms_vf x, const float *u)
{
    if (K == MS_CODEC_INT8) return whole_bits(keep_within(round_lanes(x, u), 127.0f)) & 0xffu;
    if (K == MS_CODEC_INT4) return (whole_bits(keep_within(round_lanes(x, u), 7.0f)) + 8u) & 0xfu;
    if (K == MS_CODEC_INT2) return encode_two_bits(x, u);
    if (K == MS_CODEC_SIGN) return ~(ms_vu)x >> 31;
    return encode_float(x, u, K == MS_CODEC_FP8 ? e4m3 : fp4);
}

/* The shift to the left and back extends the sign of 8 bits; an int4 has an offset of 8 instead. */
MS_VECTOR ms_vf decode_lanes(const ms_codec_kind K, ms_vu code)
{
    if (K == MS_CODEC_INT8) return ms_v_from_int((ms_vi)(code << 24) >> 24);
    if (K == MS_CODEC_INT4) return ms_v_from_int((ms_vi)code - 8);
    if (K == MS_CODEC_INT2) return ms_v_from_int((ms_vi)(code << 1) - 3);
    if (K == MS_CODEC_SIGN) return ms_v_from_int((ms_vi)(code << 1) - 1);
    return decode_float(code, K == MS_CODEC_FP8 ? e4m3 : fp4);
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
    } else if (K == MS_CODEC_INT2) {
        for (size_t i = 0; i < MS_LANES / 4; i++)
            c.lane[i] = (uint8_t)(c.lane[4 * i] | c.lane[4 * i + 1] << 2 | c.lane[4 * i + 2] << 4
                                  | c.lane[4 * i + 3] << 6);
        memcpy(to, c.lane, (count + 3) / 4);
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
    } else if (K == MS_CODEC_INT2) {
        memcpy(c.lane, from, (count + 3) / 4);
        for (size_t i = MS_LANES / 4; i-- > 0;) {
            uint8_t four = c.lane[i];
            for (size_t k = 0; k < 4; k++) c.lane[4 * i + k] = four >> 2 * k & 3;
        }
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
        inverse = greatest_code(K) / shrinkage(K) / most;
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
        if (K != MS_CODEC_SIGN)
            scaled = inverse == 0.0f ? ms_v_splat(0.0f) : v * shrinkage(K) * inverse;
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
KIND(int2, MS_CODEC_INT2)
KIND(fp8, MS_CODEC_FP8)
KIND(fp4, MS_CODEC_FP4)
KIND(sign, MS_CODEC_SIGN)

const ms_codec_kernels MS_ISA_NAME(ms_codec_kernels) = {
    .encode = { encode_int8, encode_int4, encode_int2, encode_fp8, encode_fp4, encode_sign },
    .decode = { decode_int8, decode_int4, decode_int2, decode_fp8, decode_fp4, decode_sign },
};
