/* embed.c: opening the library in a Lua state, and running recipes for an application. */
#include "bindings/state.h"

#include "bindings/module.h"

#include <dlfcn.h>
#include <lualib.h>
#include <stdio.h>
#include <string.h>

#include "moonshard/moonshard_lua.h"

/* The Lua folder that was installed with the library that contains this function. dladdr finds the
 * file that the code was loaded from, wherever it was installed; MS_LUA_FROM_LIBRARY is the way
 * from there to the Lua files, fixed when the library is built. A file name without a slash is
 * taken to be in the current folder. */
static bool own_library(char *path, size_t bytes)
{
    Dl_info info;
    if (!dladdr((void *)(uintptr_t)ms_lua_open, &info) || !info.dli_fname) return false;
    const char *slash = strrchr(info.dli_fname, '/');
    int folder = slash ? (int)(slash - info.dli_fname) : 1;
    int wrote =
        snprintf(path, bytes, "%.*s/%s", folder, slash ? info.dli_fname : ".", MS_LUA_FROM_LIBRARY);
    return wrote > 0 && (size_t)wrote < bytes;
}

/* Makes require("moonshard") work in this state: the core comes from this library, Lua files from
 * the folder. Calling it twice adds the path once. The preload entry is needed because an
 * application links the core into itself: package.cpath would find another copy of it, with types
 * of its own, or none. It goes to the registry and not through the global `package`, which an
 * application may have hidden from scripts. */
MS_API void ms_lua_open(lua_State *L, const char *library)
{
    char path[1024];
    if (!library) {
        if (!own_library(path, sizeof path))
            luaL_error(L, "moonshard: its Lua files were not found; say where they are");
        library = path;
    }
    luaL_getsubtable(L, LUA_REGISTRYINDEX, LUA_PRELOAD_TABLE);
    lua_pushcfunction(L, luaopen_moonshard_core);
    lua_setfield(L, -2, "moonshard.core");
    lua_pop(L, 1);
    luaL_getsubtable(L, LUA_REGISTRYINDEX, LUA_LOADED_TABLE);
    if (lua_getfield(L, -1, "package") != LUA_TTABLE)
        luaL_error(L, "moonshard: the Lua state has no package library; open it first");
    lua_getfield(L, -1, "path");
    const char *before = lua_tostring(L, -1);
    lua_pushfstring(L, "%s/?.lua;%s/?/init.lua", library, library);
    /* The library's folder goes in front of the path, so that a file of the application with the
     * same name cannot take the place of one of the library's modules. */
    if (!before || !strstr(before, lua_tostring(L, -1))) {
        lua_pushfstring(L, "%s;%s", lua_tostring(L, -1), before ? before : "");
        lua_setfield(L, -4, "path");
    }
    /* The loaded modules, package, its old path and ours. */
    lua_pop(L, 4);
}

/* Arguments and result of run_protected, by pointer through lua_pcall. `code` is the exit code of
 * the command line. It starts as 1, so that an error before the recipe returns counts as a failure.
 */
typedef struct recipe_call {
    const ms_lua_recipe *recipe;
    bool wants_result;
    int code;
} recipe_call;

/* on_line(text, is_warning): a line of the log to the application. Upvalue: the recipe. */
static int on_line(lua_State *L)
{
    const ms_lua_recipe *recipe = lua_touserdata(L, lua_upvalueindex(1));
    recipe->line(recipe->user, luaL_checkstring(L, 1), lua_toboolean(L, 2));
    return 0;
}

/* require("moonshard.cli").recipe(file, arguments, wants_result, on_line?) -> exit code, message or
 * result. Everything that may raise happens in here, also the loading of the libraries: without a
 * protected call an error would end the application by Lua's panic function. */
static int run_protected(lua_State *L)
{
    recipe_call *call = lua_touserdata(L, 1);
    const ms_lua_recipe *recipe = call->recipe;
    luaL_openlibs(L);
    ms_lua_open(L, recipe->library);
    lua_getglobal(L, "require");
    lua_pushliteral(L, "moonshard.cli");
    lua_call(L, 1, 1);
    lua_getfield(L, -1, "recipe");
    lua_pushstring(L, recipe->path);
    lua_createtable(L, recipe->count, 0);
    for (int i = 0; i < recipe->count; i++) {
        lua_pushstring(L, recipe->arguments[i]);
        lua_rawseti(L, -2, i + 1);
    }
    lua_pushboolean(L, call->wants_result);
    lua_pushlightuserdata(L, (void *)(uintptr_t)recipe);
    if (recipe->line) lua_pushcclosure(L, on_line, 1);
    else {
        lua_pop(L, 1);
        lua_pushnil(L);
    }
    lua_call(L, 4, 2);
    call->code = (int)lua_tointeger(L, -2);
    return 1;
}

static ms_status copy(ms_context *context, const char *text, char **out)
{
    size_t bytes = strlen(text) + 1;
    ms_status status = ms_allocate(context, bytes, "the result of a recipe", (void **)out);
    if (!status) memcpy(*out, text, bytes);
    return status;
}

MS_API void ms_lua_free_result(char *result)
{
    ms_context context;
    ms_context_init(&context, NULL);
    ms_release(&context, result);
}

/* A Lua state of its own, which is closed before the return. Error and result are copied, since
 * they live in the state. 8 is the exit code of the command line where memory ran out. */
MS_API int ms_lua_run_recipe(const ms_lua_recipe *recipe, char **result, ms_error *error)
{
    recipe_call call = { .recipe = recipe, .wants_result = result != NULL, .code = 1 };
    /* A context of its own for errors: there may be no engine. */
    ms_context context;
    ms_context_init(&context, NULL);
    lua_State *L = luaL_newstate();
    if (result) *result = NULL;
    if (!L) {
        ms_fail(&context, MS_ERROR_MEMORY, "no memory for a Lua state");
        call.code = 8;
    } else {
        lua_pushcfunction(L, run_protected);
        lua_pushlightuserdata(L, &call);
        int failed = lua_pcall(L, 1, 1, 0);
        const char *text = lua_tostring(L, -1);
        if (failed || call.code)
            ms_fail(&context, MS_ERROR_SCRIPT, "%s",
                    text ? text : "the recipe failed without a message");
        else if (result && text && copy(&context, text, result)) call.code = 8;
        /* The state takes its engine with it: all streams are waited for, and what a checkpoint
         * still writes in the background is finished. */
        lua_close(L);
    }
    if (error && call.code) *error = context.error;
    return call.code;
}
