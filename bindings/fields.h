/* fields.h: writes fields of the table on top of the stack. */
#ifndef MOONSHARD_BINDINGS_FIELDS_H
#define MOONSHARD_BINDINGS_FIELDS_H

#include "bindings/state.h"

/* Write a field of the table on top of the stack. string NULL: nil. set_ms: nanoseconds as
 * milliseconds. */
void ms_lua_set_string(lua_State *L, const char *name, const char *value);
void ms_lua_set_integer(lua_State *L, const char *name, int64_t value);
void ms_lua_set_number(lua_State *L, const char *name, double value);
void ms_lua_set_boolean(lua_State *L, const char *name, bool value);
void ms_lua_set_ms(lua_State *L, const char *name, uint64_t ns);

#endif
