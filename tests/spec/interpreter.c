/* The interpreter of the specs in sanitizer builds: what the stock `lua` does with a script and its
 * arguments. */
#include <lauxlib.h>
#include <lua.h>
#include <lualib.h>
#include <stdio.h>
#include <stdlib.h>

static int traceback(lua_State *L)
{
    const char *message = lua_tostring(L, 1);
    luaL_traceback(L, L, message ? message : "(error object is not a string)", 1);
    return 1;
}

/* Runs in protected mode, so that running out of memory while arguments are pushed is an error like
 * any other. */
static int run(lua_State *L)
{
    int argc = (int)lua_tointeger(L, 1);
    char **argv = lua_touserdata(L, 2);
    luaL_openlibs(L);
    lua_createtable(L, argc - 2, 2);
    for (int i = 0; i < argc; i++) {
        lua_pushstring(L, argv[i]);
        lua_rawseti(L, -2, i - 1); /* arg[0] is the script, as in the stock interpreter */
    }
    lua_setglobal(L, "arg");
    if (luaL_loadfile(L, argv[1]) != LUA_OK) return lua_error(L);
    luaL_checkstack(L, argc, "too many arguments");
    for (int i = 2; i < argc; i++) lua_pushstring(L, argv[i]);
    lua_call(L, argc - 2, 0);
    return 0;
}

int main(int argc, char **argv)
{
    lua_State *L = argc > 1 ? luaL_newstate() : NULL;
    if (!L) {
        fprintf(stderr, "usage: %s FILE [argument...]\n", argv[0]);
        return EXIT_FAILURE;
    }
    lua_pushcfunction(L, traceback);
    lua_pushcfunction(L, run);
    lua_pushinteger(L, argc);
    lua_pushlightuserdata(L, argv);
    int status = lua_pcall(L, 2, 0, 1);
    if (status != LUA_OK) fprintf(stderr, "%s\n", lua_tostring(L, -1));
    lua_close(L);
    return status == LUA_OK ? EXIT_SUCCESS : EXIT_FAILURE;
}
