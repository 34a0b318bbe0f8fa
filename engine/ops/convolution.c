/* convolution.c: the operator conv2d with its gradients.
 *
 * y[n, o, r, c] = bias[o] + the sum over the channels of o's group and the elements (i, j) of the
 * window of weight[o, channel, i, j] * x[n, channel, r * stride - padding + i * dilation, ...]:
 * PyTorch's conv2d, a correlation. The kernels do not keep the matrix of windows, which is as many
 * times larger than x as a window has elements: backward saves x and weight only. */
#include "ops/convolution.h"

#include <string.h>

#include "exec/engine.h"
#include "moonshard/ops.h"
#include "ops/autocast.h"
#include "ops/matmul.h"
#include "ops/values.h"
#include "tensor/products.h"

/* The bias, or NULL: it may be absent or given as NULL. */
static ms_tensor *bias_of(const ms_op_call *call)
{
    return call->input_count > 2 ? call->inputs[2] : NULL;
}

/* The channels must divide by the groups on both sides, and a group's weights take as many channels
 * as the input has for it. Messages name both numbers. */
static ms_status check_channels(const ms_op_call *call, int64_t groups)
{
    const ms_tensor *x = call->inputs[0], *w = call->inputs[1];
    if (groups < 1)
        return ms_op_refuse(call, "%lld groups; 1 or more are allowed", (long long)groups);
    if (x->shape[1] % groups != 0)
        return ms_op_refuse(call, "%lld input channels do not divide by %lld groups",
                            (long long)x->shape[1], (long long)groups);
    if (w->shape[0] % groups != 0)
        return ms_op_refuse(call, "%lld output channels do not divide by %lld groups",
                            (long long)w->shape[0], (long long)groups);
    if (w->shape[1] != x->shape[1] / groups)
        return ms_op_refuse(call,
                            "the weight takes %lld channels, the input has %lld in each of %lld "
                            "groups",
                            (long long)w->shape[1], (long long)(x->shape[1] / groups),
                            (long long)groups);
    return MS_OK;
}

/* Checks a call and fills in its sizes. */
static ms_status sizes_of(const ms_op_call *call, ms_convolution_args *args)
{
    static const int64_t one[2] = { 1, 1 };
    const ms_tensor *x = call->inputs[0], *w = call->inputs[1], *bias = bias_of(call);
    int64_t groups = call->attributes.window.groups ? call->attributes.window.groups : 1;
    if (w->dims != 4 || w->count == 0)
        return ms_op_refuse(call, "the weight must be [output channels, channels, rows, columns], "
                                  "none of them 0");
    ms_status status = ms_window_of(call, w->shape + 2, one, &args->window);
    if (!status) status = check_channels(call, groups);
    if (status) return status;
    if (bias && (bias->dims != 1 || bias->shape[0] != w->shape[0]))
        return ms_op_refuse(call, "the bias must have shape [%lld]", (long long)w->shape[0]);
    args->images = x->shape[0];
    args->groups = groups;
    args->channels = w->shape[1];
    args->results = w->shape[0] / groups;
    return MS_OK;
}

/* Plans are made here, on the host, as for products. All three kernels do as many operations: one
 * product and one sum for each weight and place. */
static ms_status enqueue(ms_engine *engine, ms_kernel kernel, ms_convolution_args *args,
                         ms_tensor *const *reads, ms_tensor *const *writes)
{
    args->kind = (uint8_t)kernel;
    const ms_tensor *target = writes[0] ? writes[0] : writes[1];
    if (ms_engine_device_of(engine)->values && !ms_tensor_is_meta(target)) {
        ms_status status = ms_engine_backend(engine)->plan_convolution(engine, args);
        if (status) return status;
    }
    double weights = (double)(args->groups * args->results * args->channels)
                     * (double)ms_window_elements(&args->window);
    ms_task_cost cost = { 0 };
    cost.flops = 2.0 * (double)args->images * (double)ms_window_places(&args->window) * weights;
    for (int i = 0; i < 3; i++)
        if (reads[i]) cost.bytes += ms_tensor_bytes(reads[i]);
    for (int i = 0; i < 2; i++)
        if (writes[i]) cost.bytes += ms_tensor_bytes(writes[i]);
    return ms_tensor_enqueue(engine, ms_engine_kernel(engine, kernel), args, reads, 3, writes, 2,
                             cost);
}

/* In the dtype of products, and contiguous. Caller releases. `keep`: the cast serves for the rest
 * of the step. */
static ms_status operand(ms_engine *engine, ms_tensor *tensor, ms_dtype dtype, bool keep,
                         ms_tensor **out)
{
    ms_tensor *cast = NULL;
    ms_status status = ms_tensor_cast_cached(engine, tensor, dtype, keep, &cast);
    if (status) return status;
    status = ms_op_as_contiguous(engine, cast, out);
    ms_tensor_release(cast);
    return status;
}

/* Saved are x and the weight as they were multiplied: casts, under autocast. The bias is added in
 * f32. */
static ms_status conv2d_forward(ms_op_call *call)
{
    ms_engine *engine = call->engine;
    ms_convolution_args args = { 0 };
    ms_tensor *x = NULL, *w = NULL, *bias = NULL, *y = NULL;
    ms_dtype dtype = MS_F32;
    ms_status status = ms_autocast_product(call, call->inputs, call->input_count, &dtype);
    if (!status) status = sizes_of(call, &args);
    if (status) return status;
    int64_t shape[4] = { args.images, args.groups * args.results, args.window.out[0],
                         args.window.out[1] };
    status = operand(engine, call->inputs[0], dtype, false, &x);
    if (!status) status = operand(engine, call->inputs[1], dtype, true, &w);
    if (!status && bias_of(call)) status = operand(engine, bias_of(call), MS_F32, false, &bias);
    if (!status) status = ms_products_take(engine, dtype, 4, shape, &call->outputs[0]);
    bool is_kept = call->outputs[0] != NULL;
    if (!status && !is_kept) status = ms_op_output(call, 0, dtype, 4, shape, &y);
    if (!status && !is_kept && y->count > 0) {
        args.x = ms_tensor_data(x);
        args.weight = ms_tensor_data(w);
        args.bias = bias ? ms_tensor_data(bias) : NULL;
        args.out = ms_tensor_data(y);
        args.in_dtype = (uint8_t)dtype;
        args.out_dtype = (uint8_t)dtype;
        ms_tensor *reads[] = { x, w, bias }, *writes[] = { y, NULL };
        status = enqueue(engine, MS_KERNEL_conv2d, &args, reads, writes);
    }
    if (!status && !is_kept) status = ms_products_note(engine, y);
    if (!status) status = ms_op_save(call, x);
    if (!status) status = ms_op_save(call, w);
    ms_tensor_release(x);
    ms_tensor_release(w);
    ms_tensor_release(bias);
    return status;
}

/* ----------------------------------------------------------------- backward */

/* The sizes of the call that is gone: forward has checked them, so nothing is refused. */
static void sizes_again(const ms_op_gradient *gradient, ms_convolution_args *args)
{
    const ms_tensor *x = gradient->saved[0], *w = gradient->saved[1];
    const ms_tensor_info *y = &gradient->outputs[0];
    int64_t groups = gradient->attributes.window.groups;
    args->images = x->shape[0];
    args->groups = groups ? groups : 1;
    args->channels = w->shape[1];
    args->results = w->shape[0] / args->groups;
    args->in_dtype = (uint8_t)x->dtype;
    for (int d = 0; d < 2; d++) {
        int32_t stride = gradient->attributes.window.stride[d],
                dilation = gradient->attributes.window.dilation[d];
        args->window.in[d] = x->shape[2 + d];
        args->window.out[d] = y->shape[2 + d];
        args->window.kernel[d] = w->shape[2 + d];
        args->window.stride[d] = stride ? stride : 1;
        args->window.dilation[d] = dilation ? dilation : 1;
        args->window.padding[d] = gradient->attributes.window.padding[d];
    }
}

/* dx, in the dtype of the input. */
static ms_status input_gradient(const ms_op_gradient *gradient, ms_convolution_args args,
                                ms_tensor *g)
{
    const ms_tensor_info *x = &gradient->inputs[0];
    ms_tensor *made = NULL, *w = gradient->saved[1];
    ms_status status = ms_tensor_new(gradient->engine, x->dtype, x->dims, x->shape, &made);
    if (!status && made->count > 0) {
        args.weight = ms_tensor_data(w);
        args.g = ms_tensor_data(g);
        args.out = ms_tensor_data(made);
        args.out_dtype = (uint8_t)x->dtype;
        ms_tensor *reads[] = { w, g, NULL }, *writes[] = { made, NULL };
        status = enqueue(gradient->engine, MS_KERNEL_conv2d_data, &args, reads, writes);
    }
    if (status) ms_tensor_release(made);
    else gradient->results[0] = made;
    return status;
}

/* dweight and dbias, of which at least one is needed now, in one pass over g, written into their
 * homes if they have some. */
static ms_status weight_gradients(const ms_op_gradient *gradient, ms_convolution_args args,
                                  ms_tensor *g)
{
    bool wants_bias = ms_op_wants(gradient, 2);
    ms_tensor *dweight = NULL, *dbias = NULL, *x = gradient->saved[0];
    ms_status status = MS_OK;
    if (ms_op_wants(gradient, 1)) status = ms_op_result(gradient, 1, &dweight);
    if (!status && wants_bias) status = ms_op_result(gradient, 2, &dbias);
    if (!status) {
        args.x = ms_tensor_data(x);
        args.g = ms_tensor_data(g);
        args.out_dtype = (uint8_t)gradient->inputs[1].dtype;
        if (dweight) args.out = ms_tensor_data(dweight);
        if (dbias) {
            args.dbias = ms_tensor_data(dbias);
            args.dbias_dtype = (uint8_t)gradient->inputs[2].dtype;
        }
        ms_tensor *reads[] = { x, g, NULL }, *writes[] = { dweight, dbias };
        status = enqueue(gradient->engine, MS_KERNEL_conv2d_weight, &args, reads, writes);
    }
    if (status) {
        ms_tensor_release(dweight);
        ms_tensor_release(dbias);
        return status;
    }
    if (dweight) gradient->results[1] = dweight;
    if (dbias) gradient->results[2] = dbias;
    return MS_OK;
}

/* saved: x and weight as they were multiplied; g gets their dtype. Results that were made before a
 * failure are the caller's to release. */
static ms_status conv2d_backward(ms_op_gradient *gradient)
{
    ms_convolution_args args = { 0 };
    ms_tensor *g = NULL;
    sizes_again(gradient, &args);
    ms_status status =
        operand(gradient->engine, gradient->gradients[0], gradient->saved[0]->dtype, false, &g);
    if (!status && gradient->needs[0]) status = input_gradient(gradient, args, g);
    if (!status && (gradient->needs[1] || (gradient->input_count > 2 && gradient->needs[2])))
        status = weight_gradients(gradient, args, g);
    ms_op_reads_later(gradient, 0, ms_op_is_left(gradient, 1) || ms_op_is_left(gradient, 2));
    ms_op_reads_later(gradient, 1, ms_op_is_left(gradient, 0));
    ms_tensor_release(g);
    return status;
}

const ms_op ms_op_conv2d = { .name = "conv2d",
                             .flags = MS_OP_SPLITS,
                             .forward = conv2d_forward,
                             .backward = conv2d_backward,
                             .inputs_min = 2,
                             .inputs_max = 3 };
