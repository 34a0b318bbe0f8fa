/* test_bucket.c: reduces a tensor as one bucket, of any kind, with any chain. For tests:
 * models make their buckets themselves. */
#include "bindings/bucket.h"

#include <stdio.h>

#include "bindings/arguments.h"
#include "bindings/call.h"
#include "bindings/group.h"
#include "bindings/link.h"
#include "bindings/enter.h"
#include "bindings/handles.h"
#include "bindings/script.h"

/* The most parameters of such a bucket: the lists are in a struct on the C stack, so that nothing
 * has to be freed when an argument is wrong. */
enum { MOST = 64 };

/* What the caller gave, and what has to be released. `links` are owned (ms_chain_take); the links
 * that Lua gives are borrowed. */
typedef struct one_bucket {
    ms_bucket bucket;
    ms_tensor *views[MOST];
    const char *names[MOST];
    uint32_t positions[MOST];
    ms_link links[MS_CHAIN_LINKS];
    uint32_t link_count;
    ms_callback *hook;
    ms_tensor *result;
    ms_point ready;
} one_bucket;

/* ------------------------------------------------------------------ reading */

/* Group `name` of the table at 1; `otherwise` where it is absent. hybrid buckets need all three. */
static ms_group *group_field(lua_State *L, const char *name, ms_group *otherwise)
{
    ms_group *group = otherwise;
    if (lua_getfield(L, 1, name) != LUA_TNIL) group = ms_lua_group(L, -1);
    lua_pop(L, 1);
    return group;
}

/* Names are borrowed from the list in the table at 1, which stays on the stack until the end. The
 * positions are 0, 1, 2 ..., as if the bucket had all parameters of a model. */
static void read_names(lua_State *L, one_bucket *one)
{
    lua_getfield(L, 1, "names");
    for (uint32_t i = 0; i < one->bucket.count; i++) {
        one->positions[i] = i;
        /* The list keeps the string, so the pointer holds after the pop. */
        lua_rawgeti(L, -1, (lua_Integer)i + 1);
        one->names[i] = luaL_checkstring(L, -1);
        lua_pop(L, 1);
    }
    lua_pop(L, 1);
}

/* Raises on what is missing. Nothing is owned yet. The divisor is the group's size, as a reducer's
 * is unless it is set. The label is the first name, as in a reducer, so messages look alike. */
static void read_bucket(lua_State *L, one_bucket *one)
{
    static const char *const kinds[] = { "all_reduce", "reduce_scatter", "hybrid", NULL };
    ms_bucket *b = &one->bucket;
    lua_getfield(L, 1, "kind");
    b->kind = (ms_bucket_kind)ms_lua_choice(L, -1, kinds, "kind");
    b->group = group_field(L, "group", NULL);
    b->shards = group_field(L, "shards", NULL);
    b->replicas = group_field(L, "replicas", NULL);
    b->index = (uint32_t)ms_lua_field_integer(L, 1, "index", 0, 0, UINT16_MAX);
    b->is_last = ms_lua_field_boolean(L, 1, "is_last", true);
    b->divisor = ms_group_size(b->group);
    lua_getfield(L, 1, "parameters");
    b->parameters = ms_lua_tensor_list(L, -1, &b->count);
    lua_getfield(L, 1, "flat");
    b->flat = ms_lua_tensor(L, -1);
    if (b->count == 0 || b->count > MOST)
        ms_lua_error(L, "reduce_bucket: 1 to %d parameters, not %d", MOST, (int)b->count);
    read_names(L, one);
    snprintf(b->label, sizeof b->label, "%s", one->names[0]);
}

/* ------------------------------------------------------------------ running */

/* Gradients follow each other in `flat`, as in a reducer's bucket. The buffer gets a reference of
 * its own, because links replace it. */
static ms_status make_views(one_bucket *one)
{
    ms_bucket *b = &one->bucket;
    int64_t at = 0;
    b->buffer = ms_tensor_retain(b->flat);
    for (uint32_t i = 0; i < b->count; i++) {
        const ms_tensor *like = b->parameters[i];
        ms_status status = ms_tensor_window(b->flat, ms_tensor_dims(like), ms_tensor_shape(like),
                                            ms_tensor_strides(like), at, &one->views[i]);
        /* Views that were made before are drop's. */
        if (status) return status;
        at += ms_tensor_count(like);
    }
    return MS_OK;
}

/* As a reducer does: on the group's communication stream, after what the current stream has. The
 * current stream is put back before the status is looked at. It waits for the result in the end, as
 * the model's stream does after backward. */
static ms_status run(one_bucket *one)
{
    ms_bucket *b = &one->bucket;
    ms_stream *stream = NULL, *before = ms_engine_current(b->engine);
    ms_status status = ms_group_stream(b->group, 1, &stream);
    if (!status) status = make_views(one);
    if (!status) status = ms_stream_wait(stream, ms_stream_last(before));
    if (status) return status;
    ms_engine_set_current(b->engine, stream);
    if (one->hook) status = ms_lua_bucket_hook(one->hook, b, &one->result, &one->ready);
    else status = ms_chain_run(one->links, one->link_count, b, &one->result);
    if (!status) status = ms_bucket_check_result(b, NULL, one->result);
    ms_engine_set_current(b->engine, before);
    /* A hook's future may be ready on another stream. */
    if (!status && one->ready.seq) status = ms_stream_wait(before, one->ready);
    return status ? status : ms_stream_wait(before, ms_stream_last(stream));
}

/* Releases what run and the reading made, in any state; the result is the caller's. Releasing NULL
 * is allowed, so it need not know how far run came. */
static void drop(one_bucket *one)
{
    ms_bucket *b = &one->bucket;
    for (uint32_t i = 0; i < b->count; i++) ms_tensor_release(one->views[i]);
    ms_tensor_release(b->buffer);
    ms_chain_drop(one->links, one->link_count);
    if (one->hook) ms_callback_free(one->hook);
}

/* core.reduce_bucket({ kind =, group =, shards =, replicas =, index = 0, is_last = true, parameters
 * =, names = lists of one length, flat = their gradients, contiguous, which is changed }, { links =
 * native links } or { hook = f(bucket) })
 * -> result. State of links goes by the parameters. */
int ms_lua_reduce_bucket(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    one_bucket one = { .bucket = { .engine = engine } };
    ms_link links[MS_CHAIN_LINKS];
    /* Everything is read and checked before anything is owned; the lists live in the tables at 1
     * and 2. */
    luaL_checktype(L, 1, LUA_TTABLE);
    luaL_checktype(L, 2, LUA_TTABLE);
    lua_settop(L, 2);
    read_bucket(L, &one);
    one.bucket.names = one.names;
    one.bucket.positions = one.positions;
    one.bucket.gradients = one.views;
    if (lua_getfield(L, 2, "links") == LUA_TTABLE) {
        /* Borrowed first, then taken: ms_chain_take retains states and makes missing ones. */
        uint32_t count = ms_lua_chain(L, -1, links);
        ms_lua_ok(L, ms_chain_take(engine, one.bucket.kind, links, count, one.links));
        one.link_count = count;
    } else {
        lua_getfield(L, 2, "hook");
        lua_getfield(L, 1, "parameters");
        /* The hook has no name. */
        lua_pushnil(L);
        ms_lua_push_bucket_hook(L, -3, -2, -1);
        one.hook = ms_callback_new(L, -1, 0);
    }
    ms_handle *handle = ms_lua_new_handle(L);
    ms_status status = run(&one);
    drop(&one);
    /* After a failure the result is not handed to the script, so it is released here. */
    if (status) ms_tensor_release(one.result);
    ms_lua_ok(L, status);
    ms_handle_fill(handle, one.result);
    return 1;
}
