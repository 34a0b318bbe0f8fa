/* io.h: what the bindings of files, safetensors, data sets and checkpoints share. */
#ifndef MOONSHARD_BINDINGS_IO_H
#define MOONSHARD_BINDINGS_IO_H

#include "bindings/runtime.h"
#include "moonshard/io.h"

/* The engine's context if there is one, else the runtime's: files need no engine. */
ms_context *ms_lua_context(lua_State *L);
/* A string without zero bytes; `what` names it in the error. */
const char *ms_lua_path(lua_State *L, int index, const char *what);
/* Pushes nil, message, code for a failure of the environment; raises a programmer's mistake. */
int ms_lua_io_failed(lua_State *L);
/* A list of strings; pushes a userdata with borrowed pointers. */
const char **ms_lua_string_list(lua_State *L, int index, uint32_t *count, const char *what);
/* An empty userdata of that type with room for one pointer, which its __gc releases. */
void **ms_lua_box(lua_State *L, const char *type);
/* The pointer in that userdata; raises if the type is another, or it was closed. */
void *ms_lua_unbox(lua_State *L, int index, const char *type);
/* Element i of data of an integer dtype other than bool. */
int64_t ms_lua_token_at(ms_dtype dtype, const void *data, size_t i);

#endif
