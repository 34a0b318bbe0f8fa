/* fields.c: writes fields of the table on top of the stack. */
#include "bindings/runtime.h"

void ms_lua_set_string(lua_State *L, const char *name, const char *value)
{
    lua_pushstring(L, value);
    lua_setfield(L, -2, name);
}

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

void ms_lua_set_ms(lua_State *L, const char *name, uint64_t ns)
{
    ms_lua_set_number(L, name, (double)ns / 1e6);
}
