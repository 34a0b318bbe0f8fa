/* gelu.h: the tanh form of gelu, x * gate(x), and its slope, for kernels. */
#ifndef MOONSHARD_OPS_CUDA_GELU_H
#define MOONSHARD_OPS_CUDA_GELU_H

#include "ops/cuda/device.h"

#define MS_GELU_SCALE 0.7978845608f /* sqrt(2 / pi) */
#define MS_GELU_CUBE 0.044715f

MS_DEVICE float ms_sigmoid(float x) { return ms_reciprocal(1.0f + expf(-x)); }

/* From |x| = 16 on the slopes are 0 or 1; the bound keeps x^2 finite. NaN stays. */
MS_DEVICE float ms_within_16(float x) { return x > 16.0f ? 16.0f : x < -16.0f ? -16.0f : x; }
/* 0.5 (1 + tanh u) is sigmoid(2u), which keeps its relative accuracy where u is far below 0. */
MS_DEVICE float ms_gelu_gate(float x)
{
    return ms_sigmoid((2.0f * MS_GELU_SCALE) * (x + MS_GELU_CUBE * x * x * x));
}
MS_DEVICE float ms_gelu_slope(float x)
{
    x = ms_within_16(x);
    float gate = ms_gelu_gate(x);
    return gate
           + gate * (1.0f - gate) * x * (2.0f * MS_GELU_SCALE)
                 * (1.0f + (3.0f * MS_GELU_CUBE) * x * x);
}

#endif
