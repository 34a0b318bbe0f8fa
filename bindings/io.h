/* io.h: what the bindings of files, safetensors, data sets and checkpoints share. */
#ifndef MOONSHARD_BINDINGS_IO_H
#define MOONSHARD_BINDINGS_IO_H

#include "moonshard/io.h"
#include "bindings/state.h"

/* The engine's context if there is one, else the runtime's: files need no engine. */
ms_context *ms_lua_context(lua_State *L);
/* A string without zero bytes; `what` names it in the error. */
const char *ms_lua_path(lua_State *L, int index, const char *what);
/* Pushes nil, message, code for a failure of the environment; raises a programmer's mistake. */
int ms_lua_io_failed(lua_State *L);
/* A list of strings; pushes a userdata with borrowed pointers. */
const char **ms_lua_string_list(lua_State *L, int index, uint32_t *count, const char *what);
void ms_open_io(lua_State *L, int runtime);

#endif
