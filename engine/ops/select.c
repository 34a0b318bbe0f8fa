/* select.c: operators that pick or place elements by index or by size.
 *
 * `whole` is the large side, [outer, n, inner]; `small` the picked or placed side, [outer, k,
 * inner], as is the index. Gather reads whole and writes small; scatter does the reverse, and each
 * is the other's gradient. An index is on the device, so only a task can check its values: one
 * outside of 0 .. n-1 is an error of the stream. */
#include "ops/select.h"

#include <string.h>

#include "moonshard/ops.h"
#include "ops/autocast.h"
#include "ops/backend.h"
#include "tensor/op.h"
#include "ops/values.h"
#include "ops/sum_to.h"

/* The dtypes of an index. The kernels read these three; u16 is what a data set of tokens is stored
 * as, which spares a cast. */
static bool is_index(ms_dtype dtype)
{
    return dtype == MS_I64 || dtype == MS_I32 || dtype == MS_U16;
}

/* ms_rows_take along a single dimension. The tensor that comes back may be a copy, so arguments
 * must take their addresses from it. */
static ms_status take_rows(ms_engine *engine, ms_tensor *tensor, uint32_t dim, ms_tensor **out,
                           ms_rows *rows)
{
    return ms_rows_take(engine, tensor, dim, dim + 1, out, rows);
}

/* The order of strides in ms_select_args. Outer, k, inner. */
static void set_strides(int64_t *strides, const ms_rows *rows)
{
    strides[0] = rows->outer_stride;
    strides[1] = rows->stride;
    strides[2] = rows->inner_stride;
}

/* ----------------------------------------------------- gather, index_select */

/* small[o, j, i] = whole[o, index[o, j, i], i]; small is new and contiguous. With one_index the
 * index is 1-D and serves all rows, by strides of 0. An empty result enqueues nothing: kernels
 * never see a size of 0. A copy that take_rows made may be released at once, since memory is reused
 * in stream order only. */
static ms_status gather_into(ms_engine *engine, const char *name, ms_tensor *whole, uint32_t dim,
                             ms_tensor *index, bool one_index, ms_tensor *small)
{
    ms_tensor *from = NULL, *at = NULL;
    ms_rows index_rows, small_rows;
    ms_select_args args = { .small = ms_tensor_data(small),
                            .name = name,
                            .dtype = (uint8_t)ms_tensor_dtype(whole),
                            .index_dtype = (uint8_t)ms_tensor_dtype(index) };
    if (ms_tensor_count(small) == 0) return MS_OK;
    ms_status status = take_rows(engine, whole, dim, &from, &args.rows);
    if (!status) status = take_rows(engine, index, one_index ? 0 : dim, &at, &index_rows);
    if (!status) {
        /* small is contiguous, so it has rows. */
        ms_rows_of(small, dim, &small_rows);
        args.k = small_rows.n;
        set_strides(args.small_strides, &small_rows);
        set_strides(args.index_strides, &index_rows);
        /* Neither the outer nor the inner position chooses then. */
        if (one_index) args.index_strides[0] = args.index_strides[2] = 0;
        args.whole = ms_tensor_data(from);
        args.index = ms_tensor_data(at);
        ms_tensor *reads[] = { from, at };
        ms_task_cost cost = { .bytes = 2 * ms_tensor_bytes(small) + ms_tensor_bytes(at) };
        status = ms_tensor_enqueue(engine, ms_engine_kernel(engine, MS_KERNEL_gather), &args, reads,
                                   2, &small, 1, cost);
    }
    ms_tensor_release(from);
    ms_tensor_release(at);
    return status;
}

/* The caller has made sure that the target has rows: a copy of it would be written in its place.
 * Index and values may be copied. */
ms_status ms_scatter_into(ms_engine *engine, const char *name, ms_tensor *target, uint32_t dim,
                          ms_tensor *index, ms_tensor *values, bool add)
{
    ms_tensor *from = NULL, *at = NULL;
    ms_rows index_rows, value_rows;
    ms_select_args args = { .whole = ms_tensor_data(target),
                            .name = name,
                            .dtype = (uint8_t)ms_tensor_dtype(target),
                            .index_dtype = (uint8_t)ms_tensor_dtype(index) };
    if (ms_tensor_count(values) == 0) return MS_OK;
    /* No copy may be taken here: it would be written in the target's place. */
    ms_rows_of(target, dim, &args.rows);
    ms_status status = take_rows(engine, values, dim, &from, &value_rows);
    if (!status) status = take_rows(engine, index, dim, &at, &index_rows);
    if (!status) {
        args.k = value_rows.n;
        set_strides(args.small_strides, &value_rows);
        set_strides(args.index_strides, &index_rows);
        args.small = ms_tensor_data(from);
        args.index = ms_tensor_data(at);
        /* The target is read, too: elements that are not written stay, or are added to. */
        ms_tensor *reads[] = { from, at, target };
        ms_task_cost cost = { .flops = add ? (double)ms_tensor_count(values) : 0,
                              .bytes = 2 * ms_tensor_bytes(values) + ms_tensor_bytes(at) };
        status = ms_tensor_enqueue(
            engine, ms_engine_kernel(engine, add ? MS_KERNEL_scatter_add : MS_KERNEL_scatter),
            &args, reads, 3, &target, 1, cost);
    }
    ms_tensor_release(from);
    ms_tensor_release(at);
    return status;
}

/* Checks the dimension, and that the index has the input's sizes in all other dimensions. Sizes are
 * checked here, on the host. The values of the index are on the device, and only the task can check
 * them. */
static ms_status check_index(const ms_op_call *call, uint32_t *dim)
{
    const ms_tensor *in = call->inputs[0], *index = call->inputs[1];
    if (!ms_shape_dim(ms_tensor_dims(in), call->attributes.index.dim, dim))
        return ms_op_refuse(call, "there is no dimension %d",
                            ms_dim_named(call->attributes.index.dim));
    if (!is_index(ms_tensor_dtype(index)))
        return ms_op_refuse(call, "an index must be i64, i32 or u16");
    bool fits = ms_tensor_dims(index) == ms_tensor_dims(in);
    for (uint32_t d = 0; d < ms_tensor_dims(in) && fits; d++)
        fits = d == *dim || ms_tensor_shape(index)[d] == ms_tensor_shape(in)[d];
    return fits ? MS_OK
                : ms_op_refuse(
                    call,
                    "the index must have the sizes of the first tensor in all dimensions but %d",
                    ms_dim_named(*dim));
}

/* y has the shape of the index. Only the index is saved. The input is not saved: its gradient
 * depends on the index and the shape alone. */
static ms_status gather_forward(ms_op_call *call)
{
    ms_tensor *in = call->inputs[0], *index = call->inputs[1], *out = NULL;
    uint32_t dim = 0;
    ms_status status = check_index(call, &dim);
    if (!status)
        status = ms_op_output(call, 0, ms_tensor_dtype(in), ms_tensor_dims(index),
                              ms_tensor_shape(index), &out);
    if (!status) status = gather_into(call->engine, "gather", in, dim, index, false, out);
    return status ? status : ms_op_save(call, index);
}

/* Whole slices along dim, chosen by a 1-D index; y has the index's length there. Repeating the
 * index by strides of 0 makes it a gather without an index of the result's size. */
static ms_status index_select_forward(ms_op_call *call)
{
    ms_tensor *in = call->inputs[0], *index = call->inputs[1], *out = NULL;
    uint32_t dim = 0;
    int64_t shape[MS_DIMS_MAX];
    if (!ms_shape_dim(ms_tensor_dims(in), call->attributes.index.dim, &dim))
        return ms_op_refuse(call, "there is no dimension %d",
                            ms_dim_named(call->attributes.index.dim));
    if (!is_index(ms_tensor_dtype(index)) || ms_tensor_dims(index) != 1)
        return ms_op_refuse(call, "the index must be 1-D, and i64, i32 or u16");
    memcpy(shape, ms_tensor_shape(in), ms_tensor_dims(in) * sizeof *shape);
    shape[dim] = ms_tensor_count(index);
    ms_status status = ms_op_output(call, 0, ms_tensor_dtype(in), ms_tensor_dims(in), shape, &out);
    if (!status) status = gather_into(call->engine, "index_select", in, dim, index, true, out);
    return status ? status : ms_op_save(call, index);
}

/* Zeros, and the gradient added at the indices, in f32; then in the input's dtype. f32, because
 * 16-bit sums lose small gradients, and because the kernel adds no 16-bit floats. An f32 gradient
 * is not copied by either cast. */
static ms_status add_back(ms_op_gradient *gradient, uint32_t dim, ms_tensor *index)
{
    const ms_tensor_info *info = &gradient->inputs[0];
    ms_engine *engine = gradient->engine;
    ms_tensor *g = NULL, *sums = NULL;
    ms_status status = ms_op_as_dtype(engine, gradient->gradients[0], MS_F32, &g);
    if (!status) status = ms_op_full(engine, MS_F32, info->dims, info->shape, 0, &sums);
    if (!status) status = ms_scatter_into(engine, gradient->op->name, sums, dim, index, g, true);
    if (!status) status = ms_op_as_dtype(engine, sums, info->dtype, &gradient->results[0]);
    ms_tensor_release(g);
    ms_tensor_release(sums);
    return status;
}

/* dx is zeros, and g added at index: an element that was picked twice gets both gradients. The
 * index has no gradient: integers have none. */
static ms_status gather_backward(ms_op_gradient *gradient)
{
    uint32_t dim = 0;
    if (!gradient->needs[0] || !gradient->gradients[0]) return MS_OK;
    ms_shape_dim(gradient->inputs[0].dims, gradient->attributes.index.dim, &dim);
    return add_back(gradient, dim, gradient->saved[0]);
}

/* As gather's, with the 1-D index as a window of the result's shape: strides of 0 in the other
 * dimensions. */
static ms_status index_select_backward(ms_op_gradient *gradient)
{
    const ms_tensor_info *result = &gradient->outputs[0];
    int64_t strides[MS_DIMS_MAX] = { 0 };
    uint32_t dim = 0;
    ms_tensor *index = NULL;
    if (!gradient->needs[0] || !gradient->gradients[0]) return MS_OK;
    ms_shape_dim(gradient->inputs[0].dims, gradient->attributes.index.dim, &dim);
    strides[dim] = ms_tensor_strides(gradient->saved[0])[0];
    ms_status status =
        ms_tensor_window(gradient->saved[0], result->dims, result->shape, strides, 0, &index);
    if (!status) status = add_back(gradient, dim, index);
    ms_tensor_release(index);
    return status;
}

/* ----------------------------------------------------- scatter, scatter_add */

/* The values as a window of the index's shape, owned: one element may represent all, by strides of
 * 0. An error here names scatter and its inputs; ms_scatter_into checks nothing. */
static ms_status as_index(const ms_op_call *call, ms_tensor *values, ms_tensor **out)
{
    const ms_tensor *index = call->inputs[1];
    int64_t zeros[MS_DIMS_MAX] = { 0 };
    if (ms_shape_equal(ms_tensor_dims(values), ms_tensor_shape(values), ms_tensor_dims(index),
                       ms_tensor_shape(index))) {
        *out = ms_tensor_retain(values);
        return MS_OK;
    }
    if (ms_tensor_count(values) != 1)
        return ms_op_refuse(call, "the values must have the shape of the index, or one element");
    return ms_tensor_window(values, ms_tensor_dims(index), ms_tensor_shape(index), zeros, 0, out);
}

/* The values in *dtype, in which they are placed: that of the tensor they are placed in. Under
 * autocast, and not in place, it is f32 if one of both is f32. */
static ms_status values_for(const ms_op_call *call, ms_dtype *dtype, ms_tensor **out)
{
    ms_dtype own = ms_tensor_dtype(call->inputs[2]), shared = *dtype;
    bool floats = ms_dtype_is_float(own) && ms_dtype_is_float(*dtype);
    ms_tensor *values = NULL;
    if (own != *dtype && !(floats && ms_autocast_shared(call->engine, own, *dtype, &shared)))
        return ms_op_refuse(call, "the values have another dtype than the first tensor: cast them "
                                  "with x:to");
    if (!call->in_place) *dtype = shared;
    ms_status status = ms_op_as_dtype(call->engine, call->inputs[2], *dtype, &values);
    if (!status) status = as_index(call, values, out);
    ms_tensor_release(values);
    return status;
}

/* Adds to a 16-bit tensor in f32 and rounds once at the end: rounding each addition would lose
 * small terms. All of the tensor is widened, also the elements that get nothing: the cost is that
 * of two casts, whatever the length of the index. */
static ms_status add_in_f32(ms_op_call *call, uint32_t dim, ms_tensor *values, ms_tensor *out)
{
    ms_engine *engine = call->engine;
    ms_tensor *sums = NULL, *terms = NULL;
    ms_status status = ms_op_as_dtype(engine, call->inputs[0], MS_F32, &sums);
    if (!status) status = ms_op_as_dtype(engine, values, MS_F32, &terms);
    if (!status)
        status = ms_scatter_into(engine, "scatter_add", sums, dim, call->inputs[1], terms, true);
    if (!status) status = ms_copy_into(engine, sums, out);
    ms_tensor_release(sums);
    ms_tensor_release(terms);
    return status;
}

/* inputs[0] with values placed goes into out: the same tensor (in place) or a new one. Values or an
 * index in the memory that is being written would change on the way, so then the work is done in a
 * copy; likewise where out has no rows. The test is on storages and not on bytes, so some calls
 * copy without need, which is only slower. */
static ms_status place_into(ms_op_call *call, bool add, uint32_t dim, ms_tensor *index,
                            ms_tensor *values, ms_tensor *out)
{
    ms_engine *engine = call->engine;
    ms_tensor *in = call->inputs[0], *apart = NULL;
    const char *name = add ? "scatter_add" : "scatter";
    ms_rows rows;
    /* The kernel adds no 16-bit floats. */
    if (add && (ms_tensor_dtype(out) == MS_F16 || ms_tensor_dtype(out) == MS_BF16))
        return add_in_f32(call, dim, values, out);
    /* Out of place the result is new memory, which nothing can share. */
    bool shared = call->in_place
                  && (ms_tensor_storage(values) == ms_tensor_storage(out)
                      || ms_tensor_storage(index) == ms_tensor_storage(out));
    if (!shared && ms_rows_of(out, dim, &rows)) {
        ms_status status = call->in_place ? MS_OK : ms_copy_into(engine, in, out);
        return status ? status : ms_scatter_into(engine, name, out, dim, index, values, add);
    }
    ms_status status = ms_tensor_new(engine, ms_tensor_dtype(out), ms_tensor_dims(in),
                                     ms_tensor_shape(in), &apart);
    if (!status) status = ms_copy_into(engine, in, apart);
    if (!status) status = ms_scatter_into(engine, name, apart, dim, index, values, add);
    if (!status) status = ms_copy_into(engine, apart, out);
    ms_tensor_release(apart);
    return status;
}

/* scatter and scatter_add, in place or not. The index is saved for the gradient. The values are not
 * saved: neither gradient depends on them. */
static ms_status place(ms_op_call *call, bool add)
{
    ms_tensor *in = call->inputs[0], *index = call->inputs[1], *out = NULL, *values = NULL;
    ms_dtype dtype = ms_tensor_dtype(in);
    uint32_t dim = 0;
    if (add && dtype == MS_BOOL) return ms_op_refuse(call, "it does not work on bool");
    ms_status status = check_index(call, &dim);
    if (!status) status = values_for(call, &dtype, &values);
    if (!status)
        status = ms_op_output(call, 0, dtype, ms_tensor_dims(in), ms_tensor_shape(in), &out);
    if (!status) status = place_into(call, add, dim, index, values, out);
    ms_tensor_release(values);
    return status ? status : ms_op_save(call, index);
}

static ms_status scatter_forward(ms_op_call *call) { return place(call, false); }
static ms_status scatter_add_forward(ms_op_call *call) { return place(call, true); }

/* dvalues = g gathered at index; the sum of that if one element stood for all values. Where scatter
 * wrote one place several times, only the last value is in the result, but the gradient of that
 * place goes to all of them. A script with distinct indices does not notice. */
static ms_status values_gradient(ms_op_gradient *gradient, uint32_t dim)
{
    const ms_tensor_info *info = &gradient->inputs[2];
    ms_tensor *index = gradient->saved[0], *picked = NULL, *total = NULL, *g = NULL;
    uint32_t dims = ms_tensor_dims(index);
    const int64_t *shape = ms_tensor_shape(index);
    bool one = !ms_shape_equal(info->dims, info->shape, dims, shape);
    ms_status status = ms_op_as_dtype(gradient->engine, gradient->gradients[0], info->dtype, &g);
    if (!status) status = ms_tensor_new(gradient->engine, info->dtype, dims, shape, &picked);
    if (!status)
        status = gather_into(gradient->engine, gradient->op->name, g, dim, index, false, picked);
    ms_tensor_release(g);
    /* One element stood for all values, so its gradient is the sum of theirs. */
    if (!status && one) {
        /* A shape without dimensions: summing to it sums everything. */
        const ms_tensor_info number = { .dtype = info->dtype };
        int64_t strides[MS_DIMS_MAX] = { 0 };
        status = ms_op_sum_to(gradient->engine, picked, &number, &total);
        if (!status)
            status =
                ms_tensor_window(total, info->dims, info->shape, strides, 0, &gradient->results[2]);
    } else if (!status) {
        gradient->results[2] = ms_tensor_retain(picked);
    }
    ms_tensor_release(picked);
    ms_tensor_release(total);
    return status;
}

/* dx = g for scatter_add. For scatter dx is g with zeros at the positions that were overwritten;
 * the zeros are one element, repeated by strides of 0. gradients[0] is borrowed and may be the
 * gradient of other nodes too, so zeros are written into a copy. After an error no result is
 * left. */
static ms_status place_backward(ms_op_gradient *gradient, bool add)
{
    const ms_tensor_info *info = &gradient->inputs[0];
    ms_engine *engine = gradient->engine;
    ms_tensor *g = gradient->gradients[0], *rest = NULL, *zero = NULL, *zeros = NULL;
    uint32_t dim = 0;
    if (!g) return MS_OK;
    ms_status status = MS_OK;
    ms_shape_dim(info->dims, gradient->attributes.index.dim, &dim);
    if (gradient->needs[0] && add) {
        status = ms_op_as_dtype(engine, g, info->dtype, &rest);
    } else if (gradient->needs[0]) { /* nothing flows to what was written over */
        int64_t none[MS_DIMS_MAX] = { 0 };
        status = ms_tensor_new(engine, info->dtype, info->dims, info->shape, &rest);
        if (!status) status = ms_copy_into(engine, g, rest);
        if (!status) status = ms_op_full(engine, info->dtype, 0, NULL, 0, &zero);
        if (!status)
            status = ms_tensor_window(zero, ms_tensor_dims(gradient->saved[0]),
                                      ms_tensor_shape(gradient->saved[0]), none, 0, &zeros);
        if (!status)
            status = ms_scatter_into(engine, gradient->op->name, rest, dim, gradient->saved[0],
                                     zeros, false);
    }
    if (!status && gradient->needs[2]) status = values_gradient(gradient, dim);
    if (!status && gradient->needs[0]) gradient->results[0] = ms_tensor_retain(rest);
    ms_tensor_release(rest);
    ms_tensor_release(zero);
    ms_tensor_release(zeros);
    return status;
}

/* The two gradients differ only in what becomes of the old values: overwritten or added to. */
static ms_status scatter_backward(ms_op_gradient *gradient)
{
    return place_backward(gradient, false);
}
static ms_status scatter_add_backward(ms_op_gradient *gradient)
{
    return place_backward(gradient, true);
}

/* -------------------------------------------------------------- topk, above */

/* The k greatest (or least) along dim in order, and their positions; the positions are saved. k is
 * an attribute, so the shapes are known on the host. Two outputs of one task: values and
 * indices. */
static ms_status topk_forward(ms_op_call *call)
{
    ms_tensor *in = call->inputs[0], *from = NULL, *values = NULL, *indices = NULL;
    ms_dtype dtype = ms_tensor_dtype(in);
    uint32_t dim = 0, dims = ms_tensor_dims(in);
    int64_t shape[MS_DIMS_MAX], k = call->attributes.top.k;
    if (dtype == MS_BOOL) return ms_op_refuse(call, "it does not work on bool");
    if (!ms_shape_dim(dims, call->attributes.top.dim, &dim))
        return ms_op_refuse(call, "there is no dimension %d",
                            ms_dim_named(call->attributes.top.dim));
    /* k = 0 is allowed and gives empty results. */
    if (k < 0 || k > ms_tensor_shape(in)[dim])
        return ms_op_refuse(call, "k is %lld: dimension %d has size %lld", (long long)k,
                            ms_dim_named(dim), (long long)ms_tensor_shape(in)[dim]);
    memcpy(shape, ms_tensor_shape(in), dims * sizeof *shape);
    shape[dim] = k;
    ms_topk_args args = { .k = k,
                          .dtype = (uint8_t)dtype,
                          .largest = call->attributes.top.largest };
    ms_status status = ms_op_output(call, 0, dtype, dims, shape, &values);
    if (!status) status = ms_op_output(call, 1, MS_I64, dims, shape, &indices);
    if (!status && ms_tensor_count(values) > 0) {
        status = take_rows(call->engine, in, dim, &from, &args.rows);
        if (!status) {
            ms_tensor *writes[] = { values, indices };
            args.in = ms_tensor_data(from);
            args.values = ms_tensor_data(values);
            args.indices = ms_tensor_data(indices);
            ms_task_cost cost = { .flops = (double)ms_tensor_count(in),
                                  .bytes = ms_tensor_bytes(in) + ms_tensor_bytes(values)
                                           + ms_tensor_bytes(indices) };
            status = ms_tensor_enqueue(call->engine, ms_engine_kernel(call->engine, MS_KERNEL_topk),
                                       &args, &from, 1, writes, 2, cost);
        }
        ms_tensor_release(from);
    }
    return status ? status : ms_op_save(call, indices);
}

/* dx is zeros with g at the saved positions, which are distinct in a row. The indices have no
 * gradient. A plain scatter suffices, without additions, so 16-bit gradients need no f32 sums. */
static ms_status topk_backward(ms_op_gradient *gradient)
{
    const ms_tensor_info *info = &gradient->inputs[0];
    ms_tensor *whole = NULL;
    uint32_t dim = 0;
    if (!gradient->needs[0] || !gradient->gradients[0]) return MS_OK;
    ms_shape_dim(info->dims, gradient->attributes.top.dim, &dim);
    ms_status status =
        ms_op_full(gradient->engine, info->dtype, info->dims, info->shape, 0, &whole);
    if (!status)
        status = ms_scatter_into(gradient->engine, "topk", whole, dim, gradient->saved[0],
                                 gradient->gradients[0], false);
    if (!status) gradient->results[0] = ms_tensor_retain(whole);
    ms_tensor_release(whole);
    return status;
}

/* The elements with |x| above a threshold, their positions, and how many were kept. The threshold
 * is on the device and a shape cannot depend on values, so the outputs have `capacity` elements and
 * the count is an output too. A communication hook can send values and positions in place of a
 * gradient. The input is not copied, so a window with one stride is read where it is. The cost
 * counts the input twice, as the kernel reads it twice. */
static ms_status above_forward(ms_op_call *call)
{
    ms_tensor *in = call->inputs[0], *threshold = call->inputs[1], *out[3] = { NULL, NULL, NULL };
    ms_dtype dtype = ms_tensor_dtype(in);
    int64_t capacity = call->attributes.dim.length, one = 1;
    if (ms_tensor_dims(in) != 1 || !ms_dtype_is_float(dtype))
        return ms_op_refuse(call, "it takes a 1-D tensor of f32, f16 or bf16");
    if (ms_tensor_count(threshold) != 1 || !ms_dtype_is_float(ms_tensor_dtype(threshold)))
        return ms_op_refuse(call, "the threshold must be one float");
    if (capacity < 0) return ms_op_refuse(call, "the capacity cannot be %lld", (long long)capacity);
    ms_status status = ms_op_output(call, 0, dtype, 1, &capacity, &out[0]);
    if (!status) status = ms_op_output(call, 1, MS_I64, 1, &capacity, &out[1]);
    if (!status) status = ms_op_output(call, 2, MS_I64, 1, &one, &out[2]);
    if (status) return status;
    /* The input is 1-D, so it has one stride, and needs no copy whatever it is. */
    ms_above_args args = { .in = ms_tensor_data(in),
                           .threshold = ms_tensor_data(threshold),
                           .values = ms_tensor_data(out[0]),
                           .indices = ms_tensor_data(out[1]),
                           .found = ms_tensor_data(out[2]),
                           .count = ms_tensor_count(in),
                           .stride = ms_tensor_strides(in)[0],
                           .capacity = capacity,
                           .dtype = (uint8_t)dtype,
                           .threshold_dtype = (uint8_t)ms_tensor_dtype(threshold) };
    ms_task_cost cost = { .flops = (double)args.count,
                          .bytes = 2 * ms_tensor_bytes(in) + ms_tensor_bytes(out[0])
                                   + ms_tensor_bytes(out[1]) };
    ms_tensor *reads[] = { in, threshold };
    return ms_tensor_enqueue(call->engine, ms_engine_kernel(call->engine, MS_KERNEL_above), &args,
                             reads, 2, out, 3, cost);
}

const ms_op ms_op_gather = { "gather", gather_forward, gather_backward, 2, 2, 0 };
const ms_op ms_op_index_select = {
    "index_select", index_select_forward, index_select_backward, 2, 2, 0
};
const ms_op ms_op_scatter = { "scatter", scatter_forward, scatter_backward, 3, 3, MS_OP_IN_PLACE };
const ms_op ms_op_scatter_add = { "scatter_add", scatter_add_forward, scatter_add_backward, 3, 3,
                                  MS_OP_IN_PLACE };
const ms_op ms_op_topk = { "topk", topk_forward, topk_backward, 1, 1, 0 };
const ms_op ms_op_above = { "above", above_forward, NULL, 2, 2, MS_OP_NO_GRAD | MS_OP_LOSES_GRAD };
