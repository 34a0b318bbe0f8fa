/* prefetch.c: what sharded models gather ahead, in Lua: modes, recorded orders, plans and the times
 * that plans are made from. lua/moonshard/parallel/fsdp/prefetch.lua calls these. */
#include "bindings/prefetch.h"

#include <math.h>
#include <string.h>

#include "bindings/arguments.h"
#include "bindings/call.h"
#include "bindings/fields.h"
#include "bindings/reductions.h"
#include "bindings/enter.h"
#include "bindings/runtime.h"
#include "bindings/script.h"

/* Units that a view from a script may have. */
#define MOST_UNITS (1 << 20)

static ms_fsdp *check_fsdp(lua_State *L)
{
    luaL_checkudata(L, 1, MS_FSDP_TYPE);
    return ms_lua_reductions(L)->of;
}

void ms_lua_read_prefetch(lua_State *L, int table, ms_prefetch_mode *mode, bool *forward,
                          bool *planner)
{
    static const char *const names[] = { "none", "pre", "post", NULL };
    lua_getfield(L, table, "backward");
    *mode = (ms_prefetch_mode)luaL_checkoption(L, -1, NULL, names);
    lua_pop(L, 1);
    *forward = ms_lua_field_boolean(L, table, "forward", false);
    *planner = ms_lua_field_boolean(L, table, "planner", false);
}

/* sharded:set_prefetch({ backward =, forward =, planner = }) */
static int set_prefetch(lua_State *L)
{
    ms_prefetch_mode mode;
    bool forward, planner;
    ms_lua_enter(L);
    ms_fsdp *fsdp = check_fsdp(L);
    ms_lua_read_prefetch(L, 2, &mode, &forward, &planner);
    ms_lua_ok(L, ms_fsdp_set_prefetch(fsdp, mode, forward, planner));
    return 0;
}

static ms_schedule_kind check_kind(lua_State *L, int index)
{
    static const char *const names[] = { "training", "evaluation", NULL };
    return (ms_schedule_kind)luaL_checkoption(L, index, NULL, names);
}

/* sharded:order(kind) -> passes, changes, { { unit =, backward =, last = } ... }; last is a
 * position in the list */
static int order_of(lua_State *L)
{
    ms_fsdp_order order;
    ms_fsdp_order_get(check_fsdp(L), check_kind(L, 2), &order);
    lua_pushinteger(L, (lua_Integer)order.passes);
    lua_pushinteger(L, (lua_Integer)order.changes);
    lua_createtable(L, (int)order.count, 0);
    for (uint32_t i = 0; i < order.count; i++) {
        lua_createtable(L, 0, 4);
        lua_pushinteger(L, order.uses[i].unit);
        lua_setfield(L, -2, "unit");
        lua_pushboolean(L, order.uses[i].backward);
        lua_setfield(L, -2, "backward");
        lua_pushinteger(L, (lua_Integer)order.uses[i].last + 1);
        lua_setfield(L, -2, "last");
        lua_pushinteger(L, (lua_Integer)order.uses[i].ended + 1);
        lua_setfield(L, -2, "ended");
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    return 3;
}

/* How often sharded:order would give the same as before, without the list. */
static int passes_of(lua_State *L)
{
    ms_fsdp_order order;
    ms_fsdp_order_get(check_fsdp(L), check_kind(L, 2), &order);
    lua_pushinteger(L, (lua_Integer)order.passes);
    lua_pushinteger(L, (lua_Integer)order.changes);
    return 2;
}

/* The units of the list on top, which were checked, in a userdata that takes its place. */
static const uint32_t *read_list(lua_State *L, uint32_t *count)
{
    if (!lua_isnil(L, -1)) luaL_checktype(L, -1, LUA_TTABLE);
    *count = lua_isnil(L, -1) ? 0 : (uint32_t)lua_rawlen(L, -1);
    uint32_t *list = lua_newuserdatauv(L, (*count + 1) * sizeof *list, 0);
    for (uint32_t i = 0; i < *count; i++) {
        lua_rawgeti(L, -2, (lua_Integer)i + 1);
        list[i] = (uint32_t)lua_tointeger(L, -1);
        lua_pop(L, 1);
    }
    lua_remove(L, -2);
    return list;
}

/* The entries in the list at `index`, checked before: { gather =?, after =?, keep =? } each. They
 * and their lists are in userdata that are left on the stack. */
static ms_fsdp_entry *read_entries(lua_State *L, int index, uint32_t *count)
{
    *count = (uint32_t)lua_rawlen(L, index);
    ms_fsdp_entry *entries = lua_newuserdatauv(L, (*count + 1) * sizeof *entries, 0);
    lua_createtable(L, 2 * (int)*count, 0); /* keeps the lists of units */
    for (uint32_t i = 0; i < *count; i++) {
        lua_rawgeti(L, index, (lua_Integer)i + 1);
        luaL_checktype(L, -1, LUA_TTABLE);
        lua_getfield(L, -1, "keep");
        entries[i].keep = lua_isnil(L, -1)       ? MS_KEEP_AS_USUAL
                          : lua_toboolean(L, -1) ? MS_KEEP
                                                 : MS_KEEP_NOT;
        lua_pop(L, 1);
        lua_getfield(L, -1, "gather");
        entries[i].gather = read_list(L, &entries[i].gather_count);
        lua_rawseti(L, -3, 2 * (lua_Integer)i + 1);
        lua_getfield(L, -1, "after");
        entries[i].after = read_list(L, &entries[i].after_count);
        lua_rawseti(L, -3, 2 * (lua_Integer)i + 2);
        lua_pop(L, 1);
    }
    return entries;
}

/* sharded:set_plan(kind, entries) */
static int set_plan(lua_State *L)
{
    uint32_t count;
    ms_lua_enter(L);
    ms_fsdp *fsdp = check_fsdp(L);
    ms_schedule_kind kind = check_kind(L, 2);
    const ms_fsdp_entry *entries = read_entries(L, 3, &count);
    ms_lua_ok(L, ms_fsdp_set_plan(fsdp, kind, entries, count));
    return 0;
}

/* ---------------------------------------------------------------- forecasts */

/* The part of a time on a channel that is not its latency; 0 where the view names no channel. */
static double link_ms(double ms, double latency_ms)
{
    return ms > latency_ms ? ms - latency_ms : 0;
}

static double read_latency(lua_State *L, int view, const char *channel)
{
    double latency = HUGE_VAL;
    if (lua_getfield(L, view, channel) == LUA_TTABLE)
        latency = ms_lua_field_number(L, lua_gettop(L), "latency_ms", 0);
    lua_pop(L, 1);
    return latency;
}

/* The view's field `visits`, in userdata that are left on the stack. Later visits of a unit say
 * again what its gather takes. */
static void read_visits(lua_State *L, int index, ms_prefetch_view *view)
{
    double gather_latency = read_latency(L, index, "gather");
    double reduce_latency = read_latency(L, index, "reduce");
    lua_getfield(L, index, "visits");
    int visits = lua_gettop(L);
    luaL_checktype(L, visits, LUA_TTABLE);
    view->count = (uint32_t)lua_rawlen(L, visits);
    ms_prefetch_use *uses = lua_newuserdatauv(L, (view->count + 1) * sizeof *uses, 0);
    double *gather_ms = lua_newuserdatauv(L, (view->count + 1) * sizeof *gather_ms, 0);
    for (uint32_t i = 0; i < view->count; i++) {
        lua_rawgeti(L, visits, (lua_Integer)i + 1);
        int visit = lua_gettop(L);
        luaL_checktype(L, visit, LUA_TTABLE);
        double reduce_ms = ms_lua_field_number(L, visit, "reduce_ms", 0);
        gather_ms[i] = ms_lua_field_number(L, visit, "gather_ms", 0);
        uses[i] = (ms_prefetch_use){
            .unit = (uint32_t)ms_lua_field_integer(L, visit, "unit", 0, 0, MOST_UNITS - 1),
            .last = (uint32_t)ms_lua_field_integer(L, visit, "last", 1, 1, view->count) - 1,
            .ended = (uint32_t)ms_lua_field_integer(L, visit, "ended", 1, 1, UINT32_MAX),
            .needs_values = ms_lua_field_boolean(L, visit, "needs_values", true),
            .stays = ms_lua_field_boolean(L, visit, "stays", false),
            .compute_ms = ms_lua_field_number(L, visit, "compute_ms", 0),
            .reduce_ms = reduce_ms,
            .reduce_link_ms = link_ms(reduce_ms, reduce_latency),
        };
        if (uses[i].unit >= view->unit_count) view->unit_count = uses[i].unit + 1;
        lua_pop(L, 1);
    }
    ms_prefetch_unit *units = lua_newuserdatauv(L, (view->unit_count + 1) * sizeof *units, 0);
    memset(units, 0, (view->unit_count + 1) * sizeof *units);
    for (uint32_t i = 0; i < view->count; i++)
        units[uses[i].unit] = (ms_prefetch_unit){
            .gather_ms = gather_ms[i],
            .gather_link_ms = link_ms(gather_ms[i], gather_latency),
        };
    view->uses = uses;
    view->units = units;
}

static ms_prefetch_view read_view(lua_State *L, int index)
{
    luaL_checktype(L, index, LUA_TTABLE);
    ms_prefetch_view view = {
        .max_gathers = (uint32_t)ms_lua_field_integer(L, index, "max_in_flight", 1, 1, UINT32_MAX),
        .max_reductions =
            (uint32_t)ms_lua_field_integer(L, index, "max_reductions", 1, 1, UINT32_MAX),
    };
    read_visits(L, index, &view);
    return view;
}

/* core.forecast(view, entries) -> ms that a pass takes with a plan. Planners may call it: it
 * touches no tensor. */
static int forecast(lua_State *L)
{
    uint32_t count;
    double ms = 0;
    luaL_checktype(L, 2, LUA_TTABLE);
    ms_prefetch_view view = read_view(L, 1);
    const ms_fsdp_entry *entries = read_entries(L, 2, &count);
    if (count != view.count) ms_lua_error(L, "forecast: a plan has an entry for each visit");
    ms_lua_ok(L, ms_prefetch_forecast(&ms_lua_runtime(L)->context, &view, entries, &ms));
    lua_pushnumber(L, ms);
    return 1;
}

/* ------------------------------------------------------------------- times */

/* sharded:unit_times() -> { { forward_ms =, backward_ms =, gather_ms = } ... } by unit, the root
 * first; nil if nothing was timed yet */
static int unit_times(lua_State *L)
{
    ms_unit_times times;
    ms_fsdp *fsdp = check_fsdp(L);
    if (!ms_fsdp_unit_times(fsdp, 0, &times)) return 0;
    lua_newtable(L);
    for (uint32_t u = 0; ms_fsdp_unit_times(fsdp, u, &times); u++) {
        lua_createtable(L, 0, 3);
        ms_lua_set_ms(L, "forward_ms", times.forward_ns);
        ms_lua_set_ms(L, "backward_ms", times.backward_ns);
        ms_lua_set_ms(L, "gather_ms", times.gather_ns);
        lua_rawseti(L, -2, (lua_Integer)u + 1);
    }
    return 1;
}

static const luaL_Reg methods[] = { { "set_prefetch", set_prefetch }, { "order", order_of },
                                    { "passes_of", passes_of },       { "set_plan", set_plan },
                                    { "unit_times", unit_times },     { NULL, NULL } };

void ms_lua_open_forecast(lua_State *L, int runtime)
{
    static const luaL_Reg functions[] = { { "forecast", forecast }, { NULL, NULL } };
    ms_lua_register(L, runtime, functions);
}

void ms_lua_add_prefetch(lua_State *L, int runtime) { ms_lua_register(L, runtime, methods); }
