/* sum_to.c: the reduction of rows, and sums over the dimensions along which an operand was
 * broadcast. */
#include "ops/sum_to.h"

#include "ops/backend.h"

/* One FLOP is counted for each element, whatever the kind. Reading the input is what takes time. */
ms_status ms_reduce_rows(ms_engine *engine, const ms_reduce_call *how, const ms_rows *rows,
                         ms_tensor *in, ms_tensor *out)
{
    ms_reduce_args args = { .rows = *rows,
                            .out = ms_tensor_data(out),
                            .in = ms_tensor_data(in),
                            .power = how->power,
                            /* A mean over nothing divides 0 by 0: it is NaN. */
                            .divisor = how->mean ? (double)rows->n : 1,
                            .root = how->root,
                            .kind = (uint8_t)how->kind,
                            .dtype = (uint8_t)ms_tensor_dtype(in),
                            .out_dtype = (uint8_t)how->dtype };
    ms_task_cost cost = { .flops = (double)ms_tensor_count(in),
                          .bytes = ms_tensor_bytes(in) + ms_tensor_bytes(out) };
    return ms_tensor_enqueue(engine, ms_engine_kernel(engine, MS_KERNEL_reduce), &args, &in, 1,
                             &out, 1, cost);
}

/* Sums dimensions first .. last-1 of a tensor; they have size 1 in *out, which is owned. The
 * dimension stays in the shape with size 1, so that the numbers of the other dimensions do not
 * shift between two calls. */
static ms_status sum_between(ms_engine *engine, ms_tensor *tensor, uint32_t first, uint32_t last,
                             ms_tensor **out)
{
    const ms_reduce_call sum = { .kind = MS_REDUCE_ADD,
                                 .root = 1,
                                 .dtype = ms_tensor_dtype(tensor) };
    int64_t shape[MS_DIMS_MAX];
    ms_tensor *in = NULL, *sums = NULL;
    ms_rows rows;
    for (uint32_t d = 0; d < ms_tensor_dims(tensor); d++)
        shape[d] = d >= first && d < last ? 1 : ms_tensor_shape(tensor)[d];
    ms_status status = ms_tensor_new(engine, sum.dtype, ms_tensor_dims(tensor), shape, &sums);
    if (!status && ms_tensor_count(sums) > 0) {
        status = ms_rows_take(engine, tensor, first, last, &in, &rows);
        if (!status) status = ms_reduce_rows(engine, &sum, &rows, in, sums);
    }
    ms_tensor_release(in);
    if (!status) *out = sums;
    else ms_tensor_release(sums);
    return status;
}

/* Whether dimension d of a result was repeated to reach its size from that of the operand `to`, or
 * is not there in `to`. A size of 1 that stayed 1 was not repeated, and summing it would cost a
 * task. */
static bool is_repeated(const ms_tensor *result, const ms_tensor_info *to, uint32_t d)
{
    /* Leading dimensions that the operand has not. */
    uint32_t lead = ms_tensor_dims(result) - to->dims;
    return d < lead || (to->shape[d - lead] == 1 && ms_tensor_shape(result)[d] != 1);
}

/* The transpose of a broadcast: an element that was used several times gets the sum of the
 * gradients of its uses. Leading dimensions that the operand has not are summed and dropped at the
 * end, when the contiguous sums are seen in the operand's shape. Shapes are aligned at the last
 * dimension, as in ms_shape_broadcast. The usual case, equal shapes, costs a reference. */
ms_status ms_op_sum_to(ms_engine *engine, ms_tensor *gradient, const ms_tensor_info *to,
                       ms_tensor **out)
{
    ms_tensor *now = ms_tensor_retain(gradient);
    uint32_t dims = ms_tensor_dims(gradient);
    /* Nothing was broadcast. */
    if (ms_shape_equal(dims, ms_tensor_shape(gradient), to->dims, to->shape)) {
        *out = now;
        return MS_OK;
    }
    /* From the last dimension; neighbours that are all summed are summed at once. */
    for (uint32_t last = dims; last > 0;) {
        uint32_t first = last - 1;
        if (!is_repeated(gradient, to, first)) {
            last = first;
            continue;
        }
        while (first > 0 && is_repeated(gradient, to, first - 1)) first--;
        ms_tensor *next = NULL;
        ms_status status = sum_between(engine, now, first, last, &next);
        ms_tensor_release(now);
        if (status) return status;
        now = next;
        last = first;
    }
    /* `now` is contiguous here: it is the result of at least one sum. */
    int64_t strides[MS_DIMS_MAX], step = 1;
    for (uint32_t d = to->dims; d-- > 0;) {
        strides[d] = step;
        step *= to->shape[d] > 0 ? to->shape[d] : 1;
    }
    /* A view: leading sizes of 1 are dropped without a copy. */
    ms_status status = ms_tensor_window(now, to->dims, to->shape, strides, 0, out);
    ms_tensor_release(now);
    return status;
}
