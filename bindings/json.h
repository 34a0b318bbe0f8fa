/* json.h: values of Lua as JSON text and back, by jansson, because integers must stay integers. */
#ifndef MOONSHARD_BINDINGS_JSON_H
#define MOONSHARD_BINDINGS_JSON_H

#include "bindings/state.h"

void ms_open_json(lua_State *L, int runtime);

#endif
