/* philox.h: random numbers as kernels of a GPU draw them, the same as ops/cpu/random.c. Included
 * after device.h, by files that are compiled without contraction. */
#ifndef MOONSHARD_OPS_CUDA_PHILOX_H
#define MOONSHARD_OPS_CUDA_PHILOX_H

#include "ops/cuda/device.h"

MS_DEVICE uint64_t ms_philox_high(const ms_random &random)
{
    return random.step << 32 ^ random.draw;
}

/* The four words of a block: ms_philox of base.h. Elements 4 * block .. 4 * block + 3 of a draw
 * take one each. */
MS_DEVICE void ms_philox_words(uint64_t seed, uint64_t high, uint64_t block, uint32_t out[4])
{
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    uint32_t c0 = (uint32_t)block, c1 = (uint32_t)(block >> 32), c2 = (uint32_t)high,
             c3 = (uint32_t)(high >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

/* In [0, 1), with 24 bits. */
MS_DEVICE float ms_philox_unit(uint32_t word)
{
    return (float)(int32_t)(word >> 8) * 5.9604644775390625e-08f;
}

#endif
