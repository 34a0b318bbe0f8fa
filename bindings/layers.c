/* layers.c: selection, matrix products and layers as methods of tensors. */
#include "bindings/layers.h"

#include <math.h>
#include <string.h>

#include "bindings/arguments.h"
#include "bindings/call.h"
#include "bindings/codec.h"
#include "bindings/enter.h"
#include "bindings/handles.h"
#include "bindings/script.h"

/* ---------------------------------------------------------------- selection */

/* t:topk(k, dim = last) -> values, places. k may be 0, and at most the size of that dimension. A
 * scalar counts as one element, hence the limit 1 where there is no dimension; the operator says
 * what it does with it. Places count from 0, as in all tensors of indices. */
static int topk(lua_State *L)
{
    ms_lua_enter(L);
    ms_tensor *t = ms_lua_tensor(L, 1);
    uint32_t dims = ms_tensor_dims(t);
    ms_attributes attributes = { .top = { .dim = lua_isnoneornil(L, 3) ? (int32_t)dims - 1
                                                                       : ms_lua_dim(L, 3, dims),
                                          .largest = true } };
    attributes.top.k =
        ms_lua_integer(L, 2, 0, dims ? ms_tensor_shape(t)[attributes.top.dim] : 1, "k");
    return ms_lua_apply_many(L, &ms_op_topk, &attributes, &t, 1, 2);
}

/* t:sort(dim = last, descending = false) -> values, places: topk of all, whose order is stable. */
static int sort(lua_State *L)
{
    ms_lua_enter(L);
    ms_tensor *t = ms_lua_tensor(L, 1);
    uint32_t dims = ms_tensor_dims(t);
    if (dims == 0) return ms_lua_error(L, "sort: a scalar has no dimension to sort along");
    if (ms_tensor_dtype(t) == MS_BOOL)
        return ms_lua_error(L, "sort: it does not work on bool: cast to u8 first");
    if (!lua_isnoneornil(L, 3)) luaL_checktype(L, 3, LUA_TBOOLEAN);
    ms_attributes attributes = { .top = { .dim = lua_isnoneornil(L, 2) ? (int32_t)dims - 1
                                                                       : ms_lua_dim(L, 2, dims),
                                          .largest = lua_toboolean(L, 3) } };
    attributes.top.k = ms_tensor_shape(t)[attributes.top.dim];
    return ms_lua_apply_many(L, &ms_op_topk, &attributes, &t, 1, 2);
}

/* t:above(threshold, capacity) -> values, places, count. The number of elements above the threshold
 * is known to the device only; with a fixed capacity the results' shapes are known when the call is
 * enqueued, so that the host does not wait. threshold is a number or a tensor of one element, which
 * the host does not read either. */
static int above(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    ms_tensor *t = ms_lua_tensor(L, 1);
    /* With this limit the bytes of 8-byte elements still fit 63 bits. */
    ms_attributes attributes = { .dim = { .length = ms_lua_integer(L, 3, 0, INT64_MAX / 8,
                                                                   "capacity") } };
    if (ms_lua_is_tensor(L, 2)) {
        ms_tensor *inputs[] = { t, ms_lua_tensor(L, 2) };
        return ms_lua_apply_many(L, &ms_op_above, &attributes, inputs, 2, 3);
    }
    /* The operator takes a tensor. The one that is made for a number has a handle on the stack: it
     * lives until the operator has retained it, also when that fails. */
    ms_handle *threshold = ms_lua_new_handle(L);
    ms_tensor *made = NULL;
    ms_lua_ok(L, ms_lua_filled(engine, ms_tensor_dtype(t), 0, NULL, luaL_checknumber(L, 2), &made));
    ms_handle_fill(threshold, made);
    ms_tensor *inputs[] = { t, made };
    return ms_lua_apply_many(L, &ms_op_above, &attributes, inputs, 2, 3);
}

/* t:gather(dim, index), t:index_select(dim, index). The index tensor is not checked here: its
 * values are on the device, and an index outside is an error of the stream. */
static int with_index(lua_State *L)
{
    ms_lua_enter(L);
    ms_tensor *t = ms_lua_tensor(L, 1);
    ms_tensor *inputs[] = { t, ms_lua_tensor(L, 3) };
    ms_attributes attributes = { .index = { .dim = ms_lua_dim(L, 2, ms_tensor_dims(t)) } };
    return ms_lua_apply(L, ms_lua_own_op(L), &attributes, ms_lua_own_in_place(L), inputs, 2);
}

/* t:scatter(dim, index, values), t:scatter_add(...), and their twins with _. A number becomes a
 * tensor in a handle of its own, which an error leaves to the collector. The number is spread to
 * the index's shape, since values and index have one shape in the operator. */
static int scatter(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    ms_tensor *t = ms_lua_tensor(L, 1), *index = ms_lua_tensor(L, 3), *values = NULL;
    ms_attributes attributes = { .index = { .dim = ms_lua_dim(L, 2, ms_tensor_dims(t)) } };
    if (ms_lua_is_tensor(L, 4)) {
        values = ms_lua_tensor(L, 4);
    } else {
        double number = ms_lua_number(L, 4, "scatter");
        ms_handle *made = ms_lua_new_handle(L);
        ms_lua_ok(L, ms_lua_filled(engine, ms_tensor_dtype(t), ms_tensor_dims(index),
                                   ms_tensor_shape(index), number, &values));
        ms_handle_fill(made, values);
    }
    ms_tensor *inputs[] = { t, index, values };
    return ms_lua_apply(L, ms_lua_own_op(L), &attributes, ms_lua_own_in_place(L), inputs, 3);
}

/* ------------------------------------------------------------------- layers */

/* x:linear(weight, bias?, activation?, codec?), x:linear_t(weight, bias?, activation?, codec?, n?):
 * weight is [out, in], or [in, out] for linear_t; with a codec it is what this codec has made of
 * such a weight, and n is the number of outputs, which the codes do not tell. activation "gelu", in
 * its tanh form, is part of the operator: the tape gets one node and not two. There is no "erf"
 * here; t:gelu("erf") has that form. */
static int linear(lua_State *L)
{
    static const char *const activations[] = { "gelu", NULL };
    ms_lua_enter(L);
    ms_tensor *inputs[] = { ms_lua_tensor(L, 1), ms_lua_tensor(L, 2),
                            ms_lua_optional_tensor(L, 3) };
    ms_attributes attributes = { 0 };
    if (!lua_isnoneornil(L, 4)) {
        ms_lua_choice(L, 4, activations, "activation");
        attributes.linear.activation = MS_ACTIVATION_GELU;
    }
    if (!lua_isnoneornil(L, 5)) {
        uint32_t dims = ms_tensor_dims(inputs[0]);
        attributes.linear.codec = *ms_lua_codec(L, 5);
        attributes.linear.n = ms_lua_own_op(L) == &ms_op_linear_t
                                  ? ms_lua_integer(L, 6, 0, INT64_MAX / 8, "outputs")
                              : dims > 0 ? ms_tensor_shape(inputs[0])[dims - 1]
                                         : 0;
    }
    /* An absent bias that comes last is left out instead of passed as NULL. */
    return ms_lua_apply(L, ms_lua_own_op(L), &attributes, false, inputs, inputs[2] ? 3 : 2);
}

/* x:mlp(w1, w2, b1?, b2?), and mlp_t with weights [in, out].
 */
static int mlp(lua_State *L)
{
    ms_lua_enter(L);
    ms_tensor *x = ms_lua_tensor(L, 1), *first = ms_lua_tensor(L, 2), *second = ms_lua_tensor(L, 3),
              *first_bias = ms_lua_optional_tensor(L, 4),
              *second_bias = ms_lua_optional_tensor(L, 5);
    ms_tensor *inputs[] = { x, second, second_bias, first, first_bias };
    return ms_lua_apply(L, ms_lua_own_op(L), NULL, false, inputs, first_bias ? 5 : 4);
}

/* The options of a loss at that index. Their keys have been checked. */
static ms_attributes loss_options(lua_State *L, int index, const char *const *reductions)
{
    ms_attributes attributes = { .loss = { .ignore_index =
                                               ms_lua_field_integer(L, index, "ignore_index", -100,
                                                                    INT64_MIN, INT64_MAX) } };
    if (!lua_isnoneornil(L, index)) {
        if (lua_getfield(L, index, "reduction") != LUA_TNIL)
            attributes.loss.reduction = ms_lua_choice(L, -1, reductions, "reduction");
        lua_pop(L, 1);
    }
    return attributes;
}

/* logits:cross_entropy(classes, { ignore_index = -100, reduction = "mean" }?). Classes that equal
 * ignore_index (padding) count neither in the sum nor in the mean. The keys are checked before any
 * value is read, so that a misspelled option is named as such. */
static int cross_entropy(lua_State *L)
{
    static const char *const keys[] = { "ignore_index", "reduction", NULL }, *const reductions[] = {
        "mean", "sum", "none", NULL
    };
    ms_lua_enter(L);
    ms_tensor *inputs[] = { ms_lua_tensor(L, 1), ms_lua_tensor(L, 2) };
    ms_lua_known_keys(L, 3, keys, "option of cross_entropy");
    ms_attributes attributes = loss_options(L, 3, reductions);
    return ms_lua_apply(L, &ms_op_cross_entropy, &attributes, false, inputs, 2);
}

/* x:linear_cross_entropy(weight, classes, { ignore_index = -100, reduction = "mean", chunk }?). The
 * losses of rows are not kept, so "none" is no reduction here. */
static int linear_cross_entropy(lua_State *L)
{
    static const char *const keys[] = { "ignore_index", "reduction", "chunk", NULL },
                             *const reductions[] = { "mean", "sum", NULL };
    ms_lua_enter(L);
    ms_tensor *inputs[] = { ms_lua_tensor(L, 1), ms_lua_tensor(L, 2), ms_lua_tensor(L, 3) };
    ms_lua_known_keys(L, 4, keys, "option of linear_cross_entropy");
    ms_attributes attributes = loss_options(L, 4, reductions);
    attributes.loss.chunk = ms_lua_field_integer(L, 4, "chunk", 0, 1, INT64_MAX);
    return ms_lua_apply(L, &ms_op_linear_cross_entropy, &attributes, false, inputs, 3);
}

/* The optional eps at that index, 1e-5 by default. The comparison is written so that NaN is
 * refused, too: it would spread through the whole model without an error. */
static double eps_at(lua_State *L, int index)
{
    double eps = luaL_optnumber(L, index, 1e-5);
    if (!(eps >= 0)) ms_lua_error(L, "eps is %g; 0 or more is allowed", eps);
    return eps;
}

/* x:layer_norm(weight?, bias?, eps = 1e-5). weight and bias may be nil, also one of them alone:
 * three inputs are passed in any case, because a bias is recognised by its place. */
static int layer_norm(lua_State *L)
{
    ms_lua_enter(L);
    ms_tensor *inputs[] = { ms_lua_tensor(L, 1), ms_lua_optional_tensor(L, 2),
                            ms_lua_optional_tensor(L, 3) };
    ms_attributes attributes = { .norm = { .eps = eps_at(L, 4) } };
    return ms_lua_apply(L, &ms_op_layer_norm, &attributes, false, inputs, 3);
}

/* x:rms_norm(weight?, eps = 1e-5). It has no mean and no bias, hence its own argument list. */
static int rms_norm(lua_State *L)
{
    ms_lua_enter(L);
    ms_tensor *inputs[] = { ms_lua_tensor(L, 1), ms_lua_optional_tensor(L, 2) };
    ms_attributes attributes = { .norm = { .eps = eps_at(L, 3) } };
    return ms_lua_apply(L, &ms_op_rms_norm, &attributes, false, inputs, 2);
}

/* x:add_layer_norm(residual, weight, bias, eps) -> x + residual, its layer_norm. One pass reads x
 * and residual once; two operators would write the sum and read it again. Both results are needed:
 * the sum goes on as the residual stream. */
static int add_layer_norm(lua_State *L)
{
    ms_lua_enter(L);
    ms_tensor *inputs[] = { ms_lua_tensor(L, 1), ms_lua_tensor(L, 2), ms_lua_optional_tensor(L, 3),
                            ms_lua_optional_tensor(L, 4) };
    ms_attributes attributes = { .norm = { .eps = eps_at(L, 5) } };
    return ms_lua_apply_many(L, &ms_op_add_layer_norm, &attributes, inputs, 4, 2);
}

/* t:orthonormalize_(eps) -> t: its columns made orthonormal in place by Gram-Schmidt. eps is added
 * to each norm; 0 by default, because a column of zeros stays one without it. PowerSGD in Lua
 * passes its own. There is no gradient. */
static int orthonormalize(lua_State *L)
{
    ms_lua_enter(L);
    ms_lua_tensor(L, 1);
    ms_attributes attributes = { .norm = { .eps = luaL_optnumber(L, 2, 0) } };
    return ms_lua_apply_one(L, &ms_op_orthonormalize, &attributes, true);
}

/* x:add_rms_norm(residual, weight?, eps = 1e-5): as add_layer_norm. See there for why it is one
 * operator. */
static int add_rms_norm(lua_State *L)
{
    ms_lua_enter(L);
    ms_tensor *inputs[] = { ms_lua_tensor(L, 1), ms_lua_tensor(L, 2),
                            ms_lua_optional_tensor(L, 3) };
    ms_attributes attributes = { .norm = { .eps = eps_at(L, 4) } };
    return ms_lua_apply_many(L, &ms_op_add_rms_norm, &attributes, inputs, 3, 2);
}

/* { type = "linear" or "llama3", factor =, low_freq_factor =, high_freq_factor =, original_context
 * = } at index 4, or nothing. A field that is not given is 0, which the operator refuses where its
 * type needs the field: the rules about these numbers are there alone. */
static ms_rotary_scaling rotary_scaling(lua_State *L)
{
    static const char *const keys[] = {
        "type", "factor", "low_freq_factor", "high_freq_factor", "original_context", NULL
    };
    static const char *const kinds[] = { "default", "linear", "llama3", NULL };
    if (lua_isnoneornil(L, 4)) return (ms_rotary_scaling){ 0 };
    ms_lua_known_keys(L, 4, keys, "option of a rotary scaling");
    /* It has no default: where it is missing, ms_lua_choice raises. */
    lua_getfield(L, 4, "type");
    ms_rotary_kind kind = (ms_rotary_kind)ms_lua_choice(L, -1, kinds, "type of a rotary scaling");
    lua_pop(L, 1);
    return (ms_rotary_scaling){ .kind = kind,
                                .factor = ms_lua_field_number(L, 4, "factor", 0),
                                .low = ms_lua_field_number(L, 4, "low_freq_factor", 0),
                                .high = ms_lua_field_number(L, 4, "high_freq_factor", 0),
                                .original_context =
                                    ms_lua_field_number(L, 4, "original_context", 0) };
}

/* t:rotary(first = 0, base = 10000, scaling?) -> tensor: rotary positions, which count from
 * `first`. It is not 0 where text is generated token by token and earlier keys are cached. The
 * limit of 2^30 positions keeps first + length far from overflow. */
static int rotary(lua_State *L)
{
    ms_lua_enter(L);
    ms_lua_tensor(L, 1);
    int64_t first =
        lua_isnoneornil(L, 2) ? 0 : ms_lua_integer(L, 2, 0, 1 << 30, "the first position");
    ms_attributes attributes = { .rotary = { .first = first,
                                             .base = luaL_optnumber(L, 3, 10000),
                                             .scaling = rotary_scaling(L) } };
    return ms_lua_apply_one(L, &ms_op_rotary, &attributes, false);
}

/* q:attention(k, v, { causal = true, scale =, positions =, window =, offset =, lse = }?) -> o, or o
 * and log_sum with lse; scale 0: the operator's own. causal is true by default: leaving it out of a
 * language model by mistake would give a loss that is far too good, and no error. */
static int attention(lua_State *L)
{
    static const char *const keys[] = { "causal", "scale", "positions", "window",
                                        "offset", "lse",   NULL };
    /* Far from where places of queries and keys would overflow. */
    const int64_t farthest = (int64_t)1 << 40;
    ms_lua_enter(L);
    ms_tensor *inputs[] = { ms_lua_tensor(L, 1), ms_lua_tensor(L, 2), ms_lua_tensor(L, 3), NULL };
    ms_lua_known_keys(L, 4, keys, "option of attention");
    int64_t offset = ms_lua_field_integer(L, 4, "offset", INT64_MIN, -farthest, farthest);
    ms_attributes attributes = {
        .attention = { .scale = ms_lua_field_number(L, 4, "scale", 0),
                       .window = ms_lua_field_integer(L, 4, "window", 0, 1, INT64_MAX),
                       .causal = ms_lua_field_boolean(L, 4, "causal", true),
                       .offset = offset != INT64_MIN ? offset : 0,
                       .shifted = offset != INT64_MIN }
    };
    bool lse = ms_lua_field_boolean(L, 4, "lse", false);
    /* The table keeps the handle while the operator runs. */
    if (!lua_isnoneornil(L, 4) && lua_getfield(L, 4, "positions") != LUA_TNIL) {
        if (!ms_lua_is_tensor(L, -1))
            return ms_lua_error(L,
                                "attention: positions must be a tensor i64 [batch, time], not a %s",
                                luaL_typename(L, -1));
        inputs[3] = ms_lua_tensor(L, -1);
    }
    if (lse) return ms_lua_apply_many(L, &ms_op_attention, &attributes, inputs, 4, 2);
    return ms_lua_apply(L, &ms_op_attention, &attributes, false, inputs, 4);
}

/* ------------------------------------------------------------------ opening */

/* Only the scatters have twins; orthonormalize_ exists in place alone. */
static const ms_method methods[] = {
    { "scatter", scatter, &ms_op_scatter, true },
    { "scatter_add", scatter, &ms_op_scatter_add, true },
    { "topk", topk, NULL, false },
    { "sort", sort, NULL, false },
    { "above", above, NULL, false },
    { "gather", with_index, &ms_op_gather, false },
    { "index_select", with_index, &ms_op_index_select, false },
    { "matmul", ms_lua_two_tensors, &ms_op_matmul, false },
    { "linear", linear, &ms_op_linear, false },
    { "linear_t", linear, &ms_op_linear_t, false },
    { "mlp", mlp, &ms_op_mlp, false },
    { "mlp_t", mlp, &ms_op_mlp_t, false },
    { "cross_entropy", cross_entropy, NULL, false },
    { "linear_cross_entropy", linear_cross_entropy, NULL, false },
    { "mse_loss", ms_lua_two_tensors, &ms_op_mse_loss, false },
    { "layer_norm", layer_norm, NULL, false },
    { "rms_norm", rms_norm, NULL, false },
    { "add_layer_norm", add_layer_norm, NULL, false },
    { "add_rms_norm", add_rms_norm, NULL, false },
    { "swiglu", ms_lua_two_tensors, &ms_op_swiglu, false },
    { "embedding", ms_lua_two_tensors, &ms_op_embedding, false },
    { "rotary", rotary, NULL, false },
    { "attention", attention, NULL, false },
    { "orthonormalize_", orthonormalize, NULL, false },
};

/* The table of tensor methods is on top; ms_open_operators has put it there. */
void ms_open_layers(lua_State *L, int runtime)
{
    ms_lua_add_tensor_methods(L, runtime, methods, sizeof methods / sizeof *methods);
}
