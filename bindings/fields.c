/* fields.c: writes fields of the table on top of the stack. */
#include "bindings/fields.h"

/* All of these use lua_setfield, which may raise: they are for fresh tables in phase 3 of a bound
 * function, when C owns nothing that an error would leak. */
void ms_lua_set_string(lua_State *L, const char *name, const char *value)
{
    lua_pushstring(L, value);
    lua_setfield(L, -2, name);
}

/* Unsigned 64-bit counts come as int64_t. Above 2^63 they would turn negative, which no count or
 * time in nanoseconds reaches. */
void ms_lua_set_integer(lua_State *L, const char *name, int64_t value)
{
    lua_pushinteger(L, (lua_Integer)value);
    lua_setfield(L, -2, name);
}

void ms_lua_set_number(lua_State *L, const char *name, double value)
{
    lua_pushnumber(L, (lua_Number)value);
    lua_setfield(L, -2, name);
}

void ms_lua_set_boolean(lua_State *L, const char *name, bool value)
{
    lua_pushboolean(L, value);
    lua_setfield(L, -2, name);
}

/* The engine measures in whole nanoseconds, and Lua shows milliseconds with a fraction: a double
 * keeps each nanosecond of times up to about 100 days. */
void ms_lua_set_ms(lua_State *L, const char *name, uint64_t ns)
{
    ms_lua_set_number(L, name, (double)ns / 1e6);
}
