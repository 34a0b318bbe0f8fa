/* linear.h: what surrounds the product of a linear layer: arguments of the kernels, and what mlp.c
 * has in common with linear.c. */
#ifndef MOONSHARD_OPS_LINEAR_H
#define MOONSHARD_OPS_LINEAR_H

#include "ops/backend.h"
#include "tensor/op.h"

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
 * not wanted), f32 within 64 rows, then f64, in an order that depends on the shape only. most: see
 * ms_tensor_hold_most, of h as it is stored, most_count numbers, at least
 * ms_linear_most_count; NULL: not wanted, as always on a CPU. g, before and out have one dtype. */
typedef struct ms_linear_gradient_args {
    const void *g, *before;
    void *out, *bias;
    uint32_t *most;
    int64_t rows, width, g_row, most_count;
    uint8_t dtype, bias_dtype;
} ms_linear_gradient_args;

/* One for each block of a pass: blocks have 32 columns or more, and 64 rows or all. */
static inline int64_t ms_linear_most_count(int64_t rows, int64_t width)
{
    return (rows + 63) / 64 * ((width + 31) / 32);
}

/* gelu(before), contiguous, as a new tensor; before is contiguous. Caller releases. */
ms_status ms_gelu_new(ms_engine *engine, ms_tensor *before, ms_tensor **out);

/* Forward of a layer whose input is gelu(x), where codes are multiplied (ms_fp8_is_native). It
 * saves the weight's payload only. */
struct ms_op_call;
ms_status ms_linear_of_gelu(struct ms_op_call *call);

/* Whether a product makes gelu(before), and one that makes the gradient of gelu's result goes on to
 * that of `before`: the dtype and width fit, and the device is for a GPU. */
bool ms_products_make_gelu(const ms_engine *engine, const ms_tensor *before);
/* The gradient of a linear layer's x, which has this dtype and shape, as a new tensor: g w, times
 * gelu'(before) if `before` is not NULL (x = gelu(before), and ms_products_make_gelu). op: linear
 * or linear_t; weight: as it was multiplied; g: the gradient of the result, in any strides. Caller
 * releases. */
ms_status ms_linear_back(ms_engine *engine, const ms_op *op, ms_tensor *weight, ms_tensor *g,
                         ms_tensor *before, const ms_tensor_info *x, ms_tensor **out);

#endif
