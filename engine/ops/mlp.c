/* mlp.c: two linear layers with gelu between them, as one operator.
 *
 * y = gelu(x w1^T + b1) w2^T + b2; mlp_t takes both weights as [in, out]. It gives the bits of two
 * calls of linear, the first with the activation, and keeps less: what goes into gelu, and not its
 * result, which backward makes again. This is the largest tensor of a transformer's block, four
 * times as wide as its stream.
 *
 * On a GPU, in 16 bits, products make gelu and its gradient of their sums in f32 (linear.c), and
 * backward makes gelu of the rounded sums. Two calls of linear round the gradient before it goes
 * through gelu. So gradients differ by one rounding. In 8 bits (fp8.h) no product makes more than
 * itself. A GPU that multiplies codes makes those of gelu's result without it, and a compiler may
 * round gelu otherwise there; elsewhere the bits are those of two calls. */
#include "moonshard/ops.h"
#include "ops/fp8.h"
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

/* One layer; what it has saved is kept for backward, from place `from` on. of_gelu: its input is
 * gelu(x). *out is owned. */
static ms_status run_layer(ms_op_call *call, ms_tensor *x, uint32_t weight, uint32_t bias,
                           bool activated, bool of_gelu, uint32_t from, ms_tensor **out)
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
    ms_status status = of_gelu ? ms_linear_of_gelu(&layer) : ms_op_run(&layer);
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
    /* Where codes are multiplied, gelu's result exists as codes only. */
    bool joins = ms_fp8_is_on(call->engine) && ms_fp8_is_native(call->engine);
    ms_status status =
        run_layer(call, call->inputs[X], FIRST, FIRST_BIAS, !joins, false, 0, &hidden);
    if (!status && joins) status = ms_op_save(call, hidden);
    if (!status)
        status = run_layer(call, hidden, SECOND, SECOND_BIAS, false, joins, joins ? 0 : 1,
                           &call->outputs[0]);
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

/* Backward of one layer, whose parameters begin with `weight`. If needs_x, its input's gradient
 * becomes results[X], owned. activated: g is the gradient of gelu's result. */
static ms_status go_back(ms_op_gradient *gradient, uint32_t weight, ms_tensor *g,
                         const ms_tensor_info *y, const ms_tensor_info *x, bool needs_x,
                         ms_tensor *const *saved, bool activated)
{
    uint32_t bias = weight + 1;
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
    if (needs_x) gradient->results[X] = results[0];
    return status;
}

/* Whether the layers computed in 8 bits: forward has saved payloads. */
static bool is_fp8(const ms_op_gradient *gradient) { return gradient->saved[X]->dtype == MS_U8; }

/* The result of gelu as the second product took it. In 8 bits the same numbers give the payload of
 * the forward. */
static ms_status make_hidden(const ms_op_gradient *gradient, ms_tensor **out)
{
    ms_tensor *before = gradient->saved[2], *hidden = NULL;
    const ms_tensor_info *w = &gradient->inputs[SECOND];
    if (!is_fp8(gradient)) return ms_gelu_new(gradient->engine, before, out);
    if (ms_fp8_weight_is_native(gradient->saved[3], ms_shape_count(w->dims, w->shape)))
        return ms_fp8_encode_gelu(gradient->engine, before, NULL, out);
    ms_status status = ms_gelu_new(gradient->engine, before, &hidden);
    if (!status) status = ms_fp8_encode(gradient->engine, hidden, MS_FP8_E4M3, out, NULL);
    ms_tensor_release(hidden);
    return status;
}

/* gelu's result is made for the second weight's gradient only, and is released before its own
 * gradient is made, which is as large. needs_x: that gradient is made here, and becomes
 * results[X]. */
static ms_status second_back(ms_op_gradient *gradient, const ms_tensor_info *between, bool needs_x)
{
    ms_tensor *hidden = NULL;
    ms_status status = MS_OK;
    if (gradient->needs[SECOND]) status = make_hidden(gradient, &hidden);
    /* Without a gradient of the weight only the dtype of the first one counts. */
    ms_tensor *unread = gradient->saved[is_fp8(gradient) ? X : 2];
    ms_tensor *saved[] = { hidden ? hidden : unread, gradient->saved[3] };
    if (!status)
        status = go_back(gradient, SECOND, gradient->gradients[0], &gradient->outputs[0], between,
                         needs_x, saved, false);
    ms_tensor_release(hidden);
    return status;
}

/* In 8 bits the incoming gradient is encoded once, for both products of the second layer. */
static ms_status mlp_backward(ms_op_gradient *gradient)
{
    ms_tensor *before = gradient->saved[2], *g = NULL;
    ms_tensor_info between = { .dtype = before->dtype, .dims = before->dims };
    for (uint32_t d = 0; d < before->dims; d++) between.shape[d] = before->shape[d];
    bool needs_first = gradient->needs[X] || gradient->needs[FIRST]
                       || (gradient->input_count > FIRST_BIAS && gradient->needs[FIRST_BIAS]),
         at_once = is_fp8(gradient),
         goes_through = !at_once && ms_products_make_gelu(gradient->engine, before);
    ms_status status = second_back(gradient, &between, at_once && needs_first);
    if (!needs_first || status) return status;
    if (at_once) {
        g = gradient->results[X];
        gradient->results[X] = NULL;
    } else
        status = ms_linear_back(gradient->engine, layer_of(gradient->op), gradient->saved[3],
                                gradient->gradients[0], goes_through ? before : NULL, &between, &g);
    if (!status)
        status = go_back(gradient, FIRST, g, &between, &gradient->inputs[X], gradient->needs[X],
                         gradient->saved, !goes_through);
    ms_tensor_release(g);
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
