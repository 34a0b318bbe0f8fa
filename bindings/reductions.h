/* reductions.h: the methods that reducers of ddp and sharded models of fsdp have in common: those
 * of the class ms.Reducer in lua/moonshard/parallel/overlap/gradient_source.lua. */
#ifndef MOONSHARD_BINDINGS_REDUCTIONS_H
#define MOONSHARD_BINDINGS_REDUCTIONS_H

#include "bindings/state.h"

#include "moonshard/hook.h"

#define MS_REDUCER_TYPE "ms.Reducer"
#define MS_FSDP_TYPE "ms.Sharded"

/* What reduces gradients by buckets. `of` is the object of a box. */
typedef struct ms_reductions {
    const char *gone; /* the message after unwrap */
    uint32_t (*buckets)(const void *of);
    const ms_bucket *(*bucket)(const void *of, uint32_t index);
    uint64_t (*passes)(const void *of); /* that were reduced */
    /* How often buckets were made, and how many passes were reduced since. */
    uint64_t (*layout)(const void *of, uint64_t *passes);
    bool (*is_rebuilt)(const void *of);
    bool (*is_used)(const void *of, uint32_t position, bool *known);
    const char *(*error)(const void *of);
    ms_pass_stats (*stats)(void *of);
    uint32_t (*links)(const void *of);
    ms_link_stats (*link_stats)(const void *of, uint32_t link);
    bool (*bucket_times)(const void *of, uint32_t index, ms_bucket_times *out);
    ms_status (*await_times)(void *of);
    ms_status (*step_end)(void *of);
    void (*set_on_reduced)(void *of, ms_reduced_function f, void *user, void (*free)(void *user));
} ms_reductions;

/* A userdata of MS_REDUCER_TYPE or MS_FSDP_TYPE. runtime tells its __gc whether the engine still
 * exists. User value 1: what keeps its callbacks alive; 2: the function of on_reduced. The user
 * values keep Lua functions alive: the engine holds numbers of them only (ms_callback). */
typedef struct ms_reductions_box {
    void *of; /* NULL after unwrap */
    const ms_reductions *calls;
    const ms_runtime *runtime;
} ms_reductions_box;

/* A new box on the stack, of that type, without an object. */
ms_reductions_box *ms_lua_new_reductions(lua_State *L, const char *type,
                                         const ms_reductions *calls);
/* The box at 1, of either type. Raises after unwrap, whose object is gone. */
ms_reductions_box *ms_lua_reductions(lua_State *L);
/* Adds the methods to the table of methods on top of the stack. */
void ms_lua_add_reductions(lua_State *L, int runtime);

#endif
