/* gelu.h: the tanh form of gelu, x * gate(x), and its slope, for the files of isa/. */
#ifndef MOONSHARD_OPS_CPU_GELU_H
#define MOONSHARD_OPS_CPU_GELU_H

#include "ops/cpu/vector_math.h"

#define MS_GELU_SCALE 0.7978845608f /* sqrt(2 / pi) */
#define MS_GELU_CUBE 0.044715f

/* 0.5 (1 + tanh u) is sigmoid(2u), which keeps its relative accuracy where u is far below 0. */
MS_VECTOR ms_vf ms_v_gelu_gate(ms_vf x)
{
    return ms_v_sigmoid((2.0f * MS_GELU_SCALE) * (x + MS_GELU_CUBE * x * x * x));
}
MS_VECTOR ms_vf ms_v_gelu_slope(ms_vf x)
{
    /* From |x| = 16 on the slope is 0 or 1; without the bound x^2 would overflow and infinity * 0
     * be NaN. */
    x = ms_v_lesser(ms_v_splat(16.0f), ms_v_greater(ms_v_splat(-16.0f), x));
    ms_vf gate = ms_v_gelu_gate(x);
    return gate
           + gate * (1.0f - gate) * x * (2.0f * MS_GELU_SCALE)
                 * (1.0f + (3.0f * MS_GELU_CUBE) * x * x);
}

#endif
