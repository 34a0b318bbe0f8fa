/* views.c: copies, conversions and views as methods of tensors. */
#include "bindings/views.h"

#include <math.h>
#include <string.h>

#include "bindings/arguments.h"
#include "bindings/call.h"
#include "bindings/enter.h"
#include "bindings/handles.h"
#include "bindings/script.h"

/* A new tensor of the shape of t: t:empty_like(dtype?), t:zeros_like(dtype?), t:ones_like(dtype?).
 * It is contiguous whatever the strides of t are, has no gradient history, and belongs to the
 * current step like any tensor. The handle is made before the tensor, since making it may raise. */
static int like(lua_State *L, double value, bool fill)
{
    ms_engine *engine = ms_lua_enter(L);
    const ms_tensor *t = ms_lua_tensor(L, 1);
    ms_dtype dtype = lua_isnoneornil(L, 2) ? ms_tensor_dtype(t) : ms_lua_dtype(L, 2);
    ms_handle *handle = ms_lua_new_handle(L);
    ms_tensor *made = NULL;
    if (fill)
        ms_lua_ok(
            L, ms_lua_filled(engine, dtype, ms_tensor_dims(t), ms_tensor_shape(t), value, &made));
    else ms_lua_ok(L, ms_tensor_new(engine, dtype, ms_tensor_dims(t), ms_tensor_shape(t), &made));
    ms_handle_fill(handle, made);
    return 1;
}

/* The contents of empty_like are undefined: no task is enqueued for them. */
static int empty_like(lua_State *L) { return like(L, 0, false); }
static int zeros_like(lua_State *L) { return like(L, 0, true); }
static int ones_like(lua_State *L) { return like(L, 1, true); }

/* t:copy_(source) -> t. The source is cast to t's dtype and broadcast to its shape. The write is
 * recorded, so that a gradient of t goes on to the source. */
static int copy_(lua_State *L)
{
    ms_lua_enter(L);
    ms_tensor *inputs[] = { ms_lua_tensor(L, 1), ms_lua_tensor(L, 2) };
    return ms_lua_apply(L, &ms_op_copy, NULL, true, inputs, 2);
}

/* t:fill_(value) -> t, with value a number or a tensor of one element, which the host does not
 * read. Each method that writes in place returns t itself, the handle at index 1, so that calls can
 * be chained without a second handle of the same tensor. */
static int fill_(lua_State *L)
{
    ms_lua_enter(L);
    ms_tensor *inputs[] = { ms_lua_tensor(L, 1),
                            ms_lua_is_tensor(L, 2) ? ms_lua_tensor(L, 2) : NULL };
    ms_attributes attributes = { .scalar = { .value =
                                                 inputs[1] ? 0 : ms_lua_number(L, 2, "fill_") } };
    return ms_lua_apply(L, &ms_op_fill, &attributes, true, inputs, inputs[1] ? 2 : 1);
}

/* t:zero_() -> t. The same operator as fill_: attributes of zeros are the value 0. */
static int zero_(lua_State *L)
{
    ms_lua_enter(L);
    return ms_lua_apply_one(L, &ms_op_fill, &(ms_attributes){ 0 }, true);
}

/* A tensor on "meta" of the shape and dtype of t. The engine's setting is put back before an error
 * is raised: it would otherwise hold for all tensors that the script makes afterwards. */
static int to_meta(lua_State *L, ms_tensor *t)
{
    ms_engine *engine = ms_lua_runtime(L)->engine;
    ms_handle *handle = ms_lua_new_handle(L);
    ms_tensor *made = NULL;
    bool before = ms_engine_set_meta(engine, true);
    ms_status status =
        ms_tensor_new(engine, ms_tensor_dtype(t), ms_tensor_dims(t), ms_tensor_shape(t), &made);
    ms_engine_set_meta(engine, before);
    ms_lua_ok(L, status);
    ms_handle_fill(handle, made);
    return 1;
}

/* An engine has one device of its own, so a tensor goes to "meta" or stays where it is. "cpu" is
 * accepted on every device, since recipes say it of tensors that they read on the host. From "meta"
 * there is no way back: such a tensor has no values, and one with undefined contents would hide the
 * mistake. */
static int to_device(lua_State *L, ms_tensor *t, const char *device)
{
    const char *own = ms_engine_device(ms_lua_runtime(L)->engine);
    const char *names[] = { "f32", "f16",  "bf16", "i64",  "i32", "u16",
                            "u8",  "bool", "cpu",  "meta", NULL,  NULL };
    if (strcmp(own, "cpu") != 0) names[sizeof names / sizeof *names - 2] = own;
    if (strcmp(device, "meta") == 0) {
        if (!ms_tensor_is_meta(t)) return to_meta(L, t);
    } else {
        if (strcmp(device, "cuda") == 0 && strcmp(own, "cuda") != 0)
            return ms_lua_error(L, "to: device 'cuda': this engine runs on '%s'", own);
        if (strcmp(device, own) != 0 && strcmp(device, "cpu") != 0)
            /* It raises in any case here; the names are for its message. */
            ms_lua_choice(L, 2, names, "dtype or device");
        if (ms_tensor_is_meta(t))
            return ms_lua_error(L, "to: this tensor is on \"meta\" and has no values to copy");
    }
    lua_settop(L, 1);
    return 1;
}

/* t:to(dtype) or t:to(device) -> tensor; t itself if it is that already, so that a cast that is not
 * needed costs nothing. */
static int to(lua_State *L)
{
    ms_lua_enter(L);
    ms_tensor *t = ms_lua_tensor(L, 1);
    ms_dtype dtype;
    const char *what = luaL_checkstring(L, 2);
    if (!ms_dtype_find(what, &dtype)) return to_device(L, t, what);
    if (dtype == ms_tensor_dtype(t)) {
        lua_settop(L, 1);
        return 1;
    }
    ms_attributes attributes = { .cast = { .dtype = dtype } };
    return ms_lua_apply_one(L, &ms_op_cast, &attributes, false);
}

/* t:contiguous() -> t itself if it is dense, else a copy. Kernels take strided tensors; a dense
 * copy pays where the same tensor is read several times, or where bytes are sent. */
static int contiguous(lua_State *L)
{
    ms_lua_enter(L);
    if (ms_tensor_is_contiguous(ms_lua_tensor(L, 1))) {
        lua_settop(L, 1);
        return 1;
    }
    return ms_lua_apply_one(L, &ms_op_clone, NULL, false);
}

/* t:view(sizes), t:reshape(sizes), t:expand(sizes): sizes as a list or as arguments. The operator
 * is the closure's: the three differ in what they allow. view refuses where a copy would be needed,
 * reshape copies then, expand repeats without memory (stride 0). -1 is let through by ms_lua_sizes;
 * each operator gives it a meaning of its own. */
static int with_shape(lua_State *L)
{
    ms_lua_enter(L);
    ms_lua_tensor(L, 1);
    ms_attributes attributes = { 0 };
    attributes.shape.dims = ms_lua_sizes(L, 2, attributes.shape.sizes, "a size");
    return ms_lua_apply_one(L, ms_lua_own_op(L), &attributes, false);
}

/* t:permute(dims...) -> a view. All dimensions must be named, from 1; whether one is named twice is
 * checked by the operator, which C callers use as well. */
static int permute(lua_State *L)
{
    ms_lua_enter(L);
    const ms_tensor *t = ms_lua_tensor(L, 1);
    ms_attributes attributes = { 0 };
    /* Arguments only: a list would be taken for one dimension and raise. */
    int count = lua_gettop(L) - 1;
    if (count != (int)ms_tensor_dims(t)) ms_lua_need_whole(L);
    if (count != (int)ms_tensor_dims(t))
        return ms_lua_error(L, "permute: %d dimensions are given for a tensor with %u", count,
                            ms_tensor_dims(t));
    attributes.shape.dims = (uint32_t)count;
    for (int i = 0; i < count; i++)
        attributes.shape.sizes[i] = ms_lua_dim(L, i + 2, ms_tensor_dims(t));
    return ms_lua_apply_one(L, &ms_op_permute, &attributes, false);
}

/* The shape of a tensor whose dimensions first .. last (from 0) are joined into one. The dimensions
 * before and after stay; the result has last - first fewer of them. */
static void join_sizes(const ms_tensor *t, int32_t first, int32_t last, ms_attributes *out)
{
    uint32_t count = 0;
    int64_t joined = 1;
    for (int32_t d = 0; d < (int32_t)ms_tensor_dims(t); d++) {
        int64_t size = ms_tensor_shape(t)[d];
        /* Overflows only beside a size of 0. */
        if (d >= first && d <= last) joined = (int64_t)((uint64_t)joined * (uint64_t)size);
        if (d == last) out->shape.sizes[count++] = joined;
        else if (d < first || d > last) out->shape.sizes[count++] = size;
    }
    out->shape.dims = count;
}

/* t:flatten(first?, last?): joins these dimensions; a scalar becomes a list of one. It is a
 * reshape, so it is a view where the strides allow it and a copy elsewhere. */
static int flatten(lua_State *L)
{
    ms_lua_enter(L);
    const ms_tensor *t = ms_lua_tensor(L, 1);
    uint32_t dims = ms_tensor_dims(t);
    /* What a scalar becomes. */
    ms_attributes attributes = { .shape = { .dims = 1, .sizes = { 1 } } };
    if (dims > 0) {
        int32_t first = lua_isnoneornil(L, 2) ? 0 : ms_lua_dim(L, 2, dims);
        int32_t last = lua_isnoneornil(L, 3) ? (int32_t)dims - 1 : ms_lua_dim(L, 3, dims);
        if (first > last)
            return ms_lua_error(L, "flatten: dimension %d comes after %d", first + 1, last + 1);
        join_sizes(t, first, last, &attributes);
    }
    return ms_lua_apply_one(L, &ms_op_reshape, &attributes, false);
}

/* t:narrow(dim, start, length) -> a view; start counts from 1. length 0 is allowed, and with it a
 * start just past the end: loops over pieces need no special case for an empty last one. */
static int narrow(lua_State *L)
{
    ms_lua_enter(L);
    const ms_tensor *t = ms_lua_tensor(L, 1);
    ms_attributes attributes = { .dim = { .a = ms_lua_dim(L, 2, ms_tensor_dims(t)) } };
    int64_t size = ms_tensor_shape(t)[attributes.dim.a];
    attributes.dim.start = ms_lua_integer(L, 3, 1, size + 1, "start") - 1;
    attributes.dim.length = ms_lua_integer(L, 4, 0, size - attributes.dim.start, "length");
    return ms_lua_apply_one(L, &ms_op_narrow, &attributes, false);
}

/* t:select(dim, index): index from 1, or from -1 at the end. t[i] comes here, too. The message
 * names both ways to count, because an index that comes from a tensor counts from 0 and is the
 * usual mistake. */
static int select_index(lua_State *L)
{
    ms_lua_enter(L);
    const ms_tensor *t = ms_lua_tensor(L, 1);
    ms_attributes attributes = { .dim = { .a = ms_lua_dim(L, 2, ms_tensor_dims(t)) } };
    int64_t size = ms_tensor_shape(t)[attributes.dim.a],
            index = ms_lua_integer(L, 3, INT64_MIN, INT64_MAX, "an index");
    if (index == 0 || index > size || index < -size) ms_lua_need_whole(L);
    if (index == 0 || index > size || index < -size)
        return ms_lua_error(
            L, "index %lld of a dimension of size %lld: they count from 1, or from -1 at the end",
            (long long)index, (long long)size);
    attributes.dim.start = index > 0 ? index - 1 : index + size;
    return ms_lua_apply_one(L, &ms_op_select, &attributes, false);
}

/* t:transpose(a, b) -> a view with these two dimensions swapped; a and b may be equal. */
static int two_dims(lua_State *L)
{
    ms_lua_enter(L);
    const ms_tensor *t = ms_lua_tensor(L, 1);
    ms_attributes attributes = { .dim = { .a = ms_lua_dim(L, 2, ms_tensor_dims(t)),
                                          .b = ms_lua_dim(L, 3, ms_tensor_dims(t)) } };
    return ms_lua_apply_one(L, &ms_op_transpose, &attributes, false);
}

/* t:t() -> a view with the last two dimensions swapped. They are the last two and not the first, so
 * that it works on batches of matrices. */
static int t_(lua_State *L)
{
    ms_lua_enter(L);
    uint32_t dims = ms_tensor_dims(ms_lua_tensor(L, 1));
    if (dims < 2)
        return ms_lua_error(L, "t: the tensor has %u dimensions; two or more are needed", dims);
    ms_attributes attributes = { .dim = { .a = (int32_t)dims - 2, .b = (int32_t)dims - 1 } };
    return ms_lua_apply_one(L, &ms_op_transpose, &attributes, false);
}

/* t:squeeze(dim) -> a view without that dimension, whose size must be 1. There is no form without
 * dim: it would drop a batch dimension that happens to be 1, and code that works for every other
 * batch would fail. */
static int squeeze(lua_State *L)
{
    ms_lua_enter(L);
    ms_attributes attributes = { .dim = {
                                     .a = ms_lua_dim(L, 2, ms_tensor_dims(ms_lua_tensor(L, 1))) } };
    return ms_lua_apply_one(L, &ms_op_squeeze, &attributes, false);
}

/* t:unsqueeze(dim) -> a view with a dimension of size 1 more. dim is the place of the new one in
 * the result, so it may be one beyond those of t: -1 puts it last. */
static int unsqueeze(lua_State *L)
{
    ms_lua_enter(L);
    ms_attributes attributes = { .dim = { .a = ms_lua_dim(
                                              L, 2, ms_tensor_dims(ms_lua_tensor(L, 1)) + 1) } };
    return ms_lua_apply_one(L, &ms_op_unsqueeze, &attributes, false);
}

/* Room for so many sizes of parts, in a userdata on the stack. The limit keeps a mistaken size of a
 * part (1, of a long dimension) from making a hundred thousand handles and views. A userdata,
 * because what follows may raise. */
static int64_t *new_sizes(lua_State *L, int64_t count)
{
    if (count > 100000) ms_lua_error(L, "split: %lld parts are too many", (long long)count);
    return lua_newuserdatauv(L, (size_t)(count + 1) * sizeof(int64_t), 0);
}

/* The sizes of the list at index 2, which must be `size` together. The sum is checked before each
 * addition: sizes near 2^63 would wrap and could add up to `size` by accident. */
static int64_t *listed_sizes(lua_State *L, int64_t size, int32_t dim, int64_t *count)
{
    int64_t sum = 0;
    *count = (int64_t)lua_rawlen(L, 2);
    int64_t *sizes = new_sizes(L, *count);
    for (int64_t i = 0; i < *count; i++) {
        lua_rawgeti(L, 2, i + 1);
        sizes[i] = ms_lua_integer(L, -1, 0, INT64_MAX, "the size of a part");
        lua_pop(L, 1);
        if (sizes[i] > INT64_MAX - sum)
            ms_lua_error(L, "split: part %lld has %lld, which is beyond dimension %d",
                         (long long)i + 1, (long long)sizes[i], dim + 1);
        sum += sizes[i];
    }
    if (sum != size)
        ms_lua_error(L, "split: the parts have %lld in all, dimension %d has %lld", (long long)sum,
                     dim + 1, (long long)size);
    return sizes;
}

/* Sizes of the parts that split's second argument asks for: a list of sizes, or the size of all but
 * the last part. In a userdata on the stack. The last part has what is left, so it may be smaller.
 */
static int64_t *part_sizes(lua_State *L, int64_t size, int32_t dim, int64_t *count)
{
    if (lua_istable(L, 2)) return listed_sizes(L, size, dim, count);
    int64_t each = ms_lua_integer(L, 2, 1, INT64_MAX, "the size of a part");
    /* Rounded up without an overflow for sizes near 2^63. */
    *count = size ? (size - 1) / each + 1 : 0;
    int64_t *sizes = new_sizes(L, *count);
    for (int64_t i = 0; i < *count; i++) sizes[i] = size - i * each < each ? size - i * each : each;
    return sizes;
}

/* Splits along dim into parts of these sizes; pushes the list. All handles exist before the engine
 * runs, so nothing can raise once there are outputs. One operator makes all views, so that backward
 * assembles the gradient of t once; with a narrow for each part it would add up as many tensors of
 * t's size. */
static int split_into(lua_State *L, const int64_t *sizes, uint32_t count, int32_t dim)
{
    ms_engine *engine = ms_lua_runtime(L)->engine;
    ms_tensor *t = ms_lua_tensor(L, 1);
    ms_attributes attributes = { .split = { .sizes = sizes, .count = count, .dim = dim } };
    /* One byte more, since there may be no part at all. */
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

/* t:split(size or list of sizes, dim = 1) -> list of views. The views share t's memory: writing one
 * of them changes t. */
static int split(lua_State *L)
{
    ms_lua_enter(L);
    const ms_tensor *t = ms_lua_tensor(L, 1);
    int32_t dim = lua_isnoneornil(L, 3) ? 0 : ms_lua_dim(L, 3, ms_tensor_dims(t));
    if (ms_tensor_dims(t) == 0) return ms_lua_error(L, "split: a scalar has no dimension to split");
    int64_t count = 0;
    const int64_t *sizes = part_sizes(L, ms_tensor_shape(t)[dim], dim, &count);
    return split_into(L, sizes, (uint32_t)count, dim);
}

/* t:chunk(count, dim = 1) -> list of at most `count` views. There may be fewer than `count` parts
 * (5 elements in 4 chunks are 2, 2, 1), as in PyTorch. An empty dimension gives one empty part, so
 * that a caller can rely on a first one. */
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
    for (int64_t at = 0; at < size; at += each)
        sizes[parts++] = size - at < each ? size - at : each;
    if (parts == 0) sizes[parts++] = 0;
    return split_into(L, sizes, (uint32_t)parts, dim);
}

/* t:pad_to(multiple) -> t of one dimension with zeros at the end up to a multiple; t itself if it
 * has that length. Collectives need it: reduce_scatter and all_to_all take tensors whose length
 * divides by the number of ranks. It refuses more dimensions, where the place of the zeros would
 * not be obvious. */
static int pad_to(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    ms_tensor *t = ms_lua_tensor(L, 1);
    int64_t multiple = ms_lua_integer(L, 2, 1, INT64_MAX / 2, "the multiple"),
            count = ms_tensor_count(t);
    if (ms_tensor_dims(t) != 1)
        return ms_lua_error(L, "pad_to: the tensor has %u dimensions; flatten it first",
                            ms_tensor_dims(t));
    /* 0 where the length fits already. */
    int64_t rest = (multiple - count % multiple) % multiple;
    if (rest == 0) {
        lua_settop(L, 1);
        return 1;
    }
    ms_handle *handle = ms_lua_new_handle(L);
    ms_tensor *zeros = NULL, *out = NULL;
    ms_status status = ms_lua_filled(engine, ms_tensor_dtype(t), 1, &rest, 0, &zeros);
    if (!status) {
        /* cat along the only dimension; it is recorded, so gradients go back to t. */
        ms_tensor *inputs[] = { t, zeros };
        status = ms_apply(engine, &ms_op_cat, &(ms_attributes){ 0 }, false, inputs, 2, &out, 1);
    }
    /* The tape or the enqueued task keeps what it needs; the host's reference to the zeros ends
     * here in any case. */
    ms_tensor_release(zeros);
    ms_lua_ok(L, status);
    ms_handle_fill(handle, out);
    return 1;
}

/* ------------------------------------------------------------------ opening */

/* None has a twin in place: views write nothing, and copy_, fill_ and zero_ have the name of one
 * already. */
static const ms_method methods[] = {
    { "contiguous", contiguous, NULL, false },
    { "to", to, NULL, false },
    { "empty_like", empty_like, NULL, false },
    { "zeros_like", zeros_like, NULL, false },
    { "ones_like", ones_like, NULL, false },
    { "copy_", copy_, NULL, false },
    { "fill_", fill_, NULL, false },
    { "zero_", zero_, NULL, false },
    { "view", with_shape, &ms_op_view, false },
    { "reshape", with_shape, &ms_op_reshape, false },
    { "expand", with_shape, &ms_op_expand, false },
    { "flatten", flatten, NULL, false },
    { "narrow", narrow, NULL, false },
    { "select", select_index, NULL, false },
    { "split", split, NULL, false },
    { "chunk", chunk, NULL, false },
    { "transpose", two_dims, NULL, false },
    { "t", t_, NULL, false },
    { "permute", permute, NULL, false },
    { "squeeze", squeeze, NULL, false },
    { "unsqueeze", unsqueeze, NULL, false },
    { "pad_to", pad_to, NULL, false },
};

/* The table of tensor methods is on top of the stack. */
void ms_open_views(lua_State *L, int runtime)
{
    ms_lua_add_tensor_methods(L, runtime, methods, sizeof methods / sizeof *methods);
}
