/* convolution.h: what the convolution kernels of a GPU get.
 *
 * Each convolution is a product of two matrices for each group, whose elements are read where they
 * are:
 *
 *   kernel         rows             columns                depth
 *   conv2d         output channels  places of all images   input channels and window
 *   conv2d_data    input channels   elements of all images output channels and window
 *   conv2d_weight  output channels  input channels, window places of all images */
#ifndef MOONSHARD_OPS_CUDA_CONVOLUTION_H
#define MOONSHARD_OPS_CUDA_CONVOLUTION_H

#include "ops/convolution.h"

enum { MS_CUDA_CONVOLUTION_TILE = 64 };

typedef struct ms_cuda_convolution_call {
    const void *x, *weight, *g;
    const float *bias;
    void *out, *dbias;
    float *partial; /* conv2d_weight in several parts: their sums, [parts, rows of out, depth] */
    ms_window window;
    int64_t images, groups, channels, results;
    int64_t rows, columns, depth, row_tiles, column_tiles;
    int64_t parts, part; /* of the depth, and how long one is */
    uint8_t in_dtype, out_dtype, dbias_dtype;
} ms_cuda_convolution_call;

#endif
