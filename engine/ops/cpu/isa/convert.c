/* convert.c: conversions between dtypes, compiled once for each instruction set; all give the same
 * bits. */
#include "ops/cpu/convert.h"

#include <string.h>
#if defined(__F16C__)
#include <immintrin.h>
#endif

/* The bodies are plain loops of which the compiler makes vector code; only f16 needs instructions
 * of its own. */
#define TO(name, type, target, expression)                    \
    static void name(target *out, const void *from, size_t n) \
    {                                                         \
        const type *in = from;                                \
        for (size_t i = 0; i < n; i++) {                      \
            type x = in[i];                                   \
            out[i] = expression;                              \
        }                                                     \
    }
#define FROM(name, type, source, expression)               \
    static void name(void *to, const source *in, size_t n) \
    {                                                      \
        type *out = to;                                    \
        for (size_t i = 0; i < n; i++) {                   \
            source x = in[i];                              \
            out[i] = expression;                           \
        }                                                  \
    }

/* The computing types need no conversion, but callers find one in the table for every dtype.
 * memmove allows the buffers to be the same. */
static void f32_copy(float *out, const void *in, size_t n) { memmove(out, in, n * sizeof *out); }
static void f32_copy_back(void *out, const float *in, size_t n)
{
    memmove(out, in, n * sizeof *in);
}
static void i64_copy(int64_t *out, const void *in, size_t n) { memmove(out, in, n * sizeof *out); }
static void i64_copy_back(void *out, const int64_t *in, size_t n)
{
    memmove(out, in, n * sizeof *in);
}

/* Rounds like ms_bf16_from_float, but computes both cases and selects, so that the compiler can
 * vectorise the loop. NaN is kept apart because adding the rounding bit could carry a NaN into
 * infinity; it becomes a quiet NaN with the same upper bits. */
static inline uint16_t bf16_bits(float value)
{
    uint32_t bits = ms_bits_from_float(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16, quiet = (bits >> 16) | 0x40u;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}
/* bf16 is the upper half of an f32, so widening is exact. */
TO(bf16_to_f32, uint16_t, float, ms_float_from_bf16(x))
FROM(bf16_from_f32, uint16_t, float, bf16_bits(x))

#if defined(__AVX512F__)
/* The instruction rounds to nearest even by its own argument, so it does not depend on the thread's
 * rounding mode. */
#define F16_LANES 16
static inline void f16_load(float *out, const uint16_t *in)
{
    _mm512_storeu_ps(out, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i_u *)in)));
}
static inline void f16_store(uint16_t *out, const float *in)
{
    _mm256_storeu_si256(
        (__m256i_u *)out,
        _mm512_cvtps_ph(_mm512_loadu_ps(in), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#elif defined(__F16C__)
#define F16_LANES 8
static inline void f16_load(float *out, const uint16_t *in)
{
    _mm256_storeu_ps(out, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i_u *)in)));
}
static inline void f16_store(uint16_t *out, const float *in)
{
    _mm_storeu_si128((__m128i_u *)out,
                     _mm256_cvtps_ph(_mm256_loadu_ps(in), _MM_FROUND_TO_NEAREST_INT));
}
#else
#define F16_LANES 1
/* Without the instruction a number is converted by integer arithmetic, which gives the same
 * bits. */
static inline void f16_load(float *out, const uint16_t *in) { *out = ms_float_from_f16(*in); }
static inline void f16_store(uint16_t *out, const float *in) { *out = ms_f16_from_float(*in); }
#endif

/* The last elements, fewer than F16_LANES, go through the portable functions, which give the same
 * values. */
static void f16_to_f32(float *out, const void *from, size_t n)
{
    /* The vectors are not aligned: a chunk may begin at any element. */
    const uint16_t *in = from;
    size_t i = 0;
    for (; i + F16_LANES <= n; i += F16_LANES) f16_load(out + i, in + i);
    for (; i < n; i++) out[i] = ms_float_from_f16(in[i]);
}
/* Rounds to nearest even on every path; too large numbers become infinite, and small ones
 * subnormal. */
static void f16_from_f32(void *to, const float *in, size_t n)
{
    uint16_t *out = to;
    size_t i = 0;
    for (; i + F16_LANES <= n; i += F16_LANES) f16_store(out + i, in + i);
    for (; i < n; i++) out[i] = ms_f16_from_float(in[i]);
}

/* Truncates to i64. 2^63 is the first f32 above the range; values outside are undefined in C and
 * become the bounds here, and NaN becomes 0. The result is then cut to the size of the target (the
 * lowest bits stay), which gcc defines for signed types. */
static inline int64_t whole(float x)
{
    if (x != x) return 0;
    if (x >= 9223372036854775808.0f) return INT64_MAX;
    if (x < -9223372036854775808.0f) return INT64_MIN;
    return (int64_t)x;
}

/* i64 and i32 beyond 2^24 are rounded, which an operator on integers avoids by computing in i64.
 * NaN is true as a bool, as it is not 0. */
TO(i64_to_f32, int64_t, float, (float)x)
TO(i32_to_f32, int32_t, float, (float)x)
TO(u16_to_f32, uint16_t, float, (float)x)
TO(u8_to_f32, uint8_t, float, (float)x)
TO(bool_to_f32, uint8_t, float, x != 0 ? 1.0f : 0.0f)
/* Fractions are cut off, as C does. */
FROM(i64_from_f32, int64_t, float, whole(x))
FROM(i32_from_f32, int32_t, float, (int32_t)whole(x))
FROM(u16_from_f32, uint16_t, float, (uint16_t)whole(x))
FROM(u8_from_f32, uint8_t, float, (uint8_t)whole(x))
FROM(bool_from_f32, uint8_t, float, x != 0.0f)

/* i64 holds every integer dtype, so these are exact; the way back keeps the lowest bits, as
 * unsigned arithmetic does. */
TO(i32_to_i64, int32_t, int64_t, x)
TO(u16_to_i64, uint16_t, int64_t, x)
TO(u8_to_i64, uint8_t, int64_t, x)
TO(bool_to_i64, uint8_t, int64_t, x != 0)
FROM(i32_from_i64, int32_t, int64_t, (int32_t)x)
FROM(u16_from_i64, uint16_t, int64_t, (uint16_t)x)
FROM(u8_from_i64, uint8_t, int64_t, (uint8_t)x)
FROM(bool_from_i64, uint8_t, int64_t, x != 0)

/* Floats have no way from and to i64: an operation on them computes in f32. */
const ms_convert_kernels MS_ISA_NAME(ms_convert_kernels) = {
    .to_f32 = { [MS_F32] = f32_copy,
                [MS_F16] = f16_to_f32,
                [MS_BF16] = bf16_to_f32,
                [MS_I64] = i64_to_f32,
                [MS_I32] = i32_to_f32,
                [MS_U16] = u16_to_f32,
                [MS_U8] = u8_to_f32,
                [MS_BOOL] = bool_to_f32 },
    .from_f32 = { [MS_F32] = f32_copy_back,
                  [MS_F16] = f16_from_f32,
                  [MS_BF16] = bf16_from_f32,
                  [MS_I64] = i64_from_f32,
                  [MS_I32] = i32_from_f32,
                  [MS_U16] = u16_from_f32,
                  [MS_U8] = u8_from_f32,
                  [MS_BOOL] = bool_from_f32 },
    .to_i64 = { [MS_I64] = i64_copy,
                [MS_I32] = i32_to_i64,
                [MS_U16] = u16_to_i64,
                [MS_U8] = u8_to_i64,
                [MS_BOOL] = bool_to_i64 },
    .from_i64 = { [MS_I64] = i64_copy_back,
                  [MS_I32] = i32_from_i64,
                  [MS_U16] = u16_from_i64,
                  [MS_U8] = u8_from_i64,
                  [MS_BOOL] = bool_from_i64 },
};
