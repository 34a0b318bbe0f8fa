/* tensor.c: the tensor handle: what it is, its values, and Lua's own operators on it. */
#include "bindings/tensor.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bindings/arguments.h"
#include "bindings/call.h"
#include "bindings/enter.h"
#include "bindings/handles.h"
#include "bindings/runtime.h"
#include "bindings/script.h"

/* --------------------------------------------------------------- what it is */

/* t:shape() -> list of sizes. A fresh table in each call: a script may change it, and no tensor has
 * its shape there. */
static int shape(lua_State *L)
{
    const ms_tensor *t = ms_lua_tensor(L, 1);
    lua_createtable(L, (int)ms_tensor_dims(t), 0);
    for (uint32_t d = 0; d < ms_tensor_dims(t); d++) {
        lua_pushinteger(L, ms_tensor_shape(t)[d]);
        lua_rawseti(L, -2, (lua_Integer)d + 1);
    }
    return 1;
}

/* t:size(dim) -> size of one dimension. dim counts from 1, or from -1 at the end. */
static int size(lua_State *L)
{
    const ms_tensor *t = ms_lua_tensor(L, 1);
    lua_pushinteger(L, ms_tensor_shape(t)[ms_lua_dim(L, 2, ms_tensor_dims(t))]);
    return 1;
}

/* t:dim() -> number of dimensions; t:numel() -> number of elements; t:dtype() -> its name;
 * t:is_contiguous(). None of these looks at values, so none waits, and hooks may call them. */
static int dim(lua_State *L)
{
    lua_pushinteger(L, ms_tensor_dims(ms_lua_tensor(L, 1)));
    return 1;
}
static int numel(lua_State *L)
{
    lua_pushinteger(L, ms_tensor_count(ms_lua_tensor(L, 1)));
    return 1;
}
static int dtype(lua_State *L)
{
    lua_pushstring(L, ms_dtype_name(ms_tensor_dtype(ms_lua_tensor(L, 1))));
    return 1;
}
static int is_contiguous(lua_State *L)
{
    lua_pushboolean(L, ms_tensor_is_contiguous(ms_lua_tensor(L, 1)));
    return 1;
}

/* t:device() -> "meta", or the name of the engine's device. The name is the engine's own even where
 * a recipe has said "cpu" and is simulated. */
static int device(lua_State *L)
{
    bool meta = ms_tensor_is_meta(ms_lua_tensor(L, 1));
    lua_pushstring(L, meta ? "meta" : ms_engine_device(ms_lua_runtime(L)->engine));
    return 1;
}

/* #t -> size of the first dimension; raises for a scalar. With t[i] it lets a script loop over the
 * first dimension as over a list. */
static int length(lua_State *L)
{
    const ms_tensor *t = ms_lua_tensor(L, 1);
    if (ms_tensor_dims(t) == 0) return ms_lua_error(L, "#: a scalar has no first dimension");
    lua_pushinteger(L, ms_tensor_shape(t)[0]);
    return 1;
}

/* tostring(t) -> dtype and shape, never values: print() in a hook, or a debugger that shows all
 * locals, must not wait for the device. A released tensor has a text too, because error messages
 * are made of it. */
static int to_string(lua_State *L)
{
    const ms_handle *handle = luaL_checkudata(L, 1, MS_TENSOR_TYPE);
    char text[200];
    if (handle->tensor)
        lua_pushfstring(L, "tensor %s", ms_tensor_describe(handle->tensor, text, sizeof text));
    else lua_pushliteral(L, "tensor (released)");
    return 1;
}

/* t:keep() -> t, which outlives the end of its step. For what the script itself carries from step
 * to step. It costs nothing: the handle leaves the list that the step's end walks through. */
static int keep(lua_State *L)
{
    ms_handle_keep(ms_lua_handle(L, 1));
    lua_settop(L, 1);
    return 1;
}

/* core.tidy(f, ...) -> what f returns. Tensors that f has made and does not return are released at
 * once, and not with their step: what operators that are made of others need on the way. f is a
 * function of the library, which stores none of them. Results that f has made get new handles. */
static int tidy(lua_State *L)
{
    ms_runtime *runtime = ms_lua_runtime(L);
    uint64_t begin = ms_handle_count(runtime);
    lua_call(L, lua_gettop(L) - 1, LUA_MULTRET);
    int results = lua_gettop(L);
    uint64_t end = ms_handle_count(runtime);
    luaL_checkstack(L, 4, "tidy");
    for (int i = 1; i <= results; i++) {
        if (!ms_lua_is_tensor(L, i) || ms_lua_handle(L, i)->order <= begin) continue;
        ms_handle *handle = ms_lua_new_handle(L);
        ms_handle_fill(handle, ms_tensor_retain(ms_lua_tensor(L, i)));
        lua_replace(L, i);
    }
    ms_handles_drop(runtime, begin, end, "was released at the end of the operator that made it");
    return results;
}

/* core.release(...): tensors of handles that no script has are released now, and not with their
 * step. nil is passed over, and a tensor that is kept stays. */
static int release(lua_State *L)
{
    int count = lua_gettop(L);
    for (int i = 1; i <= count; i++) {
        if (lua_isnil(L, i)) continue;
        ms_handle *handle = ms_lua_handle(L, i);
        if (!handle->kept && !handle->held)
            ms_handle_drop(handle, "was released by the model that made it, after its last use");
    }
    return 0;
}

/* core.hold(t), core.spend(t): of tensors that futures hold, see state.h. */
static int hold(lua_State *L)
{
    ms_handle_hold(ms_lua_handle(L, 1));
    return 0;
}
static int spend(lua_State *L)
{
    ms_handle_spend(ms_lua_handle(L, 1));
    return 0;
}

/* core.is_tensor(value). True also of a tensor that was released: the question is about the type,
 * and using it then raises an error that says why it is gone. */
static int is_tensor(lua_State *L)
{
    luaL_checkany(L, 1);
    lua_pushboolean(L, ms_lua_is_tensor(L, 1));
    return 1;
}

/* core.mark_parameter(t) -> t: keeps it and makes is_parameter true. The library calls it for
 * parameters of modules. The mark belongs to the handle and not to the tensor, so that a view or an
 * alias of a parameter is none. */
static int mark_parameter(lua_State *L)
{
    ms_handle *handle = ms_lua_handle(L, 1);
    ms_handle_keep(handle);
    handle->parameter = true;
    lua_settop(L, 1);
    return 1;
}

/* core.is_parameter(value) -> boolean, for values of any type */
static int is_parameter(lua_State *L)
{
    const ms_handle *handle = luaL_testudata(L, 1, MS_TENSOR_TYPE);
    lua_pushboolean(L, handle && handle->parameter);
    return 1;
}

/* core.same_memory(a, b): whether both look at the same storage. Views of one tensor do, also where
 * their elements do not overlap. No value is read. */
static int same_memory(lua_State *L)
{
    lua_pushboolean(L, ms_tensor_storage(ms_lua_tensor(L, 1))
                           == ms_tensor_storage(ms_lua_tensor(L, 2)));
    return 1;
}

/* ------------------------------------------------------------------- values */

/* Pushes element i: floats as numbers, integers as integers, bool as a boolean. f32 values become
 * doubles without loss; of i64 all are Lua integers. */
static void push_element(lua_State *L, ms_dtype type, const void *data, int64_t i)
{
    switch (type) {
    case MS_F32: lua_pushnumber(L, (double)((const float *)data)[i]); break;
    case MS_F16: lua_pushnumber(L, (double)ms_float_from_f16(((const uint16_t *)data)[i])); break;
    case MS_BF16: lua_pushnumber(L, (double)ms_float_from_bf16(((const uint16_t *)data)[i])); break;
    case MS_I64: lua_pushinteger(L, ((const int64_t *)data)[i]); break;
    case MS_I32: lua_pushinteger(L, ((const int32_t *)data)[i]); break;
    case MS_U16: lua_pushinteger(L, ((const uint16_t *)data)[i]); break;
    case MS_U8: lua_pushinteger(L, ((const uint8_t *)data)[i]); break;
    default: lua_pushboolean(L, ((const uint8_t *)data)[i] != 0); break;
    }
}

/* Reads all values into a userdata on the stack; blocks. The memory is Lua's, so that an error in
 * reading, or in making the tables, leaks nothing. One byte more than needed, so that an empty
 * tensor has an address, too. ms_tensor_read waits for the tensor's writers only, not for all
 * streams. */
static const void *read_values(lua_State *L, ms_tensor *t)
{
    void *data = lua_newuserdatauv(L, ms_tensor_bytes(t) + 1, 0);
    ms_lua_ok(L, ms_tensor_read(t, data, ms_tensor_bytes(t)));
    return data;
}

/* t:item() -> its only value; blocks. Refused in hooks, which only enqueue. Arguments are checked
 * before ms_lua_enter, so that a mistake does not start an engine. */
static int item(lua_State *L)
{
    ms_tensor *t = ms_lua_tensor(L, 1);
    ms_lua_refuse_in_hook(L, "item", "use a metric and lag()");
    if (ms_tensor_count(t) != 1) {
        char text[200];
        return ms_lua_error(L, "item: the tensor is %s; it must have one element",
                            ms_tensor_describe(t, text, sizeof text));
    }
    ms_lua_enter(L);
    /* Room for the largest element, aligned for each dtype. */
    uint64_t value = 0;
    ms_lua_ok(L, ms_tensor_read(t, &value, ms_tensor_bytes(t)));
    push_element(L, ms_tensor_dtype(t), &value, 0);
    return 1;
}

/* Pushes dimension d as nested lists; returns the index of the element after them. The recursion is
 * as deep as the tensor has dimensions, at most MS_DIMS_MAX. */
static int64_t push_nested(lua_State *L, const ms_tensor *t, const void *data, uint32_t d,
                           int64_t at)
{
    if (d == ms_tensor_dims(t)) {
        push_element(L, ms_tensor_dtype(t), data, at);
        return at + 1;
    }
    int64_t n = ms_tensor_shape(t)[d];
    luaL_checkstack(L, 4, "to_table");
    /* At most a million: to_table has counted. */
    lua_createtable(L, (int)n, 0);
    for (int64_t i = 0; i < n; i++) {
        at = push_nested(L, t, data, d + 1, at);
        lua_rawseti(L, -2, i + 1);
    }
    return at;
}

/* Elements, or of an empty tensor the lists that hold none. [1000000000, 0] has no element, but as
 * many empty lists as its first dimension says. */
static int64_t count_items(const ms_tensor *t)
{
    int64_t count = 1;
    for (uint32_t d = 0; d < ms_tensor_dims(t) && ms_tensor_shape(t)[d] > 0; d++)
        if (__builtin_mul_overflow(count, ms_tensor_shape(t)[d], &count)) return INT64_MAX;
    return count;
}

/* t:to_table() -> its values as nested lists; blocks. Limited, because a Lua table takes many times
 * the memory of the tensor. The million is a limit of use and not of memory: more numbers are not
 * meant to be read by people. */
static int to_table(lua_State *L)
{
    ms_tensor *t = ms_lua_tensor(L, 1);
    ms_lua_refuse_in_hook(L, "to_table", "use a metric and lag()");
    if (count_items(t) > 1000000)
        return ms_lua_error(
            L, "to_table: a tensor of %lld items; at most a million: narrow or reduce it first",
            (long long)count_items(t));
    ms_lua_enter(L);
    push_nested(L, t, read_values(L, t), 0, 0);
    return 1;
}

/* core.bytes(t): the values as a string, row-major, little-endian; blocks. For hashes, comparisons
 * bit for bit, and files that a script writes itself. A Lua string holds any bytes. */
static int bytes(lua_State *L)
{
    ms_tensor *t = ms_lua_tensor(L, 1);
    ms_lua_refuse_in_hook(L, "reading a tensor", "use a metric and lag()");
    ms_lua_enter(L);
    const void *data = read_values(L, t);
    lua_pushlstring(L, data, ms_tensor_bytes(t));
    return 1;
}

/* Element i of a float dtype. For show() only, in which five digits are printed: f32 is enough for
 * all of them. */
static float float_at(ms_dtype type, const void *data, int64_t i)
{
    if (type == MS_F32) return ((const float *)data)[i];
    if (type == MS_F16) return ms_float_from_f16(((const uint16_t *)data)[i]);
    return ms_float_from_bf16(((const uint16_t *)data)[i]);
}

/* Element i of an integer dtype, for show() only: Lua's own integers are pushed by push_element. */
static long long integer_at(ms_dtype type, const void *data, int64_t i)
{
    if (type == MS_I64) return ((const int64_t *)data)[i];
    if (type == MS_I32) return ((const int32_t *)data)[i];
    if (type == MS_U16) return ((const uint16_t *)data)[i];
    return ((const uint8_t *)data)[i];
}

/* Appends one element as text: five digits of a float tell magnitudes apart and keep columns short.
 */
static void show_element(luaL_Buffer *buffer, ms_dtype type, const void *data, int64_t i)
{
    char text[40];
    if (ms_dtype_is_float(type))
        snprintf(text, sizeof text, "%.5g", (double)float_at(type, data, i));
    else if (type == MS_BOOL)
        snprintf(text, sizeof text, "%s", ((const uint8_t *)data)[i] ? "true" : "false");
    else snprintf(text, sizeof text, "%lld", integer_at(type, data, i));
    luaL_addstring(buffer, text);
}

/* A larger tensor would fill the terminal; its edges are usually what tells whether it is right. */
enum { SHOWN = 6 }; /* elements of a dimension before it is abridged */

/* Appends dimension d; long dimensions show their first and last three elements. stride: number of
 * elements of one item of the dimension before. `at` is the position of the first element, since
 * the values are dense here. */
static void show_nested(luaL_Buffer *buffer, const ms_tensor *t, const void *data, uint32_t d,
                        int64_t at, int64_t stride)
{
    if (d == ms_tensor_dims(t)) {
        show_element(buffer, ms_tensor_dtype(t), data, at);
        return;
    }
    int64_t n = ms_tensor_shape(t)[d];
    /* From the number of elements of this dimension to that of one item of it. */
    stride = n ? stride / n : 0;
    luaL_addchar(buffer, '[');
    for (int64_t i = 0; i < n; i++) {
        /* Rows of the last dimension stay on one line. */
        if (i) luaL_addstring(buffer, d + 1 == ms_tensor_dims(t) ? ", " : ",\n ");
        if (n > SHOWN && i == SHOWN / 2) {
            luaL_addstring(buffer, d + 1 == ms_tensor_dims(t) ? "..., " : "...,\n ");
            /* Goes on with the last items. */
            i = n - SHOWN / 2;
        }
        show_nested(buffer, t, data, d + 1, at + i * stride, stride);
    }
    luaL_addchar(buffer, ']');
}

/* t:show() -> text with its dtype, shape and values; blocks. Unlike tostring it reads the values,
 * hence another name. */
static int show(lua_State *L)
{
    ms_tensor *t = ms_lua_tensor(L, 1);
    ms_lua_refuse_in_hook(L, "show", "use a metric and lag()");
    ms_lua_enter(L);
    const void *data = read_values(L, t);
    char text[200];
    luaL_Buffer buffer;
    luaL_buffinit(L, &buffer);
    luaL_addstring(&buffer, ms_tensor_describe(t, text, sizeof text));
    luaL_addchar(&buffer, '\n');
    show_nested(&buffer, t, data, 0, 0, ms_tensor_count(t));
    luaL_pushresult(&buffer);
    return 1;
}

/* core.read_nowhere(t): on the sim device, what reading a tensor does to memory, without room for
 * its values. `moonshard check` uses it to predict the peak of a run: a read waits for writers and
 * so decides which memory is free, while the values of a large model would not fit the machine that
 * simulates it. */
static int read_nowhere(lua_State *L)
{
    ms_tensor *t = ms_lua_tensor(L, 1);
    if (!ms_engine_is_sim(ms_lua_enter(L)))
        return ms_lua_error(L, "read_nowhere: this engine has data");
    ms_lua_ok(L, ms_tensor_read(t, NULL, ms_tensor_bytes(t)));
    return 0;
}

/* core.write(t, string): copies the values in, row-major. The string must have exactly the tensor's
 * bytes, which ms_tensor_write checks, and may be collected as soon as the call has returned. */
static int write_values(lua_State *L)
{
    ms_tensor *t = ms_lua_tensor(L, 1);
    size_t given;
    const char *data = luaL_checklstring(L, 2, &given);
    ms_lua_enter(L);
    ms_lua_ok(L, ms_tensor_write(t, data, given));
    return 0;
}

/* ------------------------------------------------------------------ opening */

/* t[i] selects along the first dimension; other keys are methods. This runs for each method call on
 * a tensor, so the methods are looked up first and with a raw get. `select` is found there too, so
 * that t[i] and t:select(1, i) have one implementation and one error. */
static int index_value(lua_State *L)
{
    if (lua_type(L, 2) != LUA_TNUMBER) {
        lua_pushvalue(L, 2);
        if (lua_rawget(L, lua_upvalueindex(2)) != LUA_TNIL) return 1;
        return ms_lua_no_field(L, 2, lua_upvalueindex(2), "a tensor");
    }
    lua_getfield(L, lua_upvalueindex(2), "select");
    lua_pushvalue(L, 1);
    lua_pushinteger(L, 1);
    lua_pushvalue(L, 2);
    lua_call(L, 3, 1);
    return 1;
}

/* t.x = v and t[i] = v raise. A field would live with the handle and not with the tensor, and be
 * gone in the next handle of it; writing elements one by one would be a task each. */
static int refuse_newindex(lua_State *L)
{
    return ms_lua_error(
        L, "a tensor has no fields to assign; write values with t[i]:copy_(x) or t[i]:fill_(x)");
}

/* The library adds methods in Lua and other files add theirs; the table is core.tensor_methods. */
static const luaL_Reg methods[] = {
    { "shape", shape },
    { "size", size },
    { "dim", dim },
    { "numel", numel },
    { "dtype", dtype },
    { "device", device },
    { "is_contiguous", is_contiguous },
    { "item", item },
    { "to_table", to_table },
    { "show", show },
    { "keep", keep },
    { NULL, NULL },
};

/* __gc and __close are in the metatable already (runtime.c). */
static const luaL_Reg metamethods[] = { { "__len", length },
                                        { "__tostring", to_string },
                                        { "__newindex", refuse_newindex },
                                        { NULL, NULL } };

/* They are not methods, since the library alone uses them. */
static const luaL_Reg functions[] = {
    { "is_tensor", is_tensor },
    { "hold", hold },
    { "spend", spend },
    { "tidy", tidy },
    { "release", release },
    { "mark_parameter", mark_parameter },
    { "is_parameter", is_parameter },
    { "same_memory", same_memory },
    { "bytes", bytes },
    { "read_nowhere", read_nowhere },
    { "write", write_values },
    { NULL, NULL },
};

/* The metatable exists already: ms_lua_new_runtime has made it with __gc and __close, which must
 * work before and after everything else. */
void ms_open_tensor(lua_State *L, int runtime)
{
    ms_lua_register(L, runtime, functions);
    luaL_getmetatable(L, MS_TENSOR_TYPE);
    ms_lua_register(L, runtime, metamethods);
    lua_pushliteral(L, "locked");
    lua_setfield(L, -2, "__metatable");
    lua_newtable(L);
    ms_lua_register(L, runtime, methods);
    lua_pushvalue(L, -1);
    lua_setfield(L, -4, "tensor_methods"); /* the library adds to them */
    lua_pushvalue(L, runtime);
    lua_pushvalue(L, -2);
    lua_pushcclosure(L, index_value, 2);
    lua_setfield(L, -3, "__index");
    lua_pop(L, 2);
}
