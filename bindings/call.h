/* call.h: the only place that calls Lua functions, and the way of errors between Lua and the
 * engine. */
#ifndef MOONSHARD_BINDINGS_CALL_H
#define MOONSHARD_BINDINGS_CALL_H

#include "bindings/state.h"

/* Raises the engine's last error if status is not MS_OK, with the user's line in front; a
 * callback's error as it was. */
void ms_lua_ok(lua_State *L, ms_status status);
/* What the command line exits with if this error ends the run: memory 8, data and files 3. */
void ms_lua_note_exit(ms_runtime *runtime, const ms_error *error);
/* Whether the error message is, or contains, the one that was noted last. */
bool ms_lua_is_noted(const ms_runtime *runtime, const char *message);
/* For what the environment can refuse: pushes nil, message, code and returns 3; programmer's
 * mistakes are raised. */
int ms_lua_failed(lua_State *L, const ms_error *error);
/* Once for each Lua state, before the first call. */
void ms_lua_open_calls(lua_State *L);
/* Calls the function below its `arguments` on the stack, protected. On MS_ERROR_SCRIPT the stack is
 * as before the function was pushed, the error is kept for ms_lua_ok, and the engine's error has
 * its first line. */
ms_status ms_lua_call(lua_State *L, ms_runtime *runtime, int arguments, int results);
/* The same for a hook: blocking calls are refused in it, and when the outermost has returned the
 * callbacks of futures run. results >= 0. */
ms_status ms_lua_hook(lua_State *L, ms_runtime *runtime, int arguments, int results);
void ms_lua_set_drain(lua_State *L, int index);
/* Pushes the traceback of the last error that ms_lua_call met if the value at index is that error;
 * else false. */
bool ms_lua_traceback(lua_State *L, int index);

ms_callback *ms_callback_new(lua_State *L, int index, int anchor); /* raises on out of memory */
void ms_callback_free(void *callback);
/* Of a callback without an anchor: as long as one of the userdata at `first` and above, `count` of
 * them, lives, these keep the function, and the callback does not; after that the callback does. So
 * a function that refers to one of them is no leak. Raises on out of memory. */
void ms_callback_lend(lua_State *L, ms_callback *callback, int first, int count);
/* The anchor need not keep the function any longer. */
void ms_callback_forget(lua_State *L, int anchor, int index);
bool ms_callback_push(const ms_callback *callback); /* false, nothing pushed: its anchor is gone */

#endif
