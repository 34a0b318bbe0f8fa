/* sum_to.h: the reduction of rows, and sums over the dimensions along which an operand was
 * broadcast. */
#ifndef MOONSHARD_OPS_SUM_TO_H
#define MOONSHARD_OPS_SUM_TO_H

#include "ops/reduce_args.h"

/* How rows are reduced, apart from what they are: see ms_reduce_args. mean: divide by n. One task
 * of one kernel serves all kinds, so that a device has one reduction to write. */
typedef struct ms_reduce_call {
    ms_reduce_kind kind;
    double power, root;
    bool mean;
    ms_dtype dtype;
} ms_reduce_call;

/* Enqueues the reduction of rows of `in` into `out`, which is contiguous. how->dtype is the dtype
 * of out. */
ms_status ms_reduce_rows(ms_engine *engine, const ms_reduce_call *how, const ms_rows *rows,
                         ms_tensor *in, ms_tensor *out);
/* The gradient summed over the dimensions along which an operand like `to` was broadcast, in that
 * operand's shape; the gradient itself (retained) if there are none. Keeps the gradient's dtype.
 * Caller releases. */
ms_status ms_op_sum_to(ms_engine *engine, ms_tensor *gradient, const ms_tensor_info *to,
                       ms_tensor **out);

#endif
