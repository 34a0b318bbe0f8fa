/* random.c: inner loops that draw numbers, compiled once for each instruction set.
 *
 * A fused multiply-add rounds once where two instructions round twice, so this file is compiled without contraction: then every
 * operation is correctly rounded on all instruction sets, and a model starts from the same weights on all of them.
 */
#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif

#include "tensor/cpu/random.h"
#include "tensor/cpu/vector_math.h"

/* 16 Philox blocks from `block` on, side by side: words[w][l] is word w of block + l. The loops become vector code. */
static inline void draw(ms_random random, uint64_t block, uint32_t words[4][MS_LANES])
{
    uint32_t k0 = (uint32_t)random.seed, k1 = (uint32_t)(random.seed >> 32);
    uint64_t high = ms_random_high(random);
    uint32_t c0[MS_LANES], c1[MS_LANES], c2[MS_LANES], c3[MS_LANES];
    for (uint32_t l = 0; l < MS_LANES; l++) {
        c0[l] = (uint32_t)(block + l);
        c1[l] = (uint32_t)((block + l) >> 32);
        c2[l] = (uint32_t)high;
        c3[l] = (uint32_t)(high >> 32);
    }
    for (int round = 0; round < 10; round++) {
        for (int l = 0; l < MS_LANES; l++) {
            uint64_t p0 = (uint64_t)0xD2511F53u * c0[l], p1 = (uint64_t)0xCD9E8D57u * c2[l];
            c0[l] = (uint32_t)(p1 >> 32) ^ c1[l] ^ k0;
            c2[l] = (uint32_t)(p0 >> 32) ^ c3[l] ^ k1;
            c1[l] = (uint32_t)p1;
            c3[l] = (uint32_t)p0;
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    for (int l = 0; l < MS_LANES; l++) {
        words[0][l] = c0[l];
        words[1][l] = c1[l];
        words[2][l] = c2[l];
        words[3][l] = c3[l];
    }
}

/* Lane l of word w is element 4 l + w. */
static inline void deal(float *out, size_t n, ms_v16f v0, ms_v16f v1, ms_v16f v2, ms_v16f v3)
{
    float all[MS_RANDOM_GROUP], *to = n >= MS_RANDOM_GROUP ? out : all;
    for (size_t l = 0; l < MS_LANES; l++) {
        to[4 * l] = v0[l];
        to[4 * l + 1] = v1[l];
        to[4 * l + 2] = v2[l];
        to[4 * l + 3] = v3[l];
    }
    for (size_t i = 0; to == all && i < n; i++) out[i] = all[i];
}

MS_VECTOR ms_v16u word(const uint32_t *words) { return *(const ms_v16u *)words; }
/* In [0, 1), with 24 bits. */
MS_VECTOR ms_v16f unit(ms_v16u bits) { return __builtin_convertvector((ms_v16i)(bits >> 8), ms_v16f) * 5.9604644775390625e-08f; }
/* In (0, 1], down to 2^-33: the upper and the lower half are exact, so their sum is rounded once. */
MS_VECTOR ms_v16f positive_unit(ms_v16u bits)
{
    ms_v16f upper = __builtin_convertvector((ms_v16i)(bits >> 16), ms_v16f) * 1.52587890625e-05f;
    ms_v16f lower = (__builtin_convertvector((ms_v16i)(bits & 0xffffu), ms_v16f) + 0.5f) * 2.3283064365386963e-10f;
    return upper + lower;
}

static void uniform(float *out, size_t n, uint64_t position, const ms_random_args *args)
{
    const ms_v16f least = ms_v_splat(args->least), greatest = ms_v_splat(args->greatest);
    const float width = args->b - args->a;
    for (size_t i = 0; i < n; i += MS_RANDOM_GROUP) {
        uint32_t words[4][MS_LANES] __attribute__((aligned(64)));
        ms_v16f v[4];
        draw(args->random, (position + i) / 4, words);
        for (int w = 0; w < 4; w++) v[w] = ms_v_min(ms_v_max(unit(word(words[w])) * width + args->a, least), greatest);
        deal(out + i, n - i, v[0], v[1], v[2], v[3]);
    }
}

/* Box and Muller 1958: two normal numbers from two uniform ones; words 0 and 1 make elements 0 and 1 of a block, 2 and 3 the others. */
static void normal(float *out, size_t n, uint64_t position, const ms_random_args *args)
{
    for (size_t i = 0; i < n; i += MS_RANDOM_GROUP) {
        uint32_t words[4][MS_LANES] __attribute__((aligned(64)));
        ms_v16f v[4];
        draw(args->random, (position + i) / 4, words);
        for (int pair = 0; pair < 4; pair += 2) {
            ms_v16f radius = ms_v_sqrt(-2.0f * ms_v_log(positive_unit(word(words[pair])))), cosine, sine;
            ms_v_cos_sin_turns(unit(word(words[pair + 1])), &cosine, &sine);
            v[pair] = radius * cosine * args->b + args->a;
            v[pair + 1] = radius * sine * args->b + args->a;
        }
        deal(out + i, n - i, v[0], v[1], v[2], v[3]);
    }
}

static void dropout(float *out, const float *in, size_t n, uint64_t position, const ms_dropout_args *args)
{
    for (size_t i = 0; i < n; i += MS_RANDOM_GROUP) {
        uint32_t words[4][MS_LANES] __attribute__((aligned(64)));
        float factor[MS_RANDOM_GROUP];
        draw(args->random, (position + i) / 4, words);
        for (size_t l = 0; l < MS_LANES; l++)
            for (size_t w = 0; w < 4; w++) factor[4 * l + w] = words[w][l] >> 8 >= args->threshold ? args->scale : 0.0f;
        size_t m = n - i < MS_RANDOM_GROUP ? n - i : MS_RANDOM_GROUP;
        /* Not a product: infinity times 0 would be NaN. */
        for (size_t k = 0; k < m; k++) out[i + k] = factor[k] != 0.0f ? in[i + k] * factor[k] : 0.0f;
    }
}

const ms_random_kernels MS_ISA_NAME(ms_random_kernels) = { uniform, normal, dropout };
