/* fp8.c: the greatest size of numbers, the numbers as codes of 8 bits, and back, 16 at a time.
 * Compiled without contraction, so that all instruction sets write the same bytes. */

#define MS_LANES 16

#include "ops/cpu/fp8.h"

#include <string.h>

#include "ops/cpu/small_float.h"

typedef uint8_t v16b __attribute__((vector_size(16)));

/* As integers the bits of sizes compare as the numbers do, also where a processor takes subnormal
 * numbers for 0. */
MS_VECTOR ms_vi greater_of(ms_vi most, ms_vf x)
{
    ms_vi size = (ms_vi)ms_v_abs(x), is_greater = size > most;
    return (size & is_greater) | (most & ~is_greater);
}

MS_VECTOR uint32_t most_of(const ms_dtype D, const void *x, size_t begin, size_t end)
{
    ms_vi most = ms_v_splat_int(0);
    uint32_t greatest = 0;
    size_t i = begin;
    for (; i + MS_LANES <= end; i += MS_LANES) most = greater_of(most, ms_row_get(D, x, i));
    if (i < end) most = greater_of(most, ms_row_get_part(D, x, i, end, 0));
    for (int l = 0; l < MS_LANES; l++)
        if ((uint32_t)most[l] > greatest) greatest = (uint32_t)most[l];
    return greatest;
}

/* A NaN, of which there is none unless the scale is NaN, has the code that both formats share. */
MS_VECTOR v16b codes_of(const small_float F, ms_vf x, float inverse)
{
    ms_vf scaled = x * inverse;
    ms_vi is_nan = ms_v_is_nan(scaled);
    ms_vu code = encode_float(scaled, NULL, F);
    code = (code & ~(ms_vu)is_nan) | (0x7fu & (ms_vu)is_nan);
    return __builtin_convertvector(code, v16b);
}

MS_VECTOR void encode_all(const small_float F, const ms_dtype D, const ms_fp8_numbers *n,
                          size_t begin, size_t end)
{
    float inverse = ms_float_from_bits(ms_fp8_inverse_bits(ms_bits_from_float(n->scale)));
    uint8_t *codes = n->to;
    size_t i = begin;
    for (; i + MS_LANES <= end; i += MS_LANES) {
        v16b bytes = codes_of(F, ms_row_get(D, n->from, i), inverse);
        memcpy(codes + i, &bytes, sizeof bytes);
    }
    if (i == end) return;
    v16b bytes = codes_of(F, ms_row_get_part(D, n->from, i, end, 0), inverse);
    memcpy(codes + i, &bytes, end - i);
}

/* A code has up to four digits and a scale none, so bf16 holds their product. */
MS_VECTOR void decode_all(const small_float F, const ms_dtype D, const ms_fp8_numbers *n,
                          size_t begin, size_t end)
{
    const uint8_t *codes = n->from;
    v16b bytes = { 0 };
    size_t i = begin;
    for (; i + MS_LANES <= end; i += MS_LANES) {
        memcpy(&bytes, codes + i, sizeof bytes);
        ms_row_put(D, n->to, i, decode_float(__builtin_convertvector(bytes, ms_vu), F) * n->scale);
    }
    if (i == end) return;
    memcpy(&bytes, codes + i, end - i);
    ms_row_put_part(D, n->to, i, end,
                    decode_float(__builtin_convertvector(bytes, ms_vu), F) * n->scale);
}

static uint32_t most(const ms_fp8_numbers *n, int64_t begin, int64_t end)
{
    if (n->dtype == MS_F32) return most_of(MS_F32, n->from, (size_t)begin, (size_t)end);
    return most_of(MS_BF16, n->from, (size_t)begin, (size_t)end);
}

#define FORMAT(name, F)                                                               \
    static void encode_##name(const ms_fp8_numbers *n, int64_t begin, int64_t end)    \
    {                                                                                 \
        if (n->dtype == MS_F32) encode_all(F, MS_F32, n, (size_t)begin, (size_t)end); \
        else encode_all(F, MS_BF16, n, (size_t)begin, (size_t)end);                   \
    }                                                                                 \
    static void decode_##name(const ms_fp8_numbers *n, int64_t begin, int64_t end)    \
    {                                                                                 \
        if (n->dtype == MS_F32) decode_all(F, MS_F32, n, (size_t)begin, (size_t)end); \
        else decode_all(F, MS_BF16, n, (size_t)begin, (size_t)end);                   \
    }
FORMAT(e4m3, e4m3)
FORMAT(e5m2, e5m2)

static void encode(const ms_fp8_numbers *n, int64_t begin, int64_t end)
{
    (n->format == MS_FP8_E4M3 ? encode_e4m3 : encode_e5m2)(n, begin, end);
}
static void decode(const ms_fp8_numbers *n, int64_t begin, int64_t end)
{
    (n->format == MS_FP8_E4M3 ? decode_e4m3 : decode_e5m2)(n, begin, end);
}

const ms_fp8_kernels MS_ISA_NAME(ms_fp8_kernels) = { .most = most,
                                                     .encode = encode,
                                                     .decode = decode };
