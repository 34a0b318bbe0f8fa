/* prefetch.c: what sharded models gather ahead, in Lua: modes, recorded orders, plans and the times
 * that plans are made from. lua/moonshard/fsdp/prefetch.lua calls these. */
#include "bindings/prefetch.h"

#include "bindings/reductions.h"

static ms_fsdp *check_fsdp(lua_State *L)
{
    luaL_checkudata(L, 1, MS_FSDP_TYPE);
    return ms_lua_reductions(L)->of;
}

static uint32_t check_unit(lua_State *L, int index, const ms_fsdp *fsdp)
{
    ms_fsdp_unit_info info;
    uint32_t unit = (uint32_t)ms_lua_integer(L, index, 0, UINT32_MAX, "unit");
    if (!ms_fsdp_unit_get(fsdp, unit, &info)) ms_lua_error(L, "fsdp: there is no unit %u", unit);
    return unit;
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

/* The units of the list on top, in a userdata that takes its place. */
static const uint32_t *read_units_of(lua_State *L, const ms_fsdp *fsdp, uint32_t *count)
{
    *count = lua_isnil(L, -1) ? 0 : (uint32_t)lua_rawlen(L, -1);
    uint32_t *list = lua_newuserdatauv(L, (*count + 1) * sizeof *list, 0);
    for (uint32_t i = 0; i < *count; i++) {
        lua_rawgeti(L, -2, (lua_Integer)i + 1);
        list[i] = check_unit(L, -1, fsdp);
        lua_pop(L, 1);
    }
    lua_remove(L, -2);
    return list;
}

/* sharded:set_plan(kind, { { gather =?, after =?, keep =? } ... }), checked before */
static int set_plan(lua_State *L)
{
    ms_lua_enter(L);
    ms_fsdp *fsdp = check_fsdp(L);
    ms_schedule_kind kind = check_kind(L, 2);
    uint32_t count = (uint32_t)lua_rawlen(L, 3);
    ms_fsdp_entry *entries = lua_newuserdatauv(L, (count + 1) * sizeof *entries, 0);
    lua_createtable(L, 2 * (int)count, 0); /* keeps the lists of units */
    for (uint32_t i = 0; i < count; i++) {
        lua_rawgeti(L, 3, (lua_Integer)i + 1);
        lua_getfield(L, -1, "keep");
        entries[i].keep = lua_isnil(L, -1)       ? MS_KEEP_AS_USUAL
                          : lua_toboolean(L, -1) ? MS_KEEP
                                                 : MS_KEEP_NOT;
        lua_pop(L, 1);
        lua_getfield(L, -1, "gather");
        entries[i].gather = read_units_of(L, fsdp, &entries[i].gather_count);
        lua_rawseti(L, -3, 2 * (lua_Integer)i + 1);
        lua_getfield(L, -1, "after");
        entries[i].after = read_units_of(L, fsdp, &entries[i].after_count);
        lua_rawseti(L, -3, 2 * (lua_Integer)i + 2);
        lua_pop(L, 1);
    }
    ms_lua_ok(L, ms_fsdp_set_plan(fsdp, kind, entries, count));
    return 0;
}

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

void ms_lua_add_prefetch(lua_State *L, int runtime) { ms_lua_register(L, runtime, methods); }
