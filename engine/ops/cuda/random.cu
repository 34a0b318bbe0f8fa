/* random.cu: kernels that draw numbers: the same bits as the CPU's (ops/cpu/isa/random.c). A
 * thread draws two Philox blocks, eight elements. Compiled without contraction. */
#include "ops/random.h"

#include "ops/arithmetic.h"
#include "ops/cuda/device.h"

MS_DEVICE void draw_words(const ms_random &random, int64_t chunk, uint32_t words[8])
{
    uint64_t high = ms_random_high(random);
    ms_philox(random.seed, high, (uint64_t)chunk * 2, words);
    ms_philox(random.seed, high, (uint64_t)chunk * 2 + 1, words + 4);
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
            float v = ms_random_unit(words[k]) * width + args.a;
            v = args.least < v ? v : args.least;
            x[k] = v < args.greatest ? v : args.greatest;
        }
        ms_put8(args.out, chunk * 8, args.count, args.dtype, x);
    }
}

/* Two words make two numbers. */
MS_KERNEL_FREE(random_normal, ms_random_args, 256)
{
    for (int64_t chunk = GRID_FIRST; chunk * 8 < args.count; chunk += GRID_STEP) {
        uint32_t words[8];
        float x[8];
        draw_words(args.random, chunk, words);
        for (int k = 0; k < 8; k += 2) {
            float first, second;
            ms_random_normal(words[k], words[k + 1], &first, &second);
            x[k] = first * args.b + args.a;
            x[k + 1] = second * args.b + args.a;
        }
        ms_put8(args.out, chunk * 8, args.count, args.dtype, x);
    }
}

MS_KERNEL_FREE(random_integer, ms_random_args, 256)
{
    uint64_t high = ms_random_high(args.random);
    for (int64_t block = GRID_FIRST; block * 4 < args.count; block += GRID_STEP) {
        uint32_t first[4], second[4];
        ms_philox(args.random.seed, high, (uint64_t)block, first);
        ms_philox(args.random.seed, high ^ MS_RANDOM_SECOND, (uint64_t)block, second);
        for (int k = 0; k < 4; k++) {
            if (block * 4 + k < args.count)
                ms_write_whole(args.out, block * 4 + k, args.dtype,
                               (int64_t)((uint64_t)args.first
                                         + ms_random_below(args.range, first[k], second[k])));
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
