/* script.h: the line of the user's script that runs, and errors that begin with it. */
#ifndef MOONSHARD_BINDINGS_SCRIPT_H
#define MOONSHARD_BINDINGS_SCRIPT_H

#include "bindings/state.h"

/* The runtime of a bound function; raises from a foreign thread. */
ms_runtime *ms_lua_runtime(lua_State *L);
/* Raises "<what> inside a hook ..." while hooks run. */
void ms_lua_refuse_in_hook(lua_State *L, const char *what, const char *instead);

/* Raises with the user's line in front, the first one outside the library; without one if there is
 * none. */
int ms_lua_error(lua_State *L, const char *format, ...) MS_PRINTF(2, 3);
/* The user's line "file:12" into text; "" if there is none. */
void ms_lua_line(lua_State *L, char *text, size_t bytes);
/* The same, searched from that level of the call stack on. */
void ms_lua_line_at(lua_State *L, const ms_runtime *runtime, int level, char *text, size_t bytes);
/* The user's line as a string of the engine; 0: there is none. */
uint32_t ms_lua_script(lua_State *L, ms_runtime *runtime);

#endif
