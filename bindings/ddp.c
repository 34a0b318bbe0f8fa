/* ddp.c: reducers in Lua. Users call lua/moonshard/ddp.lua, which calls these. */
#include "bindings/bucket.h"

#include "bindings/group.h"
#include "bindings/link.h"
#include "moonshard/ddp.h"

#define MS_REDUCER_TYPE "ms.Reducer"

/* A Lua reducer; `reducer` is NULL after free(). runtime tells its __gc whether the engine still
 * exists. User value 1: what keeps its callbacks alive; 2: the function of on_reduced. The user
 * values keep Lua functions alive: the engine holds numbers of them only (ms_callback). */
typedef struct reducer_box {
    ms_reducer *reducer;
    const ms_runtime *runtime;
} reducer_box;

/* ----------------------------------------------------------------- reducers */

/* Tensors and their names, two lists of one length at `tensors` and `names`; in a userdata on the
 * stack. Names are borrowed from the Lua list; the reducer copies them. Duplicates and tensors that
 * are no leaves are refused by the engine. */
static ms_reducer_parameter *read_parameters(lua_State *L, int tensors, int names, uint32_t *count)
{
    luaL_checktype(L, tensors, LUA_TTABLE);
    luaL_checktype(L, names, LUA_TTABLE);
    *count = (uint32_t)lua_rawlen(L, tensors);
    ms_reducer_parameter *parameters = lua_newuserdatauv(L, (*count + 1) * sizeof *parameters, 0);
    for (uint32_t i = 0; i < *count; i++) {
        lua_rawgeti(L, tensors, (lua_Integer)i + 1);
        lua_rawgeti(L, names, (lua_Integer)i + 1);
        parameters[i] = (ms_reducer_parameter){ .tensor = ms_lua_tensor(L, -2),
                                                .name = luaL_checkstring(L, -1) };
        /* The list keeps the name's string. */
        lua_pop(L, 2);
    }
    return parameters;
}

/* The reducer at 1. Raises after unwrap, whose reducer is gone. Every method begins with it, so an
 * unwrapped model fails with one message. */
static ms_reducer *check_reducer(lua_State *L)
{
    reducer_box *box = luaL_checkudata(L, 1, MS_REDUCER_TYPE);
    if (!box->reducer)
        ms_lua_error(L, "ddp: this model was unwrapped; use the module inside, or wrap it again");
    return box->reducer;
}

/* Option bucket_bytes, a list of limits; NULL if it is absent. Leaves the list and the memory on
 * the stack, where they live until the bound function returns. Whether the list is empty or too
 * long is checked by the engine. */
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

/* __gc: only marks the reducer; the sweep frees it at a fixed point. If the state was closed, its
 * engine has freed the reducer already. The next core.reducer sweeps; until then the reducer's
 * buckets take memory. */
static int reducer_gc(lua_State *L)
{
    reducer_box *box = lua_touserdata(L, 1);
    if (box->reducer && !box->runtime->closed) ms_reducer_abandon(box->reducer);
    box->reducer = NULL;
    return 0;
}

/* Options with what they point to. It is on the C stack of core.reducer, since the engine copies
 * what it takes. */
typedef struct reducer_options {
    ms_reducer_options options;
    ms_dtype delayed_dtype;
    ms_link links[MS_CHAIN_LINKS];
} reducer_options;

/* Reads the table at index 3, but for its hook. count: number of parameters. Lists and groups stay
 * on the stack until the bound function returns. The library has checked the names of the options
 * before. */
static void read_options(lua_State *L, uint32_t count, reducer_options *out)
{
    ms_reducer_options *options = &out->options;
    *options = (ms_reducer_options){ .links = out->links };
    options->cap_bytes = read_caps(L, 3, &options->cap_count);
    options->find_unused = ms_lua_field_boolean(L, 3, "find_unused", false);
    options->planned = ms_lua_field_boolean(L, 3, "planned", false);
    options->static_graph = ms_lua_field_boolean(L, 3, "static_graph", false);
    options->delayed = (uint32_t)ms_lua_field_integer(L, 3, "delayed", 0, 0, count);
    if (lua_getfield(L, 3, "delayed_dtype") != LUA_TNIL) {
        out->delayed_dtype = ms_lua_dtype(L, -1);
        options->delayed_dtype = &out->delayed_dtype;
    }
    /* Required: ms_lua_group raises for nil. */
    lua_getfield(L, 3, "group");
    options->group = ms_lua_group(L, -1);
    if (lua_getfield(L, 3, "links") == LUA_TTABLE)
        options->link_count = ms_lua_chain(L, -1, out->links);
}

/* core.reducer(parameters, names, { group =, bucket_bytes = { ... }?, find_unused =, static_graph
 * =, planned =, delayed = how many of the last, delayed_dtype = what those travel in?, links = { {
 * kind = ... } ... } } or { hook = f(bucket) -> future }). The box exists before the reducer, and
 * its callback shares its life: a model that no script can reach is collected with its hook, also
 * where the hook refers to the model. */
static int reducer(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    lua_settop(L, 3);
    luaL_checktype(L, 3, LUA_TTABLE);
    uint32_t count = 0;
    reducer_options given;
    const ms_reducer_parameter *parameters = read_parameters(L, 1, 2, &count);
    read_options(L, count, &given);
    /* After a full collection, reducers that no script can reach are marked as abandoned. */
    ms_lua_collect(L, ms_lua_runtime(L));
    ms_reducer_sweep(engine);
    reducer_box *box = lua_newuserdatauv(L, sizeof *box, 2);
    int at = lua_gettop(L);
    *box = (reducer_box){ .runtime = ms_lua_runtime(L) };
    luaL_setmetatable(L, MS_REDUCER_TYPE);
    /* The list at index 1 has the handles that bucket:parameters() gives out. */
    ms_lua_hook_options hook = ms_lua_read_hook(L, 3, 1, at);
    given.options.hook = hook.hook;
    given.options.hook_user = hook.user;
    given.options.hook_free = hook.free;
    given.options.hook_links = hook.links;
    ms_status status = ms_reducer_new(engine, &given.options, parameters, count, &box->reducer);
    /* The engine takes the hook over only with success. */
    if (status && given.options.hook_user) ms_callback_free(given.options.hook_user);
    ms_lua_ok(L, status);
    lua_settop(L, at);
    return 1;
}

/* reducer:forward(synchronize): call before the forward of a pass; may rebuild the buckets, which
 * blocks once. lua/moonshard/ddp.lua calls it in the model's __call; synchronize is false inside
 * no_sync. */
static int reducer_forward(lua_State *L)
{
    ms_lua_enter(L);
    ms_lua_ok(L, ms_reducer_forward(check_reducer(L), lua_toboolean(L, 2)));
    return 0;
}

/* reducer:outputs(tensors): the outputs of the forward. For find_unused: the tensors are those in
 * what the model's forward returned, however deeply nested. */
static int reducer_outputs(lua_State *L)
{
    ms_lua_enter(L);
    uint32_t count = 0;
    ms_reducer *r = check_reducer(L);
    ms_tensor **tensors = ms_lua_tensor_list(L, 2, &count);
    ms_lua_ok(L, ms_reducer_outputs(r, tensors, count));
    return 0;
}

/* reducer:shadow(): after forward(true), takes part in the reductions of a backward, with zeros.
 * The join of ranks with different numbers of batches uses it: peers' collectives need every rank.
 */
static int reducer_shadow(lua_State *L)
{
    ms_lua_enter(L);
    ms_lua_ok(L, ms_reducer_shadow(check_reducer(L)));
    return 0;
}

/* reducer:divisor(ranks): the number of ranks that a mean is over. Ranks without inputs contribute
 * zeros; with the smaller divisor the mean is over those that have some. */
static int reducer_divisor(lua_State *L)
{
    ms_reducer *r = check_reducer(L);
    ms_reducer_set_divisor(
        r, (uint32_t)ms_lua_integer(L, 2, 1, ms_group_size(ms_reducer_group(r)), "divisor"));
    return 0;
}

/* reducer:layout() -> how often buckets were made, how many passes with the present ones were
 * reduced. Both are equal on all ranks between two passes, so planners may decide by them. */
static int reducer_layout(lua_State *L)
{
    uint64_t passes;
    lua_pushinteger(L, (lua_Integer)ms_reducer_layout(check_reducer(L), &passes));
    lua_pushinteger(L, (lua_Integer)passes);
    return 2;
}

/* reducer:await_times(): before forward(true); blocks until the pass before the last has ended.
 * After it, the times of that pass are known on every rank, and planners on all ranks plan from the
 * same facts. */
static int reducer_await_times(lua_State *L)
{
    ms_lua_enter(L);
    ms_lua_ok(L, ms_reducer_await_times(check_reducer(L)));
    return 0;
}

/* reducer:is_used(position) -> whether any rank uses it, true; or whether this rank does, false.
 * Positions count from 1 in Lua. */
static int reducer_is_used(lua_State *L)
{
    bool known;
    lua_pushboolean(L, ms_reducer_is_used(
                           check_reducer(L),
                           (uint32_t)ms_lua_integer(L, 2, 1, UINT32_MAX, "position") - 1, &known));
    lua_pushboolean(L, known);
    return 2;
}

/* reducer:no_sync(inside) -> the setting before. The caller puts the former setting back, also when
 * the function inside raises. */
static int reducer_no_sync(lua_State *L)
{
    lua_pushboolean(L, ms_reducer_set_no_sync(check_reducer(L), lua_toboolean(L, 2)));
    return 1;
}

/* reducer:rebuild(): the next synchronized backward logs the order of gradients anew. For models
 * whose order of execution has changed, such as after unfreezing layers. */
static int reducer_rebuild(lua_State *L)
{
    ms_reducer_rebuild(check_reducer(L));
    return 0;
}

/* reducer:rebuild_due(): rebuilds the buckets now if the next forward would. Checkpoints call it
 * first: the saved layout is then the one that training goes on with. All ranks call it. */
static int reducer_rebuild_due(lua_State *L)
{
    ms_lua_enter(L);
    ms_lua_ok(L, ms_reducer_rebuild_due(check_reducer(L)));
    return 0;
}

/* reducer:free(): removes it from the model, which can be wrapped again. Refused in hooks: the
 * reduction that runs uses it. Gradients stay with their parameters. */
static int reducer_free(lua_State *L)
{
    ms_lua_refuse_in_hook(L, "unwrap", "the reduction that runs needs it");
    ms_lua_enter(L);
    ms_reducer_free(check_reducer(L));
    ((reducer_box *)lua_touserdata(L, 1))->reducer = NULL;
    return 0;
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

/* Upvalue 1: f(index, positions); 2: g() or nil. MS_REDUCED_ALL stands for the end of the pass, and
 * then there is no bucket. */
static int call_on_reduced(lua_State *L)
{
    const ms_reducer *r = lua_touserdata(L, 1);
    uint32_t bucket = (uint32_t)lua_tointeger(L, 2);
    bool end = bucket == MS_REDUCED_ALL;
    lua_pushvalue(L, lua_upvalueindex(end ? 2 : 1));
    if (end && lua_isnil(L, -1)) return 0;
    if (!end) {
        lua_pushinteger(L, bucket);
        push_positions(L, ms_reducer_bucket(r, bucket));
    }
    lua_call(L, end ? 0 : 2, 0);
    return 0;
}

/* What on_reduced gets as user; free_on_reduced frees both. The reducer is borrowed: it calls the
 * function, so it exists then. */
typedef struct reduced_user {
    ms_callback *callback;
    ms_reducer *reducer;
} reduced_user;

/* Called by the engine on the host thread once the bucket's reduction is enqueued. Errors become
 * MS_ERROR_SCRIPT and end the job. It runs as a hook: nothing in it may block. A function whose box
 * is gone is an error here, since an optimizer that silently stopped stepping would not be noticed.
 */
static ms_status on_reduced(void *user, uint32_t bucket)
{
    const reduced_user *u = user;
    lua_State *L = u->callback->L;
    ms_engine *engine = u->callback->runtime->engine;
    /* The engine calls with the stack of whatever bound function is running. */
    if (!lua_checkstack(L, 12))
        return ms_engine_fail(engine, MS_ERROR_MEMORY, "no room on the Lua stack for a callback");
    if (!ms_callback_push(u->callback))
        return ms_engine_fail(engine, MS_ERROR_STATE,
                              "ddp: the ddp model of these parameters was collected, and with it "
                              "the functions that step them: call unwrap() before dropping it");
    lua_pushlightuserdata(L, u->reducer);
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

/* reducer:on_reduced(f(index, positions), g()?): f for each bucket of a synchronized backward once
 * its reduction is enqueued, g after the last; both as hooks. reducer:on_reduced(): no more calls.
 * The closure of both is kept by the reducer's userdata and takes the place of the one before only
 * after the engine has taken the new user. */
static int reducer_on_reduced(lua_State *L)
{
    ms_reducer *r = check_reducer(L);
    void *memory = NULL;
    lua_settop(L, 3);
    /* The former functions stay in the user value until others take their place. */
    if (lua_isnil(L, 2)) {
        ms_reducer_set_on_reduced(r, NULL, NULL, NULL);
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
    *user = (reduced_user){ callback, r };
    ms_reducer_set_on_reduced(r, on_reduced, user, free_on_reduced);
    /* The former function is found in user value 2 and forgotten, or both would be kept. */
    if (lua_getiuservalue(L, 1, 2) == LUA_TFUNCTION) ms_callback_forget(L, 1, -1);
    lua_pop(L, 1);
    lua_setiuservalue(L, 1, 2);
    return 0;
}

/* reducer:bucket_times() -> list of { index, bytes, positions, ready_ms, reduce_ms } in order of
 * index; the times are nil while none with these buckets are known. ms_reducer_stats is called for
 * what it does on the way: it takes over times that have come in since. */
static int reducer_bucket_times(lua_State *L)
{
    ms_reducer *r = check_reducer(L);
    ms_reducer_stats(r);
    lua_newtable(L);
    for (uint32_t b = 0; b < ms_reducer_buckets(r); b++) {
        const ms_bucket *bucket = ms_reducer_bucket(r, b);
        ms_bucket_times times;
        lua_createtable(L, 0, 5);
        ms_lua_set_integer(L, "index", b);
        ms_lua_set_integer(L, "bytes", (int64_t)ms_tensor_bytes(bucket->flat));
        push_positions(L, bucket);
        lua_setfield(L, -2, "positions");
        if (ms_reducer_bucket_times(r, b, &times)) {
            ms_lua_set_ms(L, "ready_ms", times.ready_ns);
            ms_lua_set_ms(L, "reduce_ms", times.reduce_ns);
        }
        lua_rawseti(L, -2, (lua_Integer)b + 1);
    }
    return 1;
}

/* -------------------------------------------------------------------- plans */

/* reducer:record(on): whether the next pass logs order and times of its gradients. Planned reducers
 * only; others log by themselves until they are rebuilt. */
static int reducer_record(lua_State *L)
{
    ms_reducer_record(check_reducer(L), lua_toboolean(L, 2));
    return 0;
}

/* reducer:arrivals() -> list of { position, ms } in the order in which gradients came in the last
 * pass that was recorded; nil if there was none. One userdata holds both lists. Times are by
 * position, the order is by arrival. */
static int reducer_arrivals(lua_State *L)
{
    ms_reducer *r = check_reducer(L);
    uint32_t most = 0;
    for (uint32_t b = 0; b < ms_reducer_buckets(r); b++) most += ms_reducer_bucket(r, b)->count;
    /* The 8-byte numbers come first, so that both lists are aligned. */
    uint64_t *ns =
        lua_newuserdatauv(L, ((size_t)most + 1) * (sizeof(uint64_t) + sizeof(uint32_t)), 0);
    uint32_t *order = (uint32_t *)(ns + most + 1);
    uint32_t count = ms_reducer_arrivals(r, order, ns);
    if (count == 0) return 0;
    lua_createtable(L, (int)count, 0);
    for (uint32_t i = 0; i < count; i++) {
        lua_createtable(L, 0, 2);
        ms_lua_set_integer(L, "position", (int64_t)((int64_t)order[i] + 1));
        ms_lua_set_ms(L, "ms", ns[order[i]]);
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    return 1;
}

/* The number of items in the lists of the list at `index`. The sizes come first, so that one
 * userdata can hold everything. */
static size_t count_items(lua_State *L, int index, uint32_t lists)
{
    size_t total = 0;
    for (uint32_t b = 0; b < lists; b++) {
        lua_rawgeti(L, index, (lua_Integer)b + 1);
        luaL_checktype(L, -1, LUA_TTABLE);
        total += lua_rawlen(L, -1);
        lua_pop(L, 1);
    }
    return total;
}

/* Reads a list of lists of positions (from 1) into one list of positions (from 0), followed by the
 * sizes of the lists. Both are in a userdata on the stack. Whether each position is there exactly
 * once is checked by ms_reducer_assign. */
static uint32_t *read_buckets(lua_State *L, int index, uint32_t *buckets, uint32_t **sizes)
{
    luaL_checktype(L, index, LUA_TTABLE);
    *buckets = (uint32_t)lua_rawlen(L, index);
    size_t total = count_items(L, index, *buckets);
    uint32_t *order = lua_newuserdatauv(L, (total + *buckets + 1) * sizeof *order, 0), *at = order;
    *sizes = order + total;
    for (uint32_t b = 0; b < *buckets; b++) {
        lua_rawgeti(L, index, (lua_Integer)b + 1);
        (*sizes)[b] = (uint32_t)lua_rawlen(L, -1);
        for (uint32_t i = 0; i < (*sizes)[b]; i++) {
            lua_rawgeti(L, -1, (lua_Integer)i + 1);
            *at++ = (uint32_t)ms_lua_integer(L, -1, 1, UINT32_MAX, "position") - 1;
            lua_pop(L, 1);
        }
        lua_pop(L, 1);
    }
    return order;
}

/* reducer:assign(lists of positions, bucket after bucket). Planners' buckets go through it. All
 * ranks must call it with equal lists. */
static int reducer_assign(lua_State *L)
{
    ms_lua_refuse_in_hook(L, "assigning buckets",
                          "they change between a backward and the next forward");
    ms_lua_enter(L);
    ms_reducer *r = check_reducer(L);
    uint32_t buckets = 0, *sizes = NULL;
    const uint32_t *order = read_buckets(L, 2, &buckets, &sizes);
    ms_lua_ok(L, ms_reducer_assign(r, order, sizes, buckets));
    return 0;
}

/* What ddp_assign cuts, and room for the result, in one userdata on the stack. */
typedef struct assignment {
    uint64_t *bytes, *limits;
    uint32_t *keys, *order, *sizes;
    uint32_t count, limit_count, buckets;
} assignment;

/* Number i (from 0) of the list at index `list`. The limits make the cast to unsigned safe. */
static uint64_t item(lua_State *L, int list, uint32_t i, int64_t least, int64_t most,
                     const char *what)
{
    lua_rawgeti(L, list, (lua_Integer)i + 1);
    int64_t value = ms_lua_integer(L, -1, least, most, what);
    lua_pop(L, 1);
    return (uint64_t)value;
}

/* The lists bytes, keys and limits at indices 1 to 3, and room for the result, in one userdata on
 * the stack. keys has as many entries as bytes; a missing one is nil and raises. */
static assignment read_assignment(lua_State *L)
{
    for (int i = 1; i <= 3; i++) luaL_checktype(L, i, LUA_TTABLE);
    assignment a = { .count = (uint32_t)lua_rawlen(L, 1),
                     .limit_count = (uint32_t)lua_rawlen(L, 3) };
    size_t numbers = (size_t)a.count + a.limit_count + 1;
    a.bytes = lua_newuserdatauv(
        L, numbers * sizeof(uint64_t) + 3 * (size_t)a.count * sizeof(uint32_t), 0);
    /* The 8-byte numbers come first here, too. */
    a.limits = a.bytes + a.count;
    a.keys = (uint32_t *)(a.limits + a.limit_count);
    a.order = a.keys + a.count;
    a.sizes = a.order + a.count;
    for (uint32_t i = 0; i < a.count; i++) {
        a.bytes[i] = item(L, 1, i, 0, INT64_MAX, "bytes");
        a.keys[i] = (uint32_t)item(L, 2, i, 0, UINT32_MAX, "key");
    }
    for (uint32_t i = 0; i < a.limit_count; i++) a.limits[i] = item(L, 3, i, 1, INT64_MAX, "limit");
    return a;
}

/* core.ddp_assign(bytes, keys, limits) -> lists of positions: cuts items (only those of equal
 * integer keys share a bucket) by the limits in bytes. It is pure arithmetic, offered so that
 * planners in Lua cut as the engine does. */
static int ddp_assign(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    assignment a = read_assignment(L);
    ms_lua_ok(L, ms_ddp_assign(engine, a.bytes, a.keys, a.count, a.limits, a.limit_count, a.order,
                               a.sizes, &a.buckets));
    lua_createtable(L, (int)a.buckets, 0);
    /* order has the positions of all buckets in a row. */
    for (uint32_t b = 0; b < a.buckets; a.order += a.sizes[b++]) {
        lua_createtable(L, (int)a.sizes[b], 0);
        for (uint32_t i = 0; i < a.sizes[b]; i++) {
            lua_pushinteger(L, (lua_Integer)a.order[i] + 1);
            lua_rawseti(L, -2, (lua_Integer)i + 1);
        }
        lua_rawseti(L, -2, (lua_Integer)b + 1);
    }
    return 1;
}

/* reducer:buckets() -> list of { index, bytes, parameters }, how many iterations were reduced. For
 * messages and reports. */
static int reducer_buckets(lua_State *L)
{
    const ms_reducer *r = check_reducer(L);
    lua_newtable(L);
    for (uint32_t b = 0; b < ms_reducer_buckets(r); b++) {
        const ms_bucket *bucket = ms_reducer_bucket(r, b);
        lua_createtable(L, 0, 3);
        ms_lua_set_integer(L, "index", bucket->index);
        ms_lua_set_integer(L, "bytes", (int64_t)ms_tensor_bytes(bucket->flat));
        ms_lua_set_integer(L, "parameters", bucket->count);
        lua_rawseti(L, -2, (lua_Integer)b + 1);
    }
    lua_pushinteger(L, (lua_Integer)ms_reducer_iterations(r));
    return 2;
}

/* reducer:forward_end(), reducer:step_end(): note these moments for stats(). Both enqueue a mark
 * and do not wait. Without them the times of forward, backward and step are 0. */
static int reducer_forward_end(lua_State *L)
{
    ms_lua_enter(L);
    ms_lua_ok(L, ms_reducer_forward_end(check_reducer(L)));
    return 0;
}

/* Called after the optimizer. Where steps are noted, stats() is of whole steps and not of the last
 * pass. */
static int reducer_step_end(lua_State *L)
{
    ms_lua_enter(L);
    ms_lua_ok(L, ms_reducer_step_end(check_reducer(L)));
    return 0;
}

/* reducer:link_stats() -> list of { calls, payload_bytes, wire_bytes, ms, exposed_ms }, one for
 * each link; empty if the chain has no accounts. Call stats() before. stats() takes over the times
 * of passes that have ended since, and this reads them. */
static int reducer_link_stats(lua_State *L)
{
    const ms_reducer *reducer = check_reducer(L);
    uint32_t count = ms_reducer_links(reducer);
    lua_createtable(L, (int)count, 0);
    for (uint32_t i = 1; i <= count; i++) {
        ms_link_stats stats = ms_reducer_link_stats(reducer, i);
        lua_createtable(L, 0, 5);
        ms_lua_set_integer(L, "calls", (int64_t)stats.calls);
        ms_lua_set_integer(L, "payload_bytes", (int64_t)stats.payload_bytes);
        ms_lua_set_integer(L, "wire_bytes", (int64_t)stats.wire_bytes);
        ms_lua_set_ms(L, "ms", stats.ns);
        ms_lua_set_ms(L, "exposed_ms", stats.exposed_ns);
        lua_rawseti(L, -2, (lua_Integer)i);
    }
    return 1;
}

/* reducer:stats() -> { forward_ms, backward_ms, reduce_ms, exposed_ms, step_ms, rebuilt, calls,
 * payload_bytes, wire_bytes } of the last pass that has ended; error: of the last that failed, or
 * nil. Nothing waits: times are those of a pass that the device has finished. The error is a text,
 * as the reduction that failed has ended its job. */
static int reducer_stats(lua_State *L)
{
    ms_pass_stats stats = ms_reducer_stats(check_reducer(L));
    lua_createtable(L, 0, 11);
    ms_lua_set_string(L, "error", ms_reducer_error(check_reducer(L)));
    ms_lua_set_integer(L, "iterations", (int64_t)stats.iterations);
    ms_lua_set_ms(L, "forward_ms", stats.forward_ns);
    ms_lua_set_ms(L, "backward_ms", stats.backward_ns);
    ms_lua_set_ms(L, "reduce_ms", stats.reduce_ns);
    ms_lua_set_ms(L, "exposed_ms", stats.exposed_ns);
    ms_lua_set_ms(L, "step_ms", stats.step_ns);
    ms_lua_set_boolean(L, "rebuilt", ms_reducer_is_rebuilt(check_reducer(L)));
    ms_lua_set_integer(L, "calls", (int64_t)stats.calls);
    ms_lua_set_integer(L, "payload_bytes", (int64_t)stats.payload_bytes);
    ms_lua_set_integer(L, "wire_bytes", (int64_t)stats.wire_bytes);
    return 1;
}

/* core.ddp_compare(group, tensors, names): raises on every rank if the models differ; blocks.
 * Without it, models that differ would add up gradients of different parameters, or hang. */
static int ddp_compare(lua_State *L)
{
    ms_lua_refuse_in_hook(L, "ddp", "models are wrapped before training");
    ms_lua_enter(L);
    uint32_t count = 0;
    const ms_reducer_parameter *parameters = read_parameters(L, 2, 3, &count);
    ms_lua_ok(L, ms_ddp_compare(ms_lua_group(L, 1), parameters, count));
    return 0;
}

/* core.ddp_broadcast(group, tensors, root): copies the root's values to all ranks; does not block.
 * Collectives on the group's first channel; this rank's current stream waits for the values. */
static int ddp_broadcast(lua_State *L)
{
    ms_lua_enter(L);
    ms_group *group = ms_lua_group(L, 1);
    uint32_t count = 0,
             root = (uint32_t)ms_lua_integer(L, 3, 0, (int64_t)ms_group_size(group) - 1, "rank");
    ms_tensor **tensors = ms_lua_tensor_list(L, 2, &count);
    ms_lua_ok(L, ms_ddp_broadcast(group, tensors, count, root));
    return 0;
}

/* Making a reducer, and what ranks do before the first step. */
static const luaL_Reg functions[] = { { "reducer", reducer },
                                      { "ddp_assign", ddp_assign },
                                      { "ddp_compare", ddp_compare },
                                      { "ddp_broadcast", ddp_broadcast },
                                      { NULL, NULL } };

static const luaL_Reg methods[] = {
    { "forward", reducer_forward },
    { "forward_end", reducer_forward_end },
    { "step_end", reducer_step_end },
    { "stats", reducer_stats },
    { "link_stats", reducer_link_stats },
    { "no_sync", reducer_no_sync },
    { "rebuild", reducer_rebuild },
    { "rebuild_due", reducer_rebuild_due },
    { "free", reducer_free },
    { "buckets", reducer_buckets },
    { "outputs", reducer_outputs },
    { "shadow", reducer_shadow },
    { "divisor", reducer_divisor },
    { "record", reducer_record },
    { "arrivals", reducer_arrivals },
    { "assign", reducer_assign },
    { "is_used", reducer_is_used },
    { "layout", reducer_layout },
    { "await_times", reducer_await_times },
    { "on_reduced", reducer_on_reduced },
    { "bucket_times", reducer_bucket_times },
    { NULL, NULL },
};

static const luaL_Reg events[] = { { "__gc", reducer_gc }, { NULL, NULL } };

/* lua/moonshard/ddp.lua has the class that users see; it keeps a reducer in a field. */
void ms_open_ddp(lua_State *L, int runtime)
{
    ms_lua_register(L, runtime, functions);
    ms_lua_type(L, runtime, MS_REDUCER_TYPE, events, methods);
    lua_pop(L, 1);
}
