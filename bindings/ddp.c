/* ddp.c: reducers in Lua. Users call lua/moonshard/parallel/ddp.lua, which calls these. */
#include "bindings/ddp.h"

#include "bindings/arguments.h"
#include "bindings/bucket.h"
#include "bindings/call.h"
#include "bindings/fields.h"
#include "bindings/group.h"
#include "bindings/link.h"
#include "bindings/reductions.h"
#include "bindings/enter.h"
#include "bindings/runtime.h"
#include "bindings/script.h"
#include "moonshard/ddp.h"

/* What is said of a model after its unwrap. */
static const char gone[] = "ddp: this model was unwrapped; use the module inside, or wrap it again";

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

/* The reducer at 1. Every method begins with it, so an unwrapped model fails with one message. */
static ms_reducer *check_reducer(lua_State *L)
{
    luaL_checkudata(L, 1, MS_REDUCER_TYPE);
    return ms_lua_reductions(L)->of;
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
    ms_reductions_box *box = lua_touserdata(L, 1);
    if (box->source && !box->runtime->closed) ms_gradient_source_abandon(box->source);
    box->source = NULL;
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
    ms_gradient_sources_sweep(engine);
    ms_reductions_box *box = ms_lua_new_reductions(L, MS_REDUCER_TYPE, gone);
    int at = lua_gettop(L);
    ms_reducer *made = NULL;
    /* The list at index 1 has the handles that bucket:parameters() gives out. */
    ms_lua_hook_options hook = ms_lua_read_hook(L, 3, 1, at);
    given.options.hook = hook.hook;
    given.options.hook_user = hook.user;
    given.options.hook_free = hook.free;
    given.options.hook_links = hook.links;
    ms_status status = ms_reducer_new(engine, &given.options, parameters, count, &made);
    box->of = made;
    if (made) box->source = ms_reducer_source(made);
    /* The engine takes the hook over only with success. */
    if (status && given.options.hook_user) ms_callback_free(given.options.hook_user);
    ms_lua_ok(L, status);
    lua_settop(L, at);
    return 1;
}

/* reducer:forward(synchronize): call before the forward of a pass; may rebuild the buckets, which
 * blocks once. lua/moonshard/parallel/ddp.lua calls it in the model's __call; synchronize is false
 * inside no_sync. */
static int reducer_forward(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    ms_reducer *r = check_reducer(L);
    bool synchronize = lua_toboolean(L, 2);
    /* A graph that the script has dropped waits for no rest. */
    if (synchronize && ms_backward_awaits_rest(engine)) ms_lua_collect(L, ms_lua_runtime(L));
    ms_lua_ok(L, ms_reducer_forward(r, synchronize));
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

/* reducer:reduce(): the gradients that passes inside no_sync have left */
static int reducer_reduce(lua_State *L)
{
    ms_lua_enter(L);
    ms_lua_refuse_in_hook(L, "reduce", "a hook runs in a reduction");
    ms_lua_ok(L, ms_reducer_reduce(check_reducer(L)));
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

/* reducer:no_sync(inside) -> the setting before. The caller puts the former setting back, also when
 * the function inside raises. */
static int reducer_no_sync(lua_State *L)
{
    lua_pushboolean(L, ms_reducer_set_no_sync(check_reducer(L), lua_toboolean(L, 2)));
    return 1;
}

/* reducer:rebuild(): the next synchronized backward logs the order of gradients again. For models
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

/* reducer:waits() -> whether the last backward has left a bucket waiting for gradients */
static int reducer_waits(lua_State *L)
{
    lua_pushboolean(L, ms_reducer_waits(check_reducer(L)));
    return 1;
}

/* reducer:settled(): raises, and ends the job, if the last backward has left a bucket waiting. Not
 * in hooks: a backward runs then. */
static int reducer_settled(lua_State *L)
{
    ms_lua_enter(L);
    ms_lua_ok(L, ms_reducer_settled(check_reducer(L)));
    return 0;
}

/* reducer:free(): removes it from the model, which can be wrapped again. Refused in hooks: the
 * reduction that runs uses it. Gradients stay with their parameters. */
static int reducer_free(lua_State *L)
{
    ms_lua_refuse_in_hook(L, "unwrap", "the reduction that runs needs it");
    ms_lua_enter(L);
    ms_reducer_free(check_reducer(L));
    ((ms_reductions_box *)lua_touserdata(L, 1))->source = NULL;
    return 0;
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
    const ms_gradient_source *source = ms_reducer_source(r);
    for (uint32_t b = 0; b < ms_gradient_source_buckets(source); b++)
        most += ms_gradient_source_bucket(source, b)->count;
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

/* reducer:forward_end(): notes this moment for stats(). It enqueues a mark and does not wait.
 * Without it the times of forward and backward are 0. */
static int reducer_forward_end(lua_State *L)
{
    ms_lua_enter(L);
    ms_lua_ok(L, ms_reducer_forward_end(check_reducer(L)));
    return 0;
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
    { "no_sync", reducer_no_sync },
    { "rebuild", reducer_rebuild },
    { "rebuild_due", reducer_rebuild_due },
    { "settled", reducer_settled },
    { "waits", reducer_waits },
    { "free", reducer_free },
    { "outputs", reducer_outputs },
    { "shadow", reducer_shadow },
    { "reduce", reducer_reduce },
    { "divisor", reducer_divisor },
    { "record", reducer_record },
    { "arrivals", reducer_arrivals },
    { "assign", reducer_assign },
    { NULL, NULL },
};

static const luaL_Reg events[] = { { "__gc", reducer_gc }, { NULL, NULL } };

/* lua/moonshard/parallel/ddp.lua has the class that users see; it keeps a reducer in a field. */
void ms_open_ddp(lua_State *L, int runtime)
{
    ms_lua_register(L, runtime, functions);
    ms_lua_type(L, runtime, MS_REDUCER_TYPE, events, methods);
    ms_lua_add_reductions(L, runtime);
    lua_pop(L, 1);
}
