/* pooling.c: the operators max_pool2d and avg_pool2d, with PyTorch's conventions.
 *
 * max: padding never wins. Its gradient goes to the element that won; where that is in its plane is
 * saved as i32, which is smaller than the input. avg: padding counts as elements of value 0, unless
 * skip_padding leaves it out of the number that the sum is divided by. */
#include "ops/pooling.h"

#include "moonshard/ops.h"
#include "ops/values.h"
#include "tensor/state.h"

static bool is_max(const ms_op *op) { return op == &ms_op_max_pool2d; }

/* Padding of at most half of the window means that every window has an element of the input. */
static ms_status window_of(const ms_op_call *call, ms_window *out)
{
    const ms_tensor *x = call->inputs[0];
    int64_t kernel[2] = { call->attributes.window.kernel[0], call->attributes.window.kernel[1] };
    if (!ms_dtype_is_float(x->dtype)) return ms_op_refuse(call, "the input must be floats");
    ms_status status = ms_window_of(call, kernel, kernel, out);
    if (status) return status;
    for (int d = 0; d < 2; d++) {
        if (out->padding[d] > kernel[d] / 2)
            return ms_op_refuse(call, "the padding %lld is more than half of the window's %lld",
                                (long long)out->padding[d], (long long)kernel[d]);
        if (out->dilation[d] != 1) return ms_op_refuse(call, "windows have no dilation");
    }
    if (x->shape[2] > INT32_MAX / x->shape[3])
        return ms_op_refuse(call, "a plane has more than 2^31 - 1 elements");
    return MS_OK;
}

/* One comparison or addition for each element of each window. */
static ms_status enqueue(ms_engine *engine, ms_kernel kernel, ms_pool_args *args, ms_tensor *in,
                         ms_tensor *index, ms_tensor *out, bool writes_index)
{
    args->in = ms_tensor_data(in);
    args->out = ms_tensor_data(out);
    args->dtype = (uint8_t)out->dtype;
    if (index) args->index = ms_tensor_data(index);
    ms_tensor *reads[] = { in, writes_index ? NULL : index },
              *writes[] = { out, writes_index ? index : NULL };
    ms_task_cost cost = { .bytes = ms_tensor_bytes(in) + ms_tensor_bytes(out) };
    if (index) cost.bytes += ms_tensor_bytes(index);
    cost.flops = (double)args->planes * (double)ms_window_places(&args->window)
                 * (double)ms_window_elements(&args->window);
    return ms_tensor_enqueue(engine, ms_engine_kernel(engine, kernel), args, reads, 2, writes, 2,
                             cost);
}

/* avg saves nothing: its gradient depends on the sizes alone. */
static ms_status pool_forward(ms_op_call *call)
{
    ms_engine *engine = call->engine;
    ms_pool_args args = { .skip_padding = call->attributes.window.skip_padding };
    ms_tensor *x = NULL, *y = NULL, *index = NULL;
    ms_status status = window_of(call, &args.window);
    if (status) return status;
    const int64_t *in = call->inputs[0]->shape;
    int64_t shape[4] = { in[0], in[1], args.window.out[0], args.window.out[1] };
    bool keeps = is_max(call->op) && call->record;
    args.planes = in[0] * in[1];
    status = ms_op_as_contiguous(engine, call->inputs[0], &x);
    if (!status) status = ms_op_output(call, 0, x->dtype, 4, shape, &y);
    if (!status && keeps) status = ms_tensor_new(engine, MS_I32, 4, shape, &index);
    if (!status && y->count > 0)
        status = enqueue(engine, is_max(call->op) ? MS_KERNEL_max_pool2d : MS_KERNEL_avg_pool2d,
                         &args, x, index, y, true);
    if (!status && keeps) status = ms_op_save(call, index);
    ms_tensor_release(x);
    ms_tensor_release(index);
    return status;
}

/* The sizes of the call are worked out again from its attributes: forward has checked them. */
static ms_status pool_backward(ms_op_gradient *gradient)
{
    if (!gradient->needs[0]) return MS_OK;
    ms_engine *engine = gradient->engine;
    const ms_tensor_info *x = &gradient->inputs[0], *y = &gradient->outputs[0];
    const ms_attributes *given = &gradient->attributes;
    ms_pool_args args = { .planes = x->shape[0] * x->shape[1],
                          .skip_padding = given->window.skip_padding };
    for (int d = 0; d < 2; d++) {
        int32_t kernel = given->window.kernel[d], stride = given->window.stride[d];
        args.window.in[d] = x->shape[2 + d];
        args.window.out[d] = y->shape[2 + d];
        args.window.kernel[d] = kernel;
        args.window.stride[d] = stride ? stride : kernel;
        args.window.padding[d] = given->window.padding[d];
        args.window.dilation[d] = 1;
    }
    bool max = is_max(gradient->op);
    ms_tensor *g = NULL, *made = NULL;
    ms_status status = ms_op_as_contiguous(engine, gradient->gradients[0], &g);
    if (!status) status = ms_op_result(gradient, 0, &made);
    if (!status && made->count > 0)
        status =
            enqueue(engine, max ? MS_KERNEL_max_pool2d_backward : MS_KERNEL_avg_pool2d_backward,
                    &args, g, max ? gradient->saved[0] : NULL, made, false);
    ms_tensor_release(g);
    if (status) ms_tensor_release(made);
    else gradient->results[0] = made;
    return status;
}

const ms_op ms_op_max_pool2d = { .name = "max_pool2d",
                                 .forward = pool_forward,
                                 .backward = pool_backward,
                                 .inputs_min = 1,
                                 .inputs_max = 1 };
const ms_op ms_op_avg_pool2d = { .name = "avg_pool2d",
                                 .forward = pool_forward,
                                 .backward = pool_backward,
                                 .inputs_min = 1,
                                 .inputs_max = 1 };
