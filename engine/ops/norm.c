/* norm.c: layer_norm, rms_norm, and both fused with the residual sum before them (add_layer_norm,
 * add_rms_norm).
 *
 * With s = x or x + residual, and n the row normalized, n = (s - mean) * scale: y = n * weight +
 * bias. Layer norm (Ba et al. 2016) subtracts the mean and divides by the standard deviation; RMS
 * norm (Zhang and Sennrich 2019) divides by the root of the mean square and has no mean and no
 * bias.
 *
 * Backward, with h = dy * weight and averages over a row: ds = scale * (h - mean(h) - n * mean(h *
 * n)), without mean(h) for RMS norm; dweight = sum of dy * n over rows, dbias = sum of dy. mean and
 * scale are saved, one number a row each, so backward need not compute them again. */
#include "ops/norm.h"

#include <string.h>

#include "moonshard/ops.h"
#include "ops/autocast.h"
#include "ops/fp8.h"
#include "ops/values.h"
#include "tensor/op.h"
#include "tensor/tensor.h"

/* Which of the four operators it is: layer norm or RMS norm, fused with a sum or not. */
static bool is_centered(const ms_op *op)
{
    return op == &ms_op_layer_norm || op == &ms_op_add_layer_norm;
}
static bool is_sum(const ms_op *op)
{
    return op == &ms_op_add_layer_norm || op == &ms_op_add_rms_norm;
}

/* Input `index`, or NULL where it is absent. The inputs are x, then residual (fused forms), then
 * weight, then bias (layer norm). Scripts may leave out weight and bias. */
static ms_tensor *input(const ms_op_call *call, uint32_t index)
{
    return index < call->input_count ? call->inputs[index] : NULL;
}

/* weight and bias are [width] in x's dtype, or under autocast in f32; each may be absent. Both have
 * one dtype, since the kernel reads them so. */
static ms_status check_scales(const ms_op_call *call, const ms_tensor *x, const ms_tensor *weight,
                              const ms_tensor *bias)
{
    int64_t width = x->shape[x->dims - 1];
    const ms_tensor *scales[] = { weight, bias };
    ms_dtype shared;
    for (int i = 0; i < 2; i++)
        if (scales[i]
            && (!ms_autocast_shared(call->engine, x->dtype, scales[i]->dtype, &shared)
                || scales[i]->dims != 1 || scales[i]->shape[0] != width))
            return ms_op_refuse(call, "the %s must have shape [%lld] and the input's dtype",
                                i ? "bias" : "weight", (long long)width);
    if (weight && bias && weight->dtype != bias->dtype)
        return ms_op_refuse(call, "weight and bias must have the same dtype");
    return MS_OK;
}

/* The dtypes of the call. The sum has the one that its summands share. The normalized rows have
 * that of autocast, since products read them; outside of autocast all have one. */
static ms_norm_dtypes dtypes_of(const ms_op_call *call, ms_dtype s, const ms_tensor *x,
                                const ms_tensor *residual, const ms_tensor *weight,
                                const ms_tensor *bias)
{
    const ms_tensor *scales = weight ? weight : bias;
    ms_dtype autocast = ms_engine_autocast(call->engine);
    return (ms_norm_dtypes){ .s = (uint8_t)s,
                             .x = (uint8_t)x->dtype,
                             .residual = (uint8_t)(residual ? residual->dtype : s),
                             .y = (uint8_t)(s == MS_F32 ? autocast : s),
                             .weight = (uint8_t)(scales ? scales->dtype : s) };
}

/* x of any shape with a last dimension that is not empty; weight and bias [width], all of one float
 * dtype outside of autocast. *s: the dtype of what is normalized. */
static ms_status check(const ms_op_call *call, ms_tensor *x, ms_tensor *residual, ms_tensor *weight,
                       ms_tensor *bias, ms_dtype *s)
{
    *s = x->dtype;
    if (!ms_dtype_is_float(x->dtype)) return ms_op_refuse(call, "it takes floats");
    if (x->dims == 0) return ms_op_refuse(call, "a number has no last dimension to normalize over");
    if (x->shape[x->dims - 1] == 0) return ms_op_refuse(call, "the last dimension is empty");
    if (residual
        && (!ms_dtype_is_float(residual->dtype)
            || !ms_autocast_shared(call->engine, x->dtype, residual->dtype, s)
            || !ms_shape_equal(x->dims, x->shape, residual->dims, residual->shape)))
        return ms_op_refuse(call, "both summands must have the same shape and dtype");
    return check_scales(call, x, weight, bias);
}

/* What a forward reads and writes. sum and y are the call's outputs (borrowed), all others are
 * owned; those that are not wanted are NULL. They are retained until the task is enqueued, as
 * copies would lose their memory otherwise. */
typedef struct parts {
    ms_tensor *x, *residual, *weight, *bias; /* contiguous */
    ms_tensor *sum, *y, *mean, *scale, *most;
    ms_norm_dtypes dtypes;
} parts;

/* Releases what the forward owns; sum and y belong to the call. NULLs are allowed, so it is right
 * after a failure at any place. */
static void release_parts(parts *p)
{
    ms_tensor_release(p->x);
    ms_tensor_release(p->residual);
    ms_tensor_release(p->weight);
    ms_tensor_release(p->bias);
    ms_tensor_release(p->mean);
    ms_tensor_release(p->scale);
    ms_tensor_release(p->most);
}

/* NULL stays NULL: residual, weight and bias may be absent. */
static ms_status contiguous(ms_engine *engine, ms_tensor *tensor, ms_tensor **out)
{
    return tensor ? ms_op_as_contiguous(engine, tensor, out) : MS_OK;
}

/* One task: the sum, the statistics and the result in one pass over the rows. Fused, the
 * sum is written but not read again: four tensors move, where two tasks would move five. */
static ms_status enqueue_forward(ms_op_call *call, parts *p, int64_t rows)
{
    ms_norm_args args = { .x = ms_tensor_data(p->x),
                          .y = ms_tensor_data(p->y),
                          .rows = rows,
                          .width = p->x->shape[p->x->dims - 1],
                          .eps = call->attributes.norm.eps,
                          .dtypes = p->dtypes,
                          .centered = is_centered(call->op) };
    if (p->residual) args.residual = ms_tensor_data(p->residual);
    if (p->weight) args.weight = ms_tensor_data(p->weight);
    if (p->bias) args.bias = ms_tensor_data(p->bias);
    if (p->sum) args.sum = ms_tensor_data(p->sum);
    if (p->mean) args.mean = ms_tensor_data(p->mean);
    if (p->scale) args.scale = ms_tensor_data(p->scale);
    if (p->most) args.most = ms_tensor_data(p->most);
    ms_tensor *reads[] = { p->x, p->residual, p->weight, p->bias },
              *writes[] = { p->y, p->sum, p->mean, p->scale, p->most };
    ms_task_cost cost = { .flops = 8.0 * (double)p->x->count,
                          .bytes = ms_tensor_bytes(p->x) + ms_tensor_bytes(p->y) };
    if (p->residual) cost.bytes += ms_tensor_bytes(p->residual) + ms_tensor_bytes(p->sum);
    ms_status status =
        ms_tensor_enqueue(call->engine, ms_engine_kernel(call->engine, MS_KERNEL_norm_forward),
                          &args, reads, 4, writes, 5, cost);
    if (!status && p->most) ms_tensor_hold_most(p->y, p->most);
    return status;
}

/* Whether a result's greatest size is given: products in 8 bits may read it. These take multiples
 * of 16 rows only, so that the numbers are as many as they must be. */
static bool gives_most(bool wanted, uint8_t dtype, int64_t rows)
{
    return wanted && dtype == MS_BF16 && rows > 0 && rows % MS_FP8_MULTIPLE == 0;
}

/* Outputs: y, or s and then y for the fused forms, whose s is the residual of the next block.
 * Statistics are made only if the call is recorded. x itself is saved and not the normalized rows:
 * it exists already. */
static ms_status norm_forward(ms_op_call *call)
{
    ms_engine *engine = call->engine;
    bool fused = is_sum(call->op);
    ms_tensor *x = call->inputs[0], *residual = fused ? call->inputs[1] : NULL;
    uint32_t at = fused ? 2 : 1;
    uint32_t results = fused ? 2 : 1;
    ms_tensor *weight = input(call, at), *bias = is_centered(call->op) ? input(call, at + 1) : NULL;
    ms_dtype s = MS_F32;
    ms_status status = check(call, x, residual, weight, bias, &s);
    if (status) return status;
    if (call->output_count != results) return ms_op_refuse(call, "it has %u results", results);
    parts p = { .dtypes = dtypes_of(call, s, x, residual, weight, bias) };
    int64_t rows = ms_shape_count(x->dims - 1, x->shape);
    status = contiguous(engine, x, &p.x);
    if (!status) status = contiguous(engine, residual, &p.residual);
    if (!status) status = contiguous(engine, weight, &p.weight);
    if (!status) status = contiguous(engine, bias, &p.bias);
    /* The sum is the first output: the next block takes it as its residual. */
    if (!status && fused) status = ms_op_output(call, 0, s, x->dims, x->shape, &p.sum);
    if (!status)
        status = ms_op_output(call, fused ? 1 : 0, (ms_dtype)p.dtypes.y, x->dims, x->shape, &p.y);
    if (!status && call->record) status = ms_tensor_new(engine, MS_F32, 1, &rows, &p.scale);
    if (!status && call->record && is_centered(call->op))
        status = ms_tensor_new(engine, MS_F32, 1, &rows, &p.mean);
    call->attributes.norm.gives_most = ms_fp8_wants_most(engine);
    if (!status && gives_most(call->attributes.norm.gives_most, p.dtypes.y, rows))
        status = ms_fp8_most_new(engine, rows, &p.most);
    if (!status && x->count > 0) status = enqueue_forward(call, &p, rows);
    /* In this order: what was normalized, its scale, the weight if any, the mean of layer norm
     * last. */
    if (!status) status = ms_op_save(call, fused ? p.sum : p.x);
    if (!status && p.scale) status = ms_op_save(call, p.scale);
    if (!status && p.weight) status = ms_op_save(call, p.weight);
    if (!status && p.mean) status = ms_op_save(call, p.mean);
    release_parts(&p);
    return status;
}

/* What a backward reads (owned, contiguous) and writes; results that are not needed are NULL. */
typedef struct backward_parts {
    ms_tensor *gradient, *sum_gradient, *dx, *narrow, *dweight, *dbias, *most;
} backward_parts;

/* The gradient of output `index`, contiguous and owned. If none arrived, because nothing used that
 * output, it is zeros where the kernel needs one, else NULL. The gradient of y is always needed;
 * that of s only adds to dx. */
static ms_status arrived(ms_op_gradient *gradient, uint32_t index, bool needed, ms_tensor **out)
{
    const ms_tensor_info *info = &gradient->outputs[index];
    if (gradient->gradients[index])
        return ms_op_as_contiguous(gradient->engine, gradient->gradients[index], out);
    return needed ? ms_op_full(gradient->engine, info->dtype, info->dims, info->shape, 0.0, out)
                  : MS_OK;
}

/* The dtypes of a backward. Weight and bias have one, and so do their gradients. */
static ms_norm_dtypes backward_dtypes(const ms_op_gradient *gradient, const backward_parts *p)
{
    uint8_t s = (uint8_t)gradient->saved[0]->dtype;
    uint32_t at = is_sum(gradient->op) ? 2 : 1;
    ms_norm_dtypes out = { s, s, s, (uint8_t)p->gradient->dtype, s, s };
    if (p->narrow) out.narrow = (uint8_t)p->narrow->dtype;
    for (uint32_t i = at; i < gradient->input_count; i++)
        if (gradient->inputs[i].dims > 0) out.weight = (uint8_t)gradient->inputs[i].dtype;
    return out;
}

/* Which of the saved tensors is the mean follows from their number: it is the last one, of layer
 * norm only. `reads` has NULLs for what is absent, which ms_tensor_enqueue passes over. */
static ms_status enqueue_backward(ms_op_gradient *gradient, ms_tensor *weight, backward_parts *p)
{
    ms_tensor *s = gradient->saved[0], *scale = gradient->saved[1];
    bool centered = is_centered(gradient->op);
    ms_tensor *mean = centered ? gradient->saved[gradient->saved_count - 1] : NULL;
    int64_t width = s->shape[s->dims - 1];
    ms_norm_backward_args args = { .s = ms_tensor_data(s),
                                   .gradient = ms_tensor_data(p->gradient),
                                   .scale = ms_tensor_data(scale),
                                   .rows = s->count / width,
                                   .width = width,
                                   .dtypes = backward_dtypes(gradient, p),
                                   .centered = centered };
    if (weight) args.weight = ms_tensor_data(weight);
    if (mean) args.mean = ms_tensor_data(mean);
    if (p->sum_gradient) args.sum_gradient = ms_tensor_data(p->sum_gradient);
    if (p->dx) args.dx = ms_tensor_data(p->dx);
    if (p->narrow) args.narrow = ms_tensor_data(p->narrow);
    if (p->dweight) args.dweight = ms_tensor_data(p->dweight);
    if (p->dbias) args.dbias = ms_tensor_data(p->dbias);
    if (p->most) args.most = ms_tensor_data(p->most);
    ms_tensor *reads[] = { s, scale, mean, weight, p->gradient, p->sum_gradient },
              *writes[] = { p->dx, p->narrow, p->dweight, p->dbias, p->most };
    ms_task_cost cost = { .flops = 16.0 * (double)s->count,
                          .bytes = (p->sum_gradient ? 4 : 3) * ms_tensor_bytes(s) };
    ms_status status = ms_tensor_enqueue(
        gradient->engine, ms_engine_kernel(gradient->engine, MS_KERNEL_norm_backward), &args, reads,
        6, writes, 5, cost);
    if (!status && p->most) ms_tensor_hold_most(p->narrow ? p->narrow : p->dx, p->most);
    return status;
}

/* The gradient of 16 bits is that of a linear layer's result, if anything is. */
static ms_status make_most(const ms_op_gradient *gradient, backward_parts *p)
{
    const ms_tensor *result = p->narrow ? p->narrow : p->dx;
    if (!result) return MS_OK;
    int64_t rows = ms_shape_count(result->dims - 1, result->shape);
    if (!gives_most(gradient->attributes.norm.gives_most, (uint8_t)result->dtype, rows))
        return MS_OK;
    return ms_fp8_most_new(gradient->engine, rows, &p->most);
}

/* Formulas at the top of this file. s of the fused forms is an output too, so its own gradient is
 * added to ds in the same task. The task also runs for a tensor without rows: weight and bias still
 * need gradients. dx is one tensor for x and residual, which have the same gradient, unless their
 * dtypes differ. The task makes all gradients in the first part of a backward in two. */
static ms_status norm_backward(ms_op_gradient *gradient)
{
    ms_engine *engine = gradient->engine;
    bool fused = is_sum(gradient->op);
    uint32_t at = fused ? 2 : 1;
    const ms_tensor_info *x = &gradient->inputs[0], *thin = NULL;
    ms_dtype s = gradient->saved[0]->dtype;
    backward_parts p = { 0 };
    bool has_mean = is_centered(gradient->op);
    /* What was normalized, its scale, and the mean; one more is the weight. */
    uint32_t always_saved = has_mean ? 3 : 2;
    ms_tensor *weight = gradient->saved_count > always_saved ? gradient->saved[2] : NULL;
    bool needs_x = false;
    for (uint32_t i = 0; i < (fused ? 2u : 1u); i++) {
        if (!ms_op_wants(gradient, i)) continue;
        if (x[i].dtype == s) needs_x = true;
        else thin = &x[i];
    }
    ms_status status = arrived(gradient, fused ? 1 : 0, true, &p.gradient);
    if (!status && fused) status = arrived(gradient, 0, false, &p.sum_gradient);
    if (!status && needs_x) status = ms_tensor_new(engine, s, x->dims, x->shape, &p.dx);
    if (!status && thin) status = ms_tensor_new(engine, thin->dtype, x->dims, x->shape, &p.narrow);
    if (!status && ms_op_wants(gradient, at)) status = ms_op_result(gradient, at, &p.dweight);
    if (!status && has_mean && ms_op_wants(gradient, at + 1))
        status = ms_op_result(gradient, at + 1, &p.dbias);
    if (!status) status = make_most(gradient, &p);
    if (!status) status = enqueue_backward(gradient, weight, &p);
    ms_tensor_release(p.gradient);
    ms_tensor_release(p.sum_gradient);
    ms_tensor_release(p.most);
    if (status) {
        ms_tensor_release(p.dx);
        ms_tensor_release(p.narrow);
        ms_tensor_release(p.dweight);
        ms_tensor_release(p.dbias);
        return status;
    }
    if (p.dweight) gradient->results[at] = p.dweight;
    if (p.dbias) gradient->results[at + 1] = p.dbias;
    /* Both summands have the same gradient: two references to one tensor, or one of each dtype. */
    for (uint32_t i = 0; i < (fused ? 2u : 1u); i++)
        if (ms_op_wants(gradient, i))
            gradient->results[i] = ms_tensor_retain(x[i].dtype == s ? p.dx : p.narrow);
    ms_tensor_release(p.dx);
    ms_tensor_release(p.narrow);
    return MS_OK;
}

/* One pair of functions serves all four; is_centered and is_sum tell them apart. */
const ms_op ms_op_layer_norm = { .name = "layer_norm",
                                 .forward = norm_forward,
                                 .backward = norm_backward,
                                 .inputs_min = 1,
                                 .inputs_max = 3 };
const ms_op ms_op_rms_norm = { .name = "rms_norm",
                               .forward = norm_forward,
                               .backward = norm_backward,
                               .inputs_min = 1,
                               .inputs_max = 2 };
const ms_op ms_op_add_layer_norm = { .name = "add_layer_norm",
                                     .forward = norm_forward,
                                     .backward = norm_backward,
                                     .inputs_min = 2,
                                     .inputs_max = 4 };
const ms_op ms_op_add_rms_norm = { .name = "add_rms_norm",
                                   .forward = norm_forward,
                                   .backward = norm_backward,
                                   .inputs_min = 2,
                                   .inputs_max = 3 };
