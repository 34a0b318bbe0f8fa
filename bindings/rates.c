/* rates.c: the speeds of the simulated machine, as a Lua table. */
#include "bindings/rates.h"

#include <string.h>

#include "bindings/arguments.h"
#include "bindings/script.h"
#include "runtime.h"

/* Field `name` of the table, a number that must be there. It is read here and not with a default of
 * 0, so that the message says which field is missing; ms_rates_problem could only say that a rate
 * is 0. `where` is the path to the table ("links: "), for the message. */
static double number_at(lua_State *L, int table, const char *where, const char *name)
{
    if (lua_getfield(L, table, name) != LUA_TNUMBER) {
        const char *found = lua_isnil(L, -1) ? "missing" : luaL_typename(L, -1);
        ms_lua_error(L, "rates: %s%s must be a number; it is %s", where, name, found);
    }
    double value = lua_tonumber(L, -1);
    lua_pop(L, 1);
    return value;
}

/* Pushes table `name`; raises if it is none, or has a key that is not in `keys` (NULL: any). The
 * message distinguishes a missing table from a value of another type. The caller pops the table. */
static void table_at(lua_State *L, int table, const char *name, const char *const keys[])
{
    if (lua_getfield(L, table, name) != LUA_TTABLE) {
        const char *found = lua_isnil(L, -1) ? "missing" : luaL_typename(L, -1);
        ms_lua_error(L, "rates: %s must be a table; it is %s", name, found);
    }
    if (keys) ms_lua_known_keys(L, lua_gettop(L), keys, "field of rates");
}

/* One entry of links: up to how many ranks it holds, its latency and its bandwidth. ranks 0 is the
 * outermost level, which all ranks share; ms_rates_problem checks that the levels grow and that the
 * last one is it. */
static void read_level(lua_State *L, int index, ms_level_rate *level)
{
    static const char *const keys[] = { "ranks", "latency_ns", "bytes_per_s", NULL };
    if (!lua_istable(L, index))
        ms_lua_error(L, "rates: links must be a list of tables, not of %s",
                     luaL_typename(L, index));
    ms_lua_known_keys(L, index, keys, "field of a link's rates");
    /* Absent it is 0, the outermost level; that is why 0 itself is refused. */
    level->ranks = (uint32_t)ms_lua_field_integer(L, index, "ranks", 0, 1, UINT32_MAX);
    level->latency_ns = number_at(L, index, "links: ", "latency_ns");
    level->bytes_per_s = number_at(L, index, "links: ", "bytes_per_s");
}

/* One entry of shares: { flops = 0.7, bytes = 0.9 } by the name of its tasks; absent is 1. */
static void read_share(lua_State *L, const char *name, ms_kernel_share *share)
{
    static const char *const keys[] = { "flops", "bytes", NULL };
    if (!lua_istable(L, -1))
        ms_lua_error(L, "rates: shares of '%s' must be a table, not a %s", name,
                     luaL_typename(L, -1));
    ms_lua_known_keys(L, lua_gettop(L), keys, "field of shares");
    if (strlen(name) >= sizeof share->name)
        ms_lua_error(L, "rates: shares: no task has the name '%s'", name);
    *share = (ms_kernel_share){ .flops = 1, .bytes = 1 };
    memcpy(share->name, name, strlen(name) + 1);
    double *values[] = { &share->flops, &share->bytes };
    for (int i = 0; i < 2; i++) {
        if (lua_getfield(L, -1, keys[i]) != LUA_TNIL) {
            lua_pop(L, 1);
            *values[i] = number_at(L, lua_gettop(L), "shares: ", keys[i]);
        } else lua_pop(L, 1);
    }
}

/* Optional: without it all tasks reach the rates of the machine. */
static void read_shares(lua_State *L, int table, ms_rates *rates)
{
    if (lua_getfield(L, table, "shares") == LUA_TNIL) {
        lua_pop(L, 1);
        return;
    }
    lua_pop(L, 1);
    table_at(L, table, "shares", NULL);
    int shares = lua_gettop(L);
    for (lua_pushnil(L); lua_next(L, shares); lua_pop(L, 1)) {
        if (lua_type(L, -2) != LUA_TSTRING)
            ms_lua_error(L, "rates: shares are by the names of tasks, not by a %s",
                         luaL_typename(L, -2));
        /* One too many is counted, and refused by ms_rates_problem. */
        if (rates->share_count++ < MS_KERNEL_SHARES_MAX)
            read_share(L, lua_tostring(L, -2), &rates->shares[rates->share_count - 1]);
    }
    lua_pop(L, 1);
}

/* Field `name`, if it is there. */
static double optional_at(lua_State *L, int table, const char *name)
{
    bool is_there = lua_getfield(L, table, name) != LUA_TNIL;
    lua_pop(L, 1);
    return is_there ? number_at(L, table, "", name) : 0;
}

/* Written to *out only when everything is right. A list that is too long gets a count above the
 * limit, which ms_rates_problem reports. Whether the numbers make sense together (no zeros, growing
 * levels) is decided by ms_rates_problem alone, which C applications call as well: the rule is
 * in one place. */
void ms_lua_rates(lua_State *L, int index, ms_rates *out)
{
    static const char *const keys[] = { "flops_per_s", "bytes_per_s", "enqueue_ns", "task_ns",
                                        "shares",      "links",       NULL };
    static const char *const dtypes[MS_COST_DTYPES + 1] = {
        [MS_COST_F32] = "f32", [MS_COST_F16] = "f16", [MS_COST_BF16] = "bf16", [MS_COST_FP8] = "fp8"
    };
    ms_rates rates = { 0 };
    index = lua_absindex(L, index);
    if (!lua_istable(L, index))
        ms_lua_error(L, "rates must be a table, not a %s", luaL_typename(L, index));
    ms_lua_known_keys(L, index, keys, "field of rates");
    table_at(L, index, "flops_per_s", dtypes);
    for (int i = 0; i < MS_COST_FP8; i++)
        rates.flops_per_s[i] = number_at(L, lua_gettop(L), "flops_per_s.", dtypes[i]);
    rates.flops_per_s[MS_COST_FP8] = optional_at(L, lua_gettop(L), dtypes[MS_COST_FP8]);
    lua_pop(L, 1);
    rates.bytes_per_s = number_at(L, index, "", "bytes_per_s");
    /* Without them an enqueue costs the host no time, and a task no more than its work. */
    rates.enqueue_ns = optional_at(L, index, "enqueue_ns");
    rates.task_ns = optional_at(L, index, "task_ns");
    read_shares(L, index, &rates);
    table_at(L, index, "links", NULL);
    lua_Unsigned levels = lua_rawlen(L, -1);
    rates.level_count = levels > MS_LEVELS_MAX ? MS_LEVELS_MAX + 1 : (uint32_t)levels;
    for (uint32_t i = 0; i < rates.level_count && i < MS_LEVELS_MAX; i++) {
        lua_rawgeti(L, -1, i + 1);
        read_level(L, lua_gettop(L), &rates.levels[i]);
        lua_pop(L, 1);
    }
    lua_pop(L, 1);
    const char *problem = ms_rates_problem(&rates);
    if (problem) ms_lua_error(L, "rates: %s", problem);
    *out = rates;
}
