/* reduce_args.h: arguments of the reducing kernels. */
#ifndef MOONSHARD_OPS_REDUCE_ARGS_H
#define MOONSHARD_OPS_REDUCE_ARGS_H

#include "tensor/op.h"
#include "ops/rows.h"

/* What a row becomes: a sum of x, |x|, x^2, |x|^power or products, or the greatest or least. */
typedef enum ms_reduce_kind {
    MS_REDUCE_ADD,
    MS_REDUCE_ADD_ABS,
    MS_REDUCE_ADD_SQUARES,
    MS_REDUCE_ADD_POWERS,
    MS_REDUCE_ADD_PRODUCTS,
    MS_REDUCE_GREATEST,
    MS_REDUCE_LEAST,
    MS_REDUCE_GREATEST_ABS,
    MS_REDUCE_KINDS
} ms_reduce_kind;

/* The sum is divided by `divisor`, then raised to 1 / root (root 1: left as it is). Sums go on in
 * f64 from block to block until they are rounded, once, to out_dtype. Of integers only ADD,
 * GREATEST and LEAST exist; they are computed in i64. */
typedef struct ms_reduce_args {
    ms_rows rows;
    void *out;
    const void *in, *second; /* second: the other factor of ADD_PRODUCTS */
    int64_t second_stride;
    double power, divisor, root;
    uint8_t kind, dtype, out_dtype;
} ms_reduce_args;

/* The lowest position in each row of the greatest (or least) element. NaN counts as the greatest
 * and as the least: the first one is found. */
typedef struct ms_reduce_arg_args {
    ms_rows rows;
    int64_t *out;
    const void *in;
    uint8_t dtype;
    bool least;
} ms_reduce_arg_args;

/* Running sums along the rows; reverse: from the end. `out` is contiguous [outer, n, inner];
 * integers are added in i64 and wrap. */
typedef struct ms_cumsum_args {
    ms_rows rows;
    void *out;
    const void *in;
    uint8_t dtype, out_dtype;
    bool reverse;
} ms_cumsum_args;

/* Counts of `count` elements with one stride, over [low, high]. Both bounds are inside; NaN and
 * values outside are not counted. */
typedef struct ms_histogram_args {
    int64_t *out;
    const void *in;
    int64_t count, stride, bins;
    double low, high;
    uint8_t dtype;
} ms_histogram_args;

#endif
