/* extension.h: functions in Lua around the gathers of a sharded model, for fsdp.c. */
#ifndef MOONSHARD_BINDINGS_EXTENSION_H
#define MOONSHARD_BINDINGS_EXTENSION_H

#include "bindings/state.h"

#include "moonshard/fsdp.h"

/* sharded:extend(before | nil, after | nil): f(tensor, unit, part) -> tensor, units and parts
 * counted from 0. The box at 1 keeps both. */
int ms_lua_extend(lua_State *L, ms_fsdp *fsdp);
/* Pushes a list of { name, shape, at, count }, where parameters are in this rank's shard of that
 * part, and the shard's length; returns 2. */
int ms_lua_push_spans(lua_State *L, const ms_fsdp *fsdp, uint32_t unit, uint32_t part);

#endif
