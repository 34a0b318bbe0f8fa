/* module.h: opens the module moonshard.core. */
#ifndef MOONSHARD_BINDINGS_MODULE_H
#define MOONSHARD_BINDINGS_MODULE_H

#include "bindings/state.h"

/* The module's open function, for package.preload and require "moonshard.core". */
int luaopen_moonshard_core(lua_State *L);

#endif
