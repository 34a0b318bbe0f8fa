/* scan.h: sums over the threads before each thread of a block. */
#ifndef MOONSHARD_OPS_CUDA_SCAN_H
#define MOONSHARD_OPS_CUDA_SCAN_H

#include "ops/cuda/device.h"

/* What the threads before this one have handed in, together; *all: what all have. For blocks of
 * THREADS_X threads in one row. `shared` has 32 places for it and is free again when the call
 * returns. */
template <class T> MS_DEVICE T ms_sum_before(T value, T *shared, T *all)
{
    T sum = value;
    for (int back = 1; back < MS_WARP; back *= 2) {
        T other = ms_warp_from(sum, LANE < back ? LANE : LANE - back);
        if (LANE >= back) sum += other;
    }
    T before = ms_warp_from(sum, LANE == 0 ? 0 : LANE - 1), total = 0;
    if (LANE == 0) before = 0;
    if (LANE == MS_WARP - 1) shared[WARP] = sum;
    ms_barrier();
    for (int warp = 0; warp < THREADS_X / MS_WARP; warp++) {
        if (warp == WARP) before += total;
        total += shared[warp];
    }
    ms_barrier();
    *all = total;
    return before;
}

#endif
