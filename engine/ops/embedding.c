/* embedding.c: the operator embedding: rows of a table by their numbers. */
#include "ops/embedding.h"

#include <string.h>

#include "moonshard/ops.h"
#include "ops/values.h"
#include "tensor/op.h"
#include "tensor/state.h"

/* The values of ids are checked by the task: they are on the device. The dtype of the result is the
 * weight's; ids of u16 are taken as a data set stores tokens. */
static ms_status check(const ms_op_call *call)
{
    const ms_tensor *ids = call->inputs[0], *weight = call->inputs[1];
    if (ids->dtype != MS_I64 && ids->dtype != MS_I32 && ids->dtype != MS_U16)
        return ms_op_refuse(call, "the ids must be i64, i32 or u16");
    if (!ms_dtype_is_float(weight->dtype) || weight->dims != 2)
        return ms_op_refuse(call, "the weight must be floats of shape [rows, width]");
    if (ids->dims == MS_DIMS_MAX)
        return ms_op_refuse(call, "the result would have more than %d dimensions", MS_DIMS_MAX);
    return MS_OK;
}

/* One task for both ways: forward gathers rows of the table, backward adds rows of values to it. A
 * gradient that begins from nothing also pays for clearing the table. No FLOPs are counted: time
 * goes into moving rows. */
static ms_status enqueue(ms_engine *engine, ms_kernel kernel, ms_tensor *ids, ms_tensor *table,
                         ms_tensor *values, bool accumulate)
{
    ms_embedding_args args = { .ids = ms_tensor_data(ids),
                               .table = ms_tensor_data(table),
                               .values = ms_tensor_data(values),
                               .count = ids->count,
                               .rows = table->shape[0],
                               .width = table->shape[1],
                               .ids_dtype = (uint8_t)ids->dtype,
                               .dtype = (uint8_t)table->dtype,
                               .accumulate = accumulate };
    bool forward = kernel == MS_KERNEL_embedding;
    ms_tensor *reads[] = { ids, forward ? table : values };
    ms_task_cost cost = { .bytes = 2 * ms_tensor_bytes(values) + ms_tensor_bytes(ids) };
    if (!forward && !accumulate) cost.bytes += ms_tensor_bytes(table);
    return ms_tensor_enqueue(engine, ms_engine_kernel(engine, kernel), &args, reads, 2,
                             forward ? &values : &table, 1, cost);
}

/* y[..., :] = weight[ids[...], :]. Only the ids are saved: the gradient does not depend on the
 * weight. The weight is not cast under autocast: there is no product, and the rows keep the
 * precision of f32. */
static ms_status embedding_forward(ms_op_call *call)
{
    ms_engine *engine = call->engine;
    ms_tensor *ids = NULL, *weight = NULL, *out = NULL;
    int64_t shape[MS_DIMS_MAX];
    ms_status status = check(call);
    if (status) return status;
    uint32_t dims = call->inputs[0]->dims;
    /* The shape of the ids, and the width of the table after it. */
    memcpy(shape, call->inputs[0]->shape, dims * sizeof *shape);
    shape[dims] = call->inputs[1]->shape[1];
    status = ms_op_as_contiguous(engine, call->inputs[0], &ids);
    if (!status) status = ms_op_as_contiguous(engine, call->inputs[1], &weight);
    if (!status) status = ms_op_output(call, 0, call->inputs[1]->dtype, dims + 1, shape, &out);
    if (!status && ids->count > 0)
        status = enqueue(engine, MS_KERNEL_embedding, ids, weight, out, false);
    if (!status) status = ms_op_save(call, ids);
    ms_tensor_release(ids);
    ms_tensor_release(weight);
    return status;
}

/* dweight[r, :] = sum of g over all positions whose id is r, in order of position; ids have no
 * gradient. The gradient is a whole table, with zeros for ids that did not occur: optimizers and
 * reductions then treat it like every other gradient. */
static ms_status embedding_backward(ms_op_gradient *gradient)
{
    if (!gradient->needs[1]) return MS_OK;
    const ms_tensor_info *weight = &gradient->inputs[1];
    ms_tensor *g = NULL, *table = NULL;
    /* If the table also is the weight of the last layer (tied embeddings), its gradient has arrived
     * from there: a few rows are added to it in place, and no second table is made. */
    ms_tensor *sum =
        gradient->sums && gradient->sums[1] && weight->dtype == MS_F32 ? gradient->sums[1] : NULL;
    ms_status status = ms_op_as_contiguous(gradient->engine, gradient->gradients[0], &g);
    if (!status && sum) table = ms_tensor_retain(sum);
    else if (!status) status = ms_op_result(gradient, 1, &table);
    if (!status && table->count > 0)
        status = enqueue(gradient->engine, MS_KERNEL_embedding_backward, gradient->saved[0], table,
                         g, sum != NULL);
    ms_tensor_release(g);
    if (status) ms_tensor_release(table);
    else gradient->results[1] = table;
    return status;
}

const ms_op ms_op_embedding = { .name = "embedding",
                                .forward = embedding_forward,
                                .backward = embedding_backward,
                                .inputs_min = 2,
                                .inputs_max = 2 };
