/* mlp.c: two linear layers with gelu between them, as one operator.
 *
 * y = gelu(x w1^T + b1) w2^T + b2; mlp_t takes both weights as [in, out]. It gives the bits of two
 * calls of linear, the first with the activation, and keeps less: what goes into gelu, and not its
 * result, which backward makes again. This is the largest tensor of a transformer's block, four
 * times as wide as its stream.
 *
 * On a GPU, in 16 bits, the first product makes gelu of its sums (linear.c), and backward makes it
 * of the rounded sums. The gradient of w2 differs by that rounding. */
#include "moonshard/ops.h"
#include "ops/linear.h"
#include "tensor/op.h"
#include "tensor/state.h"

/* The second layer's first, as its gradients are ready first. */
enum { X, SECOND, SECOND_BIAS, FIRST, FIRST_BIAS, INPUTS };

static const ms_op *layer_of(const ms_op *op)
{
    return op == &ms_op_mlp ? &ms_op_linear : &ms_op_linear_t;
}

static ms_tensor *input(const ms_op_call *call, uint32_t index)
{
    return index < call->input_count ? call->inputs[index] : NULL;
}

/* One layer; what it has saved is kept for backward, from place `from` on. *out is owned. */
static ms_status run_layer(ms_op_call *call, ms_tensor *x, uint32_t weight, uint32_t bias,
                           bool activated, uint32_t from, ms_tensor **out)
{
    ms_tensor *inputs[] = { x, input(call, weight), input(call, bias) };
    ms_op_call layer = { .engine = call->engine,
                         .op = layer_of(call->op),
                         .inputs = inputs,
                         .input_count = 3,
                         .outputs = out,
                         .output_count = 1,
                         .record = call->record };
    if (activated) layer.attributes.linear.activation = MS_ACTIVATION_GELU;
    ms_status status = ms_op_run(&layer);
    for (uint32_t i = 0; i < layer.saved_count && !status; i++) {
        if (i >= from) call->saved[call->saved_count++] = layer.saved[i];
        else ms_tensor_release(layer.saved[i]);
    }
    return status;
}

/* saved: x, the first weight, what goes into gelu, the second weight, as they were multiplied. */
static ms_status mlp_forward(ms_op_call *call)
{
    ms_tensor *hidden = NULL;
    if (!input(call, FIRST)) return ms_op_refuse(call, "the first layer's weight is missing");
    ms_status status = run_layer(call, call->inputs[X], FIRST, FIRST_BIAS, true, 0, &hidden);
    if (!status) status = run_layer(call, hidden, SECOND, SECOND_BIAS, false, 1, &call->outputs[0]);
    ms_tensor_release(hidden);
    return status;
}

/* What backward knows of an input that may be absent. */
static void take_input(const ms_op_gradient *gradient, uint32_t index, ms_tensor_info *info,
                       bool *needed, ms_tensor **home)
{
    if (index >= gradient->input_count) return;
    *info = gradient->inputs[index];
    *needed = gradient->needs[index];
    *home = gradient->homes ? gradient->homes[index] : NULL;
}

/* Backward of one layer: its input's gradient becomes *dx, owned. */
static ms_status go_back(ms_op_gradient *gradient, ms_tensor *g, const ms_tensor_info *y,
                         const ms_tensor_info *x, bool needs_x, ms_tensor *const *saved,
                         bool activated, ms_tensor **dx)
{
    uint32_t weight = activated ? FIRST : SECOND, bias = activated ? FIRST_BIAS : SECOND_BIAS;
    ms_tensor_info inputs[3] = { *x };
    bool needs[3] = { needs_x };
    ms_tensor *results[3] = { NULL }, *homes[3] = { NULL };
    take_input(gradient, weight, &inputs[1], &needs[1], &homes[1]);
    take_input(gradient, bias, &inputs[2], &needs[2], &homes[2]);
    ms_op_gradient layer = { .engine = gradient->engine,
                             .op = layer_of(gradient->op),
                             .saved = saved,
                             .saved_count = activated ? 3 : 2,
                             .inputs = inputs,
                             .input_count = bias < gradient->input_count ? 3 : 2,
                             .outputs = y,
                             .gradients = &g,
                             .output_count = 1,
                             .results = results,
                             .needs = needs,
                             .homes = homes,
                             .last = gradient->last };
    if (activated) layer.attributes.linear.activation = MS_ACTIVATION_GELU;
    ms_status status = layer.op->backward(&layer);
    /* Also after an error: the caller releases what there is. */
    gradient->results[weight] = results[1];
    if (results[2]) gradient->results[bias] = results[2];
    *dx = results[0];
    return status;
}

static ms_status mlp_backward(ms_op_gradient *gradient)
{
    ms_tensor *const *saved = gradient->saved;
    ms_tensor *before = saved[2], *hidden = NULL, *dhidden = NULL;
    ms_tensor_info between = { .dtype = before->dtype, .dims = before->dims };
    for (uint32_t d = 0; d < before->dims; d++) between.shape[d] = before->shape[d];
    bool needs_first = gradient->needs[X] || gradient->needs[FIRST]
                       || (gradient->input_count > FIRST_BIAS && gradient->needs[FIRST_BIAS]);
    ms_status status = MS_OK;
    /* Only the second weight's gradient reads the result of gelu. */
    if (gradient->needs[SECOND]) status = ms_gelu_new(gradient->engine, before, &hidden);
    ms_tensor *second[] = { hidden ? hidden : before, saved[3] };
    if (!status)
        status = go_back(gradient, gradient->gradients[0], &gradient->outputs[0], &between,
                         needs_first, second, false, &dhidden);
    ms_tensor_release(hidden);
    if (!status && needs_first)
        status = go_back(gradient, dhidden, &between, &gradient->inputs[X], gradient->needs[X],
                         saved, true, &gradient->results[X]);
    ms_tensor_release(dhidden);
    return status;
}

const ms_op ms_op_mlp = { .name = "mlp",
                          .forward = mlp_forward,
                          .backward = mlp_backward,
                          .inputs_min = 2,
                          .inputs_max = INPUTS };
const ms_op ms_op_mlp_t = { .name = "mlp_t",
                            .forward = mlp_forward,
                            .backward = mlp_backward,
                            .inputs_min = 2,
                            .inputs_max = INPUTS };
