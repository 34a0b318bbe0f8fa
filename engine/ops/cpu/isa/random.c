/* random.c: inner loops that draw numbers, compiled once for each instruction set.
 *
 * A fused multiply-add rounds once where two instructions round twice, so this file is compiled
 * without contraction: then every operation is correctly rounded on all instruction sets, and a
 * model starts from the same weights on all of them. */

/* Numbers are drawn in groups of 64, from 16 blocks: on every instruction set. */
#define MS_LANES 16

#include "ops/cpu/random.h"

#include "ops/cpu/vector_math.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

/* Products of 32-bit lanes, as upper and lower halves. The instruction multiplies every other lane,
 * so it runs twice; the compiler does not find it by itself. */
#if defined(__AVX512F__)
#define PRODUCT(a, b) (ms_part_l) _mm512_mul_epu32((__m512i)(a), (__m512i)(b))
#elif defined(__AVX2__)
#define PRODUCT(a, b) (ms_part_l) _mm256_mul_epu32((__m256i)(a), (__m256i)(b))
#elif defined(__SSE2__)
#define PRODUCT(a, b) (ms_part_l) _mm_mul_epu32((__m128i)(a), (__m128i)(b))
#else
#define PRODUCT(a, b) (((a)&0xffffffffu) * ((b)&0xffffffffu))
#endif
/* A register as 64-bit lanes, which is how the instruction leaves its products. */
typedef uint64_t ms_part_l __attribute__((vector_size(4 * MS_PART_LANES)));
/* 16 words, one of each of 16 blocks, as lanes, as one vector, or as the parts that a register
 * holds. */
typedef union words16 {
    uint32_t lane[MS_LANES];
    ms_vu whole;
    ms_part_l part[MS_PARTS];
} words16;

/* The 20 multiplications of a block of four numbers are most of the work of a uniform draw. */
MS_VECTOR void multiply(words16 x, uint32_t by, words16 *upper, words16 *lower)
{
    /* A scalar that is added to a vector is put into each of its lanes. */
    ms_part_l factor = (ms_part_l){ 0 } + by;
    for (int k = 0; k < MS_PARTS; k++) {
        ms_part_l even = PRODUCT(x.part[k], factor), odd = PRODUCT(x.part[k] >> 32, factor);
        upper->part[k] = (even >> 32) | (odd & 0xffffffff00000000u);
        lower->part[k] = (even & 0xffffffffu) | (odd << 32);
    }
}

/* 16 Philox blocks from `block` on, side by side: words[w] holds word w of each. Lane 4 g + p has
 * block 4 p + g, so that deal() below only moves numbers within four lanes, for which every
 * instruction set has an instruction. The words are those of ms_philox. */
MS_VECTOR void draw(ms_random random, uint64_t block, ms_vu words[4])
{
    uint32_t k0 = (uint32_t)random.seed, k1 = (uint32_t)(random.seed >> 32);
    uint64_t high = ms_random_high(random);
    words16 c0, c1, c2, c3;
    /* The four words of the counter, in the order of the reference implementation. */
    for (uint32_t l = 0; l < MS_LANES; l++) {
        uint64_t counter = block + 4 * (l % 4) + l / 4;
        c0.lane[l] = (uint32_t)counter;
        c1.lane[l] = (uint32_t)(counter >> 32);
        c2.lane[l] = (uint32_t)high;
        c3.lane[l] = (uint32_t)(high >> 32);
    }
    for (int round = 0; round < MS_PHILOX_ROUNDS; round++) {
        words16 upper0, lower0, upper1, lower1;
        multiply(c0, MS_PHILOX_FACTOR0, &upper0, &lower0);
        multiply(c2, MS_PHILOX_FACTOR1, &upper1, &lower1);
        c0.whole = upper1.whole ^ c1.whole ^ k0;
        c2.whole = upper0.whole ^ c3.whole ^ k1;
        c1 = lower1;
        c3 = lower0;
        k0 += MS_PHILOX_KEY0;
        k1 += MS_PHILOX_KEY1;
    }
    words[0] = c0.whole;
    words[1] = c1.whole;
    words[2] = c2.whole;
    words[3] = c3.whole;
}

#if defined(__AVX512F__)
#define PAIR(a, b, half) (ms_part_f) _mm512_unpack##half##_ps((__m512)(a), (__m512)(b))
#define PAIRS(a, b, half) (ms_part_f) _mm512_unpack##half##_pd((__m512d)(a), (__m512d)(b))
#elif defined(__AVX2__)
#define PAIR(a, b, half) (ms_part_f) _mm256_unpack##half##_ps((__m256)(a), (__m256)(b))
#define PAIRS(a, b, half) (ms_part_f) _mm256_unpack##half##_pd((__m256d)(a), (__m256d)(b))
#elif defined(__SSE2__)
#define PAIR(a, b, half) (ms_part_f) _mm_unpack##half##_ps((__m128)(a), (__m128)(b))
#define PAIRS(a, b, half) (ms_part_f) _mm_unpack##half##_pd((__m128d)(a), (__m128d)(b))
#endif

/* Stores words 0 .. 3 of 16 blocks in the order of the blocks: 64 elements, of which the first n
 * are wanted. It is a transposition of 4 x 4 lanes within each register. */
MS_VECTOR void deal(float *out, size_t n, const ms_vf v[4])
{
    /* A short last group goes through a buffer, so nothing after n is written. */
    float all[MS_RANDOM_GROUP], *to = n >= MS_RANDOM_GROUP ? out : all;
    ms_parts_f in[4] = { { .whole = v[0] },
                         { .whole = v[1] },
                         { .whole = v[2] },
                         { .whole = v[3] } },
               turned[4];
    for (int k = 0; k < MS_PARTS; k++) {
#if defined(PAIR)
        ms_part_f a = PAIR(in[0].part[k], in[1].part[k], lo),
                  b = PAIR(in[0].part[k], in[1].part[k], hi);
        ms_part_f c = PAIR(in[2].part[k], in[3].part[k], lo),
                  d = PAIR(in[2].part[k], in[3].part[k], hi);
        turned[0].part[k] = PAIRS(a, c, lo);
        turned[1].part[k] = PAIRS(a, c, hi);
        turned[2].part[k] = PAIRS(b, d, lo);
        turned[3].part[k] = PAIRS(b, d, hi);
#else
        for (int l = 0; l < MS_PART_LANES; l++)
            for (int w = 0; w < 4; w++) turned[l % 4].part[k][l / 4 * 4 + w] = in[w].part[k][l];
#endif
    }
    for (int p = 0; p < 4; p++) ms_v_store(to + p * MS_LANES, turned[p].whole);
    for (size_t i = 0; to == all && i < n; i++) out[i] = all[i];
}

/* ms_random_unit and ms_random_positive_unit of each lane. */
MS_VECTOR ms_vf unit(ms_vu bits)
{
    ms_vf upper = ms_v_from_int((ms_vi)(bits >> 8));
    return MS_UNIT(upper);
}
MS_VECTOR ms_vf positive_unit(ms_vu bits)
{
    ms_vf upper = ms_v_from_int((ms_vi)(bits >> 16)),
          lower = ms_v_from_int((ms_vi)(bits & 0xffffu));
    return MS_POSITIVE_UNIT(upper, lower);
}

/* Rounding of the product and the sum can reach the upper bound; the result is clamped to [least,
 * greatest]. */
static void uniform(float *out, size_t n, uint64_t position, const ms_random_args *args)
{
    const ms_vf least = ms_v_splat(args->least), greatest = ms_v_splat(args->greatest);
    const float width = args->b - args->a;
    for (size_t i = 0; i < n; i += MS_RANDOM_GROUP) {
        ms_vu words[4];
        ms_vf v[4];
        draw(args->random, (position + i) / 4, words);
        for (int w = 0; w < 4; w++)
            /* One word makes one number, without rejection, so every element has its own place in
             * the sequence. */
            v[w] = ms_v_min(ms_v_max(unit(words[w]) * width + args->a, least), greatest);
        deal(out + i, n - i, v);
    }
}

/* ms_random_normal of each lane. Words 0 and 1 make elements 0 and 1 of a block, words 2 and 3 the
 * others. */
static void normal(float *out, size_t n, uint64_t position, const ms_random_args *args)
{
    for (size_t i = 0; i < n; i += MS_RANDOM_GROUP) {
        ms_vu words[4];
        ms_vf v[4];
        draw(args->random, (position + i) / 4, words);
        for (int pair = 0; pair < 4; pair += 2) {
            ms_vf radius = ms_v_sqrt(-2.0f * ms_v_log(positive_unit(words[pair]))), cosine, sine;
            ms_v_cos_sin_turns(unit(words[pair + 1]), &cosine, &sine);
            v[pair] = radius * cosine * args->b + args->a;
            v[pair + 1] = radius * sine * args->b + args->a;
        }
        deal(out + i, n - i, v);
    }
}

/* An element is kept if its draw is not below the threshold. The factor is selected by a mask: the
 * scale or 0. in may be out: each element is read before it is written. */
static void dropout(float *out, const float *in, size_t n, uint64_t position,
                    const ms_dropout_args *args)
{
    const ms_vf threshold = ms_v_splat((float)args->threshold), scale = ms_v_splat(args->scale);
    for (size_t i = 0; i < n; i += MS_RANDOM_GROUP) {
        ms_vu words[4];
        ms_vf v[4];
        float factor[MS_RANDOM_GROUP];
        draw(args->random, (position + i) / 4, words);
        /* Below 2^24 both sides are exact as f32. */
        for (int w = 0; w < 4; w++)
            v[w] = (ms_vf)(ms_v_less_equal(threshold, ms_v_from_int((ms_vi)(words[w] >> 8)))
                           & (ms_vi)scale);
        deal(factor, MS_RANDOM_GROUP, v);
        size_t m = n - i < MS_RANDOM_GROUP ? n - i : MS_RANDOM_GROUP;
        /* Not a product: infinity times 0 would be NaN. */
        for (size_t k = 0; k < m; k++)
            out[i + k] = factor[k] != 0.0f ? in[i + k] * factor[k] : 0.0f;
    }
}

const ms_random_kernels MS_ISA_NAME(ms_random_kernels) = { uniform, normal, dropout };
