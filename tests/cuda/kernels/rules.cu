/* rules.cu: kernels that break the rules of device.h, and some that keep them; for
 * tests/unit/cuda_order.c. */
#include "ops/cuda/device.h"

typedef struct rules_args {
    int64_t unused;
} rules_args;

MS_KERNEL(test_misses_barrier, rules_args, 64)
{
    if (THREAD_X < 32) ms_barrier();
    else ms_barrier();
}

MS_KERNEL(test_leaves_before_barrier, rules_args, 64)
{
    if (THREAD_X == 5) return;
    ms_barrier();
}

MS_KERNEL(test_misses_exchange, rules_args, 64)
{
    if (THREAD_X != 40) (void)ms_warp_xor(THREAD_X, 1);
}

MS_KERNEL(test_joins_apart, rules_args, 64)
{
    MS_SHARED(int32_t, sums, MS_WARP);
    if (THREAD_X < 32) (void)ms_block_join(THREAD_X, sums, ms_plus());
    else (void)ms_block_join(THREAD_X, sums, ms_plus());
}

MS_KERNEL(test_exchanges_apart, rules_args, 64)
{
    if (THREAD_X % 32 < 16) (void)ms_warp_xor(THREAD_X, 1);
    else (void)ms_warp_xor(THREAD_X, 1);
}

MS_KERNEL_FREE(test_is_not_free, rules_args, 64) { ms_barrier(); }

MS_KERNEL(test_sums, rules_args, 64)
{
    MS_SHARED(int32_t, sums, MS_WARP);
    (void)ms_block_join(THREAD_X, sums, ms_plus());
}

/* The element of the thread goes through its stack, or through shared memory to a neighbour. */
typedef struct pair_args {
    float *to;
    const float *from;
} pair_args;

MS_KERNEL_FREE(test_copies, pair_args, 32)
{
    volatile float kept[2] = { 0, args.from[THREAD_X] };
    args.to[THREAD_X] = kept[1];
}

MS_KERNEL(test_swaps, pair_args, 64)
{
    MS_SHARED(float, shared, 64);
    shared[THREAD_X] = args.from[THREAD_X];
    ms_barrier();
    args.to[THREAD_X] = ms_warp_xor(shared[63 - THREAD_X], 1);
}
