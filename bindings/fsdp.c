/* fsdp.c: sharded models in Lua. Users call lua/moonshard/parallel/fsdp.lua, which calls these. */
#include "bindings/fsdp.h"

#include "bindings/arguments.h"
#include "bindings/bucket.h"
#include "bindings/call.h"
#include "bindings/enter.h"
#include "bindings/extension.h"
#include "bindings/fields.h"
#include "bindings/fsdp_state.h"
#include "bindings/group.h"
#include "bindings/handles.h"
#include "bindings/link.h"
#include "bindings/prefetch.h"
#include "bindings/reductions.h"
#include "bindings/runtime.h"
#include "bindings/script.h"

/* What is said of a model after its unwrap. */
static const char gone[] = "fsdp: this model was unwrapped; wrap it anew";

/* The model at 1. Raises after unwrap. */
ms_fsdp *ms_lua_fsdp(lua_State *L)
{
    luaL_checkudata(L, 1, MS_FSDP_TYPE);
    return ms_lua_reductions(L)->of;
}

/* Only marks the model; the sweep frees it at a fixed point. */
static int fsdp_gc(lua_State *L)
{
    ms_reductions_box *box = lua_touserdata(L, 1);
    if (box->source && !box->runtime->closed) ms_gradient_source_abandon(box->source);
    box->source = NULL;
    return 0;
}

/* The unit at the index, which counts from 0. */
uint32_t ms_lua_fsdp_unit(lua_State *L, int index, const ms_fsdp *fsdp)
{
    ms_fsdp_unit_info info;
    uint32_t unit = (uint32_t)ms_lua_integer(L, index, 0, UINT32_MAX, "unit");
    if (!ms_fsdp_unit_get(fsdp, unit, &info))
        ms_lua_error(L, "fsdp: there is no unit %u: units() lists them", unit);
    return unit;
}

/* ------------------------------------------------------------------- making */

/* List at 1: { tensor =, name =, unit =, keeps_dtype =?, coded =?, group =? } each; in a userdata
 * on the stack. */
static ms_fsdp_parameter *read_parameters(lua_State *L, uint32_t *count)
{
    luaL_checktype(L, 1, LUA_TTABLE);
    *count = (uint32_t)lua_rawlen(L, 1);
    ms_fsdp_parameter *list = lua_newuserdatauv(L, (*count + 1) * sizeof *list, 0);
    for (uint32_t i = 0; i < *count; i++) {
        lua_rawgeti(L, 1, (lua_Integer)i + 1);
        lua_getfield(L, -1, "tensor");
        list[i].tensor = ms_lua_tensor(L, -1);
        lua_getfield(L, -2, "name");
        list[i].name = luaL_checkstring(L, -1);
        list[i].unit = (uint32_t)ms_lua_field_integer(L, -3, "unit", 0, 0, UINT32_MAX);
        list[i].keeps_dtype = ms_lua_field_boolean(L, -3, "keeps_dtype", false);
        list[i].coded = ms_lua_field_boolean(L, -3, "coded", false);
        list[i].group = lua_getfield(L, -3, "group") == LUA_TNIL ? NULL : ms_lua_group(L, -1);
        lua_pop(L, 4);
    }
    return list;
}

/* Option `name` of the table at the top: whether it has a dtype, which *dtype then is. */
static bool read_dtype(lua_State *L, const char *name, ms_dtype *dtype)
{
    bool given = lua_getfield(L, -1, name) != LUA_TNIL;
    if (given) *dtype = ms_lua_dtype(L, -1);
    lua_pop(L, 1);
    return given;
}

/* List at 2: { name =, reshard_after_forward =, parts =, computes =?, reduces =? } each; in a
 * userdata on the stack. */
static ms_fsdp_unit_options *read_units(lua_State *L, uint32_t *count)
{
    luaL_checktype(L, 2, LUA_TTABLE);
    *count = (uint32_t)lua_rawlen(L, 2);
    ms_fsdp_unit_options *list = lua_newuserdatauv(L, (*count + 1) * sizeof *list, 0);
    for (uint32_t i = 0; i < *count; i++) {
        lua_rawgeti(L, 2, (lua_Integer)i + 1);
        lua_getfield(L, -1, "name");
        list[i].name = luaL_checkstring(L, -1);
        list[i].reshard_after_forward = ms_lua_field_boolean(L, -2, "reshard_after_forward", true);
        list[i].modules = (uint32_t)ms_lua_field_integer(L, -2, "parts", 1, 1, UINT32_MAX);
        lua_pop(L, 1);
        list[i].has_computes = read_dtype(L, "computes", &list[i].computes);
        list[i].has_reduces = read_dtype(L, "reduces", &list[i].reduces);
        lua_pop(L, 1);
    }
    return list;
}

/* Option `name` of the table at 3: a group, or NULL. */
static ms_group *read_group(lua_State *L, const char *name)
{
    ms_group *group = lua_getfield(L, 3, name) == LUA_TNIL ? NULL : ms_lua_group(L, -1);
    lua_pop(L, 1);
    return group;
}

/* The handles of the trainable ones in the list at 1, for bucket:parameters(); left on the stack.
 */
static void push_handles(lua_State *L, uint32_t count)
{
    lua_Integer at = 0;
    lua_createtable(L, (int)count, 0);
    for (uint32_t i = 0; i < count; i++) {
        lua_rawgeti(L, 1, (lua_Integer)i + 1);
        lua_getfield(L, -1, "tensor");
        if (ms_tensor_requires_grad(ms_lua_tensor(L, -1))) lua_rawseti(L, -3, ++at);
        else lua_pop(L, 1);
        lua_pop(L, 1);
    }
}

/* core.sharded(parameters, units, { group =, shards =?, replicas =?, near =?, rows =, backward =,
 * forward =, planner =, find_unused =, offload =, low_gradients =, max_in_flight =?,
 * max_in_flight_bytes =?, max_reductions =?, links = { ... } or hook = f }) */
static int sharded(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    lua_settop(L, 3);
    luaL_checktype(L, 3, LUA_TTABLE);
    uint32_t count = 0;
    ms_link links[MS_CHAIN_LINKS];
    ms_fsdp_options options = { .links = links };
    const ms_fsdp_parameter *parameters = read_parameters(L, &count);
    options.units = read_units(L, &options.unit_count);
    options.group = read_group(L, "group");
    options.shards = read_group(L, "shards");
    options.replicas = read_group(L, "replicas");
    options.near = read_group(L, "near");
    options.layout = ms_lua_field_boolean(L, 3, "rows", false) ? MS_FSDP_ROWS : MS_FSDP_FLAT;
    ms_lua_read_prefetch(L, 3, &options.prefetch, &options.forward_ahead, &options.planner);
    options.find_unused = ms_lua_field_boolean(L, 3, "find_unused", false);
    options.offload = ms_lua_field_boolean(L, 3, "offload", false);
    options.low_gradients = ms_lua_field_boolean(L, 3, "low_gradients", false);
    options.max_in_flight = (uint32_t)ms_lua_field_integer(L, 3, "max_in_flight", 0, 0, UINT16_MAX);
    options.max_in_flight_bytes =
        (uint64_t)ms_lua_field_integer(L, 3, "max_in_flight_bytes", 0, 0, INT64_MAX);
    options.max_reductions =
        (uint32_t)ms_lua_field_integer(L, 3, "max_reductions", 0, 0, UINT16_MAX);
    if (lua_getfield(L, 3, "links") == LUA_TTABLE) options.link_count = ms_lua_chain(L, -1, links);
    ms_lua_collect(L, ms_lua_runtime(L));
    ms_gradient_sources_sweep(engine);
    ms_reductions_box *box = ms_lua_new_reductions(L, MS_FSDP_TYPE, gone);
    ms_fsdp *made = NULL;
    int at = lua_gettop(L);
    push_handles(L, count);
    ms_lua_hook_options hook = ms_lua_read_hook(L, 3, at + 1, at);
    options.hook = hook.hook;
    options.hook_user = hook.user;
    options.hook_free = hook.free;
    options.hook_links = hook.links;
    options.hook_whole = ms_lua_field_boolean(L, 3, "hook_whole", false);
    options.hook_once = ms_lua_field_boolean(L, 3, "hook_once", false);
    ms_status status = ms_fsdp_new(engine, &options, parameters, count, &made);
    box->of = made;
    if (made) box->source = ms_fsdp_source(made);
    if (status && options.hook_user) ms_callback_free(options.hook_user);
    ms_lua_ok(L, status);
    lua_settop(L, at);
    return 1;
}

/* -------------------------------------------------------------------- edges */

/* sharded:before_forward(unit, inputs) -> whether it computes in the shards' dtype,
 * sharded:after_forward(unit, outputs) */
typedef ms_status (*edge)(ms_fsdp *fsdp, uint32_t unit, ms_tensor *const *tensors, uint32_t count);
static int at_edge(lua_State *L, edge f)
{
    ms_lua_enter(L);
    uint32_t count = 0;
    ms_fsdp *fsdp = ms_lua_fsdp(L);
    uint32_t unit = (uint32_t)lua_tointeger(L, 2);
    /* A forward may have no tensors as inputs, or as outputs. */
    ms_tensor **tensors = lua_rawlen(L, 3) ? ms_lua_tensor_list(L, 3, &count) : NULL;
    ms_lua_ok(L, f(fsdp, unit, tensors, count));
    lua_pushboolean(L, ms_fsdp_is_full(fsdp, unit));
    return 1;
}
static int fsdp_before_forward(lua_State *L) { return at_edge(L, ms_fsdp_before_forward); }
static int fsdp_after_forward(lua_State *L) { return at_edge(L, ms_fsdp_after_forward); }

/* sharded:begin_part(unit, part), before before_forward of a unit of several modules: units count
 * from 0, its modules from 1 */
static int fsdp_begin_module(lua_State *L)
{
    ms_fsdp_begin_module(ms_lua_fsdp(L), (uint32_t)lua_tointeger(L, 2),
                         (uint32_t)lua_tointeger(L, 3) - 1);
    return 0;
}

/* sharded:sync(yes) -> the setting before */
static int fsdp_sync(lua_State *L)
{
    lua_pushboolean(L, ms_fsdp_set_sync(ms_lua_fsdp(L), lua_toboolean(L, 2)));
    return 1;
}

/* sharded:reduce(): the gradients that passes inside no_sync have left */
static int fsdp_reduce(lua_State *L)
{
    ms_lua_enter(L);
    ms_lua_refuse_in_hook(L, "reduce", "a hook runs in a reduction");
    ms_lua_ok(L, ms_fsdp_reduce(ms_lua_fsdp(L)));
    return 0;
}

/* sharded:replica_sync(yes) -> the setting before */
static int fsdp_replica_sync(lua_State *L)
{
    lua_pushboolean(L, ms_fsdp_set_replica_sync(ms_lua_fsdp(L), lua_toboolean(L, 2)));
    return 1;
}

/* sharded:full(yes) */
static int fsdp_full(lua_State *L)
{
    ms_fsdp_set_full(ms_lua_fsdp(L), lua_toboolean(L, 2));
    return 0;
}

/* sharded:can_be_partial() */
static int fsdp_can_be_partial(lua_State *L)
{
    lua_pushboolean(L, ms_fsdp_can_be_partial(ms_lua_fsdp(L)));
    return 1;
}

/* sharded:set_reshard(unit, after_forward, after_backward) */
static int fsdp_set_reshard(lua_State *L)
{
    ms_fsdp *fsdp = ms_lua_fsdp(L);
    ms_fsdp_set_reshard(fsdp, ms_lua_fsdp_unit(L, 2, fsdp), lua_toboolean(L, 3),
                        lua_toboolean(L, 4));
    return 0;
}

/* sharded:set_unshard_in_backward(unit, yes) */
static int fsdp_set_unshard_in_backward(lua_State *L)
{
    ms_fsdp *fsdp = ms_lua_fsdp(L);
    ms_fsdp_set_unshard_in_backward(fsdp, ms_lua_fsdp_unit(L, 2, fsdp), lua_toboolean(L, 3));
    return 0;
}

/* sharded:reshard(unit) */
static int fsdp_reshard(lua_State *L)
{
    ms_lua_enter(L);
    ms_fsdp *fsdp = ms_lua_fsdp(L);
    ms_lua_ok(L, ms_fsdp_reshard(fsdp, ms_lua_fsdp_unit(L, 2, fsdp)));
    return 0;
}

/* sharded:unshard(unit): gathers it -> stream index, number: when it is there */
static int fsdp_unshard(lua_State *L)
{
    ms_lua_enter(L);
    ms_point ready;
    ms_fsdp *fsdp = ms_lua_fsdp(L);
    ms_lua_ok(L, ms_fsdp_unshard(fsdp, ms_lua_fsdp_unit(L, 2, fsdp), &ready));
    lua_pushinteger(L, ready.stream);
    lua_pushinteger(L, (lua_Integer)ready.seq);
    return 2;
}

/* ------------------------------------------------- ranks with unequal inputs */

/* sharded:joining(yes, live_divisor) */
static int fsdp_joining(lua_State *L)
{
    ms_lua_enter(L);
    ms_fsdp *fsdp = ms_lua_fsdp(L);
    ms_lua_ok(L, ms_fsdp_set_joining(fsdp, lua_toboolean(L, 2), lua_toboolean(L, 3)));
    return 0;
}

/* Pushes how many ranks have inputs, the lowest of them, and the lowest that has none. */
static int push_live(lua_State *L, const ms_fsdp_live *live)
{
    lua_pushinteger(L, live->count);
    lua_pushinteger(L, live->first);
    lua_pushinteger(L, live->absent);
    return 3;
}

/* sharded:call(number) -> ranks with inputs, the lowest of them, the lowest without */
static int fsdp_call(lua_State *L)
{
    ms_lua_enter(L);
    ms_fsdp_live live;
    ms_fsdp *fsdp = ms_lua_fsdp(L);
    ms_lua_ok(L, ms_fsdp_call(fsdp, (uint32_t)ms_lua_integer(L, 2, 0, 255, "number"), &live));
    return push_live(L, &live);
}

/* sharded:follow() -> the number of a call, the lowest rank with inputs, the lowest without; nil
 * when no rank has inputs left */
static int fsdp_follow(lua_State *L)
{
    ms_lua_enter(L);
    ms_fsdp_live live;
    bool more;
    uint32_t number;
    ms_lua_ok(L, ms_fsdp_follow(ms_lua_fsdp(L), &more, &number, &live));
    if (!more) return 0;
    lua_pushinteger(L, number);
    lua_pushinteger(L, live.first);
    lua_pushinteger(L, live.absent);
    return 3;
}

/* sharded:agreements() -> how often ranks have told each other what they need, ms that this one has
 * waited; of the last pass */
static int fsdp_agreements(lua_State *L)
{
    ms_lockstep_stats last = ms_fsdp_lockstep_stats(ms_lua_fsdp(L));
    lua_pushinteger(L, (lua_Integer)last.count);
    lua_pushnumber(L, (double)last.wait_ns * 1e-6);
    return 2;
}

/* sharded:reset() */
static int fsdp_reset(lua_State *L)
{
    ms_lua_enter(L);
    ms_fsdp_reset(ms_lua_fsdp(L));
    return 0;
}

/* sharded:unwrap(): gathers all parameters for good */
static int fsdp_unwrap(lua_State *L)
{
    ms_lua_refuse_in_hook(L, "unwrap", "the reduction that runs needs it");
    ms_lua_enter(L);
    ms_lua_ok(L, ms_fsdp_unwrap(ms_lua_fsdp(L)));
    ms_fsdp_free(ms_lua_fsdp(L));
    ((ms_reductions_box *)lua_touserdata(L, 1))->source = NULL;
    return 0;
}

/* ------------------------------------------------------------------- asking */

/* sharded:divisor(number): by which sums are divided */
static int fsdp_divisor(lua_State *L)
{
    ms_fsdp_set_divisor(ms_lua_fsdp(L), luaL_checknumber(L, 2));
    return 0;
}

/* sharded:begins_pass(unit) -> whether a forward of the unit that begins now begins a pass; whether
 * the backward of that pass reduces */
static int fsdp_begins_pass(lua_State *L)
{
    ms_lua_enter(L);
    ms_fsdp *fsdp = ms_lua_fsdp(L);
    bool reduces = ms_fsdp_set_sync(fsdp, true);
    ms_fsdp_set_sync(fsdp, reduces);
    lua_pushboolean(L, ms_fsdp_begins_pass(fsdp, (uint32_t)lua_tointeger(L, 2)));
    lua_pushboolean(L, reduces);
    return 2;
}

/* sharded:gather_stats() -> { gather_ms, exposed_gather_ms, copy_ms, copy_overlap_ms, hits, misses,
 * wasted_bytes } */
static int fsdp_gather_stats(lua_State *L)
{
    ms_gather_stats stats = ms_fsdp_gather_stats(ms_lua_fsdp(L));
    lua_createtable(L, 0, 7);
    ms_lua_set_ms(L, "copy_ms", stats.copy_ns);
    ms_lua_set_ms(L, "copy_overlap_ms", stats.overlap_ns);
    ms_lua_set_ms(L, "gather_ms", stats.gather_ns);
    ms_lua_set_ms(L, "exposed_gather_ms", stats.exposed_ns);
    ms_lua_set_integer(L, "hits", (int64_t)stats.prefetch.hits);
    ms_lua_set_integer(L, "misses", (int64_t)stats.prefetch.misses);
    ms_lua_set_integer(L, "wasted_bytes", (int64_t)stats.prefetch.wasted_bytes);
    return 1;
}

/* sharded:extend(before, after): see ms_lua_extend. */
static int fsdp_extend(lua_State *L) { return ms_lua_extend(L, ms_lua_fsdp(L)); }

/* sharded:check_idle(what): raises inside of a forward, a backward or a summon */
static int fsdp_check_idle(lua_State *L)
{
    ms_lua_ok(L, ms_fsdp_check_idle(ms_lua_fsdp(L), luaL_checkstring(L, 2)));
    return 0;
}

/* sharded:check_no_forward(what): raises inside of a forward */
static int fsdp_check_no_forward(lua_State *L)
{
    ms_lua_ok(L, ms_fsdp_check_no_forward(ms_lua_fsdp(L), luaL_checkstring(L, 2)));
    return 0;
}

/* sharded:units() -> list of { index, name, bytes, shard_bytes, gathered }, the root first */
static int fsdp_units(lua_State *L)
{
    const ms_fsdp *fsdp = ms_lua_fsdp(L);
    ms_fsdp_unit_info info;
    lua_newtable(L);
    for (uint32_t u = 0; ms_fsdp_unit_get(fsdp, u, &info); u++) {
        lua_createtable(L, 0, 6);
        lua_pushinteger(L, u);
        lua_setfield(L, -2, "index");
        lua_pushstring(L, info.name);
        lua_setfield(L, -2, "name");
        lua_pushinteger(L, (lua_Integer)info.bytes);
        lua_setfield(L, -2, "bytes");
        lua_pushinteger(L, (lua_Integer)info.shard_bytes);
        lua_setfield(L, -2, "shard_bytes");
        lua_pushinteger(L, (lua_Integer)info.gathered_bytes);
        lua_setfield(L, -2, "gathered_bytes");
        lua_pushboolean(L, info.gathered);
        lua_setfield(L, -2, "gathered");
        lua_rawseti(L, -2, (lua_Integer)u + 1);
    }
    return 1;
}

/* ------------------------------------------------------------------- tables */

/* core.fp8_round(t) -> the numbers of t's E4M3 codes, as gathers with dtype = "fp8" make them. */
static int fp8_round(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    ms_tensor *t = ms_lua_tensor(L, 1), *made = NULL;
    ms_handle *handle = ms_lua_new_handle(L);
    ms_lua_ok(L, ms_fp8_round(engine, t, &made));
    ms_handle_fill(handle, made);
    return 1;
}

static const luaL_Reg functions[] = { { "sharded", sharded },
                                      { "fp8_round", fp8_round },
                                      { NULL, NULL } };

static const luaL_Reg methods[] = {
    { "before_forward", fsdp_before_forward },
    { "after_forward", fsdp_after_forward },
    { "begin_part", fsdp_begin_module },
    { "sync", fsdp_sync },
    { "reduce", fsdp_reduce },
    { "replica_sync", fsdp_replica_sync },
    { "full", fsdp_full },
    { "can_be_partial", fsdp_can_be_partial },
    { "set_reshard", fsdp_set_reshard },
    { "set_unshard_in_backward", fsdp_set_unshard_in_backward },
    { "reshard", fsdp_reshard },
    { "unshard", fsdp_unshard },
    { "joining", fsdp_joining },
    { "call", fsdp_call },
    { "follow", fsdp_follow },
    { "agreements", fsdp_agreements },
    { "check_no_forward", fsdp_check_no_forward },
    { "reset", fsdp_reset },
    { "unwrap", fsdp_unwrap },
    { "divisor", fsdp_divisor },
    { "begins_pass", fsdp_begins_pass },
    { "gather_stats", fsdp_gather_stats },
    { "extend", fsdp_extend },
    { "check_idle", fsdp_check_idle },
    { "units", fsdp_units },
    { NULL, NULL },
};

static const luaL_Reg events[] = { { "__gc", fsdp_gc }, { NULL, NULL } };

void ms_open_fsdp(lua_State *L, int runtime)
{
    ms_lua_register(L, runtime, functions);
    ms_lua_open_forecast(L, runtime);
    ms_lua_type(L, runtime, MS_FSDP_TYPE, events, methods);
    ms_lua_add_reductions(L, runtime);
    ms_lua_add_prefetch(L, runtime);
    ms_lua_add_fsdp_state(L, runtime);
    lua_pop(L, 1);
}
