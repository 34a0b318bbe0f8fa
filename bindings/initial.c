/* initial.c: values of tensors on "meta": the record of how they would have been made, memory for
 * them, and computing them. Users call lua/moonshard/nn/delayed.lua, which calls these. */
#include "bindings/initial.h"

#include <string.h>

#include "bindings/arguments.h"
#include "bindings/call.h"
#include "bindings/enter.h"
#include "bindings/runtime.h"
#include "runtime.h"

#define TYPE "ms.Initializer"

/* core.initializer(t) -> a copy of the record; nil if its values were made in a way that is not
 * recorded. Of tensors with memory, what was made while core.note_initial is on is recorded. */
static int initializer(lua_State *L)
{
    ms_lua_enter(L);
    const ms_initializer *record = ms_tensor_initializer(ms_lua_tensor(L, 1));
    if (!record) return 0;
    memcpy(lua_newuserdatauv(L, ms_initializer_bytes(), 0), record, ms_initializer_bytes());
    luaL_setmetatable(L, TYPE);
    return 1;
}

/* core.initialize(t, record): computes the values in t, which has memory */
static int initialize(lua_State *L)
{
    ms_lua_enter(L);
    ms_tensor *tensor = ms_lua_tensor(L, 1);
    ms_lua_ok(L, ms_initialize(luaL_checkudata(L, 2, TYPE), tensor));
    return 0;
}

/* core.note_initial(on) -> the former setting */
static int note_initial(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    lua_pushboolean(L, ms_engine_note_initial(engine, lua_toboolean(L, 1)));
    return 1;
}

/* core.initializer_draw(record) -> the number of its first draw; nil: nothing was drawn */
static int initializer_draw(lua_State *L)
{
    uint64_t draw = 0;
    ms_lua_enter(L);
    if (!ms_initializer_draw(luaL_checkudata(L, 1, TYPE), &draw)) return 0;
    lua_pushinteger(L, (lua_Integer)draw);
    return 1;
}

/* core.moved_initializer(record, draws) -> a record of what it would have been so many draws later
 */
static int moved_initializer(lua_State *L)
{
    ms_lua_enter(L);
    const ms_initializer *record = luaL_checkudata(L, 1, TYPE);
    lua_Integer draws = luaL_checkinteger(L, 2);
    ms_initializer *moved = lua_newuserdatauv(L, ms_initializer_bytes(), 0);
    memcpy(moved, record, ms_initializer_bytes());
    ms_initializer_move(moved, (uint64_t)draws);
    luaL_setmetatable(L, TYPE);
    return 1;
}

/* core.take_memory(t): for a tensor on "meta", and all that share its storage. Values must be
 * written before they are read. */
static int take_memory(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    ms_tensor *tensor = ms_lua_tensor(L, 1);
    if (!ms_tensor_is_meta(tensor)) return 0;
    ms_tensor_set_grad(tensor, NULL);
    ms_lua_ok(L, ms_storage_refill(ms_tensor_storage(tensor), ms_engine_current(engine)));
    return 0;
}

/* core.tensor_version(t) -> a number that grows with each write of its memory */
static int tensor_version(lua_State *L)
{
    ms_lua_enter(L);
    lua_pushinteger(L, (lua_Integer)ms_tensor_version(ms_lua_tensor(L, 1)));
    return 1;
}

static const luaL_Reg functions[] = { { "initializer", initializer },
                                      { "note_initial", note_initial },
                                      { "initializer_draw", initializer_draw },
                                      { "moved_initializer", moved_initializer },
                                      { "initialize", initialize },
                                      { "take_memory", take_memory },
                                      { "tensor_version", tensor_version },
                                      { NULL, NULL } };

void ms_open_initial(lua_State *L, int runtime)
{
    ms_lua_register(L, runtime, functions);
    ms_lua_type(L, runtime, TYPE, NULL, NULL);
    lua_pop(L, 1);
}
