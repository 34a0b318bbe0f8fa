/* prefetch.h: what fsdp.c uses of prefetch.c. */
#ifndef MOONSHARD_BINDINGS_PREFETCH_H
#define MOONSHARD_BINDINGS_PREFETCH_H

#include "bindings/state.h"

#include "moonshard/fsdp.h"

/* The table's fields backward ("none", "pre" or "post"), forward and planner. */
void ms_lua_read_prefetch(lua_State *L, int table, ms_prefetch_mode *mode, bool *forward,
                          bool *planner);
/* Adds core.forecast, and the methods of sharded models, to the table on top. */
void ms_lua_open_forecast(lua_State *L, int runtime);
void ms_lua_add_prefetch(lua_State *L, int runtime);

#endif
