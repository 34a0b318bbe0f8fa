/* order.h: elements of any dtype as integers in the order of the numbers, for kernels that choose.
 */
#ifndef MOONSHARD_OPS_CUDA_ORDER_H
#define MOONSHARD_OPS_CUDA_ORDER_H

#include "ops/cuda/device.h"

/* NaN is above all numbers. Both zeros are equal, so that their positions decide. */
MS_DEVICE int64_t ms_order_of(float x)
{
    if (ms_is_nan(x)) return INT64_MAX;
    if (x == 0.0f) return 0;
    uint32_t bits = ms_bits(x);
    return bits >> 31 ? -(int64_t)(bits & 0x7fffffffu) : (int64_t)bits;
}
MS_DEVICE bool ms_is_float(uint8_t dtype)
{
    return dtype == MS_F32 || dtype == MS_F16 || dtype == MS_BF16;
}
MS_DEVICE int64_t ms_read_order(const void *from, int64_t i, uint8_t dtype)
{
    return ms_is_float(dtype) ? ms_order_of(ms_read(from, i, dtype))
                              : ms_read_whole(from, i, dtype);
}

#endif
