/* outside.c: boxes of objects of C, and how the collector of Lua learns what they hold.
 *
 * The collector runs in proportion to Lua's own memory, of which a box takes a few bytes: a script
 * that drops data sets in a loop would fill the machine before it ran. So boxes tell how much they
 * hold, and a full collection comes before the next object is made where that has grown by half. A
 * collection may leave what the last rounds of a loop have dropped, since stack slots that are not
 * used any more still name it; with twice the memory as the bound, such loops took up to five times
 * what one round holds. The moments depend on the sizes alone, not on the collector's pace. */
#include "bindings/outside.h"

#include "bindings/enter.h"
#include "bindings/script.h"

/* Below this growth, and below the size of Lua's own heap, a collection costs more than what it can
 * give back is worth. */
#define OUTSIDE_LEAST ((uint64_t)3 << 20)

/* The object comes first: users have a pointer to it. */
typedef struct box {
    void *object;
    const void *shared; /* key of memory that other boxes may hold, too */
    uint64_t bytes;     /* that this box holds alone */
} box;

typedef struct ms_shared_memory {
    const void *key;
    uint64_t bytes;
    size_t boxes;
} shared_memory;

/* The runtime, also for metamethods that run while the state closes. */
static ms_runtime *runtime_of(lua_State *L) { return lua_touserdata(L, lua_upvalueindex(1)); }

/* Made before what it will own, so that an error in between leaks nothing. The one user value is
 * for whatever the box must keep alive. */
void **ms_lua_box(lua_State *L, const char *type)
{
    box *made = lua_newuserdatauv(L, sizeof *made, 1);
    *made = (box){ .object = NULL };
    luaL_setmetatable(L, type);
    return &made->object;
}

/* A box is empty after close(), or if making its contents has failed. */
void *ms_lua_unbox(lua_State *L, int index, const char *type)
{
    const box *of = luaL_checkudata(L, index, type);
    if (!of->object) ms_lua_error(L, "this %s was closed", type);
    return of->object;
}

/* Tensors are left to the fixed points, since `check` opens no files, and must come to the same
 * peak of them. */
void ms_lua_make_room(lua_State *L)
{
    ms_runtime *runtime = ms_lua_runtime(L);
    uint64_t after = runtime->memory.outside_after, least = after / 2;
    if (least < OUTSIDE_LEAST) least = OUTSIDE_LEAST;
    if (least < runtime->memory.heap_after) least = runtime->memory.heap_after;
    if (ms_grow(&runtime->context, (void **)&runtime->memory.shared,
                &runtime->memory.shared_capacity, runtime->memory.shared_count + 2,
                sizeof *runtime->memory.shared))
        luaL_error(L, "%s", runtime->context.error.message);
    if (runtime->memory.outside_bytes <= after + least) return;
    lua_gc(L, LUA_GCCOLLECT);
    runtime->memory.outside_after = runtime->memory.outside_bytes;
    runtime->memory.heap_after = ms_lua_heap(L);
}

void ms_lua_box_holds(lua_State *L, void **of, uint64_t bytes)
{
    ((box *)of)->bytes += bytes;
    runtime_of(L)->memory.outside_bytes += bytes;
}

/* NULL: no box holds it. There are few such objects at a time. */
static shared_memory *find_shared(const ms_runtime *runtime, const void *key)
{
    for (size_t i = runtime->memory.shared_count; i > 0; i--)
        if (runtime->memory.shared[i - 1].key == key) return &runtime->memory.shared[i - 1];
    return NULL;
}

void ms_lua_box_shares(lua_State *L, void **of, const void *key, uint64_t bytes)
{
    ms_runtime *runtime = runtime_of(L);
    shared_memory *shared = find_shared(runtime, key);
    if (!shared) {
        shared = &runtime->memory.shared[runtime->memory.shared_count++];
        *shared = (shared_memory){ .key = key, .bytes = bytes };
        runtime->memory.outside_bytes += bytes;
    }
    shared->boxes++;
    ((box *)of)->shared = key;
}

/* A state that closes has given up the list already. */
void ms_lua_box_empty(lua_State *L, void **of)
{
    ms_runtime *runtime = runtime_of(L);
    box *emptied = (box *)of;
    shared_memory *shared =
        emptied->shared && !runtime->closed ? find_shared(runtime, emptied->shared) : NULL;
    runtime->memory.outside_bytes -= emptied->bytes;
    if (shared && --shared->boxes == 0) {
        runtime->memory.outside_bytes -= shared->bytes;
        *shared = runtime->memory.shared[--runtime->memory.shared_count];
    }
    *emptied = (box){ .object = NULL };
}
