/* autocast.h: the dtypes of operators under autocast, and casts that are kept for the step.
 *
 * Under autocast to a dtype of 16 bits, as in PyTorch's table for CUDA:
 * - products and attention cast f32 operands to it, and their results have it;
 * - norms compute in f32, and their normalized results have it (PyTorch's are f32: the products
 *   that read them would cast them);
 * - exponentials, logarithms, powers, softmax, sums and losses take 16 bits and give f32;
 * - every other operator takes operands of f32 and 16 bits and gives f32, or the dtype that all
 *   operands have; in place it keeps the target's dtype.
 * Operands of bf16 and f16 are refused together. A gradient has the dtype of its tensor. Outside of
 * autocast operands have one dtype. */
#ifndef MOONSHARD_OPS_AUTOCAST_H
#define MOONSHARD_OPS_AUTOCAST_H

#include "tensor/op.h"
#include "tensor/state.h"

/* The dtype that operands of two float dtypes share: that of both, or under autocast f32 where one
 * is f32. False: there is none. */
bool ms_autocast_shared(const ms_engine *engine, ms_dtype a, ms_dtype b, ms_dtype *out);
/* The dtype of what an operator sums, or of an exponential, of this dtype: f32 under autocast, if
 * it has 16 bits. */
ms_dtype ms_autocast_wide(const ms_engine *engine, ms_dtype dtype);
/* The dtype of a product of these operands, and of its result; NULLs are passed over. Refuses the
 * call where they have none in common. */
ms_status ms_autocast_product(const ms_op_call *call, ms_tensor *const *operands, uint32_t count,
                              ms_dtype *out);

/* Computes the contents of a cast's storage again if they were dropped together with the storage of
 * its weight: takes memory, and casts on the current stream. Nothing happens to any other storage.
 * The version of the cast grows unless the weight is as it was, so that backward notices a weight
 * that has been stepped in between. */
ms_status ms_storage_recast(ms_storage *storage);

/* The tensor in dtype, or as a weight's payload of fp8.h (MS_U8): a cached cast if `keep` and there
 * is a valid one (kept until the step ends or the tensor changes). Caller releases. */
ms_status ms_tensor_cast_cached(ms_engine *engine, ms_tensor *tensor, ms_dtype dtype, bool keep,
                                ms_tensor **out);

/* For a task that changes all of an f32 weight: a tensor without values for the weight's next cast,
 * rounded to the nearest, which the task has to write. NULL: the weight has not been cast since the
 * last call, has gaps, or the peak of memory would grow. Earlier casts are dropped. Caller
 * releases. */
ms_status ms_tensor_next_cast(ms_engine *engine, ms_tensor *weight, ms_tensor **out);
/* Once that task is enqueued: the weight's cast is this one, which stays until it is used. NULL
 * does nothing. */
ms_status ms_tensor_keep_next_cast(ms_tensor *weight, ms_tensor *cast);

#endif
