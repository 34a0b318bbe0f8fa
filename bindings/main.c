/* main.c: the command line: a Lua state, the library beside this program, and moonshard.cli. */
#include <lauxlib.h>
#include <lualib.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "moonshard/moonshard_lua.h"

/* Requests to stop. Handlers only count; the loop of training looks at the end of a step. A second request ends the process at once. */
static volatile sig_atomic_t stop_signal;

static void request_stop(int number)
{
    if (stop_signal) _exit(128 + number);
    stop_signal = number;
}

/* stop_requested() -> number of the signal, or nil */
static int stop_requested(lua_State *L)
{
    if (!stop_signal) { lua_pushnil(L); return 1; }
    lua_pushinteger(L, stop_signal);
    return 1;
}

static void catch_signals(void)
{
    struct sigaction action = { .sa_handler = request_stop, .sa_flags = SA_RESTART };
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGHUP, &action, NULL);
    signal(SIGPIPE, SIG_IGN);
}

/* watch_signals(): from now on SIGINT, SIGTERM and SIGHUP are requests; before, and in commands that never look, they end the process. */
static int watch_signals(lua_State *L)
{
    (void)L;
    catch_signals();
    return 0;
}

static int is_terminal(lua_State *L)
{
    lua_pushboolean(L, isatty(STDOUT_FILENO) && isatty(STDERR_FILENO));
    return 1;
}

/* Errors in finalizers and what scripts say with warn(): a line with the rank, whole when its last part has come. */
static void warning(void *user, const char *message, int more)
{
    bool *inside = user;
    if (!*inside && !more && *message == '@') return;      /* a control message */
    fprintf(stderr, "%s%s%s", *inside ? "" : "moonshard: rank 0: ", message, more ? "" : "\n");
    *inside = more;
}

typedef struct arguments { int count; char **values; int code; } arguments;

static int traceback(lua_State *L)
{
    const char *message = luaL_tolstring(L, 1, NULL);
    luaL_traceback(L, L, message, 1);
    return 1;
}

static int run(lua_State *L)
{
    arguments *args = lua_touserdata(L, 1);
    char library[4096];
    ssize_t bytes = readlink("/proc/self/exe", library, sizeof library - 256);
    if (bytes <= 0) return luaL_error(L, "where this program lies cannot be read from /proc");
    library[bytes] = 0;
    char *slash = strrchr(library, '/');
    snprintf(slash + 1, 200, "%s", MS_LUA_FROM_BIN);
    luaL_openlibs(L);
    ms_lua_open(L, library);
    lua_createtable(L, 0, 3);
    lua_pushcfunction(L, stop_requested);
    lua_setfield(L, -2, "stop_requested");
    lua_pushcfunction(L, watch_signals);
    lua_setfield(L, -2, "watch_signals");
    lua_pushcfunction(L, is_terminal);
    lua_setfield(L, -2, "is_terminal");
    luaL_getsubtable(L, LUA_REGISTRYINDEX, LUA_LOADED_TABLE);
    lua_pushvalue(L, -2);
    lua_setfield(L, -2, "moonshard.process");  /* what only the program has; hosts have none of it */
    lua_pop(L, 2);
    lua_getglobal(L, "require");
    lua_pushliteral(L, "moonshard.cli");
    lua_call(L, 1, 1);
    lua_getfield(L, -1, "main");
    lua_createtable(L, args->count, 0);
    for (int i = 1; i < args->count; i++) {
        lua_pushstring(L, args->values[i]);
        lua_rawseti(L, -2, i);
    }
    lua_call(L, 1, 1);
    args->code = (int)lua_tointeger(L, -1);
    return 0;
}

int main(int argc, char **argv)
{
    arguments args = { .count = argc, .values = argv, .code = 1 };
    lua_State *L = luaL_newstate();
    if (!L) {
        fprintf(stderr, "moonshard: no memory for a Lua state\n");
        return 8;
    }
    bool inside_warning = false;
    lua_setwarnf(L, warning, &inside_warning);
    lua_gc(L, LUA_GCGEN, 0, 0);
    lua_pushcfunction(L, traceback);
    lua_pushcfunction(L, run);
    lua_pushlightuserdata(L, &args);
    if (lua_pcall(L, 1, 0, 1)) fprintf(stderr, "moonshard: %s\n", lua_tostring(L, -1));
    lua_close(L);
    return args.code;
}
