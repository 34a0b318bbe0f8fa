/* reduce.h: arguments of the reducing kernels, and what other operators use of them. */
#ifndef MOONSHARD_TENSOR_REDUCE_H
#define MOONSHARD_TENSOR_REDUCE_H

#include "tensor/op.h"
#include "tensor/rows.h"

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

/* The sum is divided by `divisor`, then raised to 1 / root (root 1: left as it is). */
typedef struct ms_reduce_args {
    ms_rows rows;
    void *out;
    const void *in, *second; /* second: the other factor of ADD_PRODUCTS */
    int64_t second_stride;
    double power, divisor, root;
    uint8_t kind, dtype, out_dtype;
} ms_reduce_args;

typedef struct ms_reduce_arg_args {
    ms_rows rows;
    int64_t *out;
    const void *in;
    uint8_t dtype;
    bool least;
} ms_reduce_arg_args;

typedef struct ms_cumsum_args {
    ms_rows rows;
    void *out;
    const void *in;
    uint8_t dtype, out_dtype;
    bool reverse;
} ms_cumsum_args;

typedef struct ms_histogram_args {
    int64_t *out;
    const void *in;
    int64_t count, stride, bins;
    double low, high;
    uint8_t dtype;
} ms_histogram_args;

/* gradient summed over the dimensions along which `to` was broadcast; itself (retained) if none. */
ms_status ms_op_sum_to(ms_engine *engine, ms_tensor *gradient, const ms_tensor_info *to,
                       ms_tensor **out);

#endif
