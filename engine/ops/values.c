/* values.c: tasks that copy, cast and fill, and one function at each position. */
#include "ops/values.h"

#include <string.h>

#include "ops/backend.h"
#include "ops/copy_args.h"
#include "tensor/op.h"
#include "tensor/tensor.h"

/* ------------------------------------------------------------------ windows */

/* First and last byte of a tensor in its storage. Only for tensors that have elements. Strides are
 * never negative, so the last position has the greatest offset. */
static void span_of(const ms_tensor *tensor, int64_t *first, int64_t *last)
{
    int64_t size = (int64_t)ms_dtype_bytes(ms_tensor_dtype(tensor)), end = 0;
    for (uint32_t d = 0; d < ms_tensor_dims(tensor); d++)
        end += (ms_tensor_shape(tensor)[d] - 1) * ms_tensor_strides(tensor)[d];
    *first = ms_tensor_offset(tensor) * size;
    *last = *first + (end + 1) * size - 1;
}

/* Whether both walk the same elements in the same order: then each position is read before it is
 * written. Dimensions of size 1 may differ in their strides, which are never used. */
static bool same_window(const ms_tensor *a, const ms_tensor *b)
{
    uint32_t dims = ms_tensor_dims(a);
    if (ms_tensor_dtype(a) != ms_tensor_dtype(b) || ms_tensor_offset(a) != ms_tensor_offset(b))
        return false;
    if (!ms_shape_equal(dims, ms_tensor_shape(a), ms_tensor_dims(b), ms_tensor_shape(b)))
        return false;
    for (uint32_t d = 0; d < dims; d++)
        if (ms_tensor_shape(a)[d] > 1 && ms_tensor_strides(a)[d] != ms_tensor_strides(b)[d])
            return false;
    return true;
}

/* Decided by the first and last bytes. Interleaved windows (even and odd columns) count as
 * overlapping although they share nothing: they cost a copy, no error. An exact test of two strided
 * windows would cost more than the rare copy. */
bool ms_tensor_overlaps(const ms_tensor *out, const ms_tensor *in)
{
    if (ms_tensor_storage(out) != ms_tensor_storage(in) || ms_tensor_count(out) == 0
        || ms_tensor_count(in) == 0)
        return false;
    if (same_window(out, in)) return false;
    int64_t out_first, out_last, in_first, in_last;
    span_of(out, &out_first, &out_last);
    span_of(in, &in_first, &in_last);
    return out_first <= in_last && in_first <= out_last;
}

/* An empty slice at the end of a dimension would begin past the memory, so it begins at the start.
 * The range is the caller's to check. */
ms_status ms_tensor_slice(ms_tensor *whole, uint32_t dim, int64_t start, int64_t length, bool drop,
                          ms_tensor **out)
{
    int64_t shape[MS_DIMS_MAX], strides[MS_DIMS_MAX];
    uint32_t dims = 0;
    for (uint32_t d = 0; d < ms_tensor_dims(whole); d++) {
        /* Its position is in the offset already. */
        if (d == dim && drop) continue;
        shape[dims] = d == dim ? length : ms_tensor_shape(whole)[d];
        strides[dims++] = ms_tensor_strides(whole)[d];
    }
    return ms_tensor_window(whole, dims, shape, strides,
                            length == 0 ? 0 : start * ms_tensor_strides(whole)[dim], out);
}

/* ------------------------------------------------------------------ copying */

/* Copies between tensors of one dtype that do not overlap, broadcasting `from`. The kernel moves
 * elements by their size only. So f16 and bf16, or i32 and f32, share one path, and NaNs keep their
 * bits. */
static ms_status enqueue_copy(ms_engine *engine, ms_tensor *from, ms_tensor *to)
{
    ms_copy_args args = { .to = ms_tensor_data(to),
                          .from = ms_tensor_data(from),
                          .size = (uint8_t)ms_dtype_bytes(ms_tensor_dtype(to)) };
    ms_loop_begin(&args.loop, ms_tensor_dims(to), ms_tensor_shape(to), ms_tensor_strides(to));
    ms_loop_set(&args.loop, 1, ms_tensor_dims(from), ms_tensor_shape(from),
                ms_tensor_strides(from));
    ms_loop_collapse(&args.loop, 2);
    ms_task_cost cost = { .bytes = ms_tensor_bytes(to) + ms_tensor_bytes(from) };
    return ms_tensor_enqueue(engine, ms_engine_kernel(engine, MS_KERNEL_copy), &args, &from, 1, &to,
                             1, cost);
}

/* A change of dtype is the elementwise kernel cast, which does its own check for overlaps.
 * Overlapping memory of one dtype is copied twice, by way of a new tensor. All copies of the layer
 * end here, also those of a restore. */
ms_status ms_copy_into(ms_engine *engine, ms_tensor *from, ms_tensor *to)
{
    if (ms_tensor_count(to) == 0) return MS_OK;
    if (ms_tensor_dtype(from) != ms_tensor_dtype(to)) {
        ms_elementwise call = { .kernel = MS_KERNEL_cast,
                                .operands = { { .tensor = from } },
                                .count = 1 };
        return ms_elementwise_into(engine, &call, to);
    }
    if (!ms_tensor_overlaps(to, from)) return enqueue_copy(engine, from, to);
    ms_tensor *apart = NULL;
    ms_status status = ms_copy_new(engine, from, &apart);
    if (!status) status = enqueue_copy(engine, apart, to);
    ms_tensor_release(apart);
    return status;
}

/* A new tensor with the shape of `from`, the dtype and from's values. The copy is contiguous
 * whatever the strides of `from`. */
static ms_status copy_as(ms_engine *engine, ms_tensor *from, ms_dtype dtype, ms_tensor **out)
{
    ms_tensor *copy = NULL;
    ms_status status =
        ms_tensor_new(engine, dtype, ms_tensor_dims(from), ms_tensor_shape(from), &copy);
    if (!status) status = ms_copy_into(engine, from, copy);
    if (!status) *out = copy;
    else ms_tensor_release(copy);
    return status;
}

ms_status ms_copy_new(ms_engine *engine, ms_tensor *from, ms_tensor **out)
{
    return copy_as(engine, from, ms_tensor_dtype(from), out);
}

/* Callers release the result in both cases, and take addresses from it and not from the tensor. */
ms_status ms_op_as_contiguous(ms_engine *engine, ms_tensor *tensor, ms_tensor **out)
{
    if (!ms_tensor_is_contiguous(tensor)) return ms_copy_new(engine, tensor, out);
    *out = ms_tensor_retain(tensor);
    return MS_OK;
}

/* A copy in another dtype is contiguous; the tensor itself may have any strides. */
ms_status ms_op_as_dtype(ms_engine *engine, ms_tensor *tensor, ms_dtype dtype, ms_tensor **out)
{
    if (ms_tensor_dtype(tensor) != dtype) return copy_as(engine, tensor, dtype, out);
    *out = ms_tensor_retain(tensor);
    return MS_OK;
}

/* ---------------------------------------------------------------- constants */

/* The value as an element of the dtype, in the low bytes. Rounding to 16 bits goes by way of f32,
 * as that of all computed values does. */
static uint64_t bits_of(ms_dtype dtype, double value)
{
    switch (dtype) {
    case MS_F32: return ms_bits_from_float((float)value);
    case MS_F16: return ms_f16_from_float((float)value);
    case MS_BF16: return ms_bf16_from_float((float)value);
    /* NaN is true. */
    case MS_BOOL: return value != 0;
    default: return (uint64_t)(int64_t)value; /* wraps to the size when it is stored */
    }
}

/* Filling writes bit patterns, so one kernel serves all dtypes of a size. The order of positions
 * does not matter, so the loop collapses a contiguous tensor of any dimensions to one row. */
ms_status ms_fill_into(ms_engine *engine, ms_tensor *out, double value)
{
    if (ms_tensor_count(out) == 0) return MS_OK;
    ms_dtype dtype = ms_tensor_dtype(out);
    ms_fill_args args = { .to = ms_tensor_data(out),
                          .bits = bits_of(dtype, value),
                          .size = (uint8_t)ms_dtype_bytes(dtype) };
    ms_loop_begin(&args.loop, ms_tensor_dims(out), ms_tensor_shape(out), ms_tensor_strides(out));
    ms_loop_collapse(&args.loop, 1);
    ms_task_cost cost = { .bytes = ms_tensor_bytes(out) };
    return ms_tensor_enqueue(engine, ms_engine_kernel(engine, MS_KERNEL_fill), &args, NULL, 0, &out,
                             1, cost);
}

/* On failure *out is untouched. Used for zeros where a gradient must exist and nothing has computed
 * one. */
ms_status ms_op_full(ms_engine *engine, ms_dtype dtype, uint32_t dims, const int64_t *shape,
                     double value, ms_tensor **out)
{
    ms_tensor *made = NULL;
    ms_status status = ms_tensor_new(engine, dtype, dims, shape, &made);
    if (!status) status = ms_fill_into(engine, made, value);
    if (!status) *out = made;
    else ms_tensor_release(made);
    return status;
}

/* ----------------------------------------------- a function at each position */

/* Arguments and cost of a call whose operands do not overlap the result. Operand k of the call is
 * operand k + 1 of the loop. Integers compute in 64 bits if neither the result nor an operand is a
 * float; a FLOP is counted for each element, whatever the function. The cost counts an operand's
 * bytes by its elements, which is too much for an expanded one. */
static void fill_arguments(const ms_elementwise *call, ms_tensor *const *operands, ms_tensor *out,
                           ms_elementwise_args *args, ms_task_cost *cost)
{
    memset(args, 0, sizeof *args);
    args->kernel = (uint8_t)call->kernel;
    args->operands = (uint8_t)call->count;
    args->value = call->value;
    args->high = call->high;
    args->out = ms_tensor_data(out);
    args->out_dtype = (uint8_t)ms_tensor_dtype(out);
    args->integers = !ms_dtype_is_float(ms_tensor_dtype(out));
    cost->bytes = ms_tensor_bytes(out);
    cost->flops = (double)ms_tensor_count(out);
    ms_loop_begin(&args->loop, ms_tensor_dims(out), ms_tensor_shape(out), ms_tensor_strides(out));
    for (uint32_t k = 0; k < call->count; k++) {
        const ms_tensor *operand = operands[k];
        /* A number needs no strides: those of ms_loop_begin are 0. */
        if (!operand) {
            args->in_dtype[k] = MS_NUMBER;
            args->number = call->operands[k].number;
            continue;
        }
        args->in[k] = ms_tensor_data(operand);
        args->in_dtype[k] = (uint8_t)ms_tensor_dtype(operand);
        args->integers = args->integers && !ms_dtype_is_float(ms_tensor_dtype(operand));
        cost->bytes += ms_tensor_bytes(operand);
        ms_loop_set(&args->loop, k + 1, ms_tensor_dims(operand), ms_tensor_shape(operand),
                    ms_tensor_strides(operand));
    }
    ms_loop_collapse(&args->loop, call->count + 1);
}

/* Whether a large operand is contiguous along another dimension than the result: walking it across
 * its cache lines takes many times as long as turning it with the blocked copy first. Small
 * operands stay in a cache, where the order of reading costs little. */
static bool is_turned(const ms_tensor *out, const ms_tensor *operand)
{
    ms_loop loop;
    ms_loop_begin(&loop, ms_tensor_dims(out), ms_tensor_shape(out), ms_tensor_strides(out));
    ms_loop_set(&loop, 1, ms_tensor_dims(operand), ms_tensor_shape(operand),
                ms_tensor_strides(operand));
    ms_loop_collapse(&loop, 2);
    uint32_t inner = loop.dims - 1;
    if (ms_tensor_count(operand) < 16 * 1024 || loop.strides[1][inner] <= 1
        || loop.shape[inner] < 16)
        return false;
    for (uint32_t d = 0; d < inner; d++)
        if (loop.strides[1][d] == 1 && loop.shape[d] >= 16) return true;
    return false;
}

/* One task; `out` keeps its greatest size, if that is asked for. */
static ms_status enqueue_elementwise(ms_engine *engine, const ms_elementwise *call,
                                     ms_tensor *const *operands, ms_tensor *out)
{
    ms_elementwise_args args;
    ms_task_cost cost = { 0 };
    ms_tensor *writes[] = { out, NULL };
    ms_status status = MS_OK;
    fill_arguments(call, operands, out, &args, &cost);
    if (call->gives_most)
        status = ms_tensor_new(engine, MS_I32, 1, (int64_t[]){ MS_ELEMENTWISE_MOST }, &writes[1]);
    if (status) return status;
    if (writes[1]) args.most = ms_tensor_data(writes[1]);
    status = ms_tensor_enqueue(engine, ms_engine_kernel(engine, call->kernel), &args, operands,
                               call->count, writes, 2, cost);
    if (!status && writes[1]) ms_tensor_hold_most(out, writes[1]);
    ms_tensor_release(writes[1]);
    return status;
}

/* Operands are copied first where they overlap the result in another window, or where walking them
 * is slow. A copy is held until the task is enqueued: stream order keeps its memory from being
 * reused earlier. An operand that is the same window as the result is not copied: kernels read a
 * position before they write it. */
ms_status ms_elementwise_into(ms_engine *engine, const ms_elementwise *call, ms_tensor *out)
{
    if (ms_tensor_count(out) == 0) return MS_OK;
    ms_tensor *operands[3] = { NULL, NULL, NULL }, *copies[3] = { NULL, NULL, NULL };
    ms_status status = MS_OK;
    for (uint32_t k = 0; k < call->count && !status; k++) {
        operands[k] = call->operands[k].tensor;
        if (!operands[k] || !(ms_tensor_overlaps(out, operands[k]) || is_turned(out, operands[k])))
            continue;
        status = ms_copy_new(engine, operands[k], &copies[k]);
        /* After an error it is NULL, and nothing is enqueued. */
        operands[k] = copies[k];
    }
    if (!status) status = enqueue_elementwise(engine, call, operands, out);
    for (uint32_t k = 0; k < 3; k++) ms_tensor_release(copies[k]);
    return status;
}

/* A result that has no memory yet can overlap nothing, but its operands may still be turned. */
ms_status ms_elementwise_new(ms_engine *engine, const ms_elementwise *call, ms_dtype dtype,
                             uint32_t dims, const int64_t *shape, ms_tensor **out)
{
    ms_tensor *made = NULL;
    ms_status status = ms_tensor_new(engine, dtype, dims, shape, &made);
    if (!status) status = ms_elementwise_into(engine, call, made);
    if (!status) *out = made;
    else ms_tensor_release(made);
    return status;
}
