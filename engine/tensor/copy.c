/* copy.c: operators that copy: clone, contiguous, cast, copy, fill, cat, stack. */
#include "tensor/copy.h"

#include <math.h>
#include <string.h>

#include "moonshard/ops.h"
#include "tensor/elementwise.h"
#include "tensor/op.h"

/* ------------------------------------------------------------------ copying */

/* First and last byte of a tensor in its storage. */
static void span_of(const ms_tensor *tensor, int64_t *first, int64_t *last)
{
    int64_t size = (int64_t)ms_dtype_bytes(ms_tensor_dtype(tensor)), end = 0;
    for (uint32_t d = 0; d < ms_tensor_dims(tensor); d++)
        end += (ms_tensor_shape(tensor)[d] - 1) * ms_tensor_strides(tensor)[d];
    *first = ms_tensor_offset(tensor) * size;
    *last = *first + (end + 1) * size - 1;
}

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

ms_status ms_tensor_slice(ms_tensor *whole, uint32_t dim, int64_t start, int64_t length, bool drop,
                          ms_tensor **out)
{
    int64_t shape[MS_DIMS_MAX], strides[MS_DIMS_MAX];
    uint32_t dims = 0;
    for (uint32_t d = 0; d < ms_tensor_dims(whole); d++) {
        if (d == dim && drop) continue;
        shape[dims] = d == dim ? length : ms_tensor_shape(whole)[d];
        strides[dims++] = ms_tensor_strides(whole)[d];
    }
    return ms_tensor_window(whole, dims, shape, strides,
                            length == 0 ? 0 : start * ms_tensor_strides(whole)[dim], out);
}

/* Tensors of one dtype that do not overlap. */
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
    ms_status status = ms_op_unary(engine, &ms_op_clone, NULL, from, &apart);
    if (status == MS_OK) status = enqueue_copy(engine, apart, to);
    ms_tensor_release(apart);
    return status;
}

/* -------------------------------------------------- clone, contiguous, cast */

static ms_status clone_forward(ms_op_call *call)
{
    ms_tensor *in = call->inputs[0], *out = NULL;
    ms_status status =
        ms_op_output(call, 0, ms_tensor_dtype(in), ms_tensor_dims(in), ms_tensor_shape(in), &out);
    return status == MS_OK ? ms_copy_into(call->engine, in, out) : status;
}

static ms_status pass_backward(ms_op_gradient *gradient)
{
    if (gradient->needs[0] && gradient->gradients[0] != NULL)
        gradient->results[0] = ms_tensor_retain(gradient->gradients[0]);
    return MS_OK;
}

static ms_status contiguous_forward(ms_op_call *call)
{
    ms_tensor *in = call->inputs[0];
    return ms_tensor_is_contiguous(in) ? ms_tensor_alias(in, &call->outputs[0])
                                       : clone_forward(call);
}

static ms_status cast_forward(ms_op_call *call)
{
    ms_tensor *in = call->inputs[0], *out = NULL;
    ms_dtype dtype = call->attributes.cast.dtype;
    if ((unsigned)dtype >= MS_DTYPES)
        return ms_op_refuse(call, "there is no dtype number %d", (int)dtype);
    ms_status status = ms_op_output(call, 0, dtype, ms_tensor_dims(in), ms_tensor_shape(in), &out);
    return status == MS_OK ? ms_copy_into(call->engine, in, out) : status;
}

static ms_status cast_to(ms_engine *engine, ms_tensor *tensor, ms_dtype dtype, ms_tensor **out)
{
    if (ms_tensor_dtype(tensor) == dtype) {
        *out = ms_tensor_retain(tensor);
        return MS_OK;
    }
    ms_attributes to = { .cast = { .dtype = dtype } };
    return ms_op_unary(engine, &ms_op_cast, &to, tensor, out);
}

static ms_status cast_backward(ms_op_gradient *gradient)
{
    if (!gradient->needs[0] || gradient->gradients[0] == NULL) return MS_OK;
    return cast_to(gradient->engine, gradient->gradients[0], gradient->inputs[0].dtype,
                   &gradient->results[0]);
}

/* ------------------------------------------------------------ copy and fill */

static ms_status copy_forward(ms_op_call *call)
{
    ms_tensor *to = call->inputs[0], *from = call->inputs[1], *out = NULL;
    uint32_t dims = 0;
    int64_t shape[MS_DIMS_MAX];
    if (!call->in_place)
        return ms_op_refuse(call, "it works in place only: use clone for a new tensor");
    if (!ms_shape_broadcast(ms_tensor_dims(to), ms_tensor_shape(to), ms_tensor_dims(from),
                            ms_tensor_shape(from), &dims, shape)
        || !ms_shape_equal(dims, shape, ms_tensor_dims(to), ms_tensor_shape(to)))
        return ms_op_refuse(call, "the second shape does not broadcast to the first");
    ms_status status = ms_op_output(call, 0, ms_tensor_dtype(to), dims, shape, &out);
    return status == MS_OK ? ms_copy_into(call->engine, from, out) : status;
}

/* The old values are gone: no gradient flows to them. What was copied gets the gradient, summed
 * where it was repeated. */
static ms_status overwrite_backward(ms_op_gradient *gradient)
{
    ms_engine *engine = gradient->engine;
    const ms_tensor_info *to = &gradient->inputs[0];
    ms_tensor *zeros = NULL, *summed = NULL, *result = NULL;
    ms_status status = MS_OK;
    if (gradient->gradients[0] == NULL) return MS_OK;
    if (gradient->needs[0]) status = ms_op_full(engine, to->dtype, to->dims, to->shape, 0, &zeros);
    if (status == MS_OK && gradient->input_count > 1 && gradient->needs[1]) {
        status = ms_op_sum_to(engine, gradient->gradients[0], &gradient->inputs[1], &summed);
        if (status == MS_OK) status = cast_to(engine, summed, gradient->inputs[1].dtype, &result);
        ms_tensor_release(summed);
    }
    if (status != MS_OK) {
        ms_tensor_release(zeros);
        return status;
    }
    if (zeros != NULL) gradient->results[0] = zeros;
    if (result != NULL) gradient->results[1] = result;
    return MS_OK;
}

static uint64_t bits_of(ms_dtype dtype, double value)
{
    switch (dtype) {
    case MS_F32: return ms_bits_from_float((float)value);
    case MS_F16: return ms_f16_from_float((float)value);
    case MS_BF16: return ms_bf16_from_float((float)value);
    case MS_BOOL: return value != 0;
    default: return (uint64_t)(int64_t)value; /* wraps to the size when it is stored */
    }
}

static ms_status fill_number(ms_engine *engine, ms_tensor *out, double value)
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

static ms_status fill_forward(ms_op_call *call)
{
    ms_tensor *to = call->inputs[0], *from = call->input_count > 1 ? call->inputs[1] : NULL,
              *out = NULL, *one = NULL;
    double value = call->attributes.scalar.value;
    bool number = ms_dtype_is_float(ms_tensor_dtype(to)) || ms_tensor_dtype(to) == MS_BOOL;
    if (!call->in_place) return ms_op_refuse(call, "it works in place only");
    if (from != NULL && (ms_tensor_count(from) != 1 || ms_tensor_dims(from) > ms_tensor_dims(to)))
        return ms_op_refuse(
            call, "a fill value has one element, and no more dimensions than what it fills");
    if (from == NULL && !number && !(value == floor(value) && fabs(value) < 9.2e18))
        return ms_op_refuse(call, "%g is not a whole number that fits", value);
    ms_status status =
        ms_op_output(call, 0, ms_tensor_dtype(to), ms_tensor_dims(to), ms_tensor_shape(to), &out);
    if (status != MS_OK || from == NULL)
        return status == MS_OK ? fill_number(call->engine, out, value) : status;
    status = ms_tensor_window(from, 0, NULL, NULL, 0, &one);
    if (status == MS_OK) status = ms_copy_into(call->engine, one, out);
    ms_tensor_release(one);
    return status;
}

/* ------------------------------------------------------------ cat and stack */

/* Copies the inputs one behind the other along dim; with `stack` each is one position of a new
 * dimension. */
static ms_status join(ms_op_call *call, uint32_t dim, bool stack, uint32_t dims,
                      const int64_t *shape)
{
    ms_tensor *out = NULL;
    ms_status status = ms_op_output(call, 0, ms_tensor_dtype(call->inputs[0]), dims, shape, &out);
    int64_t at = 0;
    for (uint32_t i = 0; i < call->input_count && status == MS_OK; i++) {
        int64_t length = stack ? 1 : ms_tensor_shape(call->inputs[i])[dim];
        ms_tensor *part = NULL;
        if (ms_tensor_count(call->inputs[i]) > 0) {
            status = ms_tensor_slice(out, dim, at, length, stack, &part);
            if (status == MS_OK) status = ms_copy_into(call->engine, call->inputs[i], part);
            ms_tensor_release(part);
        }
        at += length;
    }
    return status;
}

static ms_status cat_forward(ms_op_call *call)
{
    const ms_tensor *first = call->inputs[0];
    uint32_t dims = ms_tensor_dims(first), dim = 0;
    int64_t shape[MS_DIMS_MAX];
    if (!ms_shape_dim(dims, call->attributes.dim.a, &dim))
        return ms_op_refuse(call, "there is no dimension %d", ms_dim_named(call->attributes.dim.a));
    memcpy(shape, ms_tensor_shape(first), dims * sizeof *shape);
    for (uint32_t i = 1; i < call->input_count; i++) {
        const ms_tensor *input = call->inputs[i];
        bool fits =
            ms_tensor_dims(input) == dims && ms_tensor_dtype(input) == ms_tensor_dtype(first);
        for (uint32_t d = 0; d < dims && fits; d++)
            fits = d == dim || ms_tensor_shape(input)[d] == shape[d];
        if (!fits)
            return ms_op_refuse(call,
                                "tensor %u does not fit the first: dtype and all sizes but that of "
                                "the joined dimension must be equal",
                                i + 1);
        shape[dim] += ms_tensor_shape(input)[dim];
    }
    return join(call, dim, false, dims, shape);
}

static ms_status stack_forward(ms_op_call *call)
{
    const ms_tensor *first = call->inputs[0];
    uint32_t dims = ms_tensor_dims(first), dim = 0;
    int64_t shape[MS_DIMS_MAX];
    if (dims == MS_DIMS_MAX)
        return ms_op_refuse(call, "the result would have more than %d dimensions", MS_DIMS_MAX);
    if (!ms_shape_dim(dims + 1, call->attributes.dim.a, &dim))
        return ms_op_refuse(call, "the result has no dimension %d",
                            ms_dim_named(call->attributes.dim.a));
    for (uint32_t i = 1; i < call->input_count; i++) {
        const ms_tensor *input = call->inputs[i];
        if (ms_tensor_dtype(input) != ms_tensor_dtype(first)
            || !ms_shape_equal(ms_tensor_dims(input), ms_tensor_shape(input), dims,
                               ms_tensor_shape(first)))
            return ms_op_refuse(call, "tensor %u differs from the first in shape or dtype", i + 1);
    }
    for (uint32_t d = 0; d <= dims; d++)
        shape[d] = d == dim ? call->input_count : ms_tensor_shape(first)[d - (d > dim)];
    return join(call, dim, true, dims + 1, shape);
}

/* Each input's gradient is a window of the gradient: nothing is copied. */
static ms_status join_backward(ms_op_gradient *gradient, bool stack)
{
    ms_tensor *g = gradient->gradients[0];
    uint32_t dim = 0;
    int64_t at = 0;
    if (g == NULL) return MS_OK;
    ms_shape_dim(ms_tensor_dims(g), gradient->attributes.dim.a, &dim);
    for (uint32_t i = 0; i < gradient->input_count; i++) {
        int64_t length = stack ? 1 : gradient->inputs[i].shape[dim];
        ms_status status = gradient->needs[i]
                               ? ms_tensor_slice(g, dim, at, length, stack, &gradient->results[i])
                               : MS_OK;
        if (status != MS_OK) {
            for (uint32_t k = 0; k < i; k++) {
                ms_tensor_release(gradient->results[k]);
                gradient->results[k] = NULL;
            }
            return status;
        }
        at += length;
    }
    return MS_OK;
}

static ms_status cat_backward(ms_op_gradient *gradient) { return join_backward(gradient, false); }
static ms_status stack_backward(ms_op_gradient *gradient) { return join_backward(gradient, true); }

const ms_op ms_op_clone = { "clone", clone_forward, pass_backward, 1, 1, 0 };
const ms_op ms_op_contiguous = {
    "contiguous", contiguous_forward, pass_backward, 1, 1, MS_OP_VIEW
};
const ms_op ms_op_cast = { "cast", cast_forward, cast_backward, 1, 1, 0 };
const ms_op ms_op_copy = { "copy", copy_forward, overwrite_backward, 2, 2, MS_OP_IN_PLACE };
const ms_op ms_op_fill = { "fill", fill_forward, overwrite_backward, 1, 2, MS_OP_IN_PLACE };
const ms_op ms_op_cat = { "cat", cat_forward, cat_backward, 1, 1, MS_OP_VARIADIC };
const ms_op ms_op_stack = { "stack", stack_forward, stack_backward, 1, 1, MS_OP_VARIADIC };
