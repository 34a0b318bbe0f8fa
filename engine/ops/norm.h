/* norm.h: layer norm and RMS norm, alone or fused with the sum before them: arguments of the
 * kernels. */
#ifndef MOONSHARD_OPS_NORM_H
#define MOONSHARD_OPS_NORM_H

#include "ops/backend.h"

/* The dtypes of rows: of s, x, residual, y and its gradient, and the narrow dx; of weight and bias.
 */
typedef struct ms_norm_dtypes {
    uint8_t s, x, residual, y, narrow, weight;
} ms_norm_dtypes;

/* Rows of `width` contiguous elements; statistics in f32. weight, bias, residual and sum may be
 * NULL. y = (s - mean) * scale * weight + bias, s = x (+ residual, kept in sum), scale = 1 /
 * sqrt(variance + eps); mean is 0 for RMS norm. most: see ms_tensor_hold_most, of y, one number for
 * each row; NULL: not wanted, as always on a CPU. */
typedef struct ms_norm_args {
    const void *x, *residual, *weight, *bias;
    void *sum, *y;
    float *mean, *scale; /* [rows]; mean is NULL for RMS norm; both NULL: not kept */
    uint32_t *most;
    int64_t rows, width;
    double eps;
    ms_norm_dtypes dtypes;
    bool centered; /* layer norm */
} ms_norm_args;

/* dx = gradient of s through the norm, plus sum_gradient (of the other output) if not NULL; narrow
 * is dx once more, for a summand of 16 bits where s is f32. Results that are NULL are not computed.
 * Without rows dweight and dbias are zeros, which the task writes. most: the same of narrow, or of
 * dx where there is no narrow; the greatest of some rows may be that of one number, and others
 * are 0. */
typedef struct ms_norm_backward_args {
    const void *s, *weight, *gradient, *sum_gradient;
    const float *mean, *scale;
    void *dx, *narrow, *dweight, *dbias;
    uint32_t *most;
    int64_t rows, width;
    ms_norm_dtypes dtypes;
    bool centered;
} ms_norm_backward_args;

#endif
