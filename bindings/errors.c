/* errors.c: errors of the library and of scripts: raised with the user's line, refused, and
 * what the program exits with. */
#include "bindings/errors.h"

#include <stdio.h>
#include <string.h>

#include "bindings/arguments.h"
#include "bindings/call.h"
#include "bindings/runtime.h"
#include "bindings/script.h"

/* core.exit_code(message) -> what the command line exits with for this error. The error may have
 * passed through code that added text, so the noted message is searched in it. The error is a
 * string by the time it arrives here, so its status is gone: ms_lua_note_exit has kept the message
 * with the code. "not enough memory" is Lua's own error, which never passed through the engine. */
static int exit_code(lua_State *L)
{
    const ms_runtime *runtime = ms_lua_runtime(L);
    const char *message = luaL_checkstring(L, 1);
    int code = ms_lua_is_noted(runtime, message) ? runtime->exit.code : 1;
    lua_pushinteger(L, strstr(message, "not enough memory") ? 8 : code);
    return 1;
}

/* core.is_library(source) -> whether a function's source (of debug.getinfo) is the library's.
 * Planners of the library are named in reports, and those of users get the place of their
 * definition. */
static int is_library(lua_State *L)
{
    const ms_runtime *runtime = ms_lua_runtime(L);
    size_t bytes = runtime->library_prefix_bytes;
    const char *source = luaL_checkstring(L, 1);
    lua_pushboolean(L, bytes > 0 && strncmp(source, runtime->library_prefix, bytes) == 0);
    return 1;
}

/* core.line(): the user's line, for messages of the library. */
static int line(lua_State *L)
{
    char text[160];
    ms_lua_line(L, text, sizeof text);
    lua_pushstring(L, text);
    return 1;
}

/* core.traceback(error) -> where an error that came out of a callback was raised, or nil. The stack
 * of the callback is gone when its error is raised again, so the handler of call.c keeps its
 * traceback. */
static int traceback(lua_State *L)
{
    luaL_checkany(L, 1);
    if (!ms_lua_traceback(L, 1)) lua_pushnil(L);
    return 1;
}

/* core.raise(message, code?): raises with the user's line in front. Lua's own error() would name a
 * line of the library, since its levels count all functions and not those of the user. code: what
 * the program exits with if the script does not handle the error, 1 unless given. */
static int raise(lua_State *L)
{
    const char *message = luaL_checkstring(L, 1);
    if (!lua_isnoneornil(L, 2)) {
        ms_runtime *runtime = ms_lua_runtime(L);
        runtime->exit.code = (int)luaL_checkinteger(L, 2);
        snprintf(runtime->exit.message, sizeof runtime->exit.message, "%s", message);
        runtime->exit.refused_at[0] = 0;
    }
    return ms_lua_error(L, "%s", message);
}

/* core.refuse(message, code) -> nil, message, code: what the environment's failure means for a run
 * that ends with it is noted. The code is one of the environment's ("not_found", "corrupt" ...). If
 * the script does not handle the failure and asserts it, the program exits with 3. */
static int refuse(lua_State *L)
{
    ms_runtime *runtime = ms_lua_runtime(L);
    const char *message = luaL_checkstring(L, 1);
    luaL_checkstring(L, 2);
    lua_settop(L, 2);
    runtime->exit.code = 3;
    snprintf(runtime->exit.message, sizeof runtime->exit.message, "%s", message);
    ms_lua_line(L, runtime->exit.refused_at, sizeof runtime->exit.refused_at);
    lua_pushnil(L);
    lua_insert(L, 1);
    return 3;
}

/* core.refusal() -> the last message that a script got beside nil, and its line; nil: none, or
 * another error has come since. */
static int refusal(lua_State *L)
{
    const ms_lua_exit *last = &ms_lua_runtime(L)->exit;
    if (!*last->refused_at) return 0;
    lua_pushstring(L, last->message);
    lua_pushstring(L, last->refused_at);
    return 2;
}

/* core.nearest(given, names) -> the most similar name, or nil. The list of names lives in a
 * userdata; the strings are the table's. */
static int nearest(lua_State *L)
{
    const char *given = luaL_checkstring(L, 1);
    luaL_checktype(L, 2, LUA_TTABLE);
    lua_Integer count = (lua_Integer)lua_rawlen(L, 2);
    const char **names = lua_newuserdatauv(L, (size_t)(count + 1) * sizeof *names, 0);
    luaL_checkstack(L, (int)count + 2, "names");
    for (lua_Integer i = 0; i < count; i++) {
        lua_rawgeti(L, 2, i + 1); /* the table keeps the strings alive */
        names[i] = luaL_checkstring(L, -1);
        lua_pop(L, 1);
    }
    names[count] = NULL;
    lua_pushstring(L, ms_lua_nearest(given, names));
    return 1;
}

void ms_open_errors(lua_State *L, int runtime)
{
    static const luaL_Reg functions[] = {
        { "exit_code", exit_code }, { "line", line },       { "is_library", is_library },
        { "raise", raise },         { "refuse", refuse },   { "traceback", traceback },
        { "nearest", nearest },     { "refusal", refusal }, { NULL, NULL },
    };
    ms_lua_register(L, runtime, functions);
}
