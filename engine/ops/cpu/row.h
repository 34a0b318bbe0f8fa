/* row.h: elements of any float dtype as f32 lanes, and back, for the files of isa/.
 *
 * A kernel that reads and writes rows works in f32 only and names the dtype at its edges.
 * Conversions give the same bits on every instruction set: bf16 by integer arithmetic, f16 by the
 * hardware's exact instruction or the same rounding in software. */
#ifndef MOONSHARD_OPS_CPU_ROW_H
#define MOONSHARD_OPS_CPU_ROW_H

#include "moonshard/tensor.h"
#include "ops/cpu/vector_math.h"
#if defined(__F16C__)
#include <immintrin.h>
#endif

/* As many 16-bit elements as an ms_vf has lanes. The second type is for memory: a row may begin at
 * any element, so loads and stores are not aligned, and they alias whatever the memory was written
 * as. */
typedef uint16_t ms_vh __attribute__((vector_size(2 * MS_LANES)));
typedef uint16_t ms_vh_any __attribute__((vector_size(2 * MS_LANES), aligned(2), may_alias));

#if defined(__AVX512F__)
/* bf16 is the upper half of an f32, so widening is a shift. These are intrinsics because gcc 12
 * compiles the generic form below into two halves of a register. */
MS_VECTOR ms_vf ms_v_from_bf16(ms_vh h)
{
    return (ms_vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16);
}
MS_VECTOR ms_vh ms_v_to_bf16(ms_vf v)
{
    __m512i bits = (__m512i)v,
            odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    __mmask16 nan = _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    return (ms_vh)_mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}
#else
/* The same in vector extensions. NaN is selected apart, because adding the rounding bit could carry
 * it into infinity. */
MS_VECTOR ms_vf ms_v_from_bf16(ms_vh h) { return (ms_vf)(__builtin_convertvector(h, ms_vu) << 16); }
MS_VECTOR ms_vh ms_v_to_bf16(ms_vf v)
{
    ms_vu bits = (ms_vu)v;
    ms_vu rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    ms_vu nan = (ms_vu)ms_v_is_nan(v);
    bits = (nan & (bits | 0x400000u)) | (~nan & rounded);
    return __builtin_convertvector(bits >> 16, ms_vh);
}
#endif
/* Exact on every path. The hardware converts 8 lanes at a time without AVX-512. */
MS_VECTOR ms_vf ms_v_from_f16(ms_vh h)
{
    ms_vf v;
#if defined(__AVX512F__)
    v = (ms_vf)_mm512_cvtph_ps((__m256i)h);
#elif defined(__F16C__)
    union {
        ms_vh h;
        __m128i part[MS_PARTS];
    } x = { .h = h };
    union {
        ms_vf v;
        __m256 part[MS_PARTS];
    } y;
    for (int k = 0; k < MS_PARTS; k++) y.part[k] = _mm256_cvtph_ps(x.part[k]);
    v = y.v;
#else
    for (int i = 0; i < MS_LANES; i++) v[i] = ms_float_from_f16(h[i]);
#endif
    return v;
}
/* Rounds to nearest even, which the instruction is told explicitly, so the thread's rounding mode
 * does not matter. */
MS_VECTOR ms_vh ms_v_to_f16(ms_vf v)
{
    ms_vh h;
#if defined(__AVX512F__)
    h = (ms_vh)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__)
    union {
        ms_vf v;
        __m256 part[MS_PARTS];
    } x = { .v = v };
    union {
        ms_vh h;
        __m128i part[MS_PARTS];
    } y;
    for (int k = 0; k < MS_PARTS; k++)
        y.part[k] = _mm256_cvtps_ph(x.part[k], _MM_FROUND_TO_NEAREST_INT);
    h = y.h;
#else
    for (int i = 0; i < MS_LANES; i++) h[i] = ms_f16_from_float(v[i]);
#endif
    return h;
}

/* MS_LANES elements of a row, from i on. The caller has made sure that all lanes are in the row.
 * With `dtype` as a constant (MS_ROW_SWITCH) one of the three ways is left. */
MS_VECTOR ms_vf ms_row_get(ms_dtype dtype, const void *row, size_t i)
{
    if (dtype == MS_F32) return ms_v_load((const float *)row + i);
    ms_vh h = *(const ms_vh_any *)((const uint16_t *)row + i);
    return dtype == MS_BF16 ? ms_v_from_bf16(h) : ms_v_from_f16(h);
}
/* Rounds to nearest even, once, from the f32 in which the kernel computed. */
MS_VECTOR void ms_row_put(ms_dtype dtype, void *row, size_t i, ms_vf v)
{
    if (dtype == MS_F32) ms_v_store((float *)row + i, v);
    else *(ms_vh_any *)((uint16_t *)row + i) = dtype == MS_BF16 ? ms_v_to_bf16(v) : ms_v_to_f16(v);
}

/* The last elements i .. n - 1 of a row, fewer than MS_LANES; lanes past them get `rest`. They are
 * read one by one, because a load of a whole vector would reach past the row, where the memory may
 * end. `rest` is what changes nothing: 0 for sums, -infinity for maxima. */
MS_VECTOR ms_vf ms_row_get_part(ms_dtype dtype, const void *row, size_t i, size_t n, float rest)
{
    ms_vf v = ms_v_splat(rest);
    for (size_t j = i; j < n; j++) {
        if (dtype == MS_F32) v[j - i] = ((const float *)row)[j];
        else if (dtype == MS_BF16) v[j - i] = ms_float_from_bf16(((const uint16_t *)row)[j]);
        else v[j - i] = ms_float_from_f16(((const uint16_t *)row)[j]);
    }
    return v;
}
/* Writes only the elements of the row: the next ones may be another thread's. */
MS_VECTOR void ms_row_put_part(ms_dtype dtype, void *row, size_t i, size_t n, ms_vf v)
{
    for (size_t j = i; j < n; j++) {
        if (dtype == MS_F32) ((float *)row)[j] = v[j - i];
        else if (dtype == MS_BF16) ((uint16_t *)row)[j] = ms_bf16_from_float(v[j - i]);
        else ((uint16_t *)row)[j] = ms_f16_from_float(v[j - i]);
    }
}

/* Runs `call` with D, the dtype as a compile-time constant, so that each dtype gets a loop without
 * branches on it. `call` is written out three times, so it should be one call of an inlined
 * function. */
#define MS_ROW_SWITCH(dtype, call)       \
    do {                                 \
        if ((dtype) == MS_F32) {         \
            const ms_dtype D = MS_F32;   \
            call;                        \
        } else if ((dtype) == MS_BF16) { \
            const ms_dtype D = MS_BF16;  \
            call;                        \
        } else {                         \
            const ms_dtype D = MS_F16;   \
            call;                        \
        }                                \
    } while (0)

#endif
