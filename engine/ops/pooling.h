/* pooling.h: the greatest element or the average of windows of planes: arguments of the kernels. */
#ifndef MOONSHARD_OPS_POOLING_H
#define MOONSHARD_OPS_POOLING_H

#include "ops/backend.h"
#include "ops/window.h"

/* Planes of x are [in], planes of y and g are [out]; all tensors are contiguous and of one float
 * dtype. The dilation is 1, and every window has an element of the input.
 *
 *   max_pool2d           out = y from `in` = x; index (or NULL) = the position in its plane of each
 *                        greatest element: the first of equal ones, the last NaN
 *   max_pool2d_backward  out = dx from `in` = g and index, which is trusted
 *   avg_pool2d           out = y from `in` = x: the sum divided by the elements of the window, or
 *                        with skip_padding by those that are in the input
 *   avg_pool2d_backward  out = dx from `in` = g
 *
 * Sums are added in f32, in row-major order, and rounded once. */
typedef struct ms_pool_args {
    const void *in;
    void *out;
    int32_t *index;
    ms_window window;
    int64_t planes;
    uint8_t dtype;
    bool skip_padding;
} ms_pool_args;

#endif
