/* make.c: making tensors: from values, filled, random, joined. */
#include "bindings/make.h"

#include <math.h>
#include <string.h>

#include "bindings/arguments.h"
#include "bindings/call.h"
#include "bindings/group.h"
#include "bindings/enter.h"
#include "bindings/handles.h"
#include "bindings/runtime.h"
#include "bindings/script.h"

/* What a shape table says. group: the tensor is to be in memory that the group's collectives reach.
 */
typedef struct shape_options {
    uint32_t dims;
    int64_t sizes[MS_DIMS_MAX];
    ms_dtype dtype;
    bool requires_grad, meta;
    ms_group *group;
} shape_options;

/* All keys that a shape table may have beside its list of sizes; an unknown one raises and names
 * the nearest. */
static const char *const shape_keys[] = { "dtype", "device", "group", "requires_grad", NULL };
static const char *const random_keys[] = { "dtype",    "device", "group", "requires_grad", "seed",
                                           "per_rank", "std",    "low",   "high",          NULL };

/* Whether the tensor is to be on "meta". Beside that an engine has one device. Recipes may name it,
 * and "cpu", which they are written for, is accepted everywhere, so that `check` can simulate them.
 * The key is optional, and without it the engine's setting (on_device) holds. */
static bool read_device(lua_State *L, int index)
{
    bool meta = ms_engine_makes_meta(ms_lua_runtime(L)->engine);
    if (lua_getfield(L, index, "device") != LUA_TNIL) {
        const char *device = luaL_checkstring(L, -1);
        const char *own = ms_engine_device(ms_lua_runtime(L)->engine);
        meta = strcmp(device, "meta") == 0;
        if (!meta && strcmp(device, own) != 0 && strcmp(device, "cpu") != 0)
            ms_lua_error(L, "device '%.40s': this engine runs on '%s'", device, own);
    }
    lua_pop(L, 1);
    return meta;
}

/* Sizes as arguments, as other libraries have them. */
static void refuse_bare_sizes(lua_State *L, int index)
{
    luaL_Buffer sizes;
    int last = lua_gettop(L);
    luaL_buffinit(L, &sizes);
    for (int i = index; i <= last && lua_type(L, i) == LUA_TNUMBER; i++) {
        if (i > index) luaL_addstring(&sizes, ", ");
        luaL_addstring(&sizes, lua_tostring(L, i));
    }
    luaL_pushresult(&sizes);
    ms_lua_error(L, "a shape is a table: write { %s }, in braces", lua_tostring(L, -1));
}

/* Reads { sizes..., dtype =, device =, group =, requires_grad = } and raises for any other key. -1,
 * which ms_lua_sizes lets through for views, is refused here: a new tensor has no size that follows
 * from others. */
static void read_shape(lua_State *L, int index, const char *const keys[], ms_dtype fallback,
                       shape_options *out)
{
    if (lua_type(L, index) == LUA_TNUMBER) refuse_bare_sizes(L, index);
    luaL_checktype(L, index, LUA_TTABLE);
    ms_lua_known_keys(L, index, keys, "option");
    *out = (shape_options){ .dtype = fallback };
    out->dims = ms_lua_sizes(L, index, out->sizes, "a size");
    for (uint32_t d = 0; d < out->dims; d++)
        if (out->sizes[d] < 0)
            ms_lua_error(L, "size %lld of dimension %u: sizes are 0 or more",
                         (long long)out->sizes[d], d + 1);
    if (lua_getfield(L, index, "dtype") != LUA_TNIL) out->dtype = ms_lua_dtype(L, -1);
    lua_pop(L, 1);
    out->meta = read_device(L, index);
    if (lua_getfield(L, index, "group") != LUA_TNIL) out->group = ms_lua_group(L, -1);
    lua_pop(L, 1);
    out->requires_grad = ms_lua_field_boolean(L, index, "requires_grad", false);
}

/* Makes a tensor in ordinary memory or, with a group, in memory that the group's collectives reach
 * without a copy. On "meta" a group has no meaning, as there is no memory. */
static ms_status make_tensor(ms_engine *engine, const shape_options *shape, ms_tensor **out)
{
    if (!shape->group || shape->meta) {
        bool before = ms_engine_set_meta(engine, shape->meta);
        ms_status made = ms_tensor_new(engine, shape->dtype, shape->dims, shape->sizes, out);
        ms_engine_set_meta(engine, before);
        return made;
    }
    ms_storage *storage = NULL;
    size_t bytes = ms_dtype_bytes(shape->dtype);
    for (uint32_t d = 0; d < shape->dims; d++)
        /* ms_tensor_new checks this for ordinary memory; a group's storage is asked for in bytes.
         */
        if (__builtin_mul_overflow(bytes, (size_t)shape->sizes[d], &bytes))
            return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "a tensor of this shape is too large");
    ms_status status = ms_group_storage(shape->group, ms_engine_current(engine), bytes, &storage);
    if (!status) status = ms_tensor_on(storage, shape->dtype, shape->dims, shape->sizes, out);
    /* The tensor keeps it, if there is one. */
    ms_storage_release(storage);
    return status;
}

/* Makes a tensor, fills it in place with an operator (NULL: leaves it), and pushes it. All random
 * and filled tensors come from operators in place, so that the values are made by the device. */
static int make(lua_State *L, const shape_options *shape, const ms_op *op,
                const ms_attributes *attributes)
{
    ms_engine *engine = ms_lua_runtime(L)->engine;
    ms_handle *handle = ms_lua_new_handle(L);
    ms_tensor *made = NULL, *result = NULL;
    ms_status status = make_tensor(engine, shape, &made);
    if (!status && op) status = ms_op_apply(engine, op, attributes, true, &made, 1, &result, 1);
    /* In place, the operator gives another reference to `made`. */
    ms_tensor_release(result);
    if (!status && shape->requires_grad) status = ms_tensor_set_requires_grad(made, true);
    if (status) ms_tensor_release(made);
    ms_lua_ok(L, status);
    ms_handle_fill(handle, made);
    return 1;
}

/* empty{ sizes..., options } -> tensor whose values are undefined. For tensors that are written as
 * a whole next, such as the result of a collective. */
static int empty(lua_State *L)
{
    shape_options shape;
    ms_lua_enter(L);
    read_shape(L, 1, shape_keys, MS_F32, &shape);
    return make(L, &shape, NULL, NULL);
}

/* A tensor of one value, for zeros, ones and full; its shape table is at `index`. The default dtype
 * is f32 whatever the value: full(1, ...) is no integer tensor, unless dtype says so. */
static int filled(lua_State *L, int index, double value)
{
    shape_options shape;
    ms_lua_enter(L);
    read_shape(L, index, shape_keys, MS_F32, &shape);
    ms_attributes attributes = { .scalar = { .value = value } };
    return make(L, &shape, &ms_op_fill, &attributes);
}

/* zeros{ ... }, ones{ ... } */
static int zeros(lua_State *L) { return filled(L, 1, 0); }
static int ones(lua_State *L) { return filled(L, 1, 1); }

/* full(value, { sizes..., options }). The value is a number; a tensor would have to be read by the
 * host. */
static int full(lua_State *L)
{
    double value = luaL_checknumber(L, 1);
    return filled(L, 2, value);
}

/* -------------------------------------------------------------- random ones */

/* Where the numbers come from. With `seed` they are the same wherever and whenever they are asked
 * for; without it they are the next of the engine's stream of random numbers. With `per_rank` every
 * rank gets others. Without per_rank all ranks that have made the same draws get the same numbers,
 * which is how models are equal on all ranks before the first step. */
static ms_random read_random(lua_State *L, int index)
{
    ms_random random;
    if (lua_getfield(L, index, "seed") != LUA_TNIL)
        random =
            (ms_random){ .seed = (uint64_t)ms_lua_integer(L, -1, INT64_MIN, INT64_MAX, "seed") };
    else random = ms_engine_draw(ms_lua_runtime(L)->engine);
    lua_pop(L, 1);
    if (ms_lua_field_boolean(L, index, "per_rank", false))
        random.seed = ms_seed_of_rank(random.seed, ms_lua_runtime(L)->job.rank);
    return random;
}

/* op has attributes random.a and b: the mean and the standard deviation of normal numbers, the
 * bounds of others. The check is written so that NaN is refused. */
static int random_tensor(lua_State *L, const ms_op *op, ms_dtype fallback, bool normal)
{
    shape_options shape;
    ms_lua_enter(L);
    read_shape(L, 1, random_keys, fallback, &shape);
    double low = ms_lua_field_number(L, 1, "low", 0), high = ms_lua_field_number(L, 1, "high", 1),
           std = ms_lua_field_number(L, 1, "std", 1);
    if (!normal && !(low < high))
        return ms_lua_error(
            L, "low = %g and high = %g: low must be below high, which is not reached", low, high);
    ms_attributes attributes = { .random = { .a = low, .b = high, .random = read_random(L, 1) } };
    /* For normal numbers the two attributes mean the mean and the deviation. */
    if (normal) {
        attributes.random.a = 0;
        attributes.random.b = std;
    }
    return make(L, &shape, op, &attributes);
}

/* rand{ sizes..., low = 0, high = 1, ... }, randn{ sizes..., std = 1, ... } */
static int uniform(lua_State *L) { return random_tensor(L, &ms_op_uniform, MS_F32, false); }
static int normal(lua_State *L) { return random_tensor(L, &ms_op_normal, MS_F32, true); }

/* randint{ sizes..., low = 0, high =, ... }: integers from low to below high. high is required: a
 * default would be as wrong as any other. */
static int randint(lua_State *L)
{
    /* Checked before the field is read, so the message is about the argument. */
    luaL_checktype(L, 1, LUA_TTABLE);
    if (lua_getfield(L, 1, "high") == LUA_TNIL)
        return ms_lua_error(L, "randint: give high, which is not reached (low is 0 unless given)");
    lua_pop(L, 1);
    return random_tensor(L, &ms_op_randint, MS_I64, false);
}

/* -------------------------------------------------------------- from values */

/* What nested lists have in common. dims is UINT32_MAX until a value, or an empty list, has been
 * seen; sizes are -1 until a list of that depth has. The flags are combined over all values, and
 * decide the dtype in the end. */
typedef struct nested {
    uint32_t dims;
    int64_t sizes[MS_DIMS_MAX];
    bool integers, booleans, numbers;
} nested;

/* All values, and all empty lists, are at the same depth. An empty list counts as a list of depth
 * + 1 without values: {{}, {}} is [2, 0]. */
static void check_depth(lua_State *L, nested *shape, uint32_t dims)
{
    if (shape->dims == UINT32_MAX) shape->dims = dims;
    if (shape->dims != dims) ms_lua_error(L, "tensor: the lists are not equally deep");
}

/* One value, `depth` lists deep. Booleans and numbers are noted apart, because a mixture is an
 * error. */
static void measure_value(lua_State *L, int index, uint32_t depth, nested *out)
{
    check_depth(L, out, depth);
    if (lua_isboolean(L, index)) {
        out->booleans = true;
        return;
    }
    if (lua_type(L, index) != LUA_TNUMBER)
        ms_lua_error(
            L, "tensor: a value is %s; numbers, booleans and nested lists of them are allowed",
            luaL_typename(L, index));
    out->numbers = true;
    /* One float among integers makes all of them floats. */
    out->integers &= lua_isinteger(L, index);
}

/* The value or nested list at `index`, `depth` lists deep. It recurses as deep as the lists, at
 * most MS_DIMS_MAX. */
static void measure(lua_State *L, int index, uint32_t depth, nested *out)
{
    index = lua_absindex(L, index);
    luaL_checkstack(L, 4, "nested lists");
    if (!lua_istable(L, index)) {
        measure_value(L, index, depth, out);
        return;
    }
    if (depth >= MS_DIMS_MAX)
        ms_lua_error(L, "tensor: lists are nested more than %d deep", MS_DIMS_MAX);
    int64_t n = (int64_t)lua_rawlen(L, index);
    /* The first list of a depth sets its size, and all others are compared with it. */
    if (out->sizes[depth] < 0) out->sizes[depth] = n;
    if (out->sizes[depth] != n)
        ms_lua_error(
            L, "tensor: lists of dimension %u have %lld and %lld items; they must be equally long",
            depth + 1, (long long)out->sizes[depth], (long long)n);
    if (n == 0) check_depth(L, out, depth + 1);
    for (int64_t i = 1; i <= n; i++) {
        lua_rawgeti(L, index, i);
        measure(L, -1, depth + 1, out);
        lua_pop(L, 1);
    }
}

/* Element `at` of data, which has this dtype. Floats and booleans take `number`, integers
 * `integer`. f16 and bf16 round once, to nearest even. */
static void store(ms_dtype dtype, void *data, int64_t at, double number, int64_t integer)
{
    switch (dtype) {
    case MS_F32: ((float *)data)[at] = (float)number; break;
    case MS_F16: ((uint16_t *)data)[at] = ms_f16_from_float((float)number); break;
    case MS_BF16: ((uint16_t *)data)[at] = ms_bf16_from_float((float)number); break;
    case MS_I64: ((int64_t *)data)[at] = integer; break;
    case MS_I32: ((int32_t *)data)[at] = (int32_t)integer; break;
    case MS_U16: ((uint16_t *)data)[at] = (uint16_t)integer; break;
    case MS_U8: ((uint8_t *)data)[at] = (uint8_t)integer; break;
    default: ((uint8_t *)data)[at] = number != 0; break;
    }
}

/* Whether an integer is one of this dtype; floats take every one, rounded. Without it, 300 as u8
 * would become 44 without an error. */
static bool fits(ms_dtype dtype, int64_t value)
{
    switch (dtype) {
    case MS_I32: return value >= INT32_MIN && value <= INT32_MAX;
    case MS_U16: return value >= 0 && value <= UINT16_MAX;
    case MS_U8: return value >= 0 && value <= UINT8_MAX;
    default: return true;
    }
}

/* One number or boolean of a list; a number that the dtype cannot hold is an error. A float dtype
 * takes every number, rounded; bool takes every number as "not 0". */
static void store_value(lua_State *L, int index, ms_dtype dtype, void *data, int64_t at)
{
    if (lua_isboolean(L, index)) {
        store(dtype, data, at, lua_toboolean(L, index), lua_toboolean(L, index));
        return;
    }
    /* 2.0 counts as an integer, as in Lua. */
    int exact = 0;
    int64_t integer = lua_tointegerx(L, index, &exact);
    if (!exact && !ms_dtype_is_float(dtype) && dtype != MS_BOOL)
        ms_lua_error(L, "tensor: %g is not an integer, but the dtype is %s", lua_tonumber(L, index),
                     ms_dtype_name(dtype));
    if (exact && !fits(dtype, integer))
        ms_lua_error(L, "tensor: %lld does not fit into %s", (long long)integer,
                     ms_dtype_name(dtype));
    store(dtype, data, at, lua_tonumber(L, index), integer);
}

/* Stores the values of nested lists in row-major order from position `at` on; the next position.
 * measure has checked lengths and depth, so the list is not checked again. */
static int64_t collect_values(lua_State *L, int index, ms_dtype dtype, void *data, int64_t at)
{
    index = lua_absindex(L, index);
    if (!lua_istable(L, index)) {
        store_value(L, index, dtype, data, at);
        return at + 1;
    }
    int64_t n = (int64_t)lua_rawlen(L, index);
    for (int64_t i = 1; i <= n; i++) {
        lua_rawgeti(L, index, i);
        at = collect_values(L, -1, dtype, data, at);
        lua_pop(L, 1);
    }
    return at;
}

/* Pushes a new tensor with these values, in row-major order. ms_tensor_write copies `data` before
 * it returns. */
static int push_values(lua_State *L, ms_dtype dtype, uint32_t dims, const int64_t *sizes,
                       const void *data)
{
    ms_handle *handle = ms_lua_new_handle(L);
    ms_tensor *made = NULL;
    ms_status status = ms_tensor_new(ms_lua_runtime(L)->engine, dtype, dims, sizes, &made);
    if (!status && ms_tensor_count(made))
        status = ms_tensor_write(made, data, ms_tensor_bytes(made));
    if (status) ms_tensor_release(made);
    ms_lua_ok(L, status);
    ms_handle_fill(handle, made);
    return 1;
}

/* core.tensor(values, dtype?): integers become i64, other numbers f32, unless dtype says otherwise.
 * Two walks over the lists: the first finds shape and dtype, the second stores, so no memory is
 * moved. */
static int tensor(lua_State *L)
{
    ms_lua_enter(L);
    nested shape = { .dims = UINT32_MAX, .integers = true };
    /* -1: no list of that depth was seen yet. */
    for (int d = 0; d < MS_DIMS_MAX; d++) shape.sizes[d] = -1;
    luaL_checkany(L, 1);
    measure(L, 1, 0, &shape);
    if (shape.booleans && shape.numbers)
        return ms_lua_error(L, "tensor: numbers and booleans are mixed");
    /* No value at all (empty lists) gives f32. */
    ms_dtype dtype = shape.numbers && shape.integers ? MS_I64 : MS_F32;
    if (shape.booleans) dtype = MS_BOOL;
    if (!lua_isnoneornil(L, 2)) dtype = ms_lua_dtype(L, 2);
    int64_t count = 1;
    /* The sizes are those of lists that exist, so the product cannot overflow. */
    for (uint32_t d = 0; d < shape.dims; d++) count *= shape.sizes[d];
    /* In a userdata, since a value that does not fit the dtype raises below. */
    void *data = lua_newuserdatauv(L, (size_t)count * ms_dtype_bytes(dtype) + 1, 0);
    collect_values(L, 1, dtype, data, 0);
    return push_values(L, dtype, shape.dims, shape.sizes, data);
}

/* How many integers first, first + step, ... there are up to last, step not 0; INT64_MAX if more
 * than that. Differences of integers need 65 bits. Unsigned arithmetic gives the span exactly, also
 * from INT64_MIN to INT64_MAX. */
static int64_t count_integers(int64_t first, int64_t last, int64_t step)
{
    bool up = step > 0;
    if (up ? last < first : last > first) return 0;
    uint64_t span = (uint64_t)last - (uint64_t)first, stride = (uint64_t)step;
    if (!up) {
        span = 0 - span;
        stride = 0 - stride;
    }
    /* A step of 0 was refused before; the test is for readers of this function alone. */
    uint64_t steps = stride ? span / stride : 0;
    return steps < INT64_MAX ? (int64_t)steps + 1 : INT64_MAX;
}

/* The arguments of arange(first, last, step?). Floats and integers have separate steps because
 * doubles cannot hold all 64-bit integers. */
typedef struct range {
    double first, last, step;
    bool integers;
    int64_t stride; /* step, of integers */
    int64_t count;
} range;

/* Reads and checks first, last, step? at 1 to 3. Integers are counted as integers, because doubles
 * lose them above 2^53. last is part of the result if a step meets it: arange counts as Lua's
 * numeric for does. */
static range read_range(lua_State *L)
{
    enum { LONGEST = 1000000000 };
    range r = { .first = luaL_checknumber(L, 1),
                .last = luaL_checknumber(L, 2),
                .step = luaL_optnumber(L, 3, 1) };
    if (r.step == 0 || !isfinite(r.first) || !isfinite(r.last) || !isfinite(r.step))
        ms_lua_error(L, "arange(%g, %g, %g): numbers must be finite and the step not 0", r.first,
                     r.last, r.step);
    bool integers = lua_isinteger(L, 1) && lua_isinteger(L, 2);
    r.integers = integers && (lua_isnil(L, 3) || lua_isinteger(L, 3));
    if (r.integers) {
        r.stride = luaL_optinteger(L, 3, 1);
        r.count = count_integers(lua_tointeger(L, 1), lua_tointeger(L, 2), r.stride);
    } else {
        /* Rounding may put the last number just above `last`: it still counts. */
        double steps = floor((r.last - r.first) / r.step + 1e-9);
        /* Beyond the limit the cast could overflow. */
        if (!(steps < 0)) r.count = steps < LONGEST ? (int64_t)steps + 1 : INT64_MAX;
    }
    if (r.count > LONGEST)
        ms_lua_error(L, "arange(%g, %g, %g): more than %d elements are too many", r.first, r.last,
                     r.step, LONGEST);
    return r;
}

/* core.arange(first, last, step?). i64 if all arguments are integers, else f32. Each number is
 * computed from its index and not from the one before, so errors do not add up. */
static int arange(lua_State *L)
{
    ms_lua_enter(L);
    lua_settop(L, 3);
    range r = read_range(L);
    /* 8 bytes are enough for either dtype; one more gives an empty range an address. */
    void *data = lua_newuserdatauv(L, (size_t)r.count * 8 + 1, 0);
    for (int64_t i = 0; i < r.count; i++) {
        if (r.integers) ((int64_t *)data)[i] = lua_tointeger(L, 1) + i * r.stride;
        else ((float *)data)[i] = (float)(r.first + (double)i * r.step);
    }
    return push_values(L, r.integers ? MS_I64 : MS_F32, 1, &r.count, data);
}

/* ------------------------------------------------------------------ joining */

/* core.cat(list, dim?), core.stack(list, dim?); the result has `extra` more dimensions than the
 * tensors. A dimension of a stack may be the place after the last one, hence `extra`. */
static int join(lua_State *L, const ms_op *op, uint32_t extra)
{
    ms_engine *engine = ms_lua_enter(L);
    uint32_t count = 0;
    lua_settop(L, 2);
    ms_tensor **tensors = ms_lua_tensor_list(L, 1, &count);
    ms_attributes attributes = { 0 };
    if (!lua_isnoneornil(L, 2))
        /* The first tensor says how many dimensions there are; the operator compares the others
         * with it. */
        attributes.dim.a = ms_lua_dim(L, 2, ms_tensor_dims(tensors[0]) + extra);
    ms_handle *handle = ms_lua_new_handle(L);
    ms_tensor *out = NULL;
    ms_lua_ok(L, ms_apply(engine, op, &attributes, false, tensors, count, &out, 1));
    ms_handle_fill(handle, out);
    return 1;
}

/* cat(list, dim = 1), stack(list, dim = 1) */
static int cat(lua_State *L) { return join(L, &ms_op_cat, 0); }
static int stack(lua_State *L) { return join(L, &ms_op_stack, 1); }

/* pack(list) -> one 1-D tensor with all values, list of views of it in the original shapes. Handles
 * are made first, so that nothing can raise once the tensors exist. Both results have gradients;
 * the originals stay where they are. flat moves them instead. */
static int pack(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    uint32_t count = 0;
    ms_tensor **tensors = ms_lua_tensor_list(L, 1, &count), *made = NULL;
    ms_tensor **parts = lua_newuserdatauv(L, (count + 1) * sizeof *parts, 0);
    ms_handle *whole = ms_lua_new_handle(L);
    /* The list of parts, with a handle for each, before anything is made. */
    lua_createtable(L, (int)count, 0);
    for (uint32_t i = 0; i < count; i++) {
        ms_lua_new_handle(L);
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    ms_lua_ok(L, ms_pack(engine, tensors, count, &made, parts));
    ms_handle_fill(whole, made);
    for (uint32_t i = 0; i < count; i++) {
        lua_rawgeti(L, -1, (lua_Integer)i + 1);
        ms_handle_fill(lua_touserdata(L, -1), parts[i]);
        lua_pop(L, 1);
    }
    return 2;
}

/* flat(list) -> one tensor into which the parameters have moved, and which is kept. Refused inside
 * steps and hooks. In a step, tensors that backward still needs would keep the old memory. The
 * handles of the parameters stay valid: their tensors have moved. */
static int flat(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    uint32_t count = 0;
    ms_lua_refuse_in_hook(L, "flat", "make parameters flat before training");
    if (ms_lua_runtime(L)->steps.serial)
        return ms_lua_error(L, "flat: inside a step; make parameters flat before training");
    ms_tensor **leaves = ms_lua_tensor_list(L, 1, &count), *made = NULL;
    ms_handle *handle = ms_lua_new_handle(L);
    ms_lua_ok(L, ms_flatten(engine, leaves, count, &made));
    ms_handle_fill(handle, made);
    ms_handle_keep(handle);
    return 1;
}

/* The names of the module's functions; ms.tensor and its like are these, with annotations in
 * meta.lua. */
static const luaL_Reg functions[] = {
    { "empty", empty },   { "zeros", zeros },  { "ones", ones },       { "full", full },
    { "rand", uniform },  { "randn", normal }, { "randint", randint }, { "tensor", tensor },
    { "arange", arange }, { "cat", cat },      { "stack", stack },     { "pack", pack },
    { "flat", flat },     { NULL, NULL },
};

void ms_open_make(lua_State *L, int runtime) { ms_lua_register(L, runtime, functions); }
