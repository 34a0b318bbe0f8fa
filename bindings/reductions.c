/* reductions.c: what reducers of ddp and sharded models of fsdp have in common in Lua: statistics,
 * buckets, and calls as buckets are reduced. */
#include "bindings/reductions.h"

#include "bindings/arguments.h"
#include "bindings/call.h"
#include "bindings/fields.h"
#include "bindings/enter.h"
#include "bindings/runtime.h"
#include "bindings/script.h"

ms_reductions_box *ms_lua_new_reductions(lua_State *L, const char *type, const char *gone)
{
    ms_reductions_box *box = lua_newuserdatauv(L, sizeof *box, 2);
    *box = (ms_reductions_box){ .gone = gone, .runtime = ms_lua_runtime(L) };
    luaL_setmetatable(L, type);
    return box;
}

ms_reductions_box *ms_lua_reductions(lua_State *L)
{
    ms_reductions_box *box = luaL_testudata(L, 1, MS_FSDP_TYPE);
    if (!box) box = luaL_checkudata(L, 1, MS_REDUCER_TYPE);
    if (!box->source) ms_lua_error(L, "%s", box->gone);
    return box;
}

/* -------------------------------------------------------------------- asking */

/* object:layout() -> how often buckets were made, how many passes with the present ones were
 * reduced. Both are equal on all ranks between two passes, so planners may decide by them. */
static int reductions_layout(lua_State *L)
{
    uint64_t passes;
    const ms_reductions_box *box = ms_lua_reductions(L);
    lua_pushinteger(L, (lua_Integer)ms_gradient_source_layout(box->source, &passes));
    lua_pushinteger(L, (lua_Integer)passes);
    return 2;
}

/* object:await_times(): before forward(true); blocks until the pass before the last has ended.
 * After it, the times of that pass are known on every rank, and planners on all ranks plan from the
 * same facts. */
static int reductions_await_times(lua_State *L)
{
    ms_lua_enter(L);
    ms_reductions_box *box = ms_lua_reductions(L);
    ms_lua_ok(L, ms_gradient_source_await_times(box->source));
    return 0;
}

/* object:is_used(position) -> whether any rank uses it, true; or whether this rank does, false.
 * Positions count from 1 in Lua. */
static int reductions_is_used(lua_State *L)
{
    bool known;
    const ms_reductions_box *box = ms_lua_reductions(L);
    uint32_t position = (uint32_t)ms_lua_integer(L, 2, 1, UINT32_MAX, "position") - 1;
    lua_pushboolean(L, ms_gradient_source_is_used(box->source, position, &known));
    lua_pushboolean(L, known);
    return 2;
}

/* --------------------------------------------------- as buckets are reduced */

/* Positions of the bucket's parameters in the list that the reducer was made of, from 1. An
 * optimizer finds its parameters by them. */
static void push_positions(lua_State *L, const ms_bucket *bucket)
{
    lua_createtable(L, (int)bucket->count, 0);
    for (uint32_t i = 0; i < bucket->count; i++) {
        lua_pushinteger(L, (lua_Integer)bucket->positions[i] + 1);
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
}

/* Upvalue 1: f(index, positions); 2: g() or nil. MS_REDUCED_ALL represents the end of the pass, and
 * then there is no bucket. */
static int call_on_reduced(lua_State *L)
{
    const ms_reductions_box *box = lua_touserdata(L, 1);
    uint32_t bucket = (uint32_t)lua_tointeger(L, 2);
    bool end = bucket == MS_REDUCED_ALL;
    lua_pushvalue(L, lua_upvalueindex(end ? 2 : 1));
    if (end && lua_isnil(L, -1)) return 0;
    if (!end) {
        lua_pushinteger(L, bucket);
        push_positions(L, ms_gradient_source_bucket(box->source, bucket));
    }
    lua_call(L, end ? 0 : 2, 0);
    return 0;
}

/* What on_reduced gets as user; free_on_reduced frees both. `box` is a copy of the object's, which
 * calls the function, so it exists then. */
typedef struct reduced_user {
    ms_callback *callback;
    ms_reductions_box box;
} reduced_user;

/* Called by the engine on the host thread once the bucket's reduction is enqueued. Errors become
 * MS_ERROR_SCRIPT and end the job. It runs as a hook: nothing in it may block. A function whose box
 * is gone is an error here, since an optimizer that silently stopped stepping would not be noticed.
 */
static ms_status on_reduced(void *user, uint32_t bucket)
{
    reduced_user *u = user;
    lua_State *L = u->callback->L;
    ms_engine *engine = u->callback->runtime->engine;
    /* The engine calls with the stack of whatever bound function is running. */
    if (!lua_checkstack(L, 12))
        return ms_engine_fail(engine, MS_ERROR_MEMORY, "no room on the Lua stack for a callback");
    if (!ms_callback_push(u->callback))
        return ms_engine_fail(engine, MS_ERROR_STATE,
                              "the model of these parameters was collected, and with it "
                              "the functions that step them: call unwrap() before dropping it");
    lua_pushlightuserdata(L, &u->box);
    lua_pushinteger(L, bucket);
    return ms_lua_hook(L, u->callback->runtime, 2, 0);
}

/* The runtime is read first, since the callback holds the pointer to it. */
static void free_on_reduced(void *user)
{
    reduced_user *u = user;
    ms_runtime *runtime = u->callback->runtime;
    ms_callback_free(u->callback);
    ms_release(&runtime->context, u);
}

/* object:on_reduced(f(index, positions), g()?): f for each bucket of a synchronized backward once
 * its reduction is enqueued, g after the last; both as hooks. reducer:on_reduced(): no more calls.
 * The closure of both is kept by the reducer's userdata and takes the place of the one before only
 * after the engine has taken the new user. */
static int reductions_on_reduced(lua_State *L)
{
    ms_reductions_box *box = ms_lua_reductions(L);
    void *memory = NULL;
    lua_settop(L, 3);
    /* The former functions stay in the user value until others take their place. */
    if (lua_isnil(L, 2)) {
        ms_gradient_source_set_on_reduced(box->source, NULL, NULL, NULL);
        return 0;
    }
    luaL_checktype(L, 2, LUA_TFUNCTION);
    if (!lua_isnil(L, 3)) luaL_checktype(L, 3, LUA_TFUNCTION);
    lua_pushcclosure(L, call_on_reduced, 2);
    /* Anchored to the reducer's userdata, so that functions that refer to the model are no leak. */
    ms_callback *callback = ms_callback_new(L, -1, 1);
    ms_runtime *runtime = callback->runtime;
    if (ms_allocate(&runtime->context, sizeof(reduced_user), "a callback", &memory)) {
        ms_callback_free(callback);
        return luaL_error(L, "%s", runtime->context.error.message);
    }
    reduced_user *user = memory;
    *user = (reduced_user){ callback, *box };
    ms_gradient_source_set_on_reduced(box->source, on_reduced, user, free_on_reduced);
    /* The former function is found in user value 2 and forgotten, or both would be kept. */
    if (lua_getiuservalue(L, 1, 2) == LUA_TFUNCTION) ms_callback_forget(L, 1, -1);
    lua_pop(L, 1);
    lua_setiuservalue(L, 1, 2);
    return 0;
}

/* object:bucket_times() -> list of { index, bytes, positions, ready_ms, reduce_ms } in order of
 * index; the times are nil while none with these buckets are known. `stats` is called for what
 * it does on the way: it takes over times that have come in since. */
static int reductions_bucket_times(lua_State *L)
{
    ms_reductions_box *box = ms_lua_reductions(L);
    ms_gradient_source_stats(box->source);
    lua_newtable(L);
    for (uint32_t b = 0; b < ms_gradient_source_buckets(box->source); b++) {
        const ms_bucket *bucket = ms_gradient_source_bucket(box->source, b);
        ms_bucket_times times;
        lua_createtable(L, 0, 5);
        ms_lua_set_integer(L, "index", b);
        ms_lua_set_integer(L, "bytes", (int64_t)ms_tensor_bytes(bucket->flat));
        push_positions(L, bucket);
        lua_setfield(L, -2, "positions");
        if (ms_gradient_source_bucket_times(box->source, b, &times)) {
            ms_lua_set_ms(L, "ready_ms", times.ready_ns);
            ms_lua_set_ms(L, "reduce_ms", times.reduce_ns);
        }
        lua_rawseti(L, -2, (lua_Integer)b + 1);
    }
    return 1;
}

/* object:buckets() -> list of { index, bytes, parameters }, how many iterations were reduced. For
 * messages and reports. */
static int reductions_buckets(lua_State *L)
{
    const ms_reductions_box *box = ms_lua_reductions(L);
    lua_newtable(L);
    for (uint32_t b = 0; b < ms_gradient_source_buckets(box->source); b++) {
        const ms_bucket *bucket = ms_gradient_source_bucket(box->source, b);
        lua_createtable(L, 0, 3);
        ms_lua_set_integer(L, "index", bucket->index);
        ms_lua_set_integer(L, "bytes", (int64_t)ms_tensor_bytes(bucket->flat));
        ms_lua_set_integer(L, "parameters", bucket->count);
        lua_rawseti(L, -2, (lua_Integer)b + 1);
    }
    lua_pushinteger(L, (lua_Integer)ms_gradient_source_passes(box->source));
    return 2;
}

/* Called after the optimizer. Where steps are noted, stats() is of whole steps and not of the last
 * pass. */
static int reductions_step_end(lua_State *L)
{
    ms_lua_enter(L);
    ms_reductions_box *box = ms_lua_reductions(L);
    ms_lua_ok(L, ms_gradient_source_step_end(box->source));
    return 0;
}

/* object:link_stats() -> list of { calls, payload_bytes, wire_bytes, between_nodes_bytes, ms,
 * exposed_ms }, one for
 * each link; empty if the chain has no accounts. Call stats() before. stats() takes over the times
 * of passes that have ended since, and this reads them. */
static int reductions_link_stats(lua_State *L)
{
    const ms_reductions_box *box = ms_lua_reductions(L);
    uint32_t count = ms_gradient_source_links(box->source);
    lua_createtable(L, (int)count, 0);
    for (uint32_t i = 1; i <= count; i++) {
        ms_link_stats stats = ms_gradient_source_link_stats(box->source, i);
        lua_createtable(L, 0, 6);
        ms_lua_set_integer(L, "calls", (int64_t)stats.calls);
        ms_lua_set_integer(L, "payload_bytes", (int64_t)stats.payload_bytes);
        ms_lua_set_integer(L, "wire_bytes", (int64_t)stats.wire_bytes);
        ms_lua_set_integer(L, "between_hosts_bytes", (int64_t)stats.between_nodes_bytes);
        ms_lua_set_ms(L, "ms", stats.ns);
        ms_lua_set_ms(L, "exposed_ms", stats.exposed_ns);
        lua_rawseti(L, -2, (lua_Integer)i);
    }
    return 1;
}

/* object:stats() -> { forward_ms, backward_ms, reduce_ms, exposed_ms, step_ms, rebuilt, calls,
 * payload_bytes, wire_bytes, between_hosts_bytes } of the last pass that has ended; error: of the
 * last that failed, or nil. Nothing waits: times are those of a pass that the device has finished.
 * The error is a text, as the reduction that failed has ended its job. */
static int reductions_stats(lua_State *L)
{
    ms_reductions_box *box = ms_lua_reductions(L);
    ms_pass_stats stats = ms_gradient_source_stats(box->source);
    lua_createtable(L, 0, 12);
    ms_lua_set_string(L, "error", ms_gradient_source_error(box->source));
    ms_lua_set_integer(L, "iterations", (int64_t)stats.iterations);
    ms_lua_set_ms(L, "forward_ms", stats.forward_ns);
    ms_lua_set_ms(L, "backward_ms", stats.backward_ns);
    ms_lua_set_ms(L, "reduce_ms", stats.reduce_ns);
    ms_lua_set_ms(L, "exposed_ms", stats.exposed_ns);
    ms_lua_set_ms(L, "step_ms", stats.step_ns);
    ms_lua_set_boolean(L, "rebuilt", ms_gradient_source_is_rebuilt(box->source));
    ms_lua_set_integer(L, "calls", (int64_t)stats.calls);
    ms_lua_set_integer(L, "payload_bytes", (int64_t)stats.payload_bytes);
    ms_lua_set_integer(L, "wire_bytes", (int64_t)stats.wire_bytes);
    ms_lua_set_integer(L, "between_hosts_bytes", (int64_t)stats.between_nodes_bytes);
    return 1;
}

static const luaL_Reg methods[] = {
    { "step_end", reductions_step_end },         { "stats", reductions_stats },
    { "link_stats", reductions_link_stats },     { "buckets", reductions_buckets },
    { "is_used", reductions_is_used },           { "layout", reductions_layout },
    { "await_times", reductions_await_times },   { "on_reduced", reductions_on_reduced },
    { "bucket_times", reductions_bucket_times }, { NULL, NULL },
};

void ms_lua_add_reductions(lua_State *L, int runtime) { ms_lua_register(L, runtime, methods); }
