/* view.c: operators that only look at the same memory in another way; reshape copies where no
 * strides can say it.
 *
 * Views cost the host a struct and the device nothing. An output shares inputs[0]'s storage, so a
 * write through one is seen through the other. Gradients of views are views of the incoming
 * gradient where the operator is invertible, and a new tensor otherwise. */

#include <string.h>

#include "moonshard/ops.h"
#include "ops/values.h"
#include "tensor/op.h"
#include "tensor/state.h"
#include "ops/sum_to.h"

/* A window on inputs[0] as the only output. ms_tensor_window checks what it may reach, so a mistake
 * in strides is an error and no access outside. */
static ms_status window(ms_op_call *call, uint32_t dims, const int64_t *shape,
                        const int64_t *strides, int64_t offset)
{
    return ms_tensor_window(call->inputs[0], dims, shape, strides, offset, &call->outputs[0]);
}

/* The dimension of inputs[0] that an attribute names; false if there is none. Negative numbers
 * count from the end. */
static bool find_dim(const ms_op_call *call, int32_t dim, uint32_t *out)
{
    return ms_shape_dim(ms_tensor_dims(call->inputs[0]), dim, out);
}

/* The error for that. Messages count dimensions from 1, as scripts do. */
static ms_status no_dim(const ms_op_call *call, int32_t dim)
{
    return ms_op_refuse(call, "there is no dimension %d", ms_dim_named(dim));
}

/* ------------------------------------------------------------ view, reshape */

/* The asked sizes, with a size of -1 worked out from the count of elements. It cannot be worked out
 * where another size is 0: any number would fit. The product of sizes is checked for overflow, as a
 * script may ask for any. */
static ms_status wanted_shape(const ms_op_call *call, int64_t *shape)
{
    uint32_t dims = call->attributes.shape.dims;
    int64_t count = ms_tensor_count(call->inputs[0]), known = 1, unknown = -1;
    if (dims > MS_DIMS_MAX)
        return ms_op_refuse(call, "a tensor has at most %d dimensions", MS_DIMS_MAX);
    for (uint32_t d = 0; d < dims; d++) {
        int64_t size = call->attributes.shape.sizes[d];
        shape[d] = size;
        if (size == -1 && unknown < 0) unknown = d;
        else if (size < 0)
            return ms_op_refuse(
                call, "size %lld is not possible: one size may be -1, all others are 0 or more",
                (long long)size);
        else if (__builtin_mul_overflow(known, size, &known))
            return ms_op_refuse(call, "the sizes are too large");
    }
    if (unknown >= 0 && known != 0 && count % known == 0) {
        shape[unknown] = count / known;
        known = count;
    }
    if (known != count || (unknown >= 0 && shape[unknown] < 0))
        return ms_op_refuse(call, "it has %lld elements, which the asked sizes do not hold",
                            (long long)count);
    return MS_OK;
}

/* The strides with which `shape` walks the tensor in order; false if there are none. From the
 * innermost dimension outwards, old dimensions that follow each other in memory form a run, and
 * each run must hold a whole number of new dimensions: a new dimension across the gap between two
 * runs would have no single stride. Dimensions of size 1 are skipped on both sides: their strides
 * are never used. A tensor without elements takes any shape. */
static bool view_strides(const ms_tensor *tensor, uint32_t dims, const int64_t *shape,
                         int64_t *strides)
{
    const int64_t *old_shape = ms_tensor_shape(tensor), *old_strides = ms_tensor_strides(tensor);
    int32_t old = (int32_t)ms_tensor_dims(tensor) - 1, now = (int32_t)dims - 1;
    if (ms_tensor_count(tensor) == 0) {
        for (uint32_t d = 0; d < dims; d++) strides[d] = 1;
        return true;
    }
    while (old >= 0) {
        /* It belongs to no run: its stride may be anything. */
        if (old_shape[old] == 1) {
            old--;
            continue;
        }
        /* A run: old dimensions, from `old` outwards, that one stride walks. */
        int64_t stride = old_strides[old], run = old_shape[old];
        for (old--; old >= 0 && (old_shape[old] == 1 || old_strides[old] == stride * run); old--)
            run *= old_shape[old];
        /* New dimensions are taken from the run until it is used up; sizes of 1 fit anywhere. */
        for (; now >= 0 && (run > 1 || shape[now] == 1); now--) {
            /* The new dimension would end within the run of another stride. */
            if (run % shape[now] != 0) return false;
            strides[now] = stride;
            stride *= shape[now];
            run /= shape[now];
        }
        if (run != 1) return false;
    }
    for (; now >= 0; now--) strides[now] = 1; /* only sizes of 1 are left */
    return true;
}

/* reshape copies where no strides can express the shape; view refuses, so that a script that relies
 * on sharing memory learns that it would not. The copy is contiguous, so it has strides for every
 * shape. It is a view of the copy that is returned, and the copy's memory lives as long as the
 * view. */
static ms_status reshape_to(ms_op_call *call, bool may_copy)
{
    int64_t shape[MS_DIMS_MAX], strides[MS_DIMS_MAX];
    uint32_t dims = call->attributes.shape.dims;
    ms_status status = wanted_shape(call, shape);
    if (status) return status;
    if (view_strides(call->inputs[0], dims, shape, strides))
        return window(call, dims, shape, strides, 0);
    if (!may_copy)
        return ms_op_refuse(
            call,
            "its strides do not allow this shape without a copy: use reshape, or contiguous first");
    ms_tensor *copy = NULL;
    status = ms_copy_new(call->engine, call->inputs[0], &copy);
    if (status) return status;
    view_strides(copy, dims, shape, strides);
    status = ms_tensor_window(copy, dims, shape, strides, 0, &call->outputs[0]);
    ms_tensor_release(copy);
    return status;
}

static ms_status view_forward(ms_op_call *call) { return reshape_to(call, false); }
static ms_status reshape_forward(ms_op_call *call) { return reshape_to(call, true); }

/* dx is g in the input's shape: for view, reshape, squeeze and unsqueeze. A reshape and no view,
 * since a gradient may have any strides, also 0. */
static ms_status shape_backward(ms_op_gradient *gradient)
{
    if (!gradient->needs[0] || !gradient->gradients[0]) return MS_OK;
    ms_attributes to = { .shape = { .dims = gradient->inputs[0].dims } };
    memcpy(to.shape.sizes, gradient->inputs[0].shape, sizeof to.shape.sizes);
    return ms_op_unary(gradient->engine, &ms_op_reshape, &to, gradient->gradients[0],
                       &gradient->results[0]);
}

/* ---------------------------------------------------- narrow, select, split */

/* `length` positions of one dimension from `start` on, counted from 0; messages count from 1, as
 * scripts do. The test is written without start + length, which could overflow. */
static ms_status narrow_forward(ms_op_call *call)
{
    const ms_tensor *in = call->inputs[0];
    int64_t start = call->attributes.dim.start, length = call->attributes.dim.length;
    uint32_t dim = 0;
    if (!find_dim(call, call->attributes.dim.a, &dim)) return no_dim(call, call->attributes.dim.a);
    int64_t size = ms_tensor_shape(in)[dim];
    if (start < 0 || length < 0 || start > size || length > size - start)
        return ms_op_refuse(
            call, "%lld elements from number %lld on do not lie in dimension %d of size %lld",
            (long long)length, (long long)start + 1, ms_dim_named(dim), (long long)size);
    return ms_tensor_slice(call->inputs[0], dim, start, length, false, &call->outputs[0]);
}

/* One position of a dimension, which is dropped from the shape. A window of the position's memory:
 * a script that writes it writes the tensor. */
static ms_status select_forward(ms_op_call *call)
{
    const ms_tensor *in = call->inputs[0];
    int64_t start = call->attributes.dim.start;
    uint32_t dim = 0;
    if (!find_dim(call, call->attributes.dim.a, &dim)) return no_dim(call, call->attributes.dim.a);
    if (start < 0 || start >= ms_tensor_shape(in)[dim])
        return ms_op_refuse(call, "element number %lld is outside dimension %d of size %lld",
                            (long long)start + 1, ms_dim_named(dim),
                            (long long)ms_tensor_shape(in)[dim]);
    return ms_tensor_slice(call->inputs[0], dim, start, 1, true, &call->outputs[0]);
}

/* dx is zeros with g copied into the slice. The rest of the tensor did not enter the result, so its
 * gradient is 0. Where many slices of one tensor are used, split's backward costs less: it writes
 * each element once. */
static ms_status slice_backward(ms_op_gradient *gradient, bool drop)
{
    const ms_tensor_info *info = &gradient->inputs[0];
    ms_tensor *whole = NULL, *part = NULL;
    uint32_t dim = 0;
    if (!gradient->needs[0] || !gradient->gradients[0]) return MS_OK;
    ms_shape_dim(info->dims, gradient->attributes.dim.a, &dim);
    ms_status status =
        ms_op_full(gradient->engine, info->dtype, info->dims, info->shape, 0, &whole);
    if (!status)
        status = ms_tensor_slice(whole, dim, gradient->attributes.dim.start,
                                 drop ? 1 : gradient->attributes.dim.length, drop, &part);
    if (!status) status = ms_copy_into(gradient->engine, gradient->gradients[0], part);
    if (!status) gradient->results[0] = ms_tensor_retain(whole);
    ms_tensor_release(part);
    ms_tensor_release(whole);
    return status;
}

/* `drop` says whether the gradient has the dimension. */
static ms_status narrow_backward(ms_op_gradient *gradient)
{
    return slice_backward(gradient, false);
}
static ms_status select_backward(ms_op_gradient *gradient)
{
    return slice_backward(gradient, true);
}

/* Adjoining slices that cover the dimension, one output each. A failure in the middle leaves the
 * first outputs to ms_op_run, which releases them. */
static ms_status split_forward(ms_op_call *call)
{
    ms_tensor *in = call->inputs[0];
    uint32_t dim = 0, count = call->attributes.split.count;
    const int64_t *sizes = call->attributes.split.sizes;
    int64_t sum = 0, at = 0;
    if (!find_dim(call, call->attributes.split.dim, &dim))
        return no_dim(call, call->attributes.split.dim);
    if (count != call->output_count)
        return ms_op_refuse(call, "%u sizes for %u results", count, call->output_count);
    for (uint32_t i = 0; i < count; i++) {
        if (sizes[i] < 0)
            return ms_op_refuse(call, "a part cannot have size %lld", (long long)sizes[i]);
        sum += sizes[i];
    }
    if (sum != ms_tensor_shape(in)[dim])
        return ms_op_refuse(call, "the parts add up to %lld, dimension %d has size %lld",
                            (long long)sum, ms_dim_named(dim), (long long)ms_tensor_shape(in)[dim]);
    ms_status status = MS_OK;
    for (uint32_t i = 0; i < count && !status; i++) {
        status = ms_tensor_slice(in, dim, at, sizes[i], false, &call->outputs[i]);
        at += sizes[i];
    }
    return status;
}

/* Whether the gradients of all parts have arrived and already are the parts of one tensor in
 * memory, as attention's backward makes them for the matrix of queries, keys and values. The
 * strides of all parts are equal, so the first part's strides walk the whole as well. */
static bool adjoining(const ms_op_gradient *gradient, uint32_t dim)
{
    const ms_tensor *first = gradient->gradients[0];
    int64_t at = 0;
    for (uint32_t i = 0; i < gradient->output_count; i++) {
        const ms_tensor *part = gradient->gradients[i];
        if (!part || part->storage != first->storage || part->offset - first->offset != at)
            return false;
        if (memcmp(part->strides, first->strides, first->dims * sizeof *first->strides) != 0)
            return false;
        /* Where the next part must begin. */
        at += part->shape[dim] * part->strides[dim];
    }
    return true;
}

/* dx is the whole of which the gradients are parts: a window on their memory if they adjoin.
 * Otherwise each part's gradient, or zeros where none arrived, is copied into its place of one new
 * tensor, so that every element is written once. Zeros are written only for parts whose output
 * nothing used. */
static ms_status split_backward(ms_op_gradient *gradient)
{
    const ms_tensor_info *info = &gradient->inputs[0];
    ms_tensor *whole = NULL;
    uint32_t dim = 0;
    int64_t at = 0;
    if (!gradient->needs[0]) return MS_OK;
    ms_shape_dim(info->dims, gradient->attributes.split.dim, &dim);
    /* No task and no memory in this case. */
    if (gradient->output_count > 0 && adjoining(gradient, dim))
        return ms_tensor_window(gradient->gradients[0], info->dims, info->shape,
                                gradient->gradients[0]->strides, 0, &gradient->results[0]);
    ms_status status =
        ms_tensor_new(gradient->engine, info->dtype, info->dims, info->shape, &whole);
    for (uint32_t i = 0; i < gradient->output_count && !status; i++) {
        int64_t length = gradient->outputs[i].shape[dim];
        ms_tensor *part = NULL, *g = gradient->gradients[i];
        status = ms_tensor_slice(whole, dim, at, length, false, &part);
        if (!status && g) status = ms_copy_into(gradient->engine, g, part);
        else if (!status) status = ms_fill_into(gradient->engine, part, 0);
        ms_tensor_release(part);
        at += length;
    }
    if (!status) gradient->results[0] = whole;
    else ms_tensor_release(whole);
    return status;
}

/* ----------------------------------------------- transpose, permute, expand */

/* Dimension d of the result is dimension order[d] of the input. It checks nothing: callers pass an
 * order in which each dimension occurs once. */
static ms_status permuted(ms_tensor *in, const uint32_t *order, ms_tensor **out)
{
    int64_t shape[MS_DIMS_MAX], strides[MS_DIMS_MAX];
    for (uint32_t d = 0; d < ms_tensor_dims(in); d++) {
        shape[d] = ms_tensor_shape(in)[order[d]];
        strides[d] = ms_tensor_strides(in)[order[d]];
    }
    return ms_tensor_window(in, ms_tensor_dims(in), shape, strides, 0, out);
}

/* The order that exchanges the two dimensions of the attributes; it is its own inverse. Both
 * numbers may be negative, and may be equal. */
static bool swap_order(uint32_t dims, const ms_attributes *attributes, uint32_t *order)
{
    uint32_t a = 0, b = 0;
    if (!ms_shape_dim(dims, attributes->dim.a, &a) || !ms_shape_dim(dims, attributes->dim.b, &b))
        return false;
    for (uint32_t d = 0; d < dims; d++) order[d] = d;
    order[a] = b;
    order[b] = a;
    return true;
}

/* A view with two dimensions exchanged; nothing moves in memory. A kernel that needs another order
 * in memory copies later, and a product reads it as it is. */
static ms_status transpose_forward(ms_op_call *call)
{
    uint32_t order[MS_DIMS_MAX];
    if (!swap_order(ms_tensor_dims(call->inputs[0]), &call->attributes, order))
        return ms_op_refuse(call, "there are no dimensions %d and %d",
                            ms_dim_named(call->attributes.dim.a),
                            ms_dim_named(call->attributes.dim.b));
    return permuted(call->inputs[0], order, &call->outputs[0]);
}

/* dx is g with the same two dimensions exchanged. The dimensions were checked by forward. */
static ms_status transpose_backward(ms_op_gradient *gradient)
{
    uint32_t order[MS_DIMS_MAX];
    if (!gradient->needs[0] || !gradient->gradients[0]) return MS_OK;
    swap_order(gradient->inputs[0].dims, &gradient->attributes, order);
    return permuted(gradient->gradients[0], order, &gradient->results[0]);
}

/* The order that the attributes list; false unless each dimension is named once. `seen` has a bit
 * for each dimension, so a repeated one leaves a gap. */
static bool permute_order(uint32_t dims, const ms_attributes *attributes, uint32_t *order)
{
    uint32_t seen = 0;
    if (attributes->shape.dims != dims) return false;
    for (uint32_t d = 0; d < dims; d++) {
        int64_t dim = attributes->shape.sizes[d];
        if (dim < INT32_MIN || dim > INT32_MAX || !ms_shape_dim(dims, (int32_t)dim, &order[d]))
            return false;
        seen |= 1u << order[d];
    }
    return seen == (1u << dims) - 1;
}

/* Dimension d of the result is dimension shape.sizes[d] of the input. */
static ms_status permute_forward(ms_op_call *call)
{
    uint32_t order[MS_DIMS_MAX];
    if (!permute_order(ms_tensor_dims(call->inputs[0]), &call->attributes, order))
        return ms_op_refuse(call, "a permutation names each of its dimensions once");
    return permuted(call->inputs[0], order, &call->outputs[0]);
}

/* g in the inverse order. The order is worked out again from the attributes; nothing is saved. */
static ms_status permute_backward(ms_op_gradient *gradient)
{
    uint32_t order[MS_DIMS_MAX], back[MS_DIMS_MAX] = { 0 };
    if (!gradient->needs[0] || !gradient->gradients[0]) return MS_OK;
    permute_order(gradient->inputs[0].dims, &gradient->attributes, order);
    for (uint32_t d = 0; d < gradient->inputs[0].dims; d++) back[order[d]] = d;
    return permuted(gradient->gradients[0], back, &gradient->results[0]);
}

/* Repeats dimensions of size 1, and adds leading ones, by strides of 0. -1 keeps a size. A tensor
 * that was expanded cannot be written in place (ms_op_output), as one element represents
 * several. */
static ms_status expand_forward(ms_op_call *call)
{
    const ms_tensor *in = call->inputs[0];
    uint32_t dims = call->attributes.shape.dims, had = ms_tensor_dims(in);
    int64_t shape[MS_DIMS_MAX], strides[MS_DIMS_MAX];
    if (dims > MS_DIMS_MAX || dims < had)
        return ms_op_refuse(call, "%u sizes are given: it takes at least %u and at most %d", dims,
                            had, MS_DIMS_MAX);
    for (uint32_t d = 0; d < dims; d++) {
        /* A dimension that the input has not: it repeats the whole input. */
        bool leading = d < dims - had;
        int64_t old = leading ? 1 : ms_tensor_shape(in)[d - (dims - had)],
                size = call->attributes.shape.sizes[d];
        /* A new leading dimension has no old size that could be kept. */
        if (size == -1 && !leading) size = old;
        if (size < 0 || (size != old && old != 1))
            return ms_op_refuse(call, "dimension %d of size %lld cannot become %lld",
                                ms_dim_named(d), (long long)old, (long long)size);
        shape[d] = size;
        strides[d] =
            leading || (old == 1 && size != 1) ? 0 : ms_tensor_strides(in)[d - (dims - had)];
    }
    return window(call, dims, shape, strides, 0);
}

/* The transpose of a repetition is a sum over it. */
static ms_status expand_backward(ms_op_gradient *gradient)
{
    if (!gradient->needs[0] || !gradient->gradients[0]) return MS_OK;
    return ms_op_sum_to(gradient->engine, gradient->gradients[0], &gradient->inputs[0],
                        &gradient->results[0]);
}

/* ------------------------------------------------------- squeeze, unsqueeze */

/* Only a dimension of size 1 can be dropped: anything else would lose elements. Its gradient is a
 * reshape (shape_backward), which needs no number of the dimension. */
static ms_status squeeze_forward(ms_op_call *call)
{
    const ms_tensor *in = call->inputs[0];
    uint32_t dim = 0;
    if (!find_dim(call, call->attributes.dim.a, &dim)) return no_dim(call, call->attributes.dim.a);
    if (ms_tensor_shape(in)[dim] != 1)
        return ms_op_refuse(call, "dimension %d has size %lld: only a size of 1 can be dropped",
                            ms_dim_named(dim), (long long)ms_tensor_shape(in)[dim]);
    return ms_tensor_slice(call->inputs[0], dim, 0, 1, true, &call->outputs[0]);
}

/* A new dimension of size 1; its stride is never used. The dimension is counted in the result, so
 * the last one can be named, too. */
static ms_status unsqueeze_forward(ms_op_call *call)
{
    const ms_tensor *in = call->inputs[0];
    uint32_t dim = 0, dims = ms_tensor_dims(in);
    int64_t shape[MS_DIMS_MAX], strides[MS_DIMS_MAX];
    if (dims == MS_DIMS_MAX)
        return ms_op_refuse(call, "a tensor has at most %d dimensions", MS_DIMS_MAX);
    if (!ms_shape_dim(dims + 1, call->attributes.dim.a, &dim))
        return ms_op_refuse(call, "the result has no dimension %d",
                            ms_dim_named(call->attributes.dim.a));
    for (uint32_t d = 0; d <= dims; d++) {
        shape[d] = d == dim ? 1 : ms_tensor_shape(in)[d - (d > dim)];
        strides[d] = d == dim ? 1 : ms_tensor_strides(in)[d - (d > dim)];
    }
    return window(call, dims + 1, shape, strides, 0);
}

const ms_op ms_op_view = { "view", view_forward, shape_backward, 1, 1, MS_OP_VIEW };
const ms_op ms_op_reshape = { "reshape", reshape_forward, shape_backward, 1, 1, MS_OP_VIEW };
const ms_op ms_op_narrow = { "narrow", narrow_forward, narrow_backward, 1, 1, MS_OP_VIEW };
const ms_op ms_op_select = { "select", select_forward, select_backward, 1, 1, MS_OP_VIEW };
const ms_op ms_op_split = { "split", split_forward, split_backward, 1, 1, MS_OP_VIEW };
const ms_op ms_op_transpose = {
    "transpose", transpose_forward, transpose_backward, 1, 1, MS_OP_VIEW
};
const ms_op ms_op_permute = { "permute", permute_forward, permute_backward, 1, 1, MS_OP_VIEW };
const ms_op ms_op_expand = { "expand", expand_forward, expand_backward, 1, 1, MS_OP_VIEW };
const ms_op ms_op_squeeze = { "squeeze", squeeze_forward, shape_backward, 1, 1, MS_OP_VIEW };
const ms_op ms_op_unsqueeze = { "unsqueeze", unsqueeze_forward, shape_backward, 1, 1, MS_OP_VIEW };
