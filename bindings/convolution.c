/* convolution.c: convolution and pooling as methods of tensors. */
#include "bindings/convolution.h"

#include "bindings/arguments.h"
#include "bindings/enter.h"
#include "bindings/script.h"

/* Sizes of windows: far above any that is of use, and their products fit 63 bits. */
enum { MOST = 1 << 20 };

/* A number for rows and columns, or a list { rows, columns }, on top of the stack; pops it. Nothing
 * is stored for nil. */
static void take_pair(lua_State *L, const char *name, int64_t low, int32_t *pair)
{
    if (lua_istable(L, -1)) {
        if (lua_rawlen(L, -1) != 2)
            ms_lua_error(L, "%s has %d numbers; it is a number, or { rows, columns }", name,
                         (int)lua_rawlen(L, -1));
        for (int i = 0; i < 2; i++) {
            lua_rawgeti(L, -1, i + 1);
            pair[i] = (int32_t)ms_lua_integer(L, -1, low, MOST, name);
            lua_pop(L, 1);
        }
    } else if (!lua_isnil(L, -1)) {
        pair[0] = pair[1] = (int32_t)ms_lua_integer(L, -1, low, MOST, name);
    }
    lua_pop(L, 1);
}

/* An option at `table`, which may be absent. */
static void pair_field(lua_State *L, int table, const char *name, int64_t low, int32_t *pair)
{
    if (lua_isnoneornil(L, table)) return;
    lua_getfield(L, table, name);
    take_pair(L, name, low, pair);
}

/* x:conv2d(weight, bias?, { stride = 1, padding = 0, dilation = 1, groups = 1 }?). The size of the
 * window is the weight's. */
static int conv2d(lua_State *L)
{
    static const char *const keys[] = { "stride", "padding", "dilation", "groups", NULL };
    ms_lua_enter(L);
    ms_tensor *inputs[] = { ms_lua_tensor(L, 1), ms_lua_tensor(L, 2),
                            ms_lua_optional_tensor(L, 3) };
    ms_attributes attributes = { .window = { .groups = 1 } };
    ms_lua_known_keys(L, 4, keys, "option of conv2d");
    pair_field(L, 4, "stride", 1, attributes.window.stride);
    pair_field(L, 4, "padding", 0, attributes.window.padding);
    pair_field(L, 4, "dilation", 1, attributes.window.dilation);
    attributes.window.groups = (int32_t)ms_lua_field_integer(L, 4, "groups", 1, 1, MOST);
    return ms_lua_apply(L, &ms_op_conv2d, &attributes, false, inputs, inputs[2] ? 3 : 2);
}

/* x:max_pool2d(kernel, { stride = kernel, padding = 0 }?), x:avg_pool2d(kernel, { stride, padding,
 * count_include_pad = true }?). */
static int pool2d(lua_State *L)
{
    static const char *const max_keys[] = { "stride", "padding", NULL };
    static const char *const avg_keys[] = { "stride", "padding", "count_include_pad", NULL };
    const ms_op *op = ms_lua_own_op(L);
    bool avg = op == &ms_op_avg_pool2d;
    ms_lua_enter(L);
    ms_lua_tensor(L, 1);
    ms_attributes attributes = { .window = { .groups = 1 } };
    if (lua_isnoneornil(L, 2)) ms_lua_error(L, "the size of the window is missing");
    lua_pushvalue(L, 2);
    take_pair(L, "kernel", 1, attributes.window.kernel);
    ms_lua_known_keys(L, 3, avg ? avg_keys : max_keys,
                      avg ? "option of avg_pool2d" : "option of max_pool2d");
    pair_field(L, 3, "stride", 1, attributes.window.stride);
    pair_field(L, 3, "padding", 0, attributes.window.padding);
    attributes.window.skip_padding = avg && !ms_lua_field_boolean(L, 3, "count_include_pad", true);
    return ms_lua_apply_one(L, op, &attributes, false);
}

static const ms_method methods[] = {
    { "conv2d", conv2d, NULL, false },
    { "max_pool2d", pool2d, &ms_op_max_pool2d, false },
    { "avg_pool2d", pool2d, &ms_op_avg_pool2d, false },
};

/* The table of tensor methods is on top; ms_open_operators has put it there. */
void ms_open_convolution(lua_State *L, int runtime)
{
    ms_lua_add_tensor_methods(L, runtime, methods, sizeof methods / sizeof *methods);
}
