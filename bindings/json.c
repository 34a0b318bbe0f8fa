/* json.c: values of Lua as JSON text and back, by jansson, because integers must stay integers. */
#include "bindings/json.h"

#include <jansson.h>
#include <math.h>
#include <string.h>

#include "bindings/io.h"
#include "bindings/runtime.h"
#include "bindings/script.h"

#define JSON_TYPE "ms.Json"
#define LIST_TYPE "ms.JsonList" /* metatable of tables that are lists even when they are empty */
#define DEPTH_MAX 100           /* of nested tables: the walk recurses */

/* The tree is in a userdata while Lua functions that may raise are called, so that an error frees
 * it. It is put there when it is complete enough to be freed, and the userdata's __gc runs whatever
 * happens next. */
static json_t **new_tree(lua_State *L)
{
    json_t **tree = lua_newuserdatauv(L, sizeof *tree, 0);
    *tree = NULL;
    luaL_setmetatable(L, JSON_TYPE);
    return tree;
}

/* __gc: frees the tree of a call that is over, or that has raised. json_decref accepts NULL. */
static int tree_gc(lua_State *L)
{
    json_t **tree = luaL_checkudata(L, 1, JSON_TYPE);
    json_decref(*tree);
    *tree = NULL;
    return 0;
}

/* ----------------------------------------------------------------- encoding */

/* Puts `value` (owned) where it belongs: as the tree itself, into an object under key, or at an
 * array's end. A new value is attached before it is filled, so that an error in between frees it
 * with the tree. */
static json_t *attach(lua_State *L, json_t **tree, json_t *parent, const char *key, json_t *value)
{
    int failed = !value;
    if (failed) ms_lua_error(L, "json: no memory");
    /* From here on the userdata's __gc frees it. */
    if (!parent) *tree = value;
    else
        failed =
            key ? json_object_set_new(parent, key, value) : json_array_append_new(parent, value);
    if (failed) ms_lua_error(L, "json: the key '%.60s' is not text in UTF-8", key ? key : "");
    return value;
}

static void encode_value(lua_State *L, int index, json_t **tree, json_t *parent, const char *key,
                         int depth);

/* Whether a table of n list items is a JSON array; raises if it is neither an array nor an object.
 * An empty table is an array only if it was made by core.json_list. The keys are counted, because #
 * alone cannot tell a list with gaps. */
static bool is_list(lua_State *L, int index, lua_Integer n)
{
    lua_Integer keys = 0;
    for (lua_pushnil(L); lua_next(L, index); lua_pop(L, 1)) {
        keys++;
        /* Numbers as keys of an object would come back as strings. */
        if (n == 0 && lua_type(L, -2) != LUA_TSTRING)
            ms_lua_error(L, "json: a key is a %s; keys are strings, or 1 to n without gaps",
                         luaL_typename(L, -2));
    }
    if (n > 0 && keys != n)
        ms_lua_error(L, "json: a table has both list items and other keys, or gaps");
    bool list = n > 0;
    if (keys == 0 && lua_getmetatable(L, index)) {
        list = luaL_getmetatable(L, LIST_TYPE) == LUA_TTABLE && lua_rawequal(L, -1, -2);
        lua_pop(L, 2);
    }
    return list;
}

/* Raises for what JSON cannot say. A depth limit also catches tables that refer to themselves. Keys
 * are written in the order of jansson's flag, so equal tables give equal texts. */
static void encode_table(lua_State *L, int index, json_t **tree, json_t *parent, const char *key,
                         int depth)
{
    if (depth >= DEPTH_MAX)
        ms_lua_error(L, "json: tables are nested more than %d deep (or refer to themselves)",
                     DEPTH_MAX);
    /* Each level needs a few slots, and Lua guarantees only LUA_MINSTACK of them. */
    luaL_checkstack(L, 6, "nested tables");
    lua_Integer n = (lua_Integer)lua_rawlen(L, index);
    bool list = is_list(L, index, n);
    json_t *made = attach(L, tree, parent, key, list ? json_array() : json_object());
    for (lua_Integer i = 1; i <= n; i++) {
        lua_rawgeti(L, index, i);
        encode_value(L, lua_gettop(L), tree, made, NULL, depth + 1);
        lua_pop(L, 1);
    }
    /* is_list has refused a list with other keys. */
    if (n > 0) return;
    for (lua_pushnil(L); lua_next(L, index); lua_pop(L, 1)) {
        /* The key is a string (is_list), so lua_tostring does not change it in place, which would
         * confuse lua_next. */
        const char *name = lua_tostring(L, -2);
        if (strlen(name) != lua_rawlen(L, -2)) ms_lua_error(L, "json: a key has a zero byte in it");
        encode_value(L, lua_gettop(L), tree, made, name, depth + 1);
    }
}

/* JSON has no word for infinities and NaN; every reader knows what to do with a missing number. An
 * integer stays one: 3 is "3" and 3.0 is "3.0", so that decoding gives the same type. */
static json_t *encode_number(lua_State *L, int index)
{
    if (lua_isinteger(L, index)) return json_integer(lua_tointeger(L, index));
    double number = lua_tonumber(L, index);
    return isfinite(number) ? json_real(number) : json_null();
}

/* Lua strings are any bytes, JSON text is UTF-8. Bytes that are not UTF-8 would make a file that no
 * reader takes. */
static json_t *encode_text(lua_State *L, int index)
{
    size_t bytes;
    const char *text = lua_tolstring(L, index, &bytes);
    json_t *made = json_stringn(text, bytes);
    if (!made) ms_lua_error(L, "json: the text '%.60s' is not UTF-8", text);
    return made;
}

/* One value of any type that JSON has. The error names the key, since the value itself may be deep
 * in a table. A light userdata is null only if it is NULL. */
static void encode_value(lua_State *L, int index, json_t **tree, json_t *parent, const char *key,
                         int depth)
{
    json_t *made = NULL;
    switch (lua_type(L, index)) {
    case LUA_TTABLE: encode_table(L, index, tree, parent, key, depth); return;
    case LUA_TBOOLEAN: made = json_boolean(lua_toboolean(L, index)); break;
    case LUA_TNUMBER: made = encode_number(L, index); break;
    case LUA_TSTRING: made = encode_text(L, index); break;
    case LUA_TLIGHTUSERDATA:
        if (!lua_touserdata(L, index)) { /* core.json_null */
            made = json_null();
            break;
        } /* fall through */
    default:
        if (key)
            ms_lua_error(L, "json: a %s cannot be encoded, at the key %.60s",
                         luaL_typename(L, index), key);
        ms_lua_error(L, "json: a %s cannot be encoded", luaL_typename(L, index));
    }
    attach(L, tree, parent, key, made);
}

/* core.json_list(table): the table, written as a list even when it is empty. The metatable is the
 * mark; it goes with the table and is not seen by pairs(). */
static int list_of(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TTABLE);
    lua_settop(L, 1);
    luaL_setmetatable(L, LIST_TYPE);
    return 1;
}

/* core.json_encode(value, pretty): keys sorted; numbers that are not finite become null; an empty
 * table is {} unless json_list made it. The text is made twice, first to learn its length: then the
 * buffer is Lua's and nothing leaks. */
static int encode(lua_State *L)
{
    luaL_checkany(L, 1);
    size_t flags =
        JSON_ENCODE_ANY | JSON_SORT_KEYS | (lua_toboolean(L, 2) ? JSON_INDENT(1) : JSON_COMPACT);
    /* Only the value stays, so that the tree is at a known place. */
    lua_settop(L, 1);
    json_t **tree = new_tree(L);
    encode_value(L, 1, tree, NULL, NULL, 0);
    size_t bytes = json_dumpb(*tree, NULL, 0, flags);
    if (bytes == 0) return ms_lua_error(L, "json: no memory");
    luaL_Buffer buffer;
    char *text = luaL_buffinitsize(L, &buffer, bytes);
    json_dumpb(*tree, text, bytes, flags);
    luaL_pushresultsize(&buffer, bytes);
    return 1;
}

/* ----------------------------------------------------------------- decoding */

/* What decode was asked for. orders: the place on the stack of the table that gets the keys of each
 * object, or 0. */
struct decoding {
    bool exact;
    int orders;
};

static void push_value(lua_State *L, const json_t *value, const struct decoding *how, int depth);

/* Sets orders[object] = keys for the object on top of the stack, with the list of keys below it.
 * Leaves the object only. */
static void note_order(lua_State *L, const struct decoding *how)
{
    lua_pushvalue(L, -1);
    lua_rotate(L, -3, 1); /* object, keys, object */
    lua_rotate(L, -2, 1); /* object, object, keys */
    lua_rawset(L, how->orders);
}

/* Pushes a table with the object's keys. jansson has them in the order of the text.
 * json_object_iter_key gives no length; keys with zero bytes are refused by the parser. */
static void push_object(lua_State *L, const json_t *object, const struct decoding *how, int depth)
{
    /* jansson's iterators want a mutable object, and do not change it. */
    json_t *mutable = (json_t *)(uintptr_t)object;
    int size = (int)json_object_size(object);
    if (how->orders) lua_createtable(L, size, 0);
    lua_createtable(L, 0, size);
    lua_Integer place = 0;
    for (void *at = json_object_iter(mutable); at; at = json_object_iter_next(mutable, at)) {
        lua_pushstring(L, json_object_iter_key(at));
        if (how->orders) {
            lua_pushvalue(L, -1);
            lua_rawseti(L, -4, ++place);
        }
        push_value(L, json_object_iter_value(at), how, depth);
        lua_rawset(L, -3);
    }
    if (how->orders) note_order(L, how);
}

/* Pushes a list; with exact it stays one when it is empty. */
static void push_list(lua_State *L, const json_t *list, const struct decoding *how, int depth)
{
    lua_createtable(L, (int)json_array_size(list), 0);
    for (size_t i = 0; i < json_array_size(list); i++) {
        push_value(L, json_array_get(list, i), how, depth);
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    if (how->exact) luaL_setmetatable(L, LIST_TYPE);
}

/* exact: what Lua has no word for is kept: lists are marked as such, and null is core.json_null. */
static void push_value(lua_State *L, const json_t *value, const struct decoding *how, int depth)
{
    /* The parser takes deeper values; this walk recurses on the C stack. */
    if (depth > DEPTH_MAX) ms_lua_error(L, "json: values are nested more than %d deep", DEPTH_MAX);
    luaL_checkstack(L, 6, "nested values");
    switch (json_typeof(value)) {
    case JSON_OBJECT: push_object(L, value, how, depth + 1); break;
    case JSON_ARRAY: push_list(L, value, how, depth + 1); break;
    case JSON_STRING:
        lua_pushlstring(L, json_string_value(value), json_string_length(value));
        break;
    case JSON_INTEGER: lua_pushinteger(L, json_integer_value(value)); break;
    case JSON_REAL: lua_pushnumber(L, json_real_value(value)); break;
    case JSON_TRUE: lua_pushboolean(L, 1); break;
    case JSON_FALSE: lua_pushboolean(L, 0); break;
    default:
        if (how->exact) lua_pushlightuserdata(L, NULL);
        else lua_pushnil(L);
        break;
    }
}

/* core.json_decode(text, exact, orders): the value, or nil, message, "corrupt". A key that is twice
 * is an error. An integer beyond 64 bits is a real. null is nil; with exact it is core.json_null
 * and lists stay lists when they are empty, so that json_encode gives the same value again. A table
 * `orders` gets the list of each object's keys in the order of the text, by the object. The text is
 * hostile: duplicates are refused, since two readers may pick different ones. */
static int decode(lua_State *L)
{
    size_t bytes;
    const char *text = luaL_checklstring(L, 1, &bytes);
    json_error_t error;
    if (!lua_isnoneornil(L, 3)) luaL_checktype(L, 3, LUA_TTABLE);
    /* The text stays on the stack, and so in memory. */
    lua_settop(L, 3);
    json_t **tree = new_tree(L);
    *tree = json_loadb(text, bytes, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &error);
    /* Once more, with reals for integers beyond 64 bits. */
    if (!*tree && json_error_code(&error) == json_error_numeric_overflow) {
        size_t more = ms_json_big_integers(text, bytes, NULL);
        char *changed = lua_newuserdatauv(L, more, 0);
        ms_json_big_integers(text, bytes, changed);
        *tree = json_loadb(changed, more, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &error);
    }
    /* What is in a file is the environment's, so it is nil, message, code and not an error. */
    if (!*tree) {
        lua_pushnil(L);
        lua_pushfstring(L, "not JSON at line %d, column %d: %s", error.line, error.column,
                        error.text);
        lua_pushliteral(L, "corrupt");
        return 3;
    }
    struct decoding how = { .exact = lua_toboolean(L, 2), .orders = lua_isnil(L, 3) ? 0 : 3 };
    push_value(L, *tree, &how, 0);
    return 1;
}

static const luaL_Reg functions[] = {
    { "json_encode", encode }, { "json_decode", decode }, { "json_list", list_of }, { NULL, NULL }
};
static const luaL_Reg metamethods[] = { { "__gc", tree_gc }, { NULL, NULL } };

/* The metatable of lists is empty: to have it is all that matters. core.json_null is a value that
 * is not nil, so a table can hold it. */
void ms_open_json(lua_State *L, int runtime)
{
    ms_lua_type(L, runtime, JSON_TYPE, metamethods, NULL);
    lua_pop(L, 1);
    luaL_newmetatable(L, LIST_TYPE);
    lua_pop(L, 1);
    ms_lua_register(L, runtime, functions);
    lua_pushlightuserdata(L, NULL);
    lua_setfield(L, -2, "json_null");
}
