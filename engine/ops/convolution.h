/* convolution.h: convolutions of planes: arguments of the kernels. */
#ifndef MOONSHARD_OPS_CONVOLUTION_H
#define MOONSHARD_OPS_CONVOLUTION_H

#include "ops/backend.h"
#include "ops/window.h"

/* Task arguments of conv2d, conv2d_data and conv2d_weight; all tensors are contiguous. With
 * `groups` groups of `channels` input and `results` output channels each:
 *
 *   x       [images, groups * channels, in]         weight [groups * results, channels, kernel]
 *   y and g [images, groups * results, out]         bias   [groups * results], f32
 *
 *   conv2d         out = y from x, weight, bias (or NULL)
 *   conv2d_data    out = the gradient of x from weight, g
 *   conv2d_weight  out = the gradient of weight (or NULL: not wanted) and dbias = that of the bias
 *                  (or NULL) from x, g; without images both are 0
 *
 * x, weight and g have in_dtype. Sums go on in f32 and are rounded to out_dtype (dbias_dtype) once,
 * in an order that depends on shapes only. */
typedef struct ms_convolution_args {
    const void *x, *weight, *g;
    const float *bias;
    void *out, *dbias;
    /* What the device's plan_convolution fills in: its library and plans; how many places of the
     * output are computed at once, and how many channels of the gradient of x. */
    const void *library, *plans[2][2];
    int64_t block, part;
    ms_window window;
    int64_t images, groups, channels, results;
    uint8_t kind; /* MS_KERNEL_conv2d, MS_KERNEL_conv2d_data or MS_KERNEL_conv2d_weight */
    uint8_t in_dtype, out_dtype, dbias_dtype;
} ms_convolution_args;

#endif
