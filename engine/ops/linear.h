/* linear.h: what surrounds the product of a linear layer: arguments of the kernels. */
#ifndef MOONSHARD_OPS_LINEAR_H
#define MOONSHARD_OPS_LINEAR_H

#include "ops/backend.h"

/* y = gelu(before), both contiguous; y may be before. cast: y once more in another dtype, or NULL.
 * The cast holds the value before y was rounded to its own dtype. */
typedef struct ms_activation_args {
    const void *before;
    void *y, *cast;
    int64_t count;
    uint8_t before_dtype, y_dtype, cast_dtype;
} ms_activation_args;

/* One pass over the gradient of a linear layer's result, [rows, width] with g_row elements from row
 * to row: h = g, or g * gelu'(before) where before, which is contiguous, is not NULL; out = h in
 * its dtype (contiguous, NULL: not wanted; it may be `before`); bias[width] = sums of h over the
 * rows (NULL: not wanted), f32 within 64 rows, then f64, in an order that depends on the shape
 * only. */
typedef struct ms_linear_gradient_args {
    const void *g, *before;
    void *out, *bias;
    int64_t rows, width, g_row;
    uint8_t g_dtype, before_dtype, out_dtype, bias_dtype;
} ms_linear_gradient_args;

#endif
