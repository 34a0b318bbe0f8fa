/* operators.c: the operators as methods of tensors, with their in-place twins, and Lua's arithmetic. */
#include <math.h>
#include <string.h>

#include "bindings/runtime.h"

/* The operator of a generic function is upvalue 2, whether it writes in place upvalue 3. */
static const ms_op *own_op(lua_State *L) { return lua_touserdata(L, lua_upvalueindex(2)); }
static bool own_in_place(lua_State *L) { return lua_toboolean(L, lua_upvalueindex(3)); }

/* Runs an operator of one result and pushes it (or, in place, its first argument). */
static int apply(lua_State *L, const ms_op *op, const ms_attributes *attributes, bool in_place, ms_tensor *const *inputs, uint32_t count)
{
    ms_engine *engine = ms_lua_runtime(L)->engine;
    ms_handle *handle = in_place ? NULL : ms_lua_new_handle(L);
    ms_tensor *out = NULL;
    ms_lua_ok(L, ms_apply(engine, op, attributes, in_place, inputs, count, &out, 1));
    if (handle) {
        ms_handle_fill(handle, out);
    } else {
        ms_tensor_release(out);
        lua_settop(L, 1);
    }
    return 1;
}

static int apply_one(lua_State *L, const ms_op *op, const ms_attributes *attributes, bool in_place)
{
    ms_tensor *t = ms_lua_tensor(L, 1);
    return apply(L, op, attributes, in_place, &t, 1);
}

/* A new tensor of that shape filled with value; for numbers where a tensor is needed. */
static ms_status filled(ms_engine *engine, ms_dtype dtype, uint32_t dims, const int64_t *shape, double value, ms_tensor **out)
{
    ms_tensor *made = NULL, *result = NULL;
    ms_status status = ms_tensor_new(engine, dtype, dims, shape, &made);
    ms_attributes attributes = { .scalar = { .value = value } };
    if (!status) status = ms_op_apply(engine, &ms_op_fill, &attributes, true, &made, 1, &result, 1);
    ms_tensor_release(result);
    if (status) ms_tensor_release(made);
    else *out = made;
    return status;
}

/* -------------------------------------------------------------------------------------------------------------------- elementwise */

static int unary(lua_State *L)
{
    ms_lua_enter(L);
    return apply_one(L, own_op(L), NULL, own_in_place(L));
}

static int gelu(lua_State *L)
{
    static const char *const forms[] = { "tanh", "erf", NULL };
    ms_lua_enter(L);
    ms_lua_tensor(L, 1);
    bool erf_form = !lua_isnoneornil(L, 2) && ms_lua_choice(L, 2, forms, "form of gelu") == 1;
    return apply_one(L, erf_form ? &ms_op_gelu_erf : &ms_op_gelu, NULL, own_in_place(L));
}

static int power(lua_State *L)
{
    ms_lua_enter(L);
    ms_lua_tensor(L, 1);
    ms_attributes attributes = { .scalar = { .value = luaL_checknumber(L, 2) } };
    return apply_one(L, &ms_op_pow, &attributes, own_in_place(L));
}

static int clamp(lua_State *L)
{
    ms_lua_enter(L);
    ms_lua_tensor(L, 1);
    ms_attributes attributes = { .scalar = { .has_low = !lua_isnoneornil(L, 2), .has_high = !lua_isnoneornil(L, 3) } };
    if (attributes.scalar.has_low) attributes.scalar.value = luaL_checknumber(L, 2);
    if (attributes.scalar.has_high) attributes.scalar.high = luaL_checknumber(L, 3);
    return apply_one(L, &ms_op_clamp, &attributes, own_in_place(L));
}

/* One line per operator that takes a tensor or a number on its right. */
typedef struct binary_forms { const char *name; const ms_op *tensor, *number; bool factor, negate; } binary_forms;

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

static double number_at(lua_State *L, int index, const char *what)
{
    if (lua_isboolean(L, index)) return lua_toboolean(L, index);
    if (lua_type(L, index) != LUA_TNUMBER) ms_lua_error(L, "%s: a number or a tensor is expected, not %s", what, luaL_typename(L, index));
    return lua_tonumber(L, index);
}

static int binary_with(lua_State *L, const binary_forms *forms, bool in_place)
{
    ms_lua_enter(L);
    ms_tensor *a = ms_lua_tensor(L, 1);
    double factor = forms->factor && !lua_isnoneornil(L, 3) ? luaL_checknumber(L, 3) : 1;
    if (ms_lua_is_tensor(L, 2)) {
        ms_tensor *inputs[] = { a, ms_lua_tensor(L, 2) };
        ms_attributes attributes = { .scalar = { .value = factor, .has_low = forms->factor } };
        return apply(L, forms->tensor, &attributes, in_place, inputs, 2);
    }
    double number = number_at(L, 2, forms->name) * factor;
    ms_attributes attributes = { .scalar = { .value = forms->negate ? -number : number } };
    return apply(L, forms->number, &attributes, in_place, &a, 1);
}

static int binary(lua_State *L) { return binary_with(L, lua_touserdata(L, lua_upvalueindex(2)), own_in_place(L)); }

/* Lua's operators: either side may be the number. */
static int arithmetic(lua_State *L)
{
    const binary_forms *forms = lua_touserdata(L, lua_upvalueindex(2));
    lua_settop(L, 2);
    if (ms_lua_is_tensor(L, 1)) return binary_with(L, forms, false);
    ms_lua_enter(L);
    ms_attributes attributes = { .scalar = { .value = number_at(L, 1, forms->name) } };
    ms_tensor *b = ms_lua_tensor(L, 2);
    const ms_op *op = forms->tensor == &ms_op_sub ? &ms_op_rsub_scalar : forms->tensor == &ms_op_div ? &ms_op_rdiv_scalar : forms->number;
    return apply(L, op, &attributes, false, &b, 1);
}

static int minus(lua_State *L)
{
    ms_lua_enter(L);
    return apply_one(L, &ms_op_neg, NULL, false);
}

static int lerp(lua_State *L)
{
    ms_lua_enter(L);
    ms_tensor *inputs[] = { ms_lua_tensor(L, 1), ms_lua_tensor(L, 2), ms_lua_is_tensor(L, 3) ? ms_lua_tensor(L, 3) : NULL };
    ms_attributes attributes = { .scalar = { .value = inputs[2] ? 0 : luaL_checknumber(L, 3) } };
    return apply(L, &ms_op_lerp, &attributes, own_in_place(L), inputs, inputs[2] ? 3 : 2);
}

static int three(lua_State *L)
{
    ms_lua_enter(L);
    ms_tensor *inputs[] = { ms_lua_tensor(L, 1), ms_lua_tensor(L, 2), ms_lua_tensor(L, 3) };
    ms_attributes attributes = { .scalar = { .value = luaL_optnumber(L, 4, 1), .has_low = true } };
    return apply(L, own_op(L), &attributes, own_in_place(L), inputs, 3);
}

static int masked_fill(lua_State *L)
{
    ms_lua_enter(L);
    ms_tensor *inputs[] = { ms_lua_tensor(L, 1), ms_lua_tensor(L, 2) };
    ms_attributes attributes = { .scalar = { .value = luaL_checknumber(L, 3) } };
    return apply(L, &ms_op_masked_fill, &attributes, own_in_place(L), inputs, 2);
}

/* ms.where(condition, a, b): numbers take the dtype of the other side. */
static int where(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    ms_tensor *inputs[3] = { ms_lua_tensor(L, 1), NULL, NULL };
    ms_dtype dtype = MS_F32;
    for (int i = 1; i < 3; i++)
        if (ms_lua_is_tensor(L, i + 1)) { inputs[i] = ms_lua_tensor(L, i + 1); dtype = ms_tensor_dtype(inputs[i]); }
        else number_at(L, i + 1, "where");
    ms_handle *handle = ms_lua_new_handle(L);
    ms_tensor *made[3] = { NULL }, *out = NULL;
    ms_status status = MS_OK;
    for (int i = 1; i < 3 && !status; i++)
        if (!inputs[i]) {
            status = filled(engine, dtype, 0, NULL, lua_isboolean(L, i + 1) ? lua_toboolean(L, i + 1) : lua_tonumber(L, i + 1), &made[i]);
            inputs[i] = made[i];
        }
    if (!status) status = ms_apply(engine, &ms_op_where, NULL, false, inputs, 3, &out, 1);
    ms_tensor_release(made[1]);
    ms_tensor_release(made[2]);
    ms_lua_ok(L, status);
    ms_handle_fill(handle, out);
    return 1;
}

static int dropout(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    ms_lua_tensor(L, 1);
    double p = luaL_checknumber(L, 2);
    if (!(p >= 0 && p < 1)) return ms_lua_error(L, "dropout: p is %g; 0 or more and below 1 is allowed", p);
    ms_attributes attributes = { .random = { .random = ms_engine_draw(engine), .a = p } };
    return apply_one(L, &ms_op_dropout, &attributes, own_in_place(L));
}

/* ------------------------------------------------------------------------------------------------------------------ memory, views */

static int like(lua_State *L, double value, bool fill)
{
    ms_engine *engine = ms_lua_enter(L);
    const ms_tensor *t = ms_lua_tensor(L, 1);
    ms_dtype dtype = lua_isnoneornil(L, 2) ? ms_tensor_dtype(t) : ms_lua_dtype(L, 2);
    ms_handle *handle = ms_lua_new_handle(L);
    ms_tensor *made = NULL;
    if (fill) ms_lua_ok(L, filled(engine, dtype, ms_tensor_dims(t), ms_tensor_shape(t), value, &made));
    else ms_lua_ok(L, ms_tensor_new(engine, dtype, ms_tensor_dims(t), ms_tensor_shape(t), &made));
    ms_handle_fill(handle, made);
    return 1;
}

static int empty_like(lua_State *L) { return like(L, 0, false); }
static int zeros_like(lua_State *L) { return like(L, 0, true); }
static int ones_like(lua_State *L) { return like(L, 1, true); }

static int copy_(lua_State *L)
{
    ms_lua_enter(L);
    ms_tensor *inputs[] = { ms_lua_tensor(L, 1), ms_lua_tensor(L, 2) };
    return apply(L, &ms_op_copy, NULL, true, inputs, 2);
}

static int fill_(lua_State *L)
{
    ms_lua_enter(L);
    ms_tensor *inputs[] = { ms_lua_tensor(L, 1), ms_lua_is_tensor(L, 2) ? ms_lua_tensor(L, 2) : NULL };
    ms_attributes attributes = { .scalar = { .value = inputs[1] ? 0 : number_at(L, 2, "fill_") } };
    return apply(L, &ms_op_fill, &attributes, true, inputs, inputs[1] ? 2 : 1);
}

static int zero_(lua_State *L)
{
    ms_lua_enter(L);
    return apply_one(L, &ms_op_fill, &(ms_attributes){ 0 }, true);
}

/* t:to(dtype) or t:to(device): itself if it is that already. */
static int to(lua_State *L)
{
    ms_lua_enter(L);
    const ms_tensor *t = ms_lua_tensor(L, 1);
    ms_dtype dtype;
    const char *what = luaL_checkstring(L, 2);
    if (!ms_dtype_find(what, &dtype)) {
        const char *own = ms_engine_is_sim(ms_lua_runtime(L)->engine) ? "sim" : "cpu";
        static const char *const names[] = { "f32", "f16", "bf16", "i64", "i32", "u16", "u8", "bool", "cpu", NULL };
        if (strcmp(what, own) != 0 && strcmp(what, "cpu") != 0) ms_lua_choice(L, 2, names, "dtype or device");
        lua_settop(L, 1);
        return 1;
    }
    if (dtype == ms_tensor_dtype(t)) { lua_settop(L, 1); return 1; }
    ms_attributes attributes = { .cast = { .dtype = dtype } };
    return apply_one(L, &ms_op_cast, &attributes, false);
}

static int contiguous(lua_State *L)
{
    ms_lua_enter(L);
    if (ms_tensor_is_contiguous(ms_lua_tensor(L, 1))) { lua_settop(L, 1); return 1; }
    return apply_one(L, &ms_op_clone, NULL, false);
}

static int with_shape(lua_State *L)
{
    ms_lua_enter(L);
    ms_lua_tensor(L, 1);
    ms_attributes attributes = { 0 };
    attributes.shape.dims = ms_lua_sizes(L, 2, attributes.shape.sizes, "a size");
    return apply_one(L, own_op(L), &attributes, false);
}

static int permute(lua_State *L)
{
    ms_lua_enter(L);
    const ms_tensor *t = ms_lua_tensor(L, 1);
    ms_attributes attributes = { 0 };
    int count = lua_gettop(L) - 1;
    if (count != (int)ms_tensor_dims(t)) return ms_lua_error(L, "permute: %d dimensions are given for a tensor with %u", count, ms_tensor_dims(t));
    attributes.shape.dims = (uint32_t)count;
    for (int i = 0; i < count; i++) attributes.shape.sizes[i] = ms_lua_dim(L, i + 2, ms_tensor_dims(t));
    return apply_one(L, &ms_op_permute, &attributes, false);
}

static int flatten(lua_State *L)
{
    ms_lua_enter(L);
    const ms_tensor *t = ms_lua_tensor(L, 1);
    uint32_t dims = ms_tensor_dims(t);
    ms_attributes attributes = { 0 };
    int32_t first = 0, last = (int32_t)dims - 1;
    if (dims && !lua_isnoneornil(L, 2)) first = ms_lua_dim(L, 2, dims);
    if (dims && !lua_isnoneornil(L, 3)) last = ms_lua_dim(L, 3, dims);
    if (dims && first > last) return ms_lua_error(L, "flatten: dimension %d comes after %d", first + 1, last + 1);
    int64_t joined = 1;
    uint32_t count = 0;
    for (int32_t d = 0; d < (int32_t)dims; d++) {
        if (d >= first && d <= last) joined *= ms_tensor_shape(t)[d];
        if (d == last) attributes.shape.sizes[count++] = joined;
        else if (d < first || d > last) attributes.shape.sizes[count++] = ms_tensor_shape(t)[d];
    }
    if (dims == 0) attributes.shape.sizes[count++] = 1;
    attributes.shape.dims = count;
    return apply_one(L, &ms_op_reshape, &attributes, false);
}

static int narrow(lua_State *L)
{
    ms_lua_enter(L);
    const ms_tensor *t = ms_lua_tensor(L, 1);
    ms_attributes attributes = { .dim = { .a = ms_lua_dim(L, 2, ms_tensor_dims(t)) } };
    int64_t size = ms_tensor_shape(t)[attributes.dim.a];
    attributes.dim.start = ms_lua_integer(L, 3, 1, size + 1, "start") - 1;
    attributes.dim.length = ms_lua_integer(L, 4, 0, size - attributes.dim.start, "length");
    return apply_one(L, &ms_op_narrow, &attributes, false);
}

static int select_index(lua_State *L)
{
    ms_lua_enter(L);
    const ms_tensor *t = ms_lua_tensor(L, 1);
    ms_attributes attributes = { .dim = { .a = ms_lua_dim(L, 2, ms_tensor_dims(t)) } };
    int64_t size = ms_tensor_shape(t)[attributes.dim.a], index = ms_lua_integer(L, 3, INT64_MIN, INT64_MAX, "an index");
    if (index == 0 || index > size || index < -size) return ms_lua_error(L, "index %lld of a dimension of size %lld: they count from 1, or from -1 at the end", (long long)index, (long long)size);
    attributes.dim.start = index > 0 ? index - 1 : index + size;
    return apply_one(L, &ms_op_select, &attributes, false);
}

static int two_dims(lua_State *L)
{
    ms_lua_enter(L);
    const ms_tensor *t = ms_lua_tensor(L, 1);
    ms_attributes attributes = { .dim = { .a = ms_lua_dim(L, 2, ms_tensor_dims(t)), .b = ms_lua_dim(L, 3, ms_tensor_dims(t)) } };
    return apply_one(L, &ms_op_transpose, &attributes, false);
}

static int t_(lua_State *L)
{
    ms_lua_enter(L);
    uint32_t dims = ms_tensor_dims(ms_lua_tensor(L, 1));
    if (dims < 2) return ms_lua_error(L, "t: the tensor has %u dimensions; two or more are needed", dims);
    ms_attributes attributes = { .dim = { .a = (int32_t)dims - 2, .b = (int32_t)dims - 1 } };
    return apply_one(L, &ms_op_transpose, &attributes, false);
}

static int squeeze(lua_State *L)
{
    ms_lua_enter(L);
    ms_attributes attributes = { .dim = { .a = ms_lua_dim(L, 2, ms_tensor_dims(ms_lua_tensor(L, 1))) } };
    return apply_one(L, &ms_op_squeeze, &attributes, false);
}

static int unsqueeze(lua_State *L)
{
    ms_lua_enter(L);
    ms_attributes attributes = { .dim = { .a = ms_lua_dim(L, 2, ms_tensor_dims(ms_lua_tensor(L, 1)) + 1) } };
    return apply_one(L, &ms_op_unsqueeze, &attributes, false);
}

/* Splits along dim into parts of these sizes; pushes the list. */
static int split_into(lua_State *L, const int64_t *sizes, uint32_t count, int32_t dim)
{
    ms_engine *engine = ms_lua_runtime(L)->engine;
    ms_tensor *t = ms_lua_tensor(L, 1);
    ms_attributes attributes = { .split = { .sizes = sizes, .count = count, .dim = dim } };
    ms_tensor **outputs = lua_newuserdatauv(L, count * sizeof *outputs + 1, 0);
    ms_handle **handles = lua_newuserdatauv(L, count * sizeof *handles + 1, 0);
    lua_createtable(L, (int)count, 0);
    for (uint32_t i = 0; i < count; i++) {
        handles[i] = ms_lua_new_handle(L);
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    ms_lua_ok(L, ms_apply(engine, &ms_op_split, &attributes, false, &t, 1, outputs, count));
    for (uint32_t i = 0; i < count; i++) ms_handle_fill(handles[i], outputs[i]);
    return 1;
}

static int split(lua_State *L)
{
    ms_lua_enter(L);
    const ms_tensor *t = ms_lua_tensor(L, 1);
    int32_t dim = lua_isnoneornil(L, 3) ? 0 : ms_lua_dim(L, 3, ms_tensor_dims(t));
    if (ms_tensor_dims(t) == 0) return ms_lua_error(L, "split: a scalar has no dimension to split");
    int64_t size = ms_tensor_shape(t)[dim];
    bool list = lua_istable(L, 2);
    int64_t each = list ? 0 : ms_lua_integer(L, 2, 1, INT64_MAX, "the size of a part");
    int64_t count = list ? (int64_t)lua_rawlen(L, 2) : (size + each - 1) / each;
    if (count > 100000) return ms_lua_error(L, "split: %lld parts are too many", (long long)count);
    int64_t *sizes = lua_newuserdatauv(L, (size_t)(count + 1) * sizeof *sizes, 0), sum = 0;
    for (int64_t i = 0; i < count; i++) {
        if (list) lua_rawgeti(L, 2, i + 1);
        sizes[i] = list ? ms_lua_integer(L, -1, 0, INT64_MAX, "the size of a part") : (size - i * each < each ? size - i * each : each);
        if (list) lua_pop(L, 1);
        sum += sizes[i];
    }
    if (sum != size) return ms_lua_error(L, "split: the parts have %lld in all, dimension %d has %lld", (long long)sum, dim + 1, (long long)size);
    return split_into(L, sizes, (uint32_t)count, dim);
}

static int chunk(lua_State *L)
{
    ms_lua_enter(L);
    const ms_tensor *t = ms_lua_tensor(L, 1);
    int64_t count = ms_lua_integer(L, 2, 1, 100000, "the number of chunks");
    int32_t dim = lua_isnoneornil(L, 3) ? 0 : ms_lua_dim(L, 3, ms_tensor_dims(t));
    if (ms_tensor_dims(t) == 0) return ms_lua_error(L, "chunk: a scalar has no dimension to split");
    /* Parts of equal size, the last smaller or missing, as split makes them. */
    int64_t size = ms_tensor_shape(t)[dim], each = size ? (size + count - 1) / count : 1, parts = 0;
    int64_t *sizes = lua_newuserdatauv(L, (size_t)(count + 1) * sizeof *sizes, 0);
    for (int64_t at = 0; at < size; at += each) sizes[parts++] = size - at < each ? size - at : each;
    if (parts == 0) sizes[parts++] = 0;
    return split_into(L, sizes, (uint32_t)parts, dim);
}

/* 1-D, zeros at the end up to a multiple. */
static int pad_to(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    ms_tensor *t = ms_lua_tensor(L, 1);
    int64_t multiple = ms_lua_integer(L, 2, 1, INT64_MAX / 2, "the multiple"), count = ms_tensor_count(t);
    if (ms_tensor_dims(t) != 1) return ms_lua_error(L, "pad_to: the tensor has %u dimensions; flatten it first", ms_tensor_dims(t));
    int64_t rest = (multiple - count % multiple) % multiple;
    if (rest == 0) { lua_settop(L, 1); return 1; }
    ms_handle *handle = ms_lua_new_handle(L);
    ms_tensor *zeros = NULL, *out = NULL;
    ms_status status = filled(engine, ms_tensor_dtype(t), 1, &rest, 0, &zeros);
    if (!status) {
        ms_tensor *inputs[] = { t, zeros };
        status = ms_apply(engine, &ms_op_cat, &(ms_attributes){ 0 }, false, inputs, 2, &out, 1);
    }
    ms_tensor_release(zeros);
    ms_lua_ok(L, status);
    ms_handle_fill(handle, out);
    return 1;
}

/* --------------------------------------------------------------------------------------------------------------------- reductions */

/* (dim, keep) at `at`; everything where dim is absent. */
static ms_attributes reduce_attributes(lua_State *L, int at)
{
    ms_attributes attributes = { .reduce = { .all = lua_isnoneornil(L, at), .keep = lua_toboolean(L, at + 1) } };
    if (!attributes.reduce.all) attributes.reduce.dim = ms_lua_dim(L, at, ms_tensor_dims(ms_lua_tensor(L, 1)));
    return attributes;
}

static int reduce(lua_State *L)
{
    ms_lua_enter(L);
    ms_lua_tensor(L, 1);
    ms_attributes attributes = reduce_attributes(L, 2);
    return apply_one(L, own_op(L), &attributes, false);
}

static int norm(lua_State *L)
{
    ms_lua_enter(L);
    ms_lua_tensor(L, 1);
    double p = luaL_optnumber(L, 2, 2);
    if (!(p > 0)) return ms_lua_error(L, "norm: p is %g; above 0 or math.huge is allowed", p);
    ms_attributes attributes = reduce_attributes(L, 3);
    attributes.reduce.p = p;
    return apply_one(L, &ms_op_norm, &attributes, false);
}

/* Operators whose only attribute is one dimension, the last unless given: cumsum softmax log_softmax. */
static int along(lua_State *L)
{
    ms_lua_enter(L);
    uint32_t dims = ms_tensor_dims(ms_lua_tensor(L, 1));
    ms_attributes attributes = { .dim = { .a = lua_isnoneornil(L, 2) ? (int32_t)dims - 1 : ms_lua_dim(L, 2, dims) } };
    return apply_one(L, own_op(L), &attributes, false);
}

static int two_tensors(lua_State *L)
{
    ms_lua_enter(L);
    ms_tensor *inputs[] = { ms_lua_tensor(L, 1), ms_lua_tensor(L, 2) };
    return apply(L, own_op(L), NULL, false, inputs, 2);
}

static int quantile(lua_State *L)
{
    ms_lua_enter(L);
    ms_lua_tensor(L, 1);
    ms_attributes attributes = { .scalar = { .value = luaL_checknumber(L, 2) } };
    if (!(attributes.scalar.value >= 0 && attributes.scalar.value <= 1)) return ms_lua_error(L, "quantile: q is %g; 0 to 1 is allowed", attributes.scalar.value);
    return apply_one(L, &ms_op_quantile, &attributes, false);
}

static int histogram(lua_State *L)
{
    ms_lua_enter(L);
    ms_lua_tensor(L, 1);
    ms_attributes attributes = { .histogram = { .bins = ms_lua_integer(L, 2, 1, 1 << 24, "bins"), .low = luaL_checknumber(L, 3), .high = luaL_checknumber(L, 4) } };
    return apply_one(L, &ms_op_histogram, &attributes, false);
}

/* ---------------------------------------------------------------------------------------------------------------------- selection */

/* Runs an operator of several results and pushes them all. */
static int apply_many(lua_State *L, const ms_op *op, const ms_attributes *attributes, ms_tensor *const *inputs, uint32_t count, int results)
{
    ms_engine *engine = ms_lua_runtime(L)->engine;
    ms_handle *handles[3];
    ms_tensor *outputs[3] = { NULL };
    for (int i = 0; i < results; i++) handles[i] = ms_lua_new_handle(L);
    ms_lua_ok(L, ms_apply(engine, op, attributes, false, inputs, count, outputs, (uint32_t)results));
    for (int i = 0; i < results; i++) ms_handle_fill(handles[i], outputs[i]);
    return results;
}

static int topk(lua_State *L)
{
    ms_lua_enter(L);
    ms_tensor *t = ms_lua_tensor(L, 1);
    uint32_t dims = ms_tensor_dims(t);
    ms_attributes attributes = { .top = { .dim = lua_isnoneornil(L, 3) ? (int32_t)dims - 1 : ms_lua_dim(L, 3, dims), .largest = true } };
    attributes.top.k = ms_lua_integer(L, 2, 0, dims ? ms_tensor_shape(t)[attributes.top.dim] : 1, "k");
    return apply_many(L, &ms_op_topk, &attributes, &t, 1, 2);
}

static int above(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    ms_tensor *t = ms_lua_tensor(L, 1);
    ms_attributes attributes = { .dim = { .length = ms_lua_integer(L, 3, 0, INT64_MAX / 8, "capacity") } };
    if (ms_lua_is_tensor(L, 2)) {
        ms_tensor *inputs[] = { t, ms_lua_tensor(L, 2) };
        return apply_many(L, &ms_op_above, &attributes, inputs, 2, 3);
    }
    ms_handle *threshold = ms_lua_new_handle(L);
    ms_tensor *made = NULL;
    ms_lua_ok(L, filled(engine, ms_tensor_dtype(t), 0, NULL, luaL_checknumber(L, 2), &made));
    ms_handle_fill(threshold, made);
    ms_tensor *inputs[] = { t, made };
    return apply_many(L, &ms_op_above, &attributes, inputs, 2, 3);
}

static int with_index(lua_State *L)
{
    ms_lua_enter(L);
    ms_tensor *t = ms_lua_tensor(L, 1);
    ms_tensor *inputs[] = { t, ms_lua_tensor(L, 3) };
    ms_attributes attributes = { .index = { .dim = ms_lua_dim(L, 2, ms_tensor_dims(t)) } };
    return apply(L, own_op(L), &attributes, own_in_place(L), inputs, 2);
}

static int scatter(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    ms_tensor *t = ms_lua_tensor(L, 1), *index = ms_lua_tensor(L, 3), *values = NULL;
    ms_attributes attributes = { .index = { .dim = ms_lua_dim(L, 2, ms_tensor_dims(t)) } };
    if (ms_lua_is_tensor(L, 4)) {
        values = ms_lua_tensor(L, 4);
    } else {
        double number = number_at(L, 4, "scatter");
        ms_handle *made = ms_lua_new_handle(L);
        ms_lua_ok(L, filled(engine, ms_tensor_dtype(t), ms_tensor_dims(index), ms_tensor_shape(index), number, &values));
        ms_handle_fill(made, values);
    }
    ms_tensor *inputs[] = { t, index, values };
    return apply(L, own_op(L), &attributes, own_in_place(L), inputs, 3);
}

/* ------------------------------------------------------------------------------------------------------------------------- layers */

static int linear(lua_State *L)
{
    static const char *const activations[] = { "gelu", NULL };
    ms_lua_enter(L);
    ms_tensor *inputs[] = { ms_lua_tensor(L, 1), ms_lua_tensor(L, 2), ms_lua_optional_tensor(L, 3) };
    ms_attributes attributes = { 0 };
    if (!lua_isnoneornil(L, 4)) {
        ms_lua_choice(L, 4, activations, "activation");
        attributes.linear.activation = MS_ACTIVATION_GELU;
    }
    return apply(L, own_op(L), &attributes, false, inputs, inputs[2] ? 3 : 2);
}

static int cross_entropy(lua_State *L)
{
    static const char *const keys[] = { "ignore_index", "reduction", NULL }, *const reductions[] = { "mean", "sum", "none", NULL };
    ms_lua_enter(L);
    ms_tensor *inputs[] = { ms_lua_tensor(L, 1), ms_lua_tensor(L, 2) };
    ms_lua_known_keys(L, 3, keys, "option of cross_entropy");
    ms_attributes attributes = { .loss = { .ignore_index = ms_lua_field_integer(L, 3, "ignore_index", -100, INT64_MIN, INT64_MAX) } };
    if (!lua_isnoneornil(L, 3)) {
        if (lua_getfield(L, 3, "reduction") != LUA_TNIL) attributes.loss.reduction = ms_lua_choice(L, -1, reductions, "reduction");
        lua_pop(L, 1);
    }
    return apply(L, &ms_op_cross_entropy, &attributes, false, inputs, 2);
}

static double eps_at(lua_State *L, int index)
{
    double eps = luaL_optnumber(L, index, 1e-5);
    if (!(eps >= 0)) ms_lua_error(L, "eps is %g; 0 or more is allowed", eps);
    return eps;
}

static int layer_norm(lua_State *L)
{
    ms_lua_enter(L);
    ms_tensor *inputs[] = { ms_lua_tensor(L, 1), ms_lua_optional_tensor(L, 2), ms_lua_optional_tensor(L, 3) };
    ms_attributes attributes = { .norm = { .eps = eps_at(L, 4) } };
    return apply(L, &ms_op_layer_norm, &attributes, false, inputs, 3);
}

static int rms_norm(lua_State *L)
{
    ms_lua_enter(L);
    ms_tensor *inputs[] = { ms_lua_tensor(L, 1), ms_lua_optional_tensor(L, 2) };
    ms_attributes attributes = { .norm = { .eps = eps_at(L, 3) } };
    return apply(L, &ms_op_rms_norm, &attributes, false, inputs, 2);
}

/* x:add_layer_norm(residual, weight, bias, eps): x + residual and its norm, in one pass. */
static int add_layer_norm(lua_State *L)
{
    ms_lua_enter(L);
    ms_tensor *inputs[] = { ms_lua_tensor(L, 1), ms_lua_tensor(L, 2), ms_lua_optional_tensor(L, 3), ms_lua_optional_tensor(L, 4) };
    ms_attributes attributes = { .norm = { .eps = eps_at(L, 5) } };
    return apply_many(L, &ms_op_add_layer_norm, &attributes, inputs, 4, 2);
}

static int add_rms_norm(lua_State *L)
{
    ms_lua_enter(L);
    ms_tensor *inputs[] = { ms_lua_tensor(L, 1), ms_lua_tensor(L, 2), ms_lua_optional_tensor(L, 3) };
    ms_attributes attributes = { .norm = { .eps = eps_at(L, 4) } };
    return apply_many(L, &ms_op_add_rms_norm, &attributes, inputs, 3, 2);
}

static int rotary(lua_State *L)
{
    ms_lua_enter(L);
    ms_lua_tensor(L, 1);
    ms_attributes attributes = { .rotary = { .first = lua_isnoneornil(L, 2) ? 0 : ms_lua_integer(L, 2, 0, 1 << 30, "the first position"), .base = luaL_optnumber(L, 3, 10000) } };
    return apply_one(L, &ms_op_rotary, &attributes, false);
}

static int attention(lua_State *L)
{
    static const char *const keys[] = { "causal", "scale", NULL };
    ms_lua_enter(L);
    ms_tensor *inputs[] = { ms_lua_tensor(L, 1), ms_lua_tensor(L, 2), ms_lua_tensor(L, 3) };
    ms_lua_known_keys(L, 4, keys, "option of attention");
    ms_attributes attributes = { .attention = { .scale = ms_lua_field_number(L, 4, "scale", 0), .causal = ms_lua_field_boolean(L, 4, "causal", true) } };
    return apply(L, &ms_op_attention, &attributes, false, inputs, 3);
}

/* ------------------------------------------------------------------------------------------------------------------------ opening */

/* Methods that share a function: name, function, operator, whether there is a twin `name_`. */
typedef struct method { const char *name; lua_CFunction function; const ms_op *op; bool twin; } method;

static const method methods[] = {
    { "neg", unary, &ms_op_neg, true }, { "exp", unary, &ms_op_exp, true }, { "log", unary, &ms_op_log, true }, { "sqrt", unary, &ms_op_sqrt, true },
    { "rsqrt", unary, &ms_op_rsqrt, true }, { "square", unary, &ms_op_square, true }, { "abs", unary, &ms_op_abs, true }, { "sign", unary, &ms_op_sign, true },
    { "relu", unary, &ms_op_relu, true }, { "silu", unary, &ms_op_silu, true }, { "tanh", unary, &ms_op_tanh, true }, { "sigmoid", unary, &ms_op_sigmoid, true },
    { "gelu", gelu, NULL, true }, { "pow", power, NULL, true }, { "clamp", clamp, NULL, true }, { "lerp", lerp, NULL, true },
    { "addcmul", three, &ms_op_addcmul, true }, { "addcdiv", three, &ms_op_addcdiv, true }, { "masked_fill", masked_fill, NULL, true }, { "dropout", dropout, NULL, true },
    { "scatter", scatter, &ms_op_scatter, true }, { "scatter_add", scatter, &ms_op_scatter_add, true },
    { "is_finite", unary, &ms_op_is_finite, false }, { "clone", unary, &ms_op_clone, false }, { "any", unary, &ms_op_any, false }, { "all", unary, &ms_op_every, false },
    { "contiguous", contiguous, NULL, false }, { "to", to, NULL, false }, { "empty_like", empty_like, NULL, false }, { "zeros_like", zeros_like, NULL, false },
    { "ones_like", ones_like, NULL, false }, { "copy_", copy_, NULL, false }, { "fill_", fill_, NULL, false }, { "zero_", zero_, NULL, false },
    { "view", with_shape, &ms_op_view, false }, { "reshape", with_shape, &ms_op_reshape, false }, { "expand", with_shape, &ms_op_expand, false },
    { "flatten", flatten, NULL, false }, { "narrow", narrow, NULL, false }, { "select", select_index, NULL, false }, { "split", split, NULL, false }, { "chunk", chunk, NULL, false },
    { "transpose", two_dims, NULL, false }, { "t", t_, NULL, false }, { "permute", permute, NULL, false }, { "squeeze", squeeze, NULL, false }, { "unsqueeze", unsqueeze, NULL, false },
    { "pad_to", pad_to, NULL, false },
    { "sum", reduce, &ms_op_sum, false }, { "mean", reduce, &ms_op_mean, false }, { "max", reduce, &ms_op_max, false }, { "min", reduce, &ms_op_min, false },
    { "argmax", reduce, &ms_op_argmax, false }, { "norm", norm, NULL, false }, { "cumsum", along, &ms_op_cumsum, false }, { "dot", two_tensors, &ms_op_dot, false },
    { "quantile", quantile, NULL, false }, { "histogram", histogram, NULL, false },
    { "topk", topk, NULL, false }, { "above", above, NULL, false }, { "gather", with_index, &ms_op_gather, false }, { "index_select", with_index, &ms_op_index_select, false },
    { "matmul", two_tensors, &ms_op_matmul, false }, { "linear", linear, &ms_op_linear, false }, { "linear_t", linear, &ms_op_linear_t, false },
    { "softmax", along, &ms_op_softmax, false }, { "log_softmax", along, &ms_op_log_softmax, false }, { "cross_entropy", cross_entropy, NULL, false },
    { "mse_loss", two_tensors, &ms_op_mse_loss, false }, { "layer_norm", layer_norm, NULL, false }, { "rms_norm", rms_norm, NULL, false },
    { "add_layer_norm", add_layer_norm, NULL, false }, { "add_rms_norm", add_rms_norm, NULL, false }, { "swiglu", two_tensors, &ms_op_swiglu, false },
    { "embedding", two_tensors, &ms_op_embedding, false }, { "rotary", rotary, NULL, false }, { "attention", attention, NULL, false },
};

static void add_method(lua_State *L, int runtime, const char *name, const char *suffix, lua_CFunction function, const void *data, bool in_place)
{
    lua_pushfstring(L, "%s%s", name, suffix);
    lua_pushvalue(L, runtime);
    lua_pushlightuserdata(L, (void *)(uintptr_t)data);
    lua_pushboolean(L, in_place);
    lua_pushcclosure(L, function, 3);
    lua_rawset(L, -3);
}

void ms_open_operators(lua_State *L, int runtime)
{
    static const luaL_Reg functions[] = { { "where", where }, { NULL, NULL } };
    static const struct { const char *name; int binary; } events[] = { { "__add", 0 }, { "__sub", 1 }, { "__mul", 2 }, { "__div", 3 } };
    ms_lua_register(L, runtime, functions);
    lua_getfield(L, -1, "tensor_methods");
    for (size_t i = 0; i < sizeof methods / sizeof *methods; i++) {
        add_method(L, runtime, methods[i].name, "", methods[i].function, methods[i].op, false);
        if (methods[i].twin) add_method(L, runtime, methods[i].name, "_", methods[i].function, methods[i].op, true);
    }
    for (size_t i = 0; i < sizeof binaries / sizeof *binaries; i++) {
        add_method(L, runtime, binaries[i].name, "", binary, &binaries[i], false);
        if (i < 6) add_method(L, runtime, binaries[i].name, "_", binary, &binaries[i], true);
    }
    luaL_getmetatable(L, MS_TENSOR_TYPE);
    for (size_t i = 0; i < sizeof events / sizeof *events; i++) add_method(L, runtime, events[i].name, "", arithmetic, &binaries[events[i].binary], false);
    add_method(L, runtime, "__unm", "", minus, NULL, false);
    add_method(L, runtime, "__pow", "", power, NULL, false);
    lua_pop(L, 2);
}
