/* arguments.h: reading and checking what Lua passes, with errors that name the nearest right thing.
 */
#ifndef MOONSHARD_BINDINGS_ARGUMENTS_H
#define MOONSHARD_BINDINGS_ARGUMENTS_H

#include "bindings/state.h"

ms_handle *ms_lua_handle(lua_State *L, int index); /* raises unless it is a live tensor */
ms_tensor *ms_lua_tensor(lua_State *L, int index);
ms_tensor *ms_lua_optional_tensor(lua_State *L, int index); /* NULL for nil or none */
bool ms_lua_is_tensor(lua_State *L, int index);
/* For all that takes tensors from what a Lua function has returned: the tensor's handle, or NULL
 * and in text what the value is instead: the name of its type, or that its tensor is gone, and why.
 * It raises nothing. */
#define MS_RETURNED_BYTES 440
ms_handle *ms_lua_returned(lua_State *L, int index, char text[MS_RETURNED_BYTES]);
/* An integer in low .. high; `what` names it in the error. */
int64_t ms_lua_integer(lua_State *L, int index, int64_t low, int64_t high, const char *what);
/* A dimension from 1 or from the end, as 0-based; dims of the tensor. */
int32_t ms_lua_dim(lua_State *L, int index, uint32_t dims);
/* To be called before an error about the shape of argument 1. If that argument is a rank's piece of
 * a sharded parameter, this raises the error that says so: a piece's shape follows from the
 * sharding, so an error about the shape would not name the cause. */
void ms_lua_need_whole(lua_State *L);
ms_dtype ms_lua_dtype(lua_State *L, int index);
/* One of a NULL-ended list; raises and names the nearest. */
int ms_lua_choice(lua_State *L, int index, const char *const choices[], const char *what);
/* Raises if the table has a string key outside the NULL-ended list, and names the nearest. */
void ms_lua_known_keys(lua_State *L, int index, const char *const names[], const char *what);
/* Field of an options table (nil or none: fallback). */
double ms_lua_field_number(lua_State *L, int table, const char *name, double fallback);
int64_t ms_lua_field_integer(lua_State *L, int table, const char *name, int64_t fallback,
                             int64_t low, int64_t high);
bool ms_lua_field_boolean(lua_State *L, int table, const char *name, bool fallback);
/* A list of integers on the stack at index (a table, or the arguments from index to the top) into
 * sizes; returns the count. */
uint32_t ms_lua_sizes(lua_State *L, int index, int64_t *sizes, const char *what);
/* The name of `names` nearest to `given`, or NULL if none is near. */
const char *ms_lua_nearest(const char *given, const char *const names[]);
/* What reading a field that the table of methods at `methods` lacks (a positive index or an
 * upvalue's) gives: the method, if a module of the library adds it and was not loaded yet; no value
 * (0) for keys that are no names, or begin with __, which tools probe. Else it raises, and names
 * the nearest method. */
int ms_lua_no_field(lua_State *L, int key, int methods, const char *what);
/* A list of tensors: pushes a userdata that holds borrowed pointers (the table keeps them
 * alive). */
ms_tensor **ms_lua_tensor_list(lua_State *L, int index, uint32_t *count);

#endif
