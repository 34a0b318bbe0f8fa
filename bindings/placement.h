/* placement.h: which GPU a rank computes on, and which cores its host threads keep to. All before
 * the engine opens, but for tell. */
#ifndef MOONSHARD_BINDINGS_PLACEMENT_H
#define MOONSHARD_BINDINGS_PLACEMENT_H

#include "bindings/state.h"

/* Chooses the GPU; raises if more ranks than GPUs compute and the user has not allowed it. */
void ms_lua_choose_gpu(lua_State *L, ms_runtime *runtime);
/* Whether all ranks of the job are threads on one GPU. */
bool ms_lua_shares_one_gpu(const ms_runtime *runtime);
/* The host threads keep to the cores beside the GPU, if that was asked for. Returns the NUMA node,
 * or -1; *cores: those of this rank. */
int32_t ms_lua_go_near_gpu(ms_runtime *runtime, uint32_t threads, ms_cores *cores);
/* Logs what was chosen. node and cores: of ms_lua_go_near_gpu. */
void ms_lua_tell_placement(const ms_runtime *runtime, ms_engine *engine, int32_t node,
                           const ms_cores *cores);

#endif
