/* reduce.c: operators that make fewer numbers of many: sums, means, extremes, norms, positions,
 * counts.
 *
 * A reduction walks rows: the input as [outer, n, inner], reduced along n (rows.h). Reducing
 * everything is a single row. Sums are made in an order that the shape decides, so they repeat bit
 * for bit. */

#include "ops/reduce_args.h"

#include <math.h>
#include <string.h>

#include "moonshard/ops.h"
#include "ops/autocast.h"
#include "ops/backend.h"
#include "tensor/op.h"
#include "ops/rows.h"
#include "ops/select.h"
#include "ops/values.h"
#include "ops/sum_to.h"

/* ------------------------------------------------------------------- shapes */

/* What is reduced: which dimension of the input (all of them if `all`), and the shape that is left,
 * in which a reduced dimension is absent, or has size 1 with keep. `dim` is counted from 0 and
 * never negative. */
typedef struct reduction {
    bool all;
    uint32_t dim, dims;
    int64_t shape[MS_DIMS_MAX];
} reduction;

/* Fills in a reduction of a tensor of this shape. */
static void reduction_shape(uint32_t dims, const int64_t *shape, bool all, uint32_t dim, bool keep,
                            reduction *out)
{
    *out = (reduction){ .all = all, .dim = dim };
    for (uint32_t d = 0; d < dims; d++) {
        bool reduced = all || d == dim;
        if (reduced && !keep) continue;
        out->shape[out->dims++] = reduced ? 1 : shape[d];
    }
}

/* The reduction that the call's attributes ask for. Sizes of 0 are no error here: a sum over
 * nothing is 0. Operators for which it is one ask refuse_nothing. */
static ms_status reduction_of(const ms_op_call *call, reduction *out)
{
    const ms_tensor *in = call->inputs[0];
    uint32_t dim = 0;
    bool all = call->attributes.reduce.all;
    if (!all && !ms_shape_dim(ms_tensor_dims(in), call->attributes.reduce.dim, &dim))
        return ms_op_refuse(call, "there is no dimension %d",
                            ms_dim_named(call->attributes.reduce.dim));
    reduction_shape(ms_tensor_dims(in), ms_tensor_shape(in), all, dim, call->attributes.reduce.keep,
                    out);
    return MS_OK;
}

/* The input's rows, and the tensor in which they are: the input itself (retained), or a contiguous
 * copy where its strides allow no rows. Positions along n count in row-major order of what is
 * reduced, which ms_rows_take guarantees. Most inputs need no copy: a contiguous tensor has rows
 * along each of its dimensions, and so has a transposed matrix. */
static ms_status rows_of(const ms_op_call *call, const reduction *what, ms_tensor **in,
                         ms_rows *rows)
{
    ms_tensor *tensor = call->inputs[0];
    /* All dimensions as one row: outer and inner are 1. */
    if (what->all) return ms_rows_take(call->engine, tensor, 0, ms_tensor_dims(tensor), in, rows);
    return ms_rows_take(call->engine, tensor, what->dim, what->dim + 1, in, rows);
}

/* A tensor of the reduced shape as a window of the input's shape: strides of 0 repeat it along the
 * reduced dimensions. This is the gradient of a sum, without a copy. The result repeats elements,
 * which results of backward may; who adds to it later makes a tensor of its own. */
static ms_status spread(ms_tensor *small, const ms_op_gradient *gradient, ms_tensor **out)
{
    const ms_tensor_info *info = &gradient->inputs[0];
    int64_t strides[MS_DIMS_MAX];
    uint32_t dim = 0, at = 0;
    bool all = gradient->attributes.reduce.all, keep = gradient->attributes.reduce.keep;
    if (!all) ms_shape_dim(info->dims, gradient->attributes.reduce.dim, &dim);
    for (uint32_t d = 0; d < info->dims; d++) {
        bool reduced = all || d == dim;
        strides[d] = reduced ? 0 : ms_tensor_strides(small)[at];
        if (!reduced || keep) at++;
    }
    return ms_tensor_window(small, info->dims, info->shape, strides, 0, out);
}

/* ------------------------------------------------------------ the reduction */

/* Reduces the call's input into `out`, which has the reduced shape. No result, no task; with
 * results the task runs even where n is 0, as it writes what a sum of nothing is. */
static ms_status reduce_into(ms_op_call *call, const reduction *what, const ms_reduce_call *how,
                             ms_tensor *out)
{
    ms_tensor *in = NULL;
    ms_rows rows;
    if (ms_tensor_count(out) == 0) return MS_OK;
    ms_status status = rows_of(call, what, &in, &rows);
    if (status) return status;
    status = ms_reduce_rows(call->engine, how, &rows, in, out);
    ms_tensor_release(in);
    return status;
}

/* Makes the call's output and reduces into it; *out is borrowed. The output is made first, so a
 * failure later leaves it to ms_op_run to release. */
static ms_status reduce(ms_op_call *call, const ms_reduce_call *how, ms_tensor **out)
{
    reduction what;
    ms_status status = reduction_of(call, &what);
    if (!status) status = ms_op_output(call, 0, how->dtype, what.dims, what.shape, out);
    return status ? status : reduce_into(call, &what, how, *out);
}

/* Integers and bool are summed in i64: their own size would overflow soon. i64 wraps like all
 * integers of the engine. */
static ms_status sum_forward(ms_op_call *call)
{
    ms_dtype dtype = ms_autocast_wide(call->engine, ms_tensor_dtype(call->inputs[0]));
    ms_tensor *out = NULL;
    return reduce(call,
                  &(ms_reduce_call){ .kind = MS_REDUCE_ADD,
                                     .root = 1,
                                     .dtype = ms_dtype_is_float(dtype) ? dtype : MS_I64 },
                  &out);
}

/* Integers are refused, because the mean of integers is no integer, and a silent choice of f32
 * would hide the rounding of large ones. */
static ms_status mean_forward(ms_op_call *call)
{
    ms_dtype dtype = ms_tensor_dtype(call->inputs[0]);
    ms_tensor *out = NULL;
    if (!ms_dtype_is_float(dtype))
        return ms_op_refuse(call, "a mean needs f32, f16 or bf16: cast first");
    return reduce(
        call, &(ms_reduce_call){ .kind = MS_REDUCE_ADD, .root = 1, .mean = true, .dtype = dtype },
        &out);
}

/* dx = g, repeated along what was summed, in the dtype of x. No memory is taken where g has it. */
static ms_status sum_backward(ms_op_gradient *gradient)
{
    ms_tensor *g = NULL;
    if (!gradient->needs[0] || !gradient->gradients[0]) return MS_OK;
    ms_status status =
        ms_op_as_dtype(gradient->engine, gradient->gradients[0], gradient->inputs[0].dtype, &g);
    if (!status) status = spread(g, gradient, &gradient->results[0]);
    ms_tensor_release(g);
    return status;
}

/* dx = g / n. The division comes before g is spread: it is done once for each result, not for each
 * element. n comes from the counts of elements, which is right for one dimension and for all. */
static ms_status mean_backward(ms_op_gradient *gradient)
{
    const ms_tensor_info *info = &gradient->inputs[0], *result = &gradient->outputs[0];
    if (!gradient->needs[0] || !gradient->gradients[0]) return MS_OK;
    double n = (double)ms_shape_count(info->dims, info->shape)
               / (double)ms_shape_count(result->dims, result->shape);
    ms_attributes by = { .scalar = { .value = n } };
    ms_tensor *each = NULL;
    ms_status status =
        ms_op_unary(gradient->engine, &ms_op_div_scalar, &by, gradient->gradients[0], &each);
    if (!status) status = spread(each, gradient, &gradient->results[0]);
    ms_tensor_release(each);
    return status;
}

/* ------------------------------------------------- undoing a broadcast: sum_to */

/* -------------------------------------------------------------- any and every */

/* Any is the greatest of 0 and 1, every the least. They reduce everything, whatever the attributes
 * say. The kernel computes bool as integers 0 and 1; over nothing `any` is false and `every` true
 * (reduce_row_whole). */
static ms_status truth_forward(ms_op_call *call, ms_reduce_kind kind)
{
    ms_tensor *out = NULL;
    if (ms_tensor_dtype(call->inputs[0]) != MS_BOOL)
        return ms_op_refuse(call, "it needs bool: compare first (for example with ne)");
    /* Backward never reads them, since the operator has none. */
    call->attributes.reduce.all = true;
    call->attributes.reduce.keep = false;
    return reduce(call, &(ms_reduce_call){ .kind = kind, .root = 1, .dtype = MS_BOOL }, &out);
}

/* The two differ in the kind of the reduction only. */
static ms_status any_forward(ms_op_call *call) { return truth_forward(call, MS_REDUCE_GREATEST); }
static ms_status every_forward(ms_op_call *call) { return truth_forward(call, MS_REDUCE_LEAST); }

/* --------------------------------------------------------- max, min, argmax */

/* Positions of the greatest or least elements, i64, into `out` of the reduced shape. For max and
 * min this reads the input a second time, which only a recorded call pays for. */
static ms_status positions(ms_op_call *call, const reduction *what, bool least, ms_tensor *out)
{
    ms_tensor *in = NULL;
    ms_reduce_arg_args args = { .out = ms_tensor_data(out),
                                .dtype = (uint8_t)ms_tensor_dtype(call->inputs[0]),
                                .least = least };
    if (ms_tensor_count(out) == 0) return MS_OK;
    ms_status status = rows_of(call, what, &in, &args.rows);
    if (status) return status;
    args.in = ms_tensor_data(in);
    ms_task_cost cost = { .flops = (double)ms_tensor_count(in),
                          .bytes = ms_tensor_bytes(in) + ms_tensor_bytes(out) };
    status = ms_tensor_enqueue(call->engine, ms_engine_kernel(call->engine, MS_KERNEL_reduce_arg),
                               &args, &in, 1, &out, 1, cost);
    ms_tensor_release(in);
    return status;
}

/* The extreme of no elements does not exist; a sum of none is 0. The test is on the reduced size:
 * with results but nothing to choose from there would be no value to write. */
static ms_status refuse_nothing(const ms_op_call *call, const reduction *what)
{
    int64_t n =
        what->all ? ms_tensor_count(call->inputs[0]) : ms_tensor_shape(call->inputs[0])[what->dim];
    return n == 0 ? ms_op_refuse(call, "there is nothing to choose from: the reduced size is 0")
                  : MS_OK;
}

/* Max and min. The position of the extreme is found by a second task, and only if the call is
 * recorded: backward needs it, and sends the gradient to the first of equal elements. Sending the
 * whole gradient to one element keeps its sum right where several are equal. */
static ms_status extreme_forward(ms_op_call *call, bool least)
{
    ms_dtype dtype = ms_tensor_dtype(call->inputs[0]);
    reduction what;
    ms_tensor *out = NULL, *found = NULL;
    if (dtype == MS_BOOL) return ms_op_refuse(call, "it does not work on bool: use any or every");
    ms_status status = reduction_of(call, &what);
    if (!status) status = refuse_nothing(call, &what);
    if (!status) status = ms_op_output(call, 0, dtype, what.dims, what.shape, &out);
    if (!status)
        status = reduce_into(
            call, &what,
            &(ms_reduce_call){
                .kind = least ? MS_REDUCE_LEAST : MS_REDUCE_GREATEST, .root = 1, .dtype = dtype },
            out);
    /* Without a gradient to come the second pass over the input is spared. */
    if (status || !call->record) return status;
    status = ms_tensor_new(call->engine, MS_I64, what.dims, what.shape, &found);
    if (!status) status = positions(call, &what, least, found);
    if (!status) status = ms_op_save(call, found);
    ms_tensor_release(found);
    return status;
}

/* `least` is all that differs. */
static ms_status max_forward(ms_op_call *call) { return extreme_forward(call, false); }
static ms_status min_forward(ms_op_call *call) { return extreme_forward(call, true); }

/* dx is zeros with g at the position that was found. The input is seen as [outer, n, inner],
 * positions and g as [outer, 1, inner], and g is scattered along n. Positions count along n in
 * row-major order, also where all dimensions were reduced, so one shape [outer, n, inner] serves
 * both cases. Each row has one position, so a scatter without additions is enough. */
static ms_status extreme_backward(ms_op_gradient *gradient)
{
    const ms_tensor_info *info = &gradient->inputs[0];
    ms_engine *engine = gradient->engine;
    ms_tensor *whole = NULL, *g = NULL;
    ms_rows rows = { .outer = 1, .n = 1, .inner = 1 };
    uint32_t dim = 0;
    bool all = gradient->attributes.reduce.all;
    if (!gradient->needs[0] || !gradient->gradients[0]) return MS_OK;
    if (!all) ms_shape_dim(info->dims, gradient->attributes.reduce.dim, &dim);
    for (uint32_t d = 0; d < info->dims; d++) {
        if (all || d == dim) rows.n *= info->shape[d];
        else if (d < dim) rows.outer *= info->shape[d];
        else rows.inner *= info->shape[d];
    }
    ms_status status = ms_op_full(engine, info->dtype, info->dims, info->shape, 0, &whole);
    if (!status) status = ms_op_as_contiguous(engine, gradient->gradients[0], &g);
    if (!status) {
        /* All three are contiguous, so they can be seen under the three-dimensional shape. */
        ms_tensor *flat[3] = { NULL, NULL, NULL }, *from[3] = { whole, gradient->saved[0], g };
        for (int i = 0; i < 3 && !status; i++) {
            int64_t n = i == 0 ? rows.n : 1, shape[3] = { rows.outer, n, rows.inner },
                    strides[3] = { n * rows.inner, rows.inner, 1 };
            status = ms_tensor_window(from[i], 3, shape, strides, 0, &flat[i]);
        }
        if (!status)
            status =
                ms_scatter_into(engine, gradient->op->name, flat[0], 1, flat[1], flat[2], false);
        for (int i = 0; i < 3; i++) ms_tensor_release(flat[i]);
    }
    if (!status) gradient->results[0] = ms_tensor_retain(whole);
    ms_tensor_release(whole);
    ms_tensor_release(g);
    return status;
}

/* The lowest position of equal ones. NaN counts as the greatest: its first position is returned. */
static ms_status argmax_forward(ms_op_call *call)
{
    reduction what;
    ms_tensor *out = NULL;
    ms_status status = reduction_of(call, &what);
    if (!status) status = refuse_nothing(call, &what);
    if (!status) status = ms_op_output(call, 0, MS_I64, what.dims, what.shape, &out);
    return status ? status : positions(call, &what, false, out);
}

/* --------------------------------------------------------------------- norm */

/* (sum of |x|^p)^(1/p) in f32; for infinity the greatest |x|. p of 1, 2 and infinity have kernels
 * without powers. The result is f32 for 16-bit inputs too: a norm of many elements may be out of
 * the range of f16. */
static ms_status norm_forward(ms_op_call *call)
{
    double p = call->attributes.reduce.p;
    ms_tensor *in = call->inputs[0], *out = NULL;
    if (!ms_dtype_is_float(ms_tensor_dtype(in)))
        return ms_op_refuse(call, "a norm needs f32, f16 or bf16: cast first");
    if (!(p > 0)) return ms_op_refuse(call, "p is %g: it must be above 0 (infinity is allowed)", p);
    /* Any other p costs a logarithm and an exponential for each element. */
    ms_reduce_call how = { .kind = MS_REDUCE_ADD_POWERS, .power = p, .root = p, .dtype = MS_F32 };
    if (p == 1) how = (ms_reduce_call){ .kind = MS_REDUCE_ADD_ABS, .root = 1, .dtype = MS_F32 };
    else if (p == 2)
        how = (ms_reduce_call){ .kind = MS_REDUCE_ADD_SQUARES, .root = 2, .dtype = MS_F32 };
    else if (isinf(p))
        how = (ms_reduce_call){ .kind = MS_REDUCE_GREATEST_ABS, .root = 1, .dtype = MS_F32 };
    ms_status status = reduce(call, &how, &out);
    if (!status) status = ms_op_save(call, in);
    if (!status) status = ms_op_save(call, out);
    return status;
}

/* The gradient of a maximum norm: shared equally by all elements that reach it, with their signs.
 * In steps: equal = (|x| == y), as numbers; dx = equal * sign(x) * g / (how many are equal). y and
 * g are spread to the shape of x. Several small tasks instead of a kernel: this norm is rare in
 * training. A zero has the sign 0, so a tensor of zeros gets gradients of 0. */
static ms_status infinity_backward(ms_op_gradient *gradient, ms_tensor *x, ms_tensor *y,
                                   ms_tensor *g)
{
    const ms_tensor_info *info = &gradient->inputs[0];
    ms_engine *engine = gradient->engine;
    ms_tensor *size = NULL, *equal = NULL, *count = NULL, *counts = NULL, *share = NULL;
    ms_attributes reduce_same = { .reduce = gradient->attributes.reduce };
    /* In f32, as y is: a 16-bit x is widened exactly, so the comparison that follows is exact. */
    ms_elementwise abs_call = { .kernel = MS_KERNEL_abs,
                                .operands = { { .tensor = x } },
                                .count = 1 };
    ms_status status =
        ms_elementwise_new(engine, &abs_call, MS_F32, info->dims, info->shape, &size);
    ms_elementwise equal_call = { .kernel = MS_KERNEL_eq,
                                  .operands = { { .tensor = size }, { .tensor = y } },
                                  .count = 2 };
    if (!status)
        status = ms_elementwise_new(engine, &equal_call, MS_F32, info->dims, info->shape, &equal);
    /* How many elements reach the norm, in the shape of the norm. */
    if (!status) status = ms_op_unary(engine, &ms_op_sum, &reduce_same, equal, &count);
    if (!status) status = spread(count, gradient, &counts);
    ms_elementwise share_call = { .kernel = MS_KERNEL_scaled_div,
                                  .operands = { { .tensor = equal }, { .tensor = counts } },
                                  .count = 2,
                                  .value = 1 };
    if (!status)
        status = ms_elementwise_new(engine, &share_call, MS_F32, info->dims, info->shape, &share);
    /* results[0] holds an intermediate tensor here; after an error the caller releases it. */
    ms_elementwise signed_call = { .kernel = MS_KERNEL_abs_backward,
                                   .operands = { { .tensor = x }, { .tensor = g } },
                                   .count = 2 };
    if (!status)
        status = ms_elementwise_new(engine, &signed_call, MS_F32, info->dims, info->shape,
                                    &gradient->results[0]);
    if (!status) {
        ms_tensor *result = NULL;
        ms_elementwise last = { .kernel = MS_KERNEL_mul,
                                .operands = { { .tensor = gradient->results[0] },
                                              { .tensor = share } },
                                .count = 2 };
        status = ms_elementwise_new(engine, &last, info->dtype, info->dims, info->shape, &result);
        ms_tensor_release(gradient->results[0]);
        gradient->results[0] = result;
    }
    ms_tensor *made[] = { size, equal, count, counts, share };
    for (size_t i = 0; i < sizeof made / sizeof *made; i++) ms_tensor_release(made[i]);
    return status;
}

/* dx = g * sign(x) * |x|^(p-1) / y^(p-1), 0 where y is 0; for p = 1, g * sign(x). y is saved, so
 * the sum is not made again. x may have 16 bits while y and g are f32: elementwise kernels convert
 * each operand by itself. */
static ms_status norm_backward(ms_op_gradient *gradient)
{
    const ms_tensor_info *info = &gradient->inputs[0];
    double p = gradient->attributes.reduce.p;
    ms_tensor *x = gradient->saved[0], *y = NULL, *g = NULL;
    if (!gradient->needs[0] || !gradient->gradients[0]) return MS_OK;
    ms_status status = spread(gradient->saved[1], gradient, &y);
    if (!status) status = spread(gradient->gradients[0], gradient, &g);
    if (!status && isinf(p)) {
        status = infinity_backward(gradient, x, y, g);
    } else if (!status) {
        ms_elementwise call = { .kernel = MS_KERNEL_p_norm_backward,
                                .operands = { { .tensor = x }, { .tensor = y }, { .tensor = g } },
                                .count = 3,
                                .value = p };
        /* |x|^0 is 1, so y does not enter. */
        if (p == 1)
            call = (ms_elementwise){ .kernel = MS_KERNEL_abs_backward,
                                     .operands = { { .tensor = x }, { .tensor = g } },
                                     .count = 2 };
        status = ms_elementwise_new(gradient->engine, &call, info->dtype, info->dims, info->shape,
                                    &gradient->results[0]);
    }
    ms_tensor_release(y);
    ms_tensor_release(g);
    return status;
}

/* -------------------------------------------------------------- cumsum, dot */

/* y[i] = x[0] + ... + x[i] along dim; reverse: x[i] + ... + x[n-1]. out is contiguous and has the
 * shape. The rows of the result are contiguous [outer, n, inner], which the kernel assumes. */
static ms_status cumsum_into(ms_engine *engine, ms_tensor *tensor, uint32_t dim, bool reverse,
                             ms_tensor *out)
{
    ms_tensor *in = NULL;
    ms_cumsum_args args = { .out = ms_tensor_data(out),
                            .dtype = (uint8_t)ms_tensor_dtype(tensor),
                            .out_dtype = (uint8_t)ms_tensor_dtype(out),
                            .reverse = reverse };
    if (ms_tensor_count(out) == 0) return MS_OK;
    ms_status status = ms_rows_take(engine, tensor, dim, dim + 1, &in, &args.rows);
    if (status) return status;
    args.in = ms_tensor_data(in);
    ms_task_cost cost = { .flops = (double)ms_tensor_count(in),
                          .bytes = ms_tensor_bytes(in) + ms_tensor_bytes(out) };
    status = ms_tensor_enqueue(engine, ms_engine_kernel(engine, MS_KERNEL_cumsum), &args, &in, 1,
                               &out, 1, cost);
    ms_tensor_release(in);
    return status;
}

/* As sums, integers are added in i64. A reverse sum is for the gradient only; scripts have no
 * attribute for it. */
static ms_status cumsum_forward(ms_op_call *call)
{
    ms_tensor *in = call->inputs[0], *out = NULL;
    ms_dtype dtype = ms_autocast_wide(call->engine, ms_tensor_dtype(in));
    uint32_t dim = 0;
    if (!ms_shape_dim(ms_tensor_dims(in), call->attributes.dim.a, &dim))
        return ms_op_refuse(call, "there is no dimension %d", ms_dim_named(call->attributes.dim.a));
    ms_status status = ms_op_output(call, 0, ms_dtype_is_float(dtype) ? dtype : MS_I64,
                                    ms_tensor_dims(in), ms_tensor_shape(in), &out);
    return status ? status : cumsum_into(call->engine, in, dim, false, out);
}

/* dx[i] = g[i] + ... + g[n-1]: element i is part of all sums from its position on. Nothing is
 * saved: the gradient does not depend on x. */
static ms_status cumsum_backward(ms_op_gradient *gradient)
{
    const ms_tensor_info *info = &gradient->inputs[0];
    ms_tensor *out = NULL;
    uint32_t dim = 0;
    if (!gradient->needs[0] || !gradient->gradients[0]) return MS_OK;
    ms_shape_dim(info->dims, gradient->attributes.dim.a, &dim);
    ms_status status = ms_tensor_new(gradient->engine, info->dtype, info->dims, info->shape, &out);
    if (!status) status = cumsum_into(gradient->engine, gradient->gradients[0], dim, true, out);
    if (!status) gradient->results[0] = out;
    else ms_tensor_release(out);
    return status;
}

/* y = sum of a[i] b[i]: a reduction of products, one row, any strides. Products are added in f64
 * between blocks, so a long dot product is more exact than a matmul of [1, n] and [n, 1]. */
static ms_status dot_forward(ms_op_call *call)
{
    ms_tensor *a = NULL, *b = NULL, *out = NULL;
    const ms_tensor *x = call->inputs[0], *y = call->inputs[1];
    ms_dtype dtype = ms_tensor_dtype(x);
    if (ms_tensor_dims(x) != 1 || ms_tensor_dims(y) != 1 || ms_tensor_count(x) != ms_tensor_count(y)
        || !ms_dtype_is_float(dtype) || !ms_dtype_is_float(ms_tensor_dtype(y))
        || !ms_autocast_shared(call->engine, dtype, ms_tensor_dtype(y), &dtype))
        return ms_op_refuse(call, "it takes two 1-D tensors of one length and one float dtype");
    ms_status status = ms_op_output(call, 0, dtype, 0, NULL, &out);
    if (!status) status = ms_op_as_dtype(call->engine, call->inputs[0], dtype, &a);
    if (!status) status = ms_op_as_dtype(call->engine, call->inputs[1], dtype, &b);
    if (status) {
        ms_tensor_release(a);
        return status;
    }
    /* With one row the strides between rows are never used. */
    ms_reduce_args args = { .rows = { .outer = 1,
                                      .n = ms_tensor_count(a),
                                      .inner = 1,
                                      .stride = ms_tensor_strides(a)[0] },
                            .out = ms_tensor_data(out),
                            .in = ms_tensor_data(a),
                            .second = ms_tensor_data(b),
                            .second_stride = ms_tensor_strides(b)[0],
                            .divisor = 1,
                            .root = 1,
                            .kind = MS_REDUCE_ADD_PRODUCTS,
                            .dtype = (uint8_t)dtype,
                            .out_dtype = (uint8_t)dtype };
    ms_task_cost cost = { .flops = 2.0 * (double)args.rows.n,
                          .bytes = ms_tensor_bytes(a) + ms_tensor_bytes(b) };
    ms_tensor *reads[] = { a, b };
    status = ms_tensor_enqueue(call->engine, ms_engine_kernel(call->engine, MS_KERNEL_reduce),
                               &args, reads, 2, &out, 1, cost);
    if (!status) status = ms_op_save(call, a);
    if (!status) status = ms_op_save(call, b);
    ms_tensor_release(a);
    ms_tensor_release(b);
    return status;
}

/* da = g b, db = g a, in the dtypes of a and b. After an error no result is left. g has no
 * dimensions and broadcasts. */
static ms_status dot_backward(ms_op_gradient *gradient)
{
    ms_status status = MS_OK;
    if (!gradient->gradients[0]) return MS_OK;
    for (uint32_t i = 0; i < 2 && !status; i++) {
        const ms_tensor_info *info = &gradient->inputs[i];
        ms_elementwise product = { .kernel = MS_KERNEL_mul,
                                   .operands = { { .tensor = gradient->saved[1 - i] },
                                                 { .tensor = gradient->gradients[0] } },
                                   .count = 2 };
        if (gradient->needs[i])
            status = ms_elementwise_new(gradient->engine, &product, info->dtype, info->dims,
                                        info->shape, &gradient->results[i]);
    }
    if (status) {
        ms_tensor_release(gradient->results[0]);
        gradient->results[0] = NULL;
    }
    return status;
}

/* ------------------------------------------------------ histogram, quantile */

/* All elements as one row with a single stride: the tensor itself (retained) or a copy. The caller
 * releases it. Order does not matter to what calls it, but ms_rows_take keeps it. */
static ms_status flat(ms_engine *engine, ms_tensor *tensor, ms_tensor **out, int64_t *stride)
{
    ms_rows rows;
    ms_status status = ms_rows_take(engine, tensor, 0, ms_tensor_dims(tensor), out, &rows);
    if (!status) *stride = rows.stride;
    return status;
}

/* i64 [bins] over [low, high], over all elements. bins is bounded, since each tile of the kernel
 * has bins of its own. */
static ms_status histogram_forward(ms_op_call *call)
{
    double low = call->attributes.histogram.low, high = call->attributes.histogram.high;
    int64_t bins = call->attributes.histogram.bins;
    ms_tensor *in = NULL, *out = NULL;
    if (bins < 1 || bins > 1 << 24)
        return ms_op_refuse(call, "%lld bins: it takes 1 to %d", (long long)bins, 1 << 24);
    /* NaN fails the first comparison; an infinite width would make every bin 0. */
    if (!(low < high) || !isfinite(high - low))
        return ms_op_refuse(call, "low %g must be below high %g, and both finite", low, high);
    if (ms_tensor_dtype(call->inputs[0]) == MS_BOOL)
        return ms_op_refuse(call, "it does not work on bool");
    ms_status status = ms_op_output(call, 0, MS_I64, 1, &bins, &out);
    ms_histogram_args args = { .count = ms_tensor_count(call->inputs[0]),
                               .bins = bins,
                               .low = low,
                               .high = high,
                               .dtype = (uint8_t)ms_tensor_dtype(call->inputs[0]) };
    if (!status) status = flat(call->engine, call->inputs[0], &in, &args.stride);
    if (status) return status;
    args.in = ms_tensor_data(in);
    args.out = ms_tensor_data(out);
    ms_task_cost cost = { .flops = 2.0 * (double)args.count,
                          .bytes = ms_tensor_bytes(in) + ms_tensor_bytes(out) };
    status = ms_tensor_enqueue(call->engine, ms_engine_kernel(call->engine, MS_KERNEL_histogram),
                               &args, &in, 1, &out, 1, cost);
    ms_tensor_release(in);
    return status;
}

/* One number over all elements, interpolated between the two nearest in order. The kernel works on
 * a copy of the input in f32, in scratch; `cost` counts the bytes of the input only. */
static ms_status quantile_forward(ms_op_call *call)
{
    ms_tensor *in = NULL, *out = NULL;
    double q = call->attributes.scalar.value;
    ms_dtype dtype = ms_tensor_dtype(call->inputs[0]);
    if (!ms_dtype_is_float(dtype))
        return ms_op_refuse(call, "it needs f32, f16 or bf16: cast first");
    /* Written so that NaN is refused. */
    if (!(q >= 0 && q <= 1)) return ms_op_refuse(call, "%g is not between 0 and 1", q);
    if (ms_tensor_count(call->inputs[0]) == 0)
        return ms_op_refuse(call, "there is nothing to choose from: the tensor is empty");
    ms_status status = ms_op_output(call, 0, dtype, 0, NULL, &out);
    ms_quantile_args args = { .count = ms_tensor_count(call->inputs[0]),
                              .q = q,
                              .dtype = (uint8_t)dtype };
    if (!status) status = flat(call->engine, call->inputs[0], &in, &args.stride);
    if (status) return status;
    args.in = ms_tensor_data(in);
    args.out = ms_tensor_data(out);
    ms_task_cost cost = { .flops = (double)args.count, .bytes = ms_tensor_bytes(in) };
    status = ms_tensor_enqueue(call->engine, ms_engine_kernel(call->engine, MS_KERNEL_quantile),
                               &args, &in, 1, &out, 1, cost);
    ms_tensor_release(in);
    return status;
}

const ms_op ms_op_sum = { "sum", sum_forward, sum_backward, 1, 1, MS_OP_OVER_PARTS };
const ms_op ms_op_mean = { "mean", mean_forward, mean_backward, 1, 1, 0 };
const ms_op ms_op_max = { "max", max_forward, extreme_backward, 1, 1, MS_OP_OVER_PARTS };
const ms_op ms_op_min = { "min", min_forward, extreme_backward, 1, 1, MS_OP_OVER_PARTS };
const ms_op ms_op_norm = { "norm", norm_forward, norm_backward, 1, 1, 0 };
const ms_op ms_op_any = { "any", any_forward, NULL, 1, 1, MS_OP_NO_GRAD | MS_OP_OVER_PARTS };
const ms_op ms_op_every = { "every", every_forward, NULL, 1, 1, MS_OP_NO_GRAD | MS_OP_OVER_PARTS };
const ms_op ms_op_argmax = { "argmax", argmax_forward, NULL, 1, 1, MS_OP_NO_GRAD };
const ms_op ms_op_cumsum = { "cumsum", cumsum_forward, cumsum_backward, 1, 1, 0 };
const ms_op ms_op_dot = { "dot", dot_forward, dot_backward, 2, 2, MS_OP_OVER_PARTS };
const ms_op ms_op_histogram = { "histogram", histogram_forward, NULL, 1, 1, MS_OP_NO_GRAD };
const ms_op ms_op_quantile = { "quantile", quantile_forward,
                               NULL,       1,
                               1,          MS_OP_NO_GRAD | MS_OP_LOSES_GRAD };
