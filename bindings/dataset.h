/* dataset.h: data sets and loaders in Lua. */
#ifndef MOONSHARD_BINDINGS_DATASET_H
#define MOONSHARD_BINDINGS_DATASET_H

#include "bindings/io.h"
#include "bindings/state.h"

/* Element i of data of an integer dtype other than bool. */
int64_t ms_lua_token_at(ms_dtype dtype, const void *data, size_t i);

void ms_open_dataset(lua_State *L, int runtime);

#endif
