/* rates.h: the speeds of the simulated machine, as a Lua table. */
#ifndef MOONSHARD_BINDINGS_RATES_H
#define MOONSHARD_BINDINGS_RATES_H

#include "bindings/state.h"

/* The speeds of the simulated machine, from a table; raises and names the field that is wrong. */
void ms_lua_rates(lua_State *L, int index, ms_rates *out);

#endif
