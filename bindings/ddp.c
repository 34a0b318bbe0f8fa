/* ddp.c: reducers in Lua, and the bucket that links written in Lua see. What users call is lua/moonshard/ddp.lua's and hooks.lua's. */
#include <stdio.h>
#include <string.h>

#include "bindings/group.h"
#include "moonshard/ddp.h"

#define MS_REDUCER_TYPE "ms.Reducer"
#define MS_BUCKET_TYPE "ms.Bucket"
#define MS_LINK_TYPE "ms.NativeLink"

static const char life_key = 0;                /* registry: the userdata with the struct below */
static const char gone[] = "was only valid inside its comm hook; clone it, and call keep() on the clone, to keep its values";

/* The bucket whose hook is running, one at a time. A handle is good while its serial is this one's. User value 1: list of the tensor handles that were
 * given out, which end with the hook; 2: the reducer's list of parameters. */
typedef struct bucket_life { uint64_t serial; ms_bucket *bucket; int given; ms_tensor *buffer; int buffer_at; } bucket_life;
typedef struct bucket_box { bucket_life *life; uint64_t serial; uint32_t index; char label[32]; } bucket_box;
typedef struct reducer_box { ms_reducer *reducer; const ms_runtime *runtime; } reducer_box;      /* reducer: NULL once it was freed */

/* --------------------------------------------------------------------------------------------------------------------- native links */

/* { kind = "cast", dtype = "bf16", op = "avg", group = g } */
static ms_link read_link(lua_State *L, int index)
{
    static const char *const ops[] = { "sum", "avg", "min", "max", "prod", NULL };
    ms_link link = { .options = { .op = MS_REDUCE_OP_AVG, .dtype = MS_F32 } };
    index = lua_absindex(L, index);
    luaL_checktype(L, index, LUA_TTABLE);
    lua_getfield(L, index, "kind");
    const char *kind = lua_tostring(L, -1);
    link.kind = kind ? ms_link_find(kind) : NULL;
    if (!link.kind) ms_lua_error(L, "there is no native link '%s'", kind ? kind : luaL_typename(L, -1));
    if (lua_getfield(L, index, "op") != LUA_TNIL) link.options.op = (ms_reduce_op)ms_lua_choice(L, -1, ops, "op");
    if (lua_getfield(L, index, "dtype") != LUA_TNIL) link.options.dtype = ms_lua_dtype(L, -1);
    if (lua_getfield(L, index, "group") != LUA_TNIL) link.options.group = ms_lua_group(L, -1);
    lua_pop(L, 4);
    return link;
}

/* core.native_link{ kind = ... }: the same, read once. */
static int native_link(lua_State *L)
{
    ms_link *link = lua_newuserdatauv(L, sizeof *link, 0);
    *link = read_link(L, 1);
    luaL_setmetatable(L, MS_LINK_TYPE);
    return 1;
}

static const ms_link *check_link(lua_State *L, int index) { return luaL_checkudata(L, index, MS_LINK_TYPE); }

/* ---------------------------------------------------------------------------------------------------------------------------- buckets */

static bucket_life *get_life(lua_State *L)
{
    lua_rawgetp(L, LUA_REGISTRYINDEX, &life_key);
    bucket_life *life = lua_touserdata(L, -1);
    lua_pop(L, 1);
    return life;
}

static ms_bucket *check_bucket(lua_State *L)
{
    const bucket_box *box = luaL_checkudata(L, 1, MS_BUCKET_TYPE);
    if (box->serial != box->life->serial)
        ms_lua_error(L, "bucket %d \"%s\" was only valid until the result of its comm hook was there: keep data with clone() and keep()", (int)box->index, box->label);
    return box->life->bucket;
}

/* Pushes a handle of the tensor that ends with the hook. */
static ms_handle *give(lua_State *L, bucket_life *life)
{
    ms_handle *handle = ms_lua_new_handle(L);
    lua_rawgetp(L, LUA_REGISTRYINDEX, &life_key);
    lua_getiuservalue(L, -1, 1);
    lua_pushvalue(L, -3);
    lua_rawseti(L, -2, life->given + 1);
    life->given++;
    lua_pop(L, 2);
    return handle;
}

static int bucket_index(lua_State *L)
{
    lua_pushinteger(L, check_bucket(L)->index);
    return 1;
}

static int bucket_is_last(lua_State *L)
{
    lua_pushboolean(L, check_bucket(L)->is_last);
    return 1;
}

static int bucket_kind(lua_State *L)
{
    lua_pushstring(L, ms_bucket_kind_name(check_bucket(L)->kind));
    return 1;
}

static int bucket_dtype(lua_State *L)
{
    lua_pushstring(L, ms_dtype_name(ms_tensor_dtype(check_bucket(L)->flat)));
    return 1;
}

static int bucket_divisor(lua_State *L)
{
    lua_pushinteger(L, check_bucket(L)->divisor);
    return 1;
}

static int bucket_group(lua_State *L)
{
    static const char *const levels[] = { "all", "shard", "replicate", NULL };
    ms_bucket *bucket = check_bucket(L);
    if (!lua_isnoneornil(L, 2) && ms_lua_choice(L, 2, levels, "level") != 0) return ms_lua_error(L, "group: level '%s' comes with sharded models, which are not built yet", lua_tostring(L, 2));
    return ms_lua_push_group(L, bucket->group, 1);
}

static int bucket_buffer(lua_State *L)
{
    ms_lua_enter(L);
    ms_bucket *bucket = check_bucket(L);
    bucket_life *life = get_life(L);
    if (life->buffer == bucket->buffer) {
        lua_rawgetp(L, LUA_REGISTRYINDEX, &life_key);
        lua_getiuservalue(L, -1, 1);
        lua_rawgeti(L, -1, life->buffer_at);
        return 1;
    }
    ms_handle *handle = give(L, life);
    ms_handle_fill(handle, ms_tensor_retain(bucket->buffer));
    life->buffer = bucket->buffer;
    life->buffer_at = life->given;
    return 1;
}

static int bucket_set_buffer(lua_State *L)
{
    ms_lua_enter(L);
    ms_bucket *bucket = check_bucket(L);
    ms_bucket_set_buffer(bucket, ms_lua_tensor(L, 2));
    get_life(L)->buffer = NULL;
    return 0;
}

static int bucket_gradients(lua_State *L)
{
    ms_lua_enter(L);
    ms_bucket *bucket = check_bucket(L);
    bucket_life *life = get_life(L);
    lua_createtable(L, (int)bucket->count, 0);
    for (uint32_t i = 0; i < bucket->count; i++) {
        ms_tensor *view = NULL;
        ms_handle *handle = give(L, life);
        ms_lua_ok(L, ms_bucket_gradient(bucket, i, &view));
        ms_handle_fill(handle, view);
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    return 1;
}

static int bucket_parameters(lua_State *L)
{
    ms_bucket *bucket = check_bucket(L);
    lua_createtable(L, (int)bucket->count, 0);
    lua_rawgetp(L, LUA_REGISTRYINDEX, &life_key);
    lua_getiuservalue(L, -1, 2);
    for (uint32_t i = 0; i < bucket->count; i++) {
        lua_rawgeti(L, -1, (lua_Integer)bucket->positions[i] + 1);
        lua_rawseti(L, -4, (lua_Integer)i + 1);
    }
    lua_pop(L, 2);
    return 1;
}

static int bucket_shard(lua_State *L)
{
    ms_lua_enter(L);
    ms_bucket *bucket = check_bucket(L);
    ms_tensor *part = NULL, *full = ms_lua_tensor(L, 2);
    ms_lua_ok(L, ms_bucket_shard(bucket, full, &part));
    if (part == full) {
        ms_tensor_release(part);
        lua_settop(L, 2);
        return 1;
    }
    ms_handle *handle = ms_lua_new_handle(L);
    ms_handle_fill(handle, part);
    return 1;
}

/* bucket:_encode(link), bucket:_decode(link, before, reduced) -> tensor, bucket:_reduce(link) -> tensor, the point at which it is ready: a native link in
 * a chain that Lua runs. */
static int bucket_encode(lua_State *L)
{
    ms_lua_enter(L);
    ms_bucket *bucket = check_bucket(L);
    const ms_link *link = check_link(L, 2);
    ms_lua_ok(L, link->kind->encode(&link->options, bucket));
    get_life(L)->buffer = NULL;
    return 0;
}

static int bucket_decode(lua_State *L)
{
    ms_lua_enter(L);
    ms_bucket *bucket = check_bucket(L);
    const ms_link *link = check_link(L, 2);
    ms_tensor *before = ms_lua_tensor(L, 3), *reduced = ms_lua_tensor(L, 4), *decoded = NULL;
    ms_handle *handle = give(L, get_life(L));
    ms_lua_ok(L, link->kind->decode(&link->options, bucket, before, reduced, &decoded));
    ms_handle_fill(handle, decoded);
    return 1;
}

static int bucket_reduce(lua_State *L)
{
    ms_lua_enter(L);
    ms_bucket *bucket = check_bucket(L);
    const ms_link *link = check_link(L, 2);
    ms_tensor *reduced = NULL;
    ms_handle *handle = give(L, get_life(L));
    ms_lua_ok(L, link->kind->reduce(&link->options, bucket, &reduced));
    ms_handle_fill(handle, reduced);
    ms_point ready = ms_stream_last(ms_engine_current(bucket->engine));
    lua_pushinteger(L, ready.stream);
    lua_pushinteger(L, (lua_Integer)ready.seq);
    return 3;
}

static int bucket_string(lua_State *L)
{
    const bucket_box *box = luaL_checkudata(L, 1, MS_BUCKET_TYPE);
    lua_pushfstring(L, "bucket %d \"%s\"", (int)box->index, box->label);
    return 1;
}

/* ------------------------------------------------------------------------------------------------------------------ calling the hook */

/* What the engine calls, protected: makes the handle and calls f(bucket), upvalue 2, with the parameters, upvalue 3, at hand. */
static int call_with_bucket(lua_State *L)
{
    ms_bucket *bucket = lua_touserdata(L, 1);
    bucket_life *life = get_life(L);
    lua_rawgetp(L, LUA_REGISTRYINDEX, &life_key);
    lua_pushvalue(L, lua_upvalueindex(3));
    lua_setiuservalue(L, -2, 2);
    bucket_box *box = lua_newuserdatauv(L, sizeof *box, 0);
    *box = (bucket_box){ .life = life, .serial = life->serial, .index = bucket->index };
    memcpy(box->label, bucket->label, sizeof box->label);
    luaL_setmetatable(L, MS_BUCKET_TYPE);
    lua_pushvalue(L, lua_upvalueindex(2));
    lua_pushvalue(L, -2);
    lua_call(L, 1, 1);
    return 1;
}

/* The tensor handles that were given out end; nothing here allocates. */
static void end_life(lua_State *L, bucket_life *life)
{
    lua_rawgetp(L, LUA_REGISTRYINDEX, &life_key);
    lua_getiuservalue(L, -1, 1);
    for (int i = 1; i <= life->given; i++) {
        if (lua_rawgeti(L, -1, i) == LUA_TUSERDATA) ms_handle_drop(lua_touserdata(L, -1), gone);
        lua_pop(L, 1);
        lua_pushnil(L);
        lua_rawseti(L, -2, i);
    }
    lua_pop(L, 2);
    *life = (bucket_life){ .serial = life->serial + 1 };
}

static ms_status wrong_result(ms_engine *engine, const ms_bucket *bucket, const char *what)
{
    return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "comm hook, bucket %u \"%s\": %s; a tensor, or a future of one, is expected", bucket->index, bucket->label, what);
}

/* The value on top: a tensor, or a future that has its value. */
static ms_status take_result(lua_State *L, ms_engine *engine, const ms_bucket *bucket, ms_tensor **result, ms_point *ready)
{
    char text[64];
    bool future = lua_istable(L, -1);
    if (future) {
        lua_pushliteral(L, "index");
        lua_rawget(L, -2);
        lua_pushliteral(L, "number");
        lua_rawget(L, -3);
        if (!lua_isinteger(L, -1) || !lua_isinteger(L, -2)) return wrong_result(engine, bucket, "its future has no value yet: nothing will give it one");
        *ready = (ms_point){ .stream = (uint16_t)lua_tointeger(L, -2), .seq = (uint64_t)lua_tointeger(L, -1) };
        lua_pop(L, 2);
        lua_pushliteral(L, "result");
        lua_rawget(L, -2);
    }
    ms_handle *handle = luaL_testudata(L, -1, MS_TENSOR_TYPE);
    snprintf(text, sizeof text, "it returned a %s%s", future ? "future of a " : "", luaL_typename(L, -1));
    if (!handle) return wrong_result(engine, bucket, text);
    if (!handle->tensor) return wrong_result(engine, bucket, "it returned a tensor that is gone");
    *result = ms_tensor_retain(handle->tensor);
    return MS_OK;
}

static ms_status run_hook(void *user, ms_bucket *bucket, ms_tensor **result, ms_point *ready)
{
    ms_callback *callback = user;
    lua_State *L = callback->L;
    ms_engine *engine = bucket->engine;
    int top = lua_gettop(L);
    if (!lua_checkstack(L, 12)) return ms_engine_fail(engine, MS_ERROR_MEMORY, "no room on the Lua stack for a comm hook");
    bucket_life *life = get_life(L);
    if (!ms_callback_push(callback)) return ms_engine_fail(engine, MS_ERROR_STATE, "ddp: the ddp model of these parameters is gone, with its comm hook: call unwrap() before it goes");
    *life = (bucket_life){ .serial = life->serial + 1, .bucket = bucket };
    lua_pushlightuserdata(L, bucket);
    ms_status status = ms_lua_hook(L, callback->runtime, 1, 1);
    if (status) {
        char message[MS_ERROR_MESSAGE_BYTES];
        snprintf(message, sizeof message, "%s", ms_engine_error(engine)->message);
        status = ms_engine_fail(engine, MS_ERROR_ARGUMENT, "comm hook, bucket %u \"%s\": %s", bucket->index, bucket->label, message);
    } else status = take_result(L, engine, bucket, result, ready);
    end_life(L, life);
    lua_settop(L, top);
    return status;
}

/* --------------------------------------------------------------------------------------------------------------------------- reducers */

/* Tensors and their names, two lists of one length at `tensors` and `names`; in a userdata on the stack. */
static ms_reducer_parameter *read_parameters(lua_State *L, int tensors, int names, uint32_t *count)
{
    luaL_checktype(L, tensors, LUA_TTABLE);
    luaL_checktype(L, names, LUA_TTABLE);
    *count = (uint32_t)lua_rawlen(L, tensors);
    ms_reducer_parameter *parameters = lua_newuserdatauv(L, (*count + 1) * sizeof *parameters, 0);
    for (uint32_t i = 0; i < *count; i++) {
        lua_rawgeti(L, tensors, (lua_Integer)i + 1);
        lua_rawgeti(L, names, (lua_Integer)i + 1);
        parameters[i] = (ms_reducer_parameter){ .tensor = ms_lua_tensor(L, -2), .name = luaL_checkstring(L, -1) };
        lua_pop(L, 2);
    }
    return parameters;
}

static ms_reducer *check_reducer(lua_State *L)
{
    reducer_box *box = luaL_checkudata(L, 1, MS_REDUCER_TYPE);
    if (!box->reducer) ms_lua_error(L, "ddp: this model was unwrapped; use the module inside, or wrap it anew");
    return box->reducer;
}

static const uint64_t *read_caps(lua_State *L, int table, uint32_t *count)
{
    if (lua_getfield(L, table, "bucket_bytes") == LUA_TNIL) return NULL;
    *count = (uint32_t)lua_rawlen(L, -1);
    uint64_t *caps = lua_newuserdatauv(L, (*count + 1) * sizeof *caps, 0);
    for (uint32_t i = 0; i < *count; i++) {
        lua_rawgeti(L, -2, (lua_Integer)i + 1);
        caps[i] = (uint64_t)ms_lua_integer(L, -1, 1, INT64_MAX, "bucket_bytes");
        lua_pop(L, 1);
    }
    return caps;
}

/* The engine of a closed state has freed it. */
static int reducer_gc(lua_State *L)
{
    reducer_box *box = lua_touserdata(L, 1);
    if (box->reducer && !box->runtime->closed) ms_reducer_abandon(box->reducer);
    box->reducer = NULL;
    return 0;
}

/* core.reducer(parameters, names, { group =, bucket_bytes = { ... }?, links = { { kind = ... } ... } } or { hook = f(bucket) -> future }) */
static int reducer(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    lua_settop(L, 3);
    luaL_checktype(L, 3, LUA_TTABLE);
    uint32_t count = 0;
    ms_link links[MS_CHAIN_LINKS];
    ms_reducer_options options = { .links = links };
    const ms_reducer_parameter *parameters = read_parameters(L, 1, 2, &count);
    options.cap_bytes = read_caps(L, 3, &options.cap_count);
    lua_getfield(L, 3, "group");
    options.group = ms_lua_group(L, -1);
    if (lua_getfield(L, 3, "links") == LUA_TTABLE) {
        if (lua_rawlen(L, -1) > MS_CHAIN_LINKS) return ms_lua_error(L, "a chain has at most %d native links", MS_CHAIN_LINKS);
        for (; options.link_count < lua_rawlen(L, -1); options.link_count++) {
            lua_rawgeti(L, -1, (lua_Integer)options.link_count + 1);
            links[options.link_count] = read_link(L, -1);
            lua_pop(L, 1);
        }
    }
    /* Behind a full collection those that nobody holds are known. */
    ms_lua_collect(L, ms_lua_runtime(L));
    ms_reducer_sweep(engine);
    reducer_box *box = lua_newuserdatauv(L, sizeof *box, 1);
    int at = lua_gettop(L);
    *box = (reducer_box){ .runtime = ms_lua_runtime(L) };
    luaL_setmetatable(L, MS_REDUCER_TYPE);
    if (lua_getfield(L, 3, "hook") == LUA_TFUNCTION) {
        lua_pushvalue(L, lua_upvalueindex(1));
        lua_insert(L, -2);
        lua_pushvalue(L, 1);
        lua_pushcclosure(L, call_with_bucket, 3);
        options.hook_user = ms_callback_new(L, -1, at);
        options.hook = run_hook;
        options.hook_free = ms_callback_free;
    }
    ms_status status = ms_reducer_new(engine, &options, parameters, count, &box->reducer);
    if (status && options.hook_user) ms_callback_free(options.hook_user);
    ms_lua_ok(L, status);
    lua_settop(L, at);
    return 1;
}

/* reducer:forward(synchronize) */
static int reducer_forward(lua_State *L)
{
    ms_lua_enter(L);
    ms_lua_ok(L, ms_reducer_forward(check_reducer(L), lua_toboolean(L, 2)));
    return 0;
}

/* reducer:no_sync(inside) -> what it was */
static int reducer_no_sync(lua_State *L)
{
    lua_pushboolean(L, ms_reducer_set_no_sync(check_reducer(L), lua_toboolean(L, 2)));
    return 1;
}

static int reducer_rebuild(lua_State *L)
{
    ms_reducer_rebuild(check_reducer(L));
    return 0;
}

static int reducer_free(lua_State *L)
{
    ms_lua_refuse_in_hook(L, "unwrap", "the reduction that runs needs it");
    ms_lua_enter(L);
    ms_reducer_free(check_reducer(L));
    ((reducer_box *)lua_touserdata(L, 1))->reducer = NULL;
    return 0;
}

/* reducer:buckets() -> list of { index, bytes, parameters }, how many iterations were reduced */
static int reducer_buckets(lua_State *L)
{
    const ms_reducer *r = check_reducer(L);
    lua_newtable(L);
    for (uint32_t b = 0; b < ms_reducer_buckets(r); b++) {
        const ms_bucket *bucket = ms_reducer_bucket(r, b);
        lua_createtable(L, 0, 3);
        lua_pushinteger(L, bucket->index);
        lua_setfield(L, -2, "index");
        lua_pushinteger(L, (lua_Integer)ms_tensor_bytes(bucket->flat));
        lua_setfield(L, -2, "bytes");
        lua_pushinteger(L, bucket->count);
        lua_setfield(L, -2, "parameters");
        lua_rawseti(L, -2, (lua_Integer)b + 1);
    }
    lua_pushinteger(L, (lua_Integer)ms_reducer_iterations(r));
    return 2;
}

/* reducer:forward_end(), reducer:step_end() */
static int reducer_forward_end(lua_State *L)
{
    ms_lua_enter(L);
    ms_lua_ok(L, ms_reducer_forward_end(check_reducer(L)));
    return 0;
}

static int reducer_step_end(lua_State *L)
{
    ms_lua_enter(L);
    ms_lua_ok(L, ms_reducer_step_end(check_reducer(L)));
    return 0;
}

static void set_ms(lua_State *L, const char *name, uint64_t ns)
{
    lua_pushnumber(L, (lua_Number)ns / 1e6);
    lua_setfield(L, -2, name);
}

static void set_count(lua_State *L, const char *name, uint64_t count)
{
    lua_pushinteger(L, (lua_Integer)count);
    lua_setfield(L, -2, name);
}

/* reducer:stats() -> { forward_ms, backward_ms, reduce_ms, exposed_ms, step_ms, calls, payload_bytes, wire_bytes } of the last pass that has ended */
static int reducer_stats(lua_State *L)
{
    ms_reducer_stats stats = ms_reducer_stats_get(check_reducer(L));
    lua_createtable(L, 0, 9);
    set_count(L, "iterations", stats.iterations);
    set_ms(L, "forward_ms", stats.forward_ns);
    set_ms(L, "backward_ms", stats.backward_ns);
    set_ms(L, "reduce_ms", stats.reduce_ns);
    set_ms(L, "exposed_ms", stats.exposed_ns);
    set_ms(L, "step_ms", stats.step_ns);
    set_count(L, "calls", stats.calls);
    set_count(L, "payload_bytes", stats.payload_bytes);
    set_count(L, "wire_bytes", stats.wire_bytes);
    return 1;
}

/* core.ddp_compare(group, tensors, names): blocks */
static int ddp_compare(lua_State *L)
{
    ms_lua_refuse_in_hook(L, "ddp", "models are wrapped before training");
    ms_lua_enter(L);
    uint32_t count = 0;
    const ms_reducer_parameter *parameters = read_parameters(L, 2, 3, &count);
    ms_lua_ok(L, ms_ddp_compare(ms_lua_group(L, 1), parameters, count));
    return 0;
}

/* core.ddp_broadcast(group, tensors, root) */
static int ddp_broadcast(lua_State *L)
{
    ms_lua_enter(L);
    ms_group *group = ms_lua_group(L, 1);
    uint32_t count = 0, root = (uint32_t)ms_lua_integer(L, 3, 0, (int64_t)ms_group_size(group) - 1, "rank");
    ms_tensor **tensors = ms_lua_tensor_list(L, 2, &count);
    ms_lua_ok(L, ms_ddp_broadcast(group, tensors, count, root));
    return 0;
}

void ms_open_ddp(lua_State *L, int runtime)
{
    static const luaL_Reg functions[] = { { "reducer", reducer }, { "native_link", native_link }, { "ddp_compare", ddp_compare }, { "ddp_broadcast", ddp_broadcast }, { NULL, NULL } };
    static const luaL_Reg methods[] = { { "forward", reducer_forward }, { "forward_end", reducer_forward_end }, { "step_end", reducer_step_end }, { "stats", reducer_stats }, { "no_sync", reducer_no_sync }, { "rebuild", reducer_rebuild }, { "free", reducer_free }, { "buckets", reducer_buckets }, { NULL, NULL } };
    static const luaL_Reg bucket_methods[] = {
        { "index", bucket_index }, { "is_last", bucket_is_last }, { "kind", bucket_kind }, { "dtype", bucket_dtype }, { "divisor", bucket_divisor }, { "group", bucket_group },
        { "buffer", bucket_buffer }, { "set_buffer", bucket_set_buffer }, { "gradients", bucket_gradients }, { "parameters", bucket_parameters }, { "shard", bucket_shard },
        { "_encode", bucket_encode }, { "_decode", bucket_decode }, { "_reduce", bucket_reduce }, { NULL, NULL },
    };
    static const luaL_Reg bucket_events[] = { { "__tostring", bucket_string }, { NULL, NULL } };
    bucket_life *life = lua_newuserdatauv(L, sizeof *life, 2);
    *life = (bucket_life){ 0 };
    lua_newtable(L);
    lua_setiuservalue(L, -2, 1);
    lua_rawsetp(L, LUA_REGISTRYINDEX, &life_key);
    ms_lua_register(L, runtime, functions);
    static const luaL_Reg events[] = { { "__gc", reducer_gc }, { NULL, NULL } };
    ms_lua_type(L, runtime, MS_REDUCER_TYPE, events, methods);
    lua_pop(L, 1);
    ms_lua_type(L, runtime, MS_LINK_TYPE, NULL, NULL);
    lua_pop(L, 1);
    ms_lua_type(L, runtime, MS_BUCKET_TYPE, bucket_events, bucket_methods);
    lua_pop(L, 1);
}
