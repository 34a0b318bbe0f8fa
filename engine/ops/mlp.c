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
 * round gelu otherwise there; elsewhere the bits are those of two calls.
 *
 * A backward in two parts keeps what each layer keeps, and the gradient of what went into gelu
 * where a product has made that. */
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

/* Which results one of the two layers is asked for. */
typedef struct layer_wishes {
    bool needs[3], later[3];
} layer_wishes;

/* Those of its parameters, which begin with `weight`; absent inputs are not asked for. */
static layer_wishes wishes_of(const ms_op_gradient *gradient, uint32_t weight)
{
    layer_wishes out = { .needs = { false } };
    for (uint32_t i = 0; i < 2 && weight + i < gradient->input_count; i++) {
        out.needs[1 + i] = gradient->needs[weight + i];
        out.later[1 + i] = gradient->later && gradient->later[weight + i];
    }
    return out;
}

/* A layer that is asked for its bias's gradient alone keeps nothing of what its products take, and
 * that would be made twice: it makes all at once. */
static void take_all_with_bias(layer_wishes *wishes)
{
    if (!wishes->needs[2] || wishes->needs[0] || wishes->needs[1]) return;
    for (int i = 0; i < 2; i++) {
        wishes->needs[i] = wishes->later[i];
        wishes->later[i] = false;
    }
}

static bool any_of(const bool wishes[3]) { return wishes[0] || wishes[1] || wishes[2]; }

/* Backward of one layer, whose parameters begin with `weight`. Its input's gradient becomes
 * *x_result, owned. activated: g is the gradient of gelu's result. */
static ms_status go_back(ms_op_gradient *gradient, uint32_t weight, const layer_wishes *wishes,
                         ms_tensor *g, const ms_tensor_info *y, const ms_tensor_info *x,
                         ms_tensor **x_result, ms_tensor *const *saved, bool activated)
{
    ms_tensor_info inputs[3] = { *x };
    ms_tensor *results[3] = { NULL }, *homes[3] = { NULL };
    uint32_t count = 1;
    for (; count < 3 && weight + count - 1 < gradient->input_count; count++) {
        inputs[count] = gradient->inputs[weight + count - 1];
        if (gradient->homes) homes[count] = gradient->homes[weight + count - 1];
    }
    ms_op_gradient layer = { .engine = gradient->engine,
                             .op = layer_of(gradient->op),
                             .saved = saved,
                             .saved_count = activated ? 3 : 2,
                             .inputs = inputs,
                             .input_count = count,
                             .outputs = y,
                             .gradients = &g,
                             .output_count = 1,
                             .results = results,
                             .needs = wishes->needs,
                             .homes = homes,
                             .last = gradient->last };
    /* Each layer has a place of its own for what it keeps. The gradient that a product has made is
     * kept by first_back. */
    if (gradient->kept && (weight == SECOND || activated))
        layer.kept = &gradient->kept[weight == SECOND ? 0 : 1];
    if (gradient->later) layer.later = wishes->later;
    if (activated) layer.attributes.linear.activation = MS_ACTIVATION_GELU;
    ms_status status = layer.op->backward(&layer);
    /* Also after an error: the caller releases what there is. */
    for (uint32_t i = 1; i < count; i++)
        if (results[i]) gradient->results[weight + i - 1] = results[i];
    *x_result = results[0];
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
 * gradient is made, which is as large. If the wishes name it, that becomes *g here. */
static ms_status second_back(ms_op_gradient *gradient, const layer_wishes *wishes,
                             const ms_tensor_info *between, ms_tensor **g)
{
    ms_tensor *hidden = NULL;
    ms_status status = MS_OK;
    /* A product may make the bias's gradient with the weight's. */
    if (wishes->needs[1] || (wishes->later[1] && wishes->needs[2]))
        status = make_hidden(gradient, &hidden);
    /* Without a gradient of the weight only the dtype of the first one counts. */
    ms_tensor *unread = gradient->saved[is_fp8(gradient) ? X : 2];
    ms_tensor *saved[] = { hidden ? hidden : unread, gradient->saved[3] };
    if (!status)
        status = go_back(gradient, SECOND, wishes, gradient->gradients[0], &gradient->outputs[0],
                         between, g, saved, false);
    ms_tensor_release(hidden);
    return status;
}

/* The first layer's backward; g: the gradient of gelu's result, or, if it goes through, of what
 * went into gelu. That is kept where the layer itself keeps nothing. */
static ms_status first_back(ms_op_gradient *gradient, const layer_wishes *wishes,
                            const ms_tensor_info *between, ms_tensor *g, bool goes_through)
{
    ms_status status = go_back(gradient, FIRST, wishes, g, between, &gradient->inputs[X],
                               &gradient->results[X], gradient->saved, !goes_through);
    if (!status && goes_through && gradient->later && any_of(wishes->later))
        gradient->kept[1] = ms_tensor_retain(g);
    return status;
}

/* What the second part's call reads. What goes into the first layer's products was kept, or is made
 * of the second weight and of what went into gelu. */
static void note_reads(const ms_op_gradient *gradient)
{
    bool makes_x = ms_op_is_left(gradient, X), makes_first = ms_op_is_left(gradient, FIRST),
         makes_bias = ms_op_is_left(gradient, FIRST_BIAS);
    bool goes_back = (makes_x || makes_first || makes_bias) && !gradient->kept[1];
    ms_op_reads_later(gradient, 0, makes_first);
    ms_op_reads_later(gradient, 1, makes_x);
    ms_op_reads_later(gradient, 2, ms_op_is_left(gradient, SECOND) || goes_back || makes_bias);
    ms_op_reads_later(gradient, 3, goes_back);
}

/* In 8 bits the incoming gradient is encoded once, for both products of the second layer. */
static ms_status mlp_backward(ms_op_gradient *gradient)
{
    ms_tensor *before = gradient->saved[2], *g = NULL;
    ms_tensor_info between = { .dtype = before->dtype, .dims = before->dims };
    for (uint32_t d = 0; d < before->dims; d++) between.shape[d] = before->shape[d];
    layer_wishes first = wishes_of(gradient, FIRST), second = wishes_of(gradient, SECOND);
    first.needs[0] = gradient->needs[X];
    first.later[0] = gradient->later && gradient->later[X];
    take_all_with_bias(&first);
    bool at_once = is_fp8(gradient),
         goes_through = !at_once && ms_products_make_gelu(gradient->engine, before),
         has_kept = gradient->kept && !gradient->later && gradient->kept[1];
    bool needs_g = any_of(first.needs) && !has_kept;
    second.needs[0] = at_once && needs_g;
    second.later[0] = at_once && !needs_g && any_of(first.later);
    ms_status status = MS_OK;
    if (any_of(second.needs)) status = second_back(gradient, &second, &between, &g);
    if (!status && needs_g && !at_once)
        status = ms_linear_back(gradient->engine, layer_of(gradient->op), gradient->saved[3],
                                gradient->gradients[0], goes_through ? before : NULL, &between, &g);
    if (!status && has_kept && goes_through) g = ms_tensor_retain(gradient->kept[1]);
    if (!status && any_of(first.needs))
        status = first_back(gradient, &first, &between, g, goes_through);
    if (!status && gradient->later) note_reads(gradient);
    ms_tensor_release(g);
    return status;
}

const ms_op ms_op_mlp = { .name = "mlp",
                          .flags = MS_OP_SPLITS,
                          .forward = mlp_forward,
                          .backward = mlp_backward,
                          .inputs_min = 2,
                          .inputs_max = INPUTS };
const ms_op ms_op_mlp_t = { .name = "mlp_t",
                            .flags = MS_OP_SPLITS,
                            .forward = mlp_forward,
                            .backward = mlp_backward,
                            .inputs_min = 2,
                            .inputs_max = INPUTS };
