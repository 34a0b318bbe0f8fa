/* grad.c: gradients in Lua: backward, hooks, scopes, recomputation. */
#include "bindings/grad.h"

#include <string.h>

#include "bindings/arguments.h"
#include "bindings/bucket.h"
#include "bindings/call.h"
#include "bindings/enter.h"
#include "bindings/handles.h"
#include "bindings/runtime.h"
#include "bindings/script.h"
#include "moonshard/fsdp.h"

/* t:requires_grad() -> boolean. True of a leaf whose flag is set, and of every result that depends
 * on one. */
static int requires_grad(lua_State *L)
{
    lua_pushboolean(L, ms_tensor_requires_grad(ms_lua_tensor(L, 1)));
    return 1;
}

/* t:requires_grad_(on = true) -> t. Only float leaves can be told; the engine's error names the
 * operator that made another tensor. */
static int set_requires_grad(lua_State *L)
{
    ms_lua_enter(L);
    ms_lua_ok(L, ms_tensor_set_requires_grad(ms_lua_tensor(L, 1),
                                             lua_isnoneornil(L, 2) || lua_toboolean(L, 2)));
    lua_settop(L, 1);
    return 1;
}

/* t:detach() -> an alias of the same memory, outside of the graph. Writes through either are seen
 * by the other, and count as writes for what backward has saved. */
static int detach(lua_State *L)
{
    ms_lua_enter(L);
    ms_tensor *t = ms_lua_tensor(L, 1), *out = NULL;
    ms_handle *handle = ms_lua_new_handle(L);
    ms_lua_ok(L, ms_tensor_alias(t, &out));
    ms_handle_fill(handle, out);
    return 1;
}

/* Pushes the table that lives with the tensor's handle at `index`. It is the handle's user value,
 * so it is collected with the handle. Hooks of leaves are in it, too (ms_callback_new). */
static void push_table_of(lua_State *L, int index)
{
    if (lua_getiuservalue(L, index, 1) == LUA_TTABLE) return;
    lua_pop(L, 1);
    lua_createtable(L, 0, 1);
    lua_pushvalue(L, -1);
    lua_setiuservalue(L, index, 1);
}

/* t:grad() -> its gradient, or nil. There is one handle for a gradient, however often it is asked
 * for, so that consuming the gradient gives its memory back at once. The gradient's handle is kept:
 * it outlives the step, as parameters do. */
static int grad(lua_State *L)
{
    ms_lua_enter(L);
    ms_tensor *gradient = ms_tensor_grad(ms_lua_tensor(L, 1));
    if (!gradient) {
        lua_pushnil(L);
        return 1;
    }
    push_table_of(L, 1);
    if (lua_getfield(L, -1, "grad") == LUA_TUSERDATA
        && ((ms_handle *)lua_touserdata(L, -1))->tensor == gradient)
        return 1;
    lua_pop(L, 1);
    ms_handle *handle = ms_lua_new_handle(L);
    lua_pushvalue(L, -1);
    lua_setfield(L, -3, "grad");
    ms_handle_fill(handle, ms_tensor_retain(gradient));
    ms_handle_keep(handle);
    return 1;
}

/* A gradient that is dropped there would leave the optimizer nothing to step on, without a word. */
static const char result_is_gradient[] =
    "the result of the chain becomes the gradients of its bucket: to train nothing, return zeros";

/* core.consume_grad(p): the gradient is gone, for those who still hold its handle too, so that its
 * memory comes back at once. */
static int consume_grad(lua_State *L)
{
    ms_lua_enter(L);
    ms_lua_refuse_in_link(L, "zero_grad", result_is_gradient);
    ms_lua_ok(L, ms_tensor_set_grad(ms_lua_tensor(L, 1), NULL));
    /* Without the table no script has a handle of the gradient. */
    if (lua_getiuservalue(L, 1, 1) != LUA_TTABLE) return 0;
    if (lua_getfield(L, -1, "grad") != LUA_TUSERDATA) return 0;
    ms_handle_drop(
        lua_touserdata(L, -1),
        "was consumed with its gradient by an optimizer or zero_grad; clone it to keep its values");
    /* The next gradient gets a handle of its own. */
    lua_pushnil(L);
    lua_setfield(L, -3, "grad");
    return 0;
}

/* t:set_grad(gradient or nil). A gradient that a script sets is not multiplied by a loss scale, so
 * the mark goes. nil removes it. Shape and dtype must be the tensor's own. */
static int set_grad(lua_State *L)
{
    ms_lua_enter(L);
    ms_lua_refuse_in_link(L, "set_grad", result_is_gradient);
    ms_tensor *t = ms_lua_tensor(L, 1);
    ms_lua_ok(L, ms_tensor_set_grad(t, ms_lua_optional_tensor(L, 2)));
    ms_tensor_grad_unmark(t);
    return 0;
}

/* core.mark_gradients(t), core.is_marked(p), core.unmark(p): of gradients that a loss scaler has
 * multiplied; see ms_tensor_mark_gradients. */
static int mark_gradients(lua_State *L)
{
    ms_lua_enter(L);
    ms_lua_ok(L, ms_tensor_mark_gradients(ms_lua_tensor(L, 1)));
    return 0;
}

/* Optimizers ask it and refuse a step with scaled gradients. */
static int is_marked(lua_State *L)
{
    lua_pushboolean(L, ms_tensor_grad_is_marked(ms_lua_tensor(L, 1)));
    return 1;
}

/* Called where the gradient has been divided by the scale. */
static int unmark(lua_State *L)
{
    ms_tensor_grad_unmark(ms_lua_tensor(L, 1));
    return 0;
}

/* core.mark_summed(p), core.is_summed(p): of gradients that were summed over ranks after backward;
 * see ms_tensor_grad_mark_summed. */
static int mark_summed(lua_State *L)
{
    ms_tensor_grad_mark_summed(ms_lua_tensor(L, 1));
    return 0;
}

static int is_summed(lua_State *L)
{
    lua_pushboolean(L, ms_tensor_grad_is_summed(ms_lua_tensor(L, 1)));
    return 1;
}

/* Backward records nothing, so its gradients cannot be differentiated. The error names the sharded
 * unit that the graph comes to, if there is one. */
static int refuse_create_graph(lua_State *L, ms_engine *engine, ms_tensor *t)
{
    const char *unit = NULL;
    ms_lua_ok(L, ms_fsdp_reached(engine, t, &unit));
    if (!unit)
        return ms_lua_error(L, "backward: create_graph: gradients of gradients are not supported");
    return ms_lua_error(L,
                        "backward: create_graph: gradients of gradients are not supported (the "
                        "graph comes to parameters of the sharded unit \"%s\")",
                        *unit ? unit : "root");
}

/* Options of backward, on the C stack of the bound function. */
typedef struct backward_options {
    ms_tensor *gradient, **inputs; /* NULL: not given */
    uint32_t input_count;
    bool rest, retain;
} backward_options;

/* What cannot be said together. The two parts keep of the graph what they need, so retain_graph has
 * no meaning there. */
static void check_parts(lua_State *L, const backward_options *o)
{
    const char *part = o->rest ? "rest" : "inputs";
    if (o->rest && o->inputs)
        ms_lua_error(L, "backward: inputs and rest are the two parts of one backward: call the one "
                        "and then the other");
    if (o->rest && o->gradient)
        ms_lua_error(L, "backward: rest goes on with the gradient of the backward with inputs: "
                        "leave out gradient");
    if ((o->rest || o->inputs) && o->retain)
        ms_lua_error(L,
                     "backward: %s: leave out retain_graph: the backward with inputs keeps what "
                     "rest needs, and rest frees the graph",
                     part);
}

/* The table at 2, or its absence. The list of inputs stays on the stack. */
static backward_options read_backward_options(lua_State *L)
{
    static const char *const keys[] = { "gradient", "retain_graph", "create_graph",
                                        "inputs",   "rest",         NULL };
    backward_options o = { 0 };
    ms_lua_known_keys(L, 2, keys, "option of backward");
    if (lua_isnoneornil(L, 2)) return o;
    o.rest = ms_lua_field_boolean(L, 2, "rest", false);
    /* Without it the graph is freed on the way, and a second backward is an error that names both
     * lines. */
    o.retain = ms_lua_field_boolean(L, 2, "retain_graph", false);
    if (lua_getfield(L, 2, "gradient") != LUA_TNIL) o.gradient = ms_lua_tensor(L, -1);
    lua_pop(L, 1);
    if (lua_getfield(L, 2, "inputs") != LUA_TNIL) {
        if (!lua_istable(L, -1) || lua_rawlen(L, -1) == 0)
            ms_lua_error(L, "backward: inputs is a list of one or more tensors, not %s",
                         lua_istable(L, -1) ? "an empty table" : luaL_typename(L, -1));
        o.inputs = ms_lua_tensor_list(L, lua_gettop(L), &o.input_count);
    }
    check_parts(L, &o);
    return o;
}

/* t:backward{ gradient =, retain_graph =, inputs =, rest = }: fills the gradients of the leaves.
 * Memory that the forward no longer needs is collected before it, and the live bytes after it are
 * the mark for the next time. */
static int backward(lua_State *L)
{
    ms_runtime *runtime = ms_lua_runtime(L);
    ms_lua_refuse_in_hook(L, "backward", "a hook only enqueues work on the gradient that it gets");
    ms_engine *engine = ms_lua_enter(L);
    ms_tensor *t = ms_lua_tensor(L, 1);
    backward_options o = read_backward_options(L);
    if (ms_lua_field_boolean(L, 2, "create_graph", false)) return refuse_create_graph(L, engine, t);
    /* What the forward pass dropped is not needed any more: without it backward can write where it
     * was. */
    ms_lua_collect_above(L, runtime, runtime->memory.live_after_backward);
    ms_tensor *const *gradients = o.gradient ? &o.gradient : NULL;
    if (o.rest) ms_lua_ok(L, ms_backward_rest(engine, &t, 1));
    else if (o.inputs)
        ms_lua_ok(L, ms_backward_inputs(engine, &t, gradients, 1, o.inputs, o.input_count));
    else ms_lua_ok(L, ms_backward(engine, &t, gradients, 1, o.retain));
    /* Only a pass that has succeeded counts, and one in two parts once, with its rest. */
    if (!o.inputs) runtime->backwards++;
    runtime->memory.live_after_backward = ms_engine_memory(engine).live;
    return 0;
}

/* core.backwards() -> how many there were. accumulate compares two counts to find a pass that
 * forgot to call backward. */
static int backwards(lua_State *L)
{
    lua_pushinteger(L, ms_lua_runtime(L)->backwards);
    return 1;
}

/* -------------------------------------------------------------------- hooks */

/* Calls f(gradient) and takes a tensor that it returns. Called by the engine in the middle of
 * backward; L has values of the bound function below. A function whose anchor is gone is no error:
 * the script has dropped the tensor's handle, and the hook with it. */
static ms_status gradient_hook(void *user, ms_tensor *gradient, ms_tensor **replacement)
{
    ms_callback *callback = user;
    lua_State *L = callback->L;
    ms_runtime *runtime = callback->runtime;
    if (!lua_checkstack(L, 10))
        return ms_engine_fail(runtime->engine, MS_ERROR_MEMORY,
                              "no room on the Lua stack for a gradient hook");
    if (!ms_callback_push(callback)) return MS_OK;
    lua_pushlightuserdata(L, gradient);
    ms_status status = ms_lua_hook(L, runtime, 1, 1);
    if (status) return status;
    char text[MS_RETURNED_BYTES];
    const ms_handle *returned = lua_isnil(L, -1) ? NULL : ms_lua_returned(L, -1, text);
    /* A hook that wrote its argument in place and returns it replaces nothing. */
    if (returned && returned->tensor != gradient) *replacement = ms_tensor_retain(returned->tensor);
    else if (!returned && !lua_isnil(L, -1))
        status = ms_engine_fail(runtime->engine, MS_ERROR_ARGUMENT,
                                "on_grad: the hook returned a %s; a tensor or nothing is expected",
                                text);
    lua_pop(L, 1);
    return status;
}

/* The function that the engine calls for a hook: upvalue 2 is the user's; makes a handle of the
 * borrowed gradient, which ends with the call. It returns what the user's function returned. If
 * that is the handle itself, it must live until the engine has looked at it. */
static int call_with_gradient(lua_State *L)
{
    ms_tensor *gradient = lua_touserdata(L, 1);
    ms_handle *handle = ms_lua_new_handle(L);
    ms_handle_fill(handle, ms_tensor_retain(gradient));
    lua_pushvalue(L, lua_upvalueindex(2));
    lua_pushvalue(L, -2);
    lua_call(L, 1, 1);
    if (lua_touserdata(L, -1) != handle)
        ms_handle_drop(handle,
                       "was only valid inside its gradient hook; clone it to keep its values");
    return 1;
}

/* Removes a hook: upvalue 2 is the tensor, 3 the id, 4 the function that the engine calls. Calling
 * it twice is harmless: ids are unique and never used again. */
static int remove_hook(lua_State *L)
{
    ms_runtime *runtime = ms_lua_runtime(L);
    ms_handle *handle = luaL_testudata(L, lua_upvalueindex(2), MS_TENSOR_TYPE);
    if (runtime->engine && handle && handle->tensor)
        ms_tensor_remove_hook(handle->tensor, (uint64_t)lua_tointeger(L, lua_upvalueindex(3)));
    ms_callback_forget(L, lua_upvalueindex(2), lua_upvalueindex(4));
    return 0;
}

/* Pushes the function that removes the hook with this id; the function that the engine calls is on
 * top. The remover holds the tensor's handle, so it must be dropped with the model. */
static int push_remover(lua_State *L, uint64_t id)
{
    lua_pushvalue(L, lua_upvalueindex(1));
    lua_pushvalue(L, 1);
    lua_pushinteger(L, (lua_Integer)id);
    lua_pushvalue(L, -4);
    lua_pushcclosure(L, remove_hook, 4);
    return 1;
}

/* t:on_grad(f(gradient) -> tensor or nil) -> function that removes the hook. A leaf keeps its hook
 * by its handle; the hook of another tensor lives as long as its node, since scripts drop such
 * handles early. The engine calls call_with_gradient and not the user's function, since a borrowed
 * tensor needs a handle first. */
static int on_grad(lua_State *L)
{
    ms_lua_enter(L);
    ms_tensor *t = ms_lua_tensor(L, 1);
    luaL_checktype(L, 2, LUA_TFUNCTION);
    ms_lua_refuse_in_hook(L, "on_grad", "register hooks outside");
    lua_pushvalue(L, lua_upvalueindex(1));
    lua_pushvalue(L, 2);
    lua_pushcclosure(L, call_with_gradient, 2);
    ms_callback *callback = ms_callback_new(L, -1, ms_tensor_is_leaf(t) ? 1 : 0);
    uint64_t id = 0;
    ms_status status = ms_tensor_on_gradient(t, gradient_hook, callback, ms_callback_free, &id);
    /* The engine has not taken it over. */
    if (status) ms_callback_free(callback);
    ms_lua_ok(L, status);
    return push_remover(L, id);
}

/* Called by backward after the leaf's gradient was accumulated. A function whose anchor is gone is
 * no error: the parameter is no longer used. */
static ms_status accumulated_hook(void *user, ms_tensor *leaf)
{
    (void)leaf;
    ms_callback *callback = user;
    lua_State *L = callback->L;
    if (!lua_checkstack(L, 10))
        return ms_engine_fail(callback->runtime->engine, MS_ERROR_MEMORY,
                              "no room on the Lua stack for a gradient hook");
    if (!ms_callback_push(callback)) return MS_OK;
    return ms_lua_hook(L, callback->runtime, 0, 0);
}

/* Upvalue 2: the user's function; 3: the parameter. They refer to each other, and both live with
 * the parameter. It gets the parameter's own handle and not the gradient: t:grad() has that. */
static int call_with_parameter(lua_State *L)
{
    lua_pushvalue(L, lua_upvalueindex(2));
    lua_pushvalue(L, lua_upvalueindex(3));
    lua_call(L, 1, 0);
    return 0;
}

/* t:on_grad_ready(f(t)) -> function that removes the hook; f runs once the gradient is accumulated.
 * Of leaves only. Optimizers that step in backward register here. */
static int on_grad_ready(lua_State *L)
{
    ms_lua_enter(L);
    ms_tensor *t = ms_lua_tensor(L, 1);
    luaL_checktype(L, 2, LUA_TFUNCTION);
    ms_lua_refuse_in_hook(L, "on_grad_ready", "register hooks outside");
    lua_pushvalue(L, lua_upvalueindex(1));
    lua_pushvalue(L, 2);
    lua_pushvalue(L, 1);
    lua_pushcclosure(L, call_with_parameter, 3);
    ms_callback *callback = ms_callback_new(L, -1, 1);
    uint64_t id = 0;
    ms_status status =
        ms_tensor_on_accumulated(t, accumulated_hook, callback, ms_callback_free, &id);
    if (status) ms_callback_free(callback);
    ms_lua_ok(L, status);
    return push_remover(L, id);
}

/* core.check_rest(what, list of leaves): raises if a gradient of one of them is to come from the
 * rest of a backward. A graph that the script has dropped waits for nothing, so garbage is
 * collected before. Every step asks, and most programs have no such backward. */
static int check_rest(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    const char *what = luaL_checkstring(L, 1);
    uint32_t count = 0;
    if (!ms_backward_awaits_rest(engine) || lua_rawlen(L, 2) == 0) return 0;
    ms_tensor *const *leaves = ms_lua_tensor_list(L, 2, &count);
    if (!ms_check_rest(engine, what, leaves, count)) return 0;
    /* Not in the middle of a backward, which goes through the graph of some tensor. */
    if (ms_lua_runtime(L)->hook_depth == 0) ms_lua_collect(L, ms_lua_runtime(L));
    ms_lua_ok(L, ms_check_rest(engine, what, leaves, count));
    return 0;
}

/* core.has_hooks(leaf) -> whether it has functions of on_grad or on_grad_ready */
static int has_hooks(lua_State *L)
{
    ms_lua_enter(L);
    lua_pushboolean(L, ms_tensor_has_hooks(ms_lua_tensor(L, 1)));
    return 1;
}

/* ----------------------------------------------- writes that wait for reads */

/* Whether a running backward still has to read one of them. One look at a storage for each, so it
 * may be asked for every parameter. */
static bool awaits_any(ms_tensor *const *tensors, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        if (ms_tensor_is_awaited(tensors[i])) return true;
    return false;
}

/* core.is_awaited(tensor or list): whether a node that a running backward still has to run reads
 * the memory of one of them. Outside of a backward nothing is awaited. */
static int is_awaited(lua_State *L)
{
    ms_lua_enter(L);
    uint32_t count = 1;
    ms_tensor *one, *const *tensors = &one;
    if (lua_istable(L, 1)) tensors = ms_lua_tensor_list(L, 1, &count);
    else one = ms_lua_tensor(L, 1);
    lua_pushboolean(L, awaits_any(tensors, count));
    return 1;
}

/* What when_unread has registered; runs as a hook. The callback is freed after the call, by the
 * engine. */
static ms_status unread_hook(void *user)
{
    ms_callback *callback = user;
    if (!lua_checkstack(callback->L, 10))
        return ms_engine_fail(callback->runtime->engine, MS_ERROR_MEMORY,
                              "no room on the Lua stack for a step that waits");
    return ms_callback_push(callback) ? ms_lua_hook(callback->L, callback->runtime, 0, 0) : MS_OK;
}

/* core.when_unread(list, f): f() as a hook, at once or after the last node of the running backwards
 * that reads one of these tensors. Steps in backward use it: writing a parameter that a later node
 * still reads would give that node wrong values. */
static int when_unread(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    uint32_t count = 0;
    luaL_checktype(L, 2, LUA_TFUNCTION);
    ms_tensor **tensors = ms_lua_tensor_list(L, 1, &count);
    /* The engine frees it in any case, also after an error. */
    ms_callback *callback = ms_callback_new(L, 2, 0);
    ms_lua_ok(L, ms_backward_when_unread(engine, tensors, count, unread_hook, callback,
                                         ms_callback_free));
    return 0;
}

/* ------------------------------------------------------------------- scopes */

/* Calls the function at 1 with nothing and leaves its results; an error is raised again by
 * ms_lua_ok after the caller has cleaned up. It is the common part of all "inside" functions. */
static ms_status call_scope(lua_State *L, int function)
{
    lua_pushvalue(L, function);
    return ms_lua_call(L, ms_lua_runtime(L), 0, LUA_MULTRET);
}

/* core.no_grad(f) -> what f returns; nothing is recorded inside. The setting is restored before an
 * error of f is raised again. What f made beyond 16 MiB is collected when it returns: evaluation
 * loops would otherwise grow until the next pressure. */
static int no_grad(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TFUNCTION);
    lua_settop(L, 1);
    ms_engine *engine = ms_lua_enter(L);
    uint64_t live = ms_engine_memory(engine).live;
    bool before = ms_engine_set_recording(engine, false);
    ms_status status = call_scope(L, 1);
    ms_engine_set_recording(engine, before);
    ms_lua_ok(L, status);
    ms_lua_collect_above(L, ms_lua_runtime(L), live);
    return lua_gettop(L) - 1;
}

/* The dtype of autocast at index 1, and in *fp8 how linear layers compute: "fp8" is bf16 for all
 * others. */
static ms_dtype autocast_dtype(lua_State *L, ms_fp8 *fp8)
{
    static const char *const keys[] = { "emulate", NULL };
    const char *name = lua_tostring(L, 1);
    ms_lua_known_keys(L, 3, keys, "option of autocast");
    bool emulate = lua_istable(L, 3) && ms_lua_field_boolean(L, 3, "emulate", false);
    *fp8 = MS_FP8_OFF;
    if (name && strcmp(name, "fp8") == 0) {
        *fp8 = emulate ? MS_FP8_EMULATED : MS_FP8_ON;
        return MS_BF16;
    }
    ms_dtype dtype = ms_lua_dtype(L, 1);
    if (dtype != MS_BF16 && dtype != MS_F16 && dtype != MS_F32)
        ms_lua_error(L, "autocast: \"bf16\", \"f16\" or \"fp8\" is expected (\"f32\" turns it off "
                        "inside)");
    if (emulate) ms_lua_error(L, "autocast: emulate belongs to \"fp8\"");
    return dtype;
}

/* core.autocast(dtype, f, { emulate = false }?) -> what f returns; operators that allow it run in
 * that dtype inside. The setting is the engine's, so it holds for library code that f calls as
 * well. */
static int autocast(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    ms_fp8 fp8, fp8_before = ms_engine_fp8(engine);
    ms_dtype dtype = autocast_dtype(L, &fp8);
    luaL_checktype(L, 2, LUA_TFUNCTION);
    lua_settop(L, 2);
    /* Scopes nest: each puts back what it found, and the innermost one holds. */
    ms_dtype before = ms_engine_autocast(engine);
    ms_engine_set_autocast(engine, dtype);
    ms_engine_set_fp8(engine, fp8);
    ms_status status = call_scope(L, 2);
    ms_engine_set_fp8(engine, fp8_before);
    ms_engine_set_autocast(engine, before);
    /* From here on the casts of weights are the tape's alone, so backward frees each with its last
     * use. Where nothing is recorded they serve the next scopes, until the step ends. */
    if (before == MS_F32 && ms_engine_is_recording(engine)) ms_engine_drop_casts(engine);
    ms_lua_ok(L, status);
    return lua_gettop(L) - 2;
}

/* core.without_fp8(f) -> what f returns: under autocast to "fp8", linear layers inside compute as
 * under autocast to "bf16". */
static int without_fp8(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    luaL_checktype(L, 1, LUA_TFUNCTION);
    lua_settop(L, 1);
    ms_fp8 before = ms_engine_fp8(engine);
    ms_engine_set_fp8(engine, MS_FP8_OFF);
    ms_status status = call_scope(L, 1);
    ms_engine_set_fp8(engine, before);
    ms_lua_ok(L, status);
    return lua_gettop(L) - 1;
}

/* core.attention(how, f) -> what f returns; how: "deterministic" or "fast", see
 * ms_engine_set_fast_attention. The setting is the engine's, as that of autocast. */
static int attention(lua_State *L)
{
    static const char *const ways[] = { "deterministic", "fast", NULL };
    ms_engine *engine = ms_lua_enter(L);
    bool fast = ms_lua_choice(L, 1, ways, "way of attention") == 1;
    luaL_checktype(L, 2, LUA_TFUNCTION);
    lua_settop(L, 2);
    bool before = ms_engine_fast_attention(engine);
    ms_engine_set_fast_attention(engine, fast);
    ms_status status = call_scope(L, 2);
    ms_engine_set_fast_attention(engine, before);
    ms_lua_ok(L, status);
    return lua_gettop(L) - 2;
}

/* core.on_device(name, f): the engine's own device, or "meta", inside f. Any other device name is
 * an error: an engine has one. */
static int on_device(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    const char *name = luaL_checkstring(L, 1), *own = ms_engine_device(engine);
    bool meta = strcmp(name, "meta") == 0;
    /* "cpu" is accepted by every engine, so a script that names it runs on any device. */
    if (!meta && strcmp(name, own) != 0 && strcmp(name, "cpu") != 0)
        return ms_lua_error(L, "device '%.40s': this engine runs on '%s'", name, own);
    luaL_checktype(L, 2, LUA_TFUNCTION);
    lua_settop(L, 2);
    bool before = ms_engine_set_meta(engine, meta);
    ms_status status = call_scope(L, 2);
    ms_engine_set_meta(engine, before);
    ms_lua_ok(L, status);
    return lua_gettop(L) - 2;
}

/* core.is_recording() -> whether operators are recorded for backward now. Library code asks it
 * before it keeps what only backward needs. */
static int is_recording(lua_State *L)
{
    lua_pushboolean(L, ms_engine_is_recording(ms_lua_enter(L)));
    return 1;
}

/* ------------------------------------------------------------ recomputation */

/* What recompute keeps: the function, and its arguments with tensors replaced by the engine's
 * aliases at each run. begin and end bracket the handles that the last run made. */
typedef struct recomputed {
    ms_callback *callback;
    uint32_t inputs;
    uint64_t begin, end;
} recomputed;

/* Frees the callback and what was kept; the context is read before the callback goes. Called by the
 * engine with the node, or by recompute where the node was never made. */
static void recomputed_free(void *object)
{
    recomputed *kept = object;
    ms_context *context = &kept->callback->runtime->context;
    ms_callback_free(kept->callback);
    ms_release(context, kept);
}

/* Inputs and outputs of one run, on the C stack of recompute_call. */
typedef struct recompute_io {
    ms_tensor *const *inputs;
    uint32_t input_count;
    ms_tensor **outputs;
    uint32_t count;
} recompute_io;

/* Pushes the arguments of f from the list in upvalue 3: false represents the next tensor, any other
 * value is boxed in a table. Arguments may be nil and false themselves, hence the boxes. */
static void push_arguments(lua_State *L, int count, ms_tensor *const *tensors)
{
    int used = 0;
    for (int i = 1; i <= count; i++) {
        if (lua_rawgeti(L, lua_upvalueindex(3), i) == LUA_TTABLE) {
            lua_rawgeti(L, -1, 1);
            lua_remove(L, -2);
            continue;
        }
        lua_pop(L, 1);
        ms_handle *handle = ms_lua_new_handle(L);
        ms_handle_fill(handle, ms_tensor_retain(tensors[used++]));
    }
}

/* Takes the tensors from `base` to the top of the stack as outputs; anything else is an error. A
 * retained tensor survives the handles, which recompute_done ends. */
static void take_outputs(lua_State *L, int base, recompute_io *io)
{
    int results = lua_gettop(L) - base + 1;
    if (results < 1 || results > MS_RECOMPUTE_OUTPUTS)
        ms_lua_error(L, "recompute: the function returned %d values; 1 to %d tensors are expected",
                     results, MS_RECOMPUTE_OUTPUTS);
    /* All are checked before the first is retained: an error must not leave a reference. */
    char text[MS_RETURNED_BYTES];
    for (int i = 0; i < results; i++)
        if (!ms_lua_returned(L, base + i, text))
            ms_lua_error(L, "recompute: value %d that the function returned is a %s, not a tensor",
                         i + 1, text);
    for (int i = 0; i < results; i++) io->outputs[i] = ms_tensor_retain(ms_lua_tensor(L, base + i));
    io->count = (uint32_t)results;
}

/* Runs f: upvalue 2 is f, 3 the list of arguments, 4 how many; argument 1 is a recompute_io. It
 * runs protected, below ms_lua_call. */
static int run_recomputed(lua_State *L)
{
    recompute_io *io = lua_touserdata(L, 1);
    int count = (int)lua_tointeger(L, lua_upvalueindex(4));
    luaL_checkstack(L, count + 8, "recompute");
    lua_pushvalue(L, lua_upvalueindex(2));
    int function = lua_gettop(L);
    push_arguments(L, count, io->inputs);
    lua_call(L, count, LUA_MULTRET);
    take_outputs(L, function, io);
    return 0;
}

/* Runs f in forward and again in backward. begin and end bracket the handles that f makes, for
 * recompute_done. The handles of inputs are among those that end: the engine has the tensors. */
static ms_status recompute_call(void *user, ms_tensor *const *inputs, uint32_t input_count,
                                ms_tensor **outputs, uint32_t *count)
{
    recomputed *kept = user;
    lua_State *L = kept->callback->L;
    recompute_io io = { .inputs = inputs, .input_count = input_count, .outputs = outputs };
    if (!lua_checkstack(L, 10) || !ms_callback_push(kept->callback))
        return ms_engine_fail(kept->callback->runtime->engine, MS_ERROR_MEMORY,
                              "no room on the Lua stack for a recomputed function");
    lua_pushlightuserdata(L, &io);
    kept->begin = ms_handle_count(kept->callback->runtime);
    ms_status status = ms_lua_call(L, kept->callback->runtime, 1, 0);
    kept->end = ms_handle_count(kept->callback->runtime);
    if (!status) *count = io.count;
    return status;
}

/* Pushes run_recomputed for a call f(...) with the arguments of recompute(f, ...), and before it a
 * userdata with the tensors among them, which it returns. The list of arguments keeps values that
 * are no tensors alive until backward. */
static ms_tensor **push_recomputed(lua_State *L, uint32_t *tensors)
{
    int count = lua_gettop(L) - 1;
    ms_tensor **inputs = lua_newuserdatauv(L, (size_t)(count + 1) * sizeof *inputs, 0);
    lua_pushvalue(L, lua_upvalueindex(1));
    lua_pushvalue(L, 1);
    lua_createtable(L, count, 0);
    for (int i = 1; i <= count; i++) {
        if (ms_lua_is_tensor(L, i + 1)) {
            inputs[(*tensors)++] = ms_lua_tensor(L, i + 1);
            /* It represents a tensor, which the engine keeps and gives back at each run. */
            lua_pushboolean(L, false);
        } else {
            lua_createtable(L, 1, 0);
            lua_pushvalue(L, i + 1);
            lua_rawseti(L, -2, 1);
        }
        lua_rawseti(L, -2, i);
    }
    lua_pushinteger(L, count);
    lua_pushcclosure(L, run_recomputed, 4);
    return inputs;
}

/* The tape retains what backward reads. Other tensors of the function would stay in memory as long
 * as Lua handles refer to them. It also gives memory back between the first run and the rest of the
 * forward, which is what recomputation is for. */
static void recompute_done(void *user)
{
    const recomputed *kept = user;
    ms_handles_drop(
        kept->callback->runtime, kept->begin, kept->end,
        "was made in a recomputed function and went with it; return it, or call keep()");
}

/* Allocates what a recomputed function keeps, for the function at `index`; raises if there is no
 * memory. anchor 0: the function lives as long as the node, since backward calls it. */
static recomputed *new_recomputed(lua_State *L, int index, uint32_t inputs)
{
    ms_runtime *runtime = ms_lua_runtime(L);
    ms_callback *callback = ms_callback_new(L, index, 0);
    void *memory = NULL;
    if (ms_allocate(&runtime->context, sizeof(recomputed), "recompute", &memory)) {
        ms_callback_free(callback);
        ms_lua_error(L, "%s", runtime->context.error.message);
    }
    recomputed *kept = memory;
    *kept = (recomputed){ .callback = callback, .inputs = inputs };
    return kept;
}

typedef ms_status (*recompute_way)(ms_engine *engine, ms_recompute_function f, void *user,
                                   void (*done)(void *user), void (*free_user)(void *),
                                   ms_tensor *const *inputs, uint32_t input_count,
                                   ms_tensor **outputs, uint32_t *output_count);

/* f, ... -> what f returns: 1 to MS_RECOMPUTE_OUTPUTS tensors. The handles are made before anything
 * runs, so that nothing can fail once outputs exist. */
static int recompute_by(lua_State *L, recompute_way way)
{
    /* A module is called like a function. */
    if (luaL_getmetafield(L, 1, "__call") != LUA_TNIL) lua_pop(L, 1);
    else luaL_checktype(L, 1, LUA_TFUNCTION);
    ms_engine *engine = ms_lua_enter(L);
    uint32_t tensors = 0, made = 0;
    ms_tensor **inputs = push_recomputed(L, &tensors);
    ms_tensor *outputs[MS_RECOMPUTE_OUTPUTS] = { NULL };
    ms_handle *handles[MS_RECOMPUTE_OUTPUTS];
    /* The closure is on top; handles follow above it. */
    int function = lua_gettop(L);
    luaL_checkstack(L, MS_RECOMPUTE_OUTPUTS + 8, "recompute");
    for (int i = 0; i < MS_RECOMPUTE_OUTPUTS; i++) handles[i] = ms_lua_new_handle(L);
    recomputed *kept = new_recomputed(L, function, tensors);
    ms_status status = way(engine, recompute_call, kept, recompute_done, recomputed_free, inputs,
                           tensors, outputs, &made);
    if (status) recomputed_free(kept);
    ms_lua_ok(L, status);
    for (uint32_t i = 0; i < made; i++) ms_handle_fill(handles[i], outputs[i]);
    /* Handles that were made for outputs that never came go. */
    lua_settop(L, function + (int)made);
    return (int)made;
}

/* core.recompute(f, ...), and core.recompute_rest(f, ...), which keeps results of products. */
static int recompute(lua_State *L) { return recompute_by(L, ms_recompute); }
static int recompute_rest(lua_State *L) { return recompute_by(L, ms_recompute_rest); }

/* The scopes are functions of the module, whose last argument is a function; what concerns one
 * tensor is a method. */
void ms_open_grad(lua_State *L, int runtime)
{
    static const luaL_Reg functions[] = { { "no_grad", no_grad },
                                          { "autocast", autocast },
                                          { "without_fp8", without_fp8 },
                                          { "attention", attention },
                                          { "on_device", on_device },
                                          { "is_recording", is_recording },
                                          { "recompute", recompute },
                                          { "recompute_rest", recompute_rest },
                                          { "consume_grad", consume_grad },
                                          { "backwards", backwards },
                                          { "has_hooks", has_hooks },
                                          { "check_rest", check_rest },
                                          { "is_awaited", is_awaited },
                                          { "when_unread", when_unread },
                                          { "mark_gradients", mark_gradients },
                                          { "is_marked", is_marked },
                                          { "unmark", unmark },
                                          { "mark_summed", mark_summed },
                                          { "is_summed", is_summed },
                                          { NULL, NULL } };
    static const luaL_Reg methods[] = { { "requires_grad", requires_grad },
                                        { "requires_grad_", set_requires_grad },
                                        { "detach", detach },
                                        { "grad", grad },
                                        { "set_grad", set_grad },
                                        { "backward", backward },
                                        { "on_grad", on_grad },
                                        { "on_grad_ready", on_grad_ready },
                                        { NULL, NULL } };
    ms_lua_register(L, runtime, functions);
    lua_getfield(L, -1, "tensor_methods");
    ms_lua_register(L, runtime, methods);
    lua_pop(L, 1);
}
