/* arguments.c: reading and checking what Lua passes, with errors that name the nearest right
 * thing. */
#include "bindings/arguments.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bindings/call.h"
#include "bindings/script.h"

/* ------------------------------------------------------------------ tensors */

/* The magic is gone once the handle was finalized, which scripts can see in a __gc of their own. */
bool ms_lua_is_tensor(lua_State *L, int index)
{
    const ms_handle *handle = luaL_testudata(L, index, MS_TENSOR_TYPE);
    return handle && handle->magic == MS_HANDLE_MAGIC;
}

/* t.sum() instead of t:sum() is told as what it is: the function that runs is a method of tensors,
 * and its object is missing. Functions of other tables may have the same name, so the functions are
 * compared. */
static void refuse_missing_self(lua_State *L)
{
    lua_Debug frame;
    int top = lua_gettop(L);
    const char *given = luaL_typename(L, 1);
    if (!lua_getstack(L, 0, &frame) || !lua_getinfo(L, "nf", &frame) || !frame.name) return;
    luaL_getmetatable(L, MS_TENSOR_TYPE);
    lua_getfield(L, -1, "__index");
    /* tensor.c: its second upvalue are the methods. */
    if (lua_getupvalue(L, -1, 2) && lua_istable(L, -1)) {
        lua_getfield(L, -1, frame.name);
        if (lua_rawequal(L, -1, top + 1))
            ms_lua_error(L,
                         "%s is a method of a tensor, not of %s: write object:%s(...), with a "
                         "colon",
                         frame.name, given, frame.name);
    }
    lua_settop(L, top);
}

#define MS_GONE_BYTES 400

/* The text names the line that made the tensor and why it is gone, since the line that uses it is
 * rarely the one that is wrong. handle->script is the line that made it; it is a number of the
 * engine's table of strings, and 0 if no script did. */
static const char *explain_gone(const ms_handle *handle, char text[MS_GONE_BYTES])
{
    const char *line =
        handle->script ? ms_strings_get(ms_engine_strings(handle->runtime->engine), handle->script)
                       : "";
    snprintf(text, MS_GONE_BYTES, "the tensor made at %s %s", *line ? line : "an unknown line",
             handle->gone ? handle->gone : "was closed");
    return text;
}

ms_handle *ms_lua_handle(lua_State *L, int index)
{
    ms_handle *handle = luaL_testudata(L, index, MS_TENSOR_TYPE);
    if (!handle || handle->magic != MS_HANDLE_MAGIC) {
        if (index == 1) refuse_missing_self(L);
        luaL_typeerror(L, index, "ms.Tensor");
    }
    if (!handle->tensor) {
        char text[MS_GONE_BYTES];
        ms_lua_error(L, "%s", explain_gone(handle, text));
    }
    return handle;
}

/* Callers are below the engine, which must not be unwound, so nothing here raises. A handle that
 * was finalized has no tensor either. */
ms_handle *ms_lua_returned(lua_State *L, int index, char text[MS_RETURNED_BYTES])
{
    char gone[MS_GONE_BYTES];
    ms_handle *handle = luaL_testudata(L, index, MS_TENSOR_TYPE);
    if (handle && handle->tensor) return handle;
    if (handle)
        snprintf(text, MS_RETURNED_BYTES, "tensor that is gone (%s)", explain_gone(handle, gone));
    else snprintf(text, MS_RETURNED_BYTES, "%s", luaL_typename(L, index));
    return NULL;
}

/* The tensor is borrowed: the handle on the stack keeps it as long as the bound function runs,
 * unless that function itself ends handles. */
ms_tensor *ms_lua_tensor(lua_State *L, int index) { return ms_lua_handle(L, index)->tensor; }

/* nil and an absent argument mean the same. false does not, and raises. */
ms_tensor *ms_lua_optional_tensor(lua_State *L, int index)
{
    return lua_isnoneornil(L, index) ? NULL : ms_lua_tensor(L, index);
}

/* The pointers are borrowed: the Lua list keeps the handles, and no collection runs before the
 * engine has retained them. */
ms_tensor **ms_lua_tensor_list(lua_State *L, int index, uint32_t *count)
{
    index = lua_absindex(L, index);
    luaL_checktype(L, index, LUA_TTABLE);
    lua_Unsigned n = lua_rawlen(L, index);
    /* An empty list is a mistake wherever a list of tensors is asked for. */
    luaL_argcheck(L, n > 0 && n < UINT32_MAX, index, "a list of one or more tensors expected");
    /* In a userdata, so that an item that is no tensor leaks nothing. */
    ms_tensor **tensors = lua_newuserdatauv(L, (size_t)n * sizeof *tensors, 0);
    for (lua_Unsigned i = 0; i < n; i++) {
        lua_rawgeti(L, index, (lua_Integer)i + 1);
        if (!ms_lua_is_tensor(L, -1))
            ms_lua_error(L, "item %d of the list is %s, not a tensor", (int)i + 1,
                         luaL_typename(L, -1));
        tensors[i] = ms_lua_tensor(L, -1);
        lua_pop(L, 1);
    }
    *count = (uint32_t)n;
    return tensors;
}

/* ------------------------------------------------------------------ numbers */

/* Strings that look like numbers are refused, unlike in Lua's own functions: they are mistakes
 * here. Floats with an integer value (2.0) are taken, as in Lua itself. */
int64_t ms_lua_integer(lua_State *L, int index, int64_t low, int64_t high, const char *what)
{
    /* lua_tointegerx takes strings as well, hence the second test. */
    int ok = 0;
    lua_Integer value = lua_tointegerx(L, index, &ok);
    if (!ok || lua_type(L, index) != LUA_TNUMBER)
        ms_lua_error(L, "%s must be an integer, not %s", what,
                     lua_type(L, index) == LUA_TNUMBER ? "a number with a fraction"
                                                       : luaL_typename(L, index));
    if (value < low || value > high)
        ms_lua_error(L, "%s is %lld; %lld to %lld are allowed", what, (long long)value,
                     (long long)low, (long long)high);
    return value;
}

void ms_lua_need_whole(lua_State *L)
{
    if (ms_lua_is_tensor(L, 1)) ms_lua_ok(L, ms_tensor_check_whole(ms_lua_tensor(L, 1)));
}

/* Lua counts dimensions from 1, and from the end with negative numbers; the engine counts from 0.
 */
int32_t ms_lua_dim(lua_State *L, int index, uint32_t dims)
{
    int64_t dim = ms_lua_integer(L, index, INT32_MIN, INT32_MAX, "a dimension");
    /* A scalar has no dimension at all, so every number is refused for it. */
    if (dim == 0 || dim > (int64_t)dims || dim < -(int64_t)dims) {
        ms_lua_need_whole(L);
        ms_lua_error(L,
                     "dimension %lld of a tensor with %u: they count from 1, or from -1 at the end",
                     (long long)dim, dims);
    }
    return (int32_t)(dim > 0 ? dim - 1 : dim + (int64_t)dims);
}

/* -1 is let through: it represents the size that follows from the others, in functions that allow
 * it. Sizes come as a list or as the rest of the arguments, so t:view(2, 3) and t:view({ 2, 3 })
 * are the same. */
uint32_t ms_lua_sizes(lua_State *L, int index, int64_t *sizes, const char *what)
{
    bool table = lua_istable(L, index);
    int64_t count = table ? (int64_t)lua_rawlen(L, index) : lua_gettop(L) - index + 1;
    if (count > MS_DIMS_MAX)
        ms_lua_error(L, "%s: %lld sizes are given, a tensor has at most %d dimensions", what,
                     (long long)count, MS_DIMS_MAX);
    for (int64_t i = 0; i < count; i++) {
        /* Both forms are read through the top of the stack, so that one check serves both. */
        if (table) lua_rawgeti(L, index, i + 1);
        else lua_pushvalue(L, index + (int)i);
        sizes[i] = ms_lua_integer(L, -1, -1, INT64_MAX, what);
        lua_pop(L, 1);
    }
    return count > 0 ? (uint32_t)count : 0;
}

/* -------------------------------------------------------------------- names */

/* Whether two characters differ in case at most. */
static bool same_letter(char a, char b)
{
    return tolower((unsigned char)a) == tolower((unsigned char)b);
}

/* Edit distance with insertions, deletions, replacements and swaps of neighbours, for short names;
 * small and capital letters are equal. rows[i % 3][j] is the distance of the first i letters of a
 * and the first j of b. Three rows are kept, because a swap of neighbours looks back two letters.
 * Names beyond the limit are not near to anything. */
static int distance(const char *a, const char *b)
{
    enum { LONGEST = 40 };
    int rows[3][LONGEST + 1], n = (int)strlen(a), m = (int)strlen(b);
    if (n > LONGEST || m > LONGEST) return LONGEST;
    for (int j = 0; j <= m; j++) rows[0][j] = j;
    for (int i = 1; i <= n; i++) {
        /* Rows are used in turns; (i + 2) % 3 is the row before, (i + 1) % 3 the one before that.
         */
        int *now = rows[i % 3], *before = rows[(i + 2) % 3], *two = rows[(i + 1) % 3];
        now[0] = i;
        for (int j = 1; j <= m; j++) {
            /* A replacement, which costs nothing where the letters are equal. */
            int best = before[j - 1] + !same_letter(a[i - 1], b[j - 1]);
            bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
            /* A deletion, an insertion, a swap. */
            if (before[j] + 1 < best) best = before[j] + 1;
            if (now[j - 1] + 1 < best) best = now[j - 1] + 1;
            if (swapped && two[j - 2] + 1 < best) best = two[j - 2] + 1;
            now[j] = best;
        }
    }
    return rows[n % 3][m];
}

/* Whether `shorter` is the first letters of the words of `longer`: "lr" of "learning_rate". A name
 * without _ has no words to take the initials of. */
static bool is_initials(const char *shorter, const char *longer)
{
    if (!strchr(longer, '_')) return false;
    for (const char *at = longer; at; at = strchr(at, '_')) {
        if (*at == '_') at++;
        if (*shorter == '\0' || *at != *shorter++) return false;
    }
    return *shorter == '\0';
}

/* Initials come first, because their edit distance is large. A name is near if less than about half
 * of the given one has to change. */
const char *ms_lua_nearest(const char *given, const char *const names[])
{
    const char *best = NULL;
    /* "lr" may differ in two letters, a long name in half of them. */
    int least = (int)strlen(given) / 2 + 2;
    for (int i = 0; names[i]; i++)
        /* In both directions: the short form may be what is given or what is right. */
        if (is_initials(given, names[i]) || is_initials(names[i], given)) return names[i];
    for (int i = 0; names[i]; i++) {
        int d = distance(given, names[i]);
        if (d < least) {
            least = d;
            best = names[i];
        }
    }
    return best;
}

/* For qsort: the order of a Lua table differs from run to run, and messages must not. */
static int compare_names(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* The string keys of the table, sorted and NULL-ended, as a userdata on the stack; those with _ in
 * front are private. Counted first, since a userdata cannot grow. The strings are the table's. */
static const char **push_names(lua_State *L, int table)
{
    size_t count = 0;
    for (lua_pushnil(L); lua_next(L, table); lua_pop(L, 1)) count++;
    const char **names = lua_newuserdatauv(L, (count + 1) * sizeof *names, 0);
    size_t n = 0;
    for (lua_pushnil(L); lua_next(L, table); lua_pop(L, 1))
        if (lua_type(L, -2) == LUA_TSTRING && lua_tostring(L, -2)[0] != '_')
            names[n++] = lua_tostring(L, -2);
    qsort(names, n, sizeof *names, compare_names);
    names[n] = NULL;
    return names;
}

/* The types that have methods in Lua as well, and the module that adds them. */
static const struct late_methods {
    const char *what, *module;
} late_methods[] = { { "a tensor", "moonshard.composed" },
                     { "ms.Group", "moonshard.parallel.group" },
                     { "ms.Stream", "moonshard.parallel.future" } };

/* Loads that module, once in each Lua state: the methods are there before a script uses the part
 * of the library that brings them. Returns whether methods may have been added. */
static bool add_late_methods(lua_State *L, const char *what)
{
    for (size_t i = 0; i < sizeof late_methods / sizeof *late_methods; i++) {
        const struct late_methods *late = &late_methods[i];
        if (strcmp(what, late->what) != 0) continue;
        bool is_loaded = lua_rawgetp(L, LUA_REGISTRYINDEX, late) != LUA_TNIL;
        lua_pop(L, 1);
        if (is_loaded) return false;
        /* First, because the module itself may look for a name. */
        lua_pushboolean(L, true);
        lua_rawsetp(L, LUA_REGISTRYINDEX, late);
        lua_getglobal(L, "require");
        lua_pushstring(L, late->module);
        lua_call(L, 1, 0);
        return true;
    }
    return false;
}

/* Returns the late method, or 0 results (nil), or raises; the list of names is a userdata on the
 * stack. */
int ms_lua_no_field(lua_State *L, int key, int methods, const char *what)
{
    const char *given = lua_type(L, key) == LUA_TSTRING ? lua_tostring(L, key) : "__";
    /* Lua's own functions and debuggers look for metamethods this way and expect nil. */
    if (strncmp(given, "__", 2) == 0) return 0;
    if (add_late_methods(L, what)) {
        lua_pushvalue(L, key);
        if (lua_rawget(L, methods) != LUA_TNIL) return 1;
        lua_pop(L, 1);
    }
    const char *nearest = ms_lua_nearest(given, push_names(L, methods));
    if (!nearest) return ms_lua_error(L, "%s has no '%.60s'", what, given);
    return ms_lua_error(L, "%s has no '%.60s': did you mean '%s'?", what, given, nearest);
}

/* Raises "unknown <what> 'x': did you mean 'y'?", or the whole list. A short list is the best help
 * where nothing is near. */
static int refuse_name(lua_State *L, const char *what, const char *given, const char *const names[])
{
    const char *nearest = ms_lua_nearest(given, names);
    if (nearest)
        return ms_lua_error(L, "unknown %s '%.60s': did you mean '%s'?", what, given, nearest);
    luaL_Buffer buffer;
    luaL_buffinit(L, &buffer);
    for (int i = 0; names[i]; i++) {
        if (i) luaL_addstring(&buffer, ", ");
        luaL_addstring(&buffer, names[i]);
    }
    luaL_pushresult(&buffer);
    return ms_lua_error(L, "unknown %s '%.60s': known are %s", what, given, lua_tostring(L, -1));
}

/* Strings with zero bytes match nothing, hence the second comparison. */
int ms_lua_choice(lua_State *L, int index, const char *const choices[], const char *what)
{
    if (lua_type(L, index) != LUA_TSTRING)
        ms_lua_error(L, "%s must be a string, not %s", what, luaL_typename(L, index));
    const char *given = lua_tostring(L, index);
    for (int i = 0; choices[i]; i++)
        if (strcmp(given, choices[i]) == 0 && strlen(given) == lua_rawlen(L, index)) return i;
    return refuse_name(L, what, given, choices);
}

/* Names of dtypes in the order of messages, not of the enum. */
ms_dtype ms_lua_dtype(lua_State *L, int index)
{
    static const char *const names[] = { "f32", "f16", "bf16", "i64", "i32",
                                         "u16", "u8",  "bool", NULL };
    /* It is found: the choice was one of the names. */
    ms_dtype dtype = MS_F32;
    ms_dtype_find(names[ms_lua_choice(L, index, names, "dtype")], &dtype);
    return dtype;
}

/* An option that is misspelled would be ignored without a word otherwise. Keys that are no strings
 * are passed over: the list part of a shape table has the sizes. */
void ms_lua_known_keys(lua_State *L, int index, const char *const names[], const char *what)
{
    if (lua_isnoneornil(L, index)) return;
    index = lua_absindex(L, index);
    luaL_checktype(L, index, LUA_TTABLE);
    for (lua_pushnil(L); lua_next(L, index); lua_pop(L, 1)) {
        if (lua_type(L, -2) != LUA_TSTRING) continue;
        const char *given = lua_tostring(L, -2);
        int i = 0;
        while (names[i] && strcmp(names[i], given) != 0) i++;
        if (!names[i]) refuse_name(L, what, given, names);
    }
}

/* ------------------------------------------------------------------- fields */

/* Pushes field `name` of the options at `table`, or nil if there are none; returns its type.
 * Lookups go through __index, so a group of options may fall back to its defaults. */
static int field(lua_State *L, int table, const char *name)
{
    if (lua_isnoneornil(L, table)) {
        lua_pushnil(L);
        return LUA_TNIL;
    }
    return lua_getfield(L, table, name);
}

/* false and true are refused as numbers, since an option that is switched off by mistake would
 * count as 0. */
double ms_lua_field_number(lua_State *L, int table, const char *name, double fallback)
{
    int type = field(L, table, name);
    if (type != LUA_TNIL && type != LUA_TNUMBER)
        ms_lua_error(L, "option %s must be a number, not %s", name, luaL_typename(L, -1));
    double value = type == LUA_TNIL ? fallback : lua_tonumber(L, -1);
    lua_pop(L, 1);
    return value;
}

/* The limits do not hold for the fallback, so 0 can represent "not given" where 0 itself is not
 * allowed. */
int64_t ms_lua_field_integer(lua_State *L, int table, const char *name, int64_t fallback,
                             int64_t low, int64_t high)
{
    int64_t value =
        field(L, table, name) == LUA_TNIL ? fallback : ms_lua_integer(L, -1, low, high, name);
    lua_pop(L, 1);
    return value;
}

/* Only true and false: "no" and 0 count as true in Lua, and are mistakes here. */
bool ms_lua_field_boolean(lua_State *L, int table, const char *name, bool fallback)
{
    int type = field(L, table, name);
    if (type != LUA_TNIL && type != LUA_TBOOLEAN)
        ms_lua_error(L, "option %s must be a boolean, not %s", name, luaL_typename(L, -1));
    bool value = type == LUA_TNIL ? fallback : lua_toboolean(L, -1);
    lua_pop(L, 1);
    return value;
}
