/* reductions.h: the methods that reducers of ddp and sharded models of fsdp have in common: those
 * of the class ms.Reducer in lua/moonshard/parallel/overlap/gradient_source.lua. */
#ifndef MOONSHARD_BINDINGS_REDUCTIONS_H
#define MOONSHARD_BINDINGS_REDUCTIONS_H

#include "bindings/state.h"

#include "moonshard/hook.h"

#define MS_REDUCER_TYPE "ms.Reducer"
#define MS_FSDP_TYPE "ms.Sharded"

/* A userdata of MS_REDUCER_TYPE or MS_FSDP_TYPE. runtime tells its __gc whether the engine still
 * exists. User value 1: what keeps its callbacks alive; 2: the function of on_reduced. The user
 * values keep Lua functions alive: the engine holds numbers of them only (ms_callback). */
typedef struct ms_reductions_box {
    ms_gradient_source *source; /* of the reducer or model in `of`; NULL after unwrap */
    void *of;
    const char *gone; /* the message after unwrap */
    const ms_runtime *runtime;
} ms_reductions_box;

/* A new box on the stack, of that type, without an object. gone: static text. */
ms_reductions_box *ms_lua_new_reductions(lua_State *L, const char *type, const char *gone);
/* The box at 1, of either type. Raises after unwrap, whose object is gone. */
ms_reductions_box *ms_lua_reductions(lua_State *L);
/* Adds the methods to the table of methods on top of the stack. */
void ms_lua_add_reductions(lua_State *L, int runtime);

#endif
