/* handles.c: handles of tensors, and how long they live. */
#include "bindings/handles.h"

#include <string.h>

#include "bindings/script.h"

/* Releases the dropped tensors of that step (0: of any) that were made after `begin` and up to
 * `end`. The others stay in their order. The list is compacted in place: a release runs no Lua
 * code, so nothing is added to the list meanwhile. */
void ms_handles_release_dropped(ms_runtime *runtime, uint64_t step, uint64_t begin, uint64_t end)
{
    size_t kept = 0;
    for (size_t i = 0; i < runtime->alive.dropped_count; i++) {
        ms_dropped dropped = runtime->alive.dropped[i];
        if ((step == 0 || dropped.step == step) && dropped.order > begin && dropped.order <= end)
            ms_tensor_release(dropped.tensor);
        else runtime->alive.dropped[kept++] = dropped;
    }
    runtime->alive.dropped_count = kept;
}

/* A handle that is kept, or was never filled, is in no list; both pointers are NULL then. */
static void unlink_handle(ms_handle *handle)
{
    ms_runtime *runtime = handle->runtime;
    ms_handle **first = handle->spent ? &runtime->alive.spent : &runtime->alive.latest;
    if (handle->previous) handle->previous->next = handle->next;
    else if (*first == handle) *first = handle->next;
    if (handle->next) handle->next->previous = handle->previous;
    handle->previous = handle->next = NULL;
    handle->spent = false;
}

/* The tensor goes to the list of dropped ones; the handle tells later users why. A kept tensor gets
 * step 0, so no step's end releases it early. The value of a future that was taken in this step
 * goes with this step, as it would without the collector. */
static void drop_later(ms_handle *handle)
{
    ms_runtime *runtime = handle->runtime;
    if (!handle->tensor) return;
    bool spent = handle->spent;
    unlink_handle(handle);
    /* There is room for every handle that lives: ms_lua_new_handle made it. */
    runtime->alive.dropped[runtime->alive.dropped_count++] =
        (ms_dropped){ .tensor = handle->tensor,
                      .step = spent                          ? runtime->steps.serial
                              : handle->kept || handle->held ? 0
                                                             : handle->step,
                      .order = handle->order };
    handle->tensor = NULL;
    handle->gone = "was closed";
}

/* __close: handle at 1. A tensor that is closed goes the way of a finalized one. A finalizer must
 * not close tensors: the moment would depend on the collector. */
static int handle_close(lua_State *L)
{
    ms_handle *handle = lua_touserdata(L, 1);
    if (handle && handle->magic == MS_HANDLE_MAGIC && !ms_lua_in_finalizer(L)) drop_later(handle);
    return 0;
}

/* __gc: neither releases nor allocates. ms_lua_new_handle has made room in the list for every
 * handle that lives. */
static int handle_gc(lua_State *L)
{
    ms_handle *handle = lua_touserdata(L, 1);
    if (!handle || handle->magic != MS_HANDLE_MAGIC) return 0;
    drop_later(handle);
    handle->magic = 0;
    handle->runtime->alive.count--;
    return 0;
}

/* Pushes the handle. It may raise, so it is called before the engine makes the tensor;
 * ms_handle_fill cannot fail. */
ms_handle *ms_lua_new_handle(lua_State *L)
{
    ms_runtime *runtime = ms_lua_runtime(L);
    /* Room for every live handle and this one: finalizers must not allocate. */
    if (ms_grow(&runtime->context, (void **)&runtime->alive.dropped,
                &runtime->alive.dropped_capacity,
                runtime->alive.dropped_count + runtime->alive.count + 1,
                sizeof *runtime->alive.dropped))
        luaL_error(L, "%s", runtime->context.error.message);
    ms_handle *handle = lua_newuserdatauv(L, sizeof *handle, 1);
    memset(handle, 0, sizeof *handle);
    handle->magic = MS_HANDLE_MAGIC;
    handle->runtime = runtime;
    /* What a script would read if an error left it in a table. */
    handle->gone = "was never filled";
    runtime->alive.count++;
    luaL_setmetatable(L, MS_TENSOR_TYPE);
    return handle;
}

/* The latest handle comes first in the list, so that the end of a step finds its handles in front.
 */
void ms_handle_fill(ms_handle *handle, ms_tensor *owned)
{
    ms_runtime *runtime = handle->runtime;
    handle->tensor = owned;
    handle->gone = NULL;
    handle->step = runtime->steps.serial;
    handle->script = ms_engine_script(runtime->engine);
    handle->order = ++runtime->alive.orders;
    handle->next = runtime->alive.latest;
    if (handle->next) handle->next->previous = handle;
    runtime->alive.latest = handle;
}

/* From now on the handle does not end with a step. */
static void note_lasting(const ms_handle *handle)
{
    if (!handle->kept && (!handle->held || handle->spent)) handle->runtime->alive.lasting++;
}

/* It leaves the list of handles that end with their step; whoever keeps it releases it, or the
 * collector does. */
void ms_handle_keep(ms_handle *handle)
{
    note_lasting(handle);
    unlink_handle(handle);
    handle->kept = true;
}

/* What was made outside of a step lives on by itself. */
void ms_handle_hold(ms_handle *handle)
{
    if (handle->kept || handle->step == 0) return;
    note_lasting(handle);
    unlink_handle(handle);
    handle->held = true;
}

/* Outside of a step nothing ends by itself. */
void ms_handle_spend(ms_handle *handle)
{
    ms_runtime *runtime = handle->runtime;
    if (!handle->tensor || !handle->held || handle->kept || handle->spent || !runtime->steps.serial)
        return;
    handle->next = runtime->alive.spent;
    if (handle->next) handle->next->previous = handle;
    runtime->alive.spent = handle;
    handle->spent = true;
    if (runtime->alive.lasting > 0) runtime->alive.lasting--;
}

/* The handle is empty before the tensor is released, because a release may free callbacks. */
void ms_handle_drop(ms_handle *handle, const char *why)
{
    if (!handle->tensor) return;
    unlink_handle(handle);
    ms_tensor *tensor = handle->tensor;
    handle->tensor = NULL;
    handle->gone = why;
    ms_tensor_release(tensor);
}

/* A number to compare with: handles that are made later have higher ones. */
uint64_t ms_handle_count(const ms_runtime *runtime) { return runtime->alive.orders; }

/* Handles are in the order in which they were made, the latest first, so the walk ends at the first
 * one that is older than `begin`. */
void ms_handles_drop(ms_runtime *runtime, uint64_t begin, uint64_t end, const char *why)
{
    ms_handle *handle = runtime->alive.latest;
    while (handle && handle->order > begin) {
        ms_handle *next = handle->next;
        if (handle->order <= end) ms_handle_drop(handle, why);
        handle = next;
    }
    ms_handles_release_dropped(runtime, 0, begin, end);
}

/* The list of spent handles is in the order in which values were taken. */
void ms_handles_drop_spent(ms_runtime *runtime, uint64_t begin, uint64_t end, const char *why)
{
    ms_handle *handle = runtime->alive.spent;
    while (handle) {
        ms_handle *next = handle->next;
        if (handle->order > begin && handle->order <= end) ms_handle_drop(handle, why);
        handle = next;
    }
}

/* Their __gc needs no upvalue; it must work while the state closes. */
void ms_open_handles(lua_State *L)
{
    luaL_newmetatable(L, MS_TENSOR_TYPE);
    lua_pushcfunction(L, handle_gc);
    lua_setfield(L, -2, "__gc");
    lua_pushcfunction(L, handle_close);
    lua_setfield(L, -2, "__close");
    lua_pop(L, 1);
}
