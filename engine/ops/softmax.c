/* softmax.c: softmax, log_softmax, cross_entropy (probabilities are never stored) and mse_loss.
 *
 * The operators take any strides: inputs are made contiguous first, so the kernels know rows only.
 * Classes are the last dimension of logits; leading dimensions are rows. */
#include "ops/softmax.h"

#include <string.h>

#include "moonshard/ops.h"
#include "ops/autocast.h"
#include "ops/values.h"
#include "tensor/op.h"
#include "tensor/state.h"

/* ------------------------------------------------------------------ softmax */

/* The tensor as [outer, n, inner], with n the dimension of the softmax. The tensor must be
 * contiguous: the kernel takes no strides. */
static void split_shape(const ms_tensor *tensor, uint32_t dim, ms_softmax_args *args)
{
    args->outer = ms_shape_count(dim, tensor->shape);
    args->n = tensor->shape[dim];
    args->inner = ms_shape_count(tensor->dims - dim - 1, tensor->shape + dim + 1);
}

/* y = exp(x - max) / sum of exp(x - max) along dim, or its logarithm. y is saved: the gradient
 * needs y alone. The 8 FLOPs of an element are an estimate for the sim device and the trace. A
 * tensor without elements enqueues nothing. */
static ms_status softmax_forward(ms_op_call *call)
{
    ms_tensor *x = call->inputs[0], *whole = NULL, *y = NULL;
    uint32_t dim;
    if (!ms_dtype_is_float(x->dtype)) return ms_op_refuse(call, "it takes floats");
    if (!ms_shape_dim(x->dims, call->attributes.dim.a, &dim))
        return ms_op_refuse(call, "there is no dimension %d", ms_dim_named(call->attributes.dim.a));
    ms_dtype dtype = ms_autocast_wide(call->engine, x->dtype);
    ms_status status = ms_op_as_contiguous(call->engine, x, &whole);
    if (!status) status = ms_op_output(call, 0, dtype, x->dims, x->shape, &y);
    if (!status && x->count > 0) {
        ms_softmax_args args = { .x = ms_tensor_data(whole),
                                 .y = ms_tensor_data(y),
                                 .dtype = (uint8_t)x->dtype,
                                 .y_dtype = (uint8_t)dtype,
                                 .logarithm = call->op == &ms_op_log_softmax };
        split_shape(x, dim, &args);
        ms_task_cost cost = { .flops = 8.0 * (double)x->count, .bytes = 2 * ms_tensor_bytes(x) };
        status = ms_tensor_enqueue(call->engine,
                                   ms_engine_kernel(call->engine, MS_KERNEL_softmax_forward), &args,
                                   &whole, 1, &y, 1, cost);
    }
    if (!status) status = ms_op_save(call, y);
    ms_tensor_release(whole);
    return status;
}

/* softmax: dx = y * (g - sum of g y along dim). log_softmax: dx = g - exp(y) * (sum of g along
 * dim). g may be expanded (the gradient of a sum is), so it is made contiguous. dx is a new tensor:
 * y may be saved by other nodes, and g may be shared. */
static ms_status softmax_backward(ms_op_gradient *gradient)
{
    ms_tensor *y = gradient->saved[0], *g = NULL, *dx = NULL;
    uint32_t dim;
    ms_shape_dim(y->dims, gradient->attributes.dim.a, &dim);
    ms_status status = ms_op_as_contiguous(gradient->engine, gradient->gradients[0], &g);
    if (!status)
        status = ms_tensor_new(gradient->engine, gradient->inputs[0].dtype, y->dims, y->shape, &dx);
    if (!status && y->count > 0) {
        ms_softmax_args args = { .x = ms_tensor_data(y),
                                 .gradient = ms_tensor_data(g),
                                 .y = ms_tensor_data(dx),
                                 .dtype = (uint8_t)dx->dtype,
                                 .y_dtype = (uint8_t)y->dtype,
                                 .logarithm = gradient->op == &ms_op_log_softmax };
        split_shape(y, dim, &args);
        ms_tensor *reads[] = { y, g };
        ms_task_cost cost = { .flops = 4.0 * (double)y->count, .bytes = 3 * ms_tensor_bytes(y) };
        status = ms_tensor_enqueue(gradient->engine,
                                   ms_engine_kernel(gradient->engine, MS_KERNEL_softmax_backward),
                                   &args, reads, 2, &dx, 1, cost);
    }
    ms_tensor_release(g);
    if (status) ms_tensor_release(dx);
    else gradient->results[0] = dx;
    return status;
}

/* Both share forward and backward, which ask call->op which of the two they are. */
const ms_op ms_op_softmax = { .name = "softmax",
                              .forward = softmax_forward,
                              .backward = softmax_backward,
                              .inputs_min = 1,
                              .inputs_max = 1 };
const ms_op ms_op_log_softmax = { .name = "log_softmax",
                                  .forward = softmax_forward,
                                  .backward = softmax_backward,
                                  .inputs_min = 1,
                                  .inputs_max = 1 };

/* ------------------------------------------------------------ cross entropy */

/* Logits [..., classes], targets [...]; whether a target is a class is checked by the task. Targets
 * are values on the device, so that a target outside is an error of the stream that names the
 * row. */
static ms_status cross_entropy_check(const ms_op_call *call)
{
    const ms_tensor *logits = call->inputs[0], *target = call->inputs[1];
    if (!ms_dtype_is_float(logits->dtype)) return ms_op_refuse(call, "the logits must be floats");
    if (target->dtype != MS_I64 && target->dtype != MS_I32 && target->dtype != MS_U16)
        return ms_op_refuse(call, "the targets must be i64, i32 or u16");
    if (logits->dims == 0 || logits->shape[logits->dims - 1] == 0)
        return ms_op_refuse(call, "the logits need a last dimension with the classes");
    if (!ms_shape_equal(logits->dims - 1, logits->shape, target->dims, target->shape))
        return ms_op_refuse(
            call, "the targets must have the shape of the logits without the last dimension");
    return MS_OK;
}

/* What forward and backward have in common. The logits' dtype may be of 16 bits; the loss is f32 in
 * any case. */
static void fill_args(const ms_attributes *attributes, const ms_tensor *logits,
                      const ms_tensor *target, ms_cross_entropy_args *args)
{
    args->logits = ms_tensor_data(logits);
    args->target = ms_tensor_data(target);
    args->classes = logits->shape[logits->dims - 1];
    args->rows = target->count;
    args->ignore_index = attributes->loss.ignore_index;
    args->reduction = (uint8_t)attributes->loss.reduction;
    args->dtype = (uint8_t)logits->dtype;
    args->target_dtype = (uint8_t)target->dtype;
}

/* The loss of a row is log(sum of exp(logits)) - logits[target]. Of each row only the logarithm of
 * the sum is saved, from which backward makes the probabilities again, and `share`, by which the
 * reduction has scaled the rows. Without record nothing but the loss is written: evaluation needs
 * no memory for log_sum. */
static ms_status cross_entropy_forward(ms_op_call *call)
{
    ms_engine *engine = call->engine;
    ms_tensor *logits = NULL, *target = NULL, *loss = NULL, *log_sum = NULL, *share = NULL;
    ms_status status = cross_entropy_check(call);
    if (status) return status;
    /* A loss for each row has the shape of the targets. */
    bool rows = call->attributes.loss.reduction == MS_REDUCE_NONE;
    status = ms_op_as_contiguous(engine, call->inputs[0], &logits);
    if (!status) status = ms_op_as_contiguous(engine, call->inputs[1], &target);
    if (!status)
        status = ms_op_output(call, 0, MS_F32, rows ? target->dims : 0, target->shape, &loss);
    if (!status && call->record)
        status = ms_tensor_new(engine, MS_F32, 1, &target->count, &log_sum);
    if (!status && call->record) status = ms_tensor_new(engine, MS_F32, 0, NULL, &share);
    /* With a reduction the task also runs for no rows: the mean of nothing is NaN, the sum 0, and
     * someone must write it. */
    if (!status && (!rows || target->count > 0)) {
        ms_cross_entropy_args args = { .loss = ms_tensor_data(loss) };
        fill_args(&call->attributes, logits, target, &args);
        if (log_sum) args.log_sum = ms_tensor_data(log_sum);
        if (share) args.share = ms_tensor_data(share);
        /* The NULLs among the writes are passed over. */
        ms_tensor *reads[] = { logits, target }, *writes[] = { loss, log_sum, share };
        ms_task_cost cost = { .flops = 6.0 * (double)logits->count,
                              .bytes = ms_tensor_bytes(logits) + ms_tensor_bytes(target) };
        status = ms_tensor_enqueue(engine, ms_engine_kernel(engine, MS_KERNEL_cross_entropy), &args,
                                   reads, 2, writes, 3, cost);
    }
    /* In the order in which backward takes them apart. */
    ms_tensor *saved[] = { logits, target, log_sum, share };
    for (int i = 0; i < 4 && !status && call->record; i++) status = ms_op_save(call, saved[i]);
    ms_tensor_release(logits);
    ms_tensor_release(target);
    ms_tensor_release(log_sum);
    ms_tensor_release(share);
    return status;
}

/* Where the logits' gradient goes. Logits are often the largest tensor of a step. If the graph is
 * freed after this call and no other reference to their storage is left but the saved alias's, the
 * gradient overwrites them, and the peak of memory holds them once instead of twice. The count is 1
 * for the alias itself. A user who kept the logits, or another node that saved them, makes it 2. */
static ms_status gradient_place(const ms_op_gradient *gradient, ms_tensor *logits, ms_tensor **out)
{
    if (gradient->last && ms_storage_references(logits->storage) == 1)
        return ms_tensor_alias(logits, out);
    return ms_tensor_new(gradient->engine, logits->dtype, logits->dims, logits->shape, out);
}

/* dlogits[c] = g * share * (exp(logits[c] - log_sum) - (1 if c is the target, else 0)); 0 in rows
 * that are ignored. The gradient of the loss stays on the device: backward enqueues without waiting
 * for its value. */
static ms_status cross_entropy_backward(ms_op_gradient *gradient)
{
    ms_tensor *logits = gradient->saved[0], *target = gradient->saved[1],
              *log_sum = gradient->saved[2], *share = gradient->saved[3];
    ms_tensor *g = NULL, *out = NULL;
    ms_status status = ms_op_as_contiguous(gradient->engine, gradient->gradients[0], &g);
    if (!status) status = gradient_place(gradient, logits, &out);
    /* Without rows there is nothing to write. */
    if (!status && logits->count > 0) {
        ms_cross_entropy_args args = { .gradient = ms_tensor_data(g),
                                       .log_sum = ms_tensor_data(log_sum),
                                       .share = ms_tensor_data(share),
                                       .dlogits = ms_tensor_data(out) };
        fill_args(&gradient->attributes, logits, target, &args);
        ms_tensor *reads[] = { logits, target, log_sum, share, g };
        ms_task_cost cost = { .flops = 6.0 * (double)logits->count,
                              .bytes = 2 * ms_tensor_bytes(logits) };
        status = ms_tensor_enqueue(
            gradient->engine, ms_engine_kernel(gradient->engine, MS_KERNEL_cross_entropy_backward),
            &args, reads, 5, &out, 1, cost);
    }
    ms_tensor_release(g);
    if (status) ms_tensor_release(out);
    else gradient->results[0] = out;
    return status;
}

const ms_op ms_op_cross_entropy = { .name = "cross_entropy",
                                    .forward = cross_entropy_forward,
                                    .backward = cross_entropy_backward,
                                    .inputs_min = 2,
                                    .inputs_max = 2 };

/* ------------------------------------------------------------ squared error */

/* The tensor contiguous and in this dtype. Caller releases. */
static ms_status rows_in(ms_engine *engine, ms_tensor *tensor, ms_dtype dtype, ms_tensor **out)
{
    ms_tensor *cast = NULL;
    ms_status status = ms_op_as_dtype(engine, tensor, dtype, &cast);
    if (!status) status = ms_op_as_contiguous(engine, cast, out);
    ms_tensor_release(cast);
    return status;
}

/* loss = mean of (a - b)^2 over all elements. Outside of autocast the loss has the dtype of its
 * inputs, where that of cross entropy is f32 always. A loss over no elements is NaN, which the task
 * writes. Of an f32 and a 16-bit input the latter is cast. */
static ms_status mse_forward(ms_op_call *call)
{
    ms_engine *engine = call->engine;
    ms_tensor *a = call->inputs[0], *b = call->inputs[1], *left = NULL, *right = NULL, *loss = NULL;
    ms_dtype dtype = MS_F32, wide = MS_F32;
    if (!ms_dtype_is_float(a->dtype) || !ms_dtype_is_float(b->dtype)
        || !ms_autocast_shared(engine, a->dtype, b->dtype, &dtype)
        || !ms_shape_equal(a->dims, a->shape, b->dims, b->shape))
        return ms_op_refuse(call, "both must have the same shape and float dtype");
    wide = ms_autocast_wide(engine, dtype);
    ms_status status = rows_in(engine, a, dtype, &left);
    if (!status) status = rows_in(engine, b, dtype, &right);
    if (!status) status = ms_op_output(call, 0, wide, 0, NULL, &loss);
    if (!status) {
        ms_mse_args args = { .a = ms_tensor_data(left),
                             .b = ms_tensor_data(right),
                             .loss = ms_tensor_data(loss),
                             .count = a->count,
                             .dtype = (uint8_t)dtype,
                             .loss_dtype = (uint8_t)wide };
        ms_tensor *reads[] = { left, right };
        ms_task_cost cost = { .flops = 3.0 * (double)a->count, .bytes = 2 * ms_tensor_bytes(a) };
        status = ms_tensor_enqueue(engine, ms_engine_kernel(engine, MS_KERNEL_mse), &args, reads, 2,
                                   &loss, 1, cost);
    }
    if (!status) status = ms_op_save(call, left);
    if (!status) status = ms_op_save(call, right);
    ms_tensor_release(left);
    ms_tensor_release(right);
    return status;
}

/* da = 2 g (a - b) / count, db = -da; both in one task. Both read a and b once. An input that was
 * cast gets its gradient cast back. After an error neither is left. */
static ms_status mse_backward(ms_op_gradient *gradient)
{
    ms_tensor *a = gradient->saved[0], *b = gradient->saved[1], *g = gradient->gradients[0],
              *results[2] = { NULL };
    ms_status status = MS_OK;
    for (int i = 0; i < 2 && !status; i++)
        if (gradient->needs[i])
            status = ms_tensor_new(gradient->engine, a->dtype, a->dims, a->shape, &results[i]);
    if (!status && a->count > 0) {
        ms_mse_args args = { .a = ms_tensor_data(a),
                             .b = ms_tensor_data(b),
                             .gradient = ms_tensor_data(g),
                             .count = a->count,
                             .dtype = (uint8_t)a->dtype,
                             .loss_dtype = (uint8_t)g->dtype };
        if (results[0]) args.da = ms_tensor_data(results[0]);
        if (results[1]) args.db = ms_tensor_data(results[1]);
        ms_tensor *reads[] = { a, b, g };
        ms_task_cost cost = { .flops = 2.0 * (double)a->count, .bytes = 4 * ms_tensor_bytes(a) };
        status = ms_tensor_enqueue(gradient->engine,
                                   ms_engine_kernel(gradient->engine, MS_KERNEL_mse_backward),
                                   &args, reads, 3, results, 2, cost);
    }
    for (int i = 0; i < 2; i++) {
        if (!status && results[i])
            status = ms_op_as_dtype(gradient->engine, results[i], gradient->inputs[i].dtype,
                                    &gradient->results[i]);
        ms_tensor_release(results[i]);
    }
    return status;
}

const ms_op ms_op_mse_loss = { .name = "mse_loss",
                               .forward = mse_forward,
                               .backward = mse_backward,
                               .inputs_min = 2,
                               .inputs_max = 2 };
