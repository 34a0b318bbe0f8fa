/* orthonormalize.c: the columns of matrices, made orthonormal in place.
 *
 * Gram-Schmidt, from the first column to the last: each column is made orthogonal to those before
 * it and then scaled to length 1. PowerSGD needs it for its low-rank factors. There is no gradient:
 * a backward that comes here is an error. */
#include "ops/orthonormalize.h"

#include "moonshard/ops.h"
#include "tensor/op.h"
#include "ops/values.h"

/* [..., n, r] with r <= n, in place. A tensor with gaps is worked on in a contiguous copy, which is
 * copied back. The same tensor is read and written by the task, and both accesses are declared. */
static ms_status orthonormalize_forward(ms_op_call *call)
{
    ms_tensor *x = call->inputs[0], *out = NULL, *apart = NULL;
    ms_dtype dtype = ms_tensor_dtype(x);
    uint32_t dims = ms_tensor_dims(x);
    const int64_t *shape = ms_tensor_shape(x);
    double eps = call->attributes.norm.eps;
    if (!call->in_place) return ms_op_refuse(call, "it works in place only");
    if (!ms_dtype_is_float(dtype) || dims < 2)
        return ms_op_refuse(call, "it takes matrices [..., n, r] of f32, f16 or bf16");
    if (shape[dims - 1] > shape[dims - 2])
        return ms_op_refuse(call,
                            "%lld columns of %lld numbers cannot be orthogonal: r <= n is needed",
                            (long long)shape[dims - 1], (long long)shape[dims - 2]);
    if (!(eps >= 0)) return ms_op_refuse(call, "eps is %g: it must be 0 or more", eps);
    ms_status status = ms_op_output(call, 0, dtype, dims, shape, &out);
    if (status || ms_tensor_count(out) == 0) return status;
    /* The tensor itself where it is contiguous; then nothing is copied back. */
    status = ms_op_as_contiguous(call->engine, out, &apart);
    if (status) return status;
    ms_orthonormalize_args args = { .x = ms_tensor_data(apart),
                                    .n = shape[dims - 2],
                                    .r = shape[dims - 1],
                                    .eps = (float)eps,
                                    .dtype = (uint8_t)dtype };
    args.matrices = ms_tensor_count(apart) / (args.n * args.r);
    ms_task_cost cost = { .flops = 2.0 * (double)ms_tensor_count(apart) * (double)(args.r + 1),
                          .bytes = 2 * ms_tensor_bytes(apart) };
    status =
        ms_tensor_enqueue(call->engine, ms_engine_kernel(call->engine, MS_KERNEL_orthonormalize),
                          &args, &apart, 1, &apart, 1, cost);
    if (!status && apart != out) status = ms_copy_into(call->engine, apart, out);
    ms_tensor_release(apart);
    return status;
}

/* An error names the remedy; a gradient of 0 would let the model train on without a word. */
static ms_status orthonormalize_backward(ms_op_gradient *gradient)
{
    return ms_engine_fail(
        gradient->engine, MS_ERROR_ARGUMENT,
        "orthonormalize has no gradient: call it inside ms.no_grad, or on a detached tensor");
}

const ms_op ms_op_orthonormalize = {
    "orthonormalize", orthonormalize_forward, orthonormalize_backward, 1, 1, MS_OP_IN_PLACE
};
