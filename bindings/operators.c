/* operators.c: running operators for Lua; elementwise operators and reductions as methods with
 * their in-place twins, and Lua's arithmetic. */
#include "bindings/operators.h"

#include <math.h>
#include <string.h>

#include "bindings/arguments.h"
#include "bindings/call.h"
#include "bindings/enter.h"
#include "bindings/group.h"
#include "bindings/handles.h"
#include "bindings/runtime.h"
#include "bindings/script.h"

/* The operator of a generic function is upvalue 2, whether it writes in place upvalue 3. */
const ms_op *ms_lua_own_op(lua_State *L) { return lua_touserdata(L, lua_upvalueindex(2)); }
bool ms_lua_own_in_place(lua_State *L) { return lua_toboolean(L, lua_upvalueindex(3)); }

/* The handle is made before the operator runs: making it may raise, and the output would then
 * never be released. In place, the operator gives another reference to the first input. It is
 * released, and the script gets its own handle back, so that t:add_(1) == t. The caller has called
 * ms_lua_enter. */
int ms_lua_apply(lua_State *L, const ms_op *op, const ms_attributes *attributes, bool in_place,
                 ms_tensor *const *inputs, uint32_t count)
{
    ms_engine *engine = ms_lua_runtime(L)->engine;
    ms_handle *handle = in_place ? NULL : ms_lua_new_handle(L);
    ms_tensor *out = NULL;
    ms_lua_ok(L, ms_apply(engine, op, attributes, in_place, inputs, count, &out, 1));
    if (handle) {
        ms_handle_fill(handle, out);
    } else {
        ms_tensor_release(out);
        /* Above index 1 are arguments that are no longer needed. */
        lua_settop(L, 1);
    }
    return 1;
}

/* The tensor is read here again: reading it is free, and callers check their other arguments in
 * between. */
int ms_lua_apply_one(lua_State *L, const ms_op *op, const ms_attributes *attributes, bool in_place)
{
    ms_tensor *t = ms_lua_tensor(L, 1);
    return ms_lua_apply(L, op, attributes, in_place, &t, 1);
}

/* A status and not an error: callers own tensors at this point, which they release before they
 * raise. On failure *out is unchanged. */
ms_status ms_lua_filled(ms_engine *engine, ms_dtype dtype, uint32_t dims, const int64_t *shape,
                        double value, ms_tensor **out)
{
    ms_tensor *made = NULL, *result = NULL;
    ms_status status = ms_tensor_new(engine, dtype, dims, shape, &made);
    ms_attributes attributes = { .scalar = { .value = value } };
    if (!status) status = ms_op_apply(engine, &ms_op_fill, &attributes, true, &made, 1, &result, 1);
    /* In place, the result is another reference to `made`. */
    ms_tensor_release(result);
    if (status) ms_tensor_release(made);
    else *out = made;
    return status;
}

/* Booleans count as 0 and 1, as values of bool tensors do. Strings that look like numbers are
 * refused, as everywhere in the bindings. */
double ms_lua_number(lua_State *L, int index, const char *what)
{
    if (lua_isboolean(L, index)) return lua_toboolean(L, index);
    if (lua_type(L, index) != LUA_TNUMBER)
        ms_lua_error(L, "%s: a number or a tensor is expected, not %s", what,
                     luaL_typename(L, index));
    return lua_tonumber(L, index);
}

/* All handles are made before the operator runs: once there are outputs, nothing may raise until
 * each of them has its handle. Three is the most results that an operator with a fixed number has.
 */
int ms_lua_apply_many(lua_State *L, const ms_op *op, const ms_attributes *attributes,
                      ms_tensor *const *inputs, uint32_t count, int results)
{
    ms_engine *engine = ms_lua_runtime(L)->engine;
    ms_handle *handles[3];
    ms_tensor *outputs[3] = { NULL };
    for (int i = 0; i < results; i++) handles[i] = ms_lua_new_handle(L);
    ms_lua_ok(L,
              ms_apply(engine, op, attributes, false, inputs, count, outputs, (uint32_t)results));
    for (int i = 0; i < results; i++) ms_handle_fill(handles[i], outputs[i]);
    return results;
}

/* a:op(b) -> tensor. Shapes and dtypes are checked by the operator, whose error names it and both
 * shapes. */
int ms_lua_two_tensors(lua_State *L)
{
    ms_lua_enter(L);
    ms_tensor *inputs[] = { ms_lua_tensor(L, 1), ms_lua_tensor(L, 2) };
    return ms_lua_apply(L, ms_lua_own_op(L), NULL, false, inputs, 2);
}

/* The operator is a light userdata in upvalue 2, so that one C function serves many names. It goes
 * in by lua_rawset, since the metatable of a table of methods refuses unknown names. */
void ms_lua_add_method(lua_State *L, int runtime, const char *name, const char *suffix,
                       lua_CFunction function, const void *data, bool in_place)
{
    lua_pushfstring(L, "%s%s", name, suffix);
    lua_pushvalue(L, runtime);
    lua_pushlightuserdata(L, (void *)(uintptr_t)data);
    lua_pushboolean(L, in_place);
    lua_pushcclosure(L, function, 3);
    lua_rawset(L, -3);
}

/* A twin has the name with _ at its end and writes in place. Both get the same function, which asks
 * ms_lua_own_in_place. */
void ms_lua_add_methods(lua_State *L, int runtime, const ms_method *methods, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        ms_lua_add_method(L, runtime, methods[i].name, "", methods[i].function, methods[i].op,
                          false);
        if (methods[i].twin)
            ms_lua_add_method(L, runtime, methods[i].name, "_", methods[i].function, methods[i].op,
                              true);
    }
}

/* -------------------------------------------------------------- elementwise */

/* t:op() -> tensor; t:op_() -> t. It serves all operators of one tensor without attributes; whether
 * an in-place form exists is decided by the table below. */
static int unary(lua_State *L)
{
    ms_lua_enter(L);
    return ms_lua_apply_one(L, ms_lua_own_op(L), NULL, ms_lua_own_in_place(L));
}

/* t:gelu(form = "tanh"). "tanh" is the approximation that GPT-2 was trained with; "erf" is the
 * exact form. They are two operators, since their gradients differ as well. */
static int gelu(lua_State *L)
{
    static const char *const forms[] = { "tanh", "erf", NULL };
    ms_lua_enter(L);
    ms_lua_tensor(L, 1);
    /* An unknown form raises and names the nearest. */
    bool erf_form = !lua_isnoneornil(L, 2) && ms_lua_choice(L, 2, forms, "form of gelu") == 1;
    return ms_lua_apply_one(L, erf_form ? &ms_op_gelu_erf : &ms_op_gelu, NULL,
                            ms_lua_own_in_place(L));
}

/* t:pow(exponent), and t ^ exponent: the exponent is a number. A tensor as the exponent is refused
 * by luaL_checknumber; there is no such operator. */
static int power(lua_State *L)
{
    ms_lua_enter(L);
    ms_lua_tensor(L, 1);
    ms_attributes attributes = { .scalar = { .value = luaL_checknumber(L, 2) } };
    return ms_lua_apply_one(L, &ms_op_pow, &attributes, ms_lua_own_in_place(L));
}

/* t:clamp(low?, high?): nil is no bound. The flags are needed because 0 is a bound like any other.
 * With both bounds nil the operator copies. */
static int clamp(lua_State *L)
{
    ms_lua_enter(L);
    ms_lua_tensor(L, 1);
    ms_attributes attributes = { .scalar = { .has_low = !lua_isnoneornil(L, 2),
                                             .has_high = !lua_isnoneornil(L, 3) } };
    if (attributes.scalar.has_low) attributes.scalar.value = luaL_checknumber(L, 2);
    if (attributes.scalar.has_high) attributes.scalar.high = luaL_checknumber(L, 3);
    return ms_lua_apply_one(L, &ms_op_clamp, &attributes, ms_lua_own_in_place(L));
}

/* An operator that takes a tensor or a number on its right. factor: a third argument multiplies the
 * right side. negate: the number form adds the negated number. */
typedef struct binary_forms {
    const char *name;
    const ms_op *tensor, *number;
    bool factor, negate;
} binary_forms;

/* Only the first six have a twin that writes in place: comparisons have another dtype than their
 * input. ms_open_operators takes Lua's arithmetic from the first four. */
static const binary_forms binaries[] = {
    { "add", &ms_op_add, &ms_op_add_scalar, true, false },
    { "sub", &ms_op_sub, &ms_op_add_scalar, true, true },
    { "mul", &ms_op_mul, &ms_op_mul_scalar, false, false },
    { "div", &ms_op_div, &ms_op_div_scalar, false, false },
    { "maximum", &ms_op_maximum, &ms_op_maximum_scalar, false, false },
    { "minimum", &ms_op_minimum, &ms_op_minimum_scalar, false, false },
    { "eq", &ms_op_eq, &ms_op_eq_scalar, false, false },
    { "ne", &ms_op_ne, &ms_op_ne_scalar, false, false },
    { "lt", &ms_op_lt, &ms_op_lt_scalar, false, false },
    { "le", &ms_op_le, &ms_op_le_scalar, false, false },
    { "gt", &ms_op_gt, &ms_op_gt_scalar, false, false },
    { "ge", &ms_op_ge, &ms_op_ge_scalar, false, false },
};

/* a:op(b, factor?) with b a tensor or a number. A number is not made a tensor: the number forms
 * read one tensor less and record no second input. The factor multiplies the number on the host, in
 * double precision. has_low tells the operator that `value` is given even where it is 0. */
static int binary_with(lua_State *L, const binary_forms *forms, bool in_place)
{
    ms_lua_enter(L);
    ms_tensor *a = ms_lua_tensor(L, 1);
    double factor = forms->factor && !lua_isnoneornil(L, 3) ? luaL_checknumber(L, 3) : 1;
    if (ms_lua_is_tensor(L, 2)) {
        ms_tensor *inputs[] = { a, ms_lua_tensor(L, 2) };
        ms_attributes attributes = { .scalar = { .value = factor, .has_low = forms->factor } };
        return ms_lua_apply(L, forms->tensor, &attributes, in_place, inputs, 2);
    }
    double number = ms_lua_number(L, 2, forms->name) * factor;
    ms_attributes attributes = { .scalar = { .value = forms->negate ? -number : number } };
    return ms_lua_apply(L, forms->number, &attributes, in_place, &a, 1);
}

/* The method: upvalue 2 is its line of the table. */
static int binary(lua_State *L)
{
    return binary_with(L, lua_touserdata(L, lua_upvalueindex(2)), ms_lua_own_in_place(L));
}

/* Lua's operators: either side may be the number. a - t and a / t have operators of their own. A
 * comparison has no such event here: Lua converts the result of == and < to a boolean, which would
 * have to wait for the device; hence the methods eq, lt and so on. */
static int arithmetic(lua_State *L)
{
    const binary_forms *forms = lua_touserdata(L, lua_upvalueindex(2));
    lua_settop(L, 2);
    if (ms_lua_is_tensor(L, 1)) return binary_with(L, forms, false);
    ms_lua_enter(L);
    /* Lua calls the event because the right side is a tensor; the left one must be a number. */
    ms_attributes attributes = { .scalar = { .value = ms_lua_number(L, 1, forms->name) } };
    ms_tensor *b = ms_lua_tensor(L, 2);
    const ms_op *op = forms->number;
    if (forms->tensor == &ms_op_sub) op = &ms_op_rsub_scalar;
    else if (forms->tensor == &ms_op_div) op = &ms_op_rdiv_scalar;
    return ms_lua_apply(L, op, &attributes, false, &b, 1);
}

/* -t. Lua passes the operand twice to __unm; only the first is read. */
static int minus(lua_State *L)
{
    ms_lua_enter(L);
    return ms_lua_apply_one(L, &ms_op_neg, NULL, false);
}

/* t:lerp(end, weight), with weight a number or a tensor. In moving averages the weight is a
 * constant; as a tensor it broadcasts. */
static int lerp(lua_State *L)
{
    ms_lua_enter(L);
    ms_tensor *inputs[] = { ms_lua_tensor(L, 1), ms_lua_tensor(L, 2),
                            ms_lua_is_tensor(L, 3) ? ms_lua_tensor(L, 3) : NULL };
    ms_attributes attributes = { .scalar = { .value = inputs[2] ? 0 : luaL_checknumber(L, 3) } };
    return ms_lua_apply(L, &ms_op_lerp, &attributes, ms_lua_own_in_place(L), inputs,
                        inputs[2] ? 3 : 2);
}

/* t:op(a, b, factor = 1): addcmul and addcdiv. has_low tells the operator that a factor of 0 is
 * meant and not left out. */
static int three(lua_State *L)
{
    ms_lua_enter(L);
    ms_tensor *inputs[] = { ms_lua_tensor(L, 1), ms_lua_tensor(L, 2), ms_lua_tensor(L, 3) };
    ms_attributes attributes = { .scalar = { .value = luaL_optnumber(L, 4, 1), .has_low = true } };
    return ms_lua_apply(L, ms_lua_own_op(L), &attributes, ms_lua_own_in_place(L), inputs, 3);
}

/* t:masked_fill(mask, value): value where the bool mask is true. The mask broadcasts. The value is
 * a number only: with a tensor, ms.where says the same. */
static int masked_fill(lua_State *L)
{
    ms_lua_enter(L);
    ms_tensor *inputs[] = { ms_lua_tensor(L, 1), ms_lua_tensor(L, 2) };
    ms_attributes attributes = { .scalar = { .value = luaL_checknumber(L, 3) } };
    return ms_lua_apply(L, &ms_op_masked_fill, &attributes, ms_lua_own_in_place(L), inputs, 2);
}

/* ms.where(condition, a, b): a and b are tensors or numbers. A number becomes a tensor of the
 * other's dtype, f32 if both are numbers. The tensors that are made for numbers have no handle:
 * they are released here once the operator has what it needs, also if it failed, before anything is
 * raised. */
static int where(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    ms_tensor *inputs[3] = { ms_lua_tensor(L, 1), NULL, NULL };
    /* By the places of the inputs; the condition is always a tensor. */
    double numbers[3] = { 0 };
    ms_dtype dtype = MS_F32;
    for (int i = 1; i < 3; i++)
        if (ms_lua_is_tensor(L, i + 1)) {
            inputs[i] = ms_lua_tensor(L, i + 1);
            dtype = ms_tensor_dtype(inputs[i]);
        } else numbers[i] = ms_lua_number(L, i + 1, "where");
    ms_handle *handle = ms_lua_new_handle(L);
    ms_tensor *made[3] = { NULL }, *out = NULL;
    ms_status status = MS_OK;
    for (int i = 1; i < 3 && !status; i++)
        if (!inputs[i]) {
            status = ms_lua_filled(engine, dtype, 0, NULL, numbers[i], &made[i]);
            inputs[i] = made[i];
        }
    if (!status) status = ms_apply(engine, &ms_op_where, NULL, false, inputs, 3, &out, 1);
    ms_tensor_release(made[1]);
    ms_tensor_release(made[2]);
    ms_lua_ok(L, status);
    ms_handle_fill(handle, out);
    return 1;
}

/* t:dropout(p, { group = }): each rank draws other numbers, since ranks have other data; with a
 * group, by the rank's place in it, so that ranks of the same place draw the same. Arguments are
 * checked before the draw, so that an error does not use one up. */
static int dropout(lua_State *L)
{
    static const char *const keys[] = { "group", NULL };
    ms_lua_enter(L);
    ms_lua_tensor(L, 1);
    double p = luaL_checknumber(L, 2);
    uint32_t rank = ms_lua_runtime(L)->job.rank;
    if (!(p >= 0 && p < 1))
        return ms_lua_error(L, "dropout: p is %g; 0 or more and below 1 is allowed", p);
    if (!lua_isnoneornil(L, 3)) {
        luaL_checktype(L, 3, LUA_TTABLE);
        ms_lua_known_keys(L, 3, keys, "option of dropout");
        if (lua_getfield(L, 3, "group") != LUA_TNIL)
            rank = ms_group_rank(ms_lua_group(L, lua_gettop(L)));
        lua_pop(L, 1);
    }
    ms_attributes attributes = { .random = { .random = ms_lua_draw_of(L, rank), .a = p } };
    return ms_lua_apply_one(L, &ms_op_dropout, &attributes, ms_lua_own_in_place(L));
}

/* --------------------------------------------------------------- reductions */

/* (dim, keep) at `at`; everything where dim is absent. It raises for a wrong dimension, so it is
 * called before anything is owned. */
static ms_attributes reduce_attributes(lua_State *L, int at)
{
    ms_attributes attributes = { .reduce = { .all = lua_isnoneornil(L, at),
                                             .keep = lua_toboolean(L, at + 1) } };
    if (!attributes.reduce.all)
        attributes.reduce.dim = ms_lua_dim(L, at, ms_tensor_dims(ms_lua_tensor(L, 1)));
    return attributes;
}

/* t:op(dim?, keep = false): over all elements without dim. The result of a reduction over
 * everything is a scalar on the device, not a Lua number: nothing waits. */
static int reduce(lua_State *L)
{
    ms_lua_enter(L);
    ms_lua_tensor(L, 1);
    ms_attributes attributes = reduce_attributes(L, 2);
    return ms_lua_apply_one(L, ms_lua_own_op(L), &attributes, false);
}

/* t:norm(p = 2, dim?, keep = false). p = math.huge is the largest absolute value. p = 0, a count of
 * numbers, is refused: it has no gradient, and is a mistake more often than not. */
static int norm(lua_State *L)
{
    ms_lua_enter(L);
    ms_lua_tensor(L, 1);
    double p = luaL_optnumber(L, 2, 2);
    if (!(p > 0)) return ms_lua_error(L, "norm: p is %g; above 0 or math.huge is allowed", p);
    ms_attributes attributes = reduce_attributes(L, 3);
    attributes.reduce.p = p;
    return ms_lua_apply_one(L, &ms_op_norm, &attributes, false);
}

/* Operators whose only attribute is one dimension, the last unless given: cumsum softmax
 * log_softmax. A scalar has no last dimension: dim is then -1, and the operator refuses it. */
static int along(lua_State *L)
{
    ms_lua_enter(L);
    uint32_t dims = ms_tensor_dims(ms_lua_tensor(L, 1));
    ms_attributes attributes = { .dim = { .a = lua_isnoneornil(L, 2) ? (int32_t)dims - 1
                                                                     : ms_lua_dim(L, 2, dims) } };
    return ms_lua_apply_one(L, ms_lua_own_op(L), &attributes, false);
}

/* t:quantile(q) with q from 0 to 1, over all elements. Written so that NaN is refused, too. */
static int quantile(lua_State *L)
{
    ms_lua_enter(L);
    ms_lua_tensor(L, 1);
    ms_attributes attributes = { .scalar = { .value = luaL_checknumber(L, 2) } };
    if (!(attributes.scalar.value >= 0 && attributes.scalar.value <= 1))
        return ms_lua_error(L, "quantile: q is %g; 0 to 1 is allowed", attributes.scalar.value);
    return ms_lua_apply_one(L, &ms_op_quantile, &attributes, false);
}

/* t:histogram(bins, low, high) -> i64 tensor of counts. Values outside are not counted. The range
 * is given and not taken from the data, since finding it would need the values on the host; with
 * the same range, the histograms of ranks can be added. */
static int histogram(lua_State *L)
{
    ms_lua_enter(L);
    ms_lua_tensor(L, 1);
    /* The limit of bins refuses a mistake that would take all memory. */
    ms_attributes attributes = { .histogram = { .bins = ms_lua_integer(L, 2, 1, 1 << 24, "bins"),
                                                .low = luaL_checknumber(L, 3),
                                                .high = luaL_checknumber(L, 4) } };
    return ms_lua_apply_one(L, &ms_op_histogram, &attributes, false);
}

/* ------------------------------------------------------------------ opening */

/* Name, function, operator, whether it has a twin. A new operator without attributes needs its line
 * here and nothing else in this file. */
static const ms_method methods[] = {
    { "neg", unary, &ms_op_neg, true },
    { "exp", unary, &ms_op_exp, true },
    { "log", unary, &ms_op_log, true },
    { "sqrt", unary, &ms_op_sqrt, true },
    { "rsqrt", unary, &ms_op_rsqrt, true },
    { "square", unary, &ms_op_square, true },
    { "abs", unary, &ms_op_abs, true },
    { "sign", unary, &ms_op_sign, true },
    { "relu", unary, &ms_op_relu, true },
    { "silu", unary, &ms_op_silu, true },
    { "tanh", unary, &ms_op_tanh, true },
    { "sigmoid", unary, &ms_op_sigmoid, true },
    { "sin", unary, &ms_op_sin, true },
    { "cos", unary, &ms_op_cos, true },
    { "floor", unary, &ms_op_floor, true },
    { "ceil", unary, &ms_op_ceil, true },
    { "round", unary, &ms_op_round, true },
    { "gelu", gelu, NULL, true },
    { "pow", power, NULL, true },
    { "clamp", clamp, NULL, true },
    { "lerp", lerp, NULL, true },
    { "addcmul", three, &ms_op_addcmul, true },
    { "addcdiv", three, &ms_op_addcdiv, true },
    { "masked_fill", masked_fill, NULL, true },
    { "dropout", dropout, NULL, true },
    { "clone", unary, &ms_op_clone, false },
    { "is_finite", unary, &ms_op_is_finite, false },
    { "any", unary, &ms_op_any, false },
    { "all", unary, &ms_op_every, false },
    { "sum", reduce, &ms_op_sum, false },
    { "mean", reduce, &ms_op_mean, false },
    { "max", reduce, &ms_op_max, false },
    { "min", reduce, &ms_op_min, false },
    { "argmax", reduce, &ms_op_argmax, false },
    { "norm", norm, NULL, false },
    { "cumsum", along, &ms_op_cumsum, false },
    { "dot", ms_lua_two_tensors, &ms_op_dot, false },
    { "quantile", quantile, NULL, false },
    { "histogram", histogram, NULL, false },
    { "softmax", along, &ms_op_softmax, false },
    { "log_softmax", along, &ms_op_log_softmax, false },
};

static const luaL_Reg functions[] = { { "where", where }, { NULL, NULL } };

/* ms_open_tensor has made the table; module.c runs the parts in that order. */
void ms_lua_add_tensor_methods(lua_State *L, int runtime, const ms_method *list, size_t count)
{
    lua_getfield(L, -1, "tensor_methods");
    ms_lua_add_methods(L, runtime, list, count);
    lua_pop(L, 1);
}

/* __add and its like go into the metatable of tensors, which Lua asks for operators; their methods
 * go into the table that __index serves. */
void ms_open_operators(lua_State *L, int runtime)
{
    /* Lua's events, and the places of their operators in `binaries`. */
    static const struct {
        const char *name;
        int binary;
    } events[] = { { "__add", 0 }, { "__sub", 1 }, { "__mul", 2 }, { "__div", 3 } };
    ms_lua_register(L, runtime, functions);
    /* ms_open_tensor has made it; module.c runs the parts in that order. */
    lua_getfield(L, -1, "tensor_methods");
    ms_lua_add_methods(L, runtime, methods, sizeof methods / sizeof *methods);
    for (size_t i = 0; i < sizeof binaries / sizeof *binaries; i++) {
        ms_lua_add_method(L, runtime, binaries[i].name, "", binary, &binaries[i], false);
        /* The first six: see the table. */
        if (i < 6) ms_lua_add_method(L, runtime, binaries[i].name, "_", binary, &binaries[i], true);
    }
    luaL_getmetatable(L, MS_TENSOR_TYPE);
    for (size_t i = 0; i < sizeof events / sizeof *events; i++)
        ms_lua_add_method(L, runtime, events[i].name, "", arithmetic, &binaries[events[i].binary],
                          false);
    ms_lua_add_method(L, runtime, "__unm", "", minus, NULL, false);
    ms_lua_add_method(L, runtime, "__pow", "", power, NULL, false);
    lua_pop(L, 2);
}
