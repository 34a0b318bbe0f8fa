/* custom.c: functions with a gradient of their own, ms.custom.
 *
 * One call runs the script's forward. The engine keeps what backward reads, by tensors; a copy of
 * the table in which forward gave them, without the tensors, stays in Lua, and gets handles of them
 * when backward is called. So no handle of the script keeps what the graph has freed. */
#include "bindings/custom.h"

#include <string.h>

#include "bindings/arguments.h"
#include "bindings/call.h"
#include "bindings/enter.h"
#include "bindings/handles.h"
#include "bindings/runtime.h"
#include "bindings/script.h"
#include "moonshard/grad.h"

#define DEEPEST 30 /* of the tables in what is saved */

/* One call; the user of its record in the engine. */
typedef struct custom_call {
    ms_runtime *runtime;
    lua_State *L;          /* of the call; valid in forward only */
    ms_callback *callback; /* calls the script's backward; NULL before forward has returned */
    int run_forward;       /* its stack index, in forward only */
    uint32_t inputs, outputs, script;
} custom_call;

/* Called by the engine with the node, or at once if nothing is recorded. */
static void custom_free(void *object)
{
    custom_call *call = object;
    ms_context *context = &call->runtime->context;
    if (call->callback) ms_callback_free(call->callback);
    ms_release(context, call);
}

/* ------------------------------------------------------------------ forward */

/* Whether a table is of no class: without a metatable, or with the one of tables of named
 * tensors, which has nothing but __pairs. */
static bool is_plain(lua_State *L, int index)
{
    if (!lua_istable(L, index)) return false;
    if (!lua_getmetatable(L, index)) return true;
    lua_pushliteral(L, "__pairs");
    bool named = lua_rawget(L, -2) != LUA_TNIL;
    lua_pushliteral(L, "__index");
    named = named && lua_rawget(L, -3) == LUA_TNIL;
    lua_pop(L, 3);
    return named;
}

/* Pushes a copy of the plain table at `index` without its tensors. Each tensor is appended to the
 * list at `tensors`; the copy that it belongs to, and its key there, to that at `places`. */
static void copy_saved(lua_State *L, int index, int tensors, int places, int depth)
{
    if (depth > DEEPEST)
        ms_lua_error(L,
                     "custom: the table that forward saves is nested more than %d deep, or "
                     "refers to itself",
                     DEEPEST);
    luaL_checkstack(L, 10, "a saved table");
    lua_newtable(L);
    int copy = lua_gettop(L);
    for (lua_pushnil(L); lua_next(L, index);) {
        int value = lua_gettop(L);
        if (ms_lua_is_tensor(L, value)) {
            lua_Integer count = (lua_Integer)lua_rawlen(L, places);
            ms_lua_tensor(L, value); /* raises if it is gone */
            lua_pushvalue(L, copy);
            lua_rawseti(L, places, count + 1);
            lua_pushvalue(L, value - 1);
            lua_rawseti(L, places, count + 2);
            lua_rawseti(L, tensors, (lua_Integer)lua_rawlen(L, tensors) + 1);
            continue;
        }
        lua_pushvalue(L, value - 1);
        if (is_plain(L, value)) copy_saved(L, value, tensors, places, depth + 1);
        else lua_pushvalue(L, value);
        lua_rawset(L, copy);
        lua_pop(L, 1);
    }
}

/* Pushes an array of the borrowed tensors of the `count` values from `first` on. */
static ms_tensor **push_outputs(lua_State *L, int first, int count)
{
    char text[MS_RETURNED_BYTES];
    ms_tensor **outputs = lua_newuserdatauv(L, ((size_t)count + 1) * sizeof *outputs, 0);
    for (int i = 0; i < count; i++) {
        const ms_handle *handle = ms_lua_returned(L, first + i, text);
        if (!handle)
            ms_lua_error(L,
                         "custom: value %d that forward returned is a %s; tensors are expected, "
                         "and last, if backward needs it, a table",
                         i + 1, text);
        outputs[i] = handle->tensor;
    }
    return outputs;
}

static int run_backward(lua_State *L);

/* What forward gets from the engine, and gives to it. */
typedef struct forward_io {
    custom_call *call;
    ms_custom_results *results;
} forward_io;

/* Arguments: a forward_io, the script's backward and forward, the arguments of forward. Results:
 * what must stay on the stack as long as the results are borrowed. */
static int run_forward(lua_State *L)
{
    forward_io io = *(forward_io *)lua_touserdata(L, 1);
    lua_call(L, lua_gettop(L) - 3, LUA_MULTRET);
    int last = lua_gettop(L), count = last - 2;
    luaL_checkstack(L, 12, "custom");
    bool saves = count > 0 && is_plain(L, last);
    if (saves) count--;
    if (count < 1 || count > MS_CUSTOM_OUTPUTS)
        ms_lua_error(L, "custom: forward returned %d tensors; 1 to %d are allowed", count,
                     MS_CUSTOM_OUTPUTS);
    io.results->outputs = push_outputs(L, 3, count);
    io.results->output_count = io.call->outputs = (uint32_t)count;
    lua_newtable(L);
    lua_newtable(L);
    int places = lua_gettop(L), list = places - 1;
    uint32_t saved = 0;
    if (saves) copy_saved(L, last, list, places, 1);
    else lua_pushnil(L);
    if (lua_rawlen(L, list) > 0) {
        io.results->saved = ms_lua_tensor_list(L, list, &saved);
        lua_insert(L, places);
        places++;
    }
    io.results->saved_count = saved;
    lua_pushvalue(L, lua_upvalueindex(1));
    lua_pushvalue(L, 2);
    lua_pushvalue(L, places + 1);
    lua_pushvalue(L, places);
    lua_pushcclosure(L, run_backward, 4);
    io.call->callback = ms_callback_new(L, -1, 0);
    return lua_gettop(L);
}

/* Called by the engine, inside of the bound function below, whose stack it uses. It must not raise,
 * so it allocates nothing of Lua's. */
static ms_status forward(void *user, ms_tensor *const *inputs, uint32_t input_count,
                         ms_custom_results *results)
{
    (void)inputs;
    (void)input_count;
    custom_call *call = user;
    lua_State *L = call->L;
    forward_io io = { .call = call, .results = results };
    int arguments = (int)lua_tointeger(L, 3);
    if (!lua_checkstack(L, arguments + 8))
        return ms_engine_fail(call->runtime->engine, MS_ERROR_MEMORY,
                              "no room on the Lua stack for the arguments of custom");
    lua_pushvalue(L, call->run_forward);
    lua_pushlightuserdata(L, &io);
    lua_pushvalue(L, 2);
    lua_pushvalue(L, 1);
    for (int i = 0; i < arguments; i++) lua_pushvalue(L, 4 + i);
    return ms_lua_call(L, call->runtime, arguments + 3, LUA_MULTRET);
}

/* ----------------------------------------------------------------- backward */

typedef struct backward_io {
    const custom_call *call;
    ms_tensor *const *gradients, *const *saved;
    ms_tensor **results;
    uint32_t output_count;
} backward_io;

static const char *line_of(const custom_call *call)
{
    const char *line = ms_strings_get(ms_engine_strings(call->runtime->engine), call->script);
    return *line ? line : "an unknown line";
}

static void push_handle(lua_State *L, ms_tensor *tensor)
{
    ms_handle *handle = ms_lua_new_handle(L);
    ms_handle_fill(handle, ms_tensor_retain(tensor));
}

/* Pushes the saved table (upvalue 3) with handles of the tensors in their places (upvalue 4). */
static void push_saved(lua_State *L, ms_tensor *const *saved)
{
    lua_Integer count = (lua_Integer)lua_rawlen(L, lua_upvalueindex(4));
    for (lua_Integer i = 0; 2 * i < count; i++) {
        lua_rawgeti(L, lua_upvalueindex(4), 2 * i + 1);
        lua_rawgeti(L, lua_upvalueindex(4), 2 * i + 2);
        push_handle(L, saved[i]);
        lua_rawset(L, -3);
        lua_pop(L, 1);
    }
    lua_pushvalue(L, lua_upvalueindex(3));
}

/* Takes the gradients of the inputs from the stack, all above `base`. All are checked before the
 * first is retained: an error must not leave a reference. */
static void take_gradients(lua_State *L, int base, const backward_io *io)
{
    const custom_call *call = io->call;
    char text[MS_RETURNED_BYTES];
    int count = lua_gettop(L) - base;
    if (count != (int)call->inputs)
        ms_lua_error(L,
                     "custom (at %s): backward returned %d values; it must return %u, for each "
                     "tensor that the call got its gradient or nil",
                     line_of(call), count, call->inputs);
    for (int i = 1; i <= count; i++)
        if (!lua_isnil(L, base + i) && !ms_lua_returned(L, base + i, text))
            ms_lua_error(L,
                         "custom (at %s): value %d that backward returned is a %s; a gradient "
                         "or nil is expected",
                         line_of(call), i, text);
    for (int i = 1; i <= count; i++)
        if (!lua_isnil(L, base + i))
            io->results[i - 1] = ms_tensor_retain(ms_lua_tensor(L, base + i));
}

/* Upvalues: 2 the script's backward, 3 the saved table or nil, 4 the places of its tensors.
 * Argument: a backward_io. */
static int run_backward(lua_State *L)
{
    const backward_io *io = lua_touserdata(L, 1);
    luaL_checkstack(L, (int)io->output_count + 8, "custom");
    lua_pushvalue(L, lua_upvalueindex(2));
    for (uint32_t i = 0; i < io->output_count; i++) {
        if (io->gradients[i]) push_handle(L, io->gradients[i]);
        else lua_pushnil(L);
    }
    push_saved(L, io->saved);
    lua_call(L, (int)io->output_count + 1, LUA_MULTRET);
    take_gradients(L, 1, io);
    return 0;
}

/* What backward has made, and what it got, ends with it: the memory is given back at the same host
 * call on every rank. */
static void drop(ms_runtime *runtime, uint64_t begin, const char *why)
{
    uint64_t end = ms_handle_count(runtime);
    ms_handles_drop(runtime, begin, end, why);
    ms_handles_drop_spent(runtime, begin, end, why);
}

static ms_status backward(void *user, ms_tensor *const *gradients, ms_tensor *const *saved,
                          ms_tensor **results, const bool *needs)
{
    (void)needs;
    custom_call *call = user;
    ms_runtime *runtime = call->runtime;
    lua_State *L = call->callback->L;
    backward_io io = { .call = call,
                       .gradients = gradients,
                       .saved = saved,
                       .results = results,
                       .output_count = call->outputs };
    uint32_t script = ms_engine_script(runtime->engine);
    if (!lua_checkstack(L, 10) || !ms_callback_push(call->callback))
        return ms_engine_fail(runtime->engine, MS_ERROR_MEMORY,
                              "no room on the Lua stack for the backward of custom");
    lua_pushlightuserdata(L, &io);
    uint64_t begin = ms_handle_count(runtime);
    ms_status status = ms_lua_hook(L, runtime, 1, 0);
    drop(runtime, begin,
         "was valid only inside a backward function of ms.custom: return it, or call keep() there");
    ms_engine_set_script(runtime->engine, script);
    return status;
}

/* --------------------------------------------------------------------- call */

static const ms_custom_function functions = { .forward = forward,
                                              .backward = backward,
                                              .free = custom_free };

/* Pushes the borrowed tensors among the arguments from index `first` on. */
static ms_tensor **push_inputs(lua_State *L, int first, uint32_t *count)
{
    int top = lua_gettop(L);
    ms_tensor **inputs = lua_newuserdatauv(L, ((size_t)(top - first) + 2) * sizeof *inputs, 0);
    for (int i = first; i <= top; i++)
        if (ms_lua_is_tensor(L, i)) inputs[(*count)++] = ms_lua_tensor(L, i);
    return inputs;
}

/* core.custom(forward, backward, ...) -> the tensors that forward(...) returned, recorded. Stack: 1
 * forward, 2 backward, 3 the number of arguments, the arguments. Handles of the results are made
 * before anything runs. */
static int custom(lua_State *L)
{
    ms_runtime *runtime = ms_lua_runtime(L);
    ms_engine *engine = ms_lua_enter(L);
    uint32_t count = 0, made = 0;
    lua_pushinteger(L, lua_gettop(L) - 2);
    lua_insert(L, 3);
    ms_tensor *const *inputs = push_inputs(L, 4, &count);
    lua_pushvalue(L, lua_upvalueindex(1));
    lua_pushcclosure(L, run_forward, 1);
    ms_tensor *outputs[MS_CUSTOM_OUTPUTS] = { NULL };
    ms_handle *handles[MS_CUSTOM_OUTPUTS];
    int first = lua_gettop(L) + 1;
    luaL_checkstack(L, MS_CUSTOM_OUTPUTS + 8, "custom");
    for (int i = 0; i < MS_CUSTOM_OUTPUTS; i++) handles[i] = ms_lua_new_handle(L);
    void *memory = NULL;
    if (ms_allocate(&runtime->context, sizeof(custom_call), "custom", &memory))
        ms_lua_error(L, "%s", runtime->context.error.message);
    custom_call *call = memory;
    *call = (custom_call){ .runtime = runtime,
                           .L = L,
                           .run_forward = first - 1,
                           .inputs = count,
                           .script = ms_engine_script(engine) };
    uint64_t begin = ms_handle_count(runtime);
    ms_status status = ms_custom(engine, &functions, call, inputs, count, outputs, &made);
    if (status) custom_free(call);
    drop(runtime, begin,
         "was made in a forward function of ms.custom and went with it: return it, or call keep()");
    ms_lua_ok(L, status);
    for (uint32_t i = 0; i < made; i++) ms_handle_fill(handles[i], outputs[i]);
    lua_settop(L, first + (int)made - 1);
    bool recorded = false;
    for (uint32_t i = 0; i < made; i++) recorded |= ms_tensor_requires_grad(outputs[i]);
    /* Else the engine has freed the call. */
    if (recorded) ms_callback_lend(L, call->callback, first, (int)made);
    return (int)made;
}

void ms_open_custom(lua_State *L, int runtime)
{
    static const luaL_Reg list[] = { { "custom", custom }, { NULL, NULL } };
    ms_lua_register(L, runtime, list);
}
