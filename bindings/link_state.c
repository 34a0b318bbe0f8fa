/* link_state.c: the state of links in Lua. What users call is
 * lua/moonshard/parallel/link_state.lua's. */
#include "bindings/link_state.h"

#include "bindings/arguments.h"
#include "bindings/bucket.h"
#include "bindings/call.h"
#include "bindings/enter.h"
#include "bindings/handles.h"
#include "bindings/runtime.h"
#include "bindings/script.h"

#define MS_LINK_STATE_TYPE "ms.LinkState"

/* A Lua link state. It holds one reference, which __gc marks for release. The reference is not
 * released in __gc: the state has tensors, and when their memory comes back must not depend on the
 * collector. runtime outlives the box; it is the last of the state's objects to be finalized. */
typedef struct state_box {
    ms_link_state *state;
    const ms_runtime *runtime;
} state_box;

/* The link state at that index; raises for any other value. A state has no closed form: clear()
 * drops its tensors and leaves it usable. */
ms_link_state *ms_lua_link_state(lua_State *L, int index)
{
    return ((state_box *)luaL_checkudata(L, index, MS_LINK_STATE_TYPE))->state;
}

/* core.link_state() -> state. Lua's hooks keep one for each link that has a state (error feedback,
 * PowerSGD, momentum), and save it with checkpoints. The box has its metatable before the engine
 * makes the state, so that __gc releases it whatever happens next. */
static int link_state(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    state_box *box = lua_newuserdatauv(L, sizeof *box, 0);
    *box = (state_box){ .runtime = ms_lua_runtime(L) };
    luaL_setmetatable(L, MS_LINK_STATE_TYPE);
    ms_lua_ok(L, ms_link_state_new(engine, &box->state));
    return 1;
}

/* The engine of a closed Lua state has freed it; others release it at their next sweep. Abandoning
 * only sets a mark, which a finalizer may do. ms_lua_collect sweeps. */
static int state_gc(lua_State *L)
{
    state_box *box = lua_touserdata(L, 1);
    if (box->state && !box->runtime->closed) ms_link_state_abandon(box->state);
    box->state = NULL;
    return 0;
}

/* The integers of the list at an index, `count` of them, in memory on top of the stack. The list
 * must have exactly one number for each parameter of the bucket; a missing one is nil and raises.
 */
static const int64_t *push_lengths(lua_State *L, int index, uint32_t count)
{
    luaL_checktype(L, index, LUA_TTABLE);
    int64_t *lengths = lua_newuserdatauv(L, count * sizeof *lengths, 0);
    for (uint32_t i = 0; i < count; i++) {
        lua_rawgeti(L, index, (lua_Integer)i + 1);
        lengths[i] = ms_lua_integer(L, -1, 0, INT64_MAX, "length");
        lua_pop(L, 1);
    }
    return lengths;
}

/* state:flat(bucket, name, lengths?) -> tensor, list of booleans: the numbers of that parameter are
 * new. lengths: how many numbers each parameter has in the state, unless it is as many as its
 * gradient. The tensor belongs to the state and lives on after the step, hence the handle is kept.
 * A link written in Lua is called again with the same state in the next iteration, perhaps for a
 * bucket with other parameters: the values follow the parameters. */
static int state_flat(lua_State *L)
{
    ms_lua_enter(L);
    ms_link_state *state = ms_lua_link_state(L, 1);
    ms_bucket *bucket = ms_lua_bucket(L, 2);
    const char *name = luaL_checkstring(L, 3);
    const int64_t *lengths = NULL;
    lua_settop(L, 4);
    bool *fresh = lua_newuserdatauv(L, bucket->count * sizeof *fresh, 0);
    if (!lua_isnil(L, 4)) lengths = push_lengths(L, 4, bucket->count);
    ms_handle *handle = ms_lua_new_handle(L);
    lua_createtable(L, (int)bucket->count, 0);
    ms_tensor *tensor = NULL;
    ms_lua_ok(L, ms_link_state_tensor(state, bucket, name, lengths, fresh, &tensor));
    ms_handle_fill(handle, tensor);
    ms_handle_keep(handle);
    for (uint32_t i = 0; i < bucket->count; i++) {
        lua_pushboolean(L, fresh[i]);
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    return 2;
}

/* state:shared(name, length) -> tensor that belongs to no parameter. It is made of zeros at the
 * first call, also for a reader: overlap.lua reads "bad", which nan_check writes. It belongs to the
 * state, hence it is kept, as in state_flat. */
static int state_shared(lua_State *L)
{
    ms_lua_enter(L);
    ms_link_state *state = ms_lua_link_state(L, 1);
    ms_tensor *tensor = NULL;
    ms_handle *handle = ms_lua_new_handle(L);
    ms_lua_ok(L, ms_link_state_shared(state, luaL_checkstring(L, 2),
                                      ms_lua_integer(L, 3, 1, INT64_MAX, "length"), NULL, &tensor));
    ms_handle_fill(handle, tensor);
    ms_handle_keep(handle);
    return 1;
}

/* state:pieces() -> list of { name, parameter, tensor, parallel }. For checkpoints: in a fixed
 * order, so that all ranks and all runs write the same file. The tensors are views of the state's
 * own memory; the list is read before the next iteration writes it. */
static int state_pieces(lua_State *L)
{
    ms_lua_enter(L);
    ms_link_state *state = ms_lua_link_state(L, 1);
    uint32_t count = ms_link_state_pieces(state);
    lua_createtable(L, (int)count, 0);
    for (uint32_t i = 0; i < count; i++) {
        ms_link_piece piece = { .name = NULL };
        lua_createtable(L, 4, 0);
        ms_handle *handle = ms_lua_new_handle(L);
        ms_lua_ok(L, ms_link_state_piece(state, i, &piece));
        ms_handle_fill(handle, piece.tensor);
        ms_handle_keep(handle);
        lua_rawseti(L, -2, 3);
        lua_pushstring(L, piece.name);
        lua_rawseti(L, -2, 1);
        lua_pushstring(L, piece.parameter);
        lua_rawseti(L, -2, 2);
        lua_pushboolean(L, piece.parallel);
        lua_rawseti(L, -2, 4);
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    return 1;
}

/* state:put(name, parameter, tensor): adds a copy of the tensor, for the first parameter of that
 * name that asks for it. Loading calls clear() first and then this for each piece. Buckets need not
 * exist yet: the values wait in the state. */
static int state_put(lua_State *L)
{
    ms_lua_enter(L);
    ms_lua_ok(L, ms_link_state_put(ms_lua_link_state(L, 1), luaL_checkstring(L, 2),
                                   luaL_checkstring(L, 3), ms_lua_tensor(L, 4)));
    return 0;
}

/* state:clear(): drops all values and the count of iterations */
static int state_clear(lua_State *L)
{
    ms_lua_enter(L);
    ms_link_state_clear(ms_lua_link_state(L, 1));
    return 0;
}

/* state:iteration(number?) -> the count of iterations before it is set. Native links count by
 * themselves; links in Lua, and the loading of checkpoints, set it. */
static int state_iteration(lua_State *L)
{
    ms_link_state *state = ms_lua_link_state(L, 1);
    lua_pushinteger(L, ms_link_state_iteration(state));
    if (!lua_isnoneornil(L, 2))
        ms_link_state_set_iteration(state, ms_lua_integer(L, 2, 0, INT64_MAX, "iteration"));
    return 1;
}

/* state:compression() -> how many numbers the link was given, how many were sent for them. It needs
 * no engine call and enqueues nothing, so reports may ask at any time. */
static int state_compression(lua_State *L)
{
    ms_link_compression c = ms_link_state_compression(ms_lua_link_state(L, 1));
    lua_pushinteger(L, (lua_Integer)c.before);
    lua_pushinteger(L, (lua_Integer)c.after);
    return 2;
}

void ms_open_link_state(lua_State *L, int runtime)
{
    static const luaL_Reg functions[] = { { "link_state", link_state }, { NULL, NULL } };
    static const luaL_Reg methods[] = {
        { "flat", state_flat },
        { "shared", state_shared },
        { "pieces", state_pieces },
        { "put", state_put },
        { "clear", state_clear },
        { "iteration", state_iteration },
        { "compression", state_compression },
        { NULL, NULL },
    };
    static const luaL_Reg events[] = { { "__gc", state_gc }, { NULL, NULL } };
    ms_lua_register(L, runtime, functions);
    ms_lua_type(L, runtime, MS_LINK_STATE_TYPE, events, methods);
    lua_pop(L, 1);
}
