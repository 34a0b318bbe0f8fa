/* random.cu: kernels that draw numbers: the same bits as the CPU's (ops/cpu/isa/random.c). A
 * thread draws two Philox blocks, eight elements. Compiled without contraction. */
#include "ops/random.h"

#include "ops/cuda/philox.h"

MS_DEVICE void draw_words(const ms_random &random, int64_t chunk, uint32_t words[8])
{
    uint64_t high = ms_philox_high(random);
    ms_philox_words(random.seed, high, (uint64_t)chunk * 2, words);
    ms_philox_words(random.seed, high, (uint64_t)chunk * 2 + 1, words + 4);
}

/* ------------------------------------------------------------------ functions */

/* In (0, 1]; both halves are exact, so the sum is rounded once. */
MS_DEVICE float positive_unit(uint32_t word)
{
    float upper = (float)(int32_t)(word >> 16) * 1.52587890625e-05f;
    float lower = ((float)(int32_t)(word & 0xffffu) + 0.5f) * 2.3283064365386963e-10f;
    return upper + lower;
}

/* ms_v_log of ops/cpu/vector_math.h for normal numbers. */
MS_DEVICE float logarithm(float x)
{
    uint32_t bits = ms_bits(x);
    int32_t e = (int32_t)(bits - 0x3f3504f3u) >> 23;
    float m = ms_float(bits - ((uint32_t)e << 23)) - 1.0f, k = (float)e, s = m * m;
    float p = m * 6.746663153e-02f + -1.167564020e-01f;
    p = p * m + 1.188814491e-01f;
    p = p * m + -1.240558922e-01f;
    p = p * m + 1.421955526e-01f;
    p = p * m + -1.666799635e-01f;
    p = p * m + 2.000211924e-01f;
    p = p * m + -2.500000894e-01f;
    p = p * m + 3.333331347e-01f;
    float y = p * m * s + k * -2.12194440e-4f;
    y = y - s * 0.5f;
    return (m + y) + k * 0.693359375f;
}

/* ms_v_cos_sin_turns of ops/cpu/vector_math.h. */
MS_DEVICE void cos_sin_turns(float u, float *cosine, float *sine)
{
    const float shift = 12582912.0f;
    float shifted = u * 4.0f + shift;
    uint32_t quarter = ms_bits(shifted) & 3u;
    float r = u - (shifted - shift) * 0.25f, s = r * r;
    float p = s * 4.146989059e+01f + -7.669777679e+01f;
    p = p * s + 8.160520172e+01f;
    p = p * s + -4.134170151e+01f;
    p = (p * s + 6.283185482e+00f) * r;
    float q = s * -2.606452370e+01f + 6.023845673e+01f;
    q = q * s + -8.545677185e+01f;
    q = q * s + 6.493939209e+01f;
    q = q * s + -1.973920822e+01f;
    q = q * s + 1.0f;
    float c = quarter & 1u ? p : q, n = quarter & 1u ? q : p;
    *cosine = ms_float(ms_bits(c) ^ ((quarter + 1u) & 2u) << 30);
    *sine = ms_float(ms_bits(n) ^ (quarter & 2u) << 30);
}

/* The upper half of range * a draw of 64 bits. */
MS_DEVICE uint64_t scaled(uint64_t bits, uint64_t range)
{
    uint64_t ah = bits >> 32, al = bits & 0xffffffffu, bh = range >> 32, bl = range & 0xffffffffu;
    uint64_t middle = ah * bl + (al * bl >> 32), cross = (middle & 0xffffffffu) + al * bh;
    return ah * bh + (middle >> 32) + (cross >> 32);
}

/* -------------------------------------------------------------------- kernels */

MS_KERNEL_FREE(random_uniform, ms_random_args, 256)
{
    float width = args.b - args.a;
    for (int64_t chunk = GRID_FIRST; chunk * 8 < args.count; chunk += GRID_STEP) {
        uint32_t words[8];
        float x[8];
        draw_words(args.random, chunk, words);
        for (int k = 0; k < 8; k++) {
            float v = ms_philox_unit(words[k]) * width + args.a;
            v = args.least < v ? v : args.least;
            x[k] = v < args.greatest ? v : args.greatest;
        }
        ms_put8(args.out, chunk * 8, args.count, args.dtype, x);
    }
}

/* Box and Muller: two words make two numbers. */
MS_KERNEL_FREE(random_normal, ms_random_args, 256)
{
    for (int64_t chunk = GRID_FIRST; chunk * 8 < args.count; chunk += GRID_STEP) {
        uint32_t words[8];
        float x[8];
        draw_words(args.random, chunk, words);
        for (int k = 0; k < 8; k += 2) {
            float radius = sqrtf(-2.0f * logarithm(positive_unit(words[k]))), cosine, sine;
            cos_sin_turns(ms_philox_unit(words[k + 1]), &cosine, &sine);
            x[k] = radius * cosine * args.b + args.a;
            x[k + 1] = radius * sine * args.b + args.a;
        }
        ms_put8(args.out, chunk * 8, args.count, args.dtype, x);
    }
}

/* The two halves of a draw of 64 bits are of two blocks that differ in the counter's highest bit;
 * the second is the upper half. */
MS_KERNEL_FREE(random_integer, ms_random_args, 256)
{
    uint64_t high = ms_philox_high(args.random);
    for (int64_t block = GRID_FIRST; block * 4 < args.count; block += GRID_STEP) {
        uint32_t first[4], second[4];
        ms_philox_words(args.random.seed, high, (uint64_t)block, first);
        ms_philox_words(args.random.seed, high ^ 1ull << 63, (uint64_t)block, second);
        for (int k = 0; k < 4; k++) {
            uint64_t bits = (uint64_t)second[k] << 32 | first[k];
            if (block * 4 + k < args.count)
                ms_write_whole(args.out, block * 4 + k, args.dtype,
                               (int64_t)((uint64_t)args.first + scaled(bits, args.range)));
        }
    }
}

/* Not a product where an element is dropped: infinity times 0 would be NaN. `out` may be `in`: each
 * thread reads its elements before it writes them. */
MS_KERNEL_FREE(dropout, ms_dropout_args, 256)
{
    for (int64_t chunk = GRID_FIRST; chunk * 8 < args.count; chunk += GRID_STEP) {
        uint32_t words[8];
        float x[8];
        draw_words(args.random, chunk, words);
        ms_get8(args.in, chunk * 8, args.count, args.dtype, x);
        for (int k = 0; k < 8; k++) {
            bool kept = (words[k] >> 8) >= args.threshold && args.scale != 0.0f;
            x[k] = kept ? x[k] * args.scale : 0.0f;
        }
        ms_put8(args.out, chunk * 8, args.count, args.dtype, x);
    }
}
