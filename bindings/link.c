/* link.c: native links in Lua, and what links remember. What users call is
 * lua/moonshard/hooks.lua's and link_state.lua's. */
#include "bindings/link.h"

#include <stddef.h>
#include <string.h>

#include "bindings/bucket.h"
#include "bindings/group.h"

#define MS_LINK_TYPE "ms.NativeLink"
#define MS_LINK_STATE_TYPE "ms.LinkState"

/* -------------------------------------------------------------------- state */

typedef struct state_box {
    ms_link_state *state;
    const ms_runtime *runtime;
} state_box;

static ms_link_state *check_state(lua_State *L, int index)
{
    return ((state_box *)luaL_checkudata(L, index, MS_LINK_STATE_TYPE))->state;
}

/* core.link_state() */
static int link_state(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    state_box *box = lua_newuserdatauv(L, sizeof *box, 0);
    *box = (state_box){ .runtime = ms_lua_runtime(L) };
    luaL_setmetatable(L, MS_LINK_STATE_TYPE);
    ms_lua_ok(L, ms_link_state_new(engine, &box->state));
    return 1;
}

/* Nothing is released here; the engine of a closed state has freed it. */
static int state_gc(lua_State *L)
{
    state_box *box = lua_touserdata(L, 1);
    if (box->state && !box->runtime->closed) ms_link_state_abandon(box->state);
    box->state = NULL;
    return 0;
}

/* state:flat(bucket, name, lengths?) -> tensor, whether each parameter's numbers are new. lengths:
 * of each parameter's part; as many as it has unless given. */
static int state_flat(lua_State *L)
{
    ms_lua_enter(L);
    ms_link_state *state = check_state(L, 1);
    ms_bucket *bucket = ms_lua_bucket(L, 2);
    const char *name = luaL_checkstring(L, 3);
    int64_t *lengths = NULL;
    lua_settop(L, 4);
    bool *fresh = lua_newuserdatauv(L, bucket->count * sizeof *fresh, 0);
    if (!lua_isnil(L, 4)) {
        luaL_checktype(L, 4, LUA_TTABLE);
        lengths = lua_newuserdatauv(L, bucket->count * sizeof *lengths, 0);
        for (uint32_t i = 0; i < bucket->count; i++) {
            lua_rawgeti(L, 4, (lua_Integer)i + 1);
            lengths[i] = ms_lua_integer(L, -1, 0, INT64_MAX, "length");
            lua_pop(L, 1);
        }
    }
    ms_handle *handle = ms_lua_new_handle(L);
    lua_createtable(L, (int)bucket->count, 0);
    ms_tensor *tensor = NULL;
    ms_lua_ok(L, ms_link_state_tensor(state, bucket, name, lengths, fresh, &tensor));
    ms_handle_fill(handle, tensor);
    ms_handle_keep(handle);
    for (uint32_t i = 0; i < bucket->count; i++) {
        lua_pushboolean(L, fresh[i]);
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    return 2;
}

/* state:shared(name, length) -> tensor of what belongs to no parameter */
static int state_shared(lua_State *L)
{
    ms_lua_enter(L);
    ms_link_state *state = check_state(L, 1);
    ms_tensor *tensor = NULL;
    ms_handle *handle = ms_lua_new_handle(L);
    ms_lua_ok(L, ms_link_state_shared(state, luaL_checkstring(L, 2),
                                      ms_lua_integer(L, 3, 1, INT64_MAX, "length"), NULL, &tensor));
    ms_handle_fill(handle, tensor);
    ms_handle_keep(handle);
    return 1;
}

/* state:pieces() -> list of { name, parameter, tensor } */
static int state_pieces(lua_State *L)
{
    ms_lua_enter(L);
    ms_link_state *state = check_state(L, 1);
    uint32_t count = ms_link_state_pieces(state);
    lua_createtable(L, (int)count, 0);
    for (uint32_t i = 0; i < count; i++) {
        ms_link_piece piece = { .name = NULL };
        lua_createtable(L, 3, 0);
        ms_handle *handle = ms_lua_new_handle(L);
        ms_lua_ok(L, ms_link_state_piece(state, i, &piece));
        ms_handle_fill(handle, piece.tensor);
        ms_handle_keep(handle);
        lua_rawseti(L, -2, 3);
        lua_pushstring(L, piece.name);
        lua_rawseti(L, -2, 1);
        lua_pushstring(L, piece.parameter);
        lua_rawseti(L, -2, 2);
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    return 1;
}

/* state:put(name, parameter, tensor) */
static int state_put(lua_State *L)
{
    ms_lua_enter(L);
    ms_lua_ok(L, ms_link_state_put(check_state(L, 1), luaL_checkstring(L, 2),
                                   luaL_checkstring(L, 3), ms_lua_tensor(L, 4)));
    return 0;
}

static int state_clear(lua_State *L)
{
    ms_lua_enter(L);
    ms_link_state_clear(check_state(L, 1));
    return 0;
}

/* state:iteration(number?) -> what it was */
static int state_iteration(lua_State *L)
{
    ms_link_state *state = check_state(L, 1);
    lua_pushinteger(L, ms_link_state_iteration(state));
    if (!lua_isnoneornil(L, 2))
        ms_link_state_set_iteration(state, ms_lua_integer(L, 2, 0, INT64_MAX, "iteration"));
    return 1;
}

/* state:compression() -> numbers that the link was given, numbers that travelled */
static int state_compression(lua_State *L)
{
    ms_link_compression c = ms_link_state_compression(check_state(L, 1));
    lua_pushinteger(L, (lua_Integer)c.before);
    lua_pushinteger(L, (lua_Integer)c.after);
    return 2;
}

/* ------------------------------------------------------------- native links */

typedef enum field_type { NUMBER, INTEGER, BOOLEAN } field_type;
typedef struct field {
    const char *name;
    field_type type;
    size_t offset;
} field;
#define FIELD(name, type, member)                     \
    {                                                 \
        name, type, offsetof(ms_link_options, member) \
    }

static const field fields[] = {
    FIELD("decay", NUMBER, decay),
    FIELD("rank", INTEGER, powersgd.rank),
    FIELD("start_step", INTEGER, powersgd.start_step),
    FIELD("seed", INTEGER, powersgd.seed),
    FIELD("stats_every", INTEGER, powersgd.stats_every),
    FIELD("min_rate", NUMBER, powersgd.min_rate),
    FIELD("eps", NUMBER, powersgd.eps),
    FIELD("error_feedback", BOOLEAN, powersgd.error_feedback),
    FIELD("warm_start", BOOLEAN, powersgd.warm_start),
    FIELD("batched", BOOLEAN, powersgd.batched),
    FIELD("block", INTEGER, int8.block),
    FIELD("fraction", NUMBER, top_k.fraction),
    FIELD("momentum", NUMBER, top_k.momentum),
    FIELD("max_norm", NUMBER, clip.max_norm),
    FIELD("reduce_after", BOOLEAN, post_local_sgd.reduce_after),
};

/* core.native_link{ kind = "cast", dtype = "bf16", op = "avg", group = g, state = s ... }. What is
 * not given has the kind's default. */
static int native_link(lua_State *L)
{
    static const char *const ops[] = { "sum", "avg", "min", "max", "prod", NULL },
                             *const actions[] = { "skip", "stop", NULL };
    static const char *const scopes[] = { "global", "bucket", "lagged", NULL }, *const pers[] = {
        "tensor", "channel", "block", NULL
    };
    static const char *const forms[] = { "all_gather", "all_to_all", NULL };
    ms_engine *engine = ms_lua_enter(L);
    luaL_checktype(L, 1, LUA_TTABLE);
    lua_settop(L, 1);
    ms_link *link = lua_newuserdatauv(L, sizeof *link, 1);
    memset(link, 0, sizeof *link);
    luaL_setmetatable(L, MS_LINK_TYPE);
    lua_getfield(L, 1, "kind");
    link->kind = ms_link_find(luaL_checkstring(L, -1));
    if (!link->kind) ms_lua_error(L, "there is no native link '%s'", lua_tostring(L, -1));
    link->options = link->kind->defaults;
    if (lua_getfield(L, 1, "op") != LUA_TNIL)
        link->options.op = (ms_reduce_op)ms_lua_choice(L, -1, ops, "op");
    if (lua_getfield(L, 1, "dtype") != LUA_TNIL) link->options.dtype = ms_lua_dtype(L, -1);
    if (lua_getfield(L, 1, "group") != LUA_TNIL) link->options.group = ms_lua_group(L, -1);
    if (lua_getfield(L, 1, "per") != LUA_TNIL)
        link->options.int8.per = (ms_int8_per)ms_lua_choice(L, -1, pers, "per");
    if (lua_getfield(L, 1, "form") != LUA_TNIL)
        link->options.int8.form = (ms_int8_form)ms_lua_choice(L, -1, forms, "form");
    if (lua_getfield(L, 1, "scope") != LUA_TNIL)
        link->options.clip.scope = (ms_clip_scope)ms_lua_choice(L, -1, scopes, "scope");
    if (lua_getfield(L, 1, "action") != LUA_TNIL)
        link->options.nan_check.stop = ms_lua_choice(L, -1, actions, "action") == 1;
    if (lua_getfield(L, 1, "subgroup") != LUA_TNIL)
        link->options.post_local_sgd.subgroup = ms_lua_group(L, -1);
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        void *at = (char *)&link->options + fields[i].offset;
        if (fields[i].type == NUMBER)
            *(double *)at = ms_lua_field_number(L, 1, fields[i].name, *(double *)at);
        else if (fields[i].type == INTEGER)
            *(int64_t *)at =
                ms_lua_field_integer(L, 1, fields[i].name, *(int64_t *)at, INT64_MIN, INT64_MAX);
        else *(bool *)at = ms_lua_field_boolean(L, 1, fields[i].name, *(bool *)at);
    }
    link->options.post_local_sgd.start_step = link->options.powersgd.start_step;
    if (lua_getfield(L, 1, "state") != LUA_TNIL) link->state = check_state(L, -1);
    lua_setiuservalue(L, 2, 1);
    if (link->kind->has_state && !link->state)
        ms_lua_error(L, "the native link '%s' needs a state", link->kind->name);
    if (link->kind->check) ms_lua_ok(L, link->kind->check(engine, &link->options));
    lua_settop(L, 2);
    return 1;
}

const ms_link *ms_lua_link(lua_State *L, int index)
{
    return luaL_checkudata(L, index, MS_LINK_TYPE);
}

void ms_open_link(lua_State *L, int runtime)
{
    static const luaL_Reg functions[] = { { "native_link", native_link },
                                          { "link_state", link_state },
                                          { NULL, NULL } };
    static const luaL_Reg methods[] = {
        { "flat", state_flat },
        { "shared", state_shared },
        { "pieces", state_pieces },
        { "put", state_put },
        { "clear", state_clear },
        { "iteration", state_iteration },
        { "compression", state_compression },
        { NULL, NULL },
    };
    static const luaL_Reg events[] = { { "__gc", state_gc }, { NULL, NULL } };
    ms_lua_register(L, runtime, functions);
    ms_lua_type(L, runtime, MS_LINK_TYPE, NULL, NULL);
    lua_pop(L, 1);
    ms_lua_type(L, runtime, MS_LINK_STATE_TYPE, events, methods);
    lua_pop(L, 1);
}
