/* link.c: native links in Lua. What users call is lua/moonshard/hooks/init.lua's. */
#include "bindings/link.h"

#include <string.h>

#include "bindings/arguments.h"
#include "bindings/call.h"
#include "bindings/group.h"
#include "bindings/enter.h"
#include "bindings/link_state.h"
#include "bindings/runtime.h"
#include "bindings/script.h"

#define MS_LINK_TYPE "ms.NativeLink"

/* ------------------------------------------------------------- native links */

/* The flags and the places of a kind, by the names that Lua uses. Lua checks chains before a model
 * is wrapped, with errors that name the script's own links; the facts come from here, so that a new
 * native link in C needs no second table in Lua. */
static void push_facts(lua_State *L, const ms_link_kind *kind)
{
    const struct {
        const char *name;
        bool value;
    } flags[] = {
        { "reduces", kind->reduce != NULL },
        { "has_state", kind->has_state },
        { "keeps_result", kind->keeps_result },
        { "compresses", kind->compresses },
        { "casts", kind->casts },
        { "clips", kind->clips },
        { "is_local", kind->is_local },
    };
    lua_newtable(L);
    lua_pushstring(L, kind->name);
    lua_setfield(L, -2, "name");
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) {
        lua_pushboolean(L, flags[i].value);
        lua_setfield(L, -2, flags[i].name);
    }
    lua_newtable(L);
    /* One more than there are kinds: the last bit represents the place between two reductions. */
    for (int place = 0; place <= MS_BUCKET_KINDS; place++) {
        lua_pushboolean(L, (kind->places & MS_PLACE(place)) != 0);
        lua_setfield(L, -2,
                     place == MS_BUCKET_KINDS ? "between"
                                              : ms_bucket_kind_name((ms_bucket_kind)place));
    }
    lua_setfield(L, -2, "places");
    lua_pushstring(L, kind->reason);
    lua_setfield(L, -2, "reason");
    lua_pushstring(L, kind->no_feedback);
    lua_setfield(L, -2, "no_feedback");
}

/* Fields "options", a list of names in order, and "required": what the message says where one is
 * missing, by name. Only required options have an entry there: the message is the end of a sentence
 * that Lua begins with the link's name. */
static void add_options(lua_State *L, const ms_link_kind *kind)
{
    lua_newtable(L);
    lua_newtable(L);
    for (const ms_link_option *o = kind->options; o && o->name; o++) {
        lua_pushstring(L, o->name);
        lua_rawseti(L, -3, (lua_Integer)lua_rawlen(L, -3) + 1);
        if (!o->required) continue;
        lua_pushstring(L, o->required);
        lua_setfield(L, -2, o->name);
    }
    lua_setfield(L, -3, "required");
    lua_setfield(L, -2, "options");
}

/* core.link_kinds() -> the facts of all native links, in order: { name, reduces, has_state,
 * keeps_result, compresses, casts, clips, is_local, places = { all_reduce = true ... between = true
 * }, reason, no_feedback, options = { names }, required = { name = text } } */
static int link_kinds(lua_State *L)
{
    const ms_link_kind *kind;
    lua_newtable(L);
    for (uint32_t i = 0; (kind = ms_link_kind_get(i)); i++) {
        push_facts(L, kind);
        add_options(L, kind);
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    return 1;
}

/* Sets the option from field o->name of the table at index 1; without it the default stays. The
 * field is found by its offset in ms_link_options. The checks of ranges are the kind's own
 * (kind->check), so that C applications get them as well; here only the type is checked. */
static void read_option(lua_State *L, const ms_link_option *o, ms_link_options *options)
{
    /* The table of kinds has the offsets (link_kinds.c). */
    void *at = (char *)options + o->offset;
    bool given = lua_getfield(L, 1, o->name) != LUA_TNIL;
    switch (o->type) {
    case MS_OPTION_NUMBER: *(double *)at = ms_lua_field_number(L, 1, o->name, *(double *)at); break;
    case MS_OPTION_INTEGER:
        *(int64_t *)at = ms_lua_field_integer(L, 1, o->name, *(int64_t *)at, INT64_MIN, INT64_MAX);
        break;
    case MS_OPTION_BOOLEAN: *(bool *)at = ms_lua_field_boolean(L, 1, o->name, *(bool *)at); break;
    case MS_OPTION_CHOICE:
        if (given) *(int *)at = ms_lua_choice(L, -1, o->choices, o->name);
        break;
    case MS_OPTION_DTYPE:
        if (given) *(ms_dtype *)at = ms_lua_dtype(L, -1);
        break;
    case MS_OPTION_GROUP:
        if (given) *(ms_group **)at = ms_lua_group(L, -1);
        break;
    case MS_OPTION_BETWEEN: break; /* its links follow in the userdata */
    }
    lua_pop(L, 1);
}

/* Copies the native links of the list on top into the array after `link`. They are copied, since
 * the chain is one array: ms_chain_check and ms_chain_run find them right after the link that they
 * belong to. */
static void read_between(lua_State *L, ms_link *link, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        lua_rawgeti(L, -1, (lua_Integer)i + 1);
        link[1 + i] = *ms_lua_link(L, -1);
        lua_pop(L, 1);
    }
    link->options.between = count;
}

/* Fills in the userdata on top from the table at index 1, and from the list of native links at
 * index 2, if there is one. User value 1 is the state, 2 the list of links and 3 a table of groups:
 * the userdata borrows them, and a collector that took them would leave pointers to freed memory.
 */
static void read_link(lua_State *L, ms_link *link, uint32_t between)
{
    int at = lua_gettop(L);
    lua_getfield(L, 1, "kind");
    link->kind = ms_link_find(luaL_checkstring(L, -1));
    if (!link->kind) ms_lua_error(L, "there is no native link '%s'", lua_tostring(L, -1));
    link->options = link->kind->defaults;
    lua_newtable(L);
    for (const ms_link_option *o = link->kind->options; o && o->name; o++) {
        read_option(L, o, &link->options);
        if (o->type != MS_OPTION_GROUP) continue;
        lua_getfield(L, 1, o->name);
        lua_setfield(L, -2, o->name);
    }
    lua_setiuservalue(L, at, 3);
    lua_pushvalue(L, 2);
    if (between) read_between(L, link, between);
    /* Kept alive although the links are copied: their states are borrowed. */
    lua_setiuservalue(L, at, 2);
    if (lua_getfield(L, 1, "state") != LUA_TNIL) link->state = ms_lua_link_state(L, -1);
    lua_setiuservalue(L, at, 1);
    if (link->kind->has_state && !link->state)
        ms_lua_error(L, "the native link '%s' needs a state", link->kind->name);
    lua_settop(L, at);
}

/* core.native_link({ kind = "cast", dtype = "bf16", state = s ... }, between?) -> link, {
 * one_model, whole, skips_steps }. Options that are not given have the kind's defaults. between: a
 * list of native links without such lists of their own. The second result is what Lua has to know
 * about this link with these options and cannot read from the kind alone: whether two models may
 * share it, whether optimizers must wait for its last bucket, whether it can make them skip a step.
 */
static int native_link(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    luaL_checktype(L, 1, LUA_TTABLE);
    lua_settop(L, 2);
    uint32_t between = lua_isnil(L, 2) ? 0 : (uint32_t)lua_rawlen(L, 2);
    /* The links between count as links of the chain, which has room for MS_CHAIN_LINKS with this
     * one. */
    if (between >= MS_CHAIN_LINKS)
        return ms_lua_error(L, "a chain has at most %d native links", MS_CHAIN_LINKS);
    ms_link *link = lua_newuserdatauv(L, (1 + between) * sizeof *link, 3);
    /* Zeroed before the metatable is set, as an error may come at any line after it. */
    memset(link, 0, (1 + between) * sizeof *link);
    luaL_setmetatable(L, MS_LINK_TYPE);
    read_link(L, link, between);
    /* With the values in place, as the engine will see them. */
    if (link->kind->check) ms_lua_ok(L, link->kind->check(engine, &link->options));
    lua_createtable(L, 0, 3);
    lua_pushboolean(L, ms_link_is_of_one_model(link));
    lua_setfield(L, -2, "one_model");
    lua_pushboolean(L, ms_link_is_whole(link));
    lua_setfield(L, -2, "whole");
    lua_pushboolean(L, ms_link_skips_steps(link));
    lua_setfield(L, -2, "skips_steps");
    return 2;
}

/* The memory is the userdata's: the pointer is good as long as the value stays on the stack or in a
 * table. */
const ms_link *ms_lua_link(lua_State *L, int index)
{
    return luaL_checkudata(L, index, MS_LINK_TYPE);
}

/* A link is copied together with the links between its reductions, which follow it in its userdata.
 * States are borrowed; the reducer retains them when it takes the chain. */
uint32_t ms_lua_chain(lua_State *L, int index, ms_link *links)
{
    uint32_t count = 0;
    index = lua_absindex(L, index);
    for (lua_Integer i = 1; i <= (lua_Integer)lua_rawlen(L, index); i++) {
        lua_rawgeti(L, index, i);
        lua_getfield(L, -1, "core");
        const ms_link *link = ms_lua_link(L, -1);
        /* The links that follow it in its userdata belong to it. */
        uint32_t more = 1 + link->options.between;
        if (count + more > MS_CHAIN_LINKS)
            ms_lua_error(L, "a chain has at most %d native links", MS_CHAIN_LINKS);
        memcpy(links + count, link, more * sizeof *link);
        count += more;
        lua_pop(L, 2);
    }
    return count;
}

/* A native link has no methods: Lua wraps it in a table { core = link } with the name and the
 * options that the user gave. */
void ms_open_link(lua_State *L, int runtime)
{
    static const luaL_Reg functions[] = { { "native_link", native_link },
                                          { "link_kinds", link_kinds },
                                          { NULL, NULL } };
    ms_lua_register(L, runtime, functions);
    ms_lua_type(L, runtime, MS_LINK_TYPE, NULL, NULL);
    lua_pop(L, 1);
}
