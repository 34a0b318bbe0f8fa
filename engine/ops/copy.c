/* copy.c: operators that copy: clone, contiguous, cast, copy, fill, cat, stack.
 *
 * None of these operators saves a tensor: their gradients are the incoming gradient itself, moved
 * or cast. */

#include "ops/copy_args.h"

#include <math.h>
#include <string.h>

#include "moonshard/ops.h"
#include "ops/autocast.h"
#include "tensor/op.h"
#include "ops/values.h"
#include "ops/sum_to.h"

/* Copies source into tensor as a restore: the version stays if the source has not been written
 * since the drop. Both calls of ms_tensor_restoring enclose one copy, also when it fails: the state
 * must not stay set. */
ms_status ms_tensor_restore(ms_tensor *tensor, ms_tensor *source)
{
    ms_engine *engine = ms_tensor_engine(tensor);
    if (!ms_shape_equal(ms_tensor_dims(tensor), ms_tensor_shape(tensor), ms_tensor_dims(source),
                        ms_tensor_shape(source))
        || ms_tensor_storage(tensor) == ms_tensor_storage(source))
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "restore: the source must have the tensor's shape, and memory of its "
                              "own");
    ms_tensor_restoring(engine, tensor, source);
    ms_status status = ms_copy_into(engine, source, tensor);
    ms_tensor_restoring(engine, NULL, NULL);
    return status;
}

/* -------------------------------------------------- clone, contiguous, cast */

/* The result is contiguous and shares nothing with the input. Repeated elements of an expanded
 * input become elements of their own. */
static ms_status clone_forward(ms_op_call *call)
{
    ms_tensor *in = call->inputs[0], *out = NULL;
    ms_status status =
        ms_op_output(call, 0, ms_tensor_dtype(in), ms_tensor_dims(in), ms_tensor_shape(in), &out);
    return status ? status : ms_copy_into(call->engine, in, out);
}

/* y = x, dx = dy: the gradient goes on as it is, without a copy. Results of backward may be the
 * incoming gradient itself. */
static ms_status pass_backward(ms_op_gradient *gradient)
{
    if (gradient->needs[0] && gradient->gradients[0])
        gradient->results[0] = ms_tensor_retain(gradient->gradients[0]);
    return MS_OK;
}

/* The result is a view only if nothing had to be copied. The alias has no history of its own: the
 * tape gives the output one. */
static ms_status contiguous_forward(ms_op_call *call)
{
    ms_tensor *in = call->inputs[0];
    return ms_tensor_is_contiguous(in) ? ms_tensor_alias(in, &call->outputs[0])
                                       : clone_forward(call);
}

/* A copy even where the dtype is the same: the caller may write the result. Casts that a product
 * needs do not come here: see ms_tensor_cast_cached. */
static ms_status cast_forward(ms_op_call *call)
{
    ms_tensor *in = call->inputs[0], *out = NULL;
    ms_dtype dtype = call->attributes.cast.dtype;
    if ((unsigned)dtype >= MS_DTYPES)
        return ms_op_refuse(call, "there is no dtype number %d", (int)dtype);
    ms_status status = ms_op_output(call, 0, dtype, ms_tensor_dims(in), ms_tensor_shape(in), &out);
    return status ? status : ms_copy_into(call->engine, in, out);
}

/* dx = dy, in the dtype of x. The gradient of a cast to 16 bits thus arrives in f32 where x is
 * f32. */
static ms_status cast_backward(ms_op_gradient *gradient)
{
    if (!gradient->needs[0] || !gradient->gradients[0]) return MS_OK;
    return ms_op_as_dtype(gradient->engine, gradient->gradients[0], gradient->inputs[0].dtype,
                          &gradient->results[0]);
}

/* ------------------------------------------------------------ copy and fill */

/* to = from, broadcast and cast to the shape and dtype of `to`. `to` keeps its memory, so windows
 * on it see the new values. */
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
    return status ? status : ms_copy_into(call->engine, from, out);
}

/* For copy and fill: the old values are gone, so their gradient is 0. What was copied gets the
 * gradient, summed over the dimensions along which it was repeated, in its own dtype. Results are
 * filled in only after everything has succeeded. */
static ms_status overwrite_backward(ms_op_gradient *gradient)
{
    ms_engine *engine = gradient->engine;
    const ms_tensor_info *to = &gradient->inputs[0];
    ms_tensor *zeros = NULL, *summed = NULL, *result = NULL;
    ms_status status = MS_OK;
    if (!gradient->gradients[0]) return MS_OK;
    if (gradient->needs[0]) status = ms_op_full(engine, to->dtype, to->dims, to->shape, 0, &zeros);
    if (!status && gradient->input_count > 1 && gradient->needs[1]) {
        status = ms_op_sum_to(engine, gradient->gradients[0], &gradient->inputs[1], &summed);
        if (!status) status = ms_op_as_dtype(engine, summed, gradient->inputs[1].dtype, &result);
        ms_tensor_release(summed);
    }
    if (status) {
        ms_tensor_release(zeros);
        return status;
    }
    if (zeros) gradient->results[0] = zeros;
    if (result) gradient->results[1] = result;
    return MS_OK;
}

/* The value is a number of the attributes, or a tensor of one element, which is read on the device.
 * An integer target takes whole numbers only: rounding in silence would hide a mistake. A tensor as
 * value means that no value has to come to the host: a chain of tasks can compute what is filled
 * in. */
static ms_status fill_forward(ms_op_call *call)
{
    ms_tensor *to = call->inputs[0], *from = call->input_count > 1 ? call->inputs[1] : NULL,
              *out = NULL, *one = NULL;
    double value = call->attributes.scalar.value;
    /* Floats take every number, bool takes it as true or false. */
    bool number = ms_dtype_is_float(ms_tensor_dtype(to)) || ms_tensor_dtype(to) == MS_BOOL;
    if (!call->in_place) return ms_op_refuse(call, "it works in place only");
    if (from && (ms_tensor_count(from) != 1 || ms_tensor_dims(from) > ms_tensor_dims(to)))
        return ms_op_refuse(
            call, "a fill value has one element, and no more dimensions than what it fills");
    /* A little below 2^63, so that the conversion cannot overflow. */
    if (!from && !number && !(value == floor(value) && fabs(value) < 9.2e18))
        return ms_op_refuse(call, "%g is not a whole number that fits", value);
    ms_status status =
        ms_op_output(call, 0, ms_tensor_dtype(to), ms_tensor_dims(to), ms_tensor_shape(to), &out);
    if (status || !from) return status ? status : ms_fill_into(call->engine, out, value);
    /* The value without its dimensions, so that it broadcasts to any shape. */
    status = ms_tensor_window(from, 0, NULL, NULL, 0, &one);
    if (!status) status = ms_copy_into(call->engine, one, out);
    ms_tensor_release(one);
    return status;
}

/* ------------------------------------------------------------ cat and stack */

/* Copies the inputs one after the other along dim of the result; with `stack` each is one position
 * of a new dimension. One copy task for each input that has elements. Parts are windows of the
 * result, so each element is written once and nothing is copied twice. They may overlap no input,
 * as the result is new. */
static ms_status join(ms_op_call *call, ms_dtype dtype, uint32_t dim, bool stack, uint32_t dims,
                      const int64_t *shape)
{
    ms_tensor *out = NULL;
    ms_status status = ms_op_output(call, 0, dtype, dims, shape, &out);
    int64_t at = 0;
    for (uint32_t i = 0; i < call->input_count && !status; i++) {
        /* A stacked input is one position of the new dimension. */
        int64_t length = stack ? 1 : ms_tensor_shape(call->inputs[i])[dim];
        ms_tensor *part = NULL;
        /* An empty input adds nothing, and a window of size 0 needs no task. */
        if (ms_tensor_count(call->inputs[i]) > 0) {
            status = ms_tensor_slice(out, dim, at, length, stack, &part);
            if (!status) status = ms_copy_into(call->engine, call->inputs[i], part);
            ms_tensor_release(part);
        }
        at += length;
    }
    return status;
}

/* Whether the input's dtype goes with that of those before it, which becomes the shared one. */
static bool joins(const ms_op_call *call, const ms_tensor *input, ms_dtype *dtype)
{
    ms_dtype own = ms_tensor_dtype(input);
    return own == *dtype
           || (ms_dtype_is_float(own) && ms_dtype_is_float(*dtype)
               && ms_autocast_shared(call->engine, own, *dtype, dtype));
}

/* Inputs [.., n_i, ..] give [.., sum of n_i, ..]; all other sizes agree, and outside of autocast
 * the dtype. It is not promoted there: a silent cast of one input would hide a mistake. */
static ms_status cat_forward(ms_op_call *call)
{
    const ms_tensor *first = call->inputs[0];
    uint32_t dims = ms_tensor_dims(first), dim = 0;
    int64_t shape[MS_DIMS_MAX];
    ms_dtype dtype = ms_tensor_dtype(first);
    if (!ms_shape_dim(dims, call->attributes.dim.a, &dim))
        return ms_op_refuse(call, "there is no dimension %d", ms_dim_named(call->attributes.dim.a));
    memcpy(shape, ms_tensor_shape(first), dims * sizeof *shape);
    for (uint32_t i = 1; i < call->input_count; i++) {
        const ms_tensor *input = call->inputs[i];
        bool fits = ms_tensor_dims(input) == dims && joins(call, input, &dtype);
        for (uint32_t d = 0; d < dims && fits; d++)
            fits = d == dim || ms_tensor_shape(input)[d] == shape[d];
        if (!fits)
            return ms_op_refuse(call,
                                "tensor %u does not fit the first: dtype and all sizes but that of "
                                "the joined dimension must be equal",
                                i + 1);
        shape[dim] += ms_tensor_shape(input)[dim];
    }
    return join(call, dtype, dim, false, dims, shape);
}

/* k inputs of one shape and dtype; the result has a dimension of size k more. */
static ms_status stack_forward(ms_op_call *call)
{
    const ms_tensor *first = call->inputs[0];
    uint32_t dims = ms_tensor_dims(first), dim = 0;
    int64_t shape[MS_DIMS_MAX];
    ms_dtype dtype = ms_tensor_dtype(first);
    if (dims == MS_DIMS_MAX)
        return ms_op_refuse(call, "the result would have more than %d dimensions", MS_DIMS_MAX);
    /* The new dimension is counted in the result, so it can be the last one. */
    if (!ms_shape_dim(dims + 1, call->attributes.dim.a, &dim))
        return ms_op_refuse(call, "the result has no dimension %d",
                            ms_dim_named(call->attributes.dim.a));
    for (uint32_t i = 1; i < call->input_count; i++) {
        const ms_tensor *input = call->inputs[i];
        if (!joins(call, input, &dtype)
            || !ms_shape_equal(ms_tensor_dims(input), ms_tensor_shape(input), dims,
                               ms_tensor_shape(first)))
            return ms_op_refuse(call, "tensor %u differs from the first in shape or dtype", i + 1);
    }
    for (uint32_t d = 0; d <= dims; d++)
        shape[d] = d == dim ? call->input_count : ms_tensor_shape(first)[d - (d > dim)];
    return join(call, dtype, dim, true, dims + 1, shape);
}

/* dx_i in the dtype of x_i. */
static ms_status part_of(const ms_op_gradient *gradient, uint32_t i, uint32_t dim, int64_t at,
                         int64_t length, bool stack)
{
    ms_tensor *part = NULL;
    ms_status status = ms_tensor_slice(gradient->gradients[0], dim, at, length, stack, &part);
    if (!status)
        status = ms_op_as_dtype(gradient->engine, part, gradient->inputs[i].dtype,
                                &gradient->results[i]);
    ms_tensor_release(part);
    return status;
}

/* dx_i is the window of dy at which x_i was put: nothing is copied. After an error the windows that
 * were made are released here. The windows keep the whole of dy in memory as long as one of them is
 * used. */
static ms_status join_backward(ms_op_gradient *gradient, bool stack)
{
    ms_tensor *g = gradient->gradients[0];
    uint32_t dim = 0;
    int64_t at = 0;
    if (!g) return MS_OK;
    ms_shape_dim(ms_tensor_dims(g), gradient->attributes.dim.a, &dim);
    for (uint32_t i = 0; i < gradient->input_count; i++) {
        int64_t length = stack ? 1 : gradient->inputs[i].shape[dim];
        ms_status status =
            gradient->needs[i] ? part_of(gradient, i, dim, at, length, stack) : MS_OK;
        if (status) {
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

const ms_op ms_op_clone = { "clone", clone_forward, pass_backward, 1, 1, MS_OP_COPIES };
const ms_op ms_op_contiguous = {
    "contiguous", contiguous_forward, pass_backward, 1, 1, MS_OP_VIEW | MS_OP_PARTS
};
const ms_op ms_op_cast = { "cast", cast_forward, cast_backward, 1, 1, MS_OP_COPIES };
const ms_op ms_op_copy = {
    "copy", copy_forward, overwrite_backward, 2, 2, MS_OP_IN_PLACE | MS_OP_COPIES
};
const ms_op ms_op_fill = {
    "fill", fill_forward, overwrite_backward, 1, 2, MS_OP_IN_PLACE | MS_OP_OVERWRITES
};
const ms_op ms_op_cat = { "cat", cat_forward, cat_backward, 1, 1, MS_OP_VARIADIC };
const ms_op ms_op_stack = { "stack", stack_forward, stack_backward, 1, 1, MS_OP_VARIADIC };
