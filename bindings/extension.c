/* extension.c: functions in Lua that are around the gathers of a sharded model. Users give them
 * to ms.fsdp as before_gather and after_gather. */
#include "bindings/extension.h"

#include <string.h>

#include "bindings/arguments.h"
#include "bindings/call.h"
#include "bindings/fields.h"
#include "bindings/handles.h"
#include "bindings/script.h"

/* Both functions, and the model's box, with which they go. */
typedef struct extension {
    ms_runtime *runtime;
    ms_callback *before, *after;
} extension;

/* Upvalue 2: f; arguments: the tensor (borrowed), the unit, the part. The handle ends with the
 * call, unless f returns it. */
static int call_with_tensor(lua_State *L)
{
    ms_tensor *tensor = lua_touserdata(L, 1);
    ms_handle *handle = ms_lua_new_handle(L);
    ms_handle_fill(handle, ms_tensor_retain(tensor));
    lua_pushvalue(L, lua_upvalueindex(2));
    lua_insert(L, 1);
    lua_replace(L, 2);
    lua_call(L, 3, 1);
    return 1;
}

/* Pushes what is on top as the function of a callback. */
static ms_callback *new_callback(lua_State *L, int anchor)
{
    if (lua_isnil(L, -1)) return NULL;
    luaL_checktype(L, -1, LUA_TFUNCTION);
    lua_pushvalue(L, lua_upvalueindex(1));
    lua_pushvalue(L, -2);
    lua_pushcclosure(L, call_with_tensor, 2);
    ms_callback *callback = ms_callback_new(L, -1, anchor);
    lua_pop(L, 1);
    return callback;
}

/* The tensor on top, owned. */
static ms_status take_tensor(lua_State *L, ms_engine *engine, const char *what, ms_tensor **out)
{
    char text[MS_RETURNED_BYTES];
    const ms_handle *handle = ms_lua_returned(L, -1, text);
    if (!handle)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "%s: it returned a %s; a tensor is expected", what, text);
    *out = ms_tensor_retain(handle->tensor);
    return MS_OK;
}

/* Handles that the function has made go now, so that memory is given back at the same host call on
 * every rank, whenever Lua collects. */
static ms_status call(extension *e, ms_callback *callback, const char *what, uint32_t unit,
                      uint32_t part, ms_tensor *given, ms_tensor **out)
{
    lua_State *L = callback->L;
    ms_runtime *runtime = e->runtime;
    ms_engine *engine = runtime->engine;
    uint32_t script = ms_engine_script(engine);
    int top = lua_gettop(L);
    if (!lua_checkstack(L, 12))
        return ms_engine_fail(engine, MS_ERROR_MEMORY, "no room on the Lua stack for %s", what);
    if (!ms_callback_push(callback))
        return ms_engine_fail(engine, MS_ERROR_STATE,
                              "%s: the fsdp model of these parameters is gone", what);
    uint64_t begin = ms_handle_count(runtime);
    lua_pushlightuserdata(L, given);
    lua_pushinteger(L, unit);
    lua_pushinteger(L, part);
    ms_status status = ms_lua_hook(L, runtime, 3, 1);
    if (!status) status = take_tensor(L, engine, what, out);
    lua_settop(L, top);
    ms_handles_drop(runtime, begin, ms_handle_count(runtime),
                    "it was made in before_gather or after_gather, which has returned");
    ms_engine_set_script(engine, script);
    return status;
}

static ms_status before(void *user, uint32_t unit, uint32_t part, ms_tensor *shard,
                        ms_tensor **sent)
{
    extension *e = user;
    return call(e, e->before, "before_gather", unit, part, shard, sent);
}

static ms_status after(void *user, uint32_t unit, uint32_t part, ms_tensor *gathered,
                       ms_tensor **whole)
{
    extension *e = user;
    return call(e, e->after, "after_gather", unit, part, gathered, whole);
}

static void free_extension(void *user)
{
    extension *e = user;
    ms_runtime *runtime = e->runtime;
    if (e->before) ms_callback_free(e->before);
    if (e->after) ms_callback_free(e->after);
    ms_release(&runtime->context, e);
}

int ms_lua_extend(lua_State *L, ms_fsdp *fsdp)
{
    ms_runtime *runtime = ms_lua_runtime(L);
    void *memory = NULL;
    lua_settop(L, 3);
    ms_lua_ok(L, ms_allocate(&runtime->context, sizeof(extension), "an extension", &memory));
    extension *e = memory;
    *e = (extension){ .runtime = runtime };
    ms_gather_extension functions = { .user = e, .free = free_extension };
    /* From here on the model frees it, also if a callback cannot be made. */
    ms_fsdp_extend(fsdp, functions);
    lua_pushvalue(L, 2);
    e->before = new_callback(L, 1);
    lua_pushvalue(L, 3);
    e->after = new_callback(L, 1);
    if (e->before) functions.before = before;
    if (e->after) functions.after = after;
    ms_fsdp_extend(fsdp, functions);
    return 0;
}

int ms_lua_push_spans(lua_State *L, const ms_fsdp *fsdp, uint32_t unit, uint32_t part)
{
    ms_shard_span span;
    lua_newtable(L);
    for (uint32_t i = 0; ms_fsdp_span_get(fsdp, unit, part, i, &span); i++) {
        lua_createtable(L, 0, 4);
        ms_lua_set_string(L, "name", span.name);
        ms_lua_set_integer(L, "at", span.at);
        ms_lua_set_integer(L, "count", span.count);
        lua_createtable(L, (int)span.dims, 0);
        for (uint32_t d = 0; d < span.dims; d++) {
            lua_pushinteger(L, span.shape[d]);
            lua_rawseti(L, -2, (lua_Integer)d + 1);
        }
        lua_setfield(L, -2, "shape");
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    lua_pushinteger(L, ms_fsdp_part_length(fsdp, unit, part));
    return 2;
}
