/* host_list.c: the hosts of a job as users name them. */
#include "bindings/runtime.h"

#include "moonshard/hosts.h"

/* core.hosts_list(text) -> { { name =, ranks = }, ... } of a list such as "a:2,b:2" or a file of
 * that name; nil and a message if it is neither. */
static int host_list(lua_State *L)
{
    ms_context *context = &ms_lua_runtime(L)->context;
    ms_host_list list = { 0 };
    if (ms_host_list_read(context, luaL_checkstring(L, 1), &list)) {
        lua_pushnil(L);
        lua_pushstring(L, context->error.message);
        return 2;
    }
    lua_createtable(L, (int)list.count, 0);
    for (uint32_t i = 0; i < list.count; i++) {
        lua_createtable(L, 0, 2);
        lua_pushstring(L, list.hosts[i].name);
        lua_setfield(L, -2, "name");
        lua_pushinteger(L, list.hosts[i].ranks);
        lua_setfield(L, -2, "ranks");
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    ms_host_list_free(context, &list);
    return 1;
}

void ms_open_host_list(lua_State *L, int runtime)
{
    static const luaL_Reg functions[] = { { "hosts_list", host_list }, { NULL, NULL } };
    ms_lua_register(L, runtime, functions);
}
