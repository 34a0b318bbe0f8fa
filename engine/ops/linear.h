/* linear.h: what surrounds the product of a linear layer: arguments of the kernels, and gelu for
 * mlp.c. */
#ifndef MOONSHARD_OPS_LINEAR_H
#define MOONSHARD_OPS_LINEAR_H

#include "ops/backend.h"

/* y = gelu(before), both contiguous and of one dtype; y may be before. */
typedef struct ms_activation_args {
    const void *before;
    void *y;
    int64_t count;
    uint8_t dtype;
} ms_activation_args;

/* One pass over the gradient of a linear layer's result, [rows, width] with g_row elements from row
 * to row: h = g, or g * gelu'(before) where before, which is contiguous, is not NULL; out = h
 * (contiguous, NULL: not wanted; it may be `before`); bias[width] = sums of h over the rows (NULL:
 * not wanted), f32 within 64 rows, then f64, in an order that depends on the shape only. g, before
 * and out have one dtype. */
typedef struct ms_linear_gradient_args {
    const void *g, *before;
    void *out, *bias;
    int64_t rows, width, g_row;
    uint8_t dtype, bias_dtype;
} ms_linear_gradient_args;

/* gelu(before), contiguous, as a new tensor; before is contiguous. Caller releases. */
ms_status ms_gelu_new(ms_engine *engine, ms_tensor *before, ms_tensor **out);

#endif
