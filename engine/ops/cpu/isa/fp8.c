/* fp8.c: the greatest size in a matrix, its numbers as codes of 8 bits, and back, 16 at a time.
 * Compiled without contraction, so that all instruction sets write the same bytes. */

#define MS_LANES 16

#include "ops/cpu/fp8.h"

#include <string.h>

#include "ops/cpu/small_float.h"

typedef uint8_t v16b __attribute__((vector_size(16)));

/* As integers the bits of sizes compare as the numbers do, also where a processor takes subnormal
 * numbers for 0. */
MS_VECTOR uint32_t most_of(const ms_dtype D, const void *x, size_t begin, size_t end)
{
    ms_vi most = ms_v_splat_int(0);
    uint32_t greatest = 0;
    for (size_t i = begin; i < end; i += MS_LANES) {
        ms_vi size = (ms_vi)ms_v_abs(ms_row_get(D, x, i)), is_greater = size > most;
        most = (size & is_greater) | (most & ~is_greater);
    }
    for (int l = 0; l < MS_LANES; l++)
        if ((uint32_t)most[l] > greatest) greatest = (uint32_t)most[l];
    return greatest;
}

/* A NaN, of which a matrix has none unless its scale is NaN, has the code that both formats share.
 */
MS_VECTOR void encode_all(const small_float F, const ms_dtype D, const ms_fp8_encode_args *args,
                          size_t begin, size_t end)
{
    float inverse =
        ms_float_from_bits(ms_fp8_inverse_bits(ms_bits_from_float(args->scales[0]->scale)));
    for (size_t i = begin; i < end; i += MS_LANES) {
        ms_vf scaled = ms_row_get(D, args->x, i) * inverse;
        ms_vi is_nan = ms_v_is_nan(scaled);
        ms_vu code = encode_float(scaled, NULL, F);
        code = (code & ~(ms_vu)is_nan) | (0x7fu & (ms_vu)is_nan);
        v16b bytes = __builtin_convertvector(code, v16b);
        memcpy(args->codes + i, &bytes, sizeof bytes);
    }
}

/* A code has up to four digits and a scale none, so bf16 holds their product. */
MS_VECTOR void decode_all(const small_float F, const ms_fp8_decode_args *args, size_t begin,
                          size_t end)
{
    float scale = args->scale->scale;
    for (size_t i = begin; i < end; i += MS_LANES) {
        v16b bytes;
        memcpy(&bytes, args->codes + i, sizeof bytes);
        ms_vf v = decode_float(__builtin_convertvector(bytes, ms_vu), F) * scale;
        ms_row_put(MS_BF16, args->out, i, v);
    }
}

static uint32_t most(const ms_fp8_encode_args *args, int64_t begin, int64_t end)
{
    if (args->dtype == MS_F32) return most_of(MS_F32, args->x, (size_t)begin, (size_t)end);
    return most_of(MS_BF16, args->x, (size_t)begin, (size_t)end);
}

#define FORMAT(name, F)                                                                     \
    static void encode_##name(const ms_fp8_encode_args *args, int64_t begin, int64_t end)   \
    {                                                                                       \
        if (args->dtype == MS_F32) encode_all(F, MS_F32, args, (size_t)begin, (size_t)end); \
        else encode_all(F, MS_BF16, args, (size_t)begin, (size_t)end);                      \
    }                                                                                       \
    static void decode_##name(const ms_fp8_decode_args *args, int64_t begin, int64_t end)   \
    {                                                                                       \
        decode_all(F, args, (size_t)begin, (size_t)end);                                    \
    }
FORMAT(e4m3, e4m3)
FORMAT(e5m2, e5m2)

static void encode(const ms_fp8_encode_args *args, int64_t begin, int64_t end)
{
    (args->format == MS_FP8_E4M3 ? encode_e4m3 : encode_e5m2)(args, begin, end);
}
static void decode(const ms_fp8_decode_args *args, int64_t begin, int64_t end)
{
    (args->format == MS_FP8_E4M3 ? decode_e4m3 : decode_e5m2)(args, begin, end);
}

const ms_fp8_kernels MS_ISA_NAME(ms_fp8_kernels) = { .most = most,
                                                     .encode = encode,
                                                     .decode = decode };
