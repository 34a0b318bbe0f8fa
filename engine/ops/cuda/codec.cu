/* codec.cu: floats to codes of 8, 4, 2 or 1 bits and back: the same bytes as the CPU's
 * (ops/cpu/isa/codec.c). Compiled without contraction. Threads take eight numbers at a time,
 * whose codes fill whole bytes. */
#include "ops/cuda/codec.h"

#include "ops/arithmetic.h"
#include "ops/cuda/small_float.h"

#define LEAST 1e-35f
#define MOST 0x1.fffffcp127f

/* ------------------------------------------------------------------------ codes */

/* A kind: bits of a code, the greatest number that a code represents, and both directions. */
template <int greatest, int shift> struct whole_code {
    static const int bits = shift ? 4 : 8;
    MS_DEVICE_MEMBER static float most() { return (float)greatest; }
    MS_DEVICE_MEMBER static uint32_t encode(float x, bool draws, float u)
    {
        float kept = lesser(greater(rounded(x, draws, u), -most()), most());
        return (whole_bits(kept) + (uint32_t)shift) & ((1u << bits) - 1u);
    }
    MS_DEVICE_MEMBER static float decode(uint32_t code)
    {
        return (float)(shift ? (int32_t)code - shift : (int32_t)(code << 24) >> 24);
    }
};
typedef whole_code<127, 0> int8_code;
typedef whole_code<7, 8> int4_code;

/* The codes 0 .. 3 of -3, -1, 1 and 3. */
struct int2_code {
    static const int bits = 2;
    MS_DEVICE_MEMBER static float most() { return 3.0f; }
    MS_DEVICE_MEMBER static uint32_t encode(float x, bool draws, float u)
    {
        if (draws)
            return whole_bits(lesser(greater(rounded((x + 3.0f) * 0.5f, draws, u), 0.0f), 3.0f))
                   & 3u;
        uint32_t is_small = fabsf(x) < 2.0f ? 1u : 0u;
        return (3u - is_small) ^ (ms_bits(x) >> 31) * 3u;
    }
    MS_DEVICE_MEMBER static float decode(uint32_t code)
    {
        return (float)((int32_t)(code << 1) - 3);
    }
};

typedef float_code<3, 121, 448> fp8_code;
typedef float_code<1, 127, 6> fp4_code;

struct sign_code {
    static const int bits = 1;
    MS_DEVICE_MEMBER static float most() { return 1.0f; }
    MS_DEVICE_MEMBER static uint32_t encode(float x, bool, float) { return ~ms_bits(x) >> 31; }
    MS_DEVICE_MEMBER static float decode(uint32_t code)
    {
        return (float)((int32_t)(code << 1) - 1);
    }
};

/* --------------------------------------------------------------------- memory */

/* Eight codes, of which `count` are there, to bytes and back. A scale need not be aligned. */
MS_DEVICE void put_codes(uint64_t codes, int bits, int64_t count, uint8_t *to)
{
    int bytes = count >= 8 ? bits : (int)((count * bits + 7) / 8);
    if (bytes == 8 && (uintptr_t)to % 8 == 0) *reinterpret_cast<uint64_t *>(to) = codes;
    else if (bytes == 4 && (uintptr_t)to % 4 == 0)
        *reinterpret_cast<uint32_t *>(to) = (uint32_t)codes;
    else
        for (int k = 0; k < bytes; k++) to[k] = (uint8_t)(codes >> 8 * k);
}
MS_DEVICE uint64_t get_codes(const uint8_t *from, int bits, int64_t count)
{
    int bytes = count >= 8 ? bits : (int)((count * bits + 7) / 8);
    if (bytes == 8 && (uintptr_t)from % 8 == 0) return *reinterpret_cast<const uint64_t *>(from);
    if (bytes == 4 && (uintptr_t)from % 4 == 0) return *reinterpret_cast<const uint32_t *>(from);
    uint64_t codes = 0;
    for (int k = 0; k < bytes; k++) codes |= (uint64_t)from[k] << 8 * k;
    return codes;
}

/* Where the scale and the codes of a block are: a row's payload has all scales first. */
struct place {
    int64_t first, n;
    uint8_t *scale, *codes;
};
MS_DEVICE place place_of(const ms_cuda_codec_call &args, int64_t row, int64_t block, int bits)
{
    const ms_codec_args &c = args.c;
    uint8_t *payload = static_cast<uint8_t *>(c.payload) + row * c.bytes;
    place p;
    p.first = block * c.codec.block;
    p.n = c.n - p.first < c.codec.block ? c.n - p.first : c.codec.block;
    p.scale = payload + (c.codec.bare ? 0 : block * 4);
    p.codes = payload + (c.codec.bare ? 0 : args.blocks * 4) + p.first * bits / 8;
    return p;
}

/* --------------------------------------------------------------------- encode */

MS_DEVICE float not_a_number(void) { return ms_float(0x7fc00000u); }

/* The greatest |x| of a block, or NaN if one is not finite; in all lanes. */
MS_DEVICE float greatest(const void *x, int64_t n, uint8_t dtype)
{
    float most = 0.0f;
    for (int64_t i = LANE * 8; i < n; i += MS_WARP * 8) {
        float v[8];
        ms_get8(x, i, n, dtype, v);
        /* NaN becomes infinity, too. */
        MS_UNROLL for (int k = 0; k < 8; k++) most =
            greater(most, lesser(fabsf(v[k]), ms_infinity()));
    }
    most = ms_warp_join(most, ms_greater());
    return most < ms_infinity() ? most : not_a_number();
}

/* The mean of |x| * factor, in the order of the CPU: 16 sums side by side, which are added 8, 4, 2
 * and 1 apart. Both halves of the warp make the same sums. */
MS_DEVICE float mean_of(const void *x, int64_t n, uint8_t dtype, float factor)
{
    float total = 0.0f;
    for (int64_t i = LANE % 16; i < n; i += 16) total += fabsf(ms_read_float(x, i, dtype)) * factor;
    for (int mask = 8; mask > 0; mask /= 2) total += ms_warp_xor(total, mask);
    return total / (float)n;
}
/* Where the sum overflows, it is made once more of numbers that are smaller by 2^64. */
MS_DEVICE float mean_size(const void *x, int64_t n, uint8_t dtype)
{
    float factor = 1.0f, mean = 0.0f;
    for (int walk = 0; walk < 2; walk++, factor = 0x1p-64f) {
        mean = mean_of(x, n, dtype, factor);
        if (mean - mean == 0.0f) break;
    }
    if (mean - mean != 0.0f) return not_a_number();
    return factor == 1.0f ? mean : lesser(mean, MOST * 0x1p-64f) * 0x1p64f;
}

/* See ops/cpu/isa/codec.c. */
template <class K> MS_DEVICE float shrinkage(void) { return K::bits == 2 ? 0.25f : 1.0f; }

/* The scale of a block, and the factor that divides by it: 0 where all codes are that of 0. */
template <class K>
MS_DEVICE float scale_of(const ms_codec &codec, const void *x, int64_t n, uint8_t dtype,
                         float *inverse)
{
    *inverse = 1.0f;
    if (K::bits == 1) return codec.bare ? 1.0f : mean_size(x, n, dtype);
    float most = greatest(x, n, dtype);
    *inverse = most >= LEAST ? K::most() / shrinkage<K>() / most : 0.0f;
    if (!(most >= LEAST)) return most == most ? 0.0f : most;
    return (most > MOST ? MOST : most) / K::most();
}

/* Eight numbers of a block, from i on. */
template <class K>
MS_DEVICE void encode_eight(const ms_cuda_codec_call &args, int64_t unit, const place &p, int64_t i,
                            const void *x, void *error, float scale, float inverse)
{
    const ms_codec_args &c = args.c;
    bool draws = c.codec.stochastic && inverse != 0.0f && K::bits > 1;
    uint32_t words[8] = { 0, 0, 0, 0, 0, 0, 0, 0 };
    float v[8];
    uint64_t codes = 0;
    if (draws) {
        uint64_t high = ms_random_high(c.random), at = (uint64_t)(unit * args.drawn + i) / 4;
        ms_philox(c.random.seed, high, at, words);
        ms_philox(c.random.seed, high, at + 1, words + 4);
    }
    ms_get8(x, i, p.n, c.dtype, v);
    MS_UNROLL for (int k = 0; k < 8; k++)
    {
        /* Not a product by 0: infinity times 0 would be NaN. */
        float scaled = K::bits == 1      ? v[k]
                       : inverse == 0.0f ? 0.0f
                                         : v[k] * shrinkage<K>() * inverse;
        uint64_t code = K::encode(scaled, draws, ms_random_unit(words[k]));
        v[k] -= K::decode((uint32_t)code) * scale;
        codes |= (i + k < p.n ? code : 0) << k * K::bits;
    }
    put_codes(codes, K::bits, p.n - i, p.codes + i * K::bits / 8);
    if (error != NULL) ms_put8(error, i, p.n, c.dtype, v);
}

/* A warp codes a block, in two walks: for the scale, and for the codes. `error` may be x. */
template <class K> MS_DEVICE void encode(const ms_cuda_codec_call &args)
{
    const ms_codec_args &c = args.c;
    int64_t units = c.rows * args.blocks, item = c.dtype == MS_F32 ? 4 : 2;
    for (int64_t unit = GRID_FIRST / MS_WARP; unit < units; unit += GRID_STEP / MS_WARP) {
        const place p = place_of(args, unit / args.blocks, unit % args.blocks, K::bits);
        int64_t at = (unit / args.blocks * c.n + p.first) * item;
        const char *x = static_cast<const char *>(c.x) + at;
        char *error = c.error != NULL ? static_cast<char *>(c.error) + at : NULL;
        float inverse, scale = scale_of<K>(c.codec, x, p.n, c.dtype, &inverse);
        if (LANE < 4 && !c.codec.bare) p.scale[LANE] = (uint8_t)(ms_bits(scale) >> 8 * LANE);
        ms_warp_barrier();
        for (int64_t i = LANE * 8; i < p.n; i += MS_WARP * 8)
            encode_eight<K>(args, unit, p, i, x, error, scale, inverse);
        ms_warp_barrier();
    }
}

/* --------------------------------------------------------------------- decode */

/* Eight numbers of a row, times the block's scale; added to v where `add`. */
template <class K>
MS_DEVICE void decode_eight(const ms_cuda_codec_call &args, int64_t row, int64_t first, bool add,
                            float v[8])
{
    int64_t block = first / args.c.codec.block;
    const place p = place_of(args, row, block, K::bits);
    int64_t i = first - p.first;
    uint32_t scale = 0x3f800000u;
    if (!args.c.codec.bare)
        scale = p.scale[0] | (uint32_t)p.scale[1] << 8 | (uint32_t)p.scale[2] << 16
                | (uint32_t)p.scale[3] << 24;
    uint64_t codes = get_codes(p.codes + i * K::bits / 8, K::bits, p.n - i);
    MS_UNROLL for (int k = 0; k < 8; k++)
    {
        uint32_t code = (uint32_t)(codes >> k * K::bits) & ((1u << K::bits) - 1u);
        float number = K::decode(code) * ms_float(scale);
        v[k] = add ? number + v[k] : number;
    }
}

/* With `sum` the rows are added in their order. */
template <class K> MS_DEVICE void decode(const ms_cuda_codec_call &args)
{
    const ms_codec_args &c = args.c;
    int64_t chunks = (c.n + 7) / 8, all = c.sum ? chunks : chunks * c.rows;
    for (int64_t at = GRID_FIRST; at < all; at += GRID_STEP) {
        float v[8] = { 0, 0, 0, 0, 0, 0, 0, 0 };
        int64_t first = at % chunks * 8, row = at / chunks;
        if (!c.sum) decode_eight<K>(args, row, first, false, v);
        for (int64_t other = 0; c.sum && other < c.rows; other++)
            decode_eight<K>(args, other, first, other > 0, v);
        ms_put8(static_cast<float *>(c.x) + row * c.n, first, c.n, MS_F32, v);
    }
}

#define KIND(name, blocks)                                                                      \
    MS_KERNEL_IN(encode_##name, ms_cuda_codec_call, 256, blocks) { encode<name##_code>(args); } \
    MS_KERNEL_FREE(decode_##name, ms_cuda_codec_call, 256) { decode<name##_code>(args); }
KIND(int8, 4)
KIND(int4, 4)
KIND(int2, 4)
KIND(fp8, 4)
KIND(fp4, 4)
KIND(sign, 5)
