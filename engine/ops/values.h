/* values.h: writing the values of tensors, below the operators: copies, casts, constants, and one
 * function at each position.
 *
 * Every operator is made of these. They enqueue kernels on the current stream, check neither shapes
 * nor dtypes, and record nothing on the tape. Tensors that they return belong to the caller. */
#ifndef MOONSHARD_OPS_VALUES_H
#define MOONSHARD_OPS_VALUES_H

#include "ops/elementwise_args.h"

/* Whether writing `out` position by position would change what other positions of `in` still have
 * to give: they share memory, and are not the same window. */
bool ms_tensor_overlaps(const ms_tensor *out, const ms_tensor *in);
/* The window of `whole` with `length` positions of dimension dim from start on; without that
 * dimension if `drop` (length 1). */
ms_status ms_tensor_slice(ms_tensor *whole, uint32_t dim, int64_t start, int64_t length, bool drop,
                          ms_tensor **out);

/* Casts and broadcasts `from` into `to`; they may overlap. */
ms_status ms_copy_into(ms_engine *engine, ms_tensor *from, ms_tensor *to);
/* A contiguous copy. */
ms_status ms_copy_new(ms_engine *engine, ms_tensor *from, ms_tensor **out);
/* The tensor itself (retained) if it is contiguous, otherwise a copy. */
ms_status ms_op_as_contiguous(ms_engine *engine, ms_tensor *tensor, ms_tensor **out);
/* The tensor itself (retained) if it has this dtype, otherwise a cast copy. */
ms_status ms_op_as_dtype(ms_engine *engine, ms_tensor *tensor, ms_dtype dtype, ms_tensor **out);

/* Sets every element to value, rounded to the dtype. Integers get its low bits. */
ms_status ms_fill_into(ms_engine *engine, ms_tensor *out, double value);
/* A new tensor filled with value. */
ms_status ms_op_full(ms_engine *engine, ms_dtype dtype, uint32_t dims, const int64_t *shape,
                     double value, ms_tensor **out);

/* Into an existing tensor, which may be one of the operands (in place). An operand that overlaps it
 * otherwise is copied first. */
ms_status ms_elementwise_into(ms_engine *engine, const ms_elementwise *call, ms_tensor *out);
/* Into a new tensor. */
ms_status ms_elementwise_new(ms_engine *engine, const ms_elementwise *call, ms_dtype dtype,
                             uint32_t dims, const int64_t *shape, ms_tensor **out);

#endif
