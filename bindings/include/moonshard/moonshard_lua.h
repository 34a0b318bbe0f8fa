/* moonshard/moonshard_lua.h: Moonshard in an application's own Lua state, and recipes run by an
 * application. Link with moonshard::lua.
 *
 * Each Lua state has an engine of its own, which starts at first use and ends with the state. A
 * state belongs to one thread; a process may hold any number of them, each in a thread of its
 * own. */
#ifndef MOONSHARD_LUA_H
#define MOONSHARD_LUA_H

#include <stdbool.h>

#include <lua.h>

#include "moonshard/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Makes `require "moonshard"` work in L: adds the library's Lua folder to package.path and the C
 * part to package.preload. Changes nothing else. library: the folder that holds moonshard/init.lua;
 * NULL: where it was installed with this library. Raises Lua errors. */
MS_API void ms_lua_open(lua_State *L, const char *library);

/* Makes the engine of L rank `rank` of a job: of ranks that are threads of this process and share
 * the rendezvous, or of a process that adopted it. After ms_lua_open, before anything uses the
 * engine; the state keeps a reference. Raises Lua errors. */
MS_API void ms_lua_join(lua_State *L, ms_rendezvous *rendezvous, uint32_t rank);

/* After ms_lua_join: all ranks of the job are threads of this process. Where they share one GPU,
 * their tensors then stay in its memory. */
MS_API void ms_lua_is_thread(lua_State *L);

/* The job of which L's engine is a rank, and that rank; NULL: it is alone. Borrowed. */
MS_API ms_rendezvous *ms_lua_rendezvous(lua_State *L, uint32_t *rank);

/* Where the log of L's engine goes instead of the state's warnings; any thread of the engine may
 * call it. After ms_lua_open, before anything uses the engine. Raises Lua errors. */
MS_API void ms_lua_log(lua_State *L, ms_log_function log, void *user);

/* A recipe, and what it is run with. Fields that are not named are 0. */
typedef struct ms_lua_recipe {
    const char *path;
    const char *const *arguments; /* key=value options */
    int count;                    /* of arguments */
    const char *library;          /* as for ms_lua_open */
    /* Gets each line of the log, without its end, on the thread that runs the recipe; NULL: lines
     * go to stdout, and warnings to stderr. What the recipe prints itself goes to stdout. */
    void (*line)(void *user, const char *text, bool is_warning);
    void *user;
} ms_lua_recipe;

/* Runs a recipe as `moonshard run` does, in a new Lua state on this thread. Returns the exit code
 * of the command line (0: done); when it is not 0 and error is not NULL, error->message says why.
 * result (NULL: it is not wanted): what the recipe returns, as JSON; the caller releases it with
 * ms_lua_free_result. *result is NULL if the recipe returns nothing or fails. A value that JSON
 * does not have is an error of the recipe. */
MS_API int ms_lua_run_recipe(const ms_lua_recipe *recipe, char **result, ms_error *error);
MS_API void ms_lua_free_result(char *result); /* NULL is allowed */

/* For a hook (lua_sethook) on L: the line of the user's script that runs, "file.lua:12"; "" if
 * there is none. Lines of the library are passed over where one of the user has called it. */
MS_API void ms_lua_where(lua_State *L, char *text, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
