/* bucket.c: the bucket that links written in Lua see. What users call is
 * lua/moonshard/hooks/init.lua's. */
#include "bindings/bucket.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "bindings/arguments.h"
#include "bindings/call.h"
#include "bindings/group.h"
#include "bindings/link.h"
#include "bindings/enter.h"
#include "bindings/handles.h"
#include "bindings/runtime.h"
#include "bindings/script.h"

#define MS_BUCKET_TYPE "ms.Bucket"

/* The address is the key, so no other library can meet it. */
static const char life_key = 0; /* registry: the userdata with the struct below */
static const char gone[] = "was only valid inside its comm hook; clone it, and call keep() on the "
                           "clone, to keep its values";

/* The bucket whose hook is running; there is one at a time, because hooks run on the host thread
 * and do not nest. A Lua handle of a bucket is good while its serial is this one's. User value 1:
 * list of the tensor handles that were given out, which end with the hook; 2: the reducer's list of
 * parameters. between: the second half of a hybrid bucket's reduction, while it runs. buffer,
 * buffer_at: the tensor that the last buffer() returned, and its place in user value 1. It is in
 * the registry and not in the runtime, because its user values keep the tensor handles and the
 * parameters alive. */
typedef struct bucket_life {
    uint64_t serial;
    ms_bucket *bucket;
    ms_hybrid *between;
    int given;
    uint32_t link;
    ms_tensor *buffer;
    int buffer_at;
} bucket_life;

/* A Lua handle of a bucket. index and label are copies, for messages after the bucket is gone.
 * bucket must not be used once the serials differ: the reducer may have freed it. */
typedef struct bucket_box {
    bucket_life *life;
    ms_bucket *bucket;
    uint64_t serial;
    uint32_t index;
    char label[32];
} bucket_box;

/* ------------------------------------------------------------------ buckets */

/* Leaves the stack as it was. The registry holds the only one of this Lua state. */
static bucket_life *get_life(lua_State *L)
{
    lua_rawgetp(L, LUA_REGISTRYINDEX, &life_key);
    bucket_life *life = lua_touserdata(L, -1);
    lua_pop(L, 1);
    return life;
}

/* The test is a comparison of two numbers, so it can be in every method. */
ms_bucket *ms_lua_bucket(lua_State *L, int index)
{
    const bucket_box *box = luaL_checkudata(L, index, MS_BUCKET_TYPE);
    if (box->serial != box->life->serial)
        ms_lua_error(L,
                     "bucket %d \"%s\" was only valid until the result of its comm hook was there: "
                     "keep data with clone() and keep()",
                     (int)box->index, box->label);
    return box->bucket;
}

/* `bucket` of the life is set only while a hook runs that has a bucket; gradient hooks of
 * parameters are not links. */
void ms_lua_refuse_in_link(lua_State *L, const char *what, const char *instead)
{
    if (get_life(L)->bucket) ms_lua_error(L, "%s cannot be used inside a link: %s", what, instead);
}

/* For methods, whose object is at 1. */
static ms_bucket *check_bucket(lua_State *L) { return ms_lua_bucket(L, 1); }

/* Pushes a handle of the tensor that ends with the hook. Each is noted in a list, since a script
 * may keep the handle in a variable: after the hook the bucket's memory belongs to the next pass.
 */
static ms_handle *give(lua_State *L, bucket_life *life)
{
    ms_handle *handle = ms_lua_new_handle(L);
    lua_rawgetp(L, LUA_REGISTRYINDEX, &life_key);
    lua_getiuservalue(L, -1, 1);
    lua_pushvalue(L, -3);
    lua_rawseti(L, -2, life->given + 1);
    /* Raised only when the handle is in the list, so that end_life finds each. */
    life->given++;
    lua_pop(L, 2);
    return handle;
}

/* bucket:index() -> its index; 0 is launched first. In the order of launch, which is the same on
 * all ranks. */
static int bucket_index(lua_State *L)
{
    lua_pushinteger(L, check_bucket(L)->index);
    return 1;
}

/* bucket:is_last() -> whether it is the last bucket of the pass. Links that do something once in a
 * pass do it there. Buckets of delayed parameters come after it and pass no link. */
static int bucket_is_last(lua_State *L)
{
    lua_pushboolean(L, check_bucket(L)->is_last);
    return 1;
}

/* bucket:kind() -> "all_reduce", "reduce_scatter" or "hybrid". It says what the chain has to
 * return: all numbers, or this rank's shard. */
static int bucket_kind(lua_State *L)
{
    lua_pushstring(L, ms_bucket_kind_name(check_bucket(L)->kind));
    return 1;
}

/* bucket:dtype() -> dtype of the gradients, whatever the buffer is now. A result must have it
 * again. */
static int bucket_dtype(lua_State *L)
{
    lua_pushstring(L, ms_dtype_name(ms_tensor_dtype(check_bucket(L)->flat)));
    return 1;
}

/* bucket:divisor() -> the number of ranks that a mean is over. It is smaller than the group where
 * ranks have run out of inputs (join). */
static int bucket_divisor(lua_State *L)
{
    double divisor = check_bucket(L)->divisor;
    if (divisor == floor(divisor)) lua_pushinteger(L, (lua_Integer)divisor);
    else lua_pushnumber(L, divisor);
    return 1;
}

/* bucket:group(level?) -> group; level "all" (the default), "shard" or "replicate". A level that
 * the kind does not have is the group of this rank alone, so a link can be written once for all
 * kinds. The handle has channel 1: the collectives of links run there. */
static int bucket_group(lua_State *L)
{
    static const char *const levels[] = { "all", "shard", "replicate", NULL };
    ms_bucket *bucket = check_bucket(L);
    ms_group *group = NULL;
    ms_lua_ok(L, ms_bucket_group(bucket,
                                 lua_isnoneornil(L, 2)
                                     ? MS_LEVEL_ALL
                                     : (ms_bucket_level)ms_lua_choice(L, 2, levels, "level"),
                                 &group));
    return ms_lua_push_group(L, group, 1);
}

/* bucket:buffer() -> the tensor that the next link gets. As long as no link replaces it, all calls
 * return one handle, so that scripts may compare them. The bucket's first buffer has the sum of
 * this rank's gradients, undivided. */
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
    /* give has put the handle there. */
    life->buffer_at = life->given;
    return 1;
}

/* bucket:set_buffer(tensor): later links see this one. Whether it is a cast is decided before the
 * buffer is replaced, because it is compared with the old one. The bucket retains the tensor, so
 * the script's handle may end. */
static int bucket_set_buffer(lua_State *L)
{
    ms_lua_enter(L);
    ms_bucket *bucket = check_bucket(L);
    ms_tensor *given = ms_lua_tensor(L, 2), *tensor = NULL;
    ms_dtype dtype = ms_tensor_dtype(given);
    /* A plain cast only rounds, which the reduction reports. */
    bool cast = ms_dtype_is_float(dtype) && dtype != ms_tensor_dtype(bucket->buffer)
                && ms_bucket_loss_is_known(bucket);
    ms_lua_ok(L, ms_bucket_row(given, &tensor));
    ms_bucket_set_buffer(bucket, tensor);
    ms_tensor_release(tensor);
    if (cast) ms_bucket_mark_lossless(bucket);
    /* The next buffer() makes a handle of the new tensor. */
    get_life(L)->buffer = NULL;
    return 0;
}

/* bucket:wants_sent() -> whether a link that loses some of the numbers has to report; bucket:
 * set_sent(t): what the other ranks receive of this rank's numbers */
static int bucket_wants_sent(lua_State *L)
{
    const ms_bucket *bucket = check_bucket(L);
    lua_pushboolean(L, bucket->wants_sent && !bucket->sent);
    return 1;
}

/* Does nothing unless a link has asked for the report, so links may report without asking. */
static int bucket_set_sent(lua_State *L)
{
    ms_lua_enter(L);
    ms_bucket *bucket = check_bucket(L);
    ms_tensor *sent = ms_lua_tensor(L, 2);
    if (bucket->wants_sent) ms_lua_ok(L, ms_bucket_set_sent(bucket, sent));
    return 0;
}

/* For links that keep the residual. bucket:ask_sent(): later links have to report; bucket:sent() ->
 * what they reported, or nil. It represents ms_error_feedback_encode in a chain that Lua runs. */
static int bucket_ask_sent(lua_State *L)
{
    ms_bucket *bucket = check_bucket(L);
    bucket->wants_sent = true;
    ms_bucket_mark_lossless(bucket);
    return 0;
}

/* The tensor belongs to the chain; the handle ends with the hook. */
static int bucket_sent(lua_State *L)
{
    ms_lua_enter(L);
    ms_bucket *bucket = check_bucket(L);
    if (!bucket->sent) return 0;
    ms_handle *handle = give(L, get_life(L));
    ms_handle_fill(handle, ms_tensor_retain(bucket->sent));
    return 1;
}

/* bucket:gradients() -> list of views of the buffer in the parameters' shapes. Each handle is in
 * the list before its view is made: an error must not leave a view that nothing releases. They are
 * made again after set_buffer: of a buffer of another length there are none, which is an error. */
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

/* bucket:parameters() -> list of the parameters, the same handles that the script knows. A link may
 * use them as keys of its own tables, hence the same handles. */
static int bucket_parameters(lua_State *L)
{
    ms_bucket *bucket = check_bucket(L);
    lua_createtable(L, (int)bucket->count, 0);
    lua_rawgetp(L, LUA_REGISTRYINDEX, &life_key);
    lua_getiuservalue(L, -1, 2);
    for (uint32_t i = 0; i < bucket->count; i++) {
        /* Positions count from 0 in C. */
        lua_rawgeti(L, -1, (lua_Integer)bucket->positions[i] + 1);
        lua_rawseti(L, -4, (lua_Integer)i + 1);
    }
    lua_pop(L, 2);
    return 1;
}

/* bucket:shard(tensor) -> this rank's part of it; of all_reduce buckets the same handle. It is how
 * a link for sharded buckets returns its result: the view is written where the reducer wants it. */
static int bucket_shard(lua_State *L)
{
    ms_lua_enter(L);
    ms_bucket *bucket = check_bucket(L);
    ms_tensor *part = NULL, *full = ms_lua_tensor(L, 2);
    ms_handle *handle = ms_lua_new_handle(L);
    ms_lua_ok(L, ms_bucket_shard(bucket, full, &part));
    /* No view was made: the script gets its own handle back. */
    if (part == full) {
        ms_tensor_release(part);
        lua_settop(L, 2);
        return 1;
    }
    ms_handle_fill(handle, part);
    return 1;
}

/* bucket:_encode(link), bucket:_decode(link, before, reduced) -> tensor, bucket:_reduce(link) ->
 * tensor, the point at which it is ready: a native link in a chain that Lua runs. */
static const ms_link *enter_link(lua_State *L, ms_bucket **bucket)
{
    ms_lua_enter_inside(L);
    *bucket = check_bucket(L);
    return ms_lua_link(L, 2);
}

/* bucket:_encode(link): the buffer may be another one after it. enter_inside: a link's work is
 * charged to the line that called backward. */
static int bucket_encode(lua_State *L)
{
    ms_bucket *bucket = NULL;
    const ms_link *link = enter_link(L, &bucket);
    ms_lua_ok(L, ms_link_run_encode(link, bucket));
    get_life(L)->buffer = NULL;
    return 0;
}

/* bucket:_decode(link, before, reduced) -> tensor. before and reduced are the tensors that
 * ms.hooks has kept for this link. The result's handle ends with the hook, like all that a bucket
 * gives out. */
static int bucket_decode(lua_State *L)
{
    ms_bucket *bucket = NULL;
    const ms_link *link = enter_link(L, &bucket);
    ms_tensor *before = ms_lua_tensor(L, 3), *reduced = NULL, *decoded = NULL;
    ms_handle *handle = give(L, get_life(L));
    ms_lua_ok(L, ms_bucket_row(ms_lua_tensor(L, 4), &reduced));
    ms_status status = ms_link_run_decode(link, bucket, before, reduced, &decoded);
    ms_tensor_release(reduced);
    ms_lua_ok(L, status);
    ms_handle_fill(handle, decoded);
    return 1;
}

/* bucket:_reduce(link) -> tensor, stream, number: the result and the point at which it is ready.
 * The future that ms.hooks makes of it needs the point. */
static int bucket_reduce(lua_State *L)
{
    ms_bucket *bucket = NULL;
    const ms_link *link = enter_link(L, &bucket);
    ms_tensor *reduced = NULL;
    ms_handle *handle = give(L, get_life(L));
    ms_lua_ok(L, ms_link_run_reduce(link, bucket, &reduced));
    ms_handle_fill(handle, reduced);
    ms_point ready = ms_stream_last(ms_engine_current(bucket->engine));
    lua_pushinteger(L, ready.stream);
    lua_pushinteger(L, (lua_Integer)ready.seq);
    return 3;
}

/* Pushes a handle of the bucket, or of the bucket between its reductions; it ends with the hook.
 * label is an array of fixed size, so a copy cannot fail. */
static void push_bucket(lua_State *L, bucket_life *life, ms_bucket *bucket)
{
    bucket_box *box = lua_newuserdatauv(L, sizeof *box, 0);
    *box = (bucket_box){
        .life = life, .bucket = bucket, .serial = life->serial, .index = bucket->index
    };
    memcpy(box->label, bucket->label, sizeof box->label);
    luaL_setmetatable(L, MS_BUCKET_TYPE);
}

/* bucket:_open_between(reduce) -> the bucket of this rank's shard, which the links between the two
 * reductions of a hybrid bucket get; bucket:_close_between(inner, result). The inner bucket has the
 * same serial, so both handles end together. */
static int bucket_open_between(lua_State *L)
{
    ms_bucket *bucket = NULL;
    const ms_link *link = enter_link(L, &bucket);
    bucket_life *life = get_life(L);
    /* One reduction is under way or was done: a second would add up numbers twice. */
    if (life->between)
        return ms_lua_error(L, "bucket %d was reduced before: a bucket is reduced once",
                            (int)bucket->index);
    ms_lua_ok(L, ms_hybrid_open(link, bucket, &life->between));
    push_bucket(L, life, &life->between->bucket);
    return 1;
}

/* bucket:_close_between(inner, result): both handles must be of the hook that runs. */
static int bucket_close_between(lua_State *L)
{
    ms_lua_enter_inside(L);
    check_bucket(L);
    ms_lua_bucket(L, 2);
    ms_tensor *row = NULL;
    ms_lua_ok(L, ms_bucket_row(ms_lua_tensor(L, 3), &row));
    ms_status status = ms_hybrid_close(get_life(L)->between, row);
    ms_tensor_release(row);
    ms_lua_ok(L, status);
    return 0;
}

/* bucket:_key() -> a text that identifies its list of parameters: their names, each with a line
 * end. Tables of Lua link states that go by bucket use it as their key. */
static int bucket_key(lua_State *L)
{
    const ms_bucket *bucket = check_bucket(L);
    luaL_Buffer text;
    luaL_buffinit(L, &text);
    for (uint32_t i = 0; i < bucket->count; i++) {
        luaL_addstring(&text, bucket->names[i]);
        luaL_addchar(&text, '\n');
    }
    luaL_pushresult(&text);
    return 1;
}

/* core.bucket_account(link?) -> the link to which work is charged now, or nil if none is counted;
 * charges it to `link` from now on. Chains in Lua call it around each of their links, so that stats
 * can say what each costs. */
static int bucket_account(lua_State *L)
{
    bucket_life *life = get_life(L);
    if (!life->bucket || !life->bucket->account) return 0;
    lua_pushinteger(L, life->link);
    if (lua_isinteger(L, 1)) {
        life->link = (uint32_t)lua_tointeger(L, 1);
        ms_lua_ok(L, ms_bucket_account(life->bucket, life->link));
    }
    return 1;
}

/* bucket:_loss_is_known() -> whether error feedback, if a link wants it, can be computed. ms.hooks
 * raises with the names of its links where it is not. */
static int bucket_loss_is_known(lua_State *L)
{
    lua_pushboolean(L, ms_bucket_loss_is_known(check_bucket(L)));
    return 1;
}

/* core.is_bucket(value) -> boolean, also for a bucket whose hook has returned. */
static int is_bucket(lua_State *L)
{
    lua_pushboolean(L, luaL_testudata(L, 1, MS_BUCKET_TYPE) != NULL);
    return 1;
}

/* tostring(bucket) -> its index and label, which are copies: error messages name a bucket also when
 * its hook has returned. */
static int bucket_string(lua_State *L)
{
    const bucket_box *box = luaL_checkudata(L, 1, MS_BUCKET_TYPE);
    lua_pushfstring(L, "bucket %d \"%s\"", (int)box->index, box->label);
    return 1;
}

/* --------------------------------------------------------- calling the hook */

/* What the engine calls, protected: makes the handle and calls f(bucket), upvalue 2, with the
 * parameters, upvalue 3, at hand; upvalue 4 is the hook's name. All that may raise (making the
 * handle, the hook itself) happens in here, below the protected call. */
static int call_with_bucket(lua_State *L)
{
    ms_bucket *bucket = lua_touserdata(L, 1);
    bucket_life *life = get_life(L);
    lua_rawgetp(L, LUA_REGISTRYINDEX, &life_key);
    lua_pushvalue(L, lua_upvalueindex(3));
    /* For bucket:parameters(). */
    lua_setiuservalue(L, -2, 2);
    push_bucket(L, life, bucket);
    lua_pushvalue(L, lua_upvalueindex(2));
    lua_pushvalue(L, -2);
    lua_call(L, 1, 1);
    return 1;
}

/* One closure holds all that the hook needs, so a reducer keeps a single reference alive. */
void ms_lua_push_bucket_hook(lua_State *L, int hook, int parameters, int name)
{
    hook = lua_absindex(L, hook);
    parameters = lua_absindex(L, parameters);
    name = lua_absindex(L, name);
    lua_pushvalue(L, lua_upvalueindex(1));
    lua_pushvalue(L, hook);
    lua_pushvalue(L, parameters);
    lua_pushvalue(L, name);
    lua_pushcclosure(L, call_with_bucket, 4);
}

/* The tensor handles that were given out end; nothing here allocates. The serial grows, which ends
 * all bucket handles at once. Handles in the list are emptied, so that a script that kept one gets
 * an error with the reason. */
static void end_life(lua_State *L, bucket_life *life)
{
    lua_rawgetp(L, LUA_REGISTRYINDEX, &life_key);
    lua_getiuservalue(L, -1, 1);
    for (int i = 1; i <= life->given; i++) {
        if (lua_rawgeti(L, -1, i) == LUA_TUSERDATA) ms_handle_drop(lua_touserdata(L, -1), gone);
        lua_pop(L, 1);
        /* The list is emptied for the next hook, so that the handles can be collected. */
        lua_pushnil(L);
        lua_rawseti(L, -2, i);
    }
    lua_pop(L, 1);
    /* The parameters would keep their model. */
    lua_pushnil(L);
    lua_setiuservalue(L, -2, 2);
    lua_pop(L, 1);
    ms_hybrid_drop(life->between);
    *life = (bucket_life){ .serial = life->serial + 1 };
}

/* How messages name the hook of that callback. It leaves values on the stack; the callers restore
 * the top. */
static const char *hook_name(lua_State *L, const ms_callback *callback)
{
    return ms_callback_push(callback) && lua_getupvalue(L, -1, 4) ? lua_tostring(L, -1) : NULL;
}

/* What the hook returned cannot be used. Runs outside of lua_pcall, so it raises nothing. */
static ms_status wrong_result(lua_State *L, const ms_callback *callback, const ms_bucket *bucket,
                              const char *what)
{
    const char *name = hook_name(L, callback), *before = "; the hook is ";
    if (!name) name = before = "";
    return ms_engine_fail(
        bucket->engine, MS_ERROR_ARGUMENT,
        "comm hook, bucket %u \"%s\": %s; a tensor, or a future of one, is expected%s%.200s",
        bucket->index, bucket->label, what, before, name);
}

/* Replaces the future on top by its value. *ready: when the value is there. False if the future has
 * none yet; the caller restores the top. Its fields are read without metamethods, because nothing
 * here may raise. */
static bool open_future(lua_State *L, ms_point *ready)
{
    lua_pushliteral(L, "index");
    lua_rawget(L, -2);
    lua_pushliteral(L, "number");
    lua_rawget(L, -3);
    if (!lua_isinteger(L, -1) || !lua_isinteger(L, -2)) return false;
    *ready = (ms_point){ .stream = (uint16_t)lua_tointeger(L, -2),
                         .seq = (uint64_t)lua_tointeger(L, -1) };
    lua_pop(L, 2);
    lua_pushliteral(L, "result");
    lua_rawget(L, -2);
    return true;
}

/* The value on top: a tensor, or a future that has its value. Everything is compared with what the
 * reducer expects before it is retained. The second check repeats the first to make its message
 * name the hook. */
static ms_status take_result(lua_State *L, const ms_callback *callback, const ms_bucket *bucket,
                             ms_tensor **result, ms_point *ready)
{
    bool future = lua_istable(L, -1);
    if (future && !open_future(L, ready))
        return wrong_result(L, callback, bucket,
                            "its future has no value yet: nothing will give it one");
    char text[MS_RETURNED_BYTES], what[MS_RETURNED_BYTES + 32];
    ms_handle *handle = ms_lua_returned(L, -1, text);
    if (!handle) {
        snprintf(what, sizeof what, "it returned a %s%s", future ? "future of a " : "", text);
        return wrong_result(L, callback, bucket, what);
    }
    ms_tensor *row = NULL;
    ms_status status = ms_bucket_row(handle->tensor, &row);
    if (!status) status = ms_bucket_check_result(bucket, NULL, row);
    if (row && status) status = ms_bucket_check_result(bucket, hook_name(L, callback), row);
    if (status) ms_tensor_release(row);
    else {
        *result = row;
        /* The engine takes the value, as value() does. */
        ms_handle_spend(handle);
    }
    return status;
}

/* Calls the hook, which is on top of the stack, and takes what it returns while its handle is still
 * alive. The error of a hook gets the bucket's name; the error object itself stays in the registry.
 * ms_chain_begin and ms_chain_end prepare the bucket as they do for a native chain. */
static ms_status run_hook(lua_State *L, const ms_callback *callback, ms_bucket *bucket,
                          ms_tensor **result, ms_point *ready)
{
    lua_pushlightuserdata(L, bucket);
    ms_dtype autocast = ms_chain_begin(bucket);
    ms_status status = ms_lua_hook(L, callback->runtime, 1, 1);
    ms_chain_end(bucket, autocast);
    if (!status) return take_result(L, callback, bucket, result, ready);
    /* A copy, since ms_engine_fail writes the record that the text is in. */
    char message[MS_ERROR_MESSAGE_BYTES];
    snprintf(message, sizeof message, "%s", ms_engine_error(bucket->engine)->message);
    return ms_engine_fail(bucket->engine, MS_ERROR_ARGUMENT, "comm hook, bucket %u \"%s\": %s",
                          bucket->index, bucket->label, message);
}

/* The box exists before the model that calls the hook, and the callback shares its life: a model
 * that no script can reach is collected with its hook, also where the hook refers to the model. */
ms_lua_hook_options ms_lua_read_hook(lua_State *L, int table, int parameters, int box)
{
    ms_lua_hook_options options = { 0 };
    if (lua_getfield(L, table, "hook") != LUA_TFUNCTION) return options;
    lua_getfield(L, table, "name");
    ms_lua_push_bucket_hook(L, -2, parameters, -1);
    options.user = ms_callback_new(L, -1, box);
    options.hook = ms_lua_bucket_hook;
    options.links = (uint32_t)ms_lua_field_integer(L, table, "hook_links", 0, 0, UINT16_MAX);
    options.free = ms_callback_free;
    return options;
}

/* Called by the engine on the host thread, in the middle of a bound function (backward). It
 * restores the stack and the script line on every path: the function above has values on the stack.
 * The life of the bucket ends before memory is collected, so that its tensors can go. */
ms_status ms_lua_bucket_hook(void *user, ms_bucket *bucket, ms_tensor **result, ms_point *ready)
{
    ms_callback *callback = user;
    lua_State *L = callback->L;
    ms_engine *engine = bucket->engine;
    int top = lua_gettop(L);
    uint32_t script = ms_engine_script(engine);
    if (!lua_checkstack(L, 12))
        return ms_engine_fail(engine, MS_ERROR_MEMORY, "no room on the Lua stack for a comm hook");
    bucket_life *life = get_life(L);
    if (!ms_callback_push(callback))
        return ms_engine_fail(engine, MS_ERROR_STATE,
                              "ddp: the ddp model of these parameters is gone, with its comm hook: "
                              "call unwrap() before it goes");
    /* A new serial ends handles of earlier buckets, should one have been missed. */
    *life = (bucket_life){ .serial = life->serial + 1, .bucket = bucket };
    /* The first bucket of a pass: what is live now is not the links' own. */
    if (bucket->index == 0)
        callback->runtime->memory.live_before_links = ms_engine_memory(engine).live;
    ms_status status = run_hook(L, callback, bucket, result, ready);
    end_life(L, life);
    lua_settop(L, top);
    ms_engine_set_script(engine, script);
    /* Tensors that links have made and no longer use are collected now if they are large, not at
     * the end of the step. */
    if (ms_lua_collect_above(L, callback->runtime, callback->runtime->memory.live_before_links))
        callback->runtime->memory.live_before_links = ms_engine_memory(engine).live;
    return status;
}

/* The one life of this Lua state is made here, before any hook can run: ms_lua_bucket_hook must not
 * allocate in Lua. Its user value 1 is the list of handles that are given out. */
void ms_open_bucket(lua_State *L, int runtime)
{
    /* Methods with _ in front serve ms.hooks, which runs chains that are not all native. */
    static const luaL_Reg methods[] = {
        { "index", bucket_index },
        { "is_last", bucket_is_last },
        { "kind", bucket_kind },
        { "dtype", bucket_dtype },
        { "divisor", bucket_divisor },
        { "group", bucket_group },
        { "buffer", bucket_buffer },
        { "set_buffer", bucket_set_buffer },
        { "gradients", bucket_gradients },
        { "parameters", bucket_parameters },
        { "shard", bucket_shard },
        { "wants_sent", bucket_wants_sent },
        { "set_sent", bucket_set_sent },
        { "ask_sent", bucket_ask_sent },
        { "sent", bucket_sent },
        { "_key", bucket_key },
        { "_encode", bucket_encode },
        { "_decode", bucket_decode },
        { "_reduce", bucket_reduce },
        { "_loss_is_known", bucket_loss_is_known },
        { "_open_between", bucket_open_between },
        { "_close_between", bucket_close_between },
        { NULL, NULL },
    };
    static const luaL_Reg functions[] = { { "is_bucket", is_bucket },
                                          { "bucket_account", bucket_account },
                                          { "reduce_bucket", ms_lua_reduce_bucket },
                                          { NULL, NULL } };
    static const luaL_Reg events[] = { { "__tostring", bucket_string }, { NULL, NULL } };
    bucket_life *life = lua_newuserdatauv(L, sizeof *life, 2);
    *life = (bucket_life){ 0 };
    lua_newtable(L);
    lua_setiuservalue(L, -2, 1);
    lua_rawsetp(L, LUA_REGISTRYINDEX, &life_key);
    ms_lua_register(L, runtime, functions);
    ms_lua_type(L, runtime, MS_BUCKET_TYPE, events, methods);
    lua_pop(L, 1);
}
